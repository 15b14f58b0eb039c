"""The cost of a contraction on a SIMT machine: staged tiles, some steps ahead of the one that is multiplied."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.ir.program import Axis
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS, register_words
from roller_svc.perf.occupancy import BlockNeeds, blocks_per_core, overhead_registers
from roller_svc.perf.problem import DIVISION_OPS, Operand, Problem
from roller_svc.perf.simt_tile import SimtFeed, neighbours, staged_row
from roller_svc.perf.terms import Costs, Launch, load_latency_cycles, resident_bytes, simt_waves

# Compiled kernels stay below the rate of the tightest pipe: of the others this share shows through. An assumption; with
# it cuBLAS's SGEMM of 1024 to 4096 on a V100 (the sources of its spec) comes out 5 to 8 % slow (docs/model.md).
LEAK = 0.08
BARRIER_CYCLES = 30.0
STORE_CYCLES = 4.0  # of a warp for what each of its threads puts into shared memory, one after the other
# Instructions of a thread for one move, the least that there can be: of a copy its address and itself; through
# registers the load, its address and for each store into shared memory itself and, as often as not, a conversion. A
# guard is comparisons and a choice; places on fused axes are added up. Compilers add some for wide addresses, which
# LEAK covers.
COPY_OPS, LOAD_OPS, STORE_OPS, GUARD_OPS, PLACE_OPS = 2.0, 2.0, 1.5, 6.0, 4.0
MULTIPLIED = 0.25  # of those instructions: integer multiply-adds, for which cores have no lanes but the multiply-adders
# Registers of a thread beside its tile: the least (loop counters, where its columns are), for each factor that is
# copied or held, for each copy that it begins in one step, for each element that it holds (twice that, where places
# are found by divisions).
LEAST_OVERHEAD, COPYING, HOLDING, EACH_COPY, EACH_HELD = 14.0, 6.0, 2.0, 1.0, 1.3
DIVIDING = 10.0  # where rows of a factor are found by divisions
REQUESTS = 1.0, 0.5  # of shared memory's bandwidth: reads of one element; of groups, which pairs of lanes share


@dataclass(frozen=True, slots=True)
class Step:
    """One staged step of one block, in cycles of a core that runs nothing else.

    `latency`: from asking for a step's tiles to having them. `turn`: what passes between the last product of a step and
    the first of the next, for which the other blocks of a core are there: stores, a barrier, reads.
    """

    fma: float
    shared: float
    issue: float
    latency: float
    turn: float

    @property
    def busy(self) -> float:
        worst = max(self.fma, self.shared, self.issue)
        return worst + LEAK * (self.fma + self.shared + self.issue - worst)

    def cycles(self, blocks: float, warps: int, ahead: int) -> float:
        """t_k (§5 of the design notes): of so many blocks of a core, each loading `ahead` steps before their use."""
        # a warp stays on one scheduler: a block of fewer warps than those keeps only its share of the lanes busy
        alone = SCHEDULERS / min(SCHEDULERS, warps) * self.busy
        if ahead == 0:
            # a single buffer: a block's own load and compute do not overlap, other blocks' do
            return max(blocks * self.busy, alone + self.latency + self.turn + BARRIER_CYCLES)
        return max(blocks * self.busy, alone + self.turn, (self.latency + self.turn) / ahead)


def simt_contraction(p: Problem, launch: Launch) -> Costs:
    """ROLLER §5 of the design notes: waves of blocks, each a chain of staged steps."""
    mach, hw = p.machine, p.machine.hw
    needs = block_needs(p, launch)
    resident = blocks_per_core(launch.compiled or needs, hw)
    step = block_step(p, launch.block, launch.thread, launch.threads)
    steps = block_steps(p, launch)
    epilogue = _epilogue_cycles(p, launch)
    warps, ahead = -(-launch.threads // hw.limits.warp_size), steps_ahead(p, launch.block, launch.stages)

    def block_cycles(blocks: float) -> float:
        return steps * step.cycles(blocks, warps, ahead) + step.latency + blocks * epilogue

    waves, core_cycles = simt_waves(launch.grid, resident, mach.cores, block_cycles)
    l2_bytes = launch.grid * steps * _step_bytes(p, launch) + p.rest.total_bytes
    dram_bytes = _dram_bytes(p, launch, resident)
    last = mach.last_cache
    is_busy = resident * step.busy >= step.cycles(resident, warps, ahead)
    return Costs(
        core_s=mach.seconds(core_cycles),
        core_stage="compute" if is_busy else "latency",
        parts=(
            ("shared", mach.seconds(launch.grid * steps * step.shared / mach.cores)),
            (last.name if last else "cache", l2_bytes / (last.bytes_per_s if last else math.inf)),
            ("dram", dram_bytes / mach.dram.bandwidth_bytes_per_s),
        ),
        occupancy=min(1.0, resident * launch.threads / hw.limits.max_threads_per_core),
        waves=waves,
        needs=needs,
    )


def block_steps(p: Problem, launch: Launch) -> int:
    """Staged steps of one block."""
    depth = -(-p.extent(p.k) // launch.split_k)
    return -(-depth // _at(launch.block, p.k))


def steps_ahead(p: Problem, block: Tile, stages: int) -> int:
    """How many steps before its use a tile is asked for: what goes through registers, one at most."""
    if p.simt is None:
        return min(stages - 1, 1)
    copied = p.simt.a.is_async(_at(block, p.m)) and p.simt.b.is_async(_at(block, p.n))
    return stages - 1 if copied else min(stages - 1, 1)


# what a block takes ------------------------------------------------------------------------------------------------
def block_needs(p: Problem, launch: Launch) -> BlockNeeds:
    bm, bn, bk = (_at(launch.block, axis) for axis in (p.m, p.n, p.k))
    registers = thread_registers(p, _at(launch.thread, p.m), _at(launch.thread, p.n))
    stages = min(launch.stages, block_steps(p, launch))
    needed = registers.of(bm * bk / launch.threads, bn * bk / launch.threads)
    return BlockNeeds(launch.threads, needed, stages * stage_bytes(p, launch.block))


@dataclass(frozen=True, slots=True)
class Staged:
    """Registers that staging one factor takes of a thread, `each` for an element; `width` elements move at once."""

    fixed: float
    each: float
    width: int

    def of(self, elements: float) -> float:
        return self.each * self.width * math.ceil(elements / self.width)


@dataclass(frozen=True, slots=True)
class ThreadRegisters:
    """Registers of a thread as a function of how many elements of either factor it stages in one step."""

    fixed: float
    a: Staged
    b: Staged

    def of(self, staged_a: float, staged_b: float) -> int:
        return math.ceil(self.fixed + self.a.of(staged_a) + self.b.of(staged_b))


def thread_registers(p: Problem, thread_m: int, thread_n: int) -> ThreadRegisters:
    """What a thread cannot do without: accumulators, two columns and rows of operands, overhead, and what is staged.

    ROLLER §3.3 counts m·n + m + n; of the operands those of the next row are loaded while one is multiplied. Fitted to
    154 kernels that NVRTC 13 compiled, each with ever tighter bounds: where it has more registers, it takes some of
    them, where it has fewer, it spills. A thread that is a core's own (warp_size 1) has its loads done by others.
    """
    words, limits = register_words(p.space.compute_dtype), p.machine.hw.limits
    operands = thread_m + thread_n
    if limits.warp_size == 1:
        nothing = Staged(0.0, 0.0, 1)
        return ThreadRegisters(
            (thread_m * thread_n + operands) * words + overhead_registers(limits), nothing, nothing
        )  # fmt: skip
    a, b = (_staged(feed, words) for feed in ((p.simt.a, p.simt.b) if p.simt else (None, None)))
    overhead = min(float(overhead_registers(limits)), LEAST_OVERHEAD + a.fixed + b.fixed)
    divided = sum(DIVIDING for feed in ((p.simt.a, p.simt.b) if p.simt else ()) if feed.divided)
    return ThreadRegisters((thread_m * thread_n + 2 * operands) * words + overhead + divided, a, b)


def _staged(feed: SimtFeed | None, words: int) -> Staged:
    if feed is None:
        return Staged(HOLDING, EACH_HELD * words, 1)
    at_once = feed.width(feed.operand.run, feed.operand.run, None)
    if feed.is_async(feed.operand.run):
        return Staged(COPYING, EACH_COPY / at_once, at_once)
    return Staged(HOLDING, EACH_HELD * words * (1 + feed.divided), at_once)


def stage_bytes(p: Problem, block: Tile) -> int:
    """Shared memory of one stage: As[bk][bm + padding] and Bs[bk][bn + padding] in the compute type."""
    rows = staged_row_bytes(_at(block, p.m), p) + staged_row_bytes(_at(block, p.n), p)
    return _at(block, p.k) * rows


def staged_row_bytes(elements: int, p: Problem) -> int:
    """One row of a staged tile with its padding; memory without banks needs none."""
    banked = p.machine.hw.block_level.banks > 1
    return (staged_row(elements, p.elem_bytes) if banked else elements) * p.elem_bytes


# time -------------------------------------------------------------------------------------------------------------
def block_step(p: Problem, block: Tile, thread: Tile, threads: int) -> Step:
    mach = p.machine
    bm, bn, bk = (_at(block, axis) for axis in (p.m, p.n, p.k))
    tm, tn = _at(thread, p.m), _at(thread, p.n)
    warp = mach.hw.limits.warp_size
    warps = -(-threads // warp)
    groups = [neighbours(t, p.elem_bytes) for t in (tm, tn)] if warp > 1 else [1, 1]
    read = sum(t * REQUESTS[g > 1] for t, g in zip((tm, tn), groups, strict=True))
    inner = p.simt.inner_member(bk) if p.simt else None
    staging = _staging_ops(p, p.simt.a if p.simt else None, p.a, (bm, bk, threads), inner)
    staging += _staging_ops(p, p.simt.b if p.simt else None, p.b, (bn, bk, threads), inner)
    issue = (warps * bk * (tm * tn + tm / groups[0] + tn / groups[1]) + staging / warp) / mach.issue_per_cycle
    in_flight = -(-(bm + bn) * bk // threads)
    multiplied = MULTIPLIED * staging if warp > 1 else 0.0
    return Step(
        fma=(bm * bn * bk + multiplied) / mach.fma_per_cycle,
        shared=(warps * bk * read * warp + (bm + bn) * bk) * p.elem_bytes / mach.staged_bytes_per_cycle,
        issue=issue if warp > 1 else 0.0,
        latency=load_latency_cycles(mach, p.a.total_bytes + p.b.total_bytes) + 4.0 * in_flight,
        turn=BARRIER_CYCLES + mach.hw.block_level.latency_s * mach.clock_hz + STORE_CYCLES * in_flight,
    )


def _staging_ops(
    p: Problem, feed: SimtFeed | None, operand: Operand, tile: tuple[int, int, int], inner: Axis | None
) -> float:
    """Instructions of all threads for one factor in one step; `tile`: its columns and rows, the block's threads."""
    columns, rows, threads = tile
    elements = columns * rows
    if feed is None or feed.operand.source is None:
        return elements * (LOAD_OPS + STORE_OPS + operand.address_ops)
    width = feed.width(columns, rows, inner)
    if feed.is_async(columns):
        each = COPY_OPS
    else:
        each = LOAD_OPS + STORE_OPS * (width if feed.operand.along_k else 1)
    if feed.operand.guard is not None:
        each += GUARD_OPS
    if inner is not None or not feed.divided:
        return elements / width * each
    # a thread takes many columns of few rows, and takes apart each row that it meets
    met = max(1.0, min(rows * p.machine.hw.limits.warp_size, elements) / threads)
    divisions = threads * met * DIVISION_OPS * (len(feed.reduced.members) - 1)
    return elements / width * (each + PLACE_OPS) + divisions


def _step_bytes(p: Problem, launch: Launch) -> float:
    """Bytes that one step of a block asks of the last cache, in whole transactions."""
    return p.a.moved_bytes(launch.block) + p.b.moved_bytes(launch.block)


def _epilogue_cycles(p: Problem, launch: Launch) -> float:
    """Stores of one block, and the epilogue's reads: neighbours along n by one instruction, with its addresses."""
    words = register_words(p.space.compute_dtype)
    wide = 1
    if p.n is not None and p.machine.hw.limits.warp_size > 1:
        lead = p.space.axes[p.n].members[-1].extent
        wide = math.gcd(lead, neighbours(_at(launch.thread, p.n), p.elem_bytes))
    per_point = len(p.rest.tensors) * (2.0 / wide + words) + p.rest.address_ops / wide
    points = _at(launch.block, p.m) * _at(launch.block, p.n)
    return points * per_point / (p.machine.hw.limits.warp_size * p.machine.issue_per_cycle)


def _dram_bytes(p: Problem, launch: Launch, resident: int) -> float:
    """Compulsory traffic, and what concurrent blocks do not share through the last cache (§5, t_dram)."""
    grid_m, grid_n = (-(-p.extent(axis) // _at(launch.block, axis)) for axis in (p.m, p.n))
    at_once = max(1, p.machine.cores * resident)
    if launch.raster > 1:
        tall = min(grid_m, launch.raster)
        wide = min(grid_n, max(1, at_once // tall))
    else:
        wide = min(grid_n, at_once)
        tall = min(grid_m, max(1, at_once // grid_n))
    rounds = max(1.0, grid_m * grid_n / (wide * tall))
    a = resident_bytes(p.machine, p.a.total_bytes, rounds * tall / grid_m)
    b = resident_bytes(p.machine, p.b.total_bytes, rounds * wide / grid_n)
    return p.rest.total_bytes + a + b


def _at(tile: Tile, axis: int | None) -> int:
    return 1 if axis is None else tile[axis]
