"""Rules of CPU kernels with independent tasks: tasks for every core, in whole waves."""

from __future__ import annotations

import math
from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import Any, Self

from roller_svc.construct.rules import ThreadTile, spatial_grid
from roller_svc.construct.scale_up import ScaleUpLevel
from roller_svc.families.common.cpu.rules import CpuRules
from roller_svc.ir.search import BrokenRule, TileMetrics
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

MIN_TASK_S = 10e-6  # work of one core that is worth a task
MAX_TASKS_PER_CORE = 16  # bounds the imbalance of the last task to a sixteenth of a core's time


def task_range(p: Workload[Any]) -> tuple[int, int]:
    """Return the minimum and maximum number of tasks: some for each core, none too small.

    Work is the roofline bound on one core, well below the real time. Between the launch overhead and two tasks' worth
    of work, anything from one task to one per core is allowed, and the model decides.
    """
    cores, work_s = p.machine.cores, p.lower_bound_s * p.machine.cores
    worth = int(work_s / MIN_TASK_S)
    if worth >= 2:
        most = max(cores, min(MAX_TASKS_PER_CORE * cores, worth))
        return min(cores, p.outer_points), most
    return 1, cores if work_s >= p.machine.hw.limits.launch_overhead_s else 1


@dataclass(frozen=True, slots=True)
class TaskRules(CpuRules):
    """A block is a task: its extents are found axis by axis, and any tile is large enough.

    Cuts of several axes give few numbers of tasks. The relaxed rules are for problems where none is in the range, such
    as rows fewer than cores: the model then decides.
    """

    min_tasks: int
    max_tasks: int

    def relax(self) -> Self:
        most = max(self.max_tasks, MAX_TASKS_PER_CORE * self.workload.machine.cores)
        return replace(self, min_tasks=1, max_tasks=most, needs_whole_waves=False)

    def block_level(self, base: ThreadTile, epsilon: float) -> ScaleUpLevel:
        steps: dict[int, Tile] = {i: (extent,) for i, extent in enumerate(self.workload.extents)}
        steps |= {i: self._block_steps(i, self.workload.extents[i], base.tile[i]) for i in self.workload.spatial}
        return self._block_level(steps, self._block_rank(), lambda t: self.evaluate(t, base))

    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics:
        """Return the metrics of a task: it must leave work for other cores, be large enough, and fill whole waves."""
        tasks = spatial_grid(self.workload, block)
        if tasks < self.min_tasks:
            return self._measured(block, BrokenRule("parallelism", self.min_tasks, tasks))
        if tasks > self.max_tasks and not self._allows_small_tasks(block):
            return self._measured(block, None, BrokenRule("task size", tasks, self.max_tasks))
        return self._measured(block, None, None if tasks == 1 else self._check_waves(tasks))

    @abstractmethod
    def _block_steps(self, axis: int, extent: int, unit: int) -> Tile:
        """Return the extents of a task's tile along a spatial axis, ascending; a thread has `unit` of its `extent`."""

    def _block_rank(self) -> Tile:
        """Return the order of growth: outermost axes last."""
        count = len(self.workload.extents)
        return tuple([count - i for i in range(count)])

    def _allows_small_tasks(self, block: Tile) -> bool:
        """Return whether tiles are cut to fit a cache, so that more tasks than usual are allowed."""
        return False

    def _measured(self, tile: Tile, too_large: BrokenRule | None = None, misaligned: BrokenRule | None = None) -> TileMetrics:
        """Return a tile's footprint, and the bytes that it moves per computed point."""
        footprint_bytes, moved = self.workload.footprint.measure(tile)
        points = math.prod([tile[i] for i in self.workload.spatial])
        return TileMetrics(footprint_bytes, moved / points, too_large, misaligned)
