"""The cost of rows reduced by threads, warps or blocks of a SIMT machine: bytes in flight against rows."""

from __future__ import annotations

import math

from roller_svc.perf.footprint import AccessFootprint, Tile
from roller_svc.perf.lane_walk import LaneWalk, elements, lane_walk, row_registers, walked_reads
from roller_svc.perf.machine import SCHEDULERS, register_words
from roller_svc.perf.occupancy import BlockNeeds, blocks_per_core
from roller_svc.perf.problem import Problem, address_ops
from roller_svc.perf.terms import Costs, Launch, simt_waves, streaming_bandwidth

SECTOR_BYTES = 32
BLOCK_CYCLES = 50.0  # a core starts one block after another
SHUFFLE_CYCLES = 30.0  # a shuffle and the operation that waits for it
BARRIER_CYCLES = 60.0  # words into shared memory, a barrier, words out of it
LOOP_OPS = 4.0  # a chunk's counter, address and bound
OPS_A_FLOP = 1.5  # what a flop of a row needs beside itself: comparisons, moves, parts of functions
CACHE_SHARE = 0.6  # of the last cache that rows under way may take and still be there for the next pass


def simt_reduction(p: Problem, launch: Launch) -> Costs:
    """Warps issue, caches and DRAM serve; the longest of them bounds, or the chain of a block's loads and joins."""
    mach, hw = p.machine, p.machine.hw
    walk = lane_walk(p, launch.block, launch.thread, launch.lanes, launch.split_k)
    registers = row_registers(p, launch.thread, walk, hw.limits)
    needs = BlockNeeds(launch.threads, registers, shared_bytes(p, walk, launch.lanes, launch.threads))
    resident = blocks_per_core(launch.compiled or needs, hw)
    warps = -(-launch.threads // hw.limits.warp_size)
    instructions = _thread_instructions(p, launch, walk)
    sectors = _warp_sectors(p, launch, walk)
    chain = _chain_cycles(p, launch, walk)

    def block_cycles(blocks: float) -> float:
        issue = blocks * (warps * instructions / SCHEDULERS + BLOCK_CYCLES)
        lsu = blocks * warps * sectors / 4  # a cache serves four sectors a cycle
        return max(issue, lsu, chain) + 0.1 * min(issue, chain)

    waves, core_cycles = simt_waves(launch.grid, resident, mach.cores, block_cycles)
    busy = min(launch.grid, resident * mach.cores)
    dram, cache = _moved_bytes(p, launch, walk, busy)
    asked = busy * launch.threads * walk.together * sum(
        elements(p, t, launch.thread) * t.elem_bytes for t in walked_reads(p)
    )  # fmt: skip
    in_flight = asked * min(1.0, dram / max(1.0, cache))
    last = mach.last_cache
    return Costs(
        core_s=mach.seconds(core_cycles),
        core_stage="latency" if chain * waves > 0.7 * core_cycles else "compute",
        parts=(
            ("fma", p.space.flops / mach.unit.flops_per_s),
            (last.name if last else "cache", cache / (last.bytes_per_s if last else math.inf)),
            ("dram", dram / streaming_bandwidth(mach, max(1.0, in_flight))),
        ),
        occupancy=min(1.0, resident * launch.threads / hw.limits.max_threads_per_core),
        waves=waves,
        needs=needs,
    )


def shared_bytes(p: Problem, walk: LaneWalk, lanes: int, threads: int) -> int:
    """Shared memory in which lanes join: a word a warp and row, or, where they stand apart, all that they have."""
    warp = p.machine.hw.limits.warp_size
    if lanes == 1 or (walk.along and lanes <= warp):
        return 0
    words = walk.points * (threads // warp if walk.along else threads)
    return joins(p) * words * 4 * register_words(p.space.compute_dtype)


def joins(p: Problem) -> int:
    """Reductions of the group: passes over a row but for the one that writes it."""
    most = max((t.access.passes for t in walked_reads(p)), default=1)
    return max(1, most - 1) if any(t.walks_reduced for t in p.touched.writes) else most


def _passes(tensor: AccessFootprint, walk: LaneWalk) -> int:
    return 1 if walk.whole or not tensor.walks_reduced else tensor.access.passes


def _thread_instructions(p: Problem, launch: Launch, walk: LaneWalk) -> float:
    chunk = walk.run * walk.points
    flops = p.space.flops / (p.outer_points * p.inner_points)
    repeated = LOOP_OPS + chunk * flops * OPS_A_FLOP
    for tensor in p.touched.accesses:
        if not tensor.walks_reduced:
            continue
        count = elements(p, tensor, launch.thread)
        accesses = _accesses(p, tensor, launch.thread)
        narrow = count if tensor.elem_bytes < 4 else 0
        repeated += _passes(tensor, walk) * (accesses * (1.0 + address_ops(tensor) / 4) + narrow)
    joined = joins(p) * walk.points * (walk.run + 2 * math.log2(launch.lanes) if walk.along else 2.0 * launch.lanes)
    return walk.rounds * repeated + joined + 40.0


def _accesses(p: Problem, tensor: AccessFootprint, thread: Tile) -> int:
    """Load or store instructions for a thread's elements of one chunk."""
    count = elements(p, tensor, thread)
    fast = p.vector if p.vector is not None else -1
    together = min(count, thread[fast]) if tensor.strides.get(fast) == 1 else 1
    width = max(1, min(together, p.machine.hw.vector_bytes // tensor.elem_bytes))
    return -(-count // width)


def _warp_sectors(p: Problem, launch: Launch, walk: LaneWalk) -> float:
    """Sectors that a warp asks the cache for."""
    warp, total = p.machine.hw.limits.warp_size, 0.0
    fast = p.vector if p.vector is not None else -1
    for tensor in p.touched.accesses:
        count = elements(p, tensor, launch.thread)
        if fast not in tensor.axes:  # all neighbours read the same
            sectors = float(count)
        else:
            stride = tensor.strides.get(fast)
            neighbours = min(warp, launch.lanes if walk.along else launch.block[fast] // launch.thread[fast])
            held = neighbours * min(count, launch.thread[fast]) * tensor.elem_bytes * (stride or warp)
            if walk.along and launch.lanes * walk.run >= p.inner_points:
                neighbours, held = warp, warp * count * tensor.elem_bytes * (stride or warp)
            groups = warp / neighbours * max(1.0, count / min(count, launch.thread[fast]))
            sectors = min(float(warp * count), groups * max(1.0, held / SECTOR_BYTES))
        total += sectors * (walk.rounds * _passes(tensor, walk) if tensor.walks_reduced else 1)
    return total


def _chain_cycles(p: Problem, launch: Launch, walk: LaneWalk) -> float:
    """What one block needs however empty its core is: loads step by step, later passes from the cache, joins."""
    mach = p.machine
    later = mach.last_cache.latency_cycles if mach.last_cache is not None else mach.dram_latency_cycles
    most = max((_passes(t, walk) for t in walked_reads(p)), default=1)
    loads = mach.dram_latency_cycles + (walk.steps - 1) * mach.dram_latency_cycles + (most - 1) * walk.steps * later
    warp = mach.hw.limits.warp_size
    if walk.along:
        join = math.log2(launch.lanes) * SHUFFLE_CYCLES + (BARRIER_CYCLES if launch.lanes > warp else 0.0)
    else:
        join = 2 * BARRIER_CYCLES + launch.lanes * SHUFFLE_CYCLES / 8 if launch.lanes > 1 else 0.0
    return loads + joins(p) * (join + walk.run * 4.0) + 2 * mach.dram_latency_cycles / 5


def _moved_bytes(p: Problem, launch: Launch, walk: LaneWalk, busy: int) -> tuple[float, float]:
    """(bytes of DRAM, bytes of the last cache): a pass that finds rows gone reads them from DRAM once more."""
    tile = _row_tile(p, launch)
    last = p.machine.last_cache
    room = CACHE_SHARE * last.total_bytes if last is not None else 0.0
    dram = cache = 0.0
    for tensor in p.touched.accesses:
        whole, block = tensor.moved_bytes(p.extents), tensor.moved_bytes(tile)
        if any(dim.opaque for dim in tensor.access.dims):
            whole, block = (elements(p, tensor, t) * float(tensor.elem_bytes) for t in (p.extents, tile))
        passes = _passes(tensor, walk)
        cache += launch.grid * block * passes
        gone = 1.0 - min(1.0, room / max(1.0, busy * block))
        again = min(1.0, (launch.grid * block) / max(1.0, whole) - 1.0) * max(0.0, 1.0 - room / max(1.0, whole))
        dram += whole * (1.0 + (passes - 1) * gone + max(0.0, again) * 0.25)
    return dram + launch.workspace_bytes, cache


def _row_tile(p: Problem, launch: Launch) -> Tile:
    """All that a block reads, the whole of its rows."""
    return tuple([
        max(1, -(-e // launch.split_k)) if i in p.reduced else min(b, e)
        for i, (b, e) in enumerate(zip(launch.block, p.extents, strict=True))
    ])  # fmt: skip
