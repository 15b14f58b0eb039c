"""Cost of windows over channels on a CPU: taps of register tiles, lines read again from L2, memory."""

from __future__ import annotations

from roller_svc.families.common.cpu.memory import (
    dominant_level,
    private_seconds_per_byte,
    reread_ratio,
    transfer_s,
)
from roller_svc.families.common.cpu.op_counts import work_cycles
from roller_svc.families.common.cpu.task_costs import count_waves, make_costs
from roller_svc.families.cpu.channel_window.workload import ChannelSpace
from roller_svc.ir.expr import loads_of
from roller_svc.ir.program import Combine
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.machine import LOAD_PORTS, Machine
from roller_svc.perf.workload import Workload

RETAINED_FRACTION = 0.5  # of L1 for the lines under a window
NARROW_BYTES = 32.0  # added to each segment of channels beyond L2: prefetchers follow short segments badly


def channel_window_cost(p: Workload[ChannelSpace], launch: Launch) -> Costs:
    """Return the cycles of the core with the most tasks, overlapped imperfectly with memory."""
    mach, space, costs = p.machine, p.facts, p.machine.costs.window
    at = len(space.leading) + len(space.lines)
    positions, width = launch.thread[at], launch.thread[at + 1]
    waves = count_waves(p, launch)
    share = max(waves / launch.grid, 1 / mach.cores)
    tiles = -(-space.columns.extent // positions) * (p.outer_points / space.columns.extent / width)
    taps_s = mach.seconds(share * tiles * tile_cycles(mach, space, positions, width))
    task_s = mach.seconds(waves * costs.task_cycles)
    again_s = share * _reread_bytes(p, launch) * private_seconds_per_byte(mach, 2 * p.footprint.bytes(launch.block))
    clipped = tuple([min(b, e) for b, e in zip(launch.block, p.extents, strict=True)])
    often = reread_ratio(p.footprint.reads, launch.grid, clipped, p.extents)
    memory_s = sum(often * transfer_s(p, t, clipped, launch.grid) for t in p.footprint.reads)
    memory_s += sum(transfer_s(p, t, clipped, launch.grid) for t in p.footprint.writes)
    if p.compulsory_bytes > mach.hw.block_level.capacity_bytes:
        memory_s *= 1.0 + NARROW_BYTES / (clipped[at + 1] * p.elem_bytes)
    busy_s = taps_s + again_s
    overlapped = max(busy_s, memory_s) + costs.imperfect_memory_overlap * min(busy_s, memory_s)
    stages = {"compute": taps_s, "again": again_s, "task": task_s}
    moved = often * sum(t.transferred_bytes(p.extents) for t in p.footprint.reads)
    moved += sum(t.transferred_bytes(p.extents) for t in p.footprint.writes)
    return make_costs(p, launch, overlapped + task_s, stages, (dominant_level(p, launch), memory_s), moved)


def tile_cycles(mach: Machine, space: ChannelSpace, positions: int, width: int) -> float:
    """Return cycles of the taps of `positions` outputs of `width` channels: operations against loads."""
    costs, reduction = mach.costs.window, space.reduction
    vectors = width / mach.unit.shape[-1]
    columns = space.loaded_columns(positions)
    extreme = reduction.statement.combine in (Combine.MAX, Combine.MIN)
    joined = costs.minmax_cycles if extreme else costs.accumulate_fma_ratio * mach.unit.shape[-1] / mach.fma_per_cycle
    work = joined * positions * space.columns.taps
    work += columns * sum(work_cycles(mach, plane.work) for plane in reduction.planes)
    loads = columns * sum(len(loads_of(plane.value)) for plane in reduction.planes)
    loads += space.columns.taps * len(space.weights)
    busy = vectors * (max(work, loads / mach.load_ports) + costs.imperfect_overlap * min(work, loads / LOAD_PORTS))
    return space.line_taps * (busy + costs.step_cycles) + costs.staging_cycles * positions * vectors + costs.line_cycles


def _reread_bytes(p: Workload[ChannelSpace], launch: Launch) -> float:
    """Return the bytes that windows of successive lines read again, where L1 does not hold the lines under one."""
    space, mach = p.facts, p.machine
    at = len(space.leading) + len(space.lines)
    size = p.elem_bytes
    columns = space.columns.input_extent(min(launch.block[at], space.columns.extent))
    rows = sum(len(loads_of(plane.value)) for plane in space.reduction.planes) * space.line_taps
    window_bytes = rows * columns * min(launch.block[at + 1], space.channels.extent) * size
    if window_bytes <= RETAINED_FRACTION * mach.caches[-1].bytes_per_core:
        return 0.0
    read = p.outer_points / space.columns.extent * space.columns.input_extent(space.columns.extent) * size * rows
    return max(0.0, read - sum(t.bytes(p.extents) for t in p.footprint.reads))
