"""The cost of turning tiles on a CPU: shuffles, rooms, operations, memory by the length of what is read at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from roller_svc.families.common.cpu.memory import (
    LINE_BYTES,
    TEST_OPERATIONS,
    cacheable_bytes,
    dominant_level,
    dram_fraction,
    exposed_nontemporal_s,
    nontemporal_fraction,
    nontemporal_write_s,
    seconds_per_byte,
)
from roller_svc.families.cpu.transpose.workload import TransposeKind, TransposeSpace
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.footprint import AccessFootprint, Tile
from roller_svc.perf.workload import Workload

BEST_WRITE_BYTES = 256  # rows of a tile that are written
STREAMED_BYTES = 128  # rows that stream well
STORE_FORWARD_BYTES = 1024  # what is read again before it has left a core's queue of stores


def transpose_cost(p: Workload[TransposeSpace], launch: Launch) -> Costs:
    """Cycles of the core with the most tasks, overlapped in part with what memory moves."""
    mach, costs, layout = p.machine, p.machine.costs.transpose, p.facts
    vectors = p.outer_points / layout.lanes
    blocks = vectors * _overlap(p, layout, launch)
    shuffles = math.log2(layout.lanes) if layout.kind is TransposeKind.BLOCK else layout.short_row - 1.0
    transposed = blocks * (shuffles + costs.buffer_cycles) * len(layout.transposed)
    each_tile = costs.tile_cycles
    if layout.kind is not TransposeKind.BLOCK:
        each_tile = costs.short_tile_cycles
        transposed *= 1 + costs.buffer_size_penalty * math.log2(
            max(1.0, p.elem_bytes * math.prod(launch.thread) / STORE_FORWARD_BYTES)
        )
    others = [t for t in p.footprint.reads if layout.row in t.axes and t.strides.get(layout.row) != 1]
    gathered = max(0, len(others) - len(layout.transposed))
    compute = vectors * p.space.flops / p.outer_points * costs.operation_cycles
    compute += p.outer_points * costs.gather_cycles * gathered
    if launch.nontemporal and _nontemporal_fraction(p, layout) < 1:
        compute += vectors * TEST_OPERATIONS * costs.operation_cycles
    tiles = math.prod(-(-e // t) for e, t in zip(p.extents, launch.thread, strict=True))
    waves = -(-launch.grid // mach.cores)
    share = waves * math.prod(min(b, e) for b, e in zip(launch.block, p.extents, strict=True)) / p.outer_points
    cycles = (transposed, compute, tiles * each_tile, launch.grid * costs.task_cycles)
    seconds = [mach.seconds(c * share) for c in cycles]
    memory = _memory_s(p, layout, launch) * share * min(launch.grid, mach.cores)  # of cores at work that with the most
    core = sum(seconds)
    leak = costs.block_imperfect_overlap if layout.kind is TransposeKind.BLOCK else costs.interleave_imperfect_overlap
    return Costs(
        core_s=max(core, memory) + leak * min(core, memory),
        core_stage=None,
        stage_seconds=(
            ("turn", seconds[0]), ("compute", seconds[1]), ("loops", seconds[2]), ("task", seconds[3]),
            (dominant_level(p, launch), memory),
        ),
        occupancy=min(1.0, launch.grid / (waves * mach.cores)),
        waves=waves,
    )  # fmt: skip


def _overlap(p: Workload[Any], layout: TransposeSpace, launch: Launch) -> float:
    """Elements turned for each element of a tile: blocks are whole, so that the last may overlap the one before it."""
    if layout.kind is not TransposeKind.BLOCK:
        return 1.0
    column, lanes = math.prod(min(launch.thread[c], p.extents[c]) for c in layout.columns), layout.lanes
    sides = (column, min(launch.thread[layout.row], p.extents[layout.row]))
    return math.prod(-(-side // lanes) * lanes / side for side in sides)


def _memory_s(p: Workload[Any], layout: TransposeSpace, launch: Launch) -> float:
    """Reads and results, each from where it is found and slower for the length of its rows; results that stream go to
    memory, wherever the rest is found, while a cache delivers what it has."""
    mach, costs, row = p.machine, p.machine.costs.transpose, layout.row
    streams = _nontemporal_fraction(p, layout) if launch.nontemporal else 0.0
    walked = cacheable_bytes(p, streams)
    each = seconds_per_byte(mach, walked, launch.grid)
    size = layout.transposed[0].dtype.bytes
    run = size * math.prod(min(launch.thread[c], p.extents[c]) for c in layout.columns)
    whole = all(launch.thread[i] >= p.extents[i] for i in layout.columns) and layout.kind is not TransposeKind.BLOCK
    read_more = 0.0 if whole else costs.read_run_penalty * math.log2(max(1.0, run / LINE_BYTES))
    reads = each * (1 + read_more) * _transferred_bytes(p.footprint.reads, p.extents)
    is_shared = launch.block[row] < p.extents[row] and _row_bytes(p, layout) % LINE_BYTES > 0
    shared = costs.shared_line_penalty if is_shared else 0.0
    written = min(launch.thread[row], p.extents[row]) * size
    writes = (
        each
        * (1 + _cached_write_penalty(p, layout, written) + shared)
        * _transferred_bytes(p.footprint.writes, p.extents)
    )
    writes += _shared_line_s(p, layout, launch)
    if not launch.nontemporal:
        return reads + writes
    streamed = sum(nontemporal_write_s(p, t, launch.grid) for t in p.footprint.writes)
    streamed *= 1 + _nontemporal_penalty(p, layout, written) + shared
    from_caches = reads * (1 - dram_fraction(mach, walked))
    return (
        reads
        + (1 - streams) * writes
        + streams * exposed_nontemporal_s(mach, streamed, from_caches, reads - from_caches)
    )


def _cached_write_penalty(p: Workload[Any], layout: TransposeSpace, written: int) -> float:
    """What rows of results that go through the caches, `written` bytes of each at once, take more than their bytes."""
    costs, more = p.machine.costs.transpose, 0.0
    if layout.kind is TransposeKind.BLOCK:  # results of others are dealt, or woven, in order of memory
        more = costs.unprefetched_write_penalty + costs.write_run_penalty * abs(math.log2(written / BEST_WRITE_BYTES))
    return more + costs.read_for_ownership_penalty * dram_fraction(p.machine, p.compulsory_bytes)


def _shared_line_s(p: Workload[Any], layout: TransposeSpace, launch: Launch) -> float:
    """Tiles that cut a row within a line: the next one along the row finds the line in the second cache. Where rows
    begin with a line, tiles of whole vectors do."""
    mach, row = p.machine, p.extents[layout.row]
    if layout.kind is not TransposeKind.BLOCK:  # tiles that follow each other in memory
        return 0.0
    cuts = (p.outer_points // row) * (-(-row // launch.thread[layout.row]) - 1)
    cycles = mach.costs.transpose.shared_line_latency_fraction * mach.caches[-2].latency_cycles * cuts
    return mach.seconds(cycles * (1 - _nontemporal_fraction(p, layout))) / min(launch.grid, mach.cores)


def _nontemporal_penalty(p: Workload[Any], layout: TransposeSpace, written: int) -> float:
    """The same of rows that stream: lines that are written in parts go to memory in parts."""
    costs, row_bytes = p.machine.costs.transpose, _row_bytes(p, layout)
    more = costs.nontemporal_run_penalty * math.log2(max(1.0, written / STREAMED_BYTES))
    if row_bytes % LINE_BYTES:
        more += costs.partial_line_penalty * min(1.0, 2 * LINE_BYTES / row_bytes)
    return more


def _nontemporal_fraction(p: Workload[Any], layout: TransposeSpace) -> float:
    return nontemporal_fraction(p.outer_points // p.extents[layout.row], _row_bytes(p, layout))


def _row_bytes(p: Workload[Any], layout: TransposeSpace) -> int:
    return p.extents[layout.row] * layout.transposed[0].dtype.bytes


def _transferred_bytes(tensors: Iterable[AccessFootprint], extents: Tile) -> float:
    return sum(t.transferred_bytes(extents) for t in tensors)
