"""TVM's kernels for programs: right, or refused with a reason. Without TVM only its absence is tested."""

from __future__ import annotations

import sys
from functools import partial
from importlib.util import find_spec

import numpy as np
import pytest

from roller_bench.baselines import BaselineLibrary, library_of
from roller_svc.errors import ArgumentError, BuildError
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from tests.unit.bench.test_baselines import CASES

needs_tvm = pytest.mark.skipif(find_spec("tvm") is None, reason="TVM is not installed: pip install 'roller-svc[tvm]'")

Types = dict[str, TensorType]


def _floats(**shapes: tuple[int, ...]) -> Types:
    return {name: TensorType(DType.FLOAT32, shape) for name, shape in shapes.items()}


def _tvm() -> BaselineLibrary:
    return library_of("tvm", 1)


def _results(text: str, types: Types) -> str:
    """What the peer calls; finding it checks its results against the reference."""
    program = parse(text, types, None)
    arrays = random_inputs(program, 0)
    baseline = _tvm().find(program, arrays, evaluate(program, arrays))
    baseline.run()
    return ", ".join(baseline.calls)


def _case(name: str) -> tuple[str, Types]:
    text, shapes, _ = CASES[name]
    return text, {n: TensorType(DType.INT32 if n == "i0" else DType.FLOAT32, s) for n, s in shapes.items()}


@pytest.mark.slow
@needs_tvm
@pytest.mark.parametrize("name", CASES)
def test_what_numpy_and_torch_have_tvm_has(name: str) -> None:
    text, types = _case(name)
    program = parse(text, types, None)
    if any(statement.kind.value == "scatter" for statement in program.statements):
        with pytest.raises(BuildError, match="no scatter"):
            _results(text, types)
    else:
        assert _results(text, types)


FUNCTIONS = (
    "exp", "exp2", "log1p", "sqrt", "rsqrt", "reciprocal", "square", "abs", "sign", "sin", "cos", "tan", "atan", "sinh",
    "cosh", "tanh", "asinh", "erf", "normcdf", "sigmoid", "silu", "gelu", "relu", "softplus", "floor", "ceil", "rfloor",
    "rceil", "round", "trunc", "isnan", "isinf", "log", "log2", "log10", "asin", "acos", "acosh", "atanh",
)  # fmt: skip


@needs_tvm
@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_of_one_argument(name: str) -> None:
    _results(f"Y[i] = X[i].call(`{name}`)", _floats(X=(64,)))


@needs_tvm
@pytest.mark.parametrize("name", ["max", "min", "fmax", "fmin", "pow", "atan2", "hypot"])
def test_functions_of_two_arguments(name: str) -> None:
    _results(f"Y[i] = X[i].call(`{name}`, [Z[i]])", _floats(X=(64,), Z=(64,)))


@needs_tvm
@pytest.mark.parametrize("name", ["expm1", "remainder", "fmod"])
def test_a_function_that_tvm_has_not_is_refused(name: str) -> None:
    arguments = "" if name == "expm1" else ", [Z[i]]"
    with pytest.raises(BuildError, match=f"TVM has no {name}") as refusal:
        _results(f"Y[i] = X[i].call(`{name}`{arguments})", _floats(X=(8,), Z=(8,)))
    assert refusal.value.code == "no-peer"


@needs_tvm
@pytest.mark.parametrize(
    "text",
    [
        "Y[i] = X[i] // Z[i]",
        "Y[i] = X[i] % Z[i]",
        "Y[i] = X[i].call(`trunc_div`, [Z[i]])",
        "Y[i] = X[i].call(`bitwise_and`, [Z[i]]) << 2",
        "Y[i] = X[i] * 1.5",
        "Y[i] = X[i].when([X[i] > Z[i]], -Z[i])",
        "Y[i] = ((X[i] > 0) & (Z[i] != 3)).cast(`float32`)",
        "Y[0] +=! X[i]",
        "Y[0] *=! X[i] % 3",
        "Y[0] <=! X[i]",
        "Y[i] = X[i // 4 * 4 + 3 - i % 4] where i in 32",
        "Y[i] = X[i].cast(`int64`) * Z[i]",
    ],
)
def test_integers(text: str) -> None:
    _results(text, {name: TensorType(DType.INT32, (32,)) for name in ("X", "Z")})


@needs_tvm
@pytest.mark.parametrize("dtype", [DType.FLOAT64, DType.FLOAT16, DType.BFLOAT16, DType.INT8, DType.UINT8, DType.INT64])
def test_element_types(dtype: DType) -> None:
    types = {"A": TensorType(dtype, (6, 32)), "B": TensorType(dtype, (32, 16))}
    _results("C[m, n] +=! A[m, k] * B[k, n]; D[m, n] = C[m, n] * C[m, n]", types)


@needs_tvm
def test_float8_is_refused() -> None:
    with pytest.raises(BuildError, match="float8_e4m3fn is not translated"):
        _results("Y[i] = X[i] * 2.0", {"X": TensorType(DType.FLOAT8_E4M3FN, (8,))})


@needs_tvm
@pytest.mark.parametrize("columns", [16, 20, 32, 35, 96])
def test_sums_of_any_width(columns: int) -> None:
    """Widths that whole vectors, quarters of one, and none divide."""
    _results("C[m, n] +=! A[m, k] * B[k, n]", _floats(A=(6, 40), B=(40, columns)))


@needs_tvm
def test_guards_keep_loads_inside() -> None:
    _results("Y[i] = X[i - 3].when([i >= 3, i - 3 < 8], 0.0) where i in 16", _floats(X=(8,)))


@needs_tvm
def test_a_wrong_result_is_not_taken() -> None:
    program = parse("Y[i] = X[i] + 1.0", _floats(X=(8,)), None)
    with pytest.raises(BuildError, match="WrongAnswerError: as stated: Y"):
        _tvm().find(program, random_inputs(program, 0), evaluate(program, random_inputs(program, 1)))


@needs_tvm
def test_every_run_writes_the_peers_own_arrays() -> None:
    program = parse("Y[i] = X[i] * 2.0", _floats(X=(64,)), None)
    arrays = random_inputs(program, 0)
    kept = arrays["X"].copy()
    baseline = _tvm().find(program, arrays, evaluate(program, arrays))
    arrays["X"][...] = 0
    baseline.run()
    assert isinstance(baseline.run, partial)
    assert np.array_equal(baseline.run.args[-1].numpy(), kept * 2)


def test_tvm_that_is_not_installed_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tvm", None)
    monkeypatch.delitem(sys.modules, "roller_bench.baselines.tvm_library", raising=False)
    with pytest.raises(ArgumentError, match="tvm is not installed"):
        library_of("tvm", 1)
