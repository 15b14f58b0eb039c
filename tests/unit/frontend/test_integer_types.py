"""Every operator on every pair of integer types, against Python's integers: interpreter, C, CUDA and HIP text."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from integer_rules import BINARY, ORDER, apply, pairs, result_type, text

from roller_svc.api import compile
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType
from roller_svc.semantics.interpreter import reference

Arrays = Mapping[str, np.ndarray[Any, Any]]
Run = Callable[[str, Arrays], Arrays]
PAIRS = [(a, b) for a in ORDER for b in ORDER]
# Of each kind one, for the texts of compilers: signs differ at one width, below 64 bits, and with uint64 on both sides.
TELLING = [("uint32", "int32"), ("int8", "uint16"), ("uint64", "int64"), ("int32", "uint64"), ("uint8", "uint8")]


def interpret(expression: str, arrays: Arrays) -> Arrays:
    types = {name: TensorType(DType(str(array.dtype)), array.shape) for name, array in arrays.items()}
    return reference(parse(expression, types), dict(arrays))


def build(expression: str, arrays: Arrays, target: str) -> Arrays:
    types = {name: (str(array.dtype), array.shape) for name, array in arrays.items()}
    runtime = "auto" if target == "local" else "emulator"
    return compile(expression, types, target=target, top_k=1, select="model", runtime=runtime)(**arrays)


def check(a: str, b: str, run: Run) -> None:
    """Check all operators on all pairs of edges of two types, and that max(x, y) is x where x > y."""
    first, second = pairs(a, b)
    arrays = {"a": np.array(first, a), "b": np.array(second, b)}
    names = {sign: f"r{i}" for i, sign in enumerate(BINARY)}
    found = run("; ".join(f"{name}[i] = {text(sign, 'a[i]', 'b[i]')}" for sign, name in names.items()), arrays)
    for sign, name in names.items():
        assert found[name].dtype == result_type(sign, a, b), sign
        expected = [apply(sign, x, a, y, b) for x, y in zip(first, second, strict=True)]
        wrong = [
            (x, y, got, value)
            for x, y, got, value in zip(first, second, found[name].tolist(), expected, strict=True)
            if got != value
        ]
        assert not wrong, f"{a} {sign} {b}: x, y, got, expected: {wrong[:3]}"


@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_operators_on_pairs_of_types(a: str, b: str) -> None:
    check(a, b, interpret)


@pytest.mark.slow
@pytest.mark.parametrize(("a", "b"), TELLING)
def test_compiled_operators(a: str, b: str) -> None:
    check(a, b, lambda expression, arrays: build(expression, arrays, "local"))


@pytest.mark.slow
@pytest.mark.parametrize(("a", "b"), PAIRS)
def test_compiled_operators_on_all_pairs(a: str, b: str) -> None:
    check(a, b, lambda expression, arrays: build(expression, arrays, "local"))


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "amd-mi250x"])
@pytest.mark.parametrize(("a", "b"), PAIRS[::5])  # each type is first and second in them
def test_emulated_operators_on_pairs(a: str, b: str, target: str) -> None:
    check(a, b, lambda expression, arrays: build(expression, arrays, target))
