"""Cost of attention on warpgroups: QK^T and PV per KV tile, overlapped softmax, pipelines that a producer fills.

A warpgroup issues QK^T of one KV tile after PV of the tile before. Exponentials overlap with these products and with
those of other warpgroups (FlashAttention-3: Shah et al., arXiv:2407.08608, §3).
"""

from __future__ import annotations

import math
from typing import Any

from roller_svc.construct.rules import extent_on
from roller_svc.families.common.gpu.attention.terms import (
    EXPONENTIALS_PER_CYCLE,
    dram_cycles,
    operand_dram_bytes,
    softmax_slots,
    visible_fraction,
)
from roller_svc.families.common.gpu.attention.tile import FREE_SCORE_OPERATIONS
from roller_svc.families.common.gpu.matrix.terms import (
    BARRIER_CYCLES,
    CORE_L2_BYTES_PER_CYCLE,
    STEP_OPS,
    MatrixStep,
    copy_cost,
    device_fill,
    epilogue_memory_cycles,
    resource_seconds,
    shared_latency_cycles,
)
from roller_svc.families.common.gpu.warpgroups.terms import (
    BOX_CYCLES,
    BOX_LATENCY_CYCLES,
    LONE_WARP_SLOT_CYCLES,
    STEP_CYCLES,
    buffered_cycles,
    epilogue_handoff_cycles,
)
from roller_svc.families.common.gpu.warpgroups.tile import ROWS, WARPS, launch_registers
from roller_svc.families.gpu.wgmma_attention.workload import WgmmaAttentionFacts, WgmmaAttentionTile
from roller_svc.ir.group import AxisRole
from roller_svc.perf.common import Costs, Launch, load_latency_cycles, simt_waves
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS, Machine
from roller_svc.perf.occupancy import BlockResources, blocks_per_core
from roller_svc.perf.uncertainty import EXPOSED
from roller_svc.perf.workload import Workload

# Fraction of softmax time that no product hides. Assumed: it predicts 605 TFLOP/s at head_dim 128 on an H100, between
# FlashAttention-3 with one kind of overlap (582 and 570) and with both (661; arXiv:2407.08608, table 2), because
# warpgroups here are not scheduled explicitly.
EXPOSED_SOFTMAX_FRACTION = 0.4
# Registers in addition to O, S and P: row maxima and sums, indices, operands of a mask; and those of each instruction
# along head_dim beyond 128. Fitted to 60 kernels that NVRTC 13 compiled with head_dim 64 to 256 and one to three
# consumers: with 32 some spilled, with 36 none. `bench/roller_bench/attention_registers.py` checks others.
OVERHEAD_REGISTERS = 36
FREE_HEAD_DIM_STEPS, HEAD_DIM_STEP_REGISTERS = 8, 1.5


def wgmma_attention(p: Workload[WgmmaAttentionFacts], launch: Launch) -> Costs:
    """Return the cost of waves of blocks, each a chain of the KV tiles that its rows see."""
    mach, hw, known = p.machine, p.machine.hw, p.facts
    tile = attention_block(p, launch.block, launch.pipeline.stages)
    needs = block_resources(tile, known)
    resident = blocks_per_core(launch.compiled or needs, hw)
    if launch.pipeline.persistent_blocks:
        resident = min(resident, -(-launch.pipeline.persistent_blocks // mach.cores))
    steps = max(1.0, visible_fraction(p, known.operands, tile.m) * -(-p.extent(p.k) // tile.kv))
    at_once = resident * mach.cores
    dram_bytes = operand_dram_bytes(p, launch, at_once)
    dram = dram_bytes / (launch.grid * steps) / mach.dram_bytes_per_cycle
    step = _step(p, known, tile, launch.block)._replace(dram=dram_cycles(p, launch, dram))

    def block_cycles(blocks: float) -> float:
        fill = device_fill(launch.grid, resident, mach.cores, blocks)
        return steps * step.cycles(blocks, tile.stages - 1, fill)

    waves, cycles = simt_waves(launch.grid, resident, mach.cores, block_cycles)
    together = min(resident, -(-launch.grid // mach.cores))
    results = epilogue_handoff_cycles(p, tile.result) + epilogue_memory_cycles(p, launch)
    # Q and the first K precede the first product; persistent blocks wait for them only once
    arriving = step.latency + step.llc
    # the first softmax and the last PV overlap only with other warpgroups
    edges = step.chain / tile.consumers + together * results
    cycles += arriving + edges + (edges + arriving * (not launch.pipeline.persistent_blocks)) * (waves - 1) / resident
    each = launch.grid * steps
    alone = step._replace(mma=_product_cycles(p, tile))
    parts = resource_seconds(p, launch, alone, round(each), dram_bytes, buffered_cycles(p, tile.result))
    parts.insert(1, ("exponentials", mach.seconds(each / mach.cores * _exponential_cycles(tile))))
    seconds = max(mach.seconds(cycles), *(s for _, s in parts))
    parts.append((EXPOSED, seconds - max(s for _, s in parts)))
    occupancy = min(1.0, resident * tile.threads / hw.limits.max_threads_per_core)
    return Costs(seconds, None, tuple(parts), occupancy, waves, needs)


def attention_block(p: Workload[WgmmaAttentionFacts], block: Tile, stages: int) -> WgmmaAttentionTile:
    """Return the tile of a block of those extents."""
    features = next(i for i, axis in enumerate(p.space.axes) if axis.role is AxisRole.INNER)
    return p.facts.tile((extent_on(block, p.m), extent_on(block, p.n), extent_on(block, p.k), block[features]), stages)


def consumer_registers(tile: WgmmaAttentionTile, known: WgmmaAttentionFacts) -> int:
    """Return the registers of a consumer thread."""
    features = HEAD_DIM_STEP_REGISTERS * max(0, tile.head_dim_steps - FREE_HEAD_DIM_STEPS)
    scores = max(0, known.operands.score_operations - FREE_SCORE_OPERATIONS)
    return tile.live_registers + OVERHEAD_REGISTERS + math.ceil(features) + scores


def block_resources(tile: WgmmaAttentionTile, known: WgmmaAttentionFacts) -> BlockResources:
    """Return a block's resources; registers are those at launch."""
    if tile.consumers > 1:
        return BlockResources(tile.threads, launch_registers(tile.threads), tile.shared_bytes)
    registers = max(consumer_registers(tile, known), tile.producer_registers)
    return BlockResources(tile.threads, registers, tile.shared_bytes)


def _product_cycles(p: Workload[Any], tile: WgmmaAttentionTile) -> float:
    return tile.m * tile.kv * (tile.head_dim * tile.column_groups + tile.n * _slowdown(tile)) / p.machine.fma_per_cycle


def _slowdown(tile: WgmmaAttentionTile) -> int:
    """Return how many times the unit of V is slower than that of Q and K."""
    return tile.v.dtype.bytes // tile.q.dtype.bytes


def _exponential_cycles(tile: WgmmaAttentionTile) -> float:
    return tile.consumers * ROWS * tile.kv / EXPONENTIALS_PER_CYCLE


def _step(p: Workload[Any], known: WgmmaAttentionFacts, tile: WgmmaAttentionTile, block: Tile) -> MatrixStep:
    mach, found = p.machine, known.operands
    producer, pipe = _producer(p, known, tile)
    # an instruction reads its columns of B and, in QK^T, 64 rows of Q
    of_scores = (ROWS + tile.kv) * tile.head_dim * tile.q.dtype.bytes
    read = tile.consumers * (of_scores + tile.kv * tile.group_n * tile.v.dtype.bytes)
    weighing = softmax_slots(tile, found, found.score_operations)
    warps = WARPS * tile.consumers
    slots = warps * (weighing + STEP_OPS + 2 * (tile.head_dim_steps + tile.kv_steps)) / SCHEDULERS
    weighed = max(slots, _exponential_cycles(tile))
    # of one warpgroup: one warp on each scheduler
    rows = ROWS * tile.kv / mach.fma_per_cycle
    by_itself = max(weighing, ROWS * tile.kv / EXPONENTIALS_PER_CYCLE)
    moved = p.b.requested_bytes(block)
    if found.has_values_in_keys and not tile.has_values_in_keys:
        moved += tile.v.bytes  # from L2, where K has brought it
    return MatrixStep(
        warps=warps,
        mma=_product_cycles(p, tile) + EXPOSED_SOFTMAX_FRACTION * weighed,
        shared=read / mach.staged_bytes_per_cycle + pipe,
        issue=max(weighed, producer),
        port=moved / CORE_L2_BYTES_PER_CYCLE,
        llc=moved / mach.llc_bytes_per_cycle,
        dram=0.0,
        chain=rows * tile.head_dim + max(rows * tile.group_n * _slowdown(tile), by_itself) + _waits(mach),
        latency=load_latency_cycles(mach, p.a.total_bytes + p.b.total_bytes) + BOX_LATENCY_CYCLES,
    )


def _waits(mach: Machine) -> float:
    """Return a warpgroup's waits per KV tile: barriers, latency of a product, shuffles of maxima."""
    return STEP_CYCLES + 2 * BARRIER_CYCLES + shared_latency_cycles(mach)


def _producer(p: Workload[Any], known: WgmmaAttentionFacts, tile: WgmmaAttentionTile) -> tuple[float, float]:
    """Return cycles of the producer's warps per KV tile, and of the core's memory pipe."""
    cycles = pipe = 0.0
    staged = ((tile.k, known.operands.k), (tile.v, known.operands.v))
    for buffer, load in staged[: 1 if tile.has_values_in_keys else 2]:
        if buffer.load.is_tma:
            cycles += buffer.copies * BOX_CYCLES
            pipe += buffer.bytes / p.machine.staged_bytes_per_cycle
        else:
            brought = copy_cost(load, buffer.bytes // buffer.dtype.bytes, p.b, p.machine)
            cycles += brought.slots / SCHEDULERS * LONE_WARP_SLOT_CYCLES
            pipe += brought.pipe
    return cycles, pipe
