"""ROLLER's rules for a loop nest on a CPU: vectors along one axis, tasks that are large enough."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roller_svc.construct.align import round_up
from roller_svc.construct.rules import ThreadTile
from roller_svc.construct.scale_up import ScaleUpLevel, ScaleUpResult
from roller_svc.families.common.cpu.column_reduction import is_column_reduction
from roller_svc.families.common.cpu.rules import equal_parts
from roller_svc.families.common.cpu.shared_rows import SHARED_STEPS, most_accumulators, shared_axis
from roller_svc.families.common.cpu.tasks import TaskRules, task_range
from roller_svc.ir.program import AxisKind
from roller_svc.ir.rprogram import DEFAULT_PIPELINE, PipelineOptions
from roller_svc.ir.search import BrokenRule, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

VECTOR_STEPS = (1, 2, 4)
# rows whose reductions run in parallel: as many memory streams, and one load of shared operands
ROWS_PER_ITERATION = 4
MAX_STEPS = 8
TASKS_PER_CORE = (1, 2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class CpuLoopRules(TaskRules):
    serial: bool  # a scatter: its writes may collide, so one task does them in order

    def reduce_thread_choices(self) -> tuple[int, ...]:
        """Return vector lanes per reduction where it is contiguous, or no outer axis fills a vector."""
        p = self.workload
        width = p.machine.unit.shape[-1]
        if self.serial or p.inner_points < 2:
            return (1,)
        along = p.vector_axis is not None and p.space.axes[p.vector_axis].kind is AxisKind.REDUCE
        short = p.vector_axis is None or p.extents[p.vector_axis] < width // 2
        if not (along or short):
            return (1,)
        innermost = p.space.axes[p.reduced[-1]].members[-1].extent  # lanes are adjacent along it
        return tuple([width * v for v in VECTOR_STEPS if width * v <= innermost]) or (1,)

    def thread_level(self, lanes: int) -> ScaleUpLevel:
        p = self.workload
        width = p.machine.unit.shape[-1]
        steps: dict[int, Tile] = {}
        if lanes == 1 and not self.serial and p.vector_axis is not None and p.vector_axis in p.spatial:
            whole = round_up(p.extents[p.vector_axis], width)
            steps[p.vector_axis] = tuple([width * v for v in VECTOR_STEPS if width * v <= whole])
            if is_column_reduction(p.space) and p.extents[p.vector_axis] % width == 0:
                steps |= self._shared_steps()
        rows = next((i for i in reversed(p.spatial) if p.extents[i] >= ROWS_PER_ITERATION), None)
        if lanes > 1 and rows is not None and p.space.reduces_rows:
            steps = {**self._shared_steps(), rows: (1, ROWS_PER_ITERATION)}
        return self._thread_level(steps, lambda tile: self._measured(tile, self._register_rule(tile, lanes)))

    def _shared_steps(self) -> dict[int, Tile]:
        """Return the points in flight along an axis whose points read the same rows."""
        shared = shared_axis(self.workload.space)
        return {} if shared is None else {shared: tuple(s for s in SHARED_STEPS if s <= self.workload.extents[shared])}

    def _register_rule(self, tile: Tile, lanes: int) -> BrokenRule | None:
        """Return the broken rule where the accumulators of points that share rows exceed the registers."""
        p, shared = self.workload, shared_axis(self.workload.space)
        if shared is None or tile[shared] == 1:
            return None
        columns = lanes if lanes > 1 or p.vector_axis is None else p.extents[p.vector_axis]
        rows = math.prod(tile) if lanes > 1 else tile[shared]
        vectors, most = rows * columns // p.machine.unit.shape[-1], p.machine.hw.limits.max_registers_per_thread
        return check_limit("vector registers", vectors, most_accumulators(most))

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        return grown.saturated

    def pipeline_choices(self, block: Tile, base: ThreadTile, split_k: int) -> Sequence[PipelineOptions]:
        """Return cached and non-temporal stores, the latter where outputs exceed the LLC."""
        p = self.workload
        last = p.machine.llc
        large = last is None or p.compulsory_bytes > last.total_bytes // 2
        is_map = not p.reduced and p.vector_axis in p.spatial
        if self.serial or not large or not (is_map or self._writes_rows(base)):
            return (DEFAULT_PIPELINE,)
        return (DEFAULT_PIPELINE, PipelineOptions(nontemporal=True))

    def _writes_rows(self, base: ThreadTile) -> bool:
        """Return whether lanes write rows that are not read back; cached intermediates of expensive sums are."""
        p = self.workload
        dear = any(one.combine and one.counts.is_expensive for one in p.facts.statements)
        if base.reduce_threads == 1 or dear or p.vector_axis is None or p.vector_axis not in p.reduced:
            return False
        return any(t.varies_with_reduction and t.strides.get(p.vector_axis) == 1 for t in p.footprint.writes)

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return everything in one task, one point at a time."""
        p = self.workload
        return [(p.extents, ThreadTile(tuple([1] * len(p.extents))))]

    def _block_steps(self, axis: int, extent: int, unit: int) -> Tile:
        """Return whole threads: powers of two, about equal cuts for the cores, and the whole axis."""
        p = self.workload
        whole = round_up(extent, unit)
        if self.max_tasks == 1:
            return (whole,)
        cuts = (2, *(n * p.machine.cores for n in TASKS_PER_CORE))
        sizes = {whole} | equal_parts(extent, unit, cuts)
        sizes |= {unit << i for i in (0, 2, 3, 4) if unit << i < whole}
        return tuple(sorted(sizes))[-MAX_STEPS:] if axis == p.vector_axis else tuple(sorted(sizes))

    def _block_rank(self) -> Tile:
        """Return the order of growth: the vector axis first."""
        count = len(self.workload.extents)
        return tuple([-1 if i == self.workload.vector_axis else count - i for i in range(count)])


def loop_rules(p: Workload[Any], *, serial: bool) -> CpuLoopRules:
    """Return the rules of one loop nest."""
    fewest, most = (1, 1) if serial else task_range(p)
    return CpuLoopRules(p, min(fewest, _vectors(p)), most, serial)


def _vectors(p: Workload[Any]) -> int:
    """Return the tasks of a vector each: few columns are few tasks, whose reduction may be split."""
    if p.vector_axis is None or p.vector_axis not in p.spatial:
        return p.outer_points
    extent = p.extents[p.vector_axis]
    return p.outer_points // extent * -(-extent // p.machine.unit.shape[-1])
