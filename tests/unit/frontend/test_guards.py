"""Indices that stay inside because of their guards, and those that do not."""

from __future__ import annotations

import pytest

from roller_svc.errors import IndexRangeError
from roller_svc.frontend.lang import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, iter_subexpressions
from roller_svc.ir.program import TensorProgram, TensorType

INPUTS = {
    "x": TensorType(DType.FLOAT32, (8,)),
    "im": TensorType(DType.FLOAT32, (3, 16, 16)),
    "i": TensorType(DType.INT32, (8,)),
    "huge": TensorType(DType.FLOAT32, (2**33,)),
}


def program(text: str) -> TensorProgram:
    return parse(text, INPUTS)


INSIDE = [
    "y[n] = x[n + 1] where n in 7",
    "y[n] = x[7 - n] where n in 8",
    "y[n] = x[n - 1].when([n >= 1], 0.0) where n in 9",
    "y[n] = x[n - 1].when([1 <= n], 0.0) where n in 9",
    "y[n] = x[n - 1].when([n - 1 > -1], 0.0) where n in 9",
    "y[n] = x[n - 1].when(~(n < 1), 0.0) where n in 9",
    "y[n] = const(0.0).when([n < 1], x[n - 1]) where n in 9",
    "y[n] = const(0.0).when([n < 1, n > 8], x[n - 1], merge_op=`any`) where n in 30",
    "y[n] = const(0.0).when((n < 1) | (n > 8), x[n - 1]) where n in 30",
    "y[n] = x[n].when([n < 4], 0.0) where n in 9",
    "y[n] = x[n].when([n != 8], 0.0) where n in 9",
    "y[n] = x[n].when([n == 3], 0.0) where n in 900",
    "y[n] = x[2 * n].when([n * 2 < 8], 0.0) where n in 9",
    "y[n] = x[n // 3] where n in 24",
    "y[n] = x[n / 3] where n in 24",
    "y[n] = x[n % 8] where n in 24",
    "y[n, r] = x[n * 2 + r].when([n * 2 + r < 8], 0.0) where n in 9, r in 3",
    "y[o, r] = x[(o + 1 - r) / 2].when([(o + 1 - r) % 2 == 0, o + 1 - r >= 0, o + 1 - r < 16], 0.0) where o in 17, r in 3",
    "y[n] = x[3 - (3 - abs(n - 2))] where n in 8",
    "y[n] = x[7 - abs(7 - abs(n - 2))] where n in 17",
    "y[n] = x[(n - 2 + 8) % 8] where n in 20",
    "y[n] = x[max(min(n - 5, 7), 0)] where n in 99",
    "y[n] = x[clip(n - 5, 0, 7)] where n in 99",
    "y[n] = x[(n - 1).when([n >= 1], 0)] where n in 9",
    "y[n] = x[where(n < 8, n, 15 - n)] where n in 16",
    "y[n] = x[(n > 3) + 6]  where n in 9",
    "y[n, m] = x[n * m] where n in 3, m in 4",
    "y[n, m] = x[n * m].when([n * m < 8], 0.0) where n in 30, m in 40",
    "y[n] = x[n >> 1] where n in 16",
    "y[n] = x[bitwise_and(n, 7)] where n in 99",
    "y[n] = x[(n.cast(`float32`) * 0.5).call(`floor`)] where n in 16",
    "y[n] = x[((n.cast(`float32`) + 0.5) / 1.5 - 0.5).call(`ceil`)] where n in 11",
    "y[n] = x[(n.cast(`float32`) * 1.5).cast(`int32`)].when([n.cast(`float32`) < 5.0], 0.0) where n in 16",
    "y[n] = x[n].when([n < 8, x[n] > 0], 1.0) where n in 9",
    "y[n] = x[n].when((n < 8) & (x[n] > 0), 1.0) where n in 9",
    "y[n] = const(1.0).when((n >= 8) | (x[n] > 0), 0.0) where n in 9",
    "y[n] = x[n].when([i[n % 8] > 0, n < 8], 0.0) where n in 9",
    "y[n, h, w] = im[n, h - 1, w - 1].when([h >= 1, h < 17, w >= 1, w < 17], 0.0) where h in 18, w in 18",
    "y[h, w] +=! im[c, h * 2 + p - 1, w * 2 + q - 1].when([h * 2 + p - 1 >= 0, h * 2 + p - 1 < 16, w * 2 + q - 1 >= 0,"
    " w * 2 + q - 1 < 16], 0.0) where h in 8, w in 8, p in 3, q in 3",
    "y[n] = x[n + 100].when([n < 3, n > 5], 0.0) where n in 9",  # never read
    "x[n - 1] +=. const(1.0).when([n >= 1]) where n in 9",
]

LEAVES = [
    ("y[n] = x[n + 1] where n in 8", 10, "n + 1", "8 at n = 7"),
    ("y[n] = x[n - 1] where n in 8", 10, "n - 1", "-1 at n = 0"),
    ("y[n] = x[n] where n in 9", 10, "n", "8 at n = 8"),
    ("y[n] = x[n - 2].when([n >= 1], 0.0) where n in 8", 10, "n - 2", "-1 at n = 1"),
    ("y[n] = const(0.0).when([n >= 1], x[n - 1]) where n in 8", 36, "n - 1", "-1 at n = 0"),
    ("y[n] = x[n - 1].when([n >= 1, n < 3], 0.0, merge_op=`any`) where n in 8", 10, "n - 1", "-1 at n = 0"),
    ("y[n] = x[n].when([x[n] > 0, n < 8], 0.0) where n in 9", 21, "n", "8 at n = 8"),
    ("y[n] = x[n].when([i[n % 8] > 0 ], 0.0) where n in 9", 10, "n", "8 at n = 8"),
    ("y[o] = x[(o + 1) / 2].when([(o + 1) % 2 == 1], 0.0) where o in 17", 10, "(o + 1) / 2", "8 at o = 16"),
    ("y[n] = x[(n.cast(`float32`) * 0.5).call(`ceil`)] where n in 16", 10, None, "8 at n = 15"),
    ("y[n, m] = x[n * m] where n in 3, m in 5", 13, "n * m", "8 at n = 2, m = 4"),
    ("x[n - 1] +=. const(1.0).when([n >= 0]) where n in 9", 3, "n - 1", "-1 at n = 0"),
    ("y[n, h] = im[3, h, n] where n in 16, h in 16", 14, "3", "it is 3,"),
]


@pytest.mark.parametrize("text", INSIDE)
def test_inside(text: str) -> None:
    assert not program(text).has_runtime_checks


@pytest.mark.parametrize(("text", "column", "index", "where"), LEAVES)
def test_leaves(text: str, column: int, index: str | None, where: str) -> None:
    with pytest.raises(IndexRangeError) as caught:
        program(text)
    error = caught.value
    assert (error.code, error.line, error.column) == ("index-out-of-range", 1, column)
    assert where in error.message
    assert error.hint is not None
    if index is not None:
        assert f"index `{index}`" in error.message
        assert error.end_column == column + len(index)


def test_the_message_names_axes_ranges_and_dimension() -> None:
    with pytest.raises(IndexRangeError) as caught:
        program("y[c, h, w] = im[c, h, w + 3] where w in 16")
    assert "dimension 2 of `im`" in caught.value.message
    assert "0..15 (w in 0..15)" in caught.value.message


def test_overflow_on_the_way_is_no_warning() -> None:
    with pytest.raises(IndexRangeError):
        program("y[n] = x[pow(n * 65536, 9)] where n in 9")
    with pytest.raises(IndexRangeError):
        program("y[n] = x[(n.cast(`float32`) ** 99.0 / n.cast(`float32`)).call(`floor`)] where n in 9")


def test_data_makes_a_check_and_no_refusal() -> None:
    (load, inner) = program("y[n] = x[i[n] + 1]").statements[0].reads
    assert (load.bounds_checked, inner.bounds_checked) == ((True,), (False,))


def test_a_large_index_is_formed_in_64_bits() -> None:
    found = program("y[a, b] = huge[a * 65536 + b] where a in 131072, b in 65536")
    (index,) = found.statements[0].reads[0].index
    assert index.dtype is DType.INT64
    assert any(isinstance(node, Cast) and node.dtype is DType.INT64 for node in iter_subexpressions(index))
    assert not found.has_runtime_checks


def test_a_guard_that_may_wrap_proves_nothing() -> None:
    with pytest.raises(IndexRangeError):
        program("y[a] = x[a].when([a * 65536 * 65536 < 8 * 65536], 0.0) where a in 100")


def test_hopeless_questions_end_with_a_refusal() -> None:
    conditions = ", ".join(f"(a * {3 + k} + b * {5 + 2 * k} + c) % {7 + k} != (a + b * {k}) // {3 + k} % 5" for k in range(16))
    with pytest.raises(IndexRangeError):
        program(f"y[a, b, c] = x[a * 7 - b * 3 + c].when([{conditions}], 0.0) where a in 1000, b in 2000, c in 900")
    with pytest.raises(IndexRangeError) as caught:
        program("y[a, b] = x[(a.cast(`float32`) * b.cast(`float32`)).call(`floor`)] where a in 4000, b in 4000")
    assert caught.value.code == "index-undecided"
    assert "max(min(" in (caught.value.hint or "")
