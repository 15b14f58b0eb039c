"""Nest whose inner axes jump through memory while an outer one runs along it → rows of columns, one after the other.

A sum over the rows of a matrix is one: taken a vector of columns at a time it would fetch a line of every page. Here
a task walks whole pieces of rows, and every column's value waits in a cache (accumulators, row tensors).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import reduce

from roller_svc.analysis.linear import simplified
from roller_svc.analysis.lookup_tables import Tables
from roller_svc.families.common.cpu.column_reduction import (
    STEPS_AT_ONCE,
    columns_at_once,
    held_room,
    lanes_along,
    rows_at_once,
)
from roller_svc.families.common.cpu.parallel_loops import Point, Together, outer_loops
from roller_svc.ir.expr import Cast, Expr, Load, Op, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import COMBINE_OPS, Axis, Combine, TensorExpr, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Compute, Loop, LoopKind, Node, Scope, Storage
from roller_svc.schedule.guards import without_guards_inside
from roller_svc.schedule.nest_statements import (
    RowReads,
    acc_name,
    converted,
    inner_axes,
    is_reduction,
    local_name,
    row_dtype,
    row_tensors,
    wrapped,
)

LANE = ".lane"
COLUMN = ".column"


def column_walk(group: KernelGroup, program: RProgram, axis: Axis) -> tuple[Node, ...]:
    """The whole tree's body; columns are the points of `axis`."""
    lanes, tile = program.thread[axis.name], program.block[axis.name]
    width = columns_at_once(tile, lanes, _held_bytes(group), held_room(group.space))
    native = min(lanes, program.unit.shape[-1])

    def columns(at: Point, count: int) -> tuple[Node, ...]:
        return _Columns(group, at, count, lanes, native).nodes()

    return outer_loops(group, program, Together(axis, width, ref(COLUMN)), columns)


def _held_bytes(group: KernelGroup) -> int:
    """Of one column."""
    rows = row_tensors(group)
    sums = sum(s.accumulator.bytes for s in group.statements if is_reduction(s))
    return sums + sum(row_dtype(s).bytes for s in group.statements if s.output in rows)


@dataclass(frozen=True, slots=True)
class _Columns:
    """The statements of a group for `count` columns; `at` has the column's number as COLUMN."""

    group: KernelGroup
    at: Point
    count: int
    lanes: int
    native: int  # lanes of one vector register

    def nodes(self) -> tuple[Node, ...]:
        rows = row_tensors(self.group)
        storages: list[Storage] = []
        nodes: list[Node] = []
        for statement in self.group.statements:
            if is_reduction(statement):
                name = acc_name(statement.output)
                storages.append(Storage(name, statement.accumulator, (self.count,), Scope.STACK, ()))
            if statement.output in rows:
                name = local_name(statement.output)
                storages.append(Storage(name, row_dtype(statement), (self.count,), Scope.STACK, ()))
            nodes += self._statement(statement, RowReads(rows, (ref(COLUMN),), self.at))
        return wrapped(storages, tuple(nodes))

    def _statement(self, statement: TensorExpr, reads: RowReads) -> list[Node]:
        inner = inner_axes(statement, self.group.outer)
        if is_reduction(statement):
            acc = acc_name(statement.output)
            value: Expr = Load(acc, (ref(COLUMN),), statement.accumulator)
            return [*self._reduction(statement, inner, reads), *self._each(self._kept(statement, value, reads))]
        body = reads.with_axes({a.name: ref(a.name) for a in inner}).apply(statement.body)
        return self._around(inner, self._each(self._kept(statement, body, reads)))

    def _kept(self, statement: TensorExpr, value: Expr, reads: RowReads) -> tuple[Node, ...]:
        """A column's value where later statements look for it, and in memory."""
        value = converted(value, statement)
        nodes: list[Node] = []
        if statement.output in reads.rows:
            nodes.append(Compute(local_name(statement.output), (ref(COLUMN),), value))
            value = Load(local_name(statement.output), (ref(COLUMN),), statement.type.dtype)
        if statement.output not in self.group.register_tensors:
            index = tuple(reads.apply(i) for i in statement.index)
            nodes.append(Compute(statement.output, index, value))
        return tuple(nodes)

    def _reduction(self, statement: TensorExpr, inner: tuple[Axis, ...], reads: RowReads) -> list[Node]:
        combine, dtype = statement.combine or Combine.SUM, statement.accumulator
        acc, place = acc_name(statement.output), (ref(COLUMN),)
        walk = _walk(self.group, inner)
        product = Tables(self.native, lanes_along(self.group.space)).product(statement.body)

        def term(at: dict[str, Expr]) -> Expr:
            body = simplified(reads.with_axes(at).apply(product))
            return body if body.dtype is dtype else Cast(body, dtype, implicit=True)

        def joined(steps: list[Expr]) -> list[Node]:
            """Accumulators with what these steps of the walk give each."""
            rows = [_in_turn([term(at) for at in walk.points(step)], combine) for step in steps]
            return self._each((Compute(acc, place, _in_pairs(rows, combine), combine),))

        start = self._each((Compute(acc, place, identity(combine, dtype)),))
        full, rest = divmod(walk.axis.extent, walk.at_once)
        first = mul(ref(f"{walk.axis.name}.piece"), num(walk.at_once))
        body = joined([add(first, num(i)) for i in range(walk.at_once)])
        nodes: list[Node] = [Loop(f"{walk.axis.name}.piece", full, LoopKind.SERIAL, tuple(body))]
        if rest:
            nodes += joined([num(full * walk.at_once + i) for i in range(rest)])
        return [*start, *self._around(walk.outer, nodes)]

    def _each(self, nodes: tuple[Node, ...]) -> list[Node]:
        """The nodes for every column, whole vectors first."""
        found: list[Node] = []
        full, rest = divmod(self.count, self.lanes)
        if full:
            place = add(mul(ref(f"{COLUMN}.piece"), num(self.lanes)), ref(LANE))
            vector = _placed(nodes, place, self.lanes, LoopKind.VECTOR)
            found.append(Loop(f"{COLUMN}.piece", full, LoopKind.SERIAL, (vector,)))
        if vectors := rest // self.native * self.native:
            place = add(num(full * self.lanes), ref(LANE))
            found.append(_placed(nodes, place, vectors, LoopKind.VECTOR))
        if rest := rest - vectors:
            place = add(num(full * self.lanes + vectors), ref(LANE))
            found.append(_placed(nodes, place, rest, LoopKind.VECTOR))
        return found

    @staticmethod
    def _around(axes: tuple[Axis, ...], nodes: list[Node]) -> list[Node]:
        for axis in reversed(axes):
            nodes = [Loop(axis.name, axis.extent, LoopKind.SERIAL, tuple(nodes))]
        return nodes


@dataclass(frozen=True, slots=True)
class _Walk:
    """Steps along `axis`, several at once, around all of `within`, if anything, inside `outer`."""

    axis: Axis
    at_once: int
    within: Axis | None
    outer: tuple[Axis, ...]

    def points(self, step: Expr) -> list[dict[str, Expr]]:
        """The places of all inner axes that a step along the axis goes to."""
        here = {a.name: ref(a.name) for a in self.outer} | {self.axis.name: step}
        if self.within is None:
            return [here]
        return [here | {self.within.name: num(i)} for i in range(self.within.extent)]


def _walk(group: KernelGroup, inner: tuple[Axis, ...]) -> _Walk:
    last = inner[-1]
    if len(inner) > 1:
        rows = rows_at_once(group.space, inner[-2].extent, last.extent, last.name)
        if rows > 1:
            return _Walk(inner[-2], rows, last, inner[:-2])
    return _Walk(last, min(STEPS_AT_ONCE, last.extent), None, inner[:-1])


def _placed(nodes: tuple[Node, ...], column: Expr, lanes: int, kind: LoopKind) -> Node:
    """A loop of lanes over the nodes, which say COLUMN for `column`."""
    at = {COLUMN: column}
    here = tuple(
        replace(n, index=tuple(substitute(i, at) for i in n.index), value=substitute(n.value, at))
        for n in nodes if isinstance(n, Compute)
    )  # fmt: skip
    return without_guards_inside(Loop(LANE, lanes, kind, here))


def _in_turn(terms: list[Expr], combine: Combine) -> Expr:
    """The terms of one row, few of them: each product is added as it is formed."""
    return reduce(lambda a, b: Op(COMBINE_OPS[combine], (a, b), a.dtype), terms)


def _in_pairs(parts: list[Expr], combine: Combine) -> Expr:
    """Rows, neighbours first: short chains, and sums that lose less."""
    while len(parts) > 1:
        pairs = [_in_turn([a, b], combine) for a, b in zip(parts[::2], parts[1::2], strict=False)]
        parts = [*pairs, *parts[len(pairs) * 2 :]]
    return parts[0]
