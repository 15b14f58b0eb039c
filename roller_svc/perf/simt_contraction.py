"""The cost of a contraction on a SIMT machine: staged tiles, one buffer, a barrier before and after each step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.perf.banks import bank_padding
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS, register_words
from roller_svc.perf.occupancy import BlockNeeds, blocks_per_core, overhead_registers
from roller_svc.perf.problem import Problem
from roller_svc.perf.terms import Costs, Launch, load_latency_cycles, resident_bytes, simt_waves

BARRIER_CYCLES = 30.0
STAGING_OPS = 4.0  # load, convert or move, store to shared memory, predicate
PLAIN_ADDRESS_OPS, FUSED_ADDRESS_OPS = 8.0, 56.0  # of a matrix product; what a convolution has on top


@dataclass(frozen=True, slots=True)
class Step:
    """One staged step of one block, in cycles of a core that runs nothing else."""

    fma: float
    shared: float
    issue: float
    latency: float

    @property
    def busy(self) -> float:
        # measured kernels reach about 95 % of the tightest pipe; the others show through a little
        worst = max(self.fma, self.shared, self.issue)
        return worst + 0.05 * (self.fma + self.shared + self.issue - worst)


def simt_contraction(p: Problem, launch: Launch) -> Costs:
    """ROLLER §5 of the design notes: waves of blocks, each a chain of staged steps."""
    mach, hw = p.machine, p.machine.hw
    tm, tn = _at(launch.thread, p.m), _at(launch.thread, p.n)
    bm, bn, bk = (_at(launch.block, axis) for axis in (p.m, p.n, p.k))
    registers = thread_registers(p, tm, tn).of((bm + bn) * bk / launch.threads)
    needs = BlockNeeds(launch.threads, registers, block_shared_bytes(p, launch))
    resident = blocks_per_core(launch.compiled or needs, hw)
    step = _step(p, launch)
    depth = -(-p.extent(p.k) // launch.split_k)
    steps = -(-depth // bk)
    epilogue = _epilogue_cycles(p, launch)

    # a warp stays on one scheduler: a block of fewer warps than those keeps only its share of the lanes busy
    alone = SCHEDULERS / min(SCHEDULERS, -(-launch.threads // hw.limits.warp_size))

    def block_cycles(blocks: float) -> float:
        # a single buffer: a block's own load and compute do not overlap, other blocks' do (§5, t_k)
        per_step = max(blocks * step.busy, alone * step.busy + step.latency)
        return steps * per_step + step.latency + blocks * epilogue

    waves, core_cycles = simt_waves(launch.grid, resident, mach.cores, block_cycles)
    l2_bytes = launch.grid * steps * _step_bytes(p, launch) + p.rest.total_bytes
    dram_bytes = _dram_bytes(p, launch, resident)
    last = mach.last_cache
    return Costs(
        core_s=mach.seconds(core_cycles),
        core_stage="compute" if step.busy >= step.latency / max(1, resident) else "latency",
        parts=(
            ("shared", mach.seconds(launch.grid * steps * step.shared / mach.cores)),
            (last.name if last else "cache", l2_bytes / (last.bytes_per_s if last else math.inf)),
            ("dram", dram_bytes / mach.dram.bandwidth_bytes_per_s),
        ),
        occupancy=min(1.0, resident * launch.threads / hw.limits.max_threads_per_core),
        waves=waves,
        needs=needs,
    )


@dataclass(frozen=True, slots=True)
class ThreadRegisters:
    """Registers of a thread as a function of how many elements it stages in one step."""

    fixed: float
    each: float

    def of(self, staged: float) -> int:
        return math.ceil(self.fixed + self.each * staged)


def thread_registers(p: Problem, thread_m: int, thread_n: int) -> ThreadRegisters:
    """Accumulators, one column and one row of operands, overhead; and what is staged.

    ROLLER §3.3 counts m·n + m + n. The compiler loads all elements a thread stages before it stores the first: each
    takes its value and an address, more where fused axes must be taken apart. Fitted to 36 kernels that NVRTC 13
    compiled, so that none that this lets pass spilled. A thread that is a core's own (warp_size 1) has its loads done
    by others.
    """
    words = register_words(p.space.compute_dtype)
    decoding = max(0.0, p.a.address_ops + p.b.address_ops - PLAIN_ADDRESS_OPS) / FUSED_ADDRESS_OPS
    overhead = overhead_registers(p.machine.hw.limits) * (1.0 + decoding)
    each = 2 * words + 2 + 3 * decoding if p.machine.hw.limits.warp_size > 1 else 0.0
    return ThreadRegisters((thread_m * thread_n + thread_m + thread_n) * words + overhead, each)


def block_shared_bytes(p: Problem, launch: Launch) -> int:
    """Shared memory of a block: As[bk][bm + padding] and Bs[bk][bn + padding] in the compute type."""
    rows = staged_row_bytes(_at(launch.block, p.m), p) + staged_row_bytes(_at(launch.block, p.n), p)
    return _at(launch.block, p.k) * rows


def staged_row_bytes(elements: int, p: Problem) -> int:
    """One row of a staged tile with its padding; neighbouring threads read neighbouring elements of it."""
    return (elements + bank_padding(elements, 1, p.machine.hw.block_level, p.elem_bytes)) * p.elem_bytes


def _step(p: Problem, launch: Launch) -> Step:
    mach = p.machine
    bm, bn, bk = (_at(launch.block, axis) for axis in (p.m, p.n, p.k))
    tm, tn = _at(launch.thread, p.m), _at(launch.thread, p.n)
    warp = mach.hw.limits.warp_size
    warps = -(-launch.threads // warp)
    loads = warps * bk * (tm + tn)
    staging = bm * (STAGING_OPS + p.a.address_ops) + bn * (STAGING_OPS + p.b.address_ops)
    issue = (warps * tm * tn * bk + loads + staging * bk / warp) / SCHEDULERS
    in_flight = -(-(bm + bn) * bk // launch.threads)
    return Step(
        fma=bm * bn * bk / mach.fma_per_cycle,
        shared=(loads * warp + (bm + bn) * bk) * p.elem_bytes / mach.staged_bytes_per_cycle,
        issue=issue if warp > 1 else 0.0,
        latency=load_latency_cycles(mach, p.a.total_bytes + p.b.total_bytes) + 4.0 * in_flight + 2 * BARRIER_CYCLES,
    )


def _step_bytes(p: Problem, launch: Launch) -> float:
    """Bytes that one step of a block asks of the last cache, in whole transactions."""
    return p.a.moved_bytes(launch.block) + p.b.moved_bytes(launch.block)


def _epilogue_cycles(p: Problem, launch: Launch) -> float:
    """Stores of one block, and the epilogue's reads: one warp instruction each, with its addresses."""
    per_point = len(p.rest.tensors) * (2.0 + register_words(p.space.compute_dtype)) + p.rest.address_ops
    points = _at(launch.block, p.m) * _at(launch.block, p.n)
    return points * per_point / (p.machine.hw.limits.warp_size * SCHEDULERS)


def _dram_bytes(p: Problem, launch: Launch, resident: int) -> float:
    """Compulsory traffic, and what concurrent blocks do not share through the last cache (§5, t_dram)."""
    grid_m, grid_n = (-(-p.extent(axis) // _at(launch.block, axis)) for axis in (p.m, p.n))
    at_once = max(1, p.machine.cores * resident)
    wide = min(grid_n, at_once)
    tall = min(grid_m, max(1, at_once // grid_n))
    rounds = max(1.0, grid_m * grid_n / (wide * tall))
    a = resident_bytes(p.machine, p.a.total_bytes, rounds * tall / grid_m)
    b = resident_bytes(p.machine, p.b.total_bytes, rounds * wide / grid_n)
    return p.rest.total_bytes + a + b


def _at(tile: Tile, axis: int | None) -> int:
    return 1 if axis is None else tile[axis]
