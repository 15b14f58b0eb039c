"""Rules shared by loop nests on a GPU: little reuse, and enough threads."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

from roller_svc.construct.rules import ThreadTile, check_grid, check_warps
from roller_svc.construct.scale_up import ScaleUpLevel
from roller_svc.ir.rprogram import DEFAULT_PIPELINE, PipelineOptions
from roller_svc.ir.search import BrokenRule, TileMetrics
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload


@dataclass(frozen=True, slots=True)
class LoopRules(ABC):
    """Levels whose steps are found axis by axis. Every thread tile is large enough; blocks need MIN_THREADS."""

    workload: Workload[Any]

    MIN_THREADS: ClassVar[int] = 64  # per block; fewer leave most threads of a core unused

    @property
    def points(self) -> int:
        """Points to which the traffic of a tile refers: results."""
        return self.workload.outer_points

    def reduce_thread_choices(self) -> tuple[int, ...]:
        return (1,)

    def thread_level(self, lanes: int) -> ScaleUpLevel:
        return ScaleUpLevel(
            level=self.workload.machine.hw.thread_level.name,
            points=self.points,
            steps=tuple([self._thread_steps(i) for i in range(len(self.workload.extents))]),
            axis_rank=self._axis_rank(),
            evaluate=lambda tile: self._evaluate_thread(tile, lanes),
            is_saturated=lambda _tile: True,
        )

    def block_level(self, base: ThreadTile, epsilon: float) -> ScaleUpLevel:
        return ScaleUpLevel(
            level=self.workload.machine.hw.block_level.name,
            points=self.points,
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
    def _thread_rule(self, thread: Tile) -> BrokenRule | None:
        """Return the rule that a thread's tile breaks."""

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

    def _evaluate_thread(self, thread: Tile, lanes: int) -> TileMetrics:
        return self._measured(thread, self._thread_rule(thread))

    def _measured(self, tile: Tile, too_large: BrokenRule | None, misaligned: BrokenRule | None = None) -> TileMetrics:
        """Return a tile's footprint, and the bytes that it moves per computed point."""
        footprint_bytes, moved = self.workload.footprint.measure(tile)
        points = 1
        for i in self.workload.spatial:
            points *= tile[i]
        return TileMetrics(footprint_bytes, moved / points, too_large, misaligned)

    def _alignment_rule(self, block: Tile, threads: int) -> BrokenRule | None:
        """Return the broken rule of whole warps or of the grid."""
        return check_warps(threads, self.workload.machine.hw.limits.warp_size) or check_grid(self.workload, block)

    def _axis_rank(self) -> Tile:
        count, first = len(self.workload.extents), self._first_axes
        return tuple([first.index(i) - len(first) if i in first else count - i for i in range(count)])

    def _threads(self, block: Tile, base: ThreadTile) -> int:
        return base.reduce_threads * math.prod([block[i] // base.tile[i] for i in self.workload.spatial])
