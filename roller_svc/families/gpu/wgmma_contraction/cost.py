"""Cost of a contraction on warpgroups: TMA producer, multistage pipeline, wgmma from shared memory, epilogue.

Terms and names follow §5 of the design notes on ROLLER: t_k, the time of one k-tile, is the longest of the times of the
unit, shared memory, the producer, the LLC and DRAM.
"""

from __future__ import annotations

import math
from typing import NamedTuple

from roller_svc.construct.rules import MIN_MATRIX_STAGES
from roller_svc.families.common.gpu.matrix.terms import (
    CORE_L2_BYTES_PER_CYCLE,
    IMPERFECT_OVERLAP,
    SECTOR_BYTES,
    STEP_OPS,
    MatrixStep,
    copy_cost,
    device_fill,
    epilogue_memory_cycles,
    k_tile_latency_cycles,
    operand_dram_bytes,
    resource_seconds,
    scale_latency_cycles,
    tile_count,
)
from roller_svc.families.common.gpu.matrix.tile import WORD_BYTES
from roller_svc.families.common.gpu.warpgroups.terms import (
    BOX_CYCLES,
    BOX_LATENCY_CYCLES,
    BOX_ROW_CYCLES,
    CLUSTER_LATENCY_CYCLES,
    LONE_WARP_SLOT_CYCLES,
    STEP_CYCLES,
    buffered_cycles,
    cluster_cores,
    cluster_part_cycles,
    cluster_reduction_cycles,
    epilogue_handoff_cycles,
    prefetched_copy_cost,
)
from roller_svc.families.common.gpu.warpgroups.tile import (
    ADDRESS_REGISTERS,
    ROWS,
    STEP_BYTES,
    WARPS,
    WgmmaBlock,
    WgmmaOperand,
    WgmmaOperandLoad,
    WgmmaTile,
)
from roller_svc.families.common.gpu.warpgroups.tma_load import TmaTile
from roller_svc.families.gpu.wgmma_contraction.workload import WgmmaFacts
from roller_svc.ir.rprogram import PipelineOptions
from roller_svc.perf.common import Costs, Launch, load_latency_cycles, uneven_waves
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS
from roller_svc.perf.occupancy import blocks_per_core
from roller_svc.perf.uncertainty import EXPOSED
from roller_svc.perf.workload import Workload

# Fraction of the other pipes that adds to the longest one: less than for warps, which issue everything themselves. The
# units' rates come from whole library kernels, which include most of it.
WGMMA_IMPERFECT_OVERLAP = 0.02
UNLIMITED = 1 << 30  # stages, for the time of a k-tile that never waits for loads


def wgmma_contraction(p: Workload[WgmmaFacts], launch: Launch) -> Costs:
    """Return the cost of waves of tiles, each a chain of k-tiles; gaps between tiles overlap where possible."""
    mach, hw = p.machine, p.machine.hw
    known = wgmma_block(p, launch.block, launch.thread)
    tile = known.tile.as_pingpong if launch.pipeline.pingpong else known.tile
    tile = tile._replace(pipeline=launch.pipeline)
    if launch.split_k > 1:
        tile = tile.as_partial
    cores = cluster_cores(mach.cores, launch.pipeline.cluster_size)
    needs = tile.resources
    resident = blocks_per_core(launch.compiled or needs, hw)
    if launch.pipeline.persistent_blocks:
        resident = min(resident, -(-launch.pipeline.persistent_blocks // cores))
    steps, longest = p.k_tiles(launch.block, tile.k, block_steps(p, launch))
    at_once = resident * cores
    dram_bytes = operand_dram_bytes(p, launch, at_once)
    dram = dram_bytes / (launch.grid * steps) / mach.dram_bytes_per_cycle
    latency = k_tile_latency_cycles(p, launch, dram_bytes, steps)
    waiting = _refill_latency_cycles(known, latency, launch.pipeline.cluster)
    first_step = shared_step(p, known, launch.pipeline.cluster)._replace(dram=dram, latency=waiting)
    step = first_step
    if tile.prefetched_k_tiles:  # a producer waits for all words in flight once in these k-tiles, and then unpacks them
        step = step._replace(chain=max(step.chain, step.issue + latency / tile.prefetched_k_tiles))
    waves = -(-launch.grid // at_once)
    # the first words of packed operands are requested when a tile begins
    is_carried = launch.pipeline.persistent_blocks and not tile.prefetched_k_tiles
    at_start = _requested_at_start(known, tile, steps) / (waves if is_carried else 1)

    def block_cycles(blocks: float) -> float:
        fill = device_fill(launch.grid, resident, cores, blocks)
        late = (steps - at_start) * step.cycles(blocks, prefetch_stages(known, launch.pipeline.stages), fill)
        return at_start * first_step.cycles(blocks, UNLIMITED, fill) + late

    waves, cycles = uneven_waves(launch.grid, resident, cores, block_cycles, longest / steps)
    again = tile_count(p, launch.block) / launch.grid if launch.pipeline.stream_k_blocks else (waves - 1) / resident
    together = min(resident, -(-launch.grid // cores))
    mainloop = block_cycles(1.0) if launch.pipeline.pingpong else 0.0
    late_words = 0.0
    if tile.prefetched_k_tiles:  # what stages that are full when a tile ends do not hide
        late_words = max(0.0, step.latency - (launch.pipeline.stages - 1) * max(step.mma, step.shared, step.issue, step.chain))
    per_core = _TilesPerCore(again, together, mainloop, late_words)
    cycles += _prologue_epilogue_cycles(p, launch, tile, step, per_core)
    cluster_k = launch.pipeline.cluster_k
    buffered = cluster_part_cycles(p, tile, cluster_k) if cluster_k > 1 else buffered_cycles(p, tile)
    parts = resource_seconds(p, launch, step, launch.grid * steps, dram_bytes, buffered)
    longest_s = busy_s = max(s for _, s in parts)
    if launch.pipeline.persistent_blocks:  # what overlaps over all tiles: loads of one share memory with results of others
        busy_s += WGMMA_IMPERFECT_OVERLAP * (sum([s for _, s in parts]) - longest_s)
        busy_s += mach.seconds(step.latency + epilogue_handoff_cycles(p, tile))  # before the first byte, before the last
    seconds = max(mach.seconds(cycles), busy_s)
    parts.append((EXPOSED, seconds - longest_s))
    occupancy = min(1.0, resident * tile.threads / hw.limits.max_threads_per_core)
    return Costs(seconds, None, tuple(parts), occupancy, waves, needs)


def wgmma_block(p: Workload[WgmmaFacts], block: Tile, group: Tile) -> WgmmaBlock:
    """Return the tile of a block and the cost of a k-tile; cached."""
    known = p.facts.blocks.get((block, group))
    if known is None:
        known = p.facts.blocks[block, group] = _block(p, block, group)
    return known


def prefetch_stages(block: WgmmaBlock, stages: int) -> int:
    """Return the k-tiles in flight before their use; copies through registers without a prefetch are one ahead."""
    return 1 if block.latencies else stages - 1


def _requested_at_start(block: WgmmaBlock, tile: WgmmaTile, steps: float) -> float:
    """Return the k-tiles that arrive with the first: an empty pipeline is requested whole."""
    return 1.0 if block.latencies else float(min(steps, tile.pipeline.stages, tile.prefetched_k_tiles or tile.pipeline.stages))


def block_steps(p: Workload[WgmmaFacts], launch: Launch) -> int:
    """Return the k-tiles of one output tile, or of a stream-K block."""
    steps = wgmma_block(p, launch.block, launch.thread).tile.k_order.steps
    if launch.pipeline.stream_k_blocks:
        return -(-tile_count(p, launch.block) * steps // launch.pipeline.stream_k_blocks)
    return -(-steps // (launch.split_k * launch.pipeline.cluster_k))


def shared_step(p: Workload[WgmmaFacts], block: WgmmaBlock, cluster: tuple[int, int]) -> MatrixStep:
    """Return the k-tile with multicast: blocks of a cluster load parts, and the LLC is read once for all."""
    along_m, along_n = cluster
    if along_m == along_n == 1:
        return block.step
    a, b = block.requested_bytes
    return block.step._replace(llc=(a / along_n + b / along_m) / p.machine.llc_bytes_per_cycle)


def _block(p: Workload[WgmmaFacts], block: Tile, group: Tile) -> WgmmaBlock:
    mach, feeds = p.machine, p.facts.loads
    group_m, group_n, _ = p.mnk(group)
    tile = feeds.tile(p.mnk(block), (group_m, group_n), PipelineOptions(MIN_MATRIX_STAGES))
    moved = (p.a.requested_bytes(block), p.b.requested_bytes(block))
    pipe = (tile.a.bytes * tile.a.load.is_tma + tile.b.bytes * tile.b.load.is_tma) / mach.staged_bytes_per_cycle
    slots, boxes = 0.0, 0
    for feed, staged, operand in ((feeds.a, tile.a, p.a), (feeds.b, tile.b, p.b)):
        if staged.load.is_tma:
            boxes += staged.copies
        elif staged.prefetch is not None:
            brought = prefetched_copy_cost(feed.by_threads, staged.prefetch, staged.extent * staged.k, mach)
            pipe, slots = pipe + brought.pipe, slots + brought.slots
        else:
            brought = copy_cost(feed.by_threads, staged.extent * staged.k, operand, mach)
            pipe, slots = pipe + brought.pipe, slots + brought.slots
    # §5, t_smem: an instruction reads 64 rows of A and all its columns of B
    instructions = tile.consumers * tile.fragments * tile.k_steps
    reads = instructions * (ROWS + tile.group_n) * STEP_BYTES / mach.staged_bytes_per_cycle
    mma = tile.m * tile.n * tile.k / mach.fma_per_cycle
    producer = slots / SCHEDULERS * LONE_WARP_SLOT_CYCLES + boxes * BOX_CYCLES
    added = tile.promotion_slots  # of each thread after its products, one a cycle
    consumers = tile.consumers * (STEP_OPS + 4 * tile.fragments * tile.k_steps + added)
    chain = mma / tile.consumers
    scale_bytes = 0.0
    if (runs := tile.scale_runs) is not None and (scales := tile.scales) is not None:
        scale_bytes = WORD_BYTES * runs.scales(tile.m, tile.n) / tile.promoted_k_tiles
        # requested before the products
        chain = max(chain, scale_latency_cycles(p) / tile.promoted_k_tiles)
        read_bytes = SECTOR_BYTES * tile.consumers * WARPS * scales.sectors / tile.promoted_k_tiles
        pipe += read_bytes / mach.staged_bytes_per_cycle
    chain = chain + added + STEP_CYCLES if tile.promotes_accumulators else max(STEP_CYCLES, chain)
    step = MatrixStep(
        warps=WARPS * tile.consumers,
        mma=mma,
        shared=reads + pipe,
        issue=max(producer, consumers),
        port=_port_cycles(tile, moved),
        llc=(sum(moved) + scale_bytes) / mach.llc_bytes_per_cycle,
        dram=0.0,
        chain=chain,
        latency=load_latency_cycles(mach, p.a.total_bytes + p.b.total_bytes),
        imperfect_overlap=WGMMA_IMPERFECT_OVERLAP,
    )
    latencies = _latencies(feeds.a, tile.a) + _latencies(feeds.b, tile.b)
    return WgmmaBlock(tile, step, moved, latencies, tile.resources)


def _port_cycles(tile: WgmmaTile, moved: tuple[float, float]) -> float:
    """Return the cycles of a k-tile's bytes through the core's port, or of the rows of TMA boxes if these are short."""
    cycles = 0.0
    for staged, moved_bytes in zip((tile.a, tile.b), moved, strict=True):
        plan = staged.copy_plan
        rows = staged.copies * plan.rows if isinstance(plan, TmaTile) else 0
        cycles += max(moved_bytes / CORE_L2_BYTES_PER_CYCLE, rows * BOX_ROW_CYCLES)
    return cycles


def _latencies(feed: WgmmaOperandLoad, staged: WgmmaOperand) -> int:
    """Return how often a producer thread fills its free registers with loads and waits for them."""
    if not staged.load.through_registers or staged.prefetch is not None:
        return 0
    load = feed.by_threads.load
    loads = -(-staged.extent * staged.k // (load.elements * WARPS * 32))
    words = max(1, load.elements * feed.by_threads.operand.memory_dtype.bytes // WORD_BYTES)  # unpacked: halves
    free_registers = max(1, staged.producer_registers - ADDRESS_REGISTERS)
    return -(-loads * words // free_registers)


def _refill_latency_cycles(block: WgmmaBlock, latency: float, cluster: tuple[int, int]) -> float:
    """Return the cycles from when a stage is free to when it is full."""
    if block.latencies:
        return latency * block.latencies + block.step.issue
    boxed = block.tile.a.load.is_tma or block.tile.b.load.is_tma
    return latency + BOX_LATENCY_CYCLES * boxed + CLUSTER_LATENCY_CYCLES * (math.prod(cluster) > 1)


class _TilesPerCore(NamedTuple):
    """Tiles of a core after its first, and the blocks that it runs concurrently."""

    again: float
    together: int
    mainloop_cycles: float  # of one tile under ping-pong
    late_words_cycles: float  # until the first words of a tile arrive, after the last stage of the tile before


def _prologue_epilogue_cycles(
    p: Workload[WgmmaFacts], launch: Launch, tile: WgmmaTile, step: MatrixStep, tiles: _TilesPerCore
) -> float:
    """Return a core's cycles before, between and after the k-tiles of its output tiles.

    With one block per tile, each has its own prologue. Persistent blocks have one; the pipeline refills during the
    epilogue, which wins back part of the time of a loop that waits for memory.
    """
    working = min(1.0, launch.grid / p.machine.cores)
    resource_seconds, loads = max(step.mma, step.shared, step.issue, step.chain), max(step.port, step.llc * working)
    begin = step.latency + min(resource_seconds, loads)  # k-tiles count the longer of both
    results = tiles.together * epilogue_memory_cycles(p, launch)
    if launch.pipeline.cluster_k > 1:
        handing = tiles.together * cluster_reduction_cycles(p, tile, launch.pipeline.cluster_k, math.prod(launch.pipeline.cluster))
    else:
        handing = tiles.together * epilogue_handoff_cycles(p, tile)
    if not (launch.pipeline.persistent_blocks or launch.pipeline.stream_k_blocks):
        return (begin + handing + results) * (1 + tiles.again)
    if launch.pipeline.pingpong:
        handing = epilogue_handoff_cycles(p, tile, LONE_WARP_SLOT_CYCLES)
        shared = block_steps(p, launch) * step.shared + buffered_cycles(p, tile)
        exposed = _pingpong_exposed_cycles(p, tile, shared, tiles.mainloop_cycles)
        return begin + handing + results + tiles.again * (exposed + tiles.late_words_cycles)
    won = min(tile.pipeline.stages, block_steps(p, launch)) * max(0.0, max(loads, step.dram) - resource_seconds)
    return begin + handing + results + tiles.again * max(0.0, handing - won, tiles.late_words_cycles)


def _pingpong_exposed_cycles(p: Workload[WgmmaFacts], tile: WgmmaTile, shared: float, mainloop: float) -> float:
    """Return the cycles of one tile of a ping-pong schedule that its mainloop does not hide.

    A consumer alternates between mainloop and epilogue, and mainloops do not overlap. One pair of tiles takes
    max(2 mainloops, mainloop + epilogue). Instructions of two epilogues and shared memory limit it, too.

    Args:
        shared: Cycles of shared memory for mainloop and epilogue.
        mainloop: Cycles of the mainloop.
    """
    alone = epilogue_handoff_cycles(p, tile, LONE_WARP_SLOT_CYCLES)
    period = max(mainloop, (mainloop + alone) / 2, epilogue_handoff_cycles(p, tile), shared)
    return period - mainloop + IMPERFECT_OVERLAP * alone
