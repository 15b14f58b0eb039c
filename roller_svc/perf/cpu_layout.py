"""The cost of turning tiles on a CPU: shuffles, rooms, operations, memory by the length of what is read at once."""

from __future__ import annotations

import math

from roller_svc.perf.cpu_memory import byte_seconds, memory_share, streamed_s
from roller_svc.perf.layout_tile import LayoutSpace, Turn
from roller_svc.perf.problem import Problem
from roller_svc.perf.terms import Costs, Launch

LINE_BYTES = 64
BEST_WRITTEN_BYTES = 256  # rows of a tile that are written
STREAMED_BYTES = 128  # rows that stream well


def cpu_layout(p: Problem, layout: LayoutSpace, launch: Launch) -> Costs:
    """Cycles of the core with the most tasks, overlapped in part with what memory moves."""
    mach, costs = p.machine, p.machine.costs.layout
    vectors = p.outer_points / layout.lanes
    blocks = vectors * _overlap(p, layout, launch)
    shuffles = math.log2(layout.lanes) if layout.turn is Turn.SQUARE else layout.short - 1.0
    turned = blocks * (shuffles + costs.room_cycles) * len(layout.turned)
    others = [t for t in p.touched.reads if layout.row in t.axes and t.strides.get(layout.row) != 1]
    gathered = max(0, len(others) - len(layout.turned))
    compute = vectors * p.space.flops / p.outer_points * costs.operation_cycles
    compute += p.outer_points * costs.gather_cycles * gathered
    tiles = math.prod(-(-e // t) for e, t in zip(p.extents, launch.thread, strict=True))
    waves = -(-launch.grid // mach.cores)
    share = waves * math.prod(min(b, e) for b, e in zip(launch.block, p.extents, strict=True)) / p.outer_points
    cycles = (turned, compute, tiles * costs.tile_cycles, launch.grid * costs.task_cycles)
    seconds = [mach.seconds(c * share) for c in cycles]
    memory = _memory_s(p, layout, launch) * share * min(launch.grid, mach.cores)  # of cores at work that with the most
    core = sum(seconds)
    leak = costs.square_leak if layout.turn is Turn.SQUARE else costs.dealt_leak
    return Costs(
        core_s=max(core, memory) + leak * min(core, memory),
        core_stage=None,
        parts=(
            ("turn", seconds[0]), ("compute", seconds[1]), ("loops", seconds[2]), ("task", seconds[3]),
            ("dram", memory),
        ),
        occupancy=min(1.0, launch.grid / (waves * mach.cores)),
        waves=waves,
    )  # fmt: skip


def _overlap(p: Problem, layout: LayoutSpace, launch: Launch) -> float:
    """Elements turned for each element of a tile: blocks are whole, so that the last may overlap the one before it."""
    if layout.turn is not Turn.SQUARE:
        return 1.0
    column, lanes = math.prod(min(launch.thread[c], p.extents[c]) for c in layout.columns), layout.lanes
    sides = (column, min(launch.thread[layout.row], p.extents[layout.row]))
    return math.prod(-(-side // lanes) * lanes / side for side in sides)


def _memory_s(p: Problem, layout: LayoutSpace, launch: Launch) -> float:
    """Reads and results, each from where it is found and slower for the length of its rows; results that stream go to
    memory, wherever the rest is found, while a cache delivers what it has."""
    mach, costs, row = p.machine, p.machine.costs.layout, layout.row
    each = byte_seconds(mach, p.compulsory_bytes, launch.grid)
    size = layout.turned[0].dtype.bytes
    run = size * math.prod(min(launch.thread[c], p.extents[c]) for c in layout.columns)
    whole = all(launch.thread[i] >= p.extents[i] for i in layout.columns) and layout.turn is not Turn.SQUARE
    written = min(launch.thread[row], p.extents[row]) * size
    is_cut = p.extents[row] * size % LINE_BYTES > 0
    read_more = 0.0 if whole else costs.read_more * math.log2(max(1.0, run / LINE_BYTES))
    reads = each * (1 + read_more) * sum(t.moved_bytes(p.extents) for t in p.touched.reads)
    if launch.streamed:
        more = costs.streamed_long_more * math.log2(max(1.0, written / STREAMED_BYTES))
        if is_cut:  # lines that are written in parts go to memory in parts
            more += costs.streamed_cut_more * min(1.0, 2 * LINE_BYTES / (p.extents[row] * size))
        writes = sum(streamed_s(p, t, launch.grid) for t in p.touched.writes)
    else:
        more = 0.0
        if layout.turn is Turn.SQUARE:  # results of others are dealt, or woven, in order of memory
            more = costs.plain_more + costs.written_more * abs(math.log2(written / BEST_WRITTEN_BYTES))
        more += costs.written_back_more * memory_share(mach, p.compulsory_bytes)
        writes = each * sum(t.moved_bytes(p.extents) for t in p.touched.writes)
    if launch.block[row] < p.extents[row] and is_cut:
        more += costs.shared_lines_more
    writes *= 1 + more
    if not launch.streamed:
        return reads + writes
    from_caches = reads * (1 - memory_share(mach, p.compulsory_bytes))
    return reads - from_caches + max(writes, from_caches)
