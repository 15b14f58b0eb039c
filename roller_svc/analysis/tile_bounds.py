"""Affine bounds of an index over the points of a tile: in numbers for the model, in expressions for kernels.

A position on a fused axis has one value of the outermost member, and may have any of the others: bounds over fused axes
are those of the smallest box around the tile.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import NamedTuple

from roller_svc.ir.affine import Affine, slack
from roller_svc.ir.expr import Expr
from roller_svc.ir.group import KBounds, TileAxis, TileSpace
from roller_svc.ir.index import add, conjuncts, div, min_, mul, num, ref, sub

SAMPLED_TILES = 64  # of a space, evenly spread, whose points along k are counted
MAX_INDEX = 1 << 30  # of a bound's value that a kernel computes in 32 bits


class Span(NamedTuple):
    """The positions on an axis that a tile covers."""

    axis: TileAxis
    first: int
    last: int


class IndexSpan(NamedTuple):
    """The same of the tile that a block computes."""

    axis: TileAxis
    first: Expr
    last: Expr

    @classmethod
    def of_tile(cls, axis: TileAxis, tile: int, number: Expr) -> IndexSpan:
        """Return the span of a tile by its number."""
        first = mul(number, num(tile))
        last = add(first, num(tile - 1))
        return cls(axis, first, last if axis.extent % tile == 0 else min_(last, num(axis.extent - 1)))


def index_limits(cond: Expr, index: str) -> tuple[tuple[Affine, ...], tuple[Affine, ...], bool]:
    """Return upper and lower bounds that a condition sets to an index, and whether they are the whole condition."""
    uppers: list[Affine] = []
    lowers: list[Affine] = []
    exact = True
    for condition in conjuncts(cond):
        margin = slack(condition)
        pace = 0 if margin is None else margin.coeff(index)
        if margin is None or abs(pace) != 1:
            exact = False
            continue
        rest = Affine(tuple((name, c) for name, c in margin.coeffs if name != index), margin.offset)
        if pace == -1:
            uppers.append(rest)
        else:
            lowers.append(negate(rest))
    return tuple(uppers), tuple(lowers), exact


def negate(bound: Affine) -> Affine:
    return Affine(tuple((name, -c) for name, c in bound.coeffs), -bound.offset)


def max_bound(bound: Affine, spans: Iterable[Span]) -> int:
    """Return the maximum of a bound over a tile, axes without a span at 0."""
    total = bound.offset
    for axis, first, last in spans:
        outermost, stride = axis.members[0], axis.extent // axis.members[0].extent
        inner = {a.name: a.extent for a in axis.members[1:]}
        for name, c in bound.coeffs:
            if name == outermost.name:
                total += c * ((last if c > 0 else first) // stride)
            elif name in inner:
                total += max(0, c * (inner[name] - 1))
    return total


def max_bound_index(bound: Affine, spans: Collection[IndexSpan]) -> Expr:
    """Return the maximum of a bound over a tile, other axes at their variables."""
    total: Expr = num(bound.offset)
    for name, c in bound.coeffs:
        axis, first, last = next((s for s in spans if any(a.name == name for a in s.axis.members)), (None, None, None))
        if axis is None or first is None or last is None:
            total = add(mul(ref(name), num(c)), total)
        elif name == axis.members[0].name:
            stride = axis.extent // axis.members[0].extent
            total = add(mul(div(last if c > 0 else first, stride), num(c)), total)
        else:
            extent = next(a.extent for a in axis.members if a.name == name)
            total = add(num(max(0, c * (extent - 1))), total)
    return total


def min_bound_index(bound: Affine, spans: Collection[IndexSpan]) -> Expr:
    """Return the minimum of a bound over a tile."""
    return sub(num(0), max_bound_index(negate(bound), spans))


def range_of_tile(uppers: Iterable[Affine], lowers: Iterable[Affine], extent: int, spans: Sequence[Span]) -> tuple[int, int]:
    """Return the range of an index that some point of a tile has; it may be empty."""
    begin = min(extent, max([0, *(-max_bound(negate(b), spans) for b in lowers)]))
    end = min([extent, *(max_bound(b, spans) + 1 for b in uppers)])
    return begin, max(begin, end)


def k_bounds(guard: Expr | None, k: TileAxis, results: Collection[TileAxis]) -> KBounds | None:
    """Return the bounds that a guard sets to the points along k of a product; None without one, or for several axes.

    Bounds vary with axes of results. Kernels compute them in 32 bits. Those that every point meets are left out.
    """
    extents = {a.name: a.extent for axis in results for a in axis.members}
    if guard is None or len(k.members) > 1:
        return None
    uppers, lowers, _ = index_limits(guard, k.members[0].name)

    def is_valid(bound: Affine) -> bool:
        largest = abs(bound.offset) + k.extent + sum(abs(c) * extents.get(name, MAX_INDEX) for name, c in bound.coeffs)
        return largest < MAX_INDEX

    whole = [Span(axis, 0, axis.extent - 1) for axis in results]
    uppers = tuple(b for b in uppers if is_valid(b) and -max_bound(negate(b), whole) < k.extent - 1)
    lowers = tuple(b for b in lowers if is_valid(b) and max_bound(b, whole) > 0)
    return KBounds(uppers, lowers) if uppers or lowers else None


class KRanges(NamedTuple):
    """K-tiles of the tiles of a space: of all of them, in the mean, and of the tile with the most."""

    mean: float
    longest: float


def count_k_tiles(space: TileSpace, tile: Sequence[int], depth: int) -> KRanges | None:
    """Return the k-tiles of `depth` points that the guard of a product leaves, at least one; None without a guard.

    `tile` has the extents in the order of the space's axes.
    """
    bounds = space.k_bounds
    if bounds is None:
        return None
    (k,) = space.reduced
    counts = []
    for spans in sampled_tiles(space, tile, bounds):
        begin, end = range_of_tile(bounds.uppers, bounds.lowers, k.extent, spans)
        counts.append(max(1, -(-end // depth) - begin // depth))
    return KRanges(sum(counts) / len(counts), float(max(counts)))


def visible_fraction(space: TileSpace) -> float:
    """Return the part of a product's points that its guard leaves."""
    bounds = space.k_bounds
    if bounds is None:
        return 1.0
    (k,) = space.reduced
    ranges = [range_of_tile(bounds.uppers, bounds.lowers, k.extent, s) for s in sampled_tiles(space, [1] * len(space.axes), bounds)]
    return sum(end - begin for begin, end in ranges) / (k.extent * len(ranges))


def sampled_tiles(space: TileSpace, tile: Sequence[int], bounds: KBounds) -> Iterator[tuple[Span, ...]]:
    """Yield tiles that are spread evenly along the axes that bounds vary with, the first and the last among them."""
    names = {name for bound in (*bounds.uppers, *bounds.lowers) for name, _ in bound.coeffs}
    extents = [(axis, extent) for axis, extent in zip(space.axes, tile, strict=True) if names & {a.name for a in axis.members}]
    most = max(2, round(SAMPLED_TILES ** (1 / max(1, len(extents)))))
    return itertools.product(*(_sampled_spans(axis, extent, most) for axis, extent in extents))


def _sampled_spans(axis: TileAxis, tile: int, most: int) -> list[Span]:
    count = -(-axis.extent // tile)
    numbers = sorted({i * (count - 1) // (most - 1) for i in range(most)})
    return [Span(axis, i * tile, min(axis.extent, (i + 1) * tile) - 1) for i in numbers]


def grows_along(space: TileSpace, axis: TileAxis) -> bool:
    """Return whether tiles at the end of an axis have more points along k than those at its beginning."""
    bounds = space.k_bounds
    if bounds is None:
        return False
    (k,) = space.reduced
    first, last = (
        range_of_tile(bounds.uppers, bounds.lowers, k.extent, [Span(axis, position, position)]) for position in (0, axis.extent - 1)
    )
    return last[1] - last[0] > first[1] - first[0]
