"""Column reductions on a CPU: reductions over strided inner axes, blocked over columns of a contiguous outer axis."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from roller_svc.families.common.cpu.shared_rows import fits_registers
from roller_svc.ir.group import AxisRole, TileAccess, TileSpace

# Inner iterations from which accumulators are kept in a cache; with fewer they are kept in registers.
MIN_STEPS = 16
ACCUMULATOR_BYTES = 16 << 10  # of all accumulators: half of the smallest L1
# The same where many terms are combined per load and store of an accumulator, which may then come from L2.
MANY_TERMS_ACCUMULATOR_BYTES, MIN_MANY_TERMS = 64 << 10, 32
MAX_ROWS_PER_ITERATION = 8  # rows combined per load and store of an accumulator; as many streams from memory
MAX_TERMS_PER_ITERATION = 64  # terms combined per iteration, where each row has several


@cache
def columns_per_block(tile: int, lanes: int, value_bytes: int, cache_bytes: int) -> int:
    """Return the columns of a tile whose values fit in `cache_bytes`: a multiple of `lanes` that divides the tile."""
    most, vectors = cache_bytes // value_bytes, tile // lanes
    return lanes * max(n for n in range(1, vectors + 1) if n == 1 or (vectors % n == 0 and n * lanes <= most))


def keeps_columns_in_registers(extent: int, count: int, points: int, lanes: int, registers: int) -> bool:
    """Return whether sums of `count` columns at `points` outer points are in registers, and rows in memory order.

    With all columns of an axis, rows that follow each other in memory are one stream, which hardware prefetchers follow.
    """
    whole = count % lanes == 0 and (count == extent or points > 1)
    return whole and fits_registers(points * count // lanes, registers)


def max_sets(count: int, points: int, lanes: int, registers: int) -> int:
    """Return the number of rows, a power of two, that have accumulators of their own."""
    sets = 1
    while 2 * sets <= MAX_ROWS_PER_ITERATION and fits_registers(2 * sets * points * count // lanes, registers):
        sets *= 2
    return sets


@dataclass(frozen=True, slots=True)
class ReductionStep:
    """Terms, and the rows they come from, that are combined per load and store of an accumulator."""

    terms: int
    rows: int


def reduction_step(space: TileSpace) -> ReductionStep:
    """Return the step over all inner axes."""
    members = [m for a in space.axes if a.role is AxisRole.INNER for m in a.members]
    last = members[-1]
    terms = min(MAX_ROWS_PER_ITERATION, last.extent)
    if len(members) > 1:
        terms *= rows_per_iteration(space, members[-2].extent, last.extent, last.name)
    across = last.extent > MAX_ROWS_PER_ITERATION or crosses_rows(space, last.name)
    return ReductionStep(terms, terms if across else terms // last.extent)


def vector_members(space: TileSpace) -> frozenset[str]:
    """Return the members of the vector axis, along which columns are contiguous."""
    return frozenset(m.name for a in space.axes if a.name == space.vector_axis for m in a.members)


def accumulator_bytes(space: TileSpace) -> int:
    """Return the bytes of a cache that accumulators may take."""
    return MANY_TERMS_ACCUMULATOR_BYTES if reduction_step(space).terms >= MIN_MANY_TERMS else ACCUMULATOR_BYTES


def is_column_reduction(space: TileSpace) -> bool:
    """Return whether the vector axis is an outer one, and many inner iterations cross rows of an input along it."""
    vector = next((a for a in space.axes if a.name == space.vector_axis), None)
    if vector is None or vector.role is not AxisRole.OUTER or not space.reduces_rows:
        return False
    members = [m for a in space.axes if a.role is AxisRole.INNER for m in a.members]
    if math.prod([m.extent for m in members]) < MIN_STEPS:
        return False
    along, inner = vector.members[-1].name, {m.name for m in members}
    return any(_access_crosses_rows(access, along, inner) for access in space.accesses if not access.is_output)


def rows_per_iteration(space: TileSpace, before: int, last: int, name: str) -> int:
    """Return the iterations of the inner axis before the last that are combined in one.

    More than one where the last axis, `name`, is short. An axis that only selects parts of the same rows, such as the
    weights in a word, adds no streams.
    """
    if last > MAX_ROWS_PER_ITERATION:
        return 1
    streams = last if crosses_rows(space, name) else 1
    return max(1, min(before, MAX_ROWS_PER_ITERATION // streams, MAX_TERMS_PER_ITERATION // last))


def crosses_rows(space: TileSpace, name: str) -> bool:
    """Return whether iterations along that axis access other rows of an input."""
    vector = next(a for a in space.axes if a.name == space.vector_axis)
    along = vector.members[-1].name
    return any(_access_crosses_rows(access, along, {name}) for access in space.accesses if not access.is_output)


def _access_crosses_rows(access: TileAccess, along: str, inner: set[str]) -> bool:
    wide = [dim for dim in access.dims if dim.size > 1]
    if not wide or along not in {name for name, _ in wide[-1].coeffs}:
        return False
    return any(name in inner for dim in wide[:-1] for name, _ in dim.coeffs)
