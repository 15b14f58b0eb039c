"""ROLLER's rules for scatters, and for a single point, on a SIMT machine: warps along the vector axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from roller_svc.construct.align import counts, powers
from roller_svc.construct.rules import Base, exceeds_grid, replaced, spread
from roller_svc.construct.scale_up import Grown, Look
from roller_svc.families.common.gpu.loop_rules import NestRules
from roller_svc.families.common.gpu.serial_cost import nest_registers
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS, register_words
from roller_svc.perf.occupancy import block_registers

MAX_POINTS = 16  # of one thread
MAX_THREADS = 512
MAX_BASES = 3


@dataclass(frozen=True, slots=True)
class SimtNest(NestRules):
    ENOUGH_THREADS: ClassVar[int] = 128

    def preferred(self, grown: Grown, lanes: int) -> Sequence[Tile]:
        """From one point to many along the vector axis, then the tiles of least traffic."""
        vector_only = [t for t in grown.large if all(x == 1 for i, x in enumerate(t) if i != self.workload.fast)]
        return list(dict.fromkeys([*spread(vector_only, MAX_BASES - 1), *grown.large]))[:MAX_BASES]

    def look(self, block: Tile, base: Base) -> Look:
        threads = self._threads(block, base)
        too_large = self._capacity_rule(threads, base)
        return self._measured(block, too_large, "" if too_large else self._alignment_rule(block, threads))

    def _capacity_rule(self, threads: int, base: Base) -> str:
        p, limits = self.workload, self.workload.machine.hw.limits
        if threads > min(limits.max_threads_per_block, limits.max_threads_per_core):
            return "threads per block"
        if threads > MAX_THREADS:
            return "occupancy"
        registers = nest_registers(math.prod(self._points(base.thread)), register_words(p.space.compute_dtype), limits)
        if block_registers(threads, registers, limits) > limits.registers_per_core:
            return "registers per core"
        return ""

    def _alignment_rule(self, block: Tile, threads: int) -> str:
        if threads % self.workload.machine.hw.limits.warp_size:
            return "execution unit"
        huge = exceeds_grid(self.workload, block)
        return "grid size" if huge else ""

    def fallback(self) -> Sequence[tuple[Tile, Base]]:
        """One point a thread, a warp along the vector axis."""
        p = self.workload
        warp = p.machine.hw.limits.warp_size
        one = tuple([1] * len(p.extents))
        found = [(replaced(one, p.fast, warp), Base(one))] if p.spatial else []
        return [*found, (one, Base(one))]

    def _thread_steps(self, axis: int) -> Tile:
        p = self.workload
        return powers(min(8 if axis == p.fast else 4, p.extents[axis]))

    def _block_steps(self, axis: int, base: Base, epsilon: float) -> Tile:
        p = self.workload
        unit = base.thread[axis]
        fitting = tuple([unit * c for c in counts(p.extents[axis], unit, epsilon, MAX_THREADS)]) or (unit,)
        if axis == p.fast:
            # second alignment: a warp's worth of neighbours, or the whole axis
            warp = p.machine.hw.limits.warp_size
            fitting = tuple([s for s in fitting if s >= warp * unit // 2]) or fitting[-1:]
        return fitting

    def _thread_rule(self, thread: Tile) -> str:
        p, limits = self.workload, self.workload.machine.hw.limits
        points, words = math.prod(self._points(thread)), register_words(p.space.compute_dtype)
        if points > MAX_POINTS:
            return "points per thread"
        if points > 1 and p.outer_points < points * p.machine.cores * limits.warp_size * SCHEDULERS:
            return "parallelism"
        fits = nest_registers(points, words, limits) <= limits.max_registers_per_thread
        return "" if fits or points == 1 else "registers per thread"

    def _points(self, thread: Tile) -> Tile:
        return tuple([thread[i] for i in self.workload.spatial])

    def _measured(self, tile: Tile, too_large: str, misaligned: str = "") -> Look:
        footprint_bytes, moved = self.workload.touched.measure(tile)
        points = 1
        for i in self.workload.spatial:
            points *= tile[i]
        return Look(footprint_bytes, moved / points, too_large, misaligned)

    def _thread_look(self, thread: Tile, lanes: int) -> Look:
        return self._measured(thread, self._thread_rule(thread))

    @property
    def _first(self) -> tuple[int | None, ...]:
        """Without reuse, the vector axis."""
        return (self.workload.fast,)
