"""Random maps of mixed types: what vectors compute agrees with the reference interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import roller_svc
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

INPUTS = {"a": "float32", "b": "float16", "c": "int32", "d": "uint8", "e": "float64", "f": "bfloat16", "g": "int64"}
PLACES = ("n", "{size} - 1 - n", "n // 2", "n // 3", "(n * 2) % {size}", "0")
FUNCTIONS = ("exp", "tanh", "abs", "sigmoid", "relu", "erf", "floor", "log1p")


@st.composite
def loads(draw: st.DrawFn, size: int) -> str:
    name, place = draw(st.sampled_from(sorted(INPUTS))), draw(st.sampled_from(PLACES)).format(size=size)
    if draw(st.integers(0, 3)) == 0:
        step = draw(st.integers(1, 4))
        return f"{name}[n - {step}].when([n >= {step}], 1)"
    return f"{name}[{place}]"


@st.composite
def values(draw: st.DrawFn, size: int, depth: int = 3) -> str:
    kind = draw(st.integers(0, 7)) if depth else 0
    if kind <= 1:
        return draw(loads(size))
    x = draw(values(size, depth - 1))
    if kind == 2:
        return f"({x}).cast(`{draw(st.sampled_from(['float32', 'float64', 'float16', 'int32', 'int8', 'bfloat16']))}`)"
    if kind == 3:
        return f"({x}).cast(`float32`).call(`{draw(st.sampled_from(FUNCTIONS))}`)"
    y = draw(values(size, depth - 1))
    if kind == 4:
        return f"({x}).when([{draw(loads(size))} {draw(st.sampled_from(['<', '>=', '==', '!=']))} {y}], {y})"
    if kind == 5:
        return f"{draw(st.sampled_from(['max', 'min']))}({x}, {y})"
    return f"({x} {draw(st.sampled_from(['+', '-', '*']))} {y})"


@st.composite
def maps(draw: st.DrawFn) -> tuple[str, int]:
    size = draw(st.sampled_from([5, 17, 33, 64, 100, 131]))
    return f"y[n] = {draw(values(size))} where n in {size}", size


def check(case: tuple[str, int], target: str) -> None:
    expression, size = case
    types = {name: TensorType(DType(dtype), (size,)) for name, dtype in INPUTS.items() if f"{name}[" in expression}
    program = parse(expression, types)
    arrays = random_inputs(program, seed=2)
    signature = {name: (t.dtype.value, t.shape) for name, t in types.items()}
    kernel = roller_svc.compile(expression, signature, select="model", top_k=1, target=target)
    with np.errstate(all="ignore"):
        verdict = agrees(program, kernel(**arrays), evaluate(program, arrays))
    assert verdict.ok, f"{expression}: {verdict}\n{kernel.source}"


@pytest.mark.slow
@given(maps(), st.sampled_from(["local", "cpu-x86-avx2"]))
@settings(max_examples=15)
def test_random_maps_agree_with_the_reference(case: tuple[str, int], target: str) -> None:
    check(case, target)


@pytest.mark.slow
@given(maps(), st.sampled_from(["local", "cpu-x86-avx2"]))
@settings(max_examples=200)
def test_many_random_maps_agree_with_the_reference(case: tuple[str, int], target: str) -> None:
    check(case, target)
