"""Cost of a windowed reduction on a GPU: depthwise convolution, pooling, stencils."""

from __future__ import annotations

import math
from typing import Any

from roller_svc.families.common.gpu.elementwise_space import REQUEST_THREADS, MapAccess, Tile
from roller_svc.families.common.gpu.row_cost import row_reduction_cost
from roller_svc.families.common.gpu.serial_cost import ThreadWork, Traffic, dram_bytes_of_blocks, simt_costs
from roller_svc.families.gpu.window.workload import UNROLLED_STATEMENTS, WindowFacts, WindowSpace
from roller_svc.ir.hardware import Limits
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.machine import SCHEDULERS, register_words
from roller_svc.perf.occupancy import BlockResources, blocks_per_core, overhead_registers
from roller_svc.perf.workload import Workload

THREAD_INSTRUCTIONS = 30.0  # index of the thread, bounds of its tile, exit
INPUT_INSTRUCTIONS = 3.0  # bounds check of an input: two comparisons along a line, a select
LOADS_IN_FLIGHT = 8  # of unrolled loops over a window
TAP_INSTRUCTIONS = 2.0  # of a loop that is not unrolled: counter and address
SECTORS_PER_CYCLE = 4  # of L1
DEPENDENT_CYCLES = 6.0  # latency of a dependent operation


def window_registers(windows: WindowSpace, thread: Tile, limits: Limits) -> int:
    """Return a thread's registers: an accumulator per output, one line of inputs, its weights, addresses."""
    words = register_words(windows.map.space.compute_dtype)
    slid = windows.register_windows(thread)
    taps = math.prod([w.taps for w in slid]) * windows.lanes(thread)
    return overhead_registers(limits) + words * (math.prod(thread) + windows.live_inputs(thread) + min(taps, 32))


def windowed_cost(p: Workload[WindowFacts], launch: Launch) -> Costs:
    """Return the cost of a window; a split reduction is lowered as rows and priced as rows."""
    return window_cost(p, launch) if launch.split_k == 1 else row_reduction_cost(p, p.facts.rows, launch)


def window_cost(p: Workload[WindowFacts], launch: Launch) -> Costs:
    """Warps issue, caches and DRAM serve; the longest of them bounds, but for what a thread's own chain takes."""
    mach, hw, windows = p.machine, p.machine.hw, p.facts.windows
    needs = BlockResources(launch.threads, window_registers(windows, launch.thread, hw.limits), 0)
    resident = blocks_per_core(launch.compiled or needs, hw)
    instructions, requests = _thread_work(p, windows, launch)
    lines = max(1, windows.inputs(launch.thread) // windows.live_inputs(launch.thread))
    chain = mach.dram_latency_cycles + lines * DEPENDENT_CYCLES * SCHEDULERS
    clipped = tuple([min(b, e) for b, e in zip(launch.block, p.extents, strict=True)])
    moved = launch.grid * p.footprint.transferred_bytes(clipped)
    requested = launch.grid * p.footprint.requested_bytes(clipped)
    busy = min(launch.grid, resident * mach.cores) * launch.threads
    together = min(windows.inputs(launch.thread), max(windows.live_inputs(launch.thread), LOADS_IN_FLIGHT))
    in_flight = busy * together * max(a.bytes for a in windows.map.accesses if _is_under(windows, a))
    padded = launch.grid * math.prod(launch.block[i] for i in p.spatial) / p.outer_points
    fma_s = p.space.flops * padded / mach.unit.flops_per_s
    traffic = Traffic(requested, dram_bytes_of_blocks(p, moved), in_flight)
    return simt_costs(mach, launch, needs, ThreadWork(instructions, requests, chain), traffic, fma_s)


def _thread_work(p: Workload[Any], windows: WindowSpace, launch: Launch) -> tuple[float, float]:
    """Instructions of a thread, and cycles that a warp's accesses hold the core's cache."""
    thread = launch.thread
    outputs, taps = math.prod([thread[i] for i in p.spatial]), p.inner_points
    # joining is the other half of a multiply-add
    each_tap = max(1.0, p.space.flops / (p.outer_points * taps) - 1.0)
    instructions = THREAD_INSTRUCTIONS + each_tap * taps * outputs
    if windows.unrolled_statements(thread) > UNROLLED_STATEMENTS or not windows.register_windows(thread):
        instructions += TAP_INSTRUCTIONS * taps
    cycles = 0.0
    for access in windows.map.accesses:
        count = _elements(windows, access, launch)
        accesses = count * _accesses_per_element(windows, access, thread)
        instructions += accesses * (1.0 + (INPUT_INSTRUCTIONS if _is_under(windows, access) else 0.0))
        each = max(1, round(count / accesses))
        cycles += accesses * max(1.0, _sectors(windows, access, launch, each) / SECTORS_PER_CYCLE)
    return instructions, cycles


def _accesses_per_element(windows: WindowSpace, access: MapAccess, thread: Tile) -> float:
    """Return accesses for each element that a thread reads or writes."""
    if access.contiguous_axis != windows.row:
        return 1.0
    along = [w for w in windows.windows if w.axis == windows.row]
    if not along:
        return 1.0 / math.gcd(access.vector_width, windows.lanes(thread))
    if not _is_under(windows, access):
        return 1.0 / math.gcd(access.vector_width, thread[windows.row])
    # a line begins and ends with elements that share no aligned vector
    inner = along[0].stride * thread[windows.row]
    width = math.gcd(access.vector_width, inner)
    extent = along[0].input_extent(thread[windows.row])
    whole = min(inner, extent) // width * width
    return (extent - whole + whole / width) / extent


def _is_under(windows: WindowSpace, access: MapAccess) -> bool:
    inner = {w.inner for w in windows.windows}
    return any(name in inner for dim in access.access.dims if len(dim.coeffs) > 1 for name, _ in dim.coeffs)


def _elements(windows: WindowSpace, access: MapAccess, launch: Launch) -> float:
    """Elements that a thread reads or writes."""
    thread = launch.thread
    if _is_under(windows, access):
        return windows.inputs(thread)
    names = {name for dim in access.access.dims for name, _ in dim.coeffs}
    taps = [w.taps for w in windows.windows if w.inner in names] + [n for name, n in windows.other_inner if name in names]
    outputs = [thread[i] for i, step in enumerate(access.steps) if step and i < len(thread)]
    return math.prod(taps) * math.prod(outputs)


def _sectors(windows: WindowSpace, access: MapAccess, launch: Launch, each: int) -> float:
    """Sectors that one access of a warp touches: lanes stand along the row, then along the next axes out."""
    if access.is_opaque:
        return float(REQUEST_THREADS)
    order = sorted(range(len(access.steps)), key=lambda i: i == windows.row)
    lanes = [(launch.block[i] // launch.thread[i], access.steps[i] * launch.thread[i]) for i in reversed(order)]
    return access.sectors(each, lanes)
