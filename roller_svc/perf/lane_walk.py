"""Tiles of a reducing nest → how lanes walk its rows, and the registers that takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.ir.hardware import Limits
from roller_svc.perf.footprint import AccessFootprint, Tile
from roller_svc.perf.machine import register_words
from roller_svc.perf.occupancy import overhead_registers
from roller_svc.perf.problem import Problem

WORD_BYTES = 4


@dataclass(frozen=True, slots=True)
class LaneWalk:
    """`run` neighbours make a chunk, `together` chunks of a lane are in flight at once, `rounds` are all of a lane's.

    `points`: outer points of a thread. `along`: whether the lanes of a row are neighbouring threads.
    """

    run: int
    together: int
    rounds: int
    points: int
    along: bool

    @property
    def whole(self) -> bool:
        """Whether a row is in flight as a whole, so that one pass reads it for all statements."""
        return self.together >= self.rounds

    @property
    def steps(self) -> int:
        return -(-self.rounds // self.together)


def lane_walk(p: Problem, block: Tile, thread: Tile, lanes: int, split_k: int = 1) -> LaneWalk:
    """How the lanes of that tile walk a row of which each rTask has its share."""
    (inner,) = p.reduced
    run = thread[inner]
    rounds = max(1, -(-p.inner_points // (run * lanes * split_k)))
    points = math.prod([thread[i] for i in p.spatial])
    together = min(rounds, max(1, -(-block[inner] // (lanes * run))))
    return LaneWalk(run, together, rounds, points, along=p.vector not in p.spatial)


def elements(p: Problem, access: AccessFootprint, tile: Tile) -> int:
    """Elements that a tile touches. What is behind a division or a gather is as dense there as it is in all."""
    count = access.elements(tile)
    if not any(dim.opaque for dim in access.access.dims):
        return count
    points = math.prod([min(tile[i], p.extents[i]) for i in access.axes])
    whole = math.prod([p.extents[i] for i in access.axes])
    return max(1, min(count, math.ceil(points * access.elements(p.extents) / whole)))


def walked_reads(p: Problem) -> tuple[AccessFootprint, ...]:
    """The tensors that a walk over a row reads on its way."""
    return tuple([t for t in p.touched.reads if t.walks_reduced])


def row_registers(p: Problem, thread: Tile, walk: LaneWalk, limits: Limits) -> int:
    """Registers of a thread: chunks in flight as they lie in memory, rows that stay, accumulators."""
    words = register_words(p.space.compute_dtype)
    flight = held = 0
    for tensor in walked_reads(p):
        count = elements(p, tensor, thread)
        if walk.whole and tensor.access.passes > 1:
            held += walk.rounds * count * register_words(tensor.access.dtype)
        else:
            flight += min(walk.together, 4) * -(-count * tensor.elem_bytes // WORD_BYTES)
    sums = walk.points * (walk.run if walk.along else 1) * words
    return overhead_registers(limits) + flight + held + sums
