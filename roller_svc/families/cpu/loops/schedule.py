"""Loop nest group and its rProgram → schedule tree for a CPU: parallel tasks, rows, vector lanes.

Stores of outputs that no node reads may become non-temporal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from roller_svc.analysis.online_reduction import OnlineReduction
from roller_svc.families.common.cpu.column_reduction import is_column_reduction
from roller_svc.families.common.cpu.parallel_loops import SimdRows, outer_loops, serial_loops
from roller_svc.families.common.cpu.prefetch import Stream, find_streams, prefetch_is_profitable
from roller_svc.families.common.cpu.shared_rows import in_flight
from roller_svc.families.common.scatter import lower_scatter
from roller_svc.families.cpu.loops.argreduce import ArgReduce, arg_reductions
from roller_svc.families.cpu.loops.cached_intermediates import CachedIntermediate, find_cached_intermediates
from roller_svc.families.cpu.loops.column_reduction import column_loops
from roller_svc.families.cpu.loops.gather_prefetch import prefetch_gathers
from roller_svc.families.cpu.loops.reciprocal_division import find_row_division
from roller_svc.families.cpu.loops.row_values import recurring_reductions, share_row_values
from roller_svc.families.cpu.loops.workload import LoopFacts
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load, loads_of, rewrite, substitute
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import Axis, Combine, TensorExpr, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    HorizontalReduce,
    Let,
    Loop,
    LoopKind,
    Node,
    Prefetch,
    Routine,
    ScheduleTree,
    Storage,
    iter_nodes,
)
from roller_svc.perf.workload import Workload
from roller_svc.schedule.guards import unswitch_guards
from roller_svc.schedule.nest_statements import (
    RowReads,
    acc_name,
    convert_to_type,
    inner_axes,
    is_reduction,
    local_name,
    register,
    row_dtype,
    row_tensors,
    wrap_in_storages,
)

PointNodes = Callable[[dict[str, Expr]], tuple[Node, ...]]

LANE = ".lane"
ROW = ".row"
POINT = ".point"


def lower(group: KernelGroup, program: RProgram, workload: Workload[LoopFacts]) -> tuple[ScheduleTree, ...]:
    """Lower a scatter in order and other loop nests with vectors; their stores may be non-temporal."""
    hw = workload.machine.hw
    if group.kind is GroupKind.SCATTER:
        return lower_scatter(group, hw.family)
    trees = lower_nest(group, program, hw)
    return tuple(use_nontemporal_stores(tree, group) for tree in trees) if program.pipeline.nontemporal else trees


def lower_nest(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """Return one tree: parallel tasks over block tiles of the outer axes, rows inside, lanes innermost."""
    simd_axis, shared = _simd_axis(group, program), _shared_axis(group, program)
    is_vector = simd_axis is not None and program.reduce_threads == 1
    if is_vector and simd_axis is not None and is_column_reduction(group.space):
        return (ScheduleTree(group.name, column_loops(group, program, simd_axis, hw.limits.max_registers_per_thread)),)
    native = min(program.reduce_threads, program.unit.shape[-1])
    along_memory = not is_vector or simd_axis == _last_nontrivial_axis(group)
    streams = find_streams(group, program, hw) if along_memory else {}
    group = share_row_values(group)
    cached = find_cached_intermediates(group) if along_memory else {}
    reductions = arg_reductions(group)
    recurring = frozenset[str]() if is_vector or cached else recurring_reductions(group) - reductions.keys()

    def rows(at: dict[str, Expr], widths: tuple[int, ...]) -> tuple[Node, ...]:
        width, points = 1 if simd_axis is None else widths[0], 1 if shared is None else widths[-1]
        single = {name: num(0) for name, count in ((ROW, 1 if is_vector else width), (POINT, points)) if count == 1}
        at = {name: substitute(place, single) for name, place in at.items()}  # a single row has no loop over rows
        prefetch_bytes = hw.dram.transaction_bytes if prefetch_is_profitable(group, program, hw) else None
        return _Rows(
            group,
            at,
            is_vector,
            width,
            points,
            program.reduce_threads,
            native,
            streams,
            cached,
            reductions,
            prefetch_bytes,
            recurring,
        ).nodes()

    simd_rows = []
    if simd_axis is not None:
        simd_rows.append(SimdRows(simd_axis, program.thread[simd_axis.name], ref(LANE if is_vector else ROW)))
    if shared is not None:
        simd_rows.append(SimdRows(shared, program.thread[shared.name], ref(POINT)))
    tree = ScheduleTree(group.name, outer_loops(group, program, simd_rows, rows))
    return (prefetch_gathers(tree, group, program, hw),)


def _simd_axis(group: KernelGroup, program: RProgram) -> Axis | None:
    """Return the outer axis with several points computed together, if there is one, other than of shared rows.

    These points are the lanes of a vector, or rows in flight if lanes share a reduction.
    """
    shared = _shared_axis(group, program)
    return next((axis for axis in group.outer if program.thread[axis.name] > 1 and axis != shared), None)


def _shared_axis(group: KernelGroup, program: RProgram) -> Axis | None:
    """Return the outer axis with several points in flight that read the same rows, if there is one."""
    name = in_flight(group.space, program.thread)
    return next((axis for axis in group.outer if axis.name == name), None)


def _last_nontrivial_axis(group: KernelGroup) -> Axis | None:
    return next((a for a in reversed(group.outer) if a.extent > 1), None)


@dataclass(frozen=True, slots=True)
class _Rows:
    """The statements of a group at `width` adjacent outer points.

    The points are the lanes of a vector (`is_vector`), or rows whose inner axes are vectorised by `lanes`.
    """

    group: KernelGroup
    at: dict[str, Expr]
    is_vector: bool
    width: int
    points: int  # other outer points that read the same rows
    lanes: int
    native: int  # vector width of the CPU
    streams: dict[str, tuple[Stream, ...]]  # tensors that each statement streams through, by its output
    cached: dict[str, CachedIntermediate]  # cached intermediate of each reduction, by its output
    arg_reductions: dict[str, OnlineReduction]  # arg-reductions, by the outputs of both reductions
    prefetch_bytes: int | None  # bytes of one prefetched line; None: no prefetches
    recurring: frozenset[str]  # outputs of reductions that one routine computes, with registers of its own

    def nodes(self) -> tuple[Node, ...]:
        rows = row_tensors(self.group)
        reads = RowReads(rows, self._row_index, self.at)
        storages: list[Storage] = []
        nodes: list[Node] = []
        for statement in self.group.statements:
            in_row = statement.output in rows
            own = self._statement(statement, reads, in_row=in_row)
            if statement.output in self.recurring:
                own = [Routine("reduce", wrap_in_storages(self._accumulators(statement), tuple(own)))]
            else:
                storages += self._accumulators(statement)
            storages += self._row_storages(statement) if in_row else []
            nodes += own
        return wrap_in_storages(storages, tuple(nodes))

    @property
    def _row_index(self) -> tuple[Expr, ...]:
        """Return the index of one outer point in a row tensor."""
        if self.is_vector:
            return (ref(LANE),)
        index = tuple(ref(name) for name, count in self._in_flight if count > 1)
        return index or ((num(0),) if self.recurring else ())  # routines take no scalars

    @property
    def _in_flight(self) -> tuple[tuple[str, int], ...]:
        return ((ROW, self.width), (POINT, self.points))

    @property
    def _shape(self) -> tuple[int, ...]:
        if self.is_vector:
            return (self.width,)
        return tuple(count for _, count in self._in_flight if count > 1) or ((1,) if self.recurring else ())

    def _acc_name(self, statement: TensorExpr) -> str:
        return ".acc" if statement.output in self.recurring else acc_name(statement.output)

    def _accumulators(self, statement: TensorExpr) -> list[Storage]:
        storages = []
        if is_reduction(statement):
            lanes = self._lanes_of(statement)
            shape = self._shape if lanes == 1 else (*self._shape, lanes)
            dtype = self._accumulator(statement)
            acc = register(self._acc_name(statement), dtype, *shape)
            storages.append(replace(acc, ordered=self.width > 1 and self._reads_rows_in_order(statement)))
            if lanes > 1:
                storages.append(register(f"{self._acc_name(statement)}.total", dtype, *self._shape))
        return storages

    def _row_storages(self, statement: TensorExpr) -> list[Storage]:
        return [register(local_name(statement.output), row_dtype(statement), *self._shape)]

    def _arg_reduction(self, statement: TensorExpr) -> ArgReduce | None:
        """Return the arg-reduction that computes the statement, if lanes share it."""
        reduction = self.arg_reductions.get(statement.output)
        return ArgReduce(reduction) if reduction is not None and self._lanes_of(statement) > 1 else None

    def _accumulator(self, statement: TensorExpr) -> DType:
        arg_reduction = self._arg_reduction(statement)
        return (
            arg_reduction.dtype
            if arg_reduction is not None and statement is arg_reduction.reduction.second
            else statement.accumulator
        )

    def _lanes_of(self, statement: TensorExpr) -> int:
        """Return the lanes that share this statement's inner axis: one if the axis is shorter."""
        inner = inner_axes(statement, self.group.outer)
        if self.is_vector or not inner or inner[-1].extent < self.lanes:
            return 1
        return self.lanes

    def _for_rows(self, *nodes: Node) -> tuple[Node, ...]:
        """Execute the nodes for every outer point in flight."""
        if self.is_vector:
            return (unswitch_guards(Loop(LANE, self.width, LoopKind.VECTOR, nodes)),)
        return self._for_width(*self._for_points(*nodes))

    def _for_width(self, *nodes: Node) -> tuple[Node, ...]:
        """Execute the nodes for every row in flight."""
        return (Loop(ROW, self.width, LoopKind.UNROLL, nodes),) if self.width > 1 else nodes

    def _for_points(self, *nodes: Node) -> tuple[Node, ...]:
        """Execute the nodes for every point in flight that reads the same row."""
        return (Loop(POINT, self.points, LoopKind.UNROLL, nodes),) if self.points > 1 else nodes

    def _statement(self, statement: TensorExpr, reads: RowReads, *, in_row: bool) -> list[Node]:
        nodes: list[Node] = []
        inner = inner_axes(statement, self.group.outer)
        if is_reduction(statement):
            arg_reduction = self._arg_reduction(statement)
            if arg_reduction is None:
                nodes += self._reduction(statement, inner, reads)
            elif statement is arg_reduction.reduction.first:
                nodes += self._arg_reduce(arg_reduction, inner, reads)
            name = self._acc_name(statement) + (".total" if self._lanes_of(statement) > 1 else "")
            value: Expr = Load(name, self._row_index, self._accumulator(statement))
        elif inner:
            return self._map(statement, inner, reads)
        else:
            value = reads.apply(statement.body)
        value = convert_to_type(value, statement)
        if in_row:
            nodes += self._for_rows(Compute(local_name(statement.output), self._row_index, value))
            value = Load(local_name(statement.output), self._row_index, statement.type.dtype)
        if statement.output not in self.group.register_tensors:
            index = tuple(reads.apply(i) for i in statement.index)
            nodes += self._for_rows(Compute(statement.output, index, value))
            if self.is_vector:
                own = self.streams.get(statement.output, ())
                streams = [s for s in own if s.for_write or not is_reduction(statement)]
                nodes += self._prefetch(streams, self.width, self.at)
        return nodes

    def _map(self, statement: TensorExpr, inner: tuple[Axis, ...], reads: RowReads) -> list[Node]:
        """Lower a map over inner axes, one row after the other."""
        cached = next((k for k in self.cached.values() if k.map_ is statement), None)
        body = statement.body if cached is None else cached.body
        if self.is_vector:
            return self._stores(statement, body, reads)
        reciprocal = f"{statement.output}.reciprocal"
        division = find_row_division(body, frozenset(a.name for a in inner), reciprocal)
        if division is None:
            return list(self._for_rows(*self._stores(statement, body, reads)))
        products = (
            Compute(reciprocal, (), reads.apply(division.inverse)),
            *self._stores(statement, division.body, reads),
        )
        inverted = replace(register(reciprocal, division.dtype), body=products)
        divisions = tuple(self._stores(statement, body, reads))
        return list(self._for_rows(Branch(reads.apply(division.is_safe), (inverted,), divisions)))

    def _stores(self, statement: TensorExpr, body: Expr, reads: RowReads) -> list[Node]:
        """Loop over the inner axes and store the value of `body`."""
        inner = inner_axes(statement, self.group.outer)

        def store(at: dict[str, Expr]) -> tuple[Node, ...]:
            axis_reads = reads.with_axes(at)
            index = tuple(axis_reads.apply(i) for i in statement.index)
            return (Compute(statement.output, index, convert_to_type(axis_reads.apply(body), statement)),)

        if self._lanes_of(statement) == 1:
            nodes = store({a.name: ref(a.name) for a in inner})
            return list(serial_loops(inner, self._for_rows(*nodes) if self.is_vector else nodes))
        return [*self._vector_loops(statement, inner, store), *self._remainder(statement, inner, store)]

    def _reduction(self, statement: TensorExpr, inner: tuple[Axis, ...], reads: RowReads) -> list[Node]:
        combine = statement.combine or Combine.SUM
        acc, lanes = self._acc_name(statement), self._lanes_of(statement)
        start = identity(combine, statement.accumulator)
        if lanes == 1:
            axis_reads = reads.with_axes({a.name: ref(a.name) for a in inner})
            accumulate = self._accumulate(statement, axis_reads, acc, self._row_index)
            first = Compute(acc, self._row_index, start)
            return [*self._for_rows(first), *serial_loops(inner, self._for_rows(*accumulate))]
        lane_index = (*self._row_index, ref(LANE))

        def accumulate_lane(at: dict[str, Expr]) -> tuple[Node, ...]:
            return self._accumulate(statement, reads.with_axes(at), acc, lane_index)

        def accumulate_total(at: dict[str, Expr]) -> tuple[Node, ...]:
            return self._accumulate(statement, reads.with_axes(at), f"{acc}.total", self._row_index)

        return [
            *self._for_rows(Loop(LANE, lanes, LoopKind.VECTOR, (Compute(acc, lane_index, start),))),
            *self._vector_loops(statement, inner, accumulate_lane),
            *self._for_rows(*self._reduce_lanes(acc, lanes, combine, statement.accumulator)),
            *self._remainder(statement, inner, accumulate_total),
        ]

    def _accumulate(self, statement: TensorExpr, reads: RowReads, acc: str, index: tuple[Expr, ...]) -> tuple[Node, ...]:
        """Accumulate a point's value and store its cached intermediate, if there is one."""
        combine = statement.combine or Combine.SUM
        cached = self.cached.get(statement.output)
        if cached is None:
            return (Compute(acc, index, reads.apply(statement.body), combine),)
        body = rewrite(statement.body, lambda node: cached.cached_load if node == cached.value else node)
        cached_index = tuple(reads.apply(i) for i in cached.index)
        return (
            Compute(cached.map_.output, cached_index, reads.apply(cached.value)),
            Compute(acc, index, reads.apply(body), combine),
        )

    def _arg_reduce(self, arg_reduction: ArgReduce, inner: tuple[Axis, ...], reads: RowReads) -> list[Node]:
        """Lower both reductions of an arg-reduction in one pass."""
        first, row = arg_reduction.reduction.first, self._row_index
        lane = (*row, ref(LANE))

        def update(index: tuple[Expr, ...], at: dict[str, Expr], part: str) -> tuple[Node, ...]:
            axis_reads = reads.with_axes(at)
            value, position = axis_reads.apply(arg_reduction.reduction.value), axis_reads.apply(arg_reduction.index)
            return arg_reduction.update(index, value, position, part, in_order=arg_reduction.is_in_order(inner))

        return [
            *self._for_rows(Loop(LANE, self.lanes, LoopKind.VECTOR, arg_reduction.start(lane))),
            *self._vector_loops(first, inner, lambda at: update(lane, at, "")),
            *self._for_rows(*arg_reduction.reduce_lanes(row, ref(LANE), self.lanes, self.native)),
            *self._remainder(first, inner, lambda at: update(row, at, ".total")),
            *self._for_rows(*arg_reduction.finish(row)),
        ]

    def _reduce_lanes(self, acc: str, lanes: int, combine: Combine, dtype: DType) -> list[Node]:
        """Halve the accumulator down to one vector, then reduce its lanes."""
        nodes: list[Node] = []
        row = self._row_index
        while lanes > self.native:
            lanes //= 2
            upper_half = Load(acc, (*row, add(ref(LANE), num(lanes))), dtype)
            nodes.append(Loop(LANE, lanes, LoopKind.VECTOR, (Compute(acc, (*row, ref(LANE)), upper_half, combine),)))
        first = Load(acc, (*row, num(0)), dtype)
        return [*nodes, HorizontalReduce(f"{acc}.total", row, first, lanes, combine)]

    def _vector_loops(self, statement: TensorExpr, inner: tuple[Axis, ...], visit: PointNodes) -> list[Node]:
        """Loop over the inner axes, the innermost in chunks of `lanes`, then by whole vectors.

        A reduction updates the accumulators of all rows in flight in each chunk. Rows that stream from beyond the
        private caches are read one after the other instead, which suits hardware prefetchers; their accumulators are
        independent.
        """
        lanes, last, rest = self._lanes_of(statement), inner[-1], inner[:-1]
        at: dict[str, Expr] = {a.name: ref(a.name) for a in rest}
        streams = self._streams_of(statement)
        rows_in_order = self._reads_rows_in_order(statement)
        for_rows = self._for_points if rows_in_order else self._for_rows if is_reduction(statement) else _once
        nodes: list[Node] = []
        if full := last.extent // lanes:
            chunk = ref(f"{last.name}.piece")
            position = {**at, last.name: add(mul(chunk, num(lanes)), ref(LANE))}
            vector = unswitch_guards(Loop(LANE, lanes, LoopKind.VECTOR, visit(position)))
            prefetches = self._prefetch(streams, lanes, {**self.at, **position})
            nodes.append(Loop(chunk.name, full, LoopKind.SERIAL, for_rows(vector, *prefetches)))
        done = full * lanes
        if vectors := (last.extent - done) // self.native * self.native:
            position = {**at, last.name: add(num(done), ref(LANE))}
            prefetches = self._prefetch(streams, vectors, {**self.at, **position})
            nodes += for_rows(Loop(LANE, vectors, LoopKind.VECTOR, visit(position)), *prefetches)
        loops = serial_loops(rest, nodes)
        return list(self._for_width(*loops)) if rows_in_order and loops else list(loops)

    def _reads_rows_in_order(self, statement: TensorExpr) -> bool:
        """Return whether rows in flight are read one after the other."""
        return is_reduction(statement) and bool(self._streams_of(statement))

    def _prefetch(self, streams: Iterable[Stream], lanes: int, at: dict[str, Expr]) -> list[Node]:
        """Prefetch as much of the streams as `lanes` contiguous elements take."""
        if self.prefetch_bytes is None:
            return []
        return [prefetch for stream in streams for prefetch in stream.prefetches(LANE, lanes, self.prefetch_bytes, at)]

    def _streams_of(self, statement: TensorExpr) -> list[Stream]:
        """Return the streams that a statement's vector loops access first.

        A reduction's are its reads and its cached intermediate.
        """
        own = self.streams.get(statement.output, ())
        if not is_reduction(statement):
            waits = any(cached.map_ is statement for cached in self.cached.values())
            return [s for s in own if not (s.for_write and waits)]
        own_reads = [s for s in own if not s.for_write]
        if (cached := self.cached.get(statement.output)) is not None:
            outputs = self.streams.get(cached.map_.output, ())
            own_reads += [replace(s, index=cached.index) for s in outputs if s.for_write]
        return own_reads

    def _remainder(self, statement: TensorExpr, inner: tuple[Axis, ...], visit: PointNodes) -> list[Node]:
        """Loop over the tail of the innermost axis, less than a vector."""
        last, rest = inner[-1], inner[:-1]
        count = last.extent % self.native
        if not count:
            return []
        at: dict[str, Expr] = {a.name: ref(a.name) for a in rest}
        tail_nodes = visit({**at, last.name: add(num(last.extent - count), ref(LANE))})
        for_rows = self._for_rows if is_reduction(statement) else _once
        return list(serial_loops(rest, (Loop(LANE, count, LoopKind.SERIAL, for_rows(*tail_nodes)),)))


def _once(*nodes: Node) -> tuple[Node, ...]:
    return nodes


def use_nontemporal_stores(tree: ScheduleTree, group: KernelGroup) -> ScheduleTree:
    """Make stores of outputs non-temporal unless a node of the tree reads them back, and drop their prefetches."""
    read = {t for s in group.statements for t in s.reads_tensors}
    read |= {x.tensor for n in iter_nodes(tree.body) if isinstance(n, Compute) for x in loads_of(n.value)}
    results = frozenset(name for name, _ in group.stored) - read
    return replace(tree, body=_with_nontemporal_stores(tree.body, results))


def _with_nontemporal_stores(nodes: tuple[Node, ...], results: frozenset[str]) -> tuple[Node, ...]:
    rewritten: list[Node] = []
    for node in nodes:
        match node:
            case Loop(kind=LoopKind.VECTOR, body=body):
                rewritten.append(replace(node, body=tuple(_nontemporal_store(n, results) for n in body)))
            case Loop(body=body) | Let(body=body) | Storage(body=body):
                rewritten.append(replace(node, body=_with_nontemporal_stores(body, results)))
            case Branch(then=then, otherwise=otherwise):
                rewritten.append(
                    replace(
                        node,
                        then=_with_nontemporal_stores(then, results),
                        otherwise=_with_nontemporal_stores(otherwise, results),
                    )
                )
            case Prefetch(tensor=tensor, for_write=True) if tensor in results:
                pass
            case _:
                rewritten.append(node)
    return tuple(rewritten)


def _nontemporal_store(node: Node, results: frozenset[str]) -> Node:
    is_result = isinstance(node, Compute) and node.tensor in results and node.combine is None
    return replace(node, nontemporal=True) if is_result and isinstance(node, Compute) else node
