"""Cost of a loop nest on a GPU with one thread per point: scatters and single points."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from roller_svc.ir.hardware import Limits
from roller_svc.perf.common import Costs, Launch, dram_bytes_with_reuse, simt_waves, streaming_bandwidth
from roller_svc.perf.footprint import AccessFootprint, Tile
from roller_svc.perf.machine import Machine, register_words
from roller_svc.perf.occupancy import BlockResources, blocks_per_core, overhead_registers
from roller_svc.perf.workload import Workload

LOOP_OPS = 1.0
UNROLL = 4  # iterations of an inner loop whose loads the compiler issues together
TREE_STEP_CYCLES = 60.0  # one halving step of a block reduction: shared memory and a barrier
SECTOR_BYTES = 32
BLOCK_CYCLES = 50.0  # a core starts one block after another
DEPENDENT_CYCLES = 6.0  # latency of a dependent operation


class ThreadWork(NamedTuple):
    """Bounds of a block: a thread's instructions, a warp's cycles at L1, and a block's latency on an empty core."""

    instructions: float
    requests: float
    chain_cycles: float


class Traffic(NamedTuple):
    """Bytes of a launch: those that the last cache delivers, those of DRAM, and those in flight at a time."""

    requested_bytes: float
    dram_bytes: float
    bytes_in_flight: float


def make_block_cycles(mach: Machine, warps: int, instructions: float, requests: float, chain: float) -> Callable[[float], float]:
    """Return the cycles of resident blocks: the longest of issue, L1 requests and a block's chain."""

    def block_cycles(blocks: float) -> float:
        issue = blocks * (warps * instructions / mach.issue_per_cycle + BLOCK_CYCLES)
        return max(issue, blocks * warps * requests * mach.request_cycles, chain) + 0.1 * min(issue, chain)

    return block_cycles


def simt_costs(mach: Machine, launch: Launch, needs: BlockResources, work: ThreadWork, traffic: Traffic, fma_s: float) -> Costs:
    """Return the longest of issue, cache and DRAM time, but for what a block's chain takes.

    Args:
        needs: of a block, as the model assumes them.
    """
    hw, last = mach.hw, mach.llc
    resident = blocks_per_core(launch.compiled or needs, hw)
    warps = -(-launch.threads // hw.limits.warp_size)
    block_cycles = make_block_cycles(mach, warps, work.instructions, work.requests, work.chain_cycles)
    waves, core_cycles = simt_waves(launch.grid, resident, mach.cores, block_cycles)
    return Costs(
        core_s=mach.seconds(core_cycles),
        core_stage="latency" if work.chain_cycles * waves > 0.7 * core_cycles else "compute",
        stage_seconds=(
            ("fma", fma_s),
            (last.name if last else "cache", traffic.requested_bytes / (last.bytes_per_s if last else math.inf)),
            ("dram", traffic.dram_bytes / streaming_bandwidth(mach, traffic.bytes_in_flight)),
        ),
        occupancy=min(1.0, resident * launch.threads / hw.limits.max_threads_per_core),
        waves=waves,
        resources=needs,
        moved_bytes=(("dram", traffic.dram_bytes),),
    )


def dram_bytes_of_blocks(p: Workload[Any], moved: float) -> float:
    """Return DRAM bytes of blocks that move some; successive ones find part of shared data and cut lines in the LLC."""
    whole = p.footprint.transferred_bytes(p.extents)
    again = max(0.0, moved - whole)
    return dram_bytes_with_reuse(p.machine, int(whole), 1.0 + min(again / whole, 4.0) * 0.25)


def nest_registers(points: int, words: int, limits: Limits) -> int:
    """Return a thread's registers for `points` concurrent points."""
    return overhead_registers(limits) + 3 * points * words


def serial_cost(p: Workload[Any], launch: Launch) -> Costs:
    """Return the longest of issue, cache and DRAM time, plus what a block's chain exposes."""
    mach, hw = p.machine, p.machine.hw
    per_thread = math.prod(launch.thread)
    words = register_words(p.space.compute_dtype)
    shared = launch.threads * p.elem_bytes if launch.reduce_threads > 1 else 0
    needs = BlockResources(launch.threads, nest_registers(per_thread, words, hw.limits), shared)
    resident = blocks_per_core(launch.compiled or needs, hw)
    iterations = max(1, -(-p.inner_points // (launch.reduce_threads * launch.split_k)))
    instructions, loads = _thread_instructions(p, launch, per_thread)
    work = ThreadWork(instructions, _cache_requests(p, launch), _chain_cycles(p, launch, iterations))
    block_bytes = p.footprint.transferred_bytes(_clipped(p, launch))
    requested = launch.grid * p.footprint.requested_bytes(_clipped(p, launch))
    busy = min(launch.grid, resident * mach.cores)
    sectors = block_bytes / max(1, p.footprint.bytes(_clipped(p, launch)))  # memory moves more than what is asked for
    in_flight = busy * launch.threads * per_thread * p.elem_bytes * sectors * max(1.0, loads) * min(iterations, UNROLL)
    traffic = Traffic(requested, _dram_bytes(p, launch, block_bytes), in_flight)
    compute_s = p.space.flops * _padding_factor(p, launch) / mach.unit.flops_per_s
    return simt_costs(mach, launch, needs, work, traffic, compute_s)


def _thread_instructions(p: Workload[Any], launch: Launch, per_thread: int) -> tuple[float, float]:
    """Return one thread's instructions, and the loads of a point in one iteration."""
    iterations = max(1, -(-p.inner_points // (launch.reduce_threads * launch.split_k)))
    operations = p.space.instructions / (p.outer_points * p.inner_points)
    loop = LOOP_OPS if p.inner_points == 1 else LOOP_OPS * per_thread
    once, repeated, loads = 0.0, loop + operations * per_thread, 0.0
    for tensor in p.footprint.reads:
        accesses = _thread_elements(p, tensor, launch.thread)
        if tensor.varies_with_reduction:
            # loops over inner axes are unrolled and step their addresses; lanes must take their index apart
            repeated += accesses * (1.5 if launch.reduce_threads == 1 else 1.0 + tensor.address_ops / 2)
            loads += 1.0
        else:
            once += accesses * (1.0 + tensor.address_ops / 2)
    stores = sum(per_thread * (1.0 + t.address_ops / 2) for t in p.footprint.writes) / launch.reduce_threads
    return iterations * repeated + once + stores + 20.0, max(loads, 1.0)


def _thread_elements(p: Workload[Any], tensor: AccessFootprint, thread: Tile) -> int:
    """Return the loads of a thread's points: elementwise points share loads, reductions follow one another."""
    axes = tensor.axes if p.inner_points == 1 else p.spatial
    return math.prod([min(thread[i], p.extents[i]) for i in axes])


def _cache_requests(p: Workload[Any], launch: Launch) -> float:
    """Return the L1 cycles of a warp's loads and stores: a request serves 4 sectors a cycle."""
    warp = p.machine.hw.limits.warp_size
    total = 0.0
    for tensor in p.footprint.accesses:
        accesses = _thread_elements(p, tensor, launch.thread)
        if tensor.varies_with_reduction:
            accesses *= max(1, -(-p.inner_points // (launch.reduce_threads * launch.split_k)))
        total += accesses * _warp_sectors(p, tensor, launch, warp) / 4
    return total


def _warp_sectors(p: Workload[Any], tensor: AccessFootprint, launch: Launch, warp: int) -> float:
    """Return the sectors of one warp access: lanes follow the reduction, the vector axis or the last axis."""
    if launch.reduce_threads > 1 and p.reduced:
        axis, along = p.reduced[-1], min(launch.reduce_threads, warp)
    elif (p.vector_axis is not None and p.vector_axis in p.spatial) or p.spatial:
        axis = p.vector_axis if p.vector_axis is not None and p.vector_axis in p.spatial else p.spatial[-1]
        along = min(launch.block[axis] // launch.thread[axis], warp)
    else:
        return 1.0
    if axis not in tensor.axes:
        return 1.0
    if (stride := tensor.strides.get(axis)) is None:
        return float(warp)
    return min(float(warp), warp / along * max(1.0, along * stride * tensor.elem_bytes / SECTOR_BYTES))


def _chain_cycles(p: Workload[Any], launch: Launch, iterations: int) -> float:
    """Return a block's latency on an empty core: dependent loads, then the block reduction."""
    latency = p.machine.dram_latency_cycles
    if (last := p.machine.llc) is not None and p.inner_points > 1:
        latency = (latency + last.latency_cycles) / 2
    iterations *= math.prod(launch.thread) if p.inner_points > 1 else 1  # one point's reduction after another
    batches = -(-iterations // UNROLL)
    cycles = latency + batches * (latency if p.inner_points > 1 else 0.0) / 2 + iterations * DEPENDENT_CYCLES
    if launch.reduce_threads > 1:
        cycles += (math.log2(launch.reduce_threads) + 2) * TREE_STEP_CYCLES
    return cycles + 2 * DEPENDENT_CYCLES * len(p.footprint.accesses)


def _clipped(p: Workload[Any], launch: Launch) -> Tile:
    """Return the block's tile inside the tensor, or its part of a split reduction."""
    return tuple(
        [
            max(1, min(b, e if a.kind.value == "spatial" else -(-e // launch.split_k)))
            for b, e, a in zip(launch.block, p.footprint.extents, p.space.axes, strict=True)
        ]
    )


def _dram_bytes(p: Workload[Any], launch: Launch, block_bytes: float) -> float:
    """Return whole transactions of accessed data, and what blocks reread after LLC evictions."""
    return dram_bytes_of_blocks(p, launch.grid * block_bytes) + launch.workspace_bytes


def _padding_factor(p: Workload[Any], launch: Launch) -> float:
    factor = 1.0
    for b, e, a in zip(launch.block, p.footprint.extents, p.space.axes, strict=True):
        if a.kind.value == "spatial":
            factor *= -(-e // b) * b / e
    return factor
