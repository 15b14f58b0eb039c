"""Stream-K: the k-tiles of all output tiles, split evenly over a fixed number of blocks (Osama et al., PPoPP 2023)."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from roller_svc.ir.group import AxisRole
from roller_svc.ir.program import TensorType
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.common import Launch
from roller_svc.perf.model import read_launch
from roller_svc.perf.workload import Workload

# A block's range of k-tiles may begin and end inside an output tile; it has all k-tiles of those between.
PARTIAL_TILES_PER_BLOCK = 2


@dataclass(frozen=True, slots=True)
class StreamKPartition:
    """Split of all k-tiles into contiguous ranges, one for each block.

    The range of block i starts at k-tile i * k_tiles_per_block. K-tile s belongs to output tile s // k_tiles.
    """

    blocks: int
    grid: tuple[int, ...]  # output tiles along batch, m, n
    k_tiles: int  # of one output tile

    @property
    def tiles(self) -> int:
        return math.prod(self.grid)

    @property
    def k_tiles_per_block(self) -> int:
        """K-tiles of a block; the last block may have fewer."""
        return -(-self.tiles * self.k_tiles // self.blocks)

    @property
    def max_tiles_per_block(self) -> int:
        """Maximum output tiles that one block works on."""
        return min(self.tiles, (self.k_tiles_per_block + 2 * self.k_tiles - 2) // self.k_tiles)

    @property
    def max_blocks_per_tile(self) -> int:
        """Maximum blocks that work on one output tile."""
        return min(self.blocks, (self.k_tiles + 2 * self.k_tiles_per_block - 2) // self.k_tiles_per_block)


def stream_k_partition(program: RProgram) -> StreamKPartition:
    """Return the partition of an rProgram with `stream_k_blocks`."""
    space, block = program.space, program.block
    grid = tuple(-(-axis.extent // block[axis.name]) for axis in space.spatial)
    return StreamKPartition(program.pipeline.stream_k_blocks, grid, program.steps)


def partial_tiles(group: str, program: RProgram) -> tuple[str, TensorType]:
    """Return the workspace of partial tiles: [block, first or last tile of the block, row, column]."""
    (m,), (n,) = (program.space.role(role) for role in (AxisRole.M, AxisRole.N))
    tile = (program.block[m.name], program.block[n.name])
    return f"{group}.partial", TensorType(
        program.space.compute_dtype, (program.pipeline.stream_k_blocks, PARTIAL_TILES_PER_BLOCK, *tile)
    )


def stream_k_launch(p: Workload[Any], program: RProgram) -> Launch:
    """Read a launch whose blocks may stream k-tiles: at most the first and last tile of a block are shared."""
    launch = read_launch(p, program)
    if not program.pipeline.stream_k_blocks:
        return launch
    grid, tiles = program.pipeline.stream_k_blocks, math.prod([-(-p.extents[i] // launch.block[i]) for i in p.spatial])
    points = min(2 * grid, grid + tiles) * math.prod(launch.block[i] for i in p.spatial)
    return launch._replace(grid=grid, workspace_bytes=points * p.elem_bytes)
