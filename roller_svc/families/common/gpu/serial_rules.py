"""Rules for scatters and single points on a GPU: warps along the contiguous axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from roller_svc.construct.align import powers_of_two, tile_multiples
from roller_svc.construct.rules import ThreadTile, replaced, subsample
from roller_svc.construct.scale_up import ScaleUpResult
from roller_svc.families.common.gpu.loop_rules import LoopRules
from roller_svc.families.common.gpu.serial_cost import nest_registers
from roller_svc.ir.search import BrokenRule, TileMetrics, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS, register_words
from roller_svc.perf.occupancy import block_registers

MAX_POINTS = 16  # of one thread
MAX_THREADS = 512
MAX_BASES = 3


@dataclass(frozen=True, slots=True)
class SerialRules(LoopRules):
    MIN_THREADS: ClassVar[int] = 128

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        """Return tiles from one point to many along the contiguous axis, then those of least traffic."""
        vector_only = [t for t in grown.saturated if all(x == 1 for i, x in enumerate(t) if i != self.workload.contiguous_axis)]
        return list(dict.fromkeys([*subsample(vector_only, MAX_BASES - 1), *grown.saturated]))[:MAX_BASES]

    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics:
        threads = self._threads(block, base)
        too_large = self._capacity_rule(threads, base)
        return self._measured(block, too_large, None if too_large else self._alignment_rule(block, threads))

    def _capacity_rule(self, threads: int, base: ThreadTile) -> BrokenRule | None:
        p, limits = self.workload, self.workload.machine.hw.limits
        most = min(limits.max_threads_per_block, limits.max_threads_per_core)
        registers = nest_registers(math.prod(self._points(base.tile)), register_words(p.space.compute_dtype), limits)
        return (
            check_limit("threads per block", threads, most)
            or check_limit("occupancy", threads, MAX_THREADS)
            or check_limit("registers per core", block_registers(threads, registers, limits), limits.registers_per_core)
        )

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return one point per thread, a warp along the contiguous axis."""
        p = self.workload
        warp = p.machine.hw.limits.warp_size
        one = tuple([1] * len(p.extents))
        found = [(replaced(one, p.contiguous_axis, warp), ThreadTile(one))] if p.spatial else []
        return [*found, (one, ThreadTile(one))]

    def _thread_steps(self, axis: int) -> Tile:
        p = self.workload
        return powers_of_two(min(8 if axis == p.contiguous_axis else 4, p.extents[axis]))

    def _block_steps(self, axis: int, base: ThreadTile, epsilon: float) -> Tile:
        p = self.workload
        unit = base.tile[axis]
        fitting = tuple([unit * c for c in tile_multiples(p.extents[axis], unit, epsilon, MAX_THREADS)]) or (unit,)
        if axis == p.contiguous_axis:
            # second alignment: contiguous elements for a whole warp, or the whole axis
            warp = p.machine.hw.limits.warp_size
            fitting = tuple([s for s in fitting if s >= warp * unit // 2]) or fitting[-1:]
        return fitting

    def _thread_rule(self, thread: Tile) -> BrokenRule | None:
        p, limits = self.workload, self.workload.machine.hw.limits
        points, words = math.prod(self._points(thread)), register_words(p.space.compute_dtype)
        if points == 1:
            return None
        return (
            check_limit("points per thread", points, MAX_POINTS)
            or check_limit("parallelism", points * p.machine.cores * limits.warp_size * SCHEDULERS, p.outer_points)
            or check_limit("registers per thread", nest_registers(points, words, limits), limits.max_registers_per_thread)
        )

    def _points(self, thread: Tile) -> Tile:
        return tuple([thread[i] for i in self.workload.spatial])

    @property
    def _first_axes(self) -> tuple[int | None, ...]:
        """The contiguous axis: there is no reuse."""
        return (self.workload.contiguous_axis,)
