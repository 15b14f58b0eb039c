"""Cost of a SIMT GEMM: staged tiles, some of them in flight before their use."""

from __future__ import annotations

import math

from roller_svc.construct.rules import extent_on
from roller_svc.families.gpu.simt_contraction.workload import (
    BARRIER_CYCLES,
    SimtFacts,
    SimtOperandLoad,
    SimtStep,
    StagingRegisters,
    ThreadRegisters,
    staged_row,
    vector_elements,
)
from roller_svc.ir.program import Axis
from roller_svc.perf.common import Costs, Launch, dram_bytes_with_reuse, load_latency_cycles, uneven_waves, wave_rectangle
from roller_svc.perf.footprint import DIVISION_OPS, Tile
from roller_svc.perf.machine import register_words
from roller_svc.perf.occupancy import BlockResources, blocks_per_core, overhead_registers
from roller_svc.perf.workload import OperandFootprint, Workload

STORE_CYCLES = 4.0  # of a warp for each element that its threads store to shared memory, in order
# Minimum instructions of a thread per copy: address and copy; through registers the load, its address and per store to
# shared memory the store and half a conversion. A guard is comparisons and a select; positions on fused axes are added.
# Compilers add some for wide addresses, which IMPERFECT_OVERLAP covers.
COPY_OPS, LOAD_OPS, STORE_OPS, GUARD_OPS, PLACE_OPS = 2.0, 2.0, 1.5, 6.0, 4.0
MULTIPLIED = 0.25  # of those instructions: integer multiply-adds, which run on the FMA units
# Registers of a thread in addition to its tile and to staged operands: a minimum (loop counters, column indices), and
# those of an operand whose rows are found by divisions.
MIN_OVERHEAD, DIVIDING = 14.0, 10.0
REQUESTS = 1.0, 0.5  # of shared memory's bandwidth: scalar reads; vector reads, which pairs of lanes share


def simt_contraction(p: Workload[SimtFacts], launch: Launch) -> Costs:
    """Return the cost of waves of blocks, each a chain of k-tiles (§5 of the design notes on ROLLER)."""
    mach, hw = p.machine, p.machine.hw
    needs = block_resources(p, launch)
    resident = blocks_per_core(launch.compiled or needs, hw)
    step = block_step(p, launch.block, launch.thread, launch.threads)
    steps, longest = p.k_tiles(launch.block, extent_on(launch.block, p.k), block_steps(p, launch))
    warps, stages_in_flight = (
        -(-launch.threads // hw.limits.warp_size),
        prefetch_stages(p, launch.block, launch.pipeline.stages),
    )

    def block_cycles(blocks: float) -> float:
        return steps * step.cycles(blocks, warps, stages_in_flight)

    waves, core_cycles = uneven_waves(launch.grid, resident, mach.cores, block_cycles, longest / steps)
    edges = step.latency + min(resident, -(-launch.grid // mach.cores)) * _epilogue_cycles(p, launch)
    # resident blocks drift apart: first loads and epilogues of all but one wave overlap with other blocks
    core_cycles += edges * (1 + (waves - 1) / resident)
    l2_bytes = launch.grid * steps * _step_bytes(p, launch) + p.epilogue.total_bytes
    dram_bytes = _dram_bytes(p, launch, resident)
    last = mach.llc
    is_busy = resident * step.busy >= step.cycles(resident, warps, stages_in_flight)
    return Costs(
        core_s=mach.seconds(core_cycles),
        core_stage="compute" if is_busy else "latency",
        stage_seconds=(
            ("shared", mach.seconds(launch.grid * steps * step.shared / mach.cores)),
            (last.name if last else "cache", l2_bytes / (last.bytes_per_s if last else math.inf)),
            ("dram", dram_bytes / mach.dram.bandwidth_bytes_per_s),
        ),
        occupancy=min(1.0, resident * launch.threads / hw.limits.max_threads_per_core),
        waves=waves,
        resources=needs,
        loads_per_block=round(steps),
    )


def block_steps(p: Workload[SimtFacts], launch: Launch) -> int:
    """Return the k-tiles of one block."""
    _, _, k = p.mnk(launch.block)
    depth = -(-p.extent(p.k) // launch.split_k)
    return -(-depth // k)


def prefetch_stages(p: Workload[SimtFacts], block: Tile, stages: int) -> int:
    """Return the k-tiles in flight before their use; copies through registers are at most one ahead."""
    if p.facts.loads is None:
        return min(stages - 1, 1)
    m, n, _ = p.mnk(block)
    copied = p.facts.loads.a.is_async(m) and p.facts.loads.b.is_async(n)
    return stages - 1 if copied else min(stages - 1, 1)


# what a block takes ------------------------------------------------------------------------------------------------
def block_resources(p: Workload[SimtFacts], launch: Launch) -> BlockResources:
    bm, bn, bk = p.mnk(launch.block)
    tm, tn, _ = p.mnk(launch.thread)
    registers = thread_registers(p, tm, tn)
    stages = min(launch.pipeline.stages, block_steps(p, launch))
    needed = registers.of(bm * bk / launch.threads, bn * bk / launch.threads)
    return BlockResources(launch.threads, needed, stages * stage_bytes(p, launch.block))


def thread_registers(p: Workload[SimtFacts], thread_m: int, thread_n: int) -> ThreadRegisters:
    """Return the registers of a thread with that tile; cached."""
    known = p.facts.registers.get((thread_m, thread_n))
    if known is None:
        known = p.facts.registers[thread_m, thread_n] = _thread_registers(p, thread_m, thread_n)
    return known


def _thread_registers(p: Workload[SimtFacts], thread_m: int, thread_n: int) -> ThreadRegisters:
    """Return the minimal registers: accumulators, two columns and rows of operands, overhead, staged elements.

    ROLLER §3.3 counts m·n + m + n; operands of the next row are loaded during the current one. Fitted to 154 kernels
    that NVRTC 13 compiled with ever tighter bounds. A thread that is a core's own (warp_size 1) has its loads done by
    others.
    """
    words, limits = register_words(p.space.compute_dtype), p.machine.hw.limits
    operands = thread_m + thread_n
    if limits.warp_size == 1:
        nothing = StagingRegisters(0.0, 0.0, 1)
        return ThreadRegisters((thread_m * thread_n + operands) * words + overhead_registers(limits), nothing, nothing)
    a, b, loads = p.facts.a_registers, p.facts.b_registers, p.facts.loads
    overhead = min(float(overhead_registers(limits)), MIN_OVERHEAD + a.fixed + b.fixed)
    divided = DIVIDING * (loads.a.needs_division + loads.b.needs_division) if loads is not None else 0.0
    return ThreadRegisters((thread_m * thread_n + 2 * operands) * words + overhead + divided, a, b)


def stage_bytes(p: Workload[SimtFacts], block: Tile) -> int:
    """Shared memory of one stage: As[bk][bm + padding] and Bs[bk][bn + padding] in the compute type."""
    m, n, k = p.mnk(block)
    return k * (staged_row_bytes(m, p) + staged_row_bytes(n, p))


def staged_row_bytes(elements: int, p: Workload[SimtFacts]) -> int:
    """One row of a staged tile with its padding, cached; memory without banks needs none."""
    known = p.facts.row_bytes.get(elements)
    if known is None:
        banked = p.machine.hw.block_level.banks > 1
        known = (staged_row(elements, p.elem_bytes) if banked else elements) * p.elem_bytes
        p.facts.row_bytes[elements] = known
    return known


# time -------------------------------------------------------------------------------------------------------------
def block_step(p: Workload[SimtFacts], block: Tile, thread: Tile, threads: int) -> SimtStep:
    """Return the cached cost of a k-tile for these tiles and threads."""
    known = p.facts.steps.get((block, thread, threads))
    if known is None:
        known = p.facts.steps[block, thread, threads] = _block_step(p, block, thread, threads)
    return known


def _block_step(p: Workload[SimtFacts], block: Tile, thread: Tile, threads: int) -> SimtStep:
    mach = p.machine
    bm, bn, bk = p.mnk(block)
    tm, tn, _ = p.mnk(thread)
    warp = mach.hw.limits.warp_size
    warps = -(-threads // warp)
    vector_m, vector_n = (vector_elements(tm, p.elem_bytes), vector_elements(tn, p.elem_bytes)) if warp > 1 else (1, 1)
    read = tm * REQUESTS[vector_m > 1] + tn * REQUESTS[vector_n > 1]
    inner = p.facts.loads.inner_member(bk) if p.facts.loads else None
    staging = _staging_ops(p, p.facts.loads.a if p.facts.loads else None, p.a, (bm, bk, threads), inner)
    staging += _staging_ops(p, p.facts.loads.b if p.facts.loads else None, p.b, (bn, bk, threads), inner)
    issue = (warps * bk * (tm * tn + tm / vector_m + tn / vector_n) + staging / warp) / mach.issue_per_cycle
    in_flight = -(-(bm + bn) * bk // threads)
    multiplied = MULTIPLIED * staging if warp > 1 else 0.0
    return SimtStep(
        fma=(bm * bn * bk + multiplied) / mach.fma_per_cycle,
        shared=(warps * bk * read * warp + (bm + bn) * bk) * p.elem_bytes / mach.staged_bytes_per_cycle,
        issue=issue if warp > 1 else 0.0,
        latency=load_latency_cycles(mach, p.a.total_bytes + p.b.total_bytes) + 4.0 * in_flight,
        handoff=BARRIER_CYCLES + mach.hw.block_level.latency_s * mach.clock_hz + STORE_CYCLES * in_flight,
    )


def _staging_ops(
    p: Workload[SimtFacts],
    feed: SimtOperandLoad | None,
    operand: OperandFootprint,
    tile: tuple[int, int, int],
    inner: Axis | None,
) -> float:
    """Return the instructions of all threads for one operand and k-tile. `tile`: columns, rows, threads."""
    columns, rows, threads = tile
    elements = columns * rows
    if feed is None or feed.operand.source is None:
        return elements * (LOAD_OPS + STORE_OPS + operand.address_ops)
    width = feed.width(columns, rows, inner)
    if feed.is_async(columns):
        each = COPY_OPS
    else:
        each = LOAD_OPS + STORE_OPS * (width if feed.operand.k_major else 1)
    if feed.operand.guard is not None:
        each += GUARD_OPS
    if inner is not None or not feed.needs_division:
        return elements / width * each
    # a thread has many columns of few rows, and divides once per row
    met = max(1.0, min(rows * p.machine.hw.limits.warp_size, elements) / threads)
    divisions = threads * met * DIVISION_OPS * (len(feed.reduced_axis.members) - 1)
    return elements / width * (each + PLACE_OPS) + divisions


def _step_bytes(p: Workload[SimtFacts], launch: Launch) -> float:
    """Return the LLC bytes that a k-tile of a block requests, in whole transactions."""
    return p.a.requested_bytes(launch.block) + p.b.requested_bytes(launch.block)


def _epilogue_cycles(p: Workload[SimtFacts], launch: Launch) -> float:
    """Return cycles of one block's stores and epilogue reads, vectorised along n."""
    words = register_words(p.space.compute_dtype)
    wide = 1
    if p.n is not None and p.machine.hw.limits.warp_size > 1:
        lead = p.space.axes[p.n].members[-1].extent
        wide = math.gcd(lead, vector_elements(extent_on(launch.thread, p.n), p.elem_bytes))
    per_point = len(p.epilogue.tensors) * (2.0 / wide + words) + p.epilogue.address_ops / wide
    m, n, _ = p.mnk(launch.block)
    points = m * n
    return points * per_point / (p.machine.hw.limits.warp_size * p.machine.issue_per_cycle)


def _dram_bytes(p: Workload[SimtFacts], launch: Launch, resident: int) -> float:
    """Return compulsory traffic, and what concurrent blocks do not share through the LLC (§5, t_dram)."""
    m, n, _ = p.mnk(launch.block)
    grid_m, grid_n = -(-p.extent(p.m) // m), -(-p.extent(p.n) // n)
    tall, wide = wave_rectangle(grid_m, grid_n, max(1, p.machine.cores * resident // launch.split_k), launch.pipeline.raster)
    a = dram_bytes_with_reuse(p.machine, p.a.total_bytes, grid_n / wide)
    b = dram_bytes_with_reuse(p.machine, p.b.total_bytes, grid_m / tall)
    return p.epilogue.total_bytes + a + b
