"""Cost of a contraction on warps (`mma.sync`, MFMA): shared-memory stages, fragments, an epilogue.

Terms and names follow §5 of the design notes on ROLLER: t_k, the time of one k-tile, is the longest of the times of the
unit, shared memory, the schedulers, the LLC and DRAM.
"""

from __future__ import annotations

import math

from roller_svc.analysis.tile_bounds import KRanges
from roller_svc.construct.rules import MIN_MATRIX_STAGES, extent_on
from roller_svc.families.common.gpu.matrix.terms import (
    BARRIER_CYCLES,
    CORE_L2_BYTES_PER_CYCLE,
    MMA_LATENCY_CYCLES,
    SECTOR_BYTES,
    STEP_OPS,
    MatrixStep,
    MmaBlock,
    copy_cost,
    device_fill,
    epilogue_memory_cycles,
    epilogue_slots,
    k_tile_latency_cycles,
    operand_dram_bytes,
    resource_seconds,
    scale_latency_cycles,
    shared_latency_cycles,
    tile_count,
)
from roller_svc.families.common.gpu.matrix.tile import WORD_BYTES, MmaTile, staged, thread_registers
from roller_svc.families.gpu.mma_contraction.workload import MmaFacts
from roller_svc.ir.dtype import DType
from roller_svc.ir.hardware import UnitKind
from roller_svc.perf.common import Costs, Launch, load_latency_cycles, uneven_waves
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS
from roller_svc.perf.occupancy import BlockResources, blocks_per_core
from roller_svc.perf.uncertainty import EXPOSED
from roller_svc.perf.workload import Workload

CONVERT_SLOTS = 2.0  # one cvt.rna.tf32: 16 lanes a clock and scheduler (CUDA Programming Guide, throughput table)


def mma_contraction(p: Workload[MmaFacts], launch: Launch) -> Costs:
    """Return the cost of waves of blocks, each a chain of k-tiles between prologue and epilogue."""
    mach, hw = p.machine, p.machine.hw
    block = mma_block(p, launch.block, launch.thread)
    tile = block.tile._replace(stages=launch.pipeline.stages)
    needs = BlockResources(tile.threads, block.registers, tile.shared_bytes)
    resident = blocks_per_core(launch.compiled or needs, hw)
    steps, longest = block_k_tiles(p, launch)
    dram_bytes = operand_dram_bytes(p, launch, resident * mach.cores)
    dram = dram_bytes / (launch.grid * steps) / mach.dram_bytes_per_cycle
    step = block_step(p, launch.block, launch.thread)
    step = step._replace(dram=dram, latency=k_tile_latency_cycles(p, launch, dram_bytes, steps))
    stages_in_flight = prefetch_stages(p, launch.pipeline.stages)

    def block_cycles(blocks: float) -> float:
        fill = device_fill(launch.grid, resident, mach.cores, blocks)
        return steps * step.cycles(blocks, stages_in_flight, fill)

    waves, cycles = uneven_waves(launch.grid, resident, mach.cores, block_cycles, longest / steps)
    together = min(resident, -(-launch.grid // mach.cores))
    edges = step.latency + step.llc + together * _epilogue_cycles(p, launch, tile)
    # resident blocks drift apart: only the first prologue and the last epilogue do not overlap with other blocks
    runs = tile_count(p, launch.block) / launch.grid if launch.pipeline.stream_k_blocks else float(waves - 1)
    cycles += edges * (1 + runs / resident)
    parts = resource_seconds(p, launch, step, launch.grid * steps, dram_bytes, _buffered_cycles(p, tile))
    seconds = max(mach.seconds(cycles), *(s for _, s in parts))
    parts.append((EXPOSED, seconds - max(s for _, s in parts)))
    occupancy = min(1.0, resident * tile.threads / hw.limits.max_threads_per_core)
    return Costs(seconds, None, tuple(parts), occupancy, waves, needs)


def mma_block(p: Workload[MmaFacts], block: Tile, warp: Tile) -> MmaBlock:
    """Return the tile of a block and the registers of its threads; cached."""
    known = p.facts.blocks.get((block, warp))
    if known is None:
        (a, b), fragment, sums = p.facts.loads, p.facts.fragment, p.space.num_accumulators
        (m, n, k), (warp_m, warp_n, _) = p.mnk(block), p.mnk(warp)
        tile = MmaTile(
            m,
            sums * n,
            k,
            warp_m,
            sums * warp_n,
            MIN_MATRIX_STAGES,
            staged(a.operand, a.dtype, m, k, fragment),
            staged(b.operand, b.dtype, sums * n, k, fragment),
            fragment,
            p.space.scale_runs,
        )
        known = p.facts.blocks[block, warp] = MmaBlock(tile, thread_registers(tile, a, b))
    return known


def prefetch_stages(p: Workload[MmaFacts], stages: int) -> int:
    """Return the k-tiles in flight before their use; copies through registers are always one ahead."""
    return stages - 1 if all(feed.is_async for feed in p.facts.loads) else 1


def block_steps(p: Workload[MmaFacts], launch: Launch) -> int:
    """Return the k-tiles of one block."""
    k = extent_on(launch.block, p.k)
    if launch.pipeline.stream_k_blocks:
        return -(-tile_count(p, launch.block) * -(-p.extent(p.k) // k) // launch.pipeline.stream_k_blocks)
    return -(-p.extent(p.k) // (launch.split_k * k))


def block_k_tiles(p: Workload[MmaFacts], launch: Launch) -> KRanges:
    """Return the k-tiles of a block in the mean, and of the longest one."""
    return p.k_tiles(launch.block, extent_on(launch.block, p.k), block_steps(p, launch))


def block_step(p: Workload[MmaFacts], block: Tile, warp: Tile) -> MatrixStep:
    """Return t_mma, t_smem, t_issue and t_l2 of one block, cached; t_dram depends on the launch."""
    known = p.facts.steps.get((block, warp))
    if known is None:
        known = p.facts.steps[block, warp] = _block_step(p, block, mma_block(p, block, warp).tile)
    return known


def _block_step(p: Workload[MmaFacts], block: Tile, tile: MmaTile) -> MatrixStep:
    mach = p.machine
    a, b = p.facts.loads
    fill_a = copy_cost(a, tile.m * tile.k, p.a, mach)
    fill_b = copy_cost(b, tile.n * tile.k, p.b, mach)
    fragments = math.prod(tile.fragments)
    fragment, size = tile.fragment, a.dtype.bytes
    # §5, t_smem: fragments are read once for each warp that shares them
    reads = tile.m * tile.n * tile.k * size * (1 / tile.warp_m + 1 / tile.warp_n)
    instruction = fragment.rows * fragment.columns * (fragment.step_bytes // size) * SCHEDULERS / mach.fma_per_cycle
    moved = p.a.requested_bytes(block) + p.b.requested_bytes(block)
    chain = tile.k_steps * max(fragments * instruction, MMA_LATENCY_CYCLES)
    latency = load_latency_cycles(mach, p.a.total_bytes + p.b.total_bytes)
    scale_bytes = read_bytes = 0.0
    if (runs := tile.scale_runs) is not None and (scales := tile.scales) is not None:
        scale_bytes = WORD_BYTES * runs.scales(tile.m, tile.n) / tile.promoted_k_tiles
        read_bytes = SECTOR_BYTES * math.prod(tile.warps) * scales.sectors / tile.promoted_k_tiles
        # requested before the products
        chain = max(chain, scale_latency_cycles(p) / tile.promoted_k_tiles)
        chain += tile.promotion_slots
    return MatrixStep(
        warps=math.prod(tile.warps),
        mma=tile.m * tile.n * tile.k / mach.fma_per_cycle,
        shared=(reads + read_bytes) / mach.staged_bytes_per_cycle + fill_a.pipe + fill_b.pipe,
        issue=(_fragment_slots(p, tile) + math.prod(tile.warps) * tile.promotion_slots + fill_a.slots + fill_b.slots)
        / mach.issue_per_cycle,
        port=moved / CORE_L2_BYTES_PER_CYCLE,
        llc=(moved + scale_bytes) / mach.llc_bytes_per_cycle,
        dram=0.0,
        chain=chain + shared_latency_cycles(mach) + BARRIER_CYCLES,
        latency=latency,
    )


def _fragment_slots(p: Workload[MmaFacts], tile: MmaTile) -> float:
    """Return the issue slots of all warps for one k-tile: MMAs, fragment loads, roundings to tf32."""
    m, n = tile.fragments
    unit, fragment = p.machine.unit, tile.fragment
    pieces = fragment.rows * fragment.columns * (fragment.step_bytes // tile.a.dtype.bytes) / math.prod(unit.shape)
    slots = m * n * max(1.0, pieces) + STEP_OPS
    # ldmatrix loads four matrices; 4-byte MN-major elements are loaded word by word
    slots += m * (1 if tile.a.swizzled else 4) + n * (fragment.b_loads if tile.b.swizzled else 2)
    a, b = p.facts.loads
    if unit.kind is UnitKind.MFMA or unit.in_dtype is not DType.FLOAT32:  # nothing is rounded
        return math.prod(tile.warps) * tile.k_steps * slots
    slots += CONVERT_SLOTS * (4 * m * (a.operand.dtype is DType.FLOAT32) + 2 * n * (b.operand.dtype is DType.FLOAT32))
    return math.prod(tile.warps) * tile.k_steps * slots


def _epilogue_cycles(p: Workload[MmaFacts], launch: Launch, tile: MmaTile) -> float:
    """Return cycles of accumulators through shared memory, then of loads and stores."""
    mach = p.machine
    points = tile.m * tile.n
    through = _buffered_cycles(p, tile)
    through += 2 * BARRIER_CYCLES * (tile.fragments[0] // tile.epilogue_fragments)
    issued = epilogue_slots(p, points // p.space.num_accumulators) / (mach.hw.limits.warp_size * mach.issue_per_cycle)
    return through + issued + epilogue_memory_cycles(p, launch)


def _buffered_cycles(p: Workload[MmaFacts], tile: MmaTile) -> float:
    """Return shared-memory cycles of a tile's accumulators, written and read again."""
    return 2 * tile.m * tile.n * tile.fragment.sum_words * WORD_BYTES / p.machine.staged_bytes_per_cycle
