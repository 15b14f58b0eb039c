"""Space of a reducing nest → how lanes may walk its rows, and the registers that takes.

What construction enlarges and what the model prices: both ask here. Axes are positions in the space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.ir.group import TileSpace
from roller_svc.ir.hardware import HardwareSpec, Limits
from roller_svc.perf.footprint import AccessFootprint, SpaceFootprint, Tile
from roller_svc.perf.machine import register_words
from roller_svc.perf.occupancy import overhead_registers

WORD_BYTES = 4
STAGED_CHUNKS = 4  # of those in flight, as many as a compiler loads before it uses the first


@dataclass(frozen=True, slots=True)
class RowAccess:
    """One tensor. `density`: elements for each of its points, below 1 where an index is divided or gathered.
    `stride`: elements between neighbours along the axis that neighbouring threads walk; None where it varies."""

    footprint: AccessFootprint
    varies_along_row: bool  # along the row
    num_passes: int
    bytes: int  # of an element
    density: float
    contiguous_axis: int | None  # the axis that neighbouring threads walk, None where it does not move the tensor
    stride: int | None

    def elements(self, tile: Tile) -> int:
        """Elements that a tile touches. What is behind a division or a gather is as dense there as it is in all."""
        count = self.footprint.elements(tile)
        if self.density == 1.0:
            return count
        extents = [t.extent for t in self.footprint.tables]
        points = math.prod([min(tile[i], n) for i, n in zip(self.footprint.axes, extents, strict=True)])
        return max(1, min(count, math.ceil(points * self.density)))

    def transferred_bytes(self, tile: Tile) -> float:
        return (
            self.footprint.transferred_bytes(tile) if self.density == 1.0 else float(self.elements(tile) * self.bytes)
        )

    def requested_bytes(self, tile: Tile) -> float:
        return self.footprint.requested_bytes(tile) if self.density == 1.0 else float(self.elements(tile) * self.bytes)


@dataclass(frozen=True, slots=True)
class RowIteration:
    """`run` neighbours make a chunk, `together` chunks of a lane are in flight at once, `rounds` are all of a lane's.
    `points`: outer points of a thread."""

    vector_elems: int
    chunks_in_flight: int
    iterations: int
    points: int

    @property
    def is_single_pass(self) -> bool:
        """Whether a row is in flight as a whole, so that one pass reads it for all statements."""
        return self.chunks_in_flight >= self.iterations

    @property
    def steps(self) -> int:
        return -(-self.iterations // self.chunks_in_flight)


@dataclass(frozen=True, slots=True)
class RowSpace:
    """`along`: whether memory runs along the rows, so that the lanes of one are neighbouring threads; `fast`: the axis
    that neighbours walk. `joins`: reductions of the group. `run`, `width`: inner points, and points of the axis that
    rows stand along, that a thread takes at once; `sharing`: outer axes whose points have an operand in common."""

    accesses: tuple[RowAccess, ...]
    read: tuple[RowAccess, ...]  # on the way along a row
    inner: int
    points: int  # of a row
    spatial: Tile
    contiguous_along_reduction: bool
    contiguous_axis: int
    num_reductions: int
    vector_elems: int
    vector_rows: int
    reuse_axes: Tile
    words: int  # registers of an accumulator

    def row_iteration(self, block: Tile, thread: Tile, lanes: int, split_k: int = 1) -> RowIteration:
        """How the lanes of that tile walk a row of which each rTask has its share."""
        run = thread[self.inner]
        rounds = max(1, -(-self.points // (run * lanes * split_k)))
        points = 1
        for i in self.spatial:
            points *= thread[i]
        return RowIteration(run, min(rounds, max(1, -(-block[self.inner] // (lanes * run)))), rounds, points)

    def registers(self, thread: Tile, walk: RowIteration, limits: Limits) -> int:
        """Registers of a thread: chunks in flight as they lie in memory, rows that stay, accumulators."""
        flight = held = 0
        whole = walk.is_single_pass
        for access in self.read:
            count = access.elements(thread)
            if whole and access.num_passes > 1:
                held += walk.iterations * count * register_words(access.footprint.access.dtype)
            else:
                flight += min(walk.chunks_in_flight, STAGED_CHUNKS) * -(-count * access.bytes // WORD_BYTES)
        sums = walk.points * (walk.vector_elems if self.contiguous_along_reduction else 1) * self.words
        return overhead_registers(limits) + flight + held + sums

    def shared_bytes(self, walk: RowIteration, lanes: int, threads: int, warp: int) -> int:
        """Shared memory in which lanes join: a word a warp and row, or, where they stand apart, all that they have."""
        if lanes == 1 or (self.contiguous_along_reduction and lanes <= warp):
            return 0
        words = walk.points * (threads // warp if self.contiguous_along_reduction else threads)
        return self.num_reductions * words * WORD_BYTES * self.words


def row_space(space: TileSpace, touched: SpaceFootprint, hw: HardwareSpec) -> RowSpace:
    """Prepare a space whose points have rows for many tiles."""
    (inner,) = (i for i, a in enumerate(space.axes) if a in space.reduced)
    spatial = tuple(i for i in range(len(space.axes)) if i != inner)
    vector = next((i for i, a in enumerate(space.axes) if a.name == space.vector_axis), inner)
    along = vector == inner
    accesses = tuple(_access(t, touched.extents, vector) for t in touched.accesses)
    read = tuple(a for a in accesses if a.varies_along_row and not a.footprint.access.is_output)
    most = max((a.num_passes for a in read), default=1)
    writes_rows = any(a.varies_along_row and a.footprint.access.is_output for a in accesses)
    neighbours = [a for a in accesses if a.stride == 1] or list(accesses)
    dominant = max(neighbours, key=lambda a: a.elements(touched.extents) * a.bytes, default=None)
    widest = hw.vector_bytes // dominant.bytes if dominant is not None else 1
    packed = max((_points_per_element(a, touched.extents, inner) for a in read), default=1)
    last = space.axes[inner].members[-1].extent
    return RowSpace(
        accesses=accesses,
        read=read,
        inner=inner,
        points=touched.extents[inner],
        spatial=spatial,
        contiguous_along_reduction=along,
        contiguous_axis=vector,
        num_reductions=max(1, most - 1) if writes_rows else most,
        vector_elems=_largest_dividing_power(last, max(widest, packed) if along else packed),
        # threads that take neighbours of windows would read what is apart: they stand side by side instead
        vector_rows=_largest_dividing_power(touched.extents[vector], widest) if not along and space.reduces_rows else 1,
        reuse_axes=tuple(i for i in spatial if any(i not in a.footprint.axes for a in read)),
        words=register_words(space.compute_dtype),
    )


def _access(touched: AccessFootprint, extents: Tile, fast: int) -> RowAccess:
    density = 1.0
    if any(not dim.is_affine for dim in touched.access.dims):
        density = min(1.0, touched.elements(extents) / math.prod([extents[i] for i in touched.axes]))
    return RowAccess(
        touched, touched.varies_with_reduction, touched.access.num_uses, touched.elem_bytes, density,
        fast if fast in touched.axes else None, touched.strides.get(fast),
    )  # fmt: skip


def _points_per_element(access: RowAccess, extents: Tile, inner: int) -> int:
    """Neighbouring inner points that share an element, as 4-bit values do a word; 1 where none do."""
    divided = [dim for dim in access.footprint.access.dims if not dim.is_affine and dim.size > 1]
    if len(divided) != 1 or inner not in access.footprint.axes or extents[inner] % divided[0].size:
        return 1
    points = extents[inner] // divided[0].size
    return points if points <= WORD_BYTES * 2 else 1


def _largest_dividing_power(extent: int, width: int) -> int:
    """The largest power of two up to the width that divides the extent."""
    return math.gcd(extent, 1 << (width.bit_length() - 1))
