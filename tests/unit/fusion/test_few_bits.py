"""Integers of a byte in products: which are cast to it, their units, and their values."""

from __future__ import annotations

import numpy as np
import pytest

import roller_svc
from roller_svc import hardware
from roller_svc.analysis.operand import value_dtype
from roller_svc.analysis.sum_of_products import sum_of_products
from roller_svc.compiler.plans import rank_best_partition
from roller_svc.frontend.parse import parse
from roller_svc.fusion.few_bits import state_bytes
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram, TensorType
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate

FIELD = "bitwise_and(q[k // 8, n] >> k % 8 * 4, 15)"
SCALED = f"y[m, n] +=! x[m, k].cast(float32) * (({FIELD} - 8).cast(float32) * s[k // 32, n]) where k in {{k}}"
OFFSET = f"y[m, n] +=! x[m, k].cast(float32) * ({FIELD} - bitwise_and(z[n] >> 4, 15)).cast(float32) where k in {{k}}"
INTEGERS = f"y[m, n] +=! x[m, k].cast(int32) * ({FIELD} - 8) where k in {{k}}"


def program(text: str, x: str = "float16", m: int = 16, n: int = 32, k: int = 64) -> TensorProgram:
    shapes = {
        "x": (x, (m, k)),
        "q": ("int32", (k // 8, n)),
        "s": ("float32", (k // 32, n)),
        "z": ("int32", (n,)),
        "b": ("int8", (n,)),
    }
    inputs = {name: TensorType(DType(dtype), shape) for name, (dtype, shape) in shapes.items() if f"{name}[" in text}
    return parse(text.format(k=k), inputs)


@pytest.mark.parametrize(
    ("integer", "dtype"),
    [
        (f"({FIELD} - 8)", DType.INT8),
        (f"({FIELD} - bitwise_and(z[n] >> 4, 15))", DType.INT8),
        ("(bitwise_and(q[k // 8, n], 255) - 128)", DType.INT8),
        ("bitwise_and(q[k // 8, n], 255)", DType.UINT8),
        ("min(max(q[k // 8, n], -128), 127)", DType.INT8),
        ("bitwise_and(q[k // 8, n], 511)", DType.FLOAT32),  # nine bits
        (f"({FIELD} - b[n].cast(int32))", DType.FLOAT32),  # -112 ... 143
        (f"(({FIELD}).cast(uint32) - 8).cast(int32)", DType.FLOAT32),  # wraps below zero
        (f"({FIELD} * z[n])", DType.FLOAT32),
        ("q[k // 8, n]", DType.FLOAT32),
    ],
)
def test_integers_of_a_byte_are_cast_to_it(integer: str, dtype: DType) -> None:
    compute = program(f"y[m, n] +=! x[m, k].cast(float32) * {integer}.cast(float32) where k in {{k}}")
    (statement,) = compute.statements
    form = sum_of_products(state_bytes(statement))
    assert form is not None
    assert {value_dtype(factor) for factor in form.factors} == {DType.FLOAT16, dtype}
    assert (state_bytes(statement) == statement) is (dtype is DType.FLOAT32)
    arrays = random_inputs(compute, seed=1)
    changed = TensorProgram(compute.inputs, (state_bytes(statement),), compute.outputs)
    np.testing.assert_array_equal(evaluate(changed, arrays)["y"].wide, evaluate(compute, arrays)["y"].wide)


def test_sums_that_are_no_products_stay() -> None:
    (statement,) = program(f"y[n] +=! {FIELD}.cast(float32) where k in {{k}}").statements
    assert state_bytes(statement) is statement


@pytest.mark.parametrize(("text", "x"), [(SCALED, "float16"), (OFFSET, "float16"), (OFFSET, "bfloat16"), (INTEGERS, "int8")])
@pytest.mark.parametrize("target", ["nvidia-h200-sxm", "nvidia-a100-sxm-80gb", "amd-mi250x"])
def test_matrix_units_multiply_them(text: str, x: str, target: str) -> None:
    best = rank_best_partition(program(text, x, 512, 1024, 1024), hardware.load(target), 1)
    assert any(candidates[0].program.unit.is_matrix for candidates in best.candidates)


@pytest.mark.slow
@pytest.mark.emulator
@pytest.mark.parametrize("target", ["nvidia-a100-sxm-80gb", "amd-mi250x"])
@pytest.mark.parametrize(("text", "x"), [(SCALED, "float16"), (OFFSET, "bfloat16"), (INTEGERS, "int8")])
def test_kernels_have_the_values_of_the_statement(text: str, x: str, target: str) -> None:
    compute = program(text, x)
    types = {name: (type_.dtype.value, type_.shape) for name, type_ in compute.inputs}
    kernel = roller_svc.compile(text.format(k=64), types, target=target, family="mma", select="model", top_k=1, runtime="emulator")
    arrays = random_inputs(compute, seed=2)
    assert agrees(compute, kernel.run(arrays), evaluate(compute, arrays)).ok
