"""The cost of reductions over windows on a CPU: staging, taps, results, memory, all terms summed."""

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
from roller_svc.families.cpu.window.workload import Dimension, PlaneLayout, PlaneSpace, Tile, WindowedSum, layout
from roller_svc.ir.program import Combine
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.machine import LOAD_PORTS, Machine
from roller_svc.perf.workload import Workload


def window_cost(p: Workload[PlaneSpace], launch: Launch) -> Costs:
    """Cycles of the core with the most tasks, overlapped in part with what memory moves."""
    mach, space = p.machine, p.facts
    costs = mach.costs.window
    planes = math.prod(_mean(a.extent, b) for a, b in zip(space.leading, launch.block, strict=False))
    cycles = [0.0, 0.0, 0.0, 0.0]
    again = 0.0
    for one in space.reductions:
        found = layout(space, one, launch.block, launch.thread)
        fill = found.elements / mach.unit.shape[-1] * len(one.planes)
        again += 2 * planes * sum(found.elements * plane.dtype.bytes for plane in one.planes)  # there and back
        parts = (staging_cycles(mach, one, found), tap_cycles(mach, one, found), line_cycles(mach, found))
        cycles = [c + planes * part for c, part in zip(cycles, (*parts, 0.0), strict=True)]
        cycles[3] += fill + costs.task_cycles
    waves = -(-launch.grid // mach.cores)
    seconds = [mach.seconds(c * waves) for c in cycles]
    staged = staged_bytes(space, launch.block, launch.thread)
    # what is staged and what it is staged from take room side by side
    memory = _memory_s(p, launch) + again * waves * private_seconds_per_byte(mach, 2 * staged)
    # while a band is computed, memory moves only what was asked for of the next one when the last line was staged
    exposed = max(0.0, sum(seconds[1:]) - min(1.0, costs.prefetch_distance_bytes / staged) * memory)
    beside = sum(seconds) - exposed
    return Costs(
        core_s=max(beside, memory) + costs.imperfect_memory_overlap * min(beside, memory) + exposed,
        core_stage=None,
        stage_seconds=(
            ("staging", seconds[0]), ("compute", seconds[1]), ("results", seconds[2]), ("task", seconds[3]),
            (dominant_level(p, launch), memory),
        ),
        occupancy=min(1.0, launch.grid / (waves * mach.cores)),
        waves=waves,
    )  # fmt: skip


def _memory_s(p: Workload[Any], launch: Launch) -> float:
    """Everything once; and, from the cache that held the task before, lines that neighbouring tasks share."""
    mach, reads = p.machine, p.footprint.reads
    clipped = tuple([min(b, e) for b, e in zip(launch.block, p.extents, strict=True)])
    once = sum(transfer_s(p, t, clipped, launch.grid) for t in p.footprint.accesses)
    shared = reread_ratio(reads, launch.grid, clipped, p.extents) - 1
    shared *= sum(t.transferred_bytes(p.extents) for t in reads) / min(launch.grid, mach.cores)
    return once + shared * private_seconds_per_byte(mach, p.footprint.bytes(clipped))


def staging_cycles(mach: Machine, one: WindowedSum, found: PlaneLayout) -> float:
    """Copying one plane: what is inside, line by line, in as many parts as the last dimension has phases. What is
    computed on the way, quotients above all, has units of its own, which work beside loads, shuffles and stores."""
    lanes, last, costs = mach.unit.shape[-1], found.dims[-1], mach.costs.window
    cycles = 0.0
    for plane in one.planes:
        lines = math.prod(map(staged_positions, found.dims[:-1], plane.inside[:-1]))
        low, high = plane.inside[-1]
        pieces = line_vectors(-(-min(last.places, high - low) // last.phases), lanes) * last.phases
        each = costs.staging_cycles if last.phases == 1 else costs.shuffle_cycles * min(last.phases, lanes)
        moved, work = _vector_equivalents(mach, pieces) * each, sum(pieces) * work_cycles(mach, plane.work)
        cycles += lines * (costs.line_cycles + max(moved, work) + costs.imperfect_overlap * min(moved, work))
    return cycles


def _mean(extent: int, block: int) -> float:
    """Of what a dimension has, a block's share: the last one may have less than others."""
    return extent / -(-extent // block)


def staged_positions(dim: Dimension, inside: tuple[int, int]) -> float:
    """Places of a band that are staged, on average: the first bands and the last ones reach beyond what is inside."""
    low, high = inside
    bands, step = -(-dim.window_dim.extent // dim.block), dim.block * dim.window_dim.stride
    beyond = _falling_sum(low, step) + _falling_sum((bands - 1) * step + dim.places - high, step)
    return max(0.0, dim.places - beyond / bands)


def _falling_sum(first: int, step: int) -> int:
    """first + (first - step) + (first - 2 step) + ..., as far as that is positive."""
    terms = max(0, -(-first // step))
    return terms * first - step * terms * (terms - 1) // 2


def line_vectors(elements: int, lanes: int) -> tuple[float, ...]:
    """A line's vectors, in parts of whole ones: after these, or the longest power of two where there is none, one as
    short a power of two as covers what is left."""
    longest = min(lanes, 1 << max(0, elements.bit_length() - 1))
    whole, left = divmod(elements, longest)
    return (longest / lanes,) * whole + (((1 << (left - 1).bit_length()) / lanes,) if left else ())


def _vector_equivalents(mach: Machine, pieces: tuple[float, ...]) -> float:
    """Whole vectors that take as long: half of one moves half as much and lies across two lines of the cache half as
    often, where one of 64 bytes nearly always does (half of that takes a third of its time on Zen 4)."""
    across = mach.hw.vector_bytes / LINE_BYTES
    return sum([piece * (1 + across * piece) / (1 + across) for piece in pieces])


def tap_cycles(mach: Machine, one: WindowedSum, found: PlaneLayout) -> float:
    """The run over one plane: operations against loads, those of unaligned vectors counted by lines of memory; a port
    loads a weight a cycle, however much of a vector it loads."""
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
    """Of the first cache for an unaligned vector, in those of an aligned one: what a port loads at once lies across two
    lines as often as it is long beside one. Two ports that load less than two vectors a cycle load parts of them."""
    return 1.0 + vector_bytes * min(1.0, ports / LOAD_PORTS) / LINE_BYTES


def line_cycles(mach: Machine, found: PlaneLayout) -> float:
    """Results from the run to where they belong."""
    width, costs = found.dims[-1].block, mach.costs.window
    lines = math.prod(_mean(d.window_dim.extent, d.block) for d in found.dims[:-1])
    return lines * (
        costs.line_cycles + costs.staging_cycles * _vector_equivalents(mach, line_vectors(width, mach.unit.shape[-1]))
    )


def staged_bytes(space: PlaneSpace, block: Tile, thread: Tile) -> int:
    """Private memory of a task: staged planes and totals."""
    total = 0
    for one in space.reductions:
        found = layout(space, one, block, thread)
        run = found.rows * found.run_steps * found.width
        total += run * one.statement.accumulator.bytes
        total += sum(found.elements * plane.dtype.bytes for plane in one.planes)
    return total


def vector_registers(p: Workload[Any], space: PlaneSpace, thread: Tile) -> int:
    """Totals, the staged vectors at hand, and the weights of one column of taps where there is room."""
    last = space.first + len(space.axes) - 1
    rows = thread[last - 1] if len(space.axes) > 1 else 1
    vectors = thread[last] // p.machine.unit.shape[-1]
    return rows * vectors + max(len(s.planes) for s in space.reductions) * vectors + 2
