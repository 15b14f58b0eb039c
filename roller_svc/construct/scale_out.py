"""Scale-out (ROLLER §3.4): smaller blocks or split reductions, until every core has an rTask."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from roller_svc.analysis.operand import MAX_VECTOR_WIDTH
from roller_svc.construct.rules import Rules, ThreadTile, spatial_grid
from roller_svc.construct.scale_up import SearchTrace
from roller_svc.fusion.split.reduction import split_length
from roller_svc.ir.search import SearchKind, Visit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

MAX_SPLIT = 256
MAX_NEST_SPLIT = 1024  # of a loop nest on a GPU, whose results are few
BLOCKS_OF_NEST = 8  # of a core at most
MIN_K_TILES = 2  # k-tiles of each split of a contraction
MIN_REDUCED_POINTS = 256  # reduced points of each split of a loop nest
# Time on one CPU core below which a reduction is not split: two parallel regions cost more than they save.
MIN_SPLIT_S = 5e-6


def shrink(rules: Rules, block: Tile, base: ThreadTile, log: SearchTrace) -> Iterator[tuple[Tile, ThreadTile]]:
    """Halve the spatial axis that loses least data reuse until the device is filled (ROLLER §3.4).

    Every tile on the way keeps all alignments. A thread's tile is halved too where it is all that is left of an axis.
    """
    p = rules.workload
    visits = [Visit(block, None, rules.evaluate(block, base), base.tile)]
    while spatial_grid(p, block) < p.machine.cores:
        smaller = [s for s in _halvings(rules, block, base) if log.tiles_visited < log.budget]
        if not smaller:
            break
        _, block, base = min(smaller, key=lambda s: s[0])
        log.tiles_visited += 1
        visits.append(Visit(block, len(visits) - 1, rules.evaluate(block, base), base.tile))
        yield block, base
    log.record_blocks(SearchKind.SCALE_OUT, rules.points, visits, base.reduce_threads)


def _halvings(rules: Rules, block: Tile, base: ThreadTile) -> Iterator[tuple[float, Tile, ThreadTile]]:
    """Yield (traffic, block, base) of every legal tile with one axis halved, or two where one is not enough."""
    p = rules.workload
    for axis in p.spatial:
        for tile, thinner in _halved(block, base, axis):
            look = rules.evaluate(tile, thinner)
            if not look.too_large and not look.misaligned:
                yield look.traffic, tile, thinner
            elif look.misaligned:
                # fewer points for the same threads: shrink the thread's tile on another axis instead
                for other in p.spatial:
                    thinned = _thinned(thinner, other)
                    if thinned is not None and not any(rules.evaluate(tile, thinned)[2:]):
                        yield look.traffic, tile, thinned


def _halved(block: Tile, base: ThreadTile, axis: int) -> Iterator[tuple[Tile, ThreadTile]]:
    unit = base.tile[axis]
    count = block[axis] // unit
    if count > 1 and count % 2 == 0:
        yield replaced(block, axis, block[axis] // 2), base
    if unit > 1 and unit % 2 == 0:
        thread = replaced(base.tile, axis, unit // 2)
        yield replaced(block, axis, block[axis] // 2), ThreadTile(thread, base.reduce_threads)


def _thinned(base: ThreadTile, axis: int) -> ThreadTile | None:
    unit = base.tile[axis]
    return ThreadTile(replaced(base.tile, axis, unit // 2), base.reduce_threads) if unit > 1 and unit % 2 == 0 else None


def split_k_choices(p: Workload[Any], block: Tile) -> tuple[int, ...]:
    """Return the splits of the reduction that fill the device with rTasks, none of them empty.

    Powers of two; on a matrix unit, whose tiles are few and large, also those that fill whole waves. Loop nests on a
    GPU have the fewest and the most: they wait for memory, which few blocks may not keep busy.
    """
    grid, cores = spatial_grid(p, block), p.machine.cores
    if grid >= cores or not p.reduced:
        return ()
    if not p.machine.is_gpu and p.lower_bound_s * cores < MIN_SPLIT_S:
        return ()
    is_nest = p.machine.is_gpu and not p.machine.unit.is_matrix and p.k is None
    most = min(MAX_NEST_SPLIT, BLOCKS_OF_NEST * cores // grid) if is_nest else min(MAX_SPLIT, 4 * cores // grid)
    powers = [1 << i for i in range(1, most.bit_length()) if _parts_are_long(p, block, 1 << i)]
    found = [split for split in powers if 2 * grid * split > cores]
    if is_nest:
        found = sorted({*found[:1], *found[-2:]})
    if p.machine.unit.is_matrix:
        waves = sorted({cores // grid, 2 * cores // grid}.difference(found))
        long = [cut for cut in waves if 1 < cut <= MAX_SPLIT and _parts_are_long(p, block, cut)]
        found += [cut for cut in long if _keeps_vectors(p, block, cut)]
    return tuple(found or powers[-1:])  # as far as the reduction goes


def _keeps_vectors(p: Workload[Any], block: Tile, split: int) -> bool:
    """Return whether each split keeps the contiguous segments of the whole reduction."""
    return _part_length(p, block, split) % MAX_VECTOR_WIDTH == 0


def _part_length(p: Workload[Any], block: Tile, split: int) -> int:
    steps = dict(zip(p.footprint.names, block, strict=True))
    return split_length(p.space, p.machine.unit, steps, split)


def _parts_are_long(p: Workload[Any], block: Tile, split: int) -> bool:
    """Return whether no split of the longest reduced axis is empty or too short."""
    points, least = (p.inner_points, MIN_REDUCED_POINTS) if p.k is None else (p.extents[p.k], MIN_K_TILES * block[p.k])
    if points // split < least:
        return False
    return (split - 1) * _part_length(p, block, split) < p.space.longest_reduced.extent


def replaced(tile: Tile, axis: int, extent: int) -> Tile:
    return (*tile[:axis], extent, *tile[axis + 1 :])
