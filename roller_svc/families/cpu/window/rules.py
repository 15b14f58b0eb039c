"""ROLLER's rules for reductions over windows on a CPU: totals in registers, staged planes in private caches."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roller_svc.construct.align import padded
from roller_svc.construct.rules import PLAIN, Base, Pipeline, axis_names, replaced
from roller_svc.construct.scale_up import Grown, Look, Stage
from roller_svc.families.common.cpu.tasks import MOST_PER_CORE, TaskRules, task_counts
from roller_svc.families.cpu.window.cost import staged_bytes, tap_cycles, vector_registers
from roller_svc.families.cpu.window.workload import PlaneSpace, layout
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

ROWS = (1, 2, 3, 4)  # lines that share what they read
VECTORS = (1, 2, 3, 4)  # neighbours along the run that share weights
MAX_BASES = 4
CUTS = (2, 3, 4, 6, 8, 12, 16, 24, 32, 64)  # bands of a plane
STAGED_SHARE = 2  # a task's staged planes take so much of the second cache: a half


@dataclass(frozen=True, slots=True)
class CpuWindow(TaskRules):
    planes: PlaneSpace

    @property
    def _last(self) -> int:
        return self.planes.first + len(self.planes.axes) - 1

    def lane_choices(self) -> tuple[int, ...]:
        return (1,)

    def thread_stage(self, lanes: int) -> Stage:
        p = self.workload
        width = p.machine.unit.shape[-1]
        steps: list[Tile] = [(1,)] * len(p.extents)
        steps[self._last] = tuple([width * v for v in VECTORS])
        if len(self.planes.axes) > 1:
            steps[self._last - 1] = tuple([r for r in ROWS if r <= p.extents[self._last - 1]])
        return Stage(
            level=p.machine.hw.thread_level.name,
            names=axis_names(self.workload),
            steps=tuple(steps),
            rank=tuple(range(len(p.extents))),
            look=self._thread_look,
            saturates=lambda _tile: True,
        )

    def preferred(self, grown: Grown, lanes: int) -> Sequence[Tile]:
        """Those whose taps take the fewest cycles for a whole plane."""
        mach, extents = self.workload.machine, self.workload.extents

        def cycles(thread: Tile) -> float:
            return sum(tap_cycles(mach, s, layout(self.planes, s, extents, thread)) for s in self.planes.sums)

        return sorted(grown.large, key=cycles)[:MAX_BASES]

    def look(self, block: Tile, base: Base) -> Look:
        """Staged planes stay in a private cache, and a task leaves work for the other cores."""
        private_bytes = self.workload.machine.hw.limits.shared_bytes_per_core
        if staged_bytes(self.planes, block, base.thread) * STAGED_SHARE > private_bytes:
            return self._measured(block, "private cache")
        return TaskRules.look(self, block, base)

    def pipelines(self, block: Tile, base: Base, split_k: int) -> Sequence[Pipeline]:
        return (PLAIN,)

    def fallback(self) -> Sequence[tuple[Tile, Base]]:
        """A line a task, a vector of it at a time; for outputs too wide for any cache, parts of lines."""
        p, width = self.workload, self.workload.machine.unit.shape[-1]
        one = tuple([p.extents[i] if i in p.reduced else 1 for i in range(len(p.extents))])
        thread = replaced(tuple([1] * len(p.extents)), self._last, width)
        whole = padded(p.extents[self._last], width)
        return [(replaced(one, self._last, size), Base(thread)) for size in (whole, min(whole, 64 * width), width)]

    def _is_banded(self, block: Tile) -> bool:
        """Whether planes are cut."""
        return any(block[self.planes.first + i] < a.extent for i, a in enumerate(self.planes.axes))

    def _thread_look(self, thread: Tile) -> Look:
        fits = vector_registers(self.workload, self.planes, thread) <= self._registers
        return self._measured(thread, "" if fits else "registers per thread")

    @property
    def _registers(self) -> int:
        return self.workload.machine.hw.limits.max_registers_per_thread

    def _block_steps(self, axis: int, base: Base) -> Tile:
        p = self.workload
        extent, unit = p.extents[axis], base.thread[axis]
        if axis not in p.spatial:
            return (extent,)
        whole = padded(extent, unit)
        if axis < self.planes.first:
            cuts = {padded(-(-extent // cut), unit) for cut in (*CUTS, p.machine.cores * MOST_PER_CORE)}
            return tuple(sorted({1, whole} | cuts))
        bands = {padded(-(-extent // cut), unit) for cut in CUTS if extent >= 2 * cut * unit}
        if axis == self._last:
            bands = {b for b in bands if b >= 16 * unit}
            bands |= {u for u in (64 * unit, 256 * unit) if u < whole}
        return tuple(sorted({whole} | bands))


def cpu_window(p: Workload[Any], planes: PlaneSpace) -> CpuWindow:
    """The rules of one group."""
    fewest, most = task_counts(p)
    return CpuWindow(p, fewest, most, planes)
