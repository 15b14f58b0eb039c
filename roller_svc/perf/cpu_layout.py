"""The cost of turning tiles on a CPU: shuffles, rooms, operations, memory by the length of what is read at once."""

from __future__ import annotations

import math

from roller_svc.perf.layout_tile import LayoutSpace, Turn
from roller_svc.perf.machine import Machine
from roller_svc.perf.problem import Problem
from roller_svc.perf.terms import Costs, Launch

TASK_CYCLES = 600.0
TILE_CYCLES = 60.0  # loops over a tile begun and ended, addresses
ROOM_CYCLES = 3.0  # a vector into a room and out of it again
OPERATION_CYCLES = 0.5  # one vector operation: two ports
GATHER_CYCLES = 1.2  # one element of a vector that is no run in memory
LINE_BYTES = 64
# Seconds more, in parts of what a copy takes. Measured on Skylake-SP, float32, one thread: 1000 x 1000, 1024 x 1024,
# 3000 x 7000, 4096 x 4096, 8 x 64 x 3136, tiles of 16 x 16 to 256 x 64.
PLAIN_MORE = 0.3
BEST_WRITTEN_BYTES, WRITTEN_BY_TWICE = 256, 0.05  # rows of a tile that are written, each time twice as long or short
READ_BY_TWICE = 0.05  # each time that rows that are read are twice as long as a line: tiles crowd the first cache
STREAMED_MORE = 0.6  # where results stream past the caches
STREAMED_BYTES, STREAMED_BY_TWICE = 128, 0.2  # each time that rows that stream are twice as long as this
WRITTEN_BACK = 0.4  # beyond all caches a line that is written is read before
ONE_OF_TWO = 0.65  # of all cores' memory bandwidth that one reaches
SHARED_LINES = 0.5  # rows of results cut into tasks within a line: 331 x 331 x 3 reversed, two threads
SKYLAKE_GAIN = 0.8  # of stores past the caches in maps, where these figures were measured
IN_CACHE_STREAMED = 3.0  # to store past a cache that holds everything, as measured in L2


def cpu_layout(p: Problem, layout: LayoutSpace, launch: Launch) -> Costs:
    """Cycles of the core with the most tasks, then memory on top: staging waits for it."""
    mach = p.machine
    vectors = p.outer_points / layout.lanes
    blocks = vectors * _overlap(p, layout, launch)
    shuffles = math.log2(layout.lanes) if layout.turn is Turn.SQUARE else layout.short - 1.0
    turned = blocks * (shuffles + ROOM_CYCLES) * len(layout.turned)
    others = [t for t in p.touched.reads if layout.row in t.axes and t.strides.get(layout.row) != 1]
    gathered = max(0, len(others) - len(layout.turned))
    compute = vectors * p.space.flops / p.outer_points * OPERATION_CYCLES
    compute += p.outer_points * GATHER_CYCLES * gathered
    tiles = math.prod(-(-e // t) for e, t in zip(p.extents, launch.thread, strict=True))
    waves = -(-launch.grid // mach.cores)
    share = waves * math.prod(min(b, e) for b, e in zip(launch.block, p.extents, strict=True)) / p.outer_points
    cycles = (turned, compute, tiles * TILE_CYCLES, launch.grid * TASK_CYCLES)
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
    mach, total = p.machine, p.compulsory_bytes
    bandwidth, in_cache = _bandwidth(mach, total)
    size = layout.turned[0].dtype.bytes
    run = size * math.prod(min(launch.thread[c], p.extents[c]) for c in layout.columns)
    whole = all(launch.thread[i] >= p.extents[i] for i in layout.columns) and layout.turn is not Turn.SQUARE
    written = min(launch.thread[layout.row], p.extents[layout.row]) * size
    more = 0.0 if whole else READ_BY_TWICE * math.log2(max(1.0, run / LINE_BYTES))
    if launch.streamed:
        more += STREAMED_MORE + STREAMED_BY_TWICE * math.log2(max(1.0, written / STREAMED_BYTES))
        # lines that are written in parts go to memory in parts
        more += (1 / mach.dram.streamed_write_gain - 1 / SKYLAKE_GAIN) / 2  # half of what moves is written
        more += IN_CACHE_STREAMED if in_cache else (p.extents[layout.row] * size % LINE_BYTES > 0) * 1.0
    else:
        more += PLAIN_MORE + WRITTEN_BY_TWICE * abs(math.log2(written / BEST_WRITTEN_BYTES))
        more += WRITTEN_BACK if bandwidth == mach.dram.bandwidth_bytes_per_s else 0.0
    row = layout.row
    if launch.block[row] < p.extents[row] and p.extents[row] * size % LINE_BYTES:
        more += SHARED_LINES
    alone = mach.cores / launch.grid
    return total / bandwidth * (1 + more) * max(1.0, ONE_OF_TWO * alone)


def _bandwidth(mach: Machine, total_bytes: int) -> tuple[float, bool]:
    """Of the level that holds everything, and whether that is a core's own."""
    last = mach.last_cache
    for cache in reversed(mach.caches):
        if total_bytes <= cache.total_bytes // 2:
            return cache.bytes_per_s, cache is not last
    return mach.dram.bandwidth_bytes_per_s, False
