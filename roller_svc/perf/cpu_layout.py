"""The cost of turning tiles on a CPU: shuffles, rooms, operations, memory by the length of what is read at once."""

from __future__ import annotations

import math

from roller_svc.perf.layout_tile import LayoutSpace, Turn
from roller_svc.perf.machine import Machine
from roller_svc.perf.problem import Problem
from roller_svc.perf.terms import Costs, Launch

LINE_BYTES = 64
BEST_WRITTEN_BYTES = 256  # rows of a tile that are written
STREAMED_BYTES = 128  # rows that stream well
SKYLAKE_GAIN = 0.8  # of stores past the caches in maps, where these figures were measured


def cpu_layout(p: Problem, layout: LayoutSpace, launch: Launch) -> Costs:
    """Cycles of the core with the most tasks, then memory on top: staging waits for it."""
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
    memory = _memory_s(p, layout, launch) * share * mach.cores
    return Costs(
        core_s=sum(seconds) + memory,
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
    mach, total, costs = p.machine, p.compulsory_bytes, p.machine.costs.layout
    bandwidth, in_cache = _bandwidth(mach, total)
    size = layout.turned[0].dtype.bytes
    run = size * math.prod(min(launch.thread[c], p.extents[c]) for c in layout.columns)
    whole = all(launch.thread[i] >= p.extents[i] for i in layout.columns) and layout.turn is not Turn.SQUARE
    written = min(launch.thread[layout.row], p.extents[layout.row]) * size
    more = 0.0 if whole else costs.read_more * math.log2(max(1.0, run / LINE_BYTES))
    if launch.streamed:
        more += costs.streamed_more + costs.streamed_long_more * math.log2(max(1.0, written / STREAMED_BYTES))
        # lines that are written in parts go to memory in parts
        more += (1 / mach.dram.streamed_write_gain - 1 / SKYLAKE_GAIN) / 2  # half of what moves is written
        cut = costs.streamed_cut_more if p.extents[layout.row] * size % LINE_BYTES else 0.0
        more += costs.streamed_held_more if in_cache else cut
    else:
        more += costs.plain_more + costs.written_more * abs(math.log2(written / BEST_WRITTEN_BYTES))
        more += costs.written_back_more if bandwidth == mach.dram.bandwidth_bytes_per_s else 0.0
    row = layout.row
    if launch.block[row] < p.extents[row] and p.extents[row] * size % LINE_BYTES:
        more += costs.shared_lines_more
    alone = mach.cores / launch.grid
    return total / bandwidth * (1 + more) * max(1.0, costs.alone * alone)


def _bandwidth(mach: Machine, total_bytes: int) -> tuple[float, bool]:
    """Of the level that holds everything, and whether that is a core's own."""
    last = mach.last_cache
    for cache in reversed(mach.caches):
        if total_bytes <= cache.total_bytes // 2:
            return cache.bytes_per_s, cache is not last
    return mach.dram.bandwidth_bytes_per_s, False
