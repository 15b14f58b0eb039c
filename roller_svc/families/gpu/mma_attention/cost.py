"""Cost of attention on warps with `mma.sync` or MFMA: QK^T, softmax and PV per KV tile.

A KV tile is priced like a GEMM's k-tile (`mma_contraction/cost.py`). The function units that compute exponentials may
also be the bound (FlashAttention-3: Shah et al., arXiv:2407.08608, §2.2). `mma.sync` returns to its warp with the sums,
so a warp computes products and softmax in turn; its block's warps do so together, since they meet for every KV tile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from roller_svc.construct.rules import extent_on
from roller_svc.families.common.gpu.attention.terms import (
    EXPONENTIALS_PER_CYCLE,
    dram_cycles,
    operand_dram_bytes,
    score_operations,
    softmax_slots,
    visible_fraction,
)
from roller_svc.families.common.gpu.attention.tile import (
    AttentionOperands,
    MmaAttentionTile,
    make_mma_attention_tile,
    thread_registers,
)
from roller_svc.families.common.gpu.matrix.terms import (
    BARRIER_CYCLES,
    CORE_L2_BYTES_PER_CYCLE,
    MMA_LATENCY_CYCLES,
    STEP_OPS,
    MatrixStep,
    copy_cost,
    device_fill,
    epilogue_memory_cycles,
    epilogue_slots,
    memory_seconds,
    shared_latency_cycles,
)
from roller_svc.families.common.gpu.matrix.tile import WORD_BYTES
from roller_svc.ir.group import AxisRole
from roller_svc.perf.common import Costs, Launch, load_latency_cycles, simt_waves
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS, Machine
from roller_svc.perf.occupancy import BlockResources, blocks_per_core
from roller_svc.perf.uncertainty import EXPOSED
from roller_svc.perf.workload import Workload

# Assumed latency of one fragment load: four matrices of 128 bytes take shared memory four cycles, and the address and
# latency as many again with a few loads in flight.
FRAGMENT_CYCLES = 8.0


def mma_attention(p: Workload[AttentionOperands], launch: Launch) -> Costs:
    """Return the cost of waves of blocks, each a chain of the KV tiles that its rows see."""
    mach, hw, found = p.machine, p.machine.hw, p.facts
    tile = attention_block(p, found, launch.block, launch.thread, (launch.pipeline.stages, launch.split_k))
    needs = BlockResources(tile.threads, thread_registers(tile, found), tile.shared_bytes)
    resident = blocks_per_core(launch.compiled or needs, hw)
    seen = replace(found, bounds=found.bounds.of_tiles(tile.kv))
    steps = max(1.0, visible_fraction(p, seen, tile.m) * -(-p.extent(p.k) // tile.kv) / tile.kv_splits)
    dram_bytes = operand_dram_bytes(p, launch, resident * mach.cores)
    dram = dram_bytes / (launch.grid * steps) / mach.dram_bytes_per_cycle
    cost = _step(p, found, tile, launch.block)
    step = cost.step._replace(dram=dram_cycles(p, launch, dram))
    stages_in_flight = launch.pipeline.stages - 1 if found.k.is_async and found.v.is_async else 1

    def block_cycles(blocks: float) -> float:
        fill = device_fill(launch.grid, resident, mach.cores, blocks)
        return steps * step.cycles(blocks, stages_in_flight, fill)

    waves, cycles = simt_waves(launch.grid, resident, mach.cores, block_cycles)
    together = min(resident, -(-launch.grid // mach.cores))
    edges = 2 * step.latency + step.llc + together * _epilogue_cycles(p, launch, tile)
    cycles += edges * (1 + (waves - 1) / resident)
    each = launch.grid * steps / mach.cores
    parts = [
        ("mma", mach.seconds(each * cost.mma)),
        ("exponentials", mach.seconds(each * cost.exponentials)),
        ("shared", mach.seconds(each * step.shared)),
        ("issue", mach.seconds(each * cost.issue)),
        *memory_seconds(p, launch, each * step.llc, dram_bytes),
    ]
    seconds = max(mach.seconds(cycles), *(s for _, s in parts))
    parts.append((EXPOSED, seconds - max(s for _, s in parts)))
    occupancy = min(1.0, resident * tile.threads / hw.limits.max_threads_per_core)
    return Costs(seconds, None, tuple(parts), occupancy, waves, needs)


def attention_block(
    p: Workload[Any], found: AttentionOperands, block: Tile, warp: Tile, pipeline: tuple[int, int]
) -> MmaAttentionTile:
    """Return the tile of those extents; `pipeline`: stages and KV splits."""
    features = next(i for i, axis in enumerate(p.space.axes) if axis.role is AxisRole.INNER)
    extents = (extent_on(block, p.m), extent_on(block, p.n), extent_on(block, p.k), block[features])
    return make_mma_attention_tile(extents, (extent_on(warp, p.m), extent_on(warp, p.k)), *pipeline, found)


@dataclass(frozen=True, slots=True)
class _Cost:
    """Cycles of one KV tile. On NVIDIA's devices the tensor cores wait for softmax in `step`."""

    step: MatrixStep
    mma: float
    issue: float
    exponentials: float


def _step(p: Workload[Any], found: AttentionOperands, tile: MmaAttentionTile, block: Tile) -> _Cost:
    mach = p.machine
    copies = [copy_cost(found.k, tile.kv * tile.head_dim, p.b, mach)]
    if found.second is not None:
        copies.append(copy_cost(found.second[1], tile.kv * tile.head_dim, p.b, mach))
    if not tile.has_values_in_keys:
        copies.append(copy_cost(found.v, tile.kv * tile.n, p.b, mach))
    copy_slots = sum(copy.slots for copy in copies)
    features = tile.products * tile.head_dim
    score_steps = tile.products * tile.head_dim_steps
    warps, fragment = tile.row_warps * tile.kv_warps, tile.fragment
    size = tile.q.dtype.bytes
    read = warps * tile.warp_kv * (features + tile.n) * size
    read += 0 if tile.has_q_in_registers else warps * tile.warp_m * features * size
    products = tile.row_fragments * (tile.kv_fragments * score_steps + tile.fragments * tile.kv_steps)
    instruction = fragment.rows * fragment.columns * (fragment.step_bytes // size) * SCHEDULERS / mach.fma_per_cycle
    weighing = softmax_slots(tile, found, score_operations(p, found, tile.m, tile.kv))
    loads = (tile.kv_fragments * score_steps + tile.fragments * tile.kv_steps) * fragment.b_loads
    loads += 0 if tile.has_q_in_registers else tile.row_fragments * score_steps
    issue = (warps * (products + weighing + loads + STEP_OPS) + copy_slots) / mach.issue_per_cycle
    exponentials = found.exponentials * tile.m * tile.kv / EXPONENTIALS_PER_CYCLE
    mma = tile.m * tile.kv * (features + tile.n) / mach.fma_per_cycle
    softmax = max(warps * weighing / mach.issue_per_cycle, exponentials)
    moved = p.b.requested_bytes(block) + (found.has_values_in_keys and not tile.has_values_in_keys) * tile.v.bytes
    chain = max(products * instruction, (score_steps + tile.kv_steps) * MMA_LATENCY_CYCLES)
    chain += (weighing + copy_slots / warps) * SCHEDULERS / mach.issue_per_cycle + loads * FRAGMENT_CYCLES
    step = MatrixStep(
        warps=warps,
        mma=mma if fragment.is_square else mma + softmax,
        shared=read / mach.staged_bytes_per_cycle + sum(copy.pipe for copy in copies),
        issue=max(issue, exponentials),
        port=moved / CORE_L2_BYTES_PER_CYCLE,
        llc=moved / mach.llc_bytes_per_cycle,
        dram=0.0,
        chain=chain + shared_latency_cycles(mach) + BARRIER_CYCLES,
        latency=load_latency_cycles(mach, p.a.total_bytes + p.b.total_bytes),
    )
    return _Cost(step, mma, issue, exponentials)


def _epilogue_cycles(p: Workload[Any], launch: Launch, tile: MmaAttentionTile) -> float:
    mach: Machine = p.machine
    points = tile.m * tile.n
    is_direct = tile.num_splits > 1 or tile.can_store_rows
    through = 0.0 if is_direct else 2 * points * WORD_BYTES / mach.staged_bytes_per_cycle + 2 * BARRIER_CYCLES
    slots = epilogue_slots(p, points)
    return through + slots / (mach.hw.limits.warp_size * mach.issue_per_cycle) + epilogue_memory_cycles(p, launch)
