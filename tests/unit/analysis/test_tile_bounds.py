"""Bounds of an index over tiles: in numbers and in expressions, against brute force."""

from __future__ import annotations

import itertools
import random
from typing import Any

import pytest

from roller_svc.analysis.tile_bounds import (
    IndexSpan,
    Span,
    count_k_tiles,
    grows_along,
    index_limits,
    k_bounds,
    max_bound,
    max_bound_index,
    min_bound_index,
    range_of_tile,
    visible_fraction,
)
from roller_svc.frontend.parse import parse
from roller_svc.fusion.contraction import as_contraction
from roller_svc.fusion.linear_sums import split_linear_sums
from roller_svc.fusion.space import contraction_space
from roller_svc.ir.affine import Affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Op
from roller_svc.ir.group import AxisRole, KBounds, TileAxis, TileSpace
from roller_svc.ir.index import add, conjunction, le, num, ref
from roller_svc.ir.program import Axis, AxisKind, TensorType

ROWS = TileAxis("i_j", AxisRole.M, (Axis("i", 5, AxisKind.SPATIAL), Axis("j", 4, AxisKind.SPATIAL)))
COLUMNS = TileAxis("n", AxisRole.N, (Axis("n", 9, AxisKind.SPATIAL),))
K = TileAxis("k", AxisRole.K, (Axis("k", 12, AxisKind.REDUCE),))


def value(expr: Expr, at: dict[str, int]) -> int:
    match expr:
        case Const(value=number):
            return int(number)
        case AxisRef(name=name):
            return at[name]
        case Op(kind=kind, args=args):
            x, y = (value(arg, at) for arg in args)
            return {"+": x + y, "-": x - y, "*": x * y, "//": x // y if y else 0, "min": min(x, y), "max": max(x, y)}[kind.value]
        case _:
            raise AssertionError(expr)


@pytest.mark.parametrize("seed", range(20))
def test_bounds_of_tiles_hold_at_every_point(seed: int) -> None:
    rng = random.Random(seed)
    bound = Affine(tuple((name, rng.randint(-3, 3)) for name in ("b", "i", "j", "n")), rng.randint(-9, 9))
    tile, batch = (rng.randint(1, 20), rng.randint(1, 9)), rng.randint(0, 3)
    spans = []
    for axis, extent in zip((ROWS, COLUMNS), tile, strict=True):
        number = rng.randrange(-(-axis.extent // extent))
        spans.append(Span(axis, number * extent, min(axis.extent, (number + 1) * extent) - 1))
    rows, columns = spans
    values = [
        bound.offset + bound.coeff("b") * batch + bound.coeff("i") * (m // 4) + bound.coeff("j") * (m % 4) + bound.coeff("n") * n
        for m, n in itertools.product(range(rows.first, rows.last + 1), range(columns.first, columns.last + 1))
    ]
    index = [IndexSpan(axis, num(first), num(last)) for axis, first, last in spans]
    largest, smallest = (value(found, {"b": batch}) for found in (max_bound_index(bound, index), min_bound_index(bound, index)))
    assert smallest <= min(values) <= max(values) <= largest
    assert max_bound(bound, spans) == largest - bound.coeff("b") * batch
    if bound.coeff("j") == 0:  # one value of the outermost member at a position: the box is the tile
        assert (smallest, largest) == (min(values), max(values))


def space(condition: str, m: int = 40, n: int = 24, k: int = 56, dtype: DType = DType.FLOAT16) -> TileSpace:
    types = {"a": TensorType(dtype, (m, k)), "b": TensorType(dtype, (k, n))}
    zero = "0.0" if dtype.is_float else "0"
    product = "a[m, k] * b[k, n]" if dtype.is_float else "a[m, k].cast(int32) * b[k, n].cast(int32)"
    compute = parse(f"y[m, n] +=! where({condition}, {product}, {zero})", types)
    (statement, *_) = split_linear_sums(compute.statements, types)
    found = as_contraction(statement)
    assert found is not None
    return contraction_space((statement,), found, types)


CONDITIONS = {
    "k <= m": lambda m, n, k: k <= m,
    "k > m": lambda m, n, k: k > m,
    "k < 2 * m - 9": lambda m, n, k: k < 2 * m - 9,
    "n + 5 <= k": lambda m, n, k: n + 5 <= k,
    "k < 30": lambda m, n, k: k < 30,
}


@pytest.mark.parametrize("condition", CONDITIONS)
def test_k_ranges_of_tiles_have_every_point_that_a_guard_leaves(condition: str) -> None:
    found = space(condition)
    bounds = found.k_bounds
    assert bounds is not None
    (m,), (n,) = found.role(AxisRole.M), found.role(AxisRole.N)
    holds = CONDITIONS[condition]
    total = 0
    for first_m, first_n in itertools.product(range(0, 40, 16), range(0, 24, 8)):
        spans = [Span(m, first_m, min(first_m + 15, 39)), Span(n, first_n, min(first_n + 7, 23))]
        begin, end = range_of_tile(bounds.uppers, bounds.lowers, 56, spans)
        points = itertools.product(range(spans[0].first, spans[0].last + 1), range(spans[1].first, spans[1].last + 1))
        left = {k for row, column in points for k in range(56) if holds(row, column, k)}
        assert (begin, end) == ((min(left), max(left) + 1) if left else (begin, begin))
        total += max(1, -(-end // 8) - begin // 8)
    counted = count_k_tiles(found, (16, 8, 8), 8)
    assert counted is not None
    assert counted.mean == pytest.approx(total / 9)
    exact = sum(holds(row, column, k) for row in range(40) for column in range(24) for k in range(56)) / (40 * 24 * 56)
    assert visible_fraction(found) == pytest.approx(exact, rel=0.05)


def test_tiles_with_most_points_are_at_the_end_of_an_axis_or_at_its_beginning() -> None:
    for condition, grows in (("k <= m", (True, False)), ("k >= m", (False, False)), ("k < n", (False, True))):
        found = space(condition)
        (m,), (n,) = found.role(AxisRole.M), found.role(AxisRole.N)
        assert (grows_along(found, m), grows_along(found, n)) == grows


def test_other_conditions_bound_nothing() -> None:
    for condition in ("(k + m) % 2 == 0", "2 * k <= m"):
        assert space(condition).k_bounds is None
    unlimited = le(ref("k"), num((1 << 31) - 1))
    assert k_bounds(unlimited, K, (ROWS, COLUMNS)) is None  # beyond what kernels compute in 32 bits
    assert k_bounds(None, K, (ROWS, COLUMNS)) is None
    fused = TileAxis("i_k", AxisRole.K, (*ROWS.members[:1], *K.members))
    assert k_bounds(le(ref("k"), ref("n")), fused, (COLUMNS,)) is None


def test_limits_that_every_point_meets_bound_nothing() -> None:
    """Of 40 rows, 24 columns and 56 points along k; one point less is a bound."""
    for condition in ("k <= m + 55", "k < 56", "k >= m - 39", "k + n < 79"):
        assert space(condition).k_bounds is None
    for condition in ("k <= m + 54", "k < 55", "k >= m - 38", "k + n < 78"):
        assert space(condition).k_bounds is not None
    met = (le(ref("k"), num(11)), le(ref("n"), add(ref("k"), num(8))))
    found = k_bounds(conjunction((*met, le(ref("k"), ref("n")))), K, (COLUMNS,))
    assert found == KBounds((Affine((("n", 1),)),), ())


def test_limits_say_whether_they_are_the_whole_condition() -> None:
    whole: Any = conjunction((le(ref("k"), ref("n")), le(num(2), ref("k"))))
    uppers, lowers, exact = index_limits(whole, "k")
    assert (uppers, lowers, exact) == ((Affine((("n", 1),)),), (Affine((), 2),), True)
    assert not index_limits(conjunction((whole, le(ref("k"), ref("k")))) or whole, "k")[2]


@pytest.mark.parametrize(
    ("text", "dtype", "is_bounded"),
    [
        ("where(k <= m, a[m, k] * b[k, n], 0.0)", DType.FLOAT16, True),
        ("-where(k <= m, a[m, k] * b[k, n], 0.0)", DType.FLOAT16, True),
        ("where(k <= m, a[m, k], 0.0) * b[k, n]", DType.FLOAT16, False),  # 0 times NaN is NaN
        ("where(k <= m, a[m, k], 1.0) * b[k, n]", DType.FLOAT16, False),
        ("where(k <= m, a[m, k] * b[k, n], 1.0)", DType.FLOAT16, False),
        ("where(k <= m, a[m, k], 0).cast(int32) * b[k, n].cast(int32)", DType.INT8, True),  # integers are finite
        ("where(k <= m, a[m, k], 1).cast(int32) * b[k, n].cast(int32)", DType.INT8, False),
    ],
)
def test_only_guards_that_make_the_product_zero_bound_it(text: str, dtype: DType, is_bounded: bool) -> None:
    types = {"a": TensorType(dtype, (40, 56)), "b": TensorType(dtype, (56, 24))}
    statements = split_linear_sums(parse(f"y[m, n] +=! {text}", types).statements, types)
    found = as_contraction(statements[0])
    assert (found is not None and contraction_space(statements[:1], found, types).k_bounds is not None) is is_bounded
