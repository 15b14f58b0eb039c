"""Rules shared by loop nests on a GPU: little reuse, and enough threads."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from roller_svc.construct.rules import DEFAULT_PIPELINE, PipelineOptions, ThreadTile, axis_names
from roller_svc.construct.scale_up import ScaleUpLevel, TileMetrics
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload


@dataclass(frozen=True, slots=True)
class LoopRules(ABC):
    """Levels whose steps are found axis by axis. Every thread tile is large enough; blocks need MIN_THREADS."""

    workload: Workload[Any]

    MIN_THREADS: ClassVar[int] = 64  # per block; fewer leave most threads of a core unused

    def reduce_thread_choices(self) -> tuple[int, ...]:
        return (1,)

    def thread_level(self, lanes: int) -> ScaleUpLevel:
        return ScaleUpLevel(
            level=self.workload.machine.hw.thread_level.name,
            names=axis_names(self.workload),
            steps=tuple([self._thread_steps(i) for i in range(len(self.workload.extents))]),
            axis_rank=self._axis_rank(),
            evaluate=lambda tile: self._evaluate_thread(tile, lanes),
            is_saturated=lambda _tile: True,
        )

    def block_level(self, base: ThreadTile, epsilon: float) -> ScaleUpLevel:
        return ScaleUpLevel(
            level=self.workload.machine.hw.block_level.name,
            names=axis_names(self.workload),
            steps=tuple([self._block_steps(i, base, epsilon) for i in range(len(self.workload.extents))]),
            axis_rank=self._axis_rank(),
            evaluate=lambda tile: self.evaluate(tile, base),
            is_saturated=lambda tile: self._threads(tile, base) >= self.MIN_THREADS,
        )

    def pipeline_choices(self, block: Tile, base: ThreadTile, split_k: int) -> Sequence[PipelineOptions]:
        return (DEFAULT_PIPELINE,)

    @abstractmethod
    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics: ...

    @abstractmethod
    def _evaluate_thread(self, thread: Tile, lanes: int) -> TileMetrics: ...

    @abstractmethod
    def _thread_steps(self, axis: int) -> Tile:
        """Return the extents of a thread's tile along an axis, ascending."""

    @abstractmethod
    def _block_steps(self, axis: int, base: ThreadTile, epsilon: float) -> Tile:
        """Return the extents of a block's tile along an axis, ascending."""

    @property
    @abstractmethod
    def _first_axes(self) -> tuple[int | None, ...]:
        """Axes that grow first, in that order; the others follow from the inside out."""

    def _axis_rank(self) -> Tile:
        count, first = len(self.workload.extents), self._first_axes
        return tuple([first.index(i) - len(first) if i in first else count - i for i in range(count)])

    def _threads(self, block: Tile, base: ThreadTile) -> int:
        return base.reduce_threads * math.prod([block[i] // base.tile[i] for i in self.workload.spatial])
