"""Rules that kernels of CPUs share: levels of scale-up, whole waves of tasks, register tiles of a micro-kernel."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Self

from roller_svc.construct.align import round_up
from roller_svc.construct.rules import Relaxable, ThreadTile, axis_steps, check_waves, spatial_grid
from roller_svc.construct.scale_up import ScaleUpLevel, ScaleUpResult
from roller_svc.ir.rprogram import DEFAULT_PIPELINE, PipelineOptions
from roller_svc.ir.search import BrokenRule, TileMetrics, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

MAX_BASES = 3  # register tiles that blocks are built from

Evaluate = Callable[[Tile], TileMetrics]
Steps = Mapping[int, Tile] | Mapping[int | None, Tile]


@dataclass(frozen=True, slots=True)
class CpuRules(Relaxable):
    """A thread computes its own reductions, and a block is a task of a core."""

    workload: Workload[Any]
    needs_whole_waves: bool = field(default=True, kw_only=True)

    def relax(self) -> Self:
        return replace(self, needs_whole_waves=False)

    def reduce_thread_choices(self) -> tuple[int, ...]:
        return (1,)

    def pipeline_choices(self, block: Tile, base: ThreadTile, split_k: int) -> Sequence[PipelineOptions]:
        return (DEFAULT_PIPELINE,)

    def _thread_level(
        self, steps: Steps, evaluate: Evaluate, is_saturated: Callable[[Tile], bool] = lambda _tile: True
    ) -> ScaleUpLevel:
        """Return scale-up in registers: along the axes that have steps, the outermost first."""
        p = self.workload
        rank = tuple(range(len(p.extents)))
        return ScaleUpLevel(p.machine.hw.thread_level.name, self.points, axis_steps(p, steps), rank, evaluate, is_saturated)

    def _block_level(
        self, steps: Steps, rank: Tile, evaluate: Evaluate, is_saturated: Callable[[Tile], bool] = lambda _tile: True
    ) -> ScaleUpLevel:
        """Return scale-up of a task: along the axes that have steps, those of the least rank first."""
        p = self.workload
        return ScaleUpLevel(p.machine.hw.block_level.name, self.points, axis_steps(p, steps), rank, evaluate, is_saturated)

    @property
    def points(self) -> int:
        """Points to which the traffic of a tile refers: results."""
        return self.workload.outer_points

    def _check_waves(self, tasks: int) -> BrokenRule | None:
        """Return the broken rule where cores wait for a last partial wave of tasks, if rules ask for it."""
        return check_waves(tasks, self.workload.machine.cores) if self.needs_whole_waves else None


@dataclass(frozen=True, slots=True)
class TileRules(CpuRules):
    """Rules of a micro-kernel: a register tile of rows and vectors, and blocks of packed operands in caches."""

    # register tiles -------------------------------------------------------------------------------------------------
    @abstractmethod
    def _shape(self, thread: Tile) -> tuple[int, int]:
        """Return (rows, vectors) of a register tile."""

    @abstractmethod
    def _kernel_time(self, thread: Tile) -> tuple[float, float]:
        """Return the cost of a register tile for the whole problem, edges included; then what breaks ties."""

    @abstractmethod
    def _register_tiles(self, grown: ScaleUpResult) -> Sequence[Tile]:
        """Return the register tiles to choose from."""

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        """Return the tiles that cost least for the whole problem."""
        return sorted(self._register_tiles(grown), key=self._kernel_time)[:MAX_BASES] or list(grown.border)

    def _registers(self, thread: Tile) -> int:
        """Return accumulators, one row of vectors, one broadcast element, and a product that is added apart."""
        rows, vectors = self._shape(thread)
        return rows * vectors + vectors + 1 + (1 if self.workload.machine.unit.adds_apart else 0)

    def _register_rule(self, thread: Tile) -> BrokenRule | None:
        most = self.workload.machine.hw.limits.max_registers_per_thread
        return check_limit("vector registers", self._registers(thread), most)

    def _evaluate_thread(self, thread: Tile) -> TileMetrics:
        """Return the registers of a tile, and the bytes that it loads per multiply-add."""
        p, width = self.workload, self.workload.machine.unit.shape[-1]
        rows, vectors = self._shape(thread)
        traffic = p.elem_bytes / rows + p.elem_bytes / (vectors * width)
        return TileMetrics(self._registers(thread) * width * p.elem_bytes, traffic, self._register_rule(thread))

    @property
    def points(self) -> int:
        """Points to which the traffic of a tile refers: multiply-adds."""
        return self.workload.outer_points * self.workload.inner_points

    # tasks ----------------------------------------------------------------------------------------------------------
    @abstractmethod
    def _task_steps(self, base: ThreadTile) -> Steps:
        """Return the extents of a task's tile along its axes."""

    @abstractmethod
    def _capacity_rule(self, block: Tile, base: ThreadTile) -> BrokenRule | None:
        """Return the broken rule: a level of memory whose share a task's buffers exceed."""

    @abstractmethod
    def _footprint_bytes(self, block: Tile) -> int:
        """Return the bytes that a task moves."""

    def _may_be_one_task(self) -> bool:
        """Return whether the work is so little that one core may do all of it."""
        return False

    def _is_large_enough(self, block: Tile) -> bool:
        return True

    def block_level(self, base: ThreadTile, epsilon: float) -> ScaleUpLevel:
        rank = tuple(range(len(self.workload.extents)))
        return self._block_level(self._task_steps(base), rank, lambda t: self.evaluate(t, base), self._is_large_enough)

    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics:
        p = self.workload
        too_large = self._capacity_rule(block, base)
        moved = p.a.requested_bytes(block) + p.b.requested_bytes(block)
        points = math.prod([min(b, e) for b, e in zip(block, p.extents, strict=True)])
        any_tasks = too_large is not None or self._may_be_one_task()
        misaligned = None if any_tasks else self._check_waves(spatial_grid(p, block))
        return TileMetrics(self._footprint_bytes(block), moved / points, too_large, misaligned)


def equal_parts(extent: int, unit: int, counts: Iterable[int], min_units: float = 1) -> set[int]:
    """Return the extents that divide an axis into `counts` similar parts of whole units, each of about `min_units`."""
    return {round_up(-(-extent // n), unit) for n in counts if n == 1 or extent >= n * unit * min_units}


def equal_steps(depth: int, limit: int) -> int:
    """Return steps of about equal length, none longer than the limit."""
    return -(-depth // -(-depth // limit))
