"""ROLLER's rules for rows reduced on a SIMT machine: runs of 16 bytes, lanes that share a row, rows in registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.construct.align import counts, powers
from roller_svc.construct.rules import PLAIN, Base, Pipeline, replaced, spatial_grid
from roller_svc.construct.scale_up import Grown, Look, Stage
from roller_svc.perf.footprint import AccessFootprint, Tile
from roller_svc.perf.lane_walk import LaneWalk, elements, lane_walk, row_registers, walked_reads
from roller_svc.perf.machine import register_words
from roller_svc.perf.occupancy import block_registers
from roller_svc.perf.problem import Problem
from roller_svc.perf.simt_reduction import shared_bytes

MAX_SHARED_POINTS = 8  # outer points of a thread along an axis that some operand lacks
MAX_SUMS = 48  # accumulators of a thread, of 4 bytes
MAX_REGISTERS = 128  # of a thread with more than a chunk in flight: 512 threads a core hide what is left of latency
MIN_THREADS, MAX_THREADS = 128, 256  # of a block whose rows need no more
APART_LANES = (1, 4, 8, 16, 32)  # of rows that are neighbours in memory
LANES_TRIED = 4  # powers of two, from a chunk of the row for each lane downwards
FLIGHTS = (1, 2, 4, 8)  # chunks of a lane in flight
MAX_BASES = 3
MAX_GRID = 2**31 - 1  # blocks of one launch


@dataclass(frozen=True, slots=True)
class SimtReduction:
    problem: Problem

    @property
    def along(self) -> bool:
        """Whether memory runs along the rows."""
        return self.problem.vector not in self.problem.spatial

    @property
    def inner(self) -> int:
        return self.problem.reduced[0]

    def lane_choices(self) -> tuple[int, ...]:
        """From a chunk for each lane to a few, and a warp; of rows side by side some warps' worth."""
        p = self.problem
        limits = p.machine.hw.limits
        chunks = -(-p.inner_points // self._run())
        if not self.along:
            return tuple([n for n in APART_LANES if n <= chunks])
        most = min(limits.max_threads_per_block, powers(chunks)[-1])
        choices = {max(1, most >> i) for i in range(LANES_TRIED + 1)} | {min(most, limits.warp_size)}
        return tuple(sorted(choices, reverse=True))

    def thread_stage(self, lanes: int) -> Stage:
        p = self.problem
        return Stage(
            level=p.machine.hw.thread_level.name,
            names=self._names(),
            steps=tuple([self._thread_steps(i) for i in range(len(p.extents))]),
            rank=self._rank(),
            look=lambda t: self._measured(t, t, Base(t, lanes), self._thread_rule(t)),
            saturates=lambda _tile: True,
        )

    def preferred(self, grown: Grown, lanes: int) -> Sequence[Tile]:
        """The tiles of least traffic, and the smallest."""
        tiles = sorted(grown.large, key=math.prod)
        return list(dict.fromkeys([*grown.large[: MAX_BASES - 1], *tiles[:1]]))

    def block_stage(self, base: Base, epsilon: float) -> Stage:
        p = self.problem
        return Stage(
            level=p.machine.hw.block_level.name,
            names=self._names(),
            steps=tuple([self._block_steps(i, base, epsilon) for i in range(len(p.extents))]),
            rank=self._rank(),
            look=lambda t: self.look(t, base),
            saturates=lambda t: self._threads(t, base) >= MIN_THREADS,
        )

    def look(self, block: Tile, base: Base) -> Look:
        threads = self._threads(block, base)
        too_large = self._capacity_rule(block, base, threads)
        return self._measured(block, base.thread, base, too_large, "" if too_large else self._alignment(block, base))

    def pipelines(self, block: Tile, base: Base, split_k: int) -> Sequence[Pipeline]:
        return (PLAIN,)

    def fallback(self) -> Sequence[tuple[Tile, Base]]:
        """A warp a row, or a thread a row, a chunk at a time."""
        p = self.problem
        thread = tuple([self._run() if i == self.inner else 1 for i in range(len(p.extents))])
        warp = p.machine.hw.limits.warp_size
        one = replaced(thread, self.inner, thread[self.inner] * warp)
        found = [(one, Base(thread, warp))] if self.along else []
        return [*found, (replaced(thread, p.fast, warp), Base(thread)), (thread, Base(thread))]

    # steps ----------------------------------------------------------------------------------------------------------
    def _run(self) -> int:
        """Inner points that a lane takes at once: 16 bytes of what there is most of, or a packed word."""
        p = self.problem
        last = p.space.axes[self.inner].members[-1].extent
        packed = [n for t in walked_reads(p) if (n := _points_a_word(p, t, self.inner)) > 1]
        widest = p.machine.hw.vector_bytes // self._dominant().elem_bytes if self.along else 1
        run = max([widest, *packed])
        while last % run:
            run //= 2
        return max(1, run)

    def _dominant(self) -> AccessFootprint:
        p = self.problem
        fast = [t for t in p.touched.accesses if p.vector in t.axes and t.strides.get(p.vector or 0) == 1]
        return max(fast or p.touched.accesses, key=lambda t: elements(p, t, p.extents) * t.elem_bytes)

    def _thread_steps(self, axis: int) -> Tile:
        p = self.problem
        if axis == self.inner:
            return (self._run(),)
        if axis == p.vector:
            width = p.machine.hw.vector_bytes // self._dominant().elem_bytes
            while p.extents[axis] % width:
                width //= 2
            return (width,)
        if all(axis in t.axes for t in walked_reads(p)):
            return (1,)  # nothing is shared between its points
        extent = p.extents[axis]
        return (*[n for n in powers(MAX_SHARED_POINTS) if n < extent], *((extent,) if extent <= 8 else ()))

    def _block_steps(self, axis: int, base: Base, epsilon: float) -> Tile:
        p, unit = self.problem, base.thread[axis]
        if axis == self.inner:
            whole = -(-p.inner_points // (unit * base.lanes))
            flights = {min(n, whole) for n in FLIGHTS}
            if any(t.access.passes > 1 for t in walked_reads(p)):
                flights.add(whole)
            return tuple([unit * base.lanes * n for n in sorted(flights)])
        fitting = tuple([unit * c for c in counts(p.extents[axis], unit, epsilon, MAX_THREADS)]) or (unit,)
        if axis == p.vector:
            # second alignment: neighbours that fill a transaction, or the whole axis
            need = p.machine.dram.transaction_bytes // self._dominant().elem_bytes
            fitting = tuple([s for s in fitting if s >= need]) or fitting[-1:]
        return fitting

    # rules ----------------------------------------------------------------------------------------------------------
    def _thread_rule(self, thread: Tile) -> str:
        p = self.problem
        points = math.prod([thread[i] for i in p.spatial])
        sums = points * (thread[self.inner] if self.along else 1) * register_words(p.space.compute_dtype)
        return "registers per thread" if sums > MAX_SUMS and points > 1 else ""

    def _capacity_rule(self, block: Tile, base: Base, threads: int) -> str:
        p, limits = self.problem, self.problem.machine.hw.limits
        if threads > min(limits.max_threads_per_block, limits.max_threads_per_core):
            return "threads per block"
        if threads > max(MAX_THREADS, base.lanes):
            return "occupancy"
        walk = self._walk(block, base)
        registers = row_registers(p, base.thread, walk, limits)
        if registers > MAX_REGISTERS and walk.together > 1:
            return "registers per thread"
        granted = min(registers, limits.max_registers_per_thread)
        if block_registers(threads, granted, limits) > limits.registers_per_core:
            return "registers per core"
        if shared_bytes(p, walk, base.lanes, threads) > limits.shared_bytes_per_block:
            return "shared memory"
        return ""

    def _alignment(self, block: Tile, base: Base) -> str:
        threads = self._threads(block, base)
        if threads % self.problem.machine.hw.limits.warp_size:
            return "execution unit"
        huge = self.problem.outer_points > MAX_GRID and spatial_grid(self.problem, block) > MAX_GRID
        return "grid size" if huge else ""

    # measures -------------------------------------------------------------------------------------------------------
    def _walk(self, block: Tile, base: Base) -> LaneWalk:
        return lane_walk(self.problem, block, base.thread, base.lanes)

    def _measured(self, tile: Tile, thread: Tile, base: Base, too_large: str, misaligned: str = "") -> Look:
        """Traffic of the tile's rows from end to end: once where they stay, else once a pass."""
        p = self.problem
        rows = replaced(tile, self.inner, p.inner_points)
        whole = self._walk(tile, base).whole
        moved = 0.0
        for tensor in p.touched.accesses:
            moved += tensor.moved_bytes(rows) * (1 if whole else tensor.access.passes)
        points = math.prod([tile[i] for i in p.spatial])
        return Look(p.touched.bytes(tile), moved / points, too_large, misaligned)

    def _threads(self, block: Tile, base: Base) -> int:
        threads = base.lanes
        for i in self.problem.spatial:
            threads *= block[i] // base.thread[i]
        return threads

    def _rank(self) -> Tile:
        """Rows in flight before rows side by side, of these the vector axis first."""
        p = self.problem
        first = {self.inner: -2, p.fast: -1}
        return tuple([first.get(i, len(p.extents) - i) for i in range(len(p.extents))])

    def _names(self) -> tuple[str, ...]:
        return tuple([a.name for a in self.problem.space.axes])


def _points_a_word(p: Problem, tensor: AccessFootprint, inner: int) -> int:
    """Neighbouring inner points that share an element of a tensor whose index divides them: 8 for 4-bit values."""
    if inner not in tensor.axes or not any(dim.opaque for dim in tensor.access.dims):
        return 1
    points = p.extents[inner] // max(1, math.prod([d.size for d in tensor.access.dims if d.opaque]))
    return points if 1 < points <= p.machine.hw.vector_bytes and points & (points - 1) == 0 else 1
