"""Alignment and capacity rules: what differs between the kernel families that ROLLER's one algorithm constructs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self, TypeVar

from roller_svc.construct.scale_up import ScaleUpLevel, ScaleUpResult, SearchTrace
from roller_svc.ir.rprogram import DEFAULT_PIPELINE, PipelineOptions
from roller_svc.ir.search import BrokenRule, TileMetrics, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

T = TypeVar("T")

# thread blocks of one launch (CUDA programming guide, technical specifications: x-dimension of a grid)
MAX_GRID = 2**31 - 1
MIN_MATRIX_STAGES = 2  # pipeline stages of a kernel on a matrix unit
MIN_WAVE_FILL = 0.75  # fraction of the cores' time that whole waves of CPU tasks must use


class ThreadTile(NamedTuple):
    """A thread's tile and the threads that share its reduction: the base that blocks are built from."""

    tile: Tile
    reduce_threads: int = 1


class Shape(NamedTuple):
    """An rProgram before its axes have names."""

    block: Tile
    base: ThreadTile
    split_k: int = 1
    pipeline: PipelineOptions = DEFAULT_PIPELINE


class Rules(Protocol):
    """The alignment and capacity rules of one kind of group on one kind of machine.

    A rule is named by what it protects; None means that the tile satisfies it.
    """

    @property
    def workload(self) -> Workload[Any]: ...

    @property
    def points(self) -> int:
        """Points of the iteration space, to which the traffic of a tile refers: multiply-adds, or results."""

    def reduce_thread_choices(self) -> tuple[int, ...]:
        """Return how many threads may share a reduction, best first."""

    def thread_level(self, lanes: int) -> ScaleUpLevel:
        """Return scale-up at the register level."""

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        """Return the thread tiles that are worth building blocks from, best first."""

    def block_level(self, base: ThreadTile, epsilon: float) -> ScaleUpLevel:
        """Return scale-up at the block level, from one base."""

    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics:
        """Return footprint, traffic and broken rules of a block tile on that base."""

    def pipeline_choices(self, block: Tile, base: ThreadTile, split_k: int) -> Sequence[PipelineOptions]:
        """Return the ways to run blocks of that tile that are worth an estimate, best first."""

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return small tiles that fit nearly everywhere, for shapes that no regular tile suits."""


class Prefiltered(ABC):
    """Mixin of rules that let more tiles through than the performance model can price in milliseconds."""

    @abstractmethod
    def prefilter(self, shapes: Sequence[Shape], count: int) -> list[Shape]:
        """Return the `count` shapes that a cheap cost model puts first, and evenly some of the others."""


class Relaxable(ABC):
    """Mixin of rules that prefer a number of tasks, which the tiles of a problem may not have."""

    @abstractmethod
    def relax(self) -> Self:
        """Return the rules that accept any number of tasks; those for correctness and capacity stay."""


class Enumerated(ABC):
    """Rules that enumerate the shapes of a family themselves, in place of scale-up and scale-out."""

    workload: Workload[Any]

    @abstractmethod
    def shapes(self, log: SearchTrace, budget: int, limit: int) -> Sequence[Shape]:
        """Return at most `limit` shapes after at most `budget` visited tiles a level."""


def spatial_grid(p: Workload[Any], block: Tile) -> int:
    """Return the rTasks of a block tile whose reduction is not split."""
    grid = 1
    for i in p.spatial:
        grid *= -(-p.extents[i] // block[i])
    return grid


def check_grid(p: Workload[Any], block: Tile) -> BrokenRule | None:
    """Return the broken rule where there are more rTasks than a GPU launches blocks."""
    return check_limit("grid size", spatial_grid(p, block), MAX_GRID) if p.outer_points > MAX_GRID else None


def check_warps(threads: int, warp_size: int) -> BrokenRule | None:
    """Return the broken rule where a block has a warp that is not whole."""
    return check_limit("execution unit", -(-threads // warp_size) * warp_size, threads)


def axis_steps(p: Workload[Any], chosen: Mapping[int, Tile] | Mapping[int | None, Tile]) -> tuple[Tile, ...]:
    """Return the extents to grow by on every axis; axes that are not chosen stay 1."""
    return tuple([chosen.get(i, (1,)) for i in range(len(p.extents))])


def check_waves(tasks: int, cores: int) -> BrokenRule | None:
    """Return the broken rule where whole waves of tasks leave many cores idle during the last one."""
    return check_limit("execution unit", MIN_WAVE_FILL * -(-tasks // cores) * cores, tasks)


def subsample(tiles: Sequence[T], limit: int) -> list[T]:
    """Return at most `limit` of the tiles, evenly from the first to the last."""
    if len(tiles) <= limit:
        return list(tiles)
    return [tiles[i * (len(tiles) - 1) // max(1, limit - 1)] for i in range(limit)]


def extent_on(tile: Tile, axis: int | None) -> int:
    """Return the tile's extent on an axis that a space may lack."""
    return 1 if axis is None else tile[axis]


def replaced(tile: Tile, axis: int | None, extent: int) -> Tile:
    """Return the tile with one axis changed."""
    return tile if axis is None else (*tile[:axis], extent, *tile[axis + 1 :])
