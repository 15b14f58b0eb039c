"""Wave quantization on matrix units: tile extents that fill whole waves, and blocks for stream-K."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

from roller_svc.construct.align import EPSILONS, matrix_tile_multiples, round_up
from roller_svc.construct.rules import ThreadTile, extent_on, replaced, spatial_grid
from roller_svc.families.common.gpu.matrix.terms import accumulator_columns
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

# First bound on padding: zero padding costs less than small tiles, and the estimate counts it.
MIN_EPSILON = EPSILONS[1]


def instruction_multiples(extent: int, granule: int, max_instructions: int) -> Tile:
    """Return extents of a warp's or warpgroup's tile in whole instructions, none of them all padding."""
    return tuple(
        [granule * c for c in matrix_tile_multiples(extent, granule, EPSILONS[-1], min(max_instructions, -(-extent // granule)))]
    )


def block_extents(p: Workload[Any], base: ThreadTile, epsilon: float, max_tiles: int) -> dict[int | None, Tile]:
    """Return a block's extents along m and n: up to `max_tiles` of the base's."""
    found: dict[int | None, Tile] = {}
    for axis in (p.m, p.n):
        if axis is not None:
            unit = base.tile[axis]
            fitting = matrix_tile_multiples(
                p.extents[axis], unit, max(epsilon, MIN_EPSILON), min(max_tiles, -(-p.extents[axis] // unit))
            )
            found[axis] = tuple([unit * c for c in fitting or (1,)])
    return found


def padded_fraction(p: Workload[Any], tile: Tile) -> float:
    """Return the points of whole tiles along m and n, relative to those of the tensor."""
    return math.prod([round_up(p.extents[axis], tile[axis]) / p.extents[axis] for axis in (p.m, p.n) if axis is not None])


MIN_WAVES = 4  # below it, filling the device evenly matters as much as data reuse
MAX_STREAM_K_FILL = 0.9  # fraction of the waves filled, above which stream-K gains too little
MIN_K_TILES_PER_BLOCK = 4  # of a stream-K block
MAX_BLOCKS_PER_TILE = 4  # that work on one tile, as a rule: one block combines all of them


def stream_k_choices(tiles: int, steps: int, concurrent_blocks: int) -> Tile:
    """Return the blocks of stream-K, as many as the device holds, where the last wave is much emptier."""
    waves = -(-tiles // concurrent_blocks)
    if tiles >= MAX_STREAM_K_FILL * waves * concurrent_blocks or concurrent_blocks > MAX_BLOCKS_PER_TILE * tiles:
        return ()
    if tiles * steps < MIN_K_TILES_PER_BLOCK * concurrent_blocks:
        return ()
    share = -(-tiles * steps // concurrent_blocks)
    return (-(-tiles * steps // share),)


def has_wave_quantization(p: Workload[Any], block: Tile) -> bool:
    return spatial_grid(p, block) < MIN_WAVES * p.machine.cores


def leaves_cores_idle(p: Workload[Any], block: Tile) -> bool:
    """Return whether the last wave of a block's tiles is much emptier than the others."""
    tiles, cores = spatial_grid(p, block), p.machine.cores
    return tiles < MAX_STREAM_K_FILL * -(-tiles // cores) * cores


def choose_raster(p: Workload[Any], block: Tile, concurrent_blocks: int) -> int:
    """Return the tile rows that make concurrent blocks a rectangle of least perimeter (§5 of the design notes).

    g_m = sqrt(S * BN / BM), with rows split evenly; 1 where DRAM is read once anyway.
    """
    m, n = extent_on(block, p.m), accumulator_columns(p, block)
    grid_m, grid_n = -(-p.extent(p.m) // m), -(-p.extent(p.n) // extent_on(block, p.n))
    last = p.machine.llc
    fits_llc = last is not None and p.a.total_bytes + p.b.total_bytes <= last.total_bytes // 2
    if fits_llc or grid_m * grid_n <= concurrent_blocks:
        return 1
    tall = min(grid_m, max(1, round(math.sqrt(concurrent_blocks * n / m))))
    return -(-grid_m // -(-grid_m // tall))


MAX_RESIZING = 2  # of a tile, to fill a wave


def wave_balanced_tiles(
    p: Workload[Any], block: Tile, base: ThreadTile, granules: tuple[int, int], split_waves: Sequence[int] = ()
) -> Iterator[tuple[Tile, ThreadTile]]:
    """Yield tiles with the warps' extents along one axis changed, so that tiles fill just under whole waves.

    In the spirit of scale-out (ROLLER §3.4), but not by halves: 1024 x 1024 in tiles of 128 x 128 are 64 blocks, of 128
    x 80 they are 104 for 108 cores. The caller checks the rules.

    Args:
        split_waves: Tiles of one wave where several blocks share each of them.
    """
    grid, cores = spatial_grid(p, block), p.machine.cores
    near = [tiles for tiles in split_waves if grid <= MAX_RESIZING * tiles and tiles <= MAX_RESIZING * grid]
    for axis, granule in zip((p.m, p.n), granules, strict=True):
        if axis is None:
            continue
        along = -(-p.extents[axis] // block[axis])
        warps = block[axis] // base.tile[axis]
        waves = grid // cores
        for count in sorted({(waves - 1) * cores, waves * cores, -(-grid // cores) * cores, *near}):
            tiles = count // (grid // along)
            if tiles <= 0:
                continue
            for among in (warps, 2 * warps):
                warp = -(-p.extents[axis] // (tiles * granule * among)) * granule
                fills = among == warps or -(-p.extents[axis] // (warp * among)) == tiles
                if fills and warp != base.tile[axis]:
                    yield (
                        replaced(block, axis, warp * among),
                        ThreadTile(replaced(base.tile, axis, warp), base.reduce_threads),
                    )
