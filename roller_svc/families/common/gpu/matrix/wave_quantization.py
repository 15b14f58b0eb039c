"""How evenly tiles of a matrix unit fill a device → tiles of other sides that do it better, and blocks for stream-K.

What the rules of matrix units share: sides of tiles in whole instructions, and in whole tiles of warps.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from roller_svc.construct.align import EPSILONS, tile_multiples
from roller_svc.construct.rules import ThreadTile, extent_on, replaced, spatial_grid
from roller_svc.families.common.gpu.matrix.terms import accumulator_columns
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

# Bound on padding to begin with: tiles that a shape is no multiple of are padded with zeros, which the estimate counts,
# and lose less by that than by being small.
MIN_EPSILON = EPSILONS[1]


def instruction_multiples(extent: int, granule: int, max_instructions: int) -> Tile:
    """Whole instructions along one axis of a warp's or a warpgroup's tile, none of which is all padding."""
    return tuple(
        [
            granule * c
            for c in tile_multiples(extent, granule, EPSILONS[-1], min(max_instructions, -(-extent // granule)))
        ]
    )


def block_extents(p: Workload[Any], base: ThreadTile, epsilon: float, max_tiles: int) -> dict[int | None, Tile]:
    """A block's extents along m and n: up to `most` of the base's."""
    found: dict[int | None, Tile] = {}
    for axis in (p.m, p.n):
        if axis is not None:
            unit = base.tile[axis]
            fitting = tile_multiples(
                p.extents[axis], unit, max(epsilon, MIN_EPSILON), min(max_tiles, -(-p.extents[axis] // unit))
            )
            found[axis] = tuple([unit * c for c in fitting or (1,)])
    return found


MIN_WAVES = 4  # below so many, how evenly tiles fill the device matters as much as what each of them shares
MAX_STREAM_K_FILL = 0.9  # of a device's waves filled: above it there is too little to win
MIN_K_TILES_PER_BLOCK = 4  # staged steps of a block
MAX_BLOCKS_PER_TILE = 4  # blocks that work on one tile, as a rule: one block joins all of them


def stream_k_choices(tiles: int, steps: int, concurrent_blocks: int) -> Tile:
    """Blocks for stream-K, as many as the device holds, where whole tiles would leave the last wave much emptier."""
    waves = -(-tiles // concurrent_blocks)
    if tiles >= MAX_STREAM_K_FILL * waves * concurrent_blocks or concurrent_blocks > MAX_BLOCKS_PER_TILE * tiles:
        return ()
    if tiles * steps < MIN_K_TILES_PER_BLOCK * concurrent_blocks:
        return ()
    share = -(-tiles * steps // concurrent_blocks)
    return (-(-tiles * steps // share),)


def has_wave_quantization(p: Workload[Any], block: Tile) -> bool:
    return spatial_grid(p, block) < MIN_WAVES * p.machine.cores


def choose_raster(p: Workload[Any], block: Tile, concurrent_blocks: int) -> int:
    """Rows of tiles that make the blocks at work a rectangle of least edge, g_m = sqrt(S * BN / BM) (§5 of the design
    notes on ROLLER), the rows cut evenly; in plain order where nothing is read twice from DRAM anyway."""
    m, n = extent_on(block, p.m), accumulator_columns(p, block)
    grid_m, grid_n = -(-p.extent(p.m) // m), -(-p.extent(p.n) // extent_on(block, p.n))
    last = p.machine.llc
    held = last is not None and p.a.total_bytes + p.b.total_bytes <= last.total_bytes // 2
    if held or grid_m * grid_n <= concurrent_blocks:
        return 1
    tall = min(grid_m, max(1, round(math.sqrt(concurrent_blocks * n / m))))
    return -(-grid_m // -(-grid_m // tall))


def wave_balanced_tiles(
    p: Workload[Any], block: Tile, base: ThreadTile, granules: tuple[int, int]
) -> Iterator[tuple[Tile, ThreadTile]]:
    """The tile with the warps' extents along one side changed, in `granules`, so that the tiles come to just below
    whole waves.

    In the spirit of scale-out (ROLLER §3.4), but not by halves: 1024 x 1024 in tiles of 128 x 128 are 64, of 128 x 80
    are 104 for 108 cores. Whether such a tile keeps the rules is for the caller to see.
    """
    grid, cores = spatial_grid(p, block), p.machine.cores
    for axis, granule in zip((p.m, p.n), granules, strict=True):
        if axis is None:
            continue
        along = -(-p.extents[axis] // block[axis])
        warps = block[axis] // base.tile[axis]
        for waves in sorted({grid // cores, -(-grid // cores)}):
            tiles = waves * cores // (grid // along)
            if tiles == 0:
                continue
            warp = -(-p.extents[axis] // (tiles * granule * warps)) * granule
            if warp != base.tile[axis]:
                yield (
                    replaced(block, axis, warp * warps),
                    ThreadTile(replaced(base.tile, axis, warp), base.reduce_threads),
                )
