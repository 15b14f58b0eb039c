"""What differs between the machines and kinds of kernel group that ROLLER's one algorithm builds for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple, Protocol, TypeVar

from roller_svc.construct.scale_up import Grown, Look, Stage
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Problem

T = TypeVar("T")

MAX_GRID = 2**31 - 1  # blocks of one launch (CUDA programming guide, technical specifications: x-dimension of a grid)
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


class Rules(Protocol):
    """The alignment and capacity rules of one kind of group on one kind of machine.

    A rule is named by what it protects; '' means that the tile keeps it.
    """

    @property
    def problem(self) -> Problem: ...

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


def spatial_grid(p: Problem, block: Tile) -> int:
    """rTasks of a block tile, the reduction not split."""
    grid = 1
    for i in p.spatial:
        grid *= -(-p.extents[i] // block[i])
    return grid


def exceeds_grid(p: Problem, block: Tile) -> bool:
    """Whether there are more rTasks than a GPU launches blocks."""
    return p.outer_points > MAX_GRID and spatial_grid(p, block) > MAX_GRID


def axis_names(p: Problem) -> tuple[str, ...]:
    return tuple([a.name for a in p.space.axes])


def steps_along(p: Problem, chosen: Mapping[int, Tile] | Mapping[int | None, Tile]) -> tuple[Tile, ...]:
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
