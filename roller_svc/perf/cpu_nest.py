"""The cost of a loop nest on a CPU, all terms summed."""

from __future__ import annotations

import math

from roller_svc.perf.footprint import AccessFootprint
from roller_svc.perf.machine import Machine
from roller_svc.perf.problem import Problem
from roller_svc.perf.terms import Costs, Launch

JUMPS = 64  # steps from which a strided walk is more than a window
PAGE_BYTES = 4096  # prefetchers do not cross it


def cpu_nest(p: Problem, launch: Launch) -> Costs:
    """Operations + loads + memory + joining lanes + tasks, for the core with the most tasks."""
    mach, costs = p.machine, p.machine.costs.nest
    padded = _padded_points(p, launch)
    vector = max(launch.lanes, math.prod(launch.thread))
    vectors = padded / vector
    unit_vectors = -(-vector // mach.unit.shape[-1]) if vector > 1 else 1
    flops = p.space.flops / (p.outer_points * p.inner_points)
    compute = vectors * (flops * costs.operation_cycles * unit_vectors + costs.loop_cycles)
    loads = sum(_access_cycles(p, t, launch, vector, vectors, unit_vectors) for t in p.touched.accesses)
    joins = p.outer_points * costs.horizontal_cycles * math.log2(launch.lanes) / 2 if launch.lanes > 1 else 0.0
    waves = -(-launch.grid // mach.cores)
    # tasks are handed out as cores become free: with many, only the last ones leave cores idle
    uneven = max(waves * mach.cores / launch.grid, 1.0)
    share = uneven / mach.cores
    loads += sum(_jump_cycles(p, t, launch, vectors) for t in p.touched.reads)
    seconds = [mach.seconds(c * share) for c in (compute, loads, joins, launch.grid * costs.task_cycles)]
    memory = _memory_s(p, launch)
    return Costs(
        core_s=sum(seconds) + memory,
        core_stage=None,
        parts=(
            ("compute", seconds[0]), ("loads", seconds[1]), ("join", seconds[2]), ("task", seconds[3]),
            ("dram", memory),
        ),
        occupancy=min(1.0, launch.grid / (waves * mach.cores)),
        waves=waves,
    )  # fmt: skip


def _padded_points(p: Problem, launch: Launch) -> float:
    """Points that are computed: vectors overhang the axis they run along."""
    points = 1.0
    for extent, thread, axis in zip(p.touched.extents, launch.thread, p.space.axes, strict=True):
        step = launch.lanes if axis.name == p.space.vector_axis and axis.kind.value == "reduce" else thread
        points *= -(-extent // step) * step
    return points


def _access_cycles(
    p: Problem, tensor: AccessFootprint, launch: Launch, vector: int, vectors: float, unit_vectors: int
) -> float:  # noqa: PLR0913 - the two counts are the caller's, computed once
    """Moving one tensor between L1 and registers: whole vectors, broadcasts, or element by element."""
    costs = p.machine.costs.nest
    moves = tensor.walks_reduced or p.inner_points == 1
    repeats = vectors if moves else vectors / max(1, p.inner_points / max(1, launch.lanes))
    if vector == 1 or p.vector is None or p.vector not in tensor.axes:
        return repeats * costs.load_cycles
    if tensor.strides.get(p.vector) == 1:
        return repeats * costs.load_cycles * unit_vectors
    return repeats * costs.gather_cycles * vector


def _jump_cycles(p: Problem, tensor: AccessFootprint, launch: Launch, vectors: float) -> float:
    """A walk over an inner axis that jumps further than prefetchers follow waits for memory at every step."""
    if not p.reduced or launch.lanes > 1 or not tensor.walks_reduced or p.inner_points < JUMPS:
        return 0.0
    inner = p.reduced[-1]
    if inner not in tensor.axes or inner in tensor.strides or tensor.bytes(p.extents) // p.inner_points < PAGE_BYTES:
        return 0.0
    latency = p.machine.dram_latency_cycles
    for cache in p.machine.caches:
        if tensor.bytes(p.extents) <= cache.total_bytes // 2:
            latency = cache.latency_cycles
    return vectors * latency / p.machine.costs.nest.jumps_in_flight


def _memory_s(p: Problem, launch: Launch) -> float:
    """Whole cache lines of each task, from the cache that holds the data or DRAM; once where a task's tile fits L2."""
    mach = p.machine
    clipped = tuple([min(b, e) for b, e in zip(launch.block, p.touched.extents, strict=True)])
    task_bytes = p.touched.moved_bytes(clipped)
    whole = p.touched.moved_bytes(p.touched.extents)
    bandwidth = _bandwidth(mach, p.compulsory_bytes)
    moved = max(whole, min(launch.grid * task_bytes, 4 * whole))
    if launch.streamed:
        written = sum(t.bytes(p.extents) for t in p.touched.accesses if t.access.is_output)
        moved -= written * (1 - 1 / mach.dram.streamed_write_gain)
    # one core alone does not reach the whole device's bandwidth: of a shared DRAM, about two thirds of it
    alone = mach.cores / launch.grid
    if bandwidth <= mach.dram.bandwidth_bytes_per_s:
        alone *= mach.costs.nest.alone
    return moved / bandwidth * max(1.0, alone)


def _bandwidth(mach: Machine, total_bytes: int) -> float:
    for cache in reversed(mach.caches):
        if total_bytes <= cache.total_bytes // 2:
            return cache.bytes_per_s
    return mach.dram.bandwidth_bytes_per_s
