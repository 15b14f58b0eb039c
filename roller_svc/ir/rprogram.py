"""rTiles and rPrograms: ROLLER's description of how one kernel is tiled."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Annotated, Any

from roller_svc.errors import InvariantError
from roller_svc.ir.canonical import FLAT
from roller_svc.ir.group import AxisRole, TileSpace
from roller_svc.ir.hardware import ComputeUnit, UnitKind

WARPGROUP_THREADS = 128  # threads that drive one wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Instructions")


@dataclass(frozen=True, slots=True)
class RTile:
    """An extent for every axis of a tile space (ROLLER's rTile; its footprint follows from the space's accesses)."""

    extents: tuple[tuple[str, int], ...]

    def __getitem__(self, axis: str) -> int:
        for name, extent in self.extents:
            if name == axis:
                return extent
        raise InvariantError(f"no axis {axis} in tile {self.extents}")

    def with_extent(self, axis: str, extent: int) -> RTile:
        """Return the tile with the extent of one axis replaced."""
        return RTile(tuple((name, extent if name == axis else old) for name, old in self.extents))

    def as_dict(self) -> dict[str, int]:
        return dict(self.extents)


@dataclass(frozen=True, slots=True)
class PipelineOptions:
    """How the blocks of one tile run."""

    stages: int = 1  # staged steps in flight, each with a buffer of its own
    raster: int = 1  # rows of tiles taken together, so that concurrent blocks share operands in the last-level cache
    stream_k_blocks: int = 0  # blocks that split the steps of all tiles evenly (stream-K); 0: a block has whole tiles
    nontemporal: bool = False  # non-temporal stores of results (CPU)
    persistent_blocks: int = 0  # blocks; block i computes rTasks i, i + blocks, ...; 0: one block for each rTask
    cluster: tuple[int, int] = (1, 1)  # blocks along m, which share tiles of B, and along n, which share tiles of A
    pingpong: bool = False  # two consumer warpgroups of a persistent block take its rTasks in turn
    cluster_k: int = 1  # blocks of a cluster that share one reduction, and add their parts in shared memory

    def __post_init__(self) -> None:
        if min(self.stages, self.raster, self.cluster_k, *self.cluster) < 1:
            raise InvariantError("stages, raster and cluster must be at least 1")
        if min(self.stream_k_blocks, self.persistent_blocks) < 0:
            raise InvariantError("stream_k_blocks and persistent_blocks must be at least 0")
        if self.stream_k_blocks and (self.persistent_blocks or self.cluster_size > 1):
            raise InvariantError("stream-K blocks are neither persistent nor in clusters")
        if self.cluster_k > 1 and self.persistent_blocks:
            raise InvariantError("blocks that split a reduction within clusters are not persistent")
        if self.persistent_blocks % self.cluster_size:
            blocks = self.persistent_blocks
            raise InvariantError(f"blocks must be a multiple of the cluster, {self.cluster_size}, got {blocks}")

    @property
    def cluster_m(self) -> int:
        """Return the blocks of a cluster along m: they share tiles of B."""
        return self.cluster[0]

    @property
    def cluster_n(self) -> int:
        """Return the blocks of a cluster along n: they share tiles of A."""
        return self.cluster[1]

    @property
    def cluster_size(self) -> int:
        return math.prod(self.cluster) * self.cluster_k


DEFAULT_PIPELINE = PipelineOptions()


@dataclass(frozen=True, slots=True)
class RProgram:
    """The tiles of one kernel (ROLLER's rProgram).

    `block` is the rTile of one rTask at the spec's block level: a thread block, or a CPU task. On a reduced axis its
    extent is one staged step (K of a contraction) or the whole axis (INNER). `thread` is the rTile of one thread at
    the register level. On a matrix unit it is that of a warp, or of a warpgroup (WGMMA). `block` is a multiple of it
    on every spatial axis.
    """

    space: TileSpace
    unit: ComputeUnit
    block: RTile
    thread: RTile
    reduce_threads: int = 1  # threads of a block, or vector lanes of a CPU, that share one reduction
    split_k: int = 1  # rTasks that share one reduction; a second launch combines their results
    pipeline: Annotated[PipelineOptions, FLAT] = DEFAULT_PIPELINE
    family: str = ""  # name of the kernel family that built it; "" where the group decides

    def __post_init__(self) -> None:
        for axis in self.space.spatial:
            big, small = self.block[axis.name], self.thread[axis.name]
            if small < 1 or big < small or big % small:
                raise InvariantError(f"axis {axis.name}: block tile {big} is not a multiple of thread tile {small}")
        if min(self.reduce_threads, self.split_k) < 1:
            raise InvariantError("reduce_threads and split_k must be at least 1")
        way = self.pipeline
        if self.split_k > 1 and way.stream_k_blocks:
            raise InvariantError("split_k and stream_k_blocks exclude each other")
        if self.split_k > 1 and way.cluster_k > 1:
            raise InvariantError("a reduction split within clusters is not split over launches")
        if way.pingpong and not (way.persistent_blocks and self.unit.kind is UnitKind.WGMMA):
            raise InvariantError("only persistent blocks of warpgroups have a ping-pong schedule")
        if way.pingpong and any(self.block[a.name] != self.thread[a.name] for a in self.space.spatial):
            raise InvariantError(f"a ping-pong tile is that of one warpgroup, got {self.tile_text}")

    def with_pipeline(self, **changes: Any) -> RProgram:
        """Return the rProgram with some fields of its pipeline replaced."""
        return replace(self, pipeline=replace(self.pipeline, **changes))

    def as_pingpong(self) -> RProgram:
        """Return the rProgram with two consumers in turn, each with the tile of one warpgroup."""
        tile = self.block
        for axis in self.space.spatial:
            tile = tile.with_extent(axis.name, self.thread[axis.name])
        return replace(self, block=tile, pipeline=replace(self.pipeline, pingpong=True))

    @property
    def tile_text(self) -> str:
        """Return the block's tile as text: 'm=64 n=64 k=32'."""
        return " ".join(f"{name}={extent}" for name, extent in self.block.extents)

    @property
    def grid(self) -> int:
        """Return the number of rTasks."""
        return self.split_k * self.pipeline.cluster_k * math.prod(-(-a.extent // self.block[a.name]) for a in self.space.spatial)

    @property
    def threads(self) -> int:
        """Return the threads of one block, the producer warpgroup included; on a CPU the register tiles of a task."""
        workers = self.reduce_threads * math.prod(self.block[a.name] // self.thread[a.name] for a in self.space.spatial)
        return workers * (1 + self.pipeline.pingpong) + (WARPGROUP_THREADS if self.unit.kind is UnitKind.WGMMA else 0)

    @property
    def steps(self) -> int:
        """Return the staged steps of one rTask over the reduced axes.

        Where members of k are padded one by one there are more (families/common/gpu/warpgroups/k_iteration.py).
        """
        return math.prod(
            -(
                -(-(-a.extent // (self.split_k * self.pipeline.cluster_k)) if a.role is AxisRole.K else a.extent)
                // self.block[a.name]
            )
            for a in self.space.reduced
        )

    @property
    def padding(self) -> float:
        """Return the fraction of computed points that are outside of the tensor."""
        useful = math.prod(a.extent for a in self.space.axes)
        padded = math.prod(-(-a.extent // self.block[a.name]) * self.block[a.name] for a in self.space.axes)
        return 1 - useful / padded
