"""Loads of adjacent lanes from one vector of memory, and quotients by constants, against the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

import roller_svc
from roller_svc.codegen.c.vector.window_loads import find_growth, find_quotient
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Op, OpKind
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import TensorType
from roller_svc.semantics.interpreter import evaluate

INDICES = (
    "(n * 27) // 223", "min(max((n - 4) // 8, 0), 27)", "min(max((n - 4) // 8 + 1, 0), 27)",
    "min((n * 2 + 1) // 3, 27)",
    "min(n // 2 + n // 3, 27)", "max(27 - n // 8, 0)", "(n * 5) % 28", "min(n * 2, 27)",
)  # fmt: skip


@pytest.mark.parametrize("target", ["local", "cpu-x86-avx2"])
@pytest.mark.parametrize("dtype", ["float32", "int32", "float16"])
@pytest.mark.parametrize("width", [37, 224])
def test_neighbours_have_the_values_of_the_interpreter(width: int, dtype: str, target: str) -> None:
    statements = [
        f"y{i}[c, m, n] = x[c, min(m // 2, 27), {index}] where c in 3, m in 57, n in {width}" for i, index in enumerate(INDICES)
    ]
    kernel_source = "; ".join(statements)
    shape = (3, 28, 28)
    x = np.random.default_rng(0).integers(-99, 99, shape).astype(dtype)
    expected = evaluate(parse(kernel_source, {"x": TensorType(DType(dtype), shape)}), {"x": x})
    kernel = roller_svc.compile(kernel_source, inputs={"x": (dtype, shape)}, target=target, select="model")
    for name, value in kernel.run({"x": x}).items():
        assert np.array_equal(value, expected[name].wide), name


@pytest.mark.parametrize("size", [1, 7, 8, 15, 16, 17])
def test_small_tensors_are_not_read_beyond_their_end(size: int) -> None:
    source = f"y[n] = x[n * {size} // 64] where n in 64"
    kernel = roller_svc.compile(source, inputs={"x": ("float32", (size,))}, select="model")
    if size < 8:
        assert "permuted_" not in kernel.source
    x = np.arange(size, dtype=np.float32)
    assert np.array_equal(kernel.run({"x": x})["y"], x[np.arange(64) * size // 64])


@pytest.mark.parametrize("divisor", [1, 2, 3, 5, 7, 8, 28, 223, 1000])
@pytest.mark.parametrize("interval", [(0, 5000), (-700, 900), (-9, -1), (3, 3)])
def test_quotients_are_exact(interval: tuple[int, int], divisor: int) -> None:
    quotient = find_quotient(interval, divisor)
    assert quotient is not None
    for x in range(interval[0], interval[1] + 1):
        product = (x + quotient.offset) * quotient.factor
        assert 0 <= product < 1 << 31
        assert (product >> quotient.shift) - quotient.quotient_offset == x // divisor


def test_long_intervals_have_no_quotient() -> None:
    assert find_quotient((0, (1 << 31) - 1), 7) is None


def _divide(x: Expr, by: int) -> Expr:
    return Op(OpKind.FLOORDIV, (x, num(by)), DType.INT32)


@pytest.mark.parametrize(
    ("index", "growth"),
    [
        (ref("n"), 15),
        (_divide(ref("n"), 8), 2),
        (_divide(mul(ref("n"), num(27)), 223), 2),
        (add(ref("n"), ref("m")), 15),
        (Op(OpKind.SUB, (num(9), ref("n")), DType.INT32), None),
        (Op(OpKind.MOD, (ref("n"), num(9)), DType.INT32), None),
        (ref("m"), 0),
    ],
)
def test_growth_is_bounded_where_an_index_never_falls(index: Expr, growth: int | None) -> None:
    assert find_growth(index, "n", 16) == growth


def test_an_enlarged_row_is_one_load_and_one_permutation() -> None:
    source = "y[m, n] = x[m, (n * 27) // 223] where m in 64, n in 224"
    kernel = roller_svc.compile(source, inputs={"x": ("float32", (64, 28))}, target="cpu-x86-avx2", select="model")
    assert "permuted_vf32x8(" in kernel.source
