"""ROLLER's rules for windowed reductions on a CPU: accumulators in registers, staged planes in private caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roller_svc.construct.align import round_up
from roller_svc.construct.rules import ThreadTile, replaced
from roller_svc.construct.scale_up import ScaleUpLevel, ScaleUpResult
from roller_svc.families.common.cpu.rules import equal_parts
from roller_svc.families.common.cpu.tasks import MAX_TASKS_PER_CORE, TaskRules, task_range
from roller_svc.families.cpu.window.cost import tap_cycles, vector_registers
from roller_svc.families.cpu.window.workload import PlaneSpace, layout, staged_bytes
from roller_svc.ir.search import TileMetrics, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

ROWS = (1, 2, 3, 4)  # lines that share inputs
VECTORS = (1, 2, 3, 4)  # adjacent vectors that share weights
MAX_BASES = 4
CUTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # row blocks of a plane
STAGED_L2_DIVISOR = 2  # a task's staged planes take half of L2


@dataclass(frozen=True, slots=True)
class CpuWindowRules(TaskRules):
    planes: PlaneSpace

    @property
    def _last(self) -> int:
        return self.planes.first + len(self.planes.axes) - 1

    def thread_level(self, lanes: int) -> ScaleUpLevel:
        p = self.workload
        width = p.machine.unit.shape[-1]
        steps: dict[int, Tile] = {}
        steps[self._last] = tuple([width * v for v in VECTORS])
        if len(self.planes.axes) > 1:
            steps[self._last - 1] = tuple([r for r in ROWS if r <= p.extents[self._last - 1]])
        return self._thread_level(steps, self._evaluate_thread)

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        """Return the tiles whose taps take the fewest cycles for a whole plane."""
        mach, extents = self.workload.machine, self.workload.extents

        def cycles(thread: Tile) -> float:
            return sum(tap_cycles(mach, s, layout(self.planes, s, extents, thread)) for s in self.planes.reductions)

        return sorted(grown.saturated, key=cycles)[:MAX_BASES]

    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics:
        """Return metrics: staged planes must fit a private cache, and other cores need work."""
        private_bytes = self.workload.machine.hw.limits.shared_bytes_per_core
        planes_bytes = staged_bytes(self.planes, block, base.tile) * STAGED_L2_DIVISOR
        if too_large := check_limit("private cache", planes_bytes, private_bytes):
            return self._measured(block, too_large)
        return TaskRules.evaluate(self, block, base)

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return a line per task, a vector at a time; parts of lines for outputs too wide for any cache."""
        p, width = self.workload, self.workload.machine.unit.shape[-1]
        one = tuple([p.extents[i] if i in p.reduced else 1 for i in range(len(p.extents))])
        thread = replaced(tuple([1] * len(p.extents)), self._last, width)
        whole = round_up(p.extents[self._last], width)
        return [(replaced(one, self._last, size), ThreadTile(thread)) for size in (whole, min(whole, 64 * width), width)]

    def _allows_small_tasks(self, block: Tile) -> bool:
        """Return whether planes are cut into row blocks."""
        return any(block[self.planes.first + i] < a.extent for i, a in enumerate(self.planes.axes))

    def _evaluate_thread(self, thread: Tile) -> TileMetrics:
        most = self.workload.machine.hw.limits.max_registers_per_thread
        registers = vector_registers(self.workload, self.planes, thread)
        return self._measured(thread, check_limit("registers per thread", registers, most))

    def _block_steps(self, axis: int, extent: int, unit: int) -> Tile:
        p = self.workload
        whole = round_up(extent, unit)
        if axis < self.planes.first:
            cuts = equal_parts(extent, unit, (*CUTS, p.machine.cores * MAX_TASKS_PER_CORE), min_units=0)
            return tuple(sorted({1, whole} | cuts))
        bands = equal_parts(extent, unit, CUTS, min_units=2)
        if axis == self._last:
            bands = {b for b in bands if b >= 16 * unit}
            bands |= {u for u in (64 * unit, 256 * unit) if u < whole}
        return tuple(sorted({whole} | bands))


def window_rules(p: Workload[Any], planes: PlaneSpace) -> CpuWindowRules:
    """Return the rules of one group."""
    fewest, most = task_range(p)
    return CpuWindowRules(p, fewest, most, planes)
