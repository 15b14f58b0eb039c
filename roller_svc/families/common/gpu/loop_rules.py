"""What ROLLER's rules for the nests of a SIMT machine have in common: little reuse, and threads to keep busy."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from roller_svc.construct.rules import PLAIN, Base, Pipeline, axis_names
from roller_svc.construct.scale_up import Look, Stage
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload


@dataclass(frozen=True, slots=True)
class NestRules(ABC):
    """Stages whose steps are found axis by axis. Every thread tile is large enough; a block is with ENOUGH_THREADS."""

    workload: Workload[Any]

    ENOUGH_THREADS: ClassVar[int] = 64  # of a block: fewer leave most of a core's threads unused

    def lane_choices(self) -> tuple[int, ...]:
        return (1,)

    def thread_stage(self, lanes: int) -> Stage:
        return Stage(
            level=self.workload.machine.hw.thread_level.name,
            names=axis_names(self.workload),
            steps=tuple([self._thread_steps(i) for i in range(len(self.workload.extents))]),
            rank=self._rank(),
            look=lambda tile: self._thread_look(tile, lanes),
            saturates=lambda _tile: True,
        )

    def block_stage(self, base: Base, epsilon: float) -> Stage:
        return Stage(
            level=self.workload.machine.hw.block_level.name,
            names=axis_names(self.workload),
            steps=tuple([self._block_steps(i, base, epsilon) for i in range(len(self.workload.extents))]),
            rank=self._rank(),
            look=lambda tile: self.look(tile, base),
            saturates=lambda tile: self._threads(tile, base) >= self.ENOUGH_THREADS,
        )

    def pipelines(self, block: Tile, base: Base, split_k: int) -> Sequence[Pipeline]:
        return (PLAIN,)

    @abstractmethod
    def look(self, block: Tile, base: Base) -> Look: ...

    @abstractmethod
    def _thread_look(self, thread: Tile, lanes: int) -> Look: ...

    @abstractmethod
    def _thread_steps(self, axis: int) -> Tile:
        """Extents of a thread's tile along an axis, ascending."""

    @abstractmethod
    def _block_steps(self, axis: int, base: Base, epsilon: float) -> Tile:
        """Extents of a block's tile along an axis, ascending."""

    @property
    @abstractmethod
    def _first(self) -> tuple[int | None, ...]:
        """The axes that grow first, in that order; the others follow from the inside out."""

    def _rank(self) -> Tile:
        count, first = len(self.workload.extents), self._first
        return tuple([first.index(i) - len(first) if i in first else count - i for i in range(count)])

    def _threads(self, block: Tile, base: Base) -> int:
        return base.lanes * math.prod([block[i] // base.thread[i] for i in self.workload.spatial])
