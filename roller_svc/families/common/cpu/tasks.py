"""What ROLLER's rules for CPU kernels of independent tasks have in common: tasks for every core, in whole waves.

How many tasks a launch of a CPU kernel may have.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

from roller_svc.construct.rules import Base, axis_names, fills_waves, spatial_grid
from roller_svc.construct.scale_up import Look, Stage
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

TASK_SECONDS = 10e-6  # of one core: work that is worth a task of its own
MOST_PER_CORE = 16  # tasks: what one of them takes longer than the others is then a sixteenth of a core's time


def task_counts(p: Workload[Any]) -> tuple[int, int]:
    """The fewest and the most: some for each core, none too small to be worth it.

    Work is the floor in one core's time, far below what it takes. Where it is less than two tasks' worth, but a
    launch's overhead at least, anything from one task to one for each core is allowed, and the model decides.
    """
    cores, work_s = p.machine.cores, p.floor_s * p.machine.cores
    worth = int(work_s / TASK_SECONDS)
    if worth >= 2:
        most = max(cores, min(MOST_PER_CORE * cores, worth))
        return min(cores, p.outer_points), most
    return 1, cores if work_s >= p.machine.hw.limits.launch_overhead_s else 1


@dataclass(frozen=True, slots=True)
class TaskRules(ABC):
    """A block is a task; the steps of its extents are found axis by axis, and any tile is large enough."""

    workload: Workload[Any]
    fewest_tasks: int
    most_tasks: int

    def block_stage(self, base: Base, epsilon: float) -> Stage:
        p = self.workload
        return Stage(
            level=p.machine.hw.block_level.name,
            names=axis_names(p),
            steps=tuple([self._block_steps(i, base) for i in range(len(p.extents))]),
            rank=self._block_rank(),
            look=lambda t: self.look(t, base),
            saturates=lambda _tile: True,
        )

    def look(self, block: Tile, base: Base) -> Look:
        """A task must leave work for the other cores, be worth handing out, and come in whole waves."""
        tasks, cores = spatial_grid(self.workload, block), self.workload.machine.cores
        if tasks < self.fewest_tasks:
            return self._measured(block, "parallelism")
        if tasks > self.most_tasks and not self._is_banded(block):
            return self._measured(block, "", "task size")
        balanced = tasks == 1 or fills_waves(tasks, cores)
        return self._measured(block, "", "" if balanced else "execution unit")

    @abstractmethod
    def _block_steps(self, axis: int, base: Base) -> Tile:
        """Extents of a task's tile along an axis, ascending."""

    def _block_rank(self) -> Tile:
        """The outermost axes grow last."""
        count = len(self.workload.extents)
        return tuple([count - i for i in range(count)])

    def _is_banded(self, block: Tile) -> bool:
        """Whether tiles are cut for a cache's sake: more tasks than are worth handing out then may be what fits it."""
        return False

    def _measured(self, tile: Tile, too_large: str = "", misaligned: str = "") -> Look:
        """Of a tile its footprint and what it moves for each point that it computes."""
        footprint_bytes, moved = self.workload.touched.measure(tile)
        points = math.prod([tile[i] for i in self.workload.spatial])
        return Look(footprint_bytes, moved / points, too_large, misaligned)
