"""ROLLER's rules for a SIMT GEMM: register tiles of threads, staged tiles of blocks."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.construct.align import powers_of_two, tile_multiples
from roller_svc.construct.rules import ThreadTile, axis_steps, check_grid, check_warps, replaced
from roller_svc.construct.scale_up import ScaleUpLevel, ScaleUpResult
from roller_svc.families.gpu.simt_contraction.cost import (
    block_step,
    prefetch_stages,
    stage_bytes,
    staged_row_bytes,
    thread_registers,
)
from roller_svc.families.gpu.simt_contraction.workload import SimtFacts, ThreadRegisters
from roller_svc.ir.hardware import Limits
from roller_svc.ir.rprogram import DEFAULT_PIPELINE, PipelineOptions
from roller_svc.ir.search import BrokenRule, TileMetrics, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS
from roller_svc.perf.occupancy import BlockResources, block_registers, blocks_per_core
from roller_svc.perf.workload import Workload

MAX_THREAD_TILE = 16
MAX_THREADS = 512  # beyond that a block's barriers cost more than its reuse saves
K_STEPS = (8, 16, 32)
MIN_BLOCK_EXTENT = 64  # below it the device is not filled, or an axis not covered
MAX_BASES = 3
# With warps of 64, four in a block, the largest thread tiles have no block that fits a narrow axis.
WIDE_WARP, WIDE_BASES = 64, 6
REGISTER_MARGIN = 1.08  # compilers spill slightly before the limit that a large block sets
MAX_EPILOGUE = 512  # epilogue operations of a thread's unrolled points: more slow down compilers
MIN_STAGED_ELEMENTS = 4  # of each operand and k-tile per thread, as a rule
MAX_STAGES = 4
LOADED_LATENCY = 2.0  # latency of a busy memory over that of an idle one


@dataclass(frozen=True, slots=True)
class SimtContractionRules:
    workload: Workload[SimtFacts]

    @property
    def points(self) -> int:
        """Points to which the traffic of a tile refers: multiply-adds."""
        return self.workload.outer_points * self.workload.inner_points

    def reduce_thread_choices(self) -> tuple[int, ...]:
        return (1,)

    def thread_level(self, lanes: int) -> ScaleUpLevel:
        p = self.workload
        steps = axis_steps(
            self.workload, {axis: powers_of_two(min(MAX_THREAD_TILE, p.extent(axis))) for axis in (p.m, p.n) if axis is not None}
        )
        return ScaleUpLevel(
            level=p.machine.hw.thread_level.name,
            points=self.points,
            steps=steps,
            axis_rank=tuple(range(len(steps))),
            evaluate=self._evaluate_thread,
            is_saturated=self._feeds_the_unit,
        )

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        """Return the tiles of highest reuse; also 16 and 4 points for small problems."""
        p = self.workload
        most = WIDE_BASES if p.machine.hw.limits.warp_size >= WIDE_WARP else MAX_BASES
        tiles = [*grown.saturated, *grown.border][:most]
        rows, columns = p.extent(p.m), p.extent(p.n)
        if rows * columns < p.machine.cores * MIN_BLOCK_EXTENT**2 or min(rows, columns) < MIN_BLOCK_EXTENT:
            one = tuple([1] * len(p.extents))
            for side in (4, 2):
                m, n = min(side, powers_of_two(rows)[-1]), min(side, powers_of_two(columns)[-1])
                tiles.append(replaced(replaced(one, p.m, m), p.n, n))
            tiles = tiles[:2] + tiles[-2:]
        return [t for t in dict.fromkeys(tiles) if not self._register_rule(t)]

    def block_level(self, base: ThreadTile, epsilon: float) -> ScaleUpLevel:
        p = self.workload
        axes = {p.k: self._k_steps()} if p.k is not None else {}
        for axis in (p.m, p.n):
            if axis is not None:
                unit = base.tile[axis]
                fitting = [unit * c for c in tile_multiples(p.extents[axis], unit, epsilon, MAX_THREADS // 4)]
                enough = [s for s in fitting if s >= self._least_count() * unit]
                axes[axis] = tuple(enough or fitting[-1:] or [unit])
        block = self._block(base)
        return ScaleUpLevel(
            level=p.machine.hw.block_level.name,
            points=self.points,
            steps=axis_steps(self.workload, axes),
            axis_rank=tuple(range(len(p.extents))),
            evaluate=block.evaluate,
            is_saturated=block.is_saturated,
            capacity_bytes=p.machine.hw.limits.shared_bytes_per_block,
        )

    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics:
        return self._block(base).evaluate(block)

    def pipeline_choices(self, block: Tile, base: ThreadTile, split_k: int) -> Sequence[PipelineOptions]:
        """Return the stages that hide memory latency without costing a resident block."""
        p, limits = self.workload, self.workload.machine.hw.limits
        if limits.warp_size == 1:
            return (DEFAULT_PIPELINE,)
        threads = math.prod([block[i] // base.tile[i] for i in p.spatial])
        step = block_step(p, block, base.tile, threads)
        depth = -(-p.extent(p.k) // split_k)
        (m, n, k), (thread_m, thread_n, _) = p.mnk(block), p.mnk(base.tile)
        steps = -(-depth // k)
        staged = stage_bytes(p, block)
        needed = thread_registers(p, thread_m, thread_n).of(m * k / threads, n * k / threads)
        resident = blocks_per_core(BlockResources(threads, needed, min(2, steps) * staged), p.machine.hw)
        max_shared_bytes = limits.shared_bytes_per_core // resident - limits.shared_bytes_reserved_per_block
        fitting = min(max_shared_bytes, limits.shared_bytes_per_block) // staged
        wanted = 1 + math.ceil(LOADED_LATENCY * step.latency / step.busy)
        most = 1 + prefetch_stages(p, block, MAX_STAGES)
        stages = max(1, min(max(2, wanted), most, fitting, steps))
        return (PipelineOptions(stages, self._raster(block, resident)),)

    def _raster(self, block: Tile, resident: int) -> int:
        """Return the tile rows that make concurrent blocks read a square, unless the LLC retains B."""
        p, cache = self.workload, self.workload.machine.llc
        m, n, _ = p.mnk(block)
        rows, columns = -(-p.extent(p.m) // m), -(-p.extent(p.n) // n)
        at_once = p.machine.cores * resident
        if cache is None or rows == 1 or at_once >= rows * columns or p.b.total_bytes <= cache.total_bytes // 2:
            return 1
        tall = math.isqrt(max(1, at_once * n // m))
        return min(rows, 1 << (tall.bit_length() - 1))

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return one point per thread, a warp along n, then along m."""
        p = self.workload
        one = tuple([1] * len(p.extents))
        warp = p.machine.hw.limits.warp_size
        k = K_STEPS[0] if p.k is not None else 1
        small = replaced(one, p.k, k)
        return [(replaced(small, axis, warp), ThreadTile(one)) for axis in (p.n, p.m) if axis is not None]

    def _evaluate_thread(self, thread: Tile) -> TileMetrics:
        """Return register bytes, and bytes read from the staged tile per multiply-add."""
        (m, n, _), size = self.workload.mnk(thread), self.workload.elem_bytes
        return TileMetrics((m * n + m + n) * size, size / m + size / n, self._register_rule(thread))

    def _register_rule(self, thread: Tile) -> BrokenRule | None:
        p = self.workload
        m, n, _ = p.mnk(thread)
        registers = thread_registers(p, m, n).of(MIN_STAGED_ELEMENTS, MIN_STAGED_ELEMENTS)
        epilogue = (p.space.flops - p.space.operand_flops) / p.outer_points - 2 * p.inner_points
        broken = check_limit("registers per thread", registers, p.machine.hw.limits.max_registers_per_thread)
        return broken or check_limit("epilogue", m * n * epilogue, MAX_EPILOGUE)

    def _feeds_the_unit(self, thread: Tile) -> bool:
        """Return whether multiply-adds take as long as reading their operands from the staged tile."""
        mach = self.workload.machine
        m, n, _ = self.workload.mnk(thread)
        operands = (m + n) * self.workload.elem_bytes / mach.staged_bytes_per_cycle
        return m * n / mach.fma_per_cycle >= 0.95 * operands

    def _block(self, base: ThreadTile) -> _Block:
        limits = self.workload.machine.hw.limits
        most, rule = min(
            (min(limits.max_threads_per_block, limits.max_threads_per_core), "threads per block"),
            (MAX_THREADS, "barrier cost"),
        )
        m, n, _ = self.workload.mnk(base.tile)
        return _Block(self.workload, limits, m, n, most, rule, thread_registers(self.workload, m, n))

    def _least_count(self) -> int:
        """Return the threads along m and n from which growth starts: a quarter warp."""
        return 4 if self.workload.machine.hw.limits.max_threads_per_block >= 64 else 1

    def _k_steps(self) -> Tile:
        """Return k-tiles of at least one transaction of the narrowest operand (second alignment)."""
        p = self.workload
        narrow = min((t.elem_bytes for t in (*p.a.tensors, *p.b.tensors)), default=4)
        least = min(K_STEPS[-1], max(K_STEPS[0], p.machine.dram.transaction_bytes // (4 * narrow)))
        depth = p.extent(p.k)
        steps = [k for k in K_STEPS if k >= least and k <= max(least, depth)]
        return tuple(steps)


@dataclass(frozen=True, slots=True)
class _Block:
    """Rules of blocks with one thread tile. `max_threads`: the tightest bound, named `thread_rule`."""

    workload: Workload[SimtFacts]
    limits: Limits
    thread_m: int
    thread_n: int
    most_threads: int
    thread_rule: str
    registers: ThreadRegisters

    def evaluate(self, block: Tile) -> TileMetrics:
        """Return staged bytes with padding, bytes loaded per multiply-add, and broken rules."""
        p = self.workload
        m, n, k = p.mnk(block)
        staged = k * (staged_row_bytes(m, p) + staged_row_bytes(n, p))
        threads = (m // self.thread_m) * (n // self.thread_n)
        too_large = check_limit(self.thread_rule, threads, self.most_threads)
        too_large = too_large or check_limit("shared memory", staged, self.limits.shared_bytes_per_block)
        misaligned = None if too_large else self._alignment_rule(block, threads, (m, n, k))
        traffic = (p.a.requested_bytes(block) + p.b.requested_bytes(block)) / (m * n * k)
        return TileMetrics(staged, traffic, too_large, misaligned)

    def _alignment_rule(self, block: Tile, threads: int, extents: tuple[int, int, int]) -> BrokenRule | None:
        """Return the broken alignment rule.

        Staged elements of a thread, `each` per row or column of the block, shrink with block extents and grow with the
        k-tile.
        """
        limits = self.limits
        if (broken := check_warps(threads, limits.warp_size)) is not None:
            return broken
        m, n, k = extents
        each = k / threads
        registers = self.registers.of(m * each, n * each)
        if self.thread_m * self.thread_n > 1:
            broken = check_limit("registers per thread", registers, limits.max_registers_per_thread)
        of_block = block_registers(threads, math.ceil(registers * REGISTER_MARGIN), limits)
        broken = broken or check_limit("registers per core", of_block, limits.registers_per_core)
        return broken or check_grid(self.workload, block)

    def is_saturated(self, block: Tile) -> bool:
        """Return whether each scheduler has a warp, and multiply-adds take as long as the loads."""
        p, mach = self.workload, self.workload.machine
        m, n, k = p.mnk(block)
        if (m // self.thread_m) * (n // self.thread_n) < SCHEDULERS * self.limits.warp_size:
            return False
        bandwidth = mach.llc.bytes_per_s if mach.llc else mach.dram.bandwidth_bytes_per_s
        moved = p.a.requested_bytes(block) + p.b.requested_bytes(block)
        return 2.0 * m * n * k / mach.unit.flops_per_s >= moved / bandwidth
