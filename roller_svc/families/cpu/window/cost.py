"""Cost of windowed reductions on a CPU: staging, taps, outputs and memory, all summed."""

from __future__ import annotations

import math
from typing import Any

from roller_svc.families.common.cpu.memory import (
    LINE_BYTES,
    dominant_level,
    private_seconds_per_byte,
    reread_ratio,
    transfer_s,
)
from roller_svc.families.common.cpu.op_counts import work_cycles
from roller_svc.families.common.cpu.task_costs import count_waves, make_costs
from roller_svc.families.common.cpu.window_reduction import WindowedSum
from roller_svc.families.cpu.window.deinterleave import contiguous_load, deinterleave, is_sorted_by_vectors
from roller_svc.families.cpu.window.workload import (
    Dimension,
    PlaneLayout,
    PlaneSpace,
    Tile,
    layout,
    staged_bytes,
)
from roller_svc.ir.expr import loads_of
from roller_svc.ir.program import Combine
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.machine import LOAD_PORTS, Machine
from roller_svc.perf.workload import Workload

SORTED_RATIO = 1.5  # cycles of a vector that is sorted into phases in registers, over those of a staged one


def window_cost(p: Workload[PlaneSpace], launch: Launch) -> Costs:
    """Return the cycles of the core with the most tasks, overlapped imperfectly with memory."""
    mach, space = p.machine, p.facts
    costs = mach.costs.window
    planes = math.prod(_mean(a.extent, b) for a, b in zip(space.leading, launch.block, strict=False))
    cycles = dict.fromkeys(("staging", "compute", "results", "task"), 0.0)
    again = 0.0
    for one in space.reductions:
        found = layout(space, one, launch.block, launch.thread)
        fill = found.elements / mach.unit.shape[-1] * len(one.planes)
        again += 2 * planes * sum(found.elements * plane.dtype.bytes for plane in one.planes)  # there and back
        cycles["staging"] += planes * staging_cycles(mach, one, found)
        cycles["compute"] += planes * tap_cycles(mach, one, found)
        cycles["results"] += planes * line_cycles(mach, found)
        cycles["task"] += fill + costs.task_cycles
    waves = count_waves(p, launch)
    seconds = {name: mach.seconds(c * waves) for name, c in cycles.items()}
    staged = staged_bytes(space, launch.block, launch.thread)
    # a staged row block and its source share the cache
    memory = _memory_s(p, launch) + again * waves * private_seconds_per_byte(mach, 2 * staged)
    # while a row block is computed, only its successor's prefetched part is in flight
    exposed = max(0.0, sum([*seconds.values()][1:]) - min(1.0, costs.prefetch_distance_bytes / staged) * memory)
    overlapped = sum(seconds.values()) - exposed
    core_s = max(overlapped, memory) + costs.imperfect_memory_overlap * min(overlapped, memory) + exposed
    return make_costs(p, launch, core_s, seconds, (dominant_level(p, launch), memory))


def _memory_s(p: Workload[Any], launch: Launch) -> float:
    """Return seconds of compulsory traffic, and of lines shared by adjacent tasks from their cache."""
    mach, reads = p.machine, p.footprint.reads
    clipped = tuple([min(b, e) for b, e in zip(launch.block, p.extents, strict=True)])
    once = sum(transfer_s(p, t, clipped, launch.grid) for t in p.footprint.accesses)
    shared = reread_ratio(reads, launch.grid, clipped, p.extents) - 1
    shared *= sum(t.transferred_bytes(p.extents) for t in reads) / min(launch.grid, mach.cores)
    return once + shared * private_seconds_per_byte(mach, p.footprint.bytes(clipped))


def staging_cycles(mach: Machine, one: WindowedSum, found: PlaneLayout) -> float:
    """Return cycles to stage one plane, line by line, in as many parts as the last dimension has phases.

    Computation on the way, divisions above all, overlaps with loads, shuffles and stores.
    """
    lanes, last, costs = mach.unit.shape[-1], found.dims[-1], mach.costs.window
    cycles = 0.0
    for plane in one.planes:
        lines = math.prod(map(staged_positions, found.dims[:-1], plane.inside[:-1]))
        low, high = plane.inside[-1]
        count = min(last.places, high - low)
        pieces = line_vectors(-(-count // last.phases), lanes) * last.phases
        each = costs.staging_cycles * min(last.phases, lanes)
        if is_sorted_by_vectors(plane) and deinterleave(last.phases, low, count, lanes) is not None:
            is_loaded = contiguous_load(plane, last.window_dim.position_name) is not None
            each = costs.staging_cycles * (SORTED_RATIO + (not is_loaded))
        each += (len(loads_of(plane.value)) - 1) / LOAD_PORTS
        moved, work = _vector_equivalents(mach, pieces) * each, sum(pieces) * work_cycles(mach, plane.work)
        cycles += lines * (costs.line_cycles + max(moved, work) + costs.imperfect_overlap * min(moved, work))
    return cycles


def _mean(extent: int, block: int) -> float:
    """Return the mean extent of a block: the last one may be smaller."""
    return extent / -(-extent // block)


def staged_positions(dim: Dimension, inside: tuple[int, int]) -> float:
    """Return the mean positions of a row block that are staged: the first and last blocks exceed the input."""
    low, high = inside
    bands, step = -(-dim.window_dim.extent // dim.block), dim.block * dim.window_dim.stride
    beyond = _falling_sum(low, step) + _falling_sum((bands - 1) * step + dim.places - high, step)
    return max(0.0, dim.places - beyond / bands)


def _falling_sum(first: int, step: int) -> int:
    """Return first + (first - step) + (first - 2 step) + ..., over positive terms."""
    terms = max(0, -(-first // step))
    return terms * first - step * terms * (terms - 1) // 2


def line_vectors(elements: int, lanes: int) -> tuple[float, ...]:
    """Return a line's vectors as fractions of whole ones: whole ones, then the power of two that covers the tail."""
    longest = min(lanes, 1 << max(0, elements.bit_length() - 1))
    whole, left = divmod(elements, longest)
    return (longest / lanes,) * whole + (((1 << (left - 1).bit_length()) / lanes,) if left else ())


def _vector_equivalents(mach: Machine, pieces: tuple[float, ...]) -> float:
    """Return the whole vectors that take as long.

    Half a vector moves half as much and crosses a cache line half as often; a 64-byte one nearly always crosses.
    """
    across = mach.hw.vector_bytes / LINE_BYTES
    return sum([piece * (1 + across * piece) / (1 + across) for piece in pieces])


def tap_cycles(mach: Machine, one: WindowedSum, found: PlaneLayout) -> float:
    """Return cycles of one plane's taps: operations against loads, unaligned vectors counted by lines.

    A port loads one weight per cycle, however wide.
    """
    lanes, rows, costs = mach.unit.shape[-1], found.rows, mach.costs.window
    vectors = found.width // lanes
    below = found.dims[-2].window_dim if len(found.dims) > 1 else None
    lines = 1
    if below is not None:
        lines = len({below.stride * r + below.dilation * i for r in range(rows) for i in range(below.taps)})
    columns = one.taps // (below.taps if below is not None else 1)
    ports = mach.load_ports
    loads = columns * lines * vectors * _accesses(lanes * one.statement.accumulator.bytes, ports) * len(one.planes)
    scalars = one.taps if one.body.dtype and len(one.statement.reads_tensors) > len(one.planes) else 0
    extreme = one.statement.combine in (Combine.MAX, Combine.MIN)
    joined = costs.minmax_cycles if extreme else costs.accumulate_fma_ratio * lanes / mach.fma_per_cycle
    work = one.taps * rows * vectors * joined
    each = max(work, loads / ports + scalars / LOAD_PORTS) + costs.imperfect_overlap * min(work, loads / ports)
    runs = math.prod(d.block for d in found.dims[:-2])
    return runs * found.run_steps * (each + rows * vectors + costs.step_cycles)


def _accesses(vector_bytes: int, ports: float) -> float:
    """Return L1 accesses of an unaligned vector, in those of an aligned one.

    A port's load crosses lines in proportion to its length. Two ports that load less than two vectors per cycle load
    parts.
    """
    return 1.0 + vector_bytes * min(1.0, ports / LOAD_PORTS) / LINE_BYTES


def line_cycles(mach: Machine, found: PlaneLayout) -> float:
    """Return cycles of outputs from accumulators to memory."""
    width, costs = found.dims[-1].block, mach.costs.window
    lines = math.prod(_mean(d.window_dim.extent, d.block) for d in found.dims[:-1])
    return lines * (costs.line_cycles + costs.staging_cycles * _vector_equivalents(mach, line_vectors(width, mach.unit.shape[-1])))


def vector_registers(p: Workload[Any], space: PlaneSpace, thread: Tile) -> int:
    """Return accumulators, the current staged vectors, and the weights of one column of taps."""
    last = space.first + len(space.axes) - 1
    rows = thread[last - 1] if len(space.axes) > 1 else 1
    vectors = thread[last] // p.machine.unit.shape[-1]
    return rows * vectors + max(len(s.planes) for s in space.reductions) * vectors + 2
