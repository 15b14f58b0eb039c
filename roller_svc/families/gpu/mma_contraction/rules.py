"""ROLLER's rules for GEMM on warps: tiles of warps, tiles and k-tiles of blocks, stages; and the prefilter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from roller_svc.construct.align import powers_of_two, round_up
from roller_svc.construct.rules import (
    MIN_MATRIX_STAGES,
    ThreadTile,
    axis_steps,
    check_grid,
    extent_on,
    replaced,
    spatial_grid,
)
from roller_svc.construct.scale_up import ScaleUpLevel, ScaleUpResult
from roller_svc.families.common.gpu.matrix.prefilter import TilePrefilter
from roller_svc.families.common.gpu.matrix.terms import (
    CORE_L2_BYTES_PER_CYCLE,
    MMA_LATENCY_CYCLES,
    accumulator_columns,
    split_k_reduction_cycles,
)
from roller_svc.families.common.gpu.matrix.tile import (
    CHUNK_BYTES,
    WORD_BYTES,
    Fragment,
    chunk_copies,
    warp_registers,
)
from roller_svc.families.common.gpu.matrix.wave_quantization import (
    MIN_WAVES,
    block_extents,
    choose_raster,
    has_wave_quantization,
    instruction_multiples,
    padded_fraction,
    stream_k_choices,
)
from roller_svc.families.gpu.mma_contraction.cost import block_step, mma_block, prefetch_stages
from roller_svc.families.gpu.mma_contraction.workload import MmaFacts
from roller_svc.ir.rprogram import PipelineOptions
from roller_svc.ir.search import BrokenRule, TileMetrics, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS
from roller_svc.perf.occupancy import BlockResources, block_registers, blocks_per_core
from roller_svc.perf.workload import Workload

WARPS_AT_WORK = 16  # of a core: their accumulators and fragments take at least half of its registers


def traffic_per_product(p: Workload[MmaFacts], block: Tile) -> float:
    """Return the bytes that a block loads per multiply-add."""
    m, n, k = p.mnk(block)
    return (p.a.requested_bytes(block) + p.b.requested_bytes(block)) / (m * n * p.space.num_accumulators * k)


def approx_cycles(p: Workload[MmaFacts], block: Tile, base: ThreadTile, split_k: int) -> float:
    """Estimate the cycles of the core with the most blocks."""
    mach = p.machine
    (m, columns, k), (warp_m, warp_columns, _) = p.mnk(block), p.mnk(base.tile)
    n = columns * p.space.num_accumulators
    tasks = spatial_grid(p, block) * split_k
    rounds = -(-tasks // mach.cores)
    warps = (m // warp_m) * (columns // warp_columns)
    together = min(rounds, max(1, WARPS_AT_WORK // warps))
    steps = -(-p.extent(p.k) // (k * split_k))
    step = _step_cycles(p, block, base, min(tasks, mach.cores), together)
    latency = mach.llc.latency_cycles if mach.llc else mach.dram_latency_cycles
    edges = latency / together + 2 * m * n * p.facts.fragment.sum_words * WORD_BYTES / mach.staged_bytes_per_cycle
    if split_k > 1:
        return rounds * (steps * step + edges) + split_k_reduction_cycles(p, split_k * p.outer_points)
    whole = rounds * (steps * step + edges)
    if not p.space.can_stream_k or not stream_k_choices(tasks, steps, mach.cores):
        return whole
    return min(whole, tasks * steps / mach.cores * step + edges + split_k_reduction_cycles(p, 2 * mach.cores * m * n))


def _step_cycles(p: Workload[MmaFacts], block: Tile, base: ThreadTile, working: int, together: int) -> float:
    """Return cycles of a k-tile: the slowest pipe, or the instruction chain of each warp.

    Args:
        working: Cores at work.
        together: Concurrent blocks of each.
    """
    mach = p.machine
    (m, columns, k), (warp_m, warp_columns, _) = p.mnk(block), p.mnk(base.tile)
    n, warp_n = columns * p.space.num_accumulators, warp_columns * p.space.num_accumulators
    size = p.facts.loads[0].dtype.bytes
    warps = (m // warp_m) * (n // warp_n) * together
    bandwidth = mach.llc.bytes_per_s if mach.llc else mach.dram.bandwidth_bytes_per_s
    pipes = (
        max(1.0, SCHEDULERS / warps) / mach.fma_per_cycle,
        traffic_per_product(p, block) / min(bandwidth / (working * mach.clock_hz), CORE_L2_BYTES_PER_CYCLE),
        size * (1 / warp_m + 1 / warp_n) / mach.staged_bytes_per_cycle,
    )
    fragment = p.facts.fragment
    instructions = (warp_m // fragment.rows) * (warp_n // fragment.columns)
    each = fragment.rows * fragment.columns * fragment.step_bytes / size * SCHEDULERS / mach.fma_per_cycle
    chain = k * size / fragment.step_bytes * max(MMA_LATENCY_CYCLES, instructions * each)
    return max(m * n * k * max(pipes), chain / together)


MAX_WARPS = 8  # of a block: with more, threads have too few registers for the widest warp tiles
MAX_FRAGMENTS_M, MAX_FRAGMENTS_N = 8, 32
K_STEP_BYTES = (32, 64, 128)  # a sector; one more; a row of shared memory's banks
MAX_BASES = 6
MIN_INSTRUCTIONS = 32  # of a warp per k-tile: at about 9 cycles each, five times the cost of a barrier
MAX_ASPECT = 4  # of a tile's extents: a longer one loads a quarter more than a square
PAIR = 16  # columns of one fragment load
# Registers below the limit, by the model, from which no fitted kernel spilled.
SPILL_SLACK = 13
MAX_PIPELINES = 2  # of one tile that are worth an estimate
UNLIMITED = 1 << 30  # stages, for the time of a k-tile that never waits for loads


@dataclass(frozen=True, slots=True)
class MmaContractionRules(TilePrefilter):
    """Rules of a GEMM on warps. `varied`: k-tiles of every length, for constraints of a caller."""

    workload: Workload[MmaFacts]
    varied: bool = False

    @property
    def points(self) -> int:
        """Points to which the traffic of a tile refers: multiply-adds."""
        return self.workload.outer_points * self.workload.inner_points

    def reduce_thread_choices(self) -> tuple[int, ...]:
        return (self.workload.machine.hw.limits.warp_size,)

    def thread_level(self, lanes: int) -> ScaleUpLevel:
        """Scale up a warp's tile, in whole instructions."""
        p = self.workload
        steps = axis_steps(
            p,
            {
                p.m: instruction_multiples(p.extent(p.m), self._fragment.rows, MAX_FRAGMENTS_M),
                p.n: instruction_multiples(p.extent(p.n), self._fragment.columns, MAX_FRAGMENTS_N),
            },
        )
        return ScaleUpLevel(
            level=p.machine.hw.thread_level.name,
            points=self.points,
            steps=steps,
            axis_rank=tuple(range(len(steps))),
            evaluate=self._evaluate_warp,
            is_saturated=self._feeds_the_unit,
            capacity_bytes=self._most_registers() * WORD_BYTES * p.machine.hw.limits.warp_size,
        )

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        """Return the tile of least reads of each size, from the largest to one below that which fills the device."""
        p = self.workload
        best: dict[int, Tile] = {}
        for tile in [*grown.saturated, *grown.border]:  # from the least traffic up
            best.setdefault((extent_on(tile, p.m) * extent_on(tile, p.n)).bit_length(), tile)
        chosen: list[Tile] = []
        filled = False
        for size in sorted(best, reverse=True):
            chosen.append(best[size])
            if filled:
                break
            points = extent_on(best[size], p.m) * extent_on(best[size], p.n) * SCHEDULERS
            filled = p.outer_points >= MIN_WAVES * p.machine.cores * points
        # keep the largest in any case: a long reduction may be split instead
        return [*chosen[:1], *chosen[1:][1 - MAX_BASES :]]

    def block_level(self, base: ThreadTile, epsilon: float) -> ScaleUpLevel:
        p = self.workload
        axes = block_extents(p, base, epsilon, MAX_WARPS) | {p.k: self._k_steps(base)}
        return ScaleUpLevel(
            level=p.machine.hw.block_level.name,
            points=self.points,
            steps=axis_steps(p, axes),
            axis_rank=tuple(range(len(p.extents))),
            evaluate=lambda block: self.evaluate(block, base),
            is_saturated=lambda block: self._covers_its_loads(block, base),
            capacity_bytes=p.machine.hw.limits.shared_bytes_per_block,
        )

    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics:
        """Return bytes with the fewest stages, bytes loaded per multiply-add, and broken rules."""
        p = self.workload
        warp_m, warp_n, _ = p.mnk(base.tile)
        if (broken := self._check_fragments(warp_m, warp_n)) is not None:
            return TileMetrics(p.footprint.bytes(block), 0.0, broken)
        staged = mma_block(p, block, base.tile)
        shared_bytes, threads = staged.tile.shared_bytes, staged.tile.threads
        too_large = self._capacity_rule(threads, shared_bytes, staged.tile.fragments)
        misaligned = None if too_large else self._alignment_rule(block, threads, staged.registers)
        return TileMetrics(shared_bytes, traffic_per_product(p, block), too_large, misaligned)

    def pipeline_choices(self, block: Tile, base: ThreadTile, split_k: int) -> Sequence[PipelineOptions]:
        """Return the fewest stages that hide load latency, with as many resident blocks as fit."""
        p, mach = self.workload, self.workload.machine
        tasks = spatial_grid(p, block) * split_k
        steps = -(-p.extent(p.k) // (extent_on(block, p.k) * split_k))
        each = -(-tasks // mach.cores)
        ways = list(itertools.islice(self._stages(block, base, each, steps), MAX_PIPELINES))
        found = [PipelineOptions(stages, choose_raster(p, block, resident * mach.cores)) for resident, stages in ways]
        if split_k == 1 and p.space.can_stream_k:
            resident, stages = ways[0]
            found += [PipelineOptions(stages, 1, blocks) for blocks in stream_k_choices(tasks, steps, resident * mach.cores)]
        return found

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return one warp with one pair of instructions."""
        p = self.workload
        one = tuple([1] * len(p.extents))
        rows, accumulator_columns = self._fragment.rows, self._fragment.columns
        warp = replaced(replaced(one, p.m, rows), p.n, accumulator_columns)
        base = ThreadTile(warp, *self.reduce_thread_choices())
        block = replaced(
            replaced(warp, p.n, PAIR if p.extent(p.n) > accumulator_columns else accumulator_columns),
            p.k,
            self._k_steps(base)[0],
        )
        return [(block, base)]

    def approx_cycles(self, block: Tile, base: ThreadTile, split_k: int) -> float:
        return approx_cycles(self.workload, block, base, split_k)

    def granules(self) -> tuple[int, int]:
        """Return the granules of a warp's tile along m and n."""
        return self._fragment.rows, self._fragment.columns

    # register level ---------------------------------------------------------------------------------------------
    def _evaluate_warp(self, warp: Tile) -> TileMetrics:
        """Return register bytes with minimal copies, and fragment bytes read per useful multiply-add."""
        p = self.workload
        m, n = extent_on(warp, p.m), accumulator_columns(p, warp)
        k_bytes = self._k_steps(ThreadTile(warp))[0] * self._operand_bytes()
        fragment = self._fragment
        fragments = (m // fragment.rows, n // fragment.columns, k_bytes // fragment.step_bytes)
        registers = math.ceil(warp_registers(fragment, *fragments, runs=p.space.scale_runs))
        registers += math.floor(self._least_brought(m, n) * k_bytes)
        rule = check_limit("registers per thread", registers, self._most_registers())
        size = self._operand_bytes()
        reads = (size / m + size / n) * padded_fraction(p, warp)
        return TileMetrics(registers * WORD_BYTES * p.machine.hw.limits.warp_size, reads, rule)

    def _least_brought(self, m: int, n: int) -> float:
        """Return a lane's registers per byte along k, where most warps share copies evenly."""
        p = self.workload
        a, b = (feed.chunk_registers / (CHUNK_BYTES * p.machine.hw.limits.warp_size) for feed in p.facts.loads)
        return min(m * a / (MAX_WARPS // along_m) + n * b / along_m for along_m in powers_of_two(MAX_WARPS))

    def _feeds_the_unit(self, warp: Tile) -> bool:
        """Return whether multiply-adds take as long as loading their fragments."""
        p, mach = self.workload, self.workload.machine
        m, n = extent_on(warp, p.m), accumulator_columns(p, warp)
        fragments = (m + n) * self._operand_bytes()
        return m * n / mach.fma_per_cycle >= fragments / mach.staged_bytes_per_cycle

    # block level ------------------------------------------------------------------------------------------------
    def _k_steps(self, base: ThreadTile) -> Tile:
        """Return the shortest k-tile with enough work between two barriers.

        Shorter ones too where loads are many or go through registers, of which they take fewer.
        """
        p, size = self.workload, self._operand_bytes()
        depth = p.extent(p.k) * size
        whole = [b for b in K_STEP_BYTES if b % self._fragment.step_bytes == 0]
        lengths = [b for b in whole if (runs := p.space.scale_runs) is None or runs.k * size % b == 0]
        fitting = [b for b in lengths if b < 2 * depth] or lengths[:1]
        fragments = (extent_on(base.tile, p.m) // self._fragment.rows) * (
            accumulator_columns(p, base.tile) // self._fragment.columns
        )
        long_enough = (b for b in fitting[1:] if b // self._fragment.step_bytes * fragments >= MIN_INSTRUCTIONS)
        longest = next(long_enough, fitting[-1])
        shorter = self.varied or not self._whole_chunks
        return tuple([b // size for b in fitting if (b < longest and shorter) or b == longest])

    def _capacity_rule(self, threads: int, shared_bytes: int, fragments: tuple[int, int]) -> BrokenRule | None:
        limits = self.workload.machine.hw.limits
        most = min(MAX_WARPS * limits.warp_size, limits.max_threads_per_block)
        if (broken := check_limit("threads per block", threads, most)) is not None:
            return broken
        fewest = math.ceil(warp_registers(self._fragment, *fragments, runs=self.workload.space.scale_runs))
        broken = check_limit("registers per core", block_registers(threads, fewest, limits), limits.registers_per_core)
        return broken or check_limit("shared memory", shared_bytes, limits.shared_bytes_per_block)

    def _check_fragments(self, warp_m: int, warp_n: int) -> BrokenRule | None:
        """Return the broken rule where a warp's tile has a fragment that is not whole."""
        rows, columns = self._fragment.rows, self._fragment.columns
        broken = check_limit("execution unit", round_up(warp_m, rows), warp_m)
        return broken or check_limit("execution unit", round_up(warp_n, columns), warp_n)

    def _alignment_rule(self, block: Tile, threads: int, registers: int) -> BrokenRule | None:
        """Return the broken alignment rule; copies per thread shrink with block extents and grow with the k-tile."""
        p, limits = self.workload, self.workload.machine.hw.limits
        columns, broken = accumulator_columns(p, block), None
        if p.extent(p.n) > self._fragment.columns:
            broken = check_limit("fragment pairs", round_up(columns, PAIR), columns)
        broken = broken or check_limit("registers per thread", registers, self._most_registers())
        of_block = block_registers(threads, registers, limits)
        broken = broken or check_limit("registers per core", of_block, limits.registers_per_core)
        return broken or check_grid(p, block)

    def _covers_its_loads(self, block: Tile, base: ThreadTile) -> bool:
        """Return whether MMA time covers LLC load time, or the grid is too small for that test.

        Each scheduler of a core must have a warp. With few waves, the model must decide which tile fills the device
        best.
        """
        p, mach = self.workload, self.workload.machine
        m, n, k = extent_on(block, p.m), extent_on(block, p.n), extent_on(block, p.k)
        if has_wave_quantization(p, block):
            shorter = p.m if m < n else p.n
            return max(m, n) <= MAX_ASPECT * min(m, n) or extent_on(block, shorter) >= p.extent(shorter)
        if (m // extent_on(base.tile, p.m)) * (n // extent_on(base.tile, p.n)) < SCHEDULERS:
            return False
        bandwidth = mach.llc.bytes_per_s if mach.llc else mach.dram.bandwidth_bytes_per_s
        moved = p.a.requested_bytes(block) + p.b.requested_bytes(block)
        return 2.0 * m * n * k * p.space.num_accumulators / mach.unit.flops_per_s >= moved / bandwidth

    # stages and order -------------------------------------------------------------------------------------------
    def _stages(self, block: Tile, base: ThreadTile, most_blocks: int, steps: int) -> Iterator[tuple[int, int]]:
        """Yield (resident blocks, stages), from most blocks to those that leave enough stages; one stage more."""
        hw = self.workload.machine.hw
        limits = hw.limits
        staged = mma_block(self.workload, block, base.tile)
        step = block_step(self.workload, block, base.tile)
        each = staged.tile.pipeline_bytes // MIN_MATRIX_STAGES
        needs = BlockResources(staged.tile.threads, staged.registers, staged.tile.shared_bytes)
        is_asynchronous = self._asynchronous
        for resident in range(min(most_blocks, blocks_per_core(needs, hw)), 0, -1):
            shared_bytes = limits.shared_bytes_per_core // resident - limits.shared_bytes_reserved_per_block
            fitting = min(shared_bytes, limits.shared_bytes_per_block) // each
            busy = step.cycles(resident, UNLIMITED)
            needed = 1 + math.ceil((step.latency + resident * step.llc) / busy)
            if not is_asynchronous:
                needed = MIN_MATRIX_STAGES
            yield resident, max(MIN_MATRIX_STAGES, min(fitting, needed, steps))
            if needed <= fitting:
                if is_asynchronous and needed < min(fitting, steps):
                    yield resident, max(MIN_MATRIX_STAGES, needed) + 1
                return

    # parts ------------------------------------------------------------------------------------------------------
    @property
    def _fragment(self) -> Fragment:
        return self.workload.facts.fragment

    @property
    def _asynchronous(self) -> bool:
        return prefetch_stages(self.workload, MIN_MATRIX_STAGES + 1) > 1

    @property
    def _whole_chunks(self) -> bool:
        """Whether each chunk of both operands comes in one asynchronous copy."""
        return all(feed.is_async and chunk_copies(feed) == 1 for feed in self.workload.facts.loads)

    def _most_registers(self) -> int:
        return self.workload.machine.hw.limits.max_registers_per_thread - SPILL_SLACK

    def _operand_bytes(self) -> int:
        return self.workload.facts.loads[0].dtype.bytes
