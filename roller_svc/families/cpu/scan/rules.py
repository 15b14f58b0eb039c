"""ROLLER's rules for scans on a CPU: whole rows, or columns whose carries stay in L1."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.construct.align import round_up
from roller_svc.construct.rules import ThreadTile, replaced
from roller_svc.construct.scale_up import ScaleUpLevel, ScaleUpResult
from roller_svc.families.common.cpu.rules import equal_parts
from roller_svc.families.common.cpu.tasks import TaskRules, task_range
from roller_svc.families.cpu.scan.workload import ScanSpace
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

MAX_CARRY_BYTES = 16 << 10  # of the columns of one task: half of L1
TASKS_PER_CORE = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class CpuScanRules(TaskRules):
    scan: ScanSpace

    def thread_level(self, lanes: int) -> ScaleUpLevel:
        column = self.scan.column
        steps: dict[int, Tile] = {} if column is None else {column: (self.workload.machine.unit.shape[-1],)}
        return self._thread_level(steps, self._measured)

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        return grown.saturated

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return everything in one task, or as many columns as may be."""
        p, column = self.workload, self.scan.column
        one = tuple([1] * len(p.extents))
        if column is None:
            return [(p.extents, ThreadTile(one))]
        width = p.machine.unit.shape[-1]
        most = min(round_up(p.extents[column], width), self._most_columns)
        return [(replaced(p.extents, column, most), ThreadTile(replaced(one, column, width)))]

    def _block_steps(self, axis: int, extent: int, unit: int) -> Tile:
        """Return about equal cuts for the cores, and the whole axis if carries fit."""
        whole = round_up(extent, unit)
        cuts = (2, *(n * self.workload.machine.cores for n in TASKS_PER_CORE))
        sizes = {whole} | equal_parts(extent, unit, cuts)
        if axis != self.scan.column:
            return tuple(sorted(sizes))
        most = self._most_columns
        return tuple(sorted(s for s in {*sizes, most} if s <= most and s <= whole))

    def _allows_small_tasks(self, block: Tile) -> bool:
        """Return whether carries bound the columns of a task."""
        column = self.scan.column
        return column is not None and block[column] < self.workload.extents[column]

    @property
    def _most_columns(self) -> int:
        return MAX_CARRY_BYTES // self.workload.elem_bytes


def scan_rules(p: Workload[ScanSpace]) -> CpuScanRules:
    fewest, most = task_range(p)
    return CpuScanRules(p, fewest, most, p.facts)
