"""Cost of blocked transposes on a CPU: shuffles, scratch buffers, operations, memory by contiguous length."""

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
from roller_svc.families.common.cpu.task_costs import count_waves, make_costs
from roller_svc.families.cpu.transpose.workload import TransposeKind, TransposeSpace
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.footprint import AccessFootprint, Tile
from roller_svc.perf.workload import Workload

STORE_FORWARD_BYTES = 1024  # reread before they leave the store buffer


def transpose_cost(p: Workload[TransposeSpace], launch: Launch) -> Costs:
    """Return the cost of the busiest core: cycles that overlap imperfectly with memory."""
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
    compute = vectors * p.space.flops / p.outer_points * mach.costs.loops.operation_cycles
    compute += p.outer_points * mach.costs.loops.gather_cycles * gathered
    if launch.pipeline.nontemporal and _nontemporal_fraction(p, layout) < 1:
        compute += vectors * TEST_OPERATIONS * mach.costs.loops.operation_cycles
    tiles = math.prod(-(-e // t) for e, t in zip(p.extents, launch.thread, strict=True))
    share = count_waves(p, launch) * math.prod(min(b, e) for b, e in zip(launch.block, p.extents, strict=True)) / p.outer_points
    task = launch.grid * mach.costs.task_cycles
    cycles = {"transpose": transposed, "compute": compute, "loops": tiles * each_tile, "task": task}
    seconds = {name: mach.seconds(c * share) for name, c in cycles.items()}
    memory = _memory_s(p, layout, launch) * share * min(launch.grid, mach.cores)  # of the busiest core
    core = sum(seconds.values())
    leak = costs.block_imperfect_overlap if layout.kind is TransposeKind.BLOCK else costs.interleave_imperfect_overlap
    core_s = max(core, memory) + leak * min(core, memory)
    return make_costs(p, launch, core_s, seconds, (dominant_level(p, launch), memory))


def _overlap(p: Workload[Any], layout: TransposeSpace, launch: Launch) -> float:
    """Return elements transposed per element of a tile: the last whole block may overlap the one before it."""
    if layout.kind is not TransposeKind.BLOCK:
        return 1.0
    column, lanes = math.prod(min(launch.thread[c], p.extents[c]) for c in layout.columns), layout.lanes
    sides = (column, min(launch.thread[layout.row], p.extents[layout.row]))
    return math.prod(-(-side // lanes) * lanes / side for side in sides)


def _memory_s(p: Workload[Any], layout: TransposeSpace, launch: Launch) -> float:
    """Return seconds of reads, by the length of their rows, and of writes.

    Non-temporal outputs go to memory while caches deliver inputs.
    """
    mach, costs = p.machine, p.machine.costs.transpose
    streams = _nontemporal_fraction(p, layout) if launch.pipeline.nontemporal else 0.0
    working_set = cacheable_bytes(p, streams)
    each = seconds_per_byte(mach, working_set, launch.grid)
    size = layout.transposed[0].dtype.bytes
    run = size * math.prod(min(launch.thread[c], p.extents[c]) for c in layout.columns)
    whole = all(launch.thread[i] >= p.extents[i] for i in layout.columns) and layout.kind is not TransposeKind.BLOCK
    read_more = 0.0 if whole else costs.read_run_penalty * math.log2(max(1.0, run / LINE_BYTES))
    reads = each * (1 + read_more) * _transferred_bytes(p.footprint.reads, p.extents)
    # kinds other than blocks write in memory order
    write_more = costs.unprefetched_write_penalty if layout.kind is TransposeKind.BLOCK else 0.0
    writes = each * (1 + write_more) * _transferred_bytes(p.footprint.writes, p.extents)
    writes += _shared_line_s(p, layout, launch)
    if not launch.pipeline.nontemporal:
        return reads + writes
    streamed = sum(nontemporal_write_s(p, t, launch.grid) for t in p.footprint.writes)
    from_caches = reads * (1 - dram_fraction(mach, working_set))
    return reads + (1 - streams) * writes + streams * exposed_nontemporal_s(mach, streamed, from_caches, reads - from_caches)


def _shared_line_s(p: Workload[Any], layout: TransposeSpace, launch: Launch) -> float:
    """Return seconds of output lines that adjacent tiles share, reread from L2."""
    mach, row = p.machine, p.extents[layout.row]
    if layout.kind is not TransposeKind.BLOCK:  # successive tiles are contiguous
        return 0.0
    cuts = (p.outer_points // row) * (-(-row // launch.thread[layout.row]) - 1)
    cycles = mach.costs.transpose.shared_line_latency_fraction * mach.caches[-2].latency_cycles * cuts
    return mach.seconds(cycles * (1 - _nontemporal_fraction(p, layout))) / min(launch.grid, mach.cores)


def _nontemporal_fraction(p: Workload[Any], layout: TransposeSpace) -> float:
    row = p.extents[layout.row]
    return nontemporal_fraction(p.outer_points // row, row * layout.transposed[0].dtype.bytes)


def _transferred_bytes(tensors: Iterable[AccessFootprint], extents: Tile) -> float:
    return sum(t.transferred_bytes(extents) for t in tensors)
