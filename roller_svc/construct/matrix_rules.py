"""What the rules of matrix units share: sides of tiles in whole instructions, and in whole tiles of warps."""

from __future__ import annotations

from roller_svc.construct.align import EPSILONS, counts
from roller_svc.construct.rules import Base
from roller_svc.perf.footprint import Tile
from roller_svc.perf.problem import Problem

# Bound on padding to begin with: tiles that a shape is no multiple of are padded with zeros, which the estimate counts,
# and lose less by that than by being small.
FIRST_EPSILON = EPSILONS[1]


def multiples(extent: int, granule: int, most: int) -> Tile:
    """Whole instructions along one axis of a warp's or a warpgroup's tile, none of which is all padding."""
    return tuple([granule * c for c in counts(extent, granule, EPSILONS[-1], min(most, -(-extent // granule)))])


def sides(p: Problem, base: Base, epsilon: float, most: int) -> dict[int | None, Tile]:
    """A block's extents along m and n: up to `most` of the base's."""
    found: dict[int | None, Tile] = {}
    for axis in (p.m, p.n):
        if axis is not None:
            unit = base.thread[axis]
            fitting = counts(p.extents[axis], unit, max(epsilon, FIRST_EPSILON), min(most, -(-p.extents[axis] // unit)))
            found[axis] = tuple([unit * c for c in fitting or (1,)])
    return found
