"""Cost of a GEMM on a CPU: packing, micro-kernel, C update and edges, all summed.

How well the sum ranks measured plans: `docs/model.md`, "CPUs".
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.construct.rules import extent_on
from roller_svc.families.common.cpu.memory import (
    L1_PANEL_FRACTION,
    PAGE_BYTES,
    prefetch_rampup_cycles,
    private_bandwidth,
    private_seconds_per_byte,
)
from roller_svc.families.common.cpu.micro_kernel_cost import (
    _fma_ports,
    _load_cycles,
    gather_cycles,
    kernel_cycles,
    smallest_cache,
    source_bandwidth,
)
from roller_svc.families.common.cpu.task_costs import MANY_TASKS_PER_CORE, count_waves, sum_task_costs
from roller_svc.families.cpu.contraction.blocking import Blocking, count_l1_ways, lines_per_set, plan_blocking
from roller_svc.families.cpu.contraction.workload import ContractionFacts, CpuOperand, OperandLayout, count_members
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import Machine
from roller_svc.perf.workload import OperandFootprint, Workload

LOOP_OPERATIONS = 3  # per k: a pointer, a counter, a branch
MIN_SEGMENT_BYTES = 256  # prefetchers follow a stream over gaps of a few lines
# Vendors whose L1 prefetchers follow a panel. Intel's fetch the next line only.
L1_PREFETCH_VENDORS = frozenset({"amd"})


@dataclass(frozen=True, slots=True)
class _Sizes:
    """A task's tile of C, rows x columns, as far as it is inside of C; and how it is blocked."""

    rows: int
    columns: int
    plan: Blocking
    parts_of_k: tuple[float, float, float]  # of a register tile and a task in the mean, and of the longest task


def cpu_contraction(p: Workload[ContractionFacts], launch: Launch) -> Costs:
    """Return the cost of the core with the most tasks: micro-kernel, C update, packing, store and edges."""
    mach, costs = p.machine, p.machine.costs.contraction
    sizes = _sizes(p, launch)
    kernel = _kernel(p, sizes)
    update = _update(p, sizes)
    packing = sizes.plan.steps * sizes.parts_of_k[1] * _packing(p, launch, sizes)
    store = _store(p, sizes)
    average = p.outer_points / (sizes.rows * sizes.columns) / launch.grid  # of a whole tile: those at edges are smaller
    is_even = launch.grid >= MANY_TASKS_PER_CORE * mach.cores
    busy = average * launch.grid / mach.cores if is_even else max(1.0, count_waves(p, launch) * average)
    _, left, longest = sizes.parts_of_k
    busy = max(busy, longest / left)
    parts = {"compute": kernel, "update": update, "packing": packing, "task": store + mach.costs.task_cycles}
    others = p.compulsory_bytes - (p.b.total_bytes if p.b.is_constant else 0)
    moved = others + (_panel_bytes(p, sizes.plan) if p.b.is_constant else 0)  # as they are packed
    apart = others if sizes.plan.streams_b else moved  # panels that stream are part of the kernel's time
    memory = apart / source_bandwidth(mach, moved)
    found = smallest_cache(mach, moved)
    level = mach.dram.name if found is None else found.name
    return sum_task_costs(p, launch, parts, busy, memory, costs.memory_exposed_fraction, level, apart)


def _sizes(p: Workload[ContractionFacts], launch: Launch) -> _Sizes:
    rows, columns = (min(extent_on(launch.block, axis), p.extent(axis)) for axis in (p.m, p.n))
    plan = plan_blocking(p, launch.block, launch.thread, launch.split_k)
    return _Sizes(rows, columns, plan, _parts_of_k(p, launch))


def _parts_of_k(p: Workload[ContractionFacts], launch: Launch) -> tuple[float, float, float]:
    """Return the parts of k that a guard leaves to a register tile and to a task in the mean, and to the longest task."""
    depth = p.machine.unit.k_group
    steps = -(-p.extent(p.k) // depth)
    of_tile, of_task = (p.k_tiles(tile, depth, steps) for tile in (launch.thread, launch.block))
    return of_tile.mean / steps, of_task.mean / steps, of_task.longest / steps


def _cut(extent: int, tile: int) -> tuple[tuple[int, int], ...]:
    """Return (size, count) of the tiles of an axis, the last one smaller."""
    whole, tail = divmod(extent, tile)
    return tuple((size, count) for size, count in ((tile, whole), (tail, 1)) if size and count)


def _kernel(p: Workload[ContractionFacts], s: _Sizes) -> float:
    """Return micro-kernel cycles, with panels from where they are stored.

    B is streamed once per k block and block of A, or A once per k block where L2 holds the panels.
    """
    mach, costs = p.machine, p.machine.costs.contraction
    cycles = tiles_cycles(p, (s.rows, s.columns), s.plan, s.parts_of_k[0])
    if s.plan.streams_b:
        return max(cycles, _panels_arrival_cycles(p, s))
    at_once = s.plan.block_rows
    is_prefetched = False
    if s.plan.packs_b_on_first_use:
        streamed, sweeps = s.rows * s.plan.kc * p.elem_bytes, float(-(-s.columns // s.plan.nr))
    elif s.plan.rows_outer:
        streamed, sweeps = at_once * s.plan.kc * p.elem_bytes, s.rows / at_once
        cycles += s.plan.steps * max(0.0, sweeps - 1) * _reload_cycles(p, s, at_once)
    else:
        streamed, sweeps, is_prefetched = s.columns * s.plan.kc * p.elem_bytes, float(-(-s.rows // at_once)), True
    arrival = s.plan.steps * sweeps * streamed / (private_bandwidth(mach, streamed) / mach.clock_hz)
    if is_prefetched and streamed > _l2_bytes(p) // 2:
        arrival = s.plan.steps * sweeps * streamed * sum(_spill_cycles_per_byte(p, s))
    if is_prefetched:  # a part of the next panel with every k
        arrival *= min(1.0, arrival / (costs.prefetch_hidden_fraction * cycles))
    cycles += costs.llc_exposed_fraction * arrival
    return max(cycles, _panels_arrival_cycles(p, s)) if p.b.is_constant else cycles


def _panels_arrival_cycles(p: Workload[ContractionFacts], s: _Sizes) -> float:
    """Return cycles in which prepacked panels of B arrive, once for a task, from where all of them are."""
    packed = s.plan.depth * _bytes_per_point(p, s.plan)  # of a column
    working_set = p.compulsory_bytes - p.b.total_bytes + _panel_bytes(p, s.plan)
    arrival = s.columns * packed * private_seconds_per_byte(p.machine, working_set) * p.machine.clock_hz
    return arrival / _rows_used(p, s)


def _panel_bytes(p: Workload[ContractionFacts], plan: Blocking) -> int:
    """Return the bytes of all panels of B."""
    batches = math.prod(p.extents[axis] for axis in p.b.axes if axis not in (p.n, p.k))
    return math.ceil(batches * p.extent(p.n) * plan.depth * _bytes_per_point(p, plan))


def _bytes_per_point(p: Workload[ContractionFacts], plan: Blocking) -> float:
    """Return the bytes that a column of B has in its panel for each k."""
    if plan.has_packed_words and p.facts.packed_words is not None:
        return p.elem_bytes / p.facts.packed_words.words
    return p.facts.packed_b.bytes_per_point if plan.column_run and p.facts.packed_b is not None else p.elem_bytes


def _unpacking_cycles(p: Workload[ContractionFacts], vectors: int, plan: Blocking) -> float:
    """Return cycles in which the micro-kernel computes a row of B from its integers."""
    if plan.has_packed_words and p.facts.packed_words is not None:
        return vectors * p.facts.packed_words.operations * p.machine.costs.loops.operation_cycles
    if not plan.column_run or p.facts.packed_b is None:
        return 0.0
    return vectors * p.facts.packed_b.vector_operations(p.machine.unit.shape[-1]) * p.machine.costs.loops.operation_cycles


def _reload_cycles(p: Workload[ContractionFacts], s: _Sizes, at_once: int) -> float:
    """Return cycles to reload B's block from the LLC, as far as rows of A evict it from L2."""
    if not s.plan.packs_a:
        return 0.0
    mach, row = p.machine, s.plan.kc * p.elem_bytes
    working_set = s.columns * row + 2 * at_once * row + at_once * s.columns * p.elem_bytes
    lost = 1.0 - mach.costs.memory.hit_rate(_l2_bytes(p), working_set)
    return lost * s.columns * row / (mach.caches[0].bytes_per_s / mach.cores / mach.clock_hz)


def _rows_used(p: Workload[ContractionFacts], s: _Sizes) -> float:
    """Return the mean share of a block's rows that exist: B arrives whole for the last block, too."""
    rows = p.extent(p.m)
    return rows / (-(-rows // s.rows) * s.rows)


def _l2_bytes(p: Workload[ContractionFacts]) -> int:
    return p.machine.hw.block_level.capacity_bytes


def tiles_cycles(p: Workload[ContractionFacts], extents: tuple[int, int], plan: Blocking, part: float = 1.0) -> float:
    """Return micro-kernel cycles for rows x columns of C over a part of k, with smaller register tiles at the edges."""
    lanes, costs = p.machine.unit.shape[-1], p.machine.costs.contraction
    sums = plan.steps * plan.runs  # that a register tile begins
    cycles, step = 0.0, -(-plan.depth // sums)
    for height, down in _cut(extents[0], plan.mr):
        for width, across in _cut(extents[1], plan.nr):
            vectors = -(-width // lanes)
            each = kernel_cycles(p.machine, height, vectors)
            each = max(each, height * vectors / _fma_ports(p.machine) + _unpacking_cycles(p, vectors, plan))
            each -= _tile_overlap_cycles(p.machine, height, vectors, step) / step
            each += costs.load_cycles * _port_contention(p.machine, height, vectors, each)
            from_l2 = _l2_bytes_per_k(p, extents, (height, width), plan) / p.machine.l2_bytes_per_cycle
            exposed = 0.0 if p.machine.hw.vendor in L1_PREFETCH_VENDORS else costs.l2_exposed_fraction
            each = max(each + exposed * from_l2, from_l2 / costs.l2_bandwidth_under_compute)
            call = _call_cycles(p.machine, (height * vectors + height + vectors) / each, step * each)
            call += max(0.0, p.machine.store_cycles * height * vectors - costs.hidden_store_cycles)
            call += _scaling_cycles(p, height, vectors)
            cycles += down * across * (sums * call + part * plan.depth * each)
    return cycles


def _scaling_cycles(p: Workload[ContractionFacts], height: int, vectors: int) -> float:
    """Return cycles to scale the sums of a register tile, and to add them to its totals, which are in L1."""
    if p.space.scale_runs is None:
        return 0.0
    operations = 2 if p.space.scale_runs.sum_dtype.is_float else 3  # a product, a multiply-add, a conversion
    return height * vectors * (operations / _fma_ports(p.machine) + 1 / p.machine.load_ports)


def _call_cycles(mach: Machine, rate: float, last: float) -> float:
    """Return a call's overhead, less what overlaps with operations of the last call in the reorder buffer.

    At a low `rate` of operations per cycle these last long and leave free issue slots: on Zen 4 all of the overhead is
    hidden.
    """
    costs = mach.costs.contraction
    overlap = min(last, mach.rob_ratio * costs.rob_entries / rate)
    hidden = max(0.0, 1.0 - rate / (mach.issue_width_ratio * costs.spare_issue_slots)) * overlap
    return costs.call_cycles / (1.0 + (hidden / costs.call_cycles) ** 2)


def _port_contention(mach: Machine, height: int, vectors: int, each: float) -> float:
    """Return the loads per k that find no free issue slot next to the multiply-adds."""
    return max(
        0.0,
        height * vectors + height + vectors - mach.issue_width_ratio * mach.costs.contraction.spare_issue_slots * each,
    )


def _tile_overlap_cycles(mach: Machine, height: int, vectors: int, depth: int) -> float:
    """Return the cycles in which the next register tile already runs, being independent of this one.

    While few accumulators are in flight, the reorder buffer reaches into the next tile. No more than the free FMA
    slots.
    """
    busy = height * vectors / _fma_ports(mach)
    rob_depth = mach.rob_ratio * mach.costs.contraction.rob_entries / (height * vectors + vectors + LOOP_OPERATIONS)
    latency = kernel_cycles(mach, height, vectors)
    free = min(1.0, latency / max(busy, _load_cycles(mach, height, vectors)) - 1.0)
    return latency * min(rob_depth, depth / 2) * free


def _l2_bytes_per_k(p: Workload[ContractionFacts], extents: tuple[int, int], tile: tuple[int, int], plan: Blocking) -> float:
    """Return the bytes that each k of a register tile reads from L2.

    One operand's panel is reused while panels of the other stream by. L1 holds those only where all are small; next to
    long ones it does not retain the reused panel either.
    """
    (rows, columns), (height, width) = extents, tile
    row = -(-plan.depth // plan.steps) * p.elem_bytes
    reused, streamed, block = (width, height, rows)
    if plan.rows_outer:
        reused, streamed, block = (height, width, columns)
    reload, load = _l1_miss_fraction(p, (height + width) * row), _l1_miss_fraction(p, (reused + block) * row)
    return (reload * reused + load * streamed) * p.elem_bytes


def _l1_miss_fraction(p: Workload[ContractionFacts], working_set_bytes: int) -> float:
    """Return the fraction of a repeated working set that comes from L2."""
    capacity = L1_PANEL_FRACTION * p.machine.caches[-1].bytes_per_core
    return min(1.0, max(0.0, working_set_bytes / capacity - 1.0))


def _update(p: Workload[ContractionFacts], s: _Sizes) -> float:
    """Return cycles of C: to memory, most of it overlapped; between k blocks to the cache that holds the tile."""
    mach, costs = p.machine, p.machine.costs.contraction
    vectors = s.rows * -(-s.columns // mach.unit.shape[-1])
    tile_bytes = s.rows * s.columns * p.elem_bytes
    if s.plan.steps == 1:
        all_of_it = source_bandwidth(mach, p.outer_points * p.elem_bytes) / mach.cores / mach.clock_hz
        return costs.output_exposed_fraction * 2 * tile_bytes / all_of_it
    between = tile_bytes + (s.rows + s.columns) * s.plan.kc * p.elem_bytes  # working set of a k block
    return s.plan.steps * (
        vectors + costs.llc_exposed_fraction * 2 * tile_bytes / (private_bandwidth(mach, between) / mach.clock_hz)
    )


def _packing(p: Workload[ContractionFacts], launch: Launch, s: _Sizes) -> float:
    """Return cycles to pack one k block of A and B.

    Unpacked A comes from memory all the same, partly overlapped: hardware prefetchers follow its rows.
    """
    costs = p.machine.costs.contraction
    if s.plan.streams_b:
        b = 0.0  # `_kernel` has the time in which it arrives
    else:
        b = packing_cycles(p, p.b, p.facts.b, launch.block, (p.n, s.plan.nr)) + _panel_spill_cycles(p, s)
    b += costs.gather_cycles * s.plan.runs * sum(_scaled_extents(p, s))
    if s.plan.packs_b_on_first_use:
        b = max(b - tiles_cycles(p, (min(s.plan.mr, s.rows), s.columns), s.plan), costs.exposed_packing_fraction * b)
    if not s.plan.packs_a:
        slower = costs.set_conflict_factor if has_set_conflicts(p, s.plan.mr) else 1.0
        begun = _segment_start_cycles(p, p.a, launch.block, launch.block) / s.plan.mr  # in parallel
        return b + costs.llc_exposed_fraction * _arrival_cycles(p, p.a, launch.block, launch.block) * slower + begun
    return b + packing_cycles(p, p.a, p.facts.a, launch.block, (p.m, s.plan.mr))


def _scaled_extents(p: Workload[ContractionFacts], s: _Sizes) -> list[int]:
    """Return the rows or columns of a task for each tensor of scales that is packed in every call."""
    if p.space.scale_runs is None:
        return []
    packed = (tensor for tensor in p.epilogue.tensors if tensor.varies_with_reduction and not tensor.access.constant)
    return [s.columns if p.n in tensor.axes else s.rows for tensor in packed]


def _panel_spill_cycles(p: Workload[ContractionFacts], s: _Sizes) -> float:
    """Return cycles of packed panels of B to the LLC and back, as far as they do not fit in L2."""
    if p.b.is_constant or s.plan.packs_b_on_first_use:
        return 0.0
    mach, block = p.machine, s.columns * s.plan.kc * p.elem_bytes
    lost = block * (1.0 - mach.costs.memory.hit_rate(_l2_bytes(p), 2 * block))
    to_cache, to_memory = _spill_cycles_per_byte(p, s)
    to_llc = mach.costs.contraction.llc_exposed_fraction * (2.0 if s.plan.rows_outer else 1.0) * to_cache
    return lost * (to_llc + 2 * to_memory)  # read for ownership


def _spill_cycles_per_byte(p: Workload[ContractionFacts], s: _Sizes) -> tuple[float, float]:
    """Return cycles per byte of panels of B outside L2: (in the LLC, in memory)."""
    mach, working_set = p.machine, (2 * s.plan.kc + s.rows) * s.columns * p.elem_bytes
    last, cycles = mach.caches[0], mach.cores * mach.clock_hz
    hit_rate = mach.costs.memory.hit_rate(last.bytes_per_core, working_set, is_last=True)
    return hit_rate / last.bytes_per_s * cycles, (1 - hit_rate) / mach.dram.bandwidth_bytes_per_s * cycles


def has_set_conflicts(p: Workload[ContractionFacts], mr: int) -> bool:
    """Return whether unpacked rows of A evict each other from L1: one page apart, one set."""
    return lines_per_set(mr, p.facts.a.panel_stride * p.elem_bytes) > count_l1_ways(p.machine.hw)


def _store(p: Workload[ContractionFacts], s: _Sizes) -> float:
    lanes, costs = p.machine.unit.shape[-1], p.machine.costs.contraction
    each = 2.0 * -(-s.columns // lanes)
    if count_members(p, p.n) > 1:
        across = _row_crossing_fraction(p, p.n, s.plan.nr)
        each = across * costs.scatter_cycles * s.columns + (1 - across) * each
    # scales of runs of k are packed
    tensors = sum(p.space.scale_runs is None or not tensor.varies_with_reduction for tensor in p.epilogue.tensors)
    gathers = 0.0 if p.n is None else gather_cycles(p, p.n)
    if tensors > 1 or gathers or count_members(p, p.n) > 1 or count_members(p, p.m) > 1:
        return s.rows * (each * max(1, tensors) + gathers * s.columns)
    edge = s.columns % s.plan.nr
    return s.plan.steps * s.rows * costs.edge_cycles * -(-edge // lanes) if edge % lanes else 0.0


def packing_cycles(
    p: Workload[ContractionFacts],
    operand: OperandFootprint,
    memory: CpuOperand,
    block: Tile,
    panel: tuple[int | None, int],
) -> float:
    """Return cycles to pack a block of an operand. `panel`: the axis of a panel, and its size.

    Vectors along the panel, transposed vectors, or single elements, as words of guarded elements take. Panels of a
    constant are prepacked and only loaded.
    """
    costs, (panel_axis, size) = p.machine.costs.contraction, panel
    if operand.is_constant:
        return costs.llc_exposed_fraction * operand.requested_bytes(block) / _source_bandwidth_of(p, operand)
    lanes = p.machine.unit.shape[-1]
    along, deep = extent_on(block, panel_axis), extent_on(block, p.k)
    panels = -(-along // size)
    cycles = 0.0
    for tensor in operand.tensors:
        windows = sum(len(dim.dim.coeffs) > 1 for dim in tensor.dims)
        looked_up = (costs.lookup_cycles + costs.window_cycles * windows) * along * deep
        match memory.layout:
            case _ if p.facts.dot is not None and memory.guards_fused_k:
                cycles += looked_up
            case OperandLayout.PANEL_MAJOR:
                cycles += costs.copy_cycles * panels * _vectors(size, lanes) * deep
            case OperandLayout.K_MAJOR:
                vectors = sum(-(-min(lanes, size - first) // 4) * 4 + lanes for first in range(0, size, lanes))
                cycles += costs.transpose_cycles / 2 * panels * vectors * -(-p.packed_words(deep) // lanes)
            case OperandLayout.STRIDED if count_members(p, panel_axis) > 1:
                across = _row_crossing_fraction(p, panel_axis, size)
                inside = panels * deep * costs.copy_cycles * _vectors(size, lanes)
                if panel_axis is None or tensor.strides.get(panel_axis) != 1:
                    inside = costs.gather_cycles * along * deep
                cycles += across * looked_up + (1 - across) * inside
            case OperandLayout.STRIDED:
                cycles += costs.gather_cycles * along * deep
    streamed = _streamed_tile(p, operand, block, panel)
    return cycles + _arrival_cycles(p, operand, block, streamed) + _segment_start_cycles(p, operand, block, streamed)


def _streamed_tile(p: Workload[ContractionFacts], operand: OperandFootprint, block: Tile, panel: tuple[int | None, int]) -> Tile:
    """Return what is read row by row: a whole block, or single panels of fused axes beyond the LLC."""
    axis, size = panel
    if axis is None or count_members(p, axis) == 1 or operand.total_bytes <= p.machine.caches[0].total_bytes // 2:
        return block
    return (*block[:axis], min(size, block[axis]), *block[axis + 1 :])


def _vectors(size: int, lanes: int) -> int:
    """Return the vectors that copy a row of a panel: whole ones, then ever shorter ones."""
    return size // lanes + (size % lanes).bit_count()


def _row_crossing_fraction(p: Workload[ContractionFacts], panel_axis: int | None, size: int) -> float:
    """Return the fraction of panels that span several rows of the innermost of fused axes."""
    members = () if panel_axis is None else p.space.axes[panel_axis].members
    if not members or members[-1].extent < size:
        return 1.0
    return min(1.0, (size - math.gcd(size, members[-1].extent)) / members[-1].extent)


def _arrival_cycles(p: Workload[ContractionFacts], operand: OperandFootprint, block: Tile, accessed: Tile) -> float:
    """Return cycles for one block of an operand to arrive, segment by segment of the `accessed` tile.

    Gaps of less than a few lines do not end a segment.
    """
    moved = sum(tensor.transferred_bytes(block) for tensor in operand.tensors)
    runs = sum(tensor.elements(block) / tensor.contiguous_elements(accessed) for tensor in operand.tensors)
    runs = min(runs, moved / MIN_SEGMENT_BYTES)
    return moved / _source_bandwidth_of(p, operand) + p.machine.costs.contraction.segment_start_cycles * runs


def _segment_start_cycles(p: Workload[ContractionFacts], operand: OperandFootprint, block: Tile, accessed: Tile) -> float:
    """Return exposed start-up cycles of segments in memory or a far cache.

    Segments of a page or more wait until prefetchers follow them; short ones wait less, since others are in flight.
    """
    runs = [
        (tensor.elements(block) / tensor.contiguous_elements(accessed), tensor.contiguous_elements(accessed))
        for tensor in operand.tensors
    ]
    alone = sum(count * min(1.0, run * operand.elem_bytes / PAGE_BYTES) for count, run in runs)
    return alone * prefetch_rampup_cycles(p.machine, smallest_cache(p.machine, operand.total_bytes))


def _source_bandwidth_of(p: Workload[ContractionFacts], operand: OperandFootprint) -> float:
    """Return the bytes per cycle for one core from the level that holds the operand."""
    return source_bandwidth(p.machine, operand.total_bytes) / p.machine.cores / p.machine.clock_hz
