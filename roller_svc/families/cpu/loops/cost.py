"""Cost of a loop nest on a CPU: operations and loads of its statements, overlapped with memory."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from roller_svc.analysis.lookup_tables import BYTE_ENTRIES, MIN_SHUFFLED_BYTES, SHUFFLED_BYTES, SHUFFLES_OF_TABLE
from roller_svc.families.common.cpu.column_reduction import (
    ReductionStep,
    accumulator_bytes,
    columns_per_block,
    is_column_reduction,
    keeps_columns_in_registers,
    reduction_step,
)
from roller_svc.families.common.cpu.memory import (
    LINE_BYTES,
    PAGE_BYTES,
    TEST_OPERATIONS,
    count_4k_aliasing,
    dominant_level,
    dram_fraction,
    exposed_nontemporal_s,
    nontemporal_fraction,
    nontemporal_write_s,
    private_seconds_per_byte,
    reread_ratio,
    transfer_by_level_s,
    transfer_s,
)
from roller_svc.families.common.cpu.op_counts import OpCounts, StatementWork, alu_cycles, work_cycles
from roller_svc.families.common.cpu.shared_rows import shared_axis
from roller_svc.families.common.cpu.task_costs import count_waves, make_costs
from roller_svc.families.cpu.loops.workload import LoopFacts
from roller_svc.ir.group import AxisRole
from roller_svc.ir.program import Combine
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.cpu_costs import LoopCosts
from roller_svc.perf.footprint import AccessFootprint, Tile
from roller_svc.perf.machine import ROB_ENTRIES
from roller_svc.perf.workload import Workload

MAX_PREFETCHED_LINES = 48.0  # in flight, up to which prefetchers are ahead of a core
COPY_LINES_IN_FLIGHT = 128.0  # of a copy: a load, a store and a part of an iteration for each
# Instructions of an iteration in addition to its work, of min or max, of a polynomial.
LOOP_OPERATIONS, MINMAX_OPERATIONS, FUNCTION_OPERATIONS = 2, 3, 17
MAX_TABLES = 2  # vectors that hold a tensor whose elements data chooses
_MINMAX_COMBINES = frozenset({Combine.MAX, Combine.MIN})


def cpu_loop_cost(p: Workload[LoopFacts], launch: Launch) -> Costs:
    """Return the operations, loads and tasks of the busiest core, overlapped with memory."""
    mach, costs = p.machine, p.machine.costs.loops
    statements = p.facts.statements or (StatementWork(p.outer_points * p.inner_points, _unknown_op_counts(p), None, frozenset()),)
    share = max(count_waves(p, launch) / launch.grid, 1 / mach.cores)  # of all tasks, those of the core with the most
    steps = _steps(p, launch, statements)
    compute, loads, again = (mach.seconds(share * sum(part)) for part in zip(*(s.cycles for s in steps), strict=True))
    aliasing = count_4k_aliasing(p, launch.block) if launch.pipeline.nontemporal else 0.0
    waits = mach.seconds(share * costs.alias_4k_cycles * aliasing)
    task = mach.seconds(share * launch.grid * mach.costs.task_cycles)
    memory = sum(s.memory_s for s in steps)
    joint = _overlap(costs, compute + loads + again + waits, memory)
    apart = sum(_overlap(costs, mach.seconds(share * sum(s.cycles)), s.apart_s) for s in steps)
    prefetched = _prefetched_fraction(p, launch)
    moving = prefetched * memory + (1 - prefetched) * sum(s.apart_s for s in steps)
    core_s = prefetched * joint + (1 - prefetched) * max(joint, apart) + task
    stages = {"compute": compute, "loads": loads + waits, "again": again, "task": task}
    moved = _rereads(p, launch) * sum(t.transferred_bytes(p.extents) for t in p.footprint.reads)
    moved += sum(t.transferred_bytes(p.extents) for t in p.footprint.writes)
    return make_costs(p, launch, core_s, stages, (dominant_level(p, launch), moving), moved)


@dataclass(frozen=True, slots=True)
class _StatementCost:
    """Cost of one statement."""

    cycles: tuple[float, float, float]  # of operations, of loads, of rereads
    memory_s: float  # memory time of tensors that it accesses first, overlapped with other statements
    apart_s: float  # the same without that overlap


def _steps(p: Workload[LoopFacts], launch: Launch, statements: tuple[StatementWork, ...]) -> list[_StatementCost]:
    each = _reread_cycles_per_byte(p, launch)
    moving = _transfer_s(p, launch, under_reads=True)
    moving_apart = _transfer_s(p, launch, under_reads=False) if launch.pipeline.nontemporal else moving
    known: set[str] = set()
    steps = []
    for one in statements:
        mine = [t for t in p.footprint.accesses if t.access.tensor in one.tensors or not one.tensors]
        again = sum(t.bytes(p.extents) for t in mine if t.access.tensor in known and t.varies_with_reduction)
        first = frozenset(t.access.tensor for t in mine) - known
        memory, apart = (sum(s for tensor, s in some if tensor in first) for some in (moving, moving_apart))
        known |= first
        sequential = _reads_rows_sequentially(p, launch, one, first)
        loads = _load_cycles(p, launch, one, sequential=sequential) - _stall_cycles(p, launch, one, sequential=sequential)
        busy = _statement_cycles(p, launch, one, sequential=sequential) + _first_lines_cycles(p, launch, one, first)
        rereads = again * each + _swept_again_cycles(p, launch, mine)
        steps.append(_StatementCost((busy, max(0.0, loads), rereads), memory, apart))
    return steps


def _overlap(costs: LoopCosts, core_s: float, memory_s: float) -> float:
    """Return the seconds of core work and memory that overlap imperfectly."""
    return max(core_s, memory_s) + costs.imperfect_overlap * min(core_s, memory_s)


def _prefetched_fraction(p: Workload[LoopFacts], launch: Launch) -> float:
    """Return the fraction of a row that memory moves while the core still processes the row before.

    With several statements per row, only the software-prefetched part of the next row moves during the later ones.
    Never the whole row: each statement needs the reduction of the one before.
    """
    if _num_row_statements(p) < 2 or not p.space.reduces_rows:
        return 1.0
    costs = p.machine.costs.loops
    return min(1.0, costs.max_prefetched_fraction, costs.prefetch_distance_bytes / max(1, _row_bytes(p, launch)))


def _num_row_statements(p: Workload[LoopFacts]) -> int:
    """Return the number of statements over rows; others have one value per row, such as a mean."""
    return sum(one.points > p.outer_points for one in p.facts.statements)


def _row_bytes(p: Workload[LoopFacts], launch: Launch) -> int:
    """Return the bytes of the rows that all statements process before the next ones."""
    rows = _resident_tile(p, launch)
    return max((t.bytes(rows) for t in p.footprint.reads if t.varies_with_reduction), default=0)


def _resident_tile(p: Workload[LoopFacts], launch: Launch) -> Tile:
    """Return the part of the space that all statements process before the next: rows, or blocks of columns."""
    tile = [p.extents[i] if a.role is AxisRole.INNER else launch.thread[i] for i, a in enumerate(p.space.axes)]
    if p.vector_axis is not None and is_column_reduction(p.space):
        tile[p.vector_axis] = _columns_per_block(p, launch)
    return tuple(tile)


def _points_in_flight(p: Workload[LoopFacts], launch: Launch) -> int:
    """Return the outer points that a thread computes together because they read the same rows."""
    shared = shared_axis(p.space)
    return 1 if shared is None else launch.thread[shared]


def _swept_again_cycles(p: Workload[LoopFacts], launch: Launch, reads: Iterable[AccessFootprint]) -> float:
    """Return cycles in which rows that outer points share are read again, from the cache that holds them meanwhile."""
    shared = shared_axis(p.space)
    if shared is None:
        return 0.0
    sweeps = -(-p.extents[shared] // launch.thread[shared]) - 1
    rows = sum(t.bytes(p.extents) for t in reads if shared not in t.axes and t.varies_with_reduction and not t.access.is_output)
    swept = tuple(
        [e if i > shared or a.role is AxisRole.INNER else 1 for i, (e, a) in enumerate(zip(p.extents, p.space.axes, strict=True))]
    )
    return sweeps * rows * private_seconds_per_byte(p.machine, p.footprint.bytes(swept)) * p.machine.clock_hz


def _sums_in_registers(p: Workload[LoopFacts], launch: Launch) -> bool:
    """Return whether a column reduction keeps the sums of its columns in registers, and reads rows in memory order."""
    if p.vector_axis is None or not is_column_reduction(p.space):
        return False
    extent, lanes, mach = p.extents[p.vector_axis], min(launch.thread[p.vector_axis], p.machine.unit.shape[-1]), p.machine
    registers, points = mach.hw.limits.max_registers_per_thread, _points_in_flight(p, launch)
    return keeps_columns_in_registers(extent, _columns_per_block(p, launch), points, lanes, registers)


def _columns_per_block(p: Workload[LoopFacts], launch: Launch) -> int:
    """Return the columns whose accumulators, and derived values, stay in a cache."""
    reductions = sum(one.combine is not None for one in p.facts.statements)
    value_bytes = p.elem_bytes * max(1, reductions) * (2 if len(p.facts.statements) > 1 else 1)
    place = p.vector_axis or 0
    return min(
        p.extents[place],
        columns_per_block(launch.block[place], launch.thread[place], value_bytes, accumulator_bytes(p.space)),
    )


def _unknown_op_counts(p: Workload[LoopFacts]) -> OpCounts:
    """Return the operations of a space whose statements are unknown."""
    return OpCounts(alu=round(p.space.flops / (p.outer_points * p.inner_points)))


def _statement_cycles(p: Workload[LoopFacts], launch: Launch, each: StatementWork, *, sequential: bool) -> float:
    """Return cycles of one statement: operations, or reduction latency; loops; horizontal reduction and tails.

    A scalar function takes about the cycles of a vector of them.
    """
    costs = p.machine.costs.loops
    busy, waiting = _vector_cycles(p, launch, each, sequential=sequential)
    rows, width = p.outer_points, _width(p, launch)
    is_row = each.points > rows
    cycles = each.points * _overhang(p, launch) / width * max(busy, waiting)
    cycles += sum(times * work_cycles(p.machine, counts) for times, counts in each.invariants)
    if _sums_in_registers(p, launch):
        cycles += costs.loop_cycles * each.points / (_columns_per_block(p, launch) * _points_in_flight(p, launch))
    elif is_column_reduction(p.space):
        cycles += costs.startup_cycles * each.points / _reduction_step(p, each).terms / _columns_per_block(p, launch)
    if launch.reduce_threads > 1 and is_row:
        cycles += rows * costs.tail_cycles * (each.points // rows % width)
        if each.combine is not None:
            cycles += rows * _horizontal_cycles(p, launch, each)
    return cycles


def _horizontal_cycles(p: Workload[LoopFacts], launch: Launch, each: StatementWork) -> float:
    """Return the cost of the horizontal reduction of a row.

    If another statement processes the row, its latency is exposed, overlapped across resident rows; otherwise only its
    throughput counts.
    """
    costs, halvings = p.machine.costs.loops, math.log2(launch.reduce_threads)
    if _num_row_statements(p) > 1:
        return costs.horizontal_cycles * halvings / math.prod(launch.thread)
    combine = costs.minmax_cycles if each.combine in _MINMAX_COMBINES else costs.operation_cycles
    return (costs.operation_cycles + combine) * halvings  # a shuffle and its combiner


def _reduction_step(p: Workload[LoopFacts], each: StatementWork) -> ReductionStep:
    """Return what a statement combines per load and store of an accumulator in a column reduction."""
    is_reduction = each.combine is not None and each.points > p.outer_points
    return reduction_step(p.space) if is_reduction and is_column_reduction(p.space) else ReductionStep(1, 1)


def _vector_cycles(p: Workload[LoopFacts], launch: Launch, each: StatementWork, *, sequential: bool) -> tuple[float, float]:
    """Return one statement's cycles per vector: (operations and loop, latency of the reduction chain)."""
    costs, counts = p.machine.costs.loops, each.counts
    width = _width(p, launch)
    rows_at_once = _points_in_flight(p, launch) if launch.reduce_threads > 1 and sequential else math.prod(launch.thread)
    side_by_side = max(1, launch.reduce_threads * rows_at_once // width)
    is_fused = each.adds_product and _sums_in_registers(p, launch)
    adds = (each.combine is Combine.SUM and not is_fused) or each.combine is Combine.PROD
    join = OpCounts(alu=adds, minmax=each.combine in _MINMAX_COMBINES)
    busy = work_cycles(p.machine, counts + join) + costs.operation_cycles * each.guard_operations
    if launch.pipeline.nontemporal and any(_nontemporal_fraction(p, t) < 1 for t in p.footprint.writes):
        busy += TEST_OPERATIONS * costs.operation_cycles
    if _reduction_step(p, each).terms == 1:  # else the loop overlaps with the operations of an iteration
        busy += costs.loop_cycles / side_by_side
    if each.combine is None or each.points <= p.outer_points or is_column_reduction(p.space):
        return busy, 0.0
    latency = costs.minmax_latency_cycles if each.combine in _MINMAX_COMBINES else costs.accumulate_latency_cycles
    # short rows are in flight together: they expose no chain latency
    alone = min(1.0, each.points / (p.outer_points * width * p.machine.rob_ratio * costs.rob_iterations))
    return busy, alone * latency / side_by_side


def _first_lines_cycles(p: Workload[LoopFacts], launch: Launch, each: StatementWork, first: frozenset[str]) -> float:
    """Return exposed misses of the first lines of each block of rows in a column reduction.

    An iteration uses all its rows at once, and the reorder buffer does not reach the next. Rows in memory are on new
    pages; on earlier ones prefetchers are ahead.
    """
    if each.combine is None or not first or not is_column_reduction(p.space) or _sums_in_registers(p, launch):
        return 0.0
    costs, at_once, columns = p.machine.costs.memory, reduction_step(p.space), _columns_per_block(p, launch)
    in_memory = dram_fraction(p.machine, p.compulsory_bytes)
    new_page = min(1.0, columns * p.elem_bytes / PAGE_BYTES)
    waits = new_page * (1 - (1 - in_memory) ** at_once.rows)
    return each.points / (columns * at_once.terms) * waits * costs.tlb_miss_latency_factor * p.machine.dram_latency_cycles


def _reads_rows_sequentially(p: Workload[LoopFacts], launch: Launch, each: StatementWork, first: frozenset[str]) -> bool:
    """Return whether resident rows are read one after another.

    A reduction that accesses them first, each element once, from beyond a core's private caches
    (`cpu/loops/schedule.py`).
    """
    shared = shared_axis(p.space) if _points_in_flight(p, launch) > 1 else None
    wide = {i for i, extent in enumerate(p.extents) if extent > 1 and i != shared}
    mine = [t.bytes(p.extents) for t in p.footprint.reads if t.access.tensor in first and wide <= set(t.axes)]
    return each.combine is not None and any(p.machine.hw.exceeds_caches(b, p.compulsory_bytes) for b in mine)


def _stall_cycles(p: Workload[LoopFacts], launch: Launch, each: StatementWork, *, sequential: bool) -> float:
    """Return cycles in which only the divider works, or reductions wait: loads and stores hide there."""
    alone = work_cycles(p.machine, each.counts) - alu_cycles(p.machine.costs.loops, each.counts)
    busy, waiting = _vector_cycles(p, launch, each, sequential=sequential)
    return each.points * _overhang(p, launch) / _width(p, launch) * (alone + max(0.0, waiting - busy))


def _width(p: Workload[LoopFacts], launch: Launch) -> int:
    """Return the points of one vector, at most those of a register."""
    return min(p.machine.unit.shape[-1], launch.reduce_threads if launch.reduce_threads > 1 else math.prod(launch.thread))


def _overhang(p: Workload[LoopFacts], launch: Launch) -> float:
    """Return points computed per useful point: vectors exceed the axis they follow."""
    if launch.reduce_threads > 1 or p.vector_axis is None:
        return 1.0
    extent, width = p.extents[p.vector_axis], _width(p, launch)
    return -(-extent // width) * width / extent


def _load_cycles(p: Workload[LoopFacts], launch: Launch, each: StatementWork, *, sequential: bool) -> float:
    """Return one statement's load and store cycles, as if all hit L1.

    A column reduction loads accumulators once per iteration; resident rows share common operands.
    """
    vectors = each.points * _overhang(p, launch) / _width(p, launch)
    if each.combine is not None and is_column_reduction(p.space):
        vectors *= reduction_step(p.space).rows / reduction_step(p.space).terms
    found = [t for t in p.footprint.accesses if not each.tensors or t.access.tensor in each.tensors]
    side_by_side, shared = launch.reduce_threads > 1 and not sequential, shared_axis(p.space)
    common = [math.prod(n for i, n in enumerate(launch.thread) if (side_by_side or i == shared) and i not in t.axes) for t in found]
    if p.vector_axis is not None and _sums_in_registers(p, launch):  # the vectors of a row share one load of a factor
        row = max(1, _columns_per_block(p, launch) // _width(p, launch))
        common = [n if p.vector_axis in t.axes else n * row for t, n in zip(found, common, strict=True)]
    gathers = dict(each.gathers)
    parts = zip(found, common, strict=True)
    return sum(_access_cycles(p, t, launch, vectors / n, gathers.get(t.access.tensor, 1)) for t, n in parts)


def _access_cycles(p: Workload[LoopFacts], tensor: AccessFootprint, launch: Launch, vectors: float, gathers: int) -> float:
    """Return cycles between L1 and registers: vectors, broadcasts, or single elements, `gathers` of them at a point."""
    costs, width = p.machine.costs.loops, _width(p, launch)
    if p.inner_points > 1 and not tensor.varies_with_reduction:  # once for each outer point
        vectors = p.outer_points / (1 if launch.reduce_threads > 1 else width)
    if width == 1 or p.vector_axis is None or p.vector_axis not in tensor.axes:
        return vectors * costs.load_cycles
    stride = tensor.strides.get(p.vector_axis)
    if stride == 1:
        return vectors * costs.load_cycles
    if any(dim.is_looked_up or dim.gathered_by for dim in tensor.access.dims):
        vectors_of_table, rest = divmod(tensor.access.dims[-1].size, p.machine.unit.shape[-1])
        is_table = not rest and vectors_of_table <= MAX_TABLES
        is_byte_table = tensor.elem_bytes == 1 and tensor.access.dims[-1].size == BYTE_ENTRIES
        if len(tensor.access.dims) == 1 and (is_table or (is_byte_table and p.machine.hw.permutes_bytes)):
            return 0.0
        if len(tensor.access.dims) == 1 and is_byte_table and p.machine.hw.shuffles_bytes and width >= MIN_SHUFFLED_BYTES:
            lookups = vectors * gathers * -(-width // SHUFFLED_BYTES)
            return lookups * SHUFFLES_OF_TABLE * costs.operation_cycles
        return vectors * width * gathers * costs.gather_cycles
    # without a stride the index has a division; on a whole axis the compiler resolves it
    is_divided = stride is None and _has_innermost(tensor, p)
    is_whole = launch.block[p.vector_axis] >= p.extents[p.vector_axis]
    share = _share_of_jumps(tensor, p, launch) if is_divided else None
    if share is not None and (share == 0.0 or not is_whole):
        return vectors * ((1.0 - share) * costs.load_cycles + share * width * costs.index_cycles)
    if stride == 2 or (is_divided and is_whole):
        return vectors * costs.permute_cycles
    return vectors * width * (costs.index_cycles if is_divided else costs.gather_cycles)


def _share_of_jumps(tensor: AccessFootprint, p: Workload[LoopFacts], launch: Launch) -> float | None:
    """Return the share of vectors that are not known to be contiguous, of an index with // or %; None of other indices.

    Vectors begin at multiples of their width. Of those that a loop unrolls, one may hold a jump to another segment.
    """
    if p.vector_axis is None:
        return None
    members, width = {a.name for a in p.space.axes[p.vector_axis].members}, _width(p, launch)
    last = next((dim for dim in reversed(tensor.access.dims) if dim.size > 1), None)
    if last is None or last.segment is None or last.segment[0] not in members or last.segment[1] < width:
        return None
    if last.run is not None and last.run[1] >= width:
        return 0.0
    return min(1.0, width / launch.thread[p.vector_axis])


def _has_innermost(tensor: AccessFootprint, p: Workload[LoopFacts]) -> bool:
    """Return whether the vector axis is in the index of the tensor's innermost dimension."""
    if p.vector_axis is None:
        return False
    members = {a.name for a in p.space.axes[p.vector_axis].members}
    wide = [dim for dim in tensor.access.dims if dim.size > 1]
    return bool(wide) and not members.isdisjoint(name for name, _ in wide[-1].coeffs)


def _reread_cycles_per_byte(p: Workload[LoopFacts], launch: Launch) -> float:
    """Return cycles per byte of later statements' accesses, from the cache that holds resident rows."""
    if not p.space.reduces_rows:
        return 0.0
    return private_seconds_per_byte(p.machine, p.footprint.bytes(_resident_tile(p, launch))) * p.machine.clock_hz


def _transfer_s(p: Workload[LoopFacts], launch: Launch, *, under_reads: bool) -> list[tuple[str, float]]:
    """Return each tensor's memory seconds; non-temporal outputs without what `under_reads` reads hide."""
    clipped = tuple([min(b, e) for b, e in zip(launch.block, p.footprint.extents, strict=True)])
    often, put = _rereads(p, launch), 1.0
    if launch.reduce_threads > 1:
        often *= 1.0 + _row_restart_penalty(p, launch) + _out_of_order_miss_penalty(p, launch)
        put += _bus_turnaround_penalty(p, launch)
    past = min((_nontemporal_fraction(p, t) for t in p.footprint.writes), default=0.0) if launch.pipeline.nontemporal else 0.0
    piece = clipped
    if p.vector_axis is not None and is_column_reduction(p.space):
        piece = (*clipped[: p.vector_axis], _columns_per_block(p, launch), *clipped[p.vector_axis + 1 :])
    parts = [transfer_by_level_s(p, t, piece, launch.grid, past) for t in p.footprint.reads]
    found = [(t.access.tensor, often * sum(each)) for t, each in zip(p.footprint.reads, parts, strict=True)]
    written = [(t, put * transfer_s(p, t, clipped, launch.grid)) for t in p.footprint.writes]
    if launch.pipeline.nontemporal:
        reads = parts if parts and under_reads else [(0.0, 0.0)]
        caches_s, memory_s = (often * sum(each) for each in zip(*reads, strict=True))
        written = [(t, _nontemporal_s(p, t, launch, (caches_s, memory_s, plain_s))) for t, plain_s in written]
    return [*found, *((t.access.tensor, seconds) for t, seconds in written)]


def _rereads(p: Workload[LoopFacts], launch: Launch) -> float:
    """Return how often a byte is read on average. Parts of a split reduction read different rows."""
    clipped = tuple([min(b, e) for b, e in zip(launch.block, p.footprint.extents, strict=True)])
    return reread_ratio(p.footprint.reads, launch.grid // launch.split_k, clipped, p.extents)


def _row_restart_penalty(p: Workload[LoopFacts], launch: Launch) -> float:
    """Return the extra read time of parallel rows, as a fraction.

    Each restarts where later statements interrupt reading. Without them, rows are read in memory order.
    """
    again = _num_row_statements(p) > 1
    return again * p.machine.costs.loops.multi_stream_penalty * math.log2(math.prod(launch.thread))


def _out_of_order_miss_penalty(p: Workload[LoopFacts], launch: Launch) -> float:
    """Return the extra read time of reduced rows over calibration's copies, as a fraction; may be negative.

    A core whose reorder buffer covers many lines requests them itself before prefetchers do, which load them faster
    from memory. See docs/model.md, "CPUs".
    """
    joining = [one for one in p.facts.statements if one.combine is not None and one.points > p.outer_points]
    if len(joining) != 1 or _num_row_statements(p) > 1:
        return 0.0
    lines = max(MAX_PREFETCHED_LINES, _lines_in_flight(p, launch, joining[0]))
    in_memory = dram_fraction(p.machine, p.compulsory_bytes)
    return in_memory * p.machine.costs.loops.ooo_miss_penalty * math.log2(lines / COPY_LINES_IN_FLIGHT)


def _lines_in_flight(p: Workload[LoopFacts], launch: Launch, each: StatementWork) -> float:
    """Return the lines of a reduced row whose loads the reorder buffer holds, row ends included."""
    width, counts, rows = _width(p, launch), each.counts, math.prod(launch.thread)
    points = each.points // p.outer_points
    joins = MINMAX_OPERATIONS if each.combine in _MINMAX_COMBINES else 1
    work: float = counts.alu + MINMAX_OPERATIONS * counts.minmax + joins
    work += FUNCTION_OPERATIONS * (counts.exp + counts.functions) + counts.div
    work += LOOP_OPERATIONS * width / launch.reduce_threads
    loop = LOOP_OPERATIONS / rows  # shared by resident rows: over rows, and over the tail
    end = loop + (1 + joins) * math.log2(width) + joins * launch.reduce_threads / width + points % width * (joins + loop)
    vectors = ROB_ENTRIES * p.machine.rob_ratio / (work + end * width / points)
    return vectors * width * p.elem_bytes / LINE_BYTES


def _bus_turnaround_penalty(p: Workload[LoopFacts], launch: Launch) -> float:
    """Return the extra write time of rows with several statements, as a fraction (DRAM bus turnaround).

    Memory reads during the first statement and is written during the last; it switches less often the longer each
    takes, but for what is in flight.
    """
    costs = p.machine.costs.loops
    at_once = _row_bytes(p, launch) / costs.prefetch_distance_bytes
    return costs.bus_turnaround_penalty * math.log2(max(1.0, at_once)) if _num_row_statements(p) > 1 else 0.0


def _nontemporal_s(p: Workload[LoopFacts], tensor: AccessFootprint, launch: Launch, others: tuple[float, float, float]) -> float:
    """Return the seconds of non-temporal outputs, as far as vectors are aligned.

    `others`: seconds of reads from caches and from memory, and of these outputs through the caches.
    """
    caches_s, memory_s, plain_s = others
    share = _nontemporal_fraction(p, tensor)
    past_s = exposed_nontemporal_s(p.machine, nontemporal_write_s(p, tensor, launch.grid), caches_s, memory_s)
    return share * past_s + (1 - share) * plain_s


def _nontemporal_fraction(p: Workload[LoopFacts], tensor: AccessFootprint) -> float:
    if p.vector_axis is None or tensor.strides.get(p.vector_axis) != 1:
        return 1.0
    row = p.extents[p.vector_axis]
    rows = p.outer_points if p.vector_axis in p.reduced else max(1, p.outer_points // row)
    return nontemporal_fraction(rows, row * tensor.elem_bytes)
