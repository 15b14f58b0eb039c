"""The cost of turning tiles on a CPU: shuffles, rooms, operations, memory by the length of what is read at once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

from roller_svc.families.common.cpu.memory import (
    LINE_BYTES,
    TEST_OPERATIONS,
    beside_reads,
    byte_seconds,
    kept_bytes,
    memory_share,
    moved_from,
    streamed_s,
    streaming_share,
)
from roller_svc.families.cpu.transpose.workload import LayoutSpace, Turn
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.footprint import AccessFootprint, Tile
from roller_svc.perf.workload import Workload

BEST_WRITTEN_BYTES = 256  # rows of a tile that are written
STREAMED_BYTES = 128  # rows that stream well
NEAR_ROOM_BYTES = 1024  # what is read again before it has left a core's queue of stores


def cpu_layout(p: Workload[LayoutSpace], launch: Launch) -> Costs:
    """Cycles of the core with the most tasks, overlapped in part with what memory moves."""
    mach, costs, layout = p.machine, p.machine.costs.transpose, p.facts
    vectors = p.outer_points / layout.lanes
    blocks = vectors * _overlap(p, layout, launch)
    shuffles = math.log2(layout.lanes) if layout.turn is Turn.SQUARE else layout.short - 1.0
    turned = blocks * (shuffles + costs.room_cycles) * len(layout.turned)
    each_tile = costs.tile_cycles
    if layout.turn is not Turn.SQUARE:
        each_tile = costs.short_cycles
        turned *= 1 + costs.room_more * math.log2(max(1.0, p.elem_bytes * math.prod(launch.thread) / NEAR_ROOM_BYTES))
    others = [t for t in p.touched.reads if layout.row in t.axes and t.strides.get(layout.row) != 1]
    gathered = max(0, len(others) - len(layout.turned))
    compute = vectors * p.space.flops / p.outer_points * costs.operation_cycles
    compute += p.outer_points * costs.gather_cycles * gathered
    if launch.streamed and _streaming_share(p, layout) < 1:
        compute += vectors * TEST_OPERATIONS * costs.operation_cycles
    tiles = math.prod(-(-e // t) for e, t in zip(p.extents, launch.thread, strict=True))
    waves = -(-launch.grid // mach.cores)
    share = waves * math.prod(min(b, e) for b, e in zip(launch.block, p.extents, strict=True)) / p.outer_points
    cycles = (turned, compute, tiles * each_tile, launch.grid * costs.task_cycles)
    seconds = [mach.seconds(c * share) for c in cycles]
    memory = _memory_s(p, layout, launch) * share * min(launch.grid, mach.cores)  # of cores at work that with the most
    core = sum(seconds)
    leak = costs.square_leak if layout.turn is Turn.SQUARE else costs.dealt_leak
    return Costs(
        core_s=max(core, memory) + leak * min(core, memory),
        core_stage=None,
        parts=(
            ("turn", seconds[0]), ("compute", seconds[1]), ("loops", seconds[2]), ("task", seconds[3]),
            (moved_from(p, launch), memory),
        ),
        occupancy=min(1.0, launch.grid / (waves * mach.cores)),
        waves=waves,
    )  # fmt: skip


def _overlap(p: Workload[Any], layout: LayoutSpace, launch: Launch) -> float:
    """Elements turned for each element of a tile: blocks are whole, so that the last may overlap the one before it."""
    if layout.turn is not Turn.SQUARE:
        return 1.0
    column, lanes = math.prod(min(launch.thread[c], p.extents[c]) for c in layout.columns), layout.lanes
    sides = (column, min(launch.thread[layout.row], p.extents[layout.row]))
    return math.prod(-(-side // lanes) * lanes / side for side in sides)


def _memory_s(p: Workload[Any], layout: LayoutSpace, launch: Launch) -> float:
    """Reads and results, each from where it is found and slower for the length of its rows; results that stream go to
    memory, wherever the rest is found, while a cache delivers what it has."""
    mach, costs, row = p.machine, p.machine.costs.transpose, layout.row
    streams = _streaming_share(p, layout) if launch.streamed else 0.0
    walked = kept_bytes(p, streams)
    each = byte_seconds(mach, walked, launch.grid)
    size = layout.turned[0].dtype.bytes
    run = size * math.prod(min(launch.thread[c], p.extents[c]) for c in layout.columns)
    whole = all(launch.thread[i] >= p.extents[i] for i in layout.columns) and layout.turn is not Turn.SQUARE
    read_more = 0.0 if whole else costs.read_more * math.log2(max(1.0, run / LINE_BYTES))
    reads = each * (1 + read_more) * _moved_by(p.touched.reads, p.extents)
    is_shared = launch.block[row] < p.extents[row] and _row_bytes(p, layout) % LINE_BYTES > 0
    shared = costs.shared_lines_more if is_shared else 0.0
    written = min(launch.thread[row], p.extents[row]) * size
    writes = each * (1 + _plain_more(p, layout, written) + shared) * _moved_by(p.touched.writes, p.extents)
    writes += _met_again_s(p, layout, launch)
    if not launch.streamed:
        return reads + writes
    streamed = sum(streamed_s(p, t, launch.grid) for t in p.touched.writes)
    streamed *= 1 + _streamed_more(p, layout, written) + shared
    from_caches = reads * (1 - memory_share(mach, walked))
    return reads + (1 - streams) * writes + streams * beside_reads(mach, streamed, from_caches, reads - from_caches)


def _plain_more(p: Workload[Any], layout: LayoutSpace, written: int) -> float:
    """What rows of results that go through the caches, `written` bytes of each at once, take more than their bytes."""
    costs, more = p.machine.costs.transpose, 0.0
    if layout.turn is Turn.SQUARE:  # results of others are dealt, or woven, in order of memory
        more = costs.plain_more + costs.written_more * abs(math.log2(written / BEST_WRITTEN_BYTES))
    return more + costs.written_back_more * memory_share(p.machine, p.compulsory_bytes)


def _met_again_s(p: Workload[Any], layout: LayoutSpace, launch: Launch) -> float:
    """Tiles that cut a row within a line: the next one along the row finds the line in the second cache. Where rows
    begin with a line, tiles of whole vectors do."""
    mach, row = p.machine, p.extents[layout.row]
    if layout.turn is not Turn.SQUARE:  # tiles that follow each other in memory
        return 0.0
    cuts = (p.outer_points // row) * (-(-row // launch.thread[layout.row]) - 1)
    cycles = mach.costs.transpose.met_again * mach.caches[-2].latency_cycles * cuts
    return mach.seconds(cycles * (1 - _streaming_share(p, layout))) / min(launch.grid, mach.cores)


def _streamed_more(p: Workload[Any], layout: LayoutSpace, written: int) -> float:
    """The same of rows that stream: lines that are written in parts go to memory in parts."""
    costs, row_bytes = p.machine.costs.transpose, _row_bytes(p, layout)
    more = costs.streamed_long_more * math.log2(max(1.0, written / STREAMED_BYTES))
    if row_bytes % LINE_BYTES:
        more += costs.streamed_cut_more * min(1.0, 2 * LINE_BYTES / row_bytes)
    return more


def _streaming_share(p: Workload[Any], layout: LayoutSpace) -> float:
    return streaming_share(p.outer_points // p.extents[layout.row], _row_bytes(p, layout))


def _row_bytes(p: Workload[Any], layout: LayoutSpace) -> int:
    return p.extents[layout.row] * layout.turned[0].dtype.bytes


def _moved_by(tensors: Iterable[AccessFootprint], extents: Tile) -> float:
    return sum(t.moved_bytes(extents) for t in tensors)
