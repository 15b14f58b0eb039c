"""The cost of a loop nest on a CPU: what its statements compute and load, beside what memory moves."""

from __future__ import annotations

import math

from roller_svc.ir.group import AxisRole
from roller_svc.ir.program import Combine
from roller_svc.perf.column_walk import walks_columns
from roller_svc.perf.cpu_memory import byte_seconds, moved_bytes, own_byte_seconds, read_bytes
from roller_svc.perf.footprint import AccessFootprint
from roller_svc.perf.nest_work import Counts, Pass
from roller_svc.perf.problem import Problem
from roller_svc.perf.terms import Costs, Launch

JUMPS = 64  # steps from which a strided walk is more than a window
PAGE_BYTES = 4096  # prefetchers do not cross it


def cpu_nest(p: Problem, launch: Launch) -> Costs:
    """Operations, loads and tasks of the core with the most of them, overlapped with what memory moves."""
    mach, costs = p.machine, p.machine.costs.nest
    walked = p.passes or (Pass(p.outer_points * p.inner_points, _plain_counts(p), None, frozenset()),)
    compute = sum(_pass_cycles(p, launch, each) for each in walked)
    loads = sum(_load_cycles(p, launch, each) for each in walked)
    again = _again_cycles(p, launch, walked)
    jumps = sum(_jump_cycles(p, t, launch) for t in p.touched.reads)
    waves = -(-launch.grid // mach.cores)
    share = max(waves / launch.grid, 1 / mach.cores)  # of all tasks, those of the core with the most
    cycles = (compute, loads + jumps, again, launch.grid * costs.task_cycles)
    seconds = [mach.seconds(c * share) for c in cycles]
    memory = _memory_s(p, launch)
    core = sum(seconds)
    return Costs(
        core_s=max(core, memory) + costs.overlap_leak * min(core, memory),
        core_stage=None,
        parts=(
            ("compute", seconds[0]), ("loads", seconds[1]), ("again", seconds[2]), ("task", seconds[3]),
            ("dram", memory),
        ),
        occupancy=min(1.0, launch.grid / (waves * mach.cores)),
        waves=waves,
    )  # fmt: skip


def _plain_counts(p: Problem) -> Counts:
    """Of a space whose statements are not known."""
    return Counts(simple=round(p.space.flops / (p.outer_points * p.inner_points)))


def _pass_cycles(p: Problem, launch: Launch, each: Pass) -> float:
    """One statement at all its points: operations, or the latency of joins where too few go side by side; loops; lanes
    joined, and what is left of a row joined one by one."""
    costs, counts = p.machine.costs.nest, each.counts
    width = _width(p, launch)
    side_by_side = max(1, launch.lanes * math.prod(launch.thread) // width)
    busy = (
        costs.operation_cycles * (counts.simple + (each.joins is Combine.SUM or each.joins is Combine.PROD))
        + costs.extreme_cycles * (counts.extremes + (each.joins in (Combine.MAX, Combine.MIN)))
        + costs.quotient_cycles * counts.quotients
        + costs.exponential_cycles * counts.exponentials
        + costs.function_cycles * counts.functions
    )
    rows = p.outer_points
    is_row = each.points > rows
    if each.joins is not None and is_row and not walks_columns(p.space):
        busy = max(busy, costs.join_latency_cycles / side_by_side)
    vectors = each.points * _overhang(p, launch) / width
    cycles = vectors * (busy + costs.loop_cycles / side_by_side)
    if launch.lanes > 1 and is_row:
        cycles += rows * costs.tail_cycles * (each.points // rows % width)
        if each.joins is not None:
            cycles += rows * costs.horizontal_cycles * math.log2(launch.lanes) / math.prod(launch.thread)
    return cycles


def _width(p: Problem, launch: Launch) -> int:
    """Points of one vector, at most those of a register."""
    return min(p.machine.unit.shape[-1], launch.lanes if launch.lanes > 1 else math.prod(launch.thread))


def _overhang(p: Problem, launch: Launch) -> float:
    """Points that are computed for each that there is: vectors overhang the axis they run along."""
    if launch.lanes > 1 or p.vector is None:
        return 1.0
    extent, width = p.extents[p.vector], _width(p, launch)
    return -(-extent // width) * width / extent


def _load_cycles(p: Problem, launch: Launch, each: Pass) -> float:
    """One statement's loads and stores at all its points, as if all were in L1."""
    vectors = each.points * _overhang(p, launch) / _width(p, launch)
    found = [t for t in p.touched.accesses if not each.tensors or t.access.tensor in each.tensors]
    return sum(_access_cycles(p, t, launch, vectors) for t in found)


def _access_cycles(p: Problem, tensor: AccessFootprint, launch: Launch, vectors: float) -> float:
    """One tensor between L1 and registers: whole vectors, one element for all lanes, or element by element."""
    costs, width = p.machine.costs.nest, _width(p, launch)
    if p.inner_points > 1 and not tensor.walks_reduced:  # once for each outer point
        vectors = p.outer_points / (1 if launch.lanes > 1 else width)
    if width == 1 or p.vector is None or p.vector not in tensor.axes:
        return vectors * costs.load_cycles
    if tensor.strides.get(p.vector) == 1:
        return vectors * costs.load_cycles
    return vectors * costs.gather_cycles * width


def _again_cycles(p: Problem, launch: Launch, walked: tuple[Pass, ...]) -> float:
    """What statements after the first read and write of a row, from the cache that holds the rows at hand."""
    if not p.space.walks_rows:
        return 0.0
    rows = tuple(p.extents[i] if a.role is AxisRole.INNER else launch.thread[i] for i, a in enumerate(p.space.axes))
    each = own_byte_seconds(p.machine, p.touched.bytes(rows)) * p.machine.clock_hz
    cycles = 0.0
    for tensor in p.touched.accesses:
        times = sum(tensor.access.tensor in one.tensors for one in walked)
        if tensor.walks_reduced and times > 1:
            cycles += (times - 1) * tensor.bytes(p.extents) * each
    return cycles


def _jump_cycles(p: Problem, tensor: AccessFootprint, launch: Launch) -> float:
    """A walk over an inner axis that jumps further than prefetchers follow waits for memory at every step."""
    if not p.reduced or launch.lanes > 1 or not tensor.walks_reduced or p.inner_points < JUMPS:
        return 0.0
    inner = p.reduced[-1]
    if inner not in tensor.axes or inner in tensor.strides or tensor.bytes(p.extents) // p.inner_points < PAGE_BYTES:
        return 0.0
    if walks_columns(p.space):
        return 0.0
    latency = p.machine.dram_latency_cycles
    for cache in p.machine.caches:
        if tensor.bytes(p.extents) <= cache.total_bytes // 2:
            latency = cache.latency_cycles
    vectors = p.outer_points * p.inner_points / _width(p, launch)
    return vectors * latency / p.machine.costs.nest.jumps_in_flight


def _memory_s(p: Problem, launch: Launch) -> float:
    """Whole cache lines of each task, from where a repeated run finds the data; once where a task's tile fits L2."""
    mach = p.machine
    clipped = tuple([min(b, e) for b, e in zip(launch.block, p.touched.extents, strict=True)])
    reads = read_bytes(mach, p.touched.reads, launch.grid, clipped, p.extents)
    if launch.lanes > 1:  # rows that are walked side by side are as many streams, a page or more apart
        reads *= 1.0 + mach.costs.nest.rows_more * math.log2(math.prod(launch.thread))
    if launch.streamed:
        writes = sum(t.moved_bytes(p.extents) for t in p.touched.writes) / mach.dram.streamed_write_gain
    else:
        writes = sum(moved_bytes(mach, t, clipped, p.extents) for t in p.touched.writes)
    return (reads + writes) * byte_seconds(mach, p.compulsory_bytes, launch.grid)
