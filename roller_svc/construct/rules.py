"""Rules: what differs between the kernel families that ROLLER's one algorithm constructs."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from roller_svc.construct.scale_up import Grown, Log, Look, Stage
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

T = TypeVar("T")

MAX_GRID = 2**31 - 1  # blocks of one launch (CUDA programming guide, technical specifications: x-dimension of a grid)
MIN_MATRIX_STAGES = 2  # of a pipeline on a matrix unit
BALANCE = 0.75  # of the cores' time that whole waves of tasks on a CPU must use


class Base(NamedTuple):
    """A thread's tile, and how many lanes share its reduction: what a block is built from."""

    thread: Tile
    lanes: int = 1


class Pipeline(NamedTuple):
    """How the blocks of one tile run: the fields of an RProgram of the same names."""

    stages: int = 1
    raster: int = 1
    stream_k: int = 0
    streamed: bool = False
    blocks: int = 0
    cluster: tuple[int, int] = (1, 1)


PLAIN = Pipeline()


class Shape(NamedTuple):
    """An rProgram before its axes have names."""

    block: Tile
    base: Base
    split_k: int = 1
    pipeline: Pipeline = PLAIN


class Rules(Protocol):
    """The alignment and capacity rules of one kind of group on one kind of machine.

    A rule is named by what it protects; '' means that the tile keeps it.
    """

    @property
    def workload(self) -> Workload[Any]: ...

    def lane_choices(self) -> tuple[int, ...]:
        """How many lanes may share a reduction, best first."""

    def thread_stage(self, lanes: int) -> Stage:
        """Scale-up at the register level."""

    def preferred(self, grown: Grown, lanes: int) -> Sequence[Tile]:
        """The thread tiles worth building blocks from, best first."""

    def block_stage(self, base: Base, epsilon: float) -> Stage:
        """Scale-up at the block level, from one base."""

    def look(self, block: Tile, base: Base) -> Look:
        """A block tile built from that base: footprint, traffic, broken rules."""

    def pipelines(self, block: Tile, base: Base, split_k: int) -> Sequence[Pipeline]:
        """The ways to run blocks of that tile that are worth an estimate, best first."""

    def fallback(self) -> Sequence[tuple[Tile, Base]]:
        """Small tiles that fit nearly everywhere, for shapes that no regular tile suits."""


class Prefiltered(ABC):
    """Mixin of rules that let more tiles through than the performance model can price in milliseconds."""

    @abstractmethod
    def prefilter(self, shapes: Sequence[Shape], count: int) -> list[Shape]:
        """Return the `count` shapes that a cheap cost model puts first, and evenly some of the others."""


class Enumerated(ABC):
    """Rules that enumerate the shapes of a family themselves, in place of scale-up and scale-out."""

    workload: Workload[Any]

    @abstractmethod
    def shapes(self, log: Log, budget: int, limit: int) -> Sequence[Shape]:
        """Return at most `limit` shapes after at most `budget` visited tiles a level."""


def spatial_grid(p: Workload[Any], block: Tile) -> int:
    """rTasks of a block tile, the reduction not split."""
    grid = 1
    for i in p.spatial:
        grid *= -(-p.extents[i] // block[i])
    return grid


def exceeds_grid(p: Workload[Any], block: Tile) -> bool:
    """Whether there are more rTasks than a GPU launches blocks."""
    return p.outer_points > MAX_GRID and spatial_grid(p, block) > MAX_GRID


def axis_names(p: Workload[Any]) -> tuple[str, ...]:
    return tuple([a.name for a in p.space.axes])


def steps_along(p: Workload[Any], chosen: Mapping[int, Tile] | Mapping[int | None, Tile]) -> tuple[Tile, ...]:
    """Extents to grow by on every axis; those not chosen stay 1."""
    return tuple([chosen.get(i, (1,)) for i in range(len(p.extents))])


def fills_waves(tasks: int, cores: int) -> bool:
    """Whether whole waves of tasks leave few cores idle while the last one runs."""
    return tasks >= BALANCE * -(-tasks // cores) * cores


def spread(tiles: Sequence[T], most: int) -> list[T]:
    """At most that many of them, from the first to the last, evenly."""
    if len(tiles) <= most:
        return list(tiles)
    return [tiles[i * (len(tiles) - 1) // max(1, most - 1)] for i in range(most)]


def at(tile: Tile, axis: int | None) -> int:
    """The tile's extent on an axis that a space may lack."""
    return 1 if axis is None else tile[axis]


def replaced(tile: Tile, axis: int | None, extent: int) -> Tile:
    """The tile with one axis changed."""
    return tile if axis is None else (*tile[:axis], extent, *tile[axis + 1 :])
