"""Which nests are walked row by row of their columns: inner axes that jump through memory, an outer one that runs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache

from roller_svc.ir.group import AxisRole, TileAccess, TileSpace

# Steps over the inner axes from which columns wait in a cache for them; below, they wait in registers.
MIN_STEPS = 16
ACCUMULATOR_BYTES = 16 << 10  # of all values that wait: half of the smallest L1 there is
# The same where many terms are joined before a value is loaded and stored, which then may take as long as L2 does.
MANY_TERMS_ACCUMULATOR_BYTES, MIN_MANY_TERMS = 64 << 10, 32
MAX_ROWS_PER_ITERATION = 8  # rows that are joined before an accumulator is loaded and stored, and streams from memory
MAX_TERMS_PER_ITERATION = 64  # that rows joined may have, where several terms are made of each


@cache
def columns_per_block(tile: int, lanes: int, value_bytes: int, cache_bytes: int) -> int:
    """Of a tile of columns so many whose values wait in a cache's `room`, `held_bytes` each: as many times `lanes` as
    fit there and divide the tile."""
    most, vectors = cache_bytes // value_bytes, tile // lanes
    return lanes * max(n for n in range(1, vectors + 1) if n == 1 or (vectors % n == 0 and n * lanes <= most))


@dataclass(frozen=True, slots=True)
class ReductionStep:
    """What a column's accumulator is loaded and stored for: so many `terms`, of so many `rows`."""

    terms: int
    rows: int


def reduction_step(space: TileSpace) -> ReductionStep:
    """At once, of all inner axes."""
    members = [m for a in space.axes if a.role is AxisRole.INNER for m in a.members]
    last = members[-1]
    terms = min(MAX_ROWS_PER_ITERATION, last.extent)
    if len(members) > 1:
        terms *= rows_per_iteration(space, members[-2].extent, last.extent, last.name)
    across = last.extent > MAX_ROWS_PER_ITERATION or crosses_rows(space, last.name)
    return ReductionStep(terms, terms if across else terms // last.extent)


def vector_members(space: TileSpace) -> frozenset[str]:
    """The axes that lanes go along, as columns do: members of the vector axis, where there is one."""
    return frozenset(m.name for a in space.axes if a.name == space.vector_axis for m in a.members)


def accumulator_bytes(space: TileSpace) -> int:
    """Bytes of a cache in which values of columns wait."""
    return MANY_TERMS_ACCUMULATOR_BYTES if reduction_step(space).terms >= MIN_MANY_TERMS else ACCUMULATOR_BYTES


def is_column_reduction(space: TileSpace) -> bool:
    """Whether the vector axis is an outer one along which something is read that inner axes, many steps of them, walk
    across."""
    inner = {m.name for a in space.axes if a.role is AxisRole.INNER for m in a.members}
    steps = math.prod(a.extent for a in space.axes if a.role is AxisRole.INNER)
    vector = next((a for a in space.axes if a.name == space.vector_axis), None)
    if vector is None or vector.role is not AxisRole.OUTER or steps < MIN_STEPS or not space.reduces_rows:
        return False
    along = vector.members[-1].name
    return any(_access_crosses_rows(access, along, inner) for access in space.accesses if not access.is_output)


def rows_per_iteration(space: TileSpace, before: int, last: int, name: str) -> int:
    """How many steps of the inner axis before the last are joined at once, of extents `before` and `last`, which is
    called `name`: more than one where the last is short. Where it only takes other parts of the same rows, as of words
    that have several weights each, it has no streams of its own."""
    if last > MAX_ROWS_PER_ITERATION:
        return 1
    streams = last if crosses_rows(space, name) else 1
    return max(1, min(before, MAX_ROWS_PER_ITERATION // streams, MAX_TERMS_PER_ITERATION // last))


def crosses_rows(space: TileSpace, name: str) -> bool:
    """Whether steps along that axis go to other rows of what is walked."""
    vector = next(a for a in space.axes if a.name == space.vector_axis)
    along = vector.members[-1].name
    return any(_access_crosses_rows(access, along, {name}) for access in space.accesses if not access.is_output)


def _access_crosses_rows(access: TileAccess, along: str, inner: set[str]) -> bool:
    wide = [dim for dim in access.dims if dim.size > 1]
    if not wide or along not in {name for name, _ in wide[-1].coeffs}:
        return False
    return any(name in inner for dim in wide[:-1] for name, _ in dim.coeffs)
