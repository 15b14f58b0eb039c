"""Cost terms that the wgmma families share."""

from __future__ import annotations

from typing import Any

from roller_svc.analysis.packed_operands import unpacking_of
from roller_svc.construct.scale_out import MIN_K_TILES
from roller_svc.errors import require
from roller_svc.families.common.gpu.matrix.terms import (
    BARRIER_CYCLES,
    LOAD_OPS,
    STORE_OPS,
    CopyCost,
    epilogue_slots,
)
from roller_svc.families.common.gpu.matrix.tile import CHUNK_BYTES, WORD_BYTES, LoadKind, OperandLoad
from roller_svc.families.common.gpu.warpgroups.register_prefetch import RegisterPrefetch
from roller_svc.families.common.gpu.warpgroups.tile import READ_BATCH_WORDS, WARPS, WgmmaTile, batch_rounds
from roller_svc.ir.rprogram import WARPGROUP_THREADS
from roller_svc.perf.machine import SCHEDULERS, Machine
from roller_svc.perf.workload import Workload

# Assumed: a consumer's overhead per k-tile (a completed barrier, a fence, consumer_release); the issue time of a TMA
# box; and its extra latency over thread loads: about 400 cycles from L2, against 263 of a load.
STEP_CYCLES = 60.0
BOX_CYCLES = 16.0
BOX_LATENCY_CYCLES = 100.0
BOX_ROW_CYCLES = 1.0  # assumed: of a row of a box, so that rows of 64 bytes fill the port of an SM, and shorter do not
# Cycles per issue slot of a lone warp on its scheduler, as those of a producer and of an epilogue under ping-pong are.
# A producer's are half integer arithmetic at 16 lanes a cycle (CUDA Programming Guide, table of throughputs), with no
# other warp to fill the gaps. Assumed the same for an epilogue, whose special functions have 4 lanes a cycle.
LONE_WARP_SLOT_CYCLES = 1.5
# Instructions of a producer thread for a k-tile, in addition to its loads, elements and stores: waits, arrivals, TMA,
# addresses. With them, k-tiles of int4, int8 and float8 weights are counted at 0.9 to 1.3 times their SASS (NVRTC 13).
PREFETCH_STEP_OPS = 48.0
CLUSTER_LATENCY_CYCLES = 180.0  # of the SM-to-SM network (Luo et al., arXiv:2402.13499)
# Assumed: an arrival and the completion of a cluster's barrier each cross the SM-to-SM network.
CLUSTER_BARRIER_CYCLES = 2 * CLUSTER_LATENCY_CYCLES
# Bytes a cycle that an SM reads from other SMs, by blocks of a cluster: 3.27 and 2.65 TB/s of 114 SMs at 1.755 GHz
# (Luo et al., arXiv:2402.13499, H800). Assumed: eight blocks lose as much again.
REMOTE_BYTES_PER_CYCLE = {2: 16.3, 4: 13.2, 8: 10.7}
# A cluster is within a GPC. An H100 has 132 SMs in 8 GPCs of at most 18 (NVIDIA H100 whitepaper). Assumed: none has
# fewer than 16, so that 128 SMs hold clusters of four or eight.
CLUSTER_SMS = 16
MAX_CLUSTER_BLOCKS = 8  # portable cluster size (CUDA Programming Guide)
CLUSTER_PARTS = (8, 4, 2)  # of a tile's k-tiles; its rows are multiples of 64


def cluster_cores(cores: int, size: int) -> int:
    """Return the SMs that clusters of `size` blocks can fill."""
    return cores if size <= 2 else max(size, cores // CLUSTER_SMS * CLUSTER_SMS)


def cluster_parts(cores: int, tiles: int, steps: int, blocks: int = 1) -> int:
    """Return the most parts of each tile's k-tiles that a single wave of clusters holds; 1: none.

    Args:
        blocks: Blocks of a cluster for each part.
    """
    for parts in CLUSTER_PARTS:
        size = blocks * parts
        fits = size <= MAX_CLUSTER_BLOCKS and tiles * parts <= cluster_cores(cores, size)
        if fits and parts * MIN_K_TILES <= steps:
            return parts
    return 1


def cluster_reduction_cycles(p: Workload[Any], tile: WgmmaTile, parts: int, blocks: int = 1) -> float:
    """Return cycles to add a tile's parts: accumulators to shared memory, rows of all parts back, the epilogue."""
    mach, points = p.machine, tile.m * tile.n
    rate = REMOTE_BYTES_PER_CYCLE[next(size for size in REMOTE_BYTES_PER_CYCLE if size >= parts * blocks)]
    local = cluster_part_cycles(p, tile, parts)
    remote = points * (parts - 1) / parts * WORD_BYTES / rate
    added = points * (1 + LOAD_OPS[LoadKind.VECTOR] * WORD_BYTES / CHUNK_BYTES)
    issued = (epilogue_slots(p, points // parts) + added) / (mach.hw.limits.warp_size * SCHEDULERS)
    width = CHUNK_BYTES // WORD_BYTES
    rounds = -(-points // (parts * width * WARPGROUP_THREADS * tile.consumers))
    batches = rounds // batch_rounds(rounds, READ_BATCH_WORDS // (width * parts))
    return local + max(remote, issued) + batches * CLUSTER_LATENCY_CYCLES + BARRIER_CYCLES + 2 * CLUSTER_BARRIER_CYCLES


def cluster_part_cycles(p: Workload[Any], tile: WgmmaTile, parts: int) -> float:
    """Return shared-memory cycles of a block's accumulators, written and, for its part of the rows, read."""
    return tile.m * tile.n * (1 + 1 / parts) * WORD_BYTES / p.machine.staged_bytes_per_cycle


def prefetched_copy_cost(feed: OperandLoad, prefetch: RegisterPrefetch, elements: int, mach: Machine) -> CopyCost:
    """Return the cost of unpacking a k-tile from registers, and of loading the words of a later one."""
    warp = mach.hw.limits.warp_size
    unpacking = require(unpacking_of(feed.operand.expr, feed.dtype, prefetch.shared_loads, prefetch.thread_rows), "packed operand")
    stores = elements * feed.dtype.bytes / (CHUNK_BYTES * warp)
    slots = WARPS * (prefetch.load_instructions * LOAD_OPS[LoadKind.UNPACK] + PREFETCH_STEP_OPS)
    slots += elements / warp * unpacking.slots + STORE_OPS * stores
    loaded = WARPS * max(prefetch.load_instructions, prefetch.loaded_bytes * warp / mach.staged_bytes_per_cycle)
    return CopyCost(loaded + elements * feed.dtype.bytes / mach.staged_bytes_per_cycle, slots)


def epilogue_handoff_cycles(p: Workload[Any], tile: WgmmaTile, slot_cycles: float = 1.0) -> float:
    """Return cycles of results through each warp's buffer, then of the epilogue's instructions."""
    mach, store = p.machine, tile.tma_store
    columns = tile.epilogue_columns if store is None else store.columns * tile.num_accumulators
    rounds = tile.fragments * -(-tile.group_n // columns)
    issued = epilogue_slots(p, tile.m * tile.columns) / (mach.hw.limits.warp_size * SCHEDULERS)
    return max(buffered_cycles(p, tile) + slot_cycles * issued, rounds * 2 * BARRIER_CYCLES)


def buffered_cycles(p: Workload[Any], tile: WgmmaTile) -> float:
    """Return shared-memory cycles of what passes through the warps' buffers: results for TMA, or accumulators."""
    if (store := tile.tma_store) is not None:
        buffered_bytes = tile.m * tile.columns * store.dtype.bytes
    else:
        buffered_bytes = tile.m * tile.n * WORD_BYTES
    return 2 * buffered_bytes / p.machine.staged_bytes_per_cycle  # written, and read again
