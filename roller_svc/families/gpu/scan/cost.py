"""Cost of a scan on a GPU: one pass over memory, and the latency of a tile of each row after the other."""

from __future__ import annotations

import math

from roller_svc.analysis.scans import gate_product_dtype
from roller_svc.families.common.gpu.serial_cost import (
    DEPENDENT_CYCLES,
    ThreadWork,
    Traffic,
    dram_bytes_of_blocks,
    nest_registers,
    simt_costs,
)
from roller_svc.families.gpu.scan.workload import ScanSpace, ScanThreads, scan_threads
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.footprint import AccessFootprint
from roller_svc.perf.machine import register_words
from roller_svc.perf.occupancy import BlockResources, blocks_per_core
from roller_svc.perf.workload import Workload

BARRIER_CYCLES = 30.0
SHUFFLE_CYCLES = 25.0  # latency of a shuffle and what depends on it
SHARED_CYCLES = 30.0  # latency of shared memory
STEP_INSTRUCTIONS = 3.0  # of a scan of lanes: shuffle, comparison, operation
TOTAL_INSTRUCTIONS = 4.0  # of a warp's total: load, comparison, two operations
TILE_INSTRUCTIONS = 20.0
THREAD_INSTRUCTIONS = 30.0
SECTOR_BYTES = 32
SECTORS_PER_CYCLE = 4


def scan_resources(p: Workload[ScanSpace], threads: ScanThreads) -> BlockResources:
    words = register_words(p.space.compute_dtype)
    parts = 2 if threads.is_ordered else 1
    registers = nest_registers(1, words, p.machine.hw.limits) + (1 + parts) * threads.elements * words
    total = p.elem_bytes + (gate_product_dtype(p.space.compute_dtype).bytes if threads.is_ordered else 0)
    shared = math.prod(threads.total_shape) * total if threads.meets_in_shared else 0
    return BlockResources(threads.rows * threads.lanes * threads.columns, registers, shared)


def scan_cost(p: Workload[ScanSpace], launch: Launch) -> Costs:
    """Return the longest of issue, cache and DRAM time. Resident blocks hide the latency of each other's tiles."""
    mach, hw, facts = p.machine, p.machine.hw, p.facts
    threads = scan_threads(p, launch.block, launch.thread, launch.reduce_threads, launch.split_k)
    needs = scan_resources(p, threads)
    resident = blocks_per_core(launch.compiled or needs, hw)
    steps = math.log2(threads.in_warp)
    parts = 2 if threads.has_gates else 1
    operations = p.space.instructions / (p.outer_points * p.inner_points) + 1.0 + parts
    instructions = TILE_INSTRUCTIONS + threads.elements * operations + steps * parts * STEP_INSTRUCTIONS
    chain = mach.dram_latency_cycles + threads.elements * DEPENDENT_CYCLES + (steps + 1) * SHUFFLE_CYCLES
    if threads.meets_in_shared:
        instructions += threads.warps * parts * TOTAL_INSTRUCTIONS
        chain += BARRIER_CYCLES + SHARED_CYCLES + threads.warps * DEPENDENT_CYCLES
    requests = 0.0
    for access in p.footprint.accesses:
        accesses, sectors = _tile_requests(p, threads, access)
        instructions += accesses * (1.0 + access.address_ops / 2)
        requests += accesses * max(1.0, sectors / SECTORS_PER_CYCLE)
    work = ThreadWork(THREAD_INSTRUCTIONS + threads.tiles * instructions, threads.tiles * requests, threads.tiles * chain)
    row = p.extents[facts.along] // launch.split_k
    rows = tuple([row if i == facts.along else min(b, e) for i, (b, e) in enumerate(zip(launch.block, p.extents, strict=True))])
    moved = launch.grid * p.footprint.transferred_bytes(rows)
    in_flight = min(launch.grid, resident * mach.cores) * launch.threads * threads.elements * _moved_bytes(p)
    padded = launch.grid / launch.split_k * math.prod([launch.block[i] for i in p.spatial]) / p.outer_points
    fma_s = p.space.flops * padded / mach.unit.flops_per_s
    requested = p.footprint.requested_bytes(rows)
    if facts.width < threads.elements and facts.column is None:
        # an access of a warp writes a part of each sector, of which L2 merges several
        requested += sum([access.requested_bytes(rows) for access in p.footprint.writes])
    traffic = Traffic(launch.grid * requested, dram_bytes_of_blocks(p, moved), in_flight)
    costs = simt_costs(mach, launch, needs, work, traffic, fma_s)
    return costs if launch.split_k == 1 else _with_totals(p, launch, costs)


def _moved_bytes(p: Workload[ScanSpace]) -> int:
    """Return the bytes that a step loads; where it loads nothing, as many are in flight as it stores."""
    reads = [access for access in p.footprint.reads if p.facts.along in access.axes]
    return sum([access.elem_bytes for access in reads or p.footprint.writes])


def _with_totals(p: Workload[ScanSpace], launch: Launch, costs: Costs) -> Costs:
    """Return the costs with the launches that reduce the pieces, which read everything, and scan their totals."""
    mach = p.machine
    read = sum([access.transferred_bytes(p.extents) for access in p.footprint.reads])
    reading = read / mach.max_bytes_per_s(p.data_level)
    before = mach.hw.limits.launch_overhead_s + reading + mach.seconds(2 * mach.dram_latency_cycles)
    stages = tuple((name, s + before if name == "dram" else s) for name, s in costs.stage_seconds)
    moved = tuple((name, amount + read if name == "dram" else amount) for name, amount in costs.moved_bytes)
    return costs._replace(core_s=costs.core_s + before, stage_seconds=stages, moved_bytes=moved)


def _tile_requests(p: Workload[ScanSpace], threads: ScanThreads, access: AccessFootprint) -> tuple[float, float]:
    """Return a thread's accesses of a tensor in a tile, and the sectors of a warp's one."""
    facts, size = p.facts, access.elem_bytes
    if facts.along not in access.axes:
        return 1.0, 1.0
    if facts.column is not None:
        columns = min(threads.columns, threads.warp)
        stride = access.strides.get(facts.column, SECTOR_BYTES) if facts.column in access.axes else 0
        return float(threads.elements), threads.warp / columns * max(1.0, columns * stride * size / SECTOR_BYTES)
    run = threads.elements * size * access.strides.get(facts.along, SECTOR_BYTES)
    return threads.elements / facts.width, max(1.0, threads.warp * min(1.0, run / SECTOR_BYTES))
