"""The cost of a loop nest on a CPU: what its statements compute and load, beside what memory moves."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.families.common.cpu.column_reduction import (
    ReductionStep,
    accumulator_bytes,
    columns_per_block,
    is_column_reduction,
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
from roller_svc.families.cpu.loops.workload import LoopFacts
from roller_svc.ir.group import AxisRole
from roller_svc.ir.program import Combine
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.cpu_costs import LoopCosts
from roller_svc.perf.footprint import AccessFootprint, Tile
from roller_svc.perf.machine import ROB_ENTRIES
from roller_svc.perf.workload import Workload

MAX_PREFETCHED_LINES = 48.0  # in flight, up to which prefetchers are ahead of a core
COPY_LINES_IN_FLIGHT = 128.0  # in flight in a copy: a load, a store and a part of its loop's step for each
# Instructions of a loop's step beside its work, of a pair of lanes joined, of an extreme, of a polynomial.
LOOP_OPERATIONS, MINMAX_OPERATIONS, FUNCTION_OPERATIONS = 2, 3, 17
MIN_STRIDED_STEPS = 64  # steps from which a strided walk is more than a window
_MINMAX_COMBINES = frozenset({Combine.MAX, Combine.MIN})


def cpu_loop_cost(p: Workload[LoopFacts], launch: Launch) -> Costs:
    """Operations, loads and tasks of the core with the most of them, overlapped with what memory moves."""
    mach, costs = p.machine, p.machine.costs.loops
    walked = p.facts.statements or (
        StatementWork(p.outer_points * p.inner_points, _unknown_op_counts(p), None, frozenset()),
    )
    waves = -(-launch.grid // mach.cores)
    share = max(waves / launch.grid, 1 / mach.cores)  # of all tasks, those of the core with the most
    steps = _steps(p, launch, walked)
    compute, loads, again = (mach.seconds(share * sum(part)) for part in zip(*(s.cycles for s in steps), strict=True))
    jumps = mach.seconds(share * sum(_strided_miss_cycles(p, t, launch) for t in p.footprint.reads))
    if launch.nontemporal:
        jumps += mach.seconds(share * costs.alias_4k_cycles * count_4k_aliasing(p, launch.block))
    task = mach.seconds(share * launch.grid * costs.task_cycles)
    memory = sum(s.memory_s for s in steps)
    joint = _overlap(costs, compute + loads + again + jumps, memory)
    apart = sum(_overlap(costs, mach.seconds(share * sum(s.cycles)), s.apart_s) for s in steps)
    ahead = _prefetched_fraction(p, launch)
    moving = ahead * memory + (1 - ahead) * sum(s.apart_s for s in steps)
    return Costs(
        core_s=ahead * joint + (1 - ahead) * max(joint, apart) + task,
        core_stage=None,
        stage_seconds=(
            ("compute", compute), ("loads", loads + jumps), ("again", again), ("task", task),
            (dominant_level(p, launch), moving),
        ),
        occupancy=min(1.0, launch.grid / (waves * mach.cores)),
        waves=waves,
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _StatementCost:
    """A statement's walk: cycles of its operations, of its loads, of what it walks again, all in all; seconds of what
    it is the first to ask of memory, beside what other statements ask, and apart from it."""

    cycles: tuple[float, float, float]
    memory_s: float
    apart_s: float


def _steps(p: Workload[LoopFacts], launch: Launch, walked: tuple[StatementWork, ...]) -> list[_StatementCost]:
    each = _reread_cycles_per_byte(p, launch)
    moving = _transfer_s(p, launch, beside=True)
    moving_apart = _transfer_s(p, launch, beside=False) if launch.nontemporal else moving
    known: set[str] = set()
    steps = []
    for one in walked:
        mine = [t for t in p.footprint.accesses if t.access.tensor in one.tensors or not one.tensors]
        again = sum(t.bytes(p.extents) for t in mine if t.access.tensor in known and t.varies_with_reduction)
        first = frozenset(t.access.tensor for t in mine) - known
        memory, apart = (sum(s for tensor, s in some if tensor in first) for some in (moving, moving_apart))
        known |= first
        in_turn = _reads_rows_sequentially(p, one, first)
        loads = _load_cycles(p, launch, one, in_turn=in_turn) - _stall_cycles(p, launch, one, in_turn=in_turn)
        busy = _statement_cycles(p, launch, one, in_turn=in_turn) + _first_lines_cycles(p, launch, one, first)
        steps.append(_StatementCost((busy, max(0.0, loads), again * each), memory, apart))
    return steps


def _overlap(costs: LoopCosts, core_s: float, memory_s: float) -> float:
    """A core's work and what memory moves for it meanwhile."""
    return max(core_s, memory_s) + costs.imperfect_overlap * min(core_s, memory_s)


def _prefetched_fraction(p: Workload[LoopFacts], launch: Launch) -> float:
    """Which share of a row memory moves while the core still works on the row before: where several statements walk a
    row, one after the other, what is asked ahead of the first is all that moves during the next ones. Of rows that are
    walked side by side the last one's end alone lies before rows that are new; so it is of columns. Never all of it:
    each walk needs what the one before has joined."""
    if _num_row_statements(p) < 2 or not p.space.reduces_rows:
        return 1.0
    costs = p.machine.costs.loops
    return min(1.0, costs.max_prefetched_fraction, costs.prefetch_distance_bytes / max(1, _row_bytes(p, launch)))


def _num_row_statements(p: Workload[LoopFacts]) -> int:
    """Statements that walk rows; others have one value of each, as a mean that divides a sum has."""
    return sum(one.points > p.outer_points for one in p.facts.statements)


def _row_bytes(p: Workload[LoopFacts], launch: Launch) -> int:
    """Of the rows that all statements walk before the next ones, side by side as they are."""
    rows = _resident_tile(p, launch)
    return max((t.bytes(rows) for t in p.footprint.reads if t.varies_with_reduction), default=0)


def _resident_tile(p: Workload[LoopFacts], launch: Launch) -> Tile:
    """The part of the space that all statements walk before the next: rows side by side, or pieces of columns."""
    tile = [p.extents[i] if a.role is AxisRole.INNER else launch.thread[i] for i, a in enumerate(p.space.axes)]
    if p.vector_axis is not None and is_column_reduction(p.space):
        tile[p.vector_axis] = _columns_per_block(p, launch)
    return tuple(tile)


def _columns_per_block(p: Workload[LoopFacts], launch: Launch) -> int:
    """Columns whose values wait in a cache: a reduction's accumulator, and where it is read what it became."""
    reductions = sum(one.combine is not None for one in p.facts.statements)
    held = p.elem_bytes * max(1, reductions) * (2 if len(p.facts.statements) > 1 else 1)
    place = p.vector_axis or 0
    return min(
        p.extents[place], columns_per_block(launch.block[place], launch.thread[place], held, accumulator_bytes(p.space))
    )


def _unknown_op_counts(p: Workload[LoopFacts]) -> OpCounts:
    """Of a space whose statements are not known."""
    return OpCounts(alu=round(p.space.flops / (p.outer_points * p.inner_points)))


def _statement_cycles(p: Workload[LoopFacts], launch: Launch, each: StatementWork, *, in_turn: bool) -> float:
    """One statement at all its points: operations, or the latency of joins where too few go side by side; loops; lanes
    joined, and what is left of a row joined one by one."""
    costs = p.machine.costs.loops
    busy, waiting = _vector_cycles(p, launch, each, in_turn=in_turn)
    rows, width = p.outer_points, _width(p, launch)
    is_row = each.points > rows
    cycles = each.points * _overhang(p, launch) / width * max(busy, waiting)
    if is_column_reduction(p.space):
        cycles += costs.startup_cycles * each.points / _reduction_step(p, each).terms / _columns_per_block(p, launch)
    if launch.reduce_threads > 1 and is_row:
        cycles += rows * costs.tail_cycles * (each.points // rows % width)
        if each.combine is not None:
            cycles += rows * _horizontal_cycles(p, launch, each)
    return cycles


def _horizontal_cycles(p: Workload[LoopFacts], launch: Launch, each: StatementWork) -> float:
    """A row's lanes joined: a chain that the row's next walk waits for, beside those of the rows at hand; where nothing
    walks the row again, the next row's loads and joins go on meanwhile, and what it takes is its operations."""
    costs, halvings = p.machine.costs.loops, math.log2(launch.reduce_threads)
    if _num_row_statements(p) > 1:
        return costs.horizontal_cycles * halvings / math.prod(launch.thread)
    reduction_step = costs.minmax_cycles if each.combine in _MINMAX_COMBINES else costs.operation_cycles
    return (costs.operation_cycles + reduction_step) * halvings  # a shuffle, and what joins


def _reduction_step(p: Workload[LoopFacts], each: StatementWork) -> ReductionStep:
    """Of rows of columns, what a statement walks side by side: what a reduction joins before it stores."""
    is_reduction = each.combine is not None and each.points > p.outer_points
    return reduction_step(p.space) if is_reduction and is_column_reduction(p.space) else ReductionStep(1, 1)


def _vector_cycles(
    p: Workload[LoopFacts], launch: Launch, each: StatementWork, *, in_turn: bool
) -> tuple[float, float]:
    """One statement on one vector: its operations and its loop, and, of joins, the latency of each after the one before
    it, beside which all that is done."""
    costs, counts = p.machine.costs.loops, each.counts
    width = _width(p, launch)
    rows_at_once = 1 if launch.reduce_threads > 1 and in_turn else math.prod(launch.thread)
    side_by_side = max(1, launch.reduce_threads * rows_at_once // width)
    join = OpCounts(
        alu=each.combine is Combine.SUM or each.combine is Combine.PROD, minmax=each.combine in _MINMAX_COMBINES
    )
    busy = work_cycles(p.machine, counts + join)
    if launch.nontemporal and any(_nontemporal_fraction(p, t) < 1 for t in p.footprint.writes):
        busy += TEST_OPERATIONS * costs.operation_cycles
    if _reduction_step(p, each).terms == 1:  # else a turn's loop goes beside the operations on all that the turn joins
        busy += costs.loop_cycles / side_by_side
    if each.combine is None or each.points <= p.outer_points or is_column_reduction(p.space):
        return busy, 0.0
    latency = costs.minmax_latency_cycles if each.combine in _MINMAX_COMBINES else costs.accumulate_latency_cycles
    # rows that are short are under way together: theirs is not the latency of a chain
    alone = min(1.0, each.points / (p.outer_points * width * p.machine.rob_ratio * costs.rob_iterations))
    return busy, alone * latency / side_by_side


def _first_lines_cycles(p: Workload[LoopFacts], launch: Launch, each: StatementWork, first: frozenset[str]) -> float:
    """What turns over rows of columns wait where they begin, for the last of their rows' first lines: a turn works on
    all of its rows at once, and no core looks as far ahead as the next. Rows that come from memory are on other pages;
    on those that it was on before prefetchers have gone ahead."""
    if each.combine is None or not first or not is_column_reduction(p.space):
        return 0.0
    costs, at_once, columns = p.machine.costs.memory, reduction_step(p.space), _columns_per_block(p, launch)
    in_memory = dram_fraction(p.machine, p.compulsory_bytes)
    new_page = min(1.0, columns * p.elem_bytes / PAGE_BYTES)
    waits = new_page * (1 - (1 - in_memory) ** at_once.rows)
    return (
        each.points / (columns * at_once.terms) * waits * costs.tlb_miss_latency_factor * p.machine.dram_latency_cycles
    )


def _reads_rows_sequentially(p: Workload[LoopFacts], each: StatementWork, first: frozenset[str]) -> bool:
    """Whether rows at hand are read one after the other: by a reduction that is the first to touch them, each element
    once, where they come from beyond a core's own caches (`families/cpu/loops/schedule.py`)."""
    wide = {i for i, extent in enumerate(p.extents) if extent > 1}
    mine = [t.bytes(p.extents) for t in p.footprint.reads if t.access.tensor in first and wide <= set(t.axes)]
    return each.combine is not None and any(p.machine.hw.exceeds_caches(b, p.compulsory_bytes) for b in mine)


def _stall_cycles(p: Workload[LoopFacts], launch: Launch, each: StatementWork, *, in_turn: bool) -> float:
    """Cycles in which a statement has nothing but its divider at work, or waits for joins: loads and stores hide
    there."""
    alone = work_cycles(p.machine, each.counts) - alu_cycles(p.machine.costs.loops, each.counts)
    busy, waiting = _vector_cycles(p, launch, each, in_turn=in_turn)
    return each.points * _overhang(p, launch) / _width(p, launch) * (alone + max(0.0, waiting - busy))


def _width(p: Workload[LoopFacts], launch: Launch) -> int:
    """Points of one vector, at most those of a register."""
    return min(
        p.machine.unit.shape[-1], launch.reduce_threads if launch.reduce_threads > 1 else math.prod(launch.thread)
    )


def _overhang(p: Workload[LoopFacts], launch: Launch) -> float:
    """Points that are computed for each that there is: vectors overhang the axis they run along."""
    if launch.reduce_threads > 1 or p.vector_axis is None:
        return 1.0
    extent, width = p.extents[p.vector_axis], _width(p, launch)
    return -(-extent // width) * width / extent


def _load_cycles(p: Workload[LoopFacts], launch: Launch, each: StatementWork, *, in_turn: bool) -> float:
    """One statement's loads and stores at all its points, as if all were in L1. What is joined at once of a row in
    columns is loaded once, and so is what rows have in common that are walked side by side."""
    vectors = each.points * _overhang(p, launch) / _width(p, launch)
    if each.combine is not None and is_column_reduction(p.space):
        vectors *= reduction_step(p.space).rows / reduction_step(p.space).terms
    found = [t for t in p.footprint.accesses if not each.tensors or t.access.tensor in each.tensors]
    side_by_side = launch.reduce_threads > 1 and not in_turn
    common = [math.prod(n for i, n in enumerate(launch.thread) if side_by_side and i not in t.axes) for t in found]
    return sum(_access_cycles(p, t, launch, vectors / n) for t, n in zip(found, common, strict=True))


def _access_cycles(p: Workload[LoopFacts], tensor: AccessFootprint, launch: Launch, vectors: float) -> float:
    """One tensor between L1 and registers: whole vectors, one element for all lanes, or element by element."""
    costs, width = p.machine.costs.loops, _width(p, launch)
    if p.inner_points > 1 and not tensor.varies_with_reduction:  # once for each outer point
        vectors = p.outer_points / (1 if launch.reduce_threads > 1 else width)
    if width == 1 or p.vector_axis is None or p.vector_axis not in tensor.axes:
        return vectors * costs.load_cycles
    stride = tensor.strides.get(p.vector_axis)
    if stride == 1:
        return vectors * costs.load_cycles
    # a quotient is in the place where there is no stride: of a whole axis a compiler knows them all
    if stride == 2 or (stride is None and launch.block[p.vector_axis] >= p.extents[p.vector_axis]):
        return vectors * costs.permute_cycles
    return vectors * width * (costs.index_cycles if stride is None else costs.gather_cycles)


def _reread_cycles_per_byte(p: Workload[LoopFacts], launch: Launch) -> float:
    """Of what statements after the first read and write of a row, from the cache that holds the rows at hand."""
    if not p.space.reduces_rows:
        return 0.0
    return private_seconds_per_byte(p.machine, p.footprint.bytes(_resident_tile(p, launch))) * p.machine.clock_hz


def _strided_miss_cycles(p: Workload[LoopFacts], tensor: AccessFootprint, launch: Launch) -> float:
    """A walk over an inner axis that jumps further than prefetchers follow waits for memory at every step."""
    if (
        not p.reduced
        or launch.reduce_threads > 1
        or not tensor.varies_with_reduction
        or p.inner_points < MIN_STRIDED_STEPS
    ):
        return 0.0
    inner = p.reduced[-1]
    if inner not in tensor.axes or inner in tensor.strides or tensor.bytes(p.extents) // p.inner_points < PAGE_BYTES:
        return 0.0
    if is_column_reduction(p.space):
        return 0.0
    latency = p.machine.dram_latency_cycles
    for cache in p.machine.caches:
        if tensor.bytes(p.extents) <= cache.total_bytes // 2:
            latency = cache.latency_cycles
    vectors = p.outer_points * p.inner_points / _width(p, launch)
    return vectors * latency / p.machine.costs.loops.outstanding_misses


def _transfer_s(p: Workload[LoopFacts], launch: Launch, *, beside: bool) -> list[tuple[str, float]]:
    """Each tensor and the seconds that memory takes for it, from where a repeated run finds the data; of results past
    the caches what is not hidden `beside` reads."""
    clipped = tuple([min(b, e) for b, e in zip(launch.block, p.footprint.extents, strict=True)])
    often, put = reread_ratio(p.footprint.reads, launch.grid, clipped, p.extents), 1.0
    if launch.reduce_threads > 1:
        often *= 1.0 + _row_restart_penalty(p, launch) + _out_of_order_miss_penalty(p, launch)
        put += _bus_turnaround_penalty(p, launch)
    past = min((_nontemporal_fraction(p, t) for t in p.footprint.writes), default=0.0) if launch.nontemporal else 0.0
    piece = clipped
    if p.vector_axis is not None and is_column_reduction(p.space):
        piece = (*clipped[: p.vector_axis], _columns_per_block(p, launch), *clipped[p.vector_axis + 1 :])
    parts = [transfer_by_level_s(p, t, piece, launch.grid, past) for t in p.footprint.reads]
    found = [(t.access.tensor, often * sum(each)) for t, each in zip(p.footprint.reads, parts, strict=True)]
    written = [(t, put * transfer_s(p, t, clipped, launch.grid)) for t in p.footprint.writes]
    if launch.nontemporal:
        reads = parts if parts and beside else [(0.0, 0.0)]
        caches_s, memory_s = (often * sum(each) for each in zip(*reads, strict=True))
        written = [(t, _nontemporal_s(p, t, launch, (caches_s, memory_s, plain_s))) for t, plain_s in written]
    return [*found, *((t.access.tensor, seconds) for t, seconds in written)]


def _row_restart_penalty(p: Workload[LoopFacts], launch: Launch) -> float:
    """What rows that lanes walk along take more to read, in parts of what one at a time takes. Of rows that later
    statements walk again each of those side by side begins anew, for reading pauses there. Where nothing comes between
    they are read in the order of memory, however many are at hand."""
    again = _num_row_statements(p) > 1
    return again * p.machine.costs.loops.multi_stream_penalty * math.log2(math.prod(launch.thread))


def _out_of_order_miss_penalty(p: Workload[LoopFacts], launch: Launch) -> float:
    """What rows that are joined as they come take more to read than calibration's copies, or less, by how far the core
    runs ahead of prefetchers: one with many lines' loads in its window of operations asks for them itself, before
    prefetchers do, which bring them faster from memory. Sums of rows of 4 KB take 9.46 ms on Zen 4 with four
    accumulators, 9.31 with two and 8.92 with one, whose loop has more operations for each line; of rows of 484 bytes
    8.25 with four rows at hand and four accumulators, whose ends are joined together, and 8.12 to 8.18 a row at a time
    or with one accumulator."""
    joining = [one for one in p.facts.statements if one.combine is not None and one.points > p.outer_points]
    if len(joining) != 1 or _num_row_statements(p) > 1:
        return 0.0
    lines = max(MAX_PREFETCHED_LINES, _lines_in_flight(p, launch, joining[0]))
    in_memory = dram_fraction(p.machine, p.compulsory_bytes)
    return in_memory * p.machine.costs.loops.ooo_miss_penalty * math.log2(lines / COPY_LINES_IN_FLIGHT)


def _lines_in_flight(p: Workload[LoopFacts], launch: Launch, each: StatementWork) -> float:
    """Of a row that lanes join, how many lines' loads a core holds at once: as many as it has room for what is done
    with each, the ends of rows included."""
    width, counts, rows = _width(p, launch), each.counts, math.prod(launch.thread)
    points = each.points // p.outer_points
    joins = MINMAX_OPERATIONS if each.combine in _MINMAX_COMBINES else 1
    work: float = counts.alu + MINMAX_OPERATIONS * counts.minmax + joins
    work += FUNCTION_OPERATIONS * (counts.exp + counts.functions) + counts.div
    work += LOOP_OPERATIONS * width / launch.reduce_threads
    loop = LOOP_OPERATIONS / rows  # of rows at hand one for all: over rows, and over what fills no vector
    end = (
        loop + (1 + joins) * math.log2(width) + joins * launch.reduce_threads / width + points % width * (joins + loop)
    )
    vectors = ROB_ENTRIES * p.machine.rob_ratio / (work + end * width / points)
    return vectors * width * p.elem_bytes / LINE_BYTES


def _bus_turnaround_penalty(p: Workload[LoopFacts], launch: Launch) -> float:
    """What results of rows that several statements walk take more to write, in parts of what a map's take: memory reads
    while the first statement walks, and is written while the last one does, and turns from one to the other the less
    fully the longer each takes, but for as much as is in flight at once."""
    costs = p.machine.costs.loops
    at_once = _row_bytes(p, launch) / costs.prefetch_distance_bytes
    return costs.bus_turnaround_penalty * math.log2(max(1.0, at_once)) if _num_row_statements(p) > 1 else 0.0


def _nontemporal_s(
    p: Workload[LoopFacts], tensor: AccessFootprint, launch: Launch, others: tuple[float, float, float]
) -> float:
    """Results past the caches, as far as vectors are aligned. `others`: what reads take from caches and from memory,
    and these results like any others."""
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
