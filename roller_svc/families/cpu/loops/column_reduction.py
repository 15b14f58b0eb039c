"""Column reduction on a CPU: inner axes are strided in memory and an outer axis is contiguous.

An example is the sum over the rows of a matrix. A vector of columns at a time would load one line of every page. A task
therefore streams through segments of rows, and a cache holds the accumulators and row tensors of all its columns.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import reduce

from roller_svc.analysis.index_map import IndexMap
from roller_svc.analysis.lookup_tables import LookupTables
from roller_svc.families.common.cpu.column_reduction import (
    MAX_ROWS_PER_ITERATION,
    accumulator_bytes,
    columns_per_block,
    keeps_columns_in_registers,
    max_sets,
    rows_per_iteration,
    vector_members,
)
from roller_svc.families.common.cpu.parallel_loops import Point, SimdRows, outer_loops, serial_loops
from roller_svc.ir.expr import Cast, Expr, Load, Op, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import COMBINE_OPS, Axis, Combine, TensorExpr, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Compute, Loop, LoopKind, Node, Scope, Storage
from roller_svc.schedule.guards import unswitch_guards
from roller_svc.schedule.nest_statements import (
    RowReads,
    acc_name,
    inner_axes,
    is_reduction,
    register,
    row_dtype,
    row_storages,
    row_tensors,
    wrap_in_storages,
)

LANE = ".lane"
COLUMN = ".column"
POINT, SET = ".point", ".set"


def column_loops(group: KernelGroup, program: RProgram, axis: Axis, registers: int) -> tuple[Node, ...]:
    """Return the body of the whole tree; columns are the points of `axis`."""
    lanes, tile = program.thread[axis.name], program.block[axis.name]
    width = columns_per_block(tile, lanes, _bytes_per_column(group), accumulator_bytes(group.space))
    native = min(lanes, program.unit.shape[-1])
    shared = next((a for a in group.outer if a != axis and program.thread[a.name] > 1), None)

    def columns(at: Point, widths: tuple[int, ...]) -> tuple[Node, ...]:
        count, points = widths[0], math.prod(widths[1:])
        in_flight = 1 if shared is None else program.thread[shared.name]  # a tail of one point has the form of the others
        if keeps_columns_in_registers(axis.extent, count, in_flight, native, registers):
            return _RegisterColumns(group, at, count, points, max_sets(count, points, native, registers)).nodes()
        return _Columns(group, at, count, lanes, native).nodes()

    rows = [SimdRows(axis, width, ref(COLUMN))]
    if shared is not None:
        rows.append(SimdRows(shared, program.thread[shared.name], ref(POINT)))
    return outer_loops(group, program, rows, columns)


def _bytes_per_column(group: KernelGroup) -> int:
    """Return the bytes of accumulators and row tensors of one column."""
    rows = row_tensors(group)
    sums = sum(s.accumulator.bytes for s in group.statements if is_reduction(s))
    return sums + sum(row_dtype(s).bytes for s in group.statements if s.output in rows)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The statements of a group for `count` columns; `at` names the column's number COLUMN."""

    group: KernelGroup
    at: Point
    count: int
    lanes: int
    native: int  # vector width of the CPU

    def nodes(self) -> tuple[Node, ...]:
        rows = row_tensors(self.group)
        storages: list[Storage] = []
        nodes: list[Node] = []
        for statement in self.group.statements:
            if is_reduction(statement):
                name = acc_name(statement.output)
                storages.append(Storage(name, statement.accumulator, (self.count,), Scope.STACK, ()))
            storages += row_storages((statement,), rows, self.count, scope=Scope.STACK)
            nodes += self._statement(statement, RowReads(rows, (ref(COLUMN),), self.at))
        return wrap_in_storages(storages, tuple(nodes))

    def _statement(self, statement: TensorExpr, reads: RowReads) -> list[Node]:
        inner = inner_axes(statement, self.group.outer)
        if is_reduction(statement):
            acc = acc_name(statement.output)
            value: Expr = Load(acc, (ref(COLUMN),), statement.accumulator)
            return [
                *self._reduction(statement, inner, reads),
                *self._for_columns(tuple(reads.store(self.group, statement, value))),
            ]
        body = reads.with_axes({a.name: ref(a.name) for a in inner}).apply(statement.body)
        return list(serial_loops(inner, self._for_columns(tuple(reads.store(self.group, statement, body)))))

    def _reduction(self, statement: TensorExpr, inner: tuple[Axis, ...], reads: RowReads) -> list[Node]:
        combine, dtype = statement.combine or Combine.SUM, statement.accumulator
        acc, column = acc_name(statement.output), (ref(COLUMN),)
        unrolled = _unrolled_axis(self.group, inner)
        product = LookupTables(self.native, vector_members(self.group.space)).group_invariant_factors(statement.body)

        def term(at: dict[str, Expr]) -> Expr:
            values = IndexMap(statement.extents, {**reads.axes, **at}, {})
            body = replace(reads, axes={}).apply(values.apply(product))
            return body if body.dtype is dtype else Cast(body, dtype, implicit=True)

        def accumulate(steps: list[Expr]) -> list[Node]:
            """Accumulate the terms of these steps of the unrolled axis."""
            rows = [_combine_in_order([term(at) for at in unrolled.positions(step)], combine) for step in steps]
            return self._for_columns((Compute(acc, column, _combine_pairwise(rows, combine), combine),))

        start = self._for_columns((Compute(acc, column, identity(combine, dtype)),))
        full, remaining = divmod(unrolled.axis.extent, unrolled.unroll)
        first = mul(ref(f"{unrolled.axis.name}.piece"), num(unrolled.unroll))
        body = accumulate([add(first, num(i)) for i in range(unrolled.unroll)])
        nodes: list[Node] = [Loop(f"{unrolled.axis.name}.piece", full, LoopKind.SERIAL, tuple(body))]
        if remaining:
            nodes += accumulate([num(full * unrolled.unroll + i) for i in range(remaining)])
        return [*start, *serial_loops(unrolled.outer, nodes)]

    def _for_columns(self, nodes: tuple[Node, ...]) -> list[Node]:
        """Return the nodes for all columns: full vectors, then the tail."""
        loops: list[Node] = []
        full, remaining = divmod(self.count, self.lanes)
        if full:
            column = add(mul(ref(f"{COLUMN}.piece"), num(self.lanes)), ref(LANE))
            vector = _vector_loop(nodes, column, self.lanes, LoopKind.VECTOR)
            loops.append(Loop(f"{COLUMN}.piece", full, LoopKind.SERIAL, (vector,)))
        if vectors := remaining // self.native * self.native:
            column = add(num(full * self.lanes), ref(LANE))
            loops.append(_vector_loop(nodes, column, vectors, LoopKind.VECTOR))
        if remaining := remaining - vectors:
            column = add(num(full * self.lanes + vectors), ref(LANE))
            loops.append(_vector_loop(nodes, column, remaining, LoopKind.VECTOR))
        return loops


@dataclass(frozen=True, slots=True)
class _RegisterColumns:
    """The statements of a group for all columns of rows, whose sums are in registers; rows are read in memory order.

    `points` outer points share each row. A row in `sets` adds to the same accumulators, which shortens dependence
    chains and rounding errors.
    """

    group: KernelGroup
    at: Point
    count: int
    points: int
    sets: int

    def nodes(self) -> tuple[Node, ...]:
        rows = row_tensors(self.group)
        reads = RowReads(rows, self._index, self.at)
        storages: list[Storage] = []
        nodes: list[Node] = []
        for statement in self.group.statements:
            if is_reduction(statement):
                shape = (self.sets, self.points, self.count)
                storages.append(register(acc_name(statement.output), statement.accumulator, *shape))
                nodes += self._reduction(statement, reads)
                value: Expr = Load(acc_name(statement.output), (num(0), *self._index), statement.accumulator)
                nodes += self._for_points(tuple(reads.store(self.group, statement, value)))
            else:
                inner = inner_axes(statement, self.group.outer)
                body = reads.with_axes({a.name: ref(a.name) for a in inner}).apply(statement.body)
                nodes += serial_loops(inner, self._for_points(tuple(reads.store(self.group, statement, body))))
            storages += row_storages((statement,), rows, self.points, self.count)
        return wrap_in_storages(storages, tuple(nodes))

    @property
    def _index(self) -> tuple[Expr, ...]:
        return (ref(POINT), ref(COLUMN))

    def _for_points(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        vectors = _vector_loop(nodes, ref(LANE), self.count, LoopKind.VECTOR)
        return (Loop(POINT, self.points, LoopKind.UNROLL, (vectors,)),)

    def _for_sets(self, nodes: tuple[Node, ...], sets: int) -> tuple[Node, ...]:
        return (Loop(SET, sets, LoopKind.UNROLL, self._for_points(nodes)),)

    def _reduction(self, statement: TensorExpr, reads: RowReads) -> list[Node]:
        combine, dtype, acc = statement.combine or Combine.SUM, statement.accumulator, acc_name(statement.output)
        *outer, last = inner_axes(statement, self.group.outer)
        at = {a.name: ref(a.name) for a in outer}
        full, remaining = divmod(last.extent, self.sets)
        piece = ref(f"{last.name}.piece")

        def accumulate(first: Expr, sets: int) -> tuple[Node, ...]:
            value = reads.with_axes({**at, last.name: add(first, ref(SET))}).apply(statement.body)
            return self._for_sets((Compute(acc, (ref(SET), *self._index), value, combine),), sets)

        start = self._for_sets((Compute(acc, (ref(SET), *self._index), identity(combine, dtype)),), self.sets)
        nodes: list[Node] = []
        if full:
            nodes.append(Loop(piece.name, full, LoopKind.SERIAL, accumulate(mul(piece, num(self.sets)), self.sets)))
        if remaining:
            nodes += accumulate(num(full * self.sets), remaining)
        joins: list[Node] = []
        half = self.sets
        while half > 1:
            half //= 2
            other = Load(acc, (add(ref(SET), num(half)), *self._index), dtype)
            joins += self._for_sets((Compute(acc, (ref(SET), *self._index), other, combine),), half)
        return [*start, *serial_loops(tuple(outer), nodes), *joins]


@dataclass(frozen=True, slots=True)
class _UnrolledAxis:
    """Loop along `axis`, unrolled, around all points of `inner`, if any, and within the loops `outer`."""

    axis: Axis
    unroll: int
    inner: Axis | None
    outer: tuple[Axis, ...]

    def positions(self, step: Expr) -> list[dict[str, Expr]]:
        """Return the values of all inner axes at one step along the axis."""
        position = {a.name: ref(a.name) for a in self.outer} | {self.axis.name: step}
        if self.inner is None:
            return [position]
        return [position | {self.inner.name: num(i)} for i in range(self.inner.extent)]


def _unrolled_axis(group: KernelGroup, inner: tuple[Axis, ...]) -> _UnrolledAxis:
    last = inner[-1]
    if len(inner) > 1:
        rows = rows_per_iteration(group.space, inner[-2].extent, last.extent, last.name)
        if rows > 1:
            return _UnrolledAxis(inner[-2], rows, last, inner[:-2])
    return _UnrolledAxis(last, min(MAX_ROWS_PER_ITERATION, last.extent), None, inner[:-1])


def _vector_loop(nodes: tuple[Node, ...], column: Expr, lanes: int, kind: LoopKind) -> Node:
    """Return a vector loop over the nodes, with COLUMN replaced by `column`."""
    at = {COLUMN: column}
    computes = tuple(
        replace(n, index=tuple(substitute(i, at) for i in n.index), value=substitute(n.value, at))
        for n in nodes if isinstance(n, Compute)
    )  # fmt: skip
    return unswitch_guards(Loop(LANE, lanes, kind, computes))


def _combine_in_order(terms: list[Expr], combine: Combine) -> Expr:
    """Combine the few terms of one row in order, so that each multiply fuses with its add."""
    return reduce(lambda a, b: Op(COMBINE_OPS[combine], (a, b), a.dtype), terms)


def _combine_pairwise(rows: list[Expr], combine: Combine) -> Expr:
    """Combine rows pairwise, which shortens dependence chains and rounding errors."""
    while len(rows) > 1:
        pairs = [_combine_in_order([a, b], combine) for a, b in zip(rows[::2], rows[1::2], strict=False)]
        rows = [*pairs, *rows[len(pairs) * 2 :]]
    return rows[0]
