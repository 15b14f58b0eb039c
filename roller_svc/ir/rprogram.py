"""rTiles and rPrograms: ROLLER's description of how one kernel is tiled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roller_svc.errors import InvariantError
from roller_svc.ir.group import AxisRole, TileSpace
from roller_svc.ir.hardware import ComputeUnit


@dataclass(frozen=True, slots=True)
class RTile:
    """An extent for every axis of a tile space (ROLLER's rTile; its footprint follows from the space's accesses)."""

    extents: tuple[tuple[str, int], ...]

    def __getitem__(self, axis: str) -> int:
        for name, extent in self.extents:
            if name == axis:
                return extent
        raise InvariantError(f"no axis {axis} in tile {self.extents}")

    def grown(self, axis: str, extent: int) -> RTile:
        """The same tile with one axis changed."""
        return RTile(tuple((name, extent if name == axis else old) for name, old in self.extents))

    def as_dict(self) -> dict[str, int]:
        return dict(self.extents)

    def reach(self, space: TileSpace) -> Mapping[str, int]:
        """How far the tile reaches along every program axis."""
        reach: dict[str, int] = {}
        for axis in space.axes:
            reach |= axis.member_extents(min(self[axis.name], axis.extent))
        return reach


@dataclass(frozen=True, slots=True)
class RProgram:
    """The tiles of one kernel (ROLLER's rProgram).

    `block`: the rTile of one rTask at the spec's block level: a thread block, a CPU task. On a reduced axis its
    extent is the step that is staged at once (K of a contraction), or the whole axis (INNER).
    `thread`: the rTile of one thread at the register level; block is a multiple of it on every spatial axis. Of a
    matrix unit: the rTile of a warp, whose threads are the `lanes`.
    `lanes`: threads of a block (GPU), or vector lanes (CPU), that share one reduction; 1 means none do.
    `split_k`: rTasks that share one reduction, joined by a second launch.
    `stages`: staged steps in flight at once, each with a buffer of its own.
    `raster`: tile rows that blocks walk together, so that those at work at once share operands in the last cache.
    `stream_k`: blocks that share all steps of all tiles evenly (stream-K), a tile's parts joined by a second launch;
    0: a block computes whole tiles.
    `streamed`: results go past the caches (a CPU's non-temporal stores).
    """

    space: TileSpace
    unit: ComputeUnit
    block: RTile
    thread: RTile
    lanes: int = 1
    split_k: int = 1
    stages: int = 1
    raster: int = 1
    stream_k: int = 0
    streamed: bool = False

    def __post_init__(self) -> None:
        for axis in self.space.spatial:
            big, small = self.block[axis.name], self.thread[axis.name]
            if small < 1 or big < small or big % small:
                raise InvariantError(f"axis {axis.name}: block tile {big} is no multiple of thread tile {small}")
        if min(self.lanes, self.split_k, self.stages, self.raster) < 1 or self.stream_k < 0:
            raise InvariantError("lanes, split_k, stages and raster are at least 1, stream_k at least 0")
        if self.split_k > 1 and self.stream_k:
            raise InvariantError("a reduction is split evenly or streamed, not both")

    @property
    def grid(self) -> int:
        """Number of rTasks."""
        return self.split_k * math.prod(-(-a.extent // self.block[a.name]) for a in self.space.spatial)

    @property
    def threads(self) -> int:
        """Threads of one block (on a CPU: register tiles of one task)."""
        return self.lanes * math.prod(self.block[a.name] // self.thread[a.name] for a in self.space.spatial)

    @property
    def steps(self) -> int:
        """How many staged steps one rTask makes over the reduced axes."""
        return math.prod(
            -(-(-(-a.extent // self.split_k) if a.role is AxisRole.K else a.extent) // self.block[a.name])
            for a in self.space.reduced
        )

    @property
    def padding(self) -> float:
        """Share of computed points that lie outside the tensor: 0 is none."""
        useful = math.prod(a.extent for a in self.space.axes)
        padded = math.prod(-(-a.extent // self.block[a.name]) * self.block[a.name] for a in self.space.axes)
        return 1 - useful / padded
