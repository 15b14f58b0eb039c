"""rTiles and rPrograms: ROLLER's description of how one kernel is tiled."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roller_svc.errors import InvariantError
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
        """The same tile with one axis changed."""
        return RTile(tuple((name, extent if name == axis else old) for name, old in self.extents))

    def as_dict(self) -> dict[str, int]:
        return dict(self.extents)

    def program_extents(self, space: TileSpace) -> Mapping[str, int]:
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
    matrix unit: the rTile of a warp, or of a warpgroup (WGMMA), whose threads are the `lanes`.
    `lanes`: threads of a block (GPU), or vector lanes (CPU), that share one reduction; 1 means none do.
    `split_k`: rTasks that share one reduction, joined by a second launch.
    `stages`: staged steps in flight at once, each with a buffer of its own.
    `raster`: tile rows that blocks walk together, so that those at work at once share operands in the last cache.
    `stream_k`: blocks that share all steps of all tiles evenly (stream-K), a tile's parts joined by a second launch;
    0: a block computes whole tiles.
    `streamed`: results go past the caches (a CPU's non-temporal stores).
    `blocks`: so many are launched and walk the rTasks in turns, block i those numbered i, i + blocks, ... (persistent);
    0: one block for each.
    `cluster`: blocks along m and n that run together and share what they load: neighbours along n the tile of A, along
    m that of B.
    """

    space: TileSpace
    unit: ComputeUnit
    block: RTile
    thread: RTile
    reduce_threads: int = 1
    split_k: int = 1
    stages: int = 1
    raster: int = 1
    stream_k_blocks: int = 0
    nontemporal: bool = False
    persistent_blocks: int = 0
    cluster: tuple[int, int] = (1, 1)
    family: str = ""  # name of the kernel family that built it; "" where the group decides

    def __post_init__(self) -> None:
        for axis in self.space.spatial:
            big, small = self.block[axis.name], self.thread[axis.name]
            if small < 1 or big < small or big % small:
                raise InvariantError(f"axis {axis.name}: block tile {big} is no multiple of thread tile {small}")
        if min(self.reduce_threads, self.split_k, self.stages, self.raster, *self.cluster) < 1:
            raise InvariantError("lanes, split_k, stages, raster and both sides of a cluster are at least 1")
        if min(self.stream_k_blocks, self.persistent_blocks) < 0:
            raise InvariantError("stream_k and blocks are at least 0")
        if self.split_k > 1 and self.stream_k_blocks:
            raise InvariantError("a reduction is split evenly or streamed, not both")
        if self.stream_k_blocks and (self.persistent_blocks or self.cluster_size > 1):
            raise InvariantError("blocks that stream steps neither walk whole tiles nor form clusters")
        if self.persistent_blocks % self.cluster_size:
            raise InvariantError(f"{self.persistent_blocks} blocks are no whole clusters of {self.cluster_size}")

    @property
    def tile_text(self) -> str:
        """The block's tile as text: 'm=64 n=64 k=32'."""
        return " ".join(f"{name}={extent}" for name, extent in self.block.extents)

    @property
    def grid(self) -> int:
        """Number of rTasks."""
        return self.split_k * math.prod(-(-a.extent // self.block[a.name]) for a in self.space.spatial)

    @property
    def cluster_m(self) -> int:
        """Blocks of a cluster along m: they share tiles of B."""
        return self.cluster[0]

    @property
    def cluster_n(self) -> int:
        """Blocks of a cluster along n: they share tiles of A."""
        return self.cluster[1]

    @property
    def cluster_size(self) -> int:
        return math.prod(self.cluster)

    @property
    def threads(self) -> int:
        """Threads of one block (on a CPU: register tiles of one task), with the warpgroup that only loads (WGMMA)."""
        workers = self.reduce_threads * math.prod(self.block[a.name] // self.thread[a.name] for a in self.space.spatial)
        return workers + (WARPGROUP_THREADS if self.unit.kind is UnitKind.WGMMA else 0)

    @property
    def steps(self) -> int:
        """How many staged steps one rTask makes over the reduced axes, each walked as one. Where members of k are
        walked apart, the last step of each padded, there are more: `perf.k_walk.Walk.steps`."""
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
