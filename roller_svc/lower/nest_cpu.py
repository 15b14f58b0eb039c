"""Nest group and its rProgram → schedule tree for a CPU: tasks, rows, vector lanes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.ir.build import add, ceil_div, less_equal, mul, num, ref, sub
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load, Op
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.program import JOINS, Axis, Combine, TensorExpr, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree, Storage
from roller_svc.lower.guards import without_guards_inside
from roller_svc.lower.rows import (
    RowReads,
    acc_name,
    converted,
    inner_axes,
    is_reduction,
    local_name,
    register,
    row_dtype,
    row_tensors,
    wrapped,
)

LANE = ".lane"


def lower_nest_cpu(group: KernelGroup, program: RProgram) -> tuple[ScheduleTree, ...]:
    """One tree: parallel tasks over block tiles of the outer axes, rows inside, lanes innermost."""
    vector = _vector_outer(group, program)

    def rows(at: dict[str, Expr], width: int) -> tuple[Node, ...]:
        return _Rows(group, at, vector, width, program.lanes, min(program.lanes, program.unit.shape[-1])).nodes()

    body = _outer_loops(group, program, vector, rows)
    return (ScheduleTree(group.name, body),)


def _vector_outer(group: KernelGroup, program: RProgram) -> Axis | None:
    """The outer axis whose points are vector lanes, if one is."""
    for axis in group.outer:
        if program.thread[axis.name] > 1:
            return axis
    return None


def _outer_loops(
    group: KernelGroup, program: RProgram, vector: Axis | None,
    rows: Callable[[dict[str, Expr], int], tuple[Node, ...]],
) -> tuple[Node, ...]:  # fmt: skip
    at: dict[str, Expr] = {a.name: ref(a.name) for a in group.outer}
    if vector is None:
        nodes = rows(at, 1)
    else:
        width = program.thread[vector.name]
        start = ref(f"{vector.name}.first")
        at[vector.name] = add(start, ref(LANE))
        nodes = rows(at, width) if vector.extent >= width else ()
        if tail := vector.extent % width:
            rest = rows(at, tail)
            inside = less_equal(add(start, num(width)), num(vector.extent))
            nodes = (Branch(inside, nodes, rest),) if nodes else rest
    for axis in reversed(group.outer):
        tile = program.block[axis.name]
        task = ref(f"{axis.name}.task")
        if axis is vector:
            width = program.thread[axis.name]
            count = tile // width
            step = ref(f"{axis.name}.step")
            position = add(mul(task, num(count)), step)
            nodes = (Let(f"{axis.name}.first", mul(position, num(width)), nodes),)
            limit = sub(num(ceil_div(axis.extent, width)), mul(task, num(count)))
            ragged = ceil_div(axis.extent, width) % count
        else:
            count, step = tile, ref(f"{axis.name}.step")
            nodes = (Let(axis.name, add(mul(task, num(tile)), step), nodes),)
            limit = sub(num(axis.extent), mul(task, num(tile)))
            ragged = axis.extent % tile
        nodes = (Loop(step.name, count, LoopKind.SERIAL, nodes, limit if ragged else None),)
    for axis in reversed(group.outer):
        tasks = ceil_div(axis.extent, program.block[axis.name])
        nodes = (Loop(f"{axis.name}.task", tasks, LoopKind.PARALLEL, nodes),)
    return nodes


@dataclass(frozen=True, slots=True)
class _Rows:
    """The statements of a group at `width` neighbouring outer points (or one, its inner axis cut into lanes)."""

    group: KernelGroup
    at: dict[str, Expr]
    vector: Axis | None
    width: int
    lanes: int
    native: int  # lanes of one vector register

    def nodes(self) -> tuple[Node, ...]:
        rows = row_tensors(self.group)
        reads = RowReads(rows, (ref(LANE),) if self.vector else (), self.at)
        storages: list[Storage] = []
        nodes: list[Node] = []
        for statement in self.group.statements:
            storages += self._storages(statement, in_row=statement.output in rows)
            nodes += self._statement(statement, reads, in_row=statement.output in rows)
        return wrapped(storages, tuple(nodes))

    def _shape(self) -> tuple[int, ...]:
        return (self.width,) if self.vector else ()

    def _storages(self, statement: TensorExpr, *, in_row: bool) -> list[Storage]:
        found = []
        if is_reduction(statement):
            shape = self._shape() if self._lanes_of(statement) == 1 else (self._lanes_of(statement),)
            found.append(register(acc_name(statement.output), statement.accumulator, *shape))
            if self._lanes_of(statement) > 1:
                found.append(register(f"{acc_name(statement.output)}.total", statement.accumulator))
        if in_row:
            found.append(register(local_name(statement.output), row_dtype(statement), *self._shape()))
        return found

    def _lanes_of(self, statement: TensorExpr) -> int:
        """Lanes that share this statement's inner axis: none where it is shorter than they are."""
        inner = inner_axes(statement, self.group.outer)
        if self.vector or not inner or inner[-1].extent < self.lanes:
            return 1
        return self.lanes

    def _across(self, node: Node) -> Node:
        """The node for every outer point at hand."""
        return without_guards_inside(Loop(LANE, self.width, LoopKind.VECTOR, (node,))) if self.vector else node

    def _statement(self, statement: TensorExpr, reads: RowReads, *, in_row: bool) -> list[Node]:
        nodes: list[Node] = []
        inner = inner_axes(statement, self.group.outer)
        row_index = (ref(LANE),) if self.vector else ()
        if is_reduction(statement):
            nodes += self._reduction(statement, inner, reads)
            name = acc_name(statement.output) + (".total" if self._lanes_of(statement) > 1 else "")
            value: Expr = Load(name, row_index, statement.accumulator)
        elif inner:
            store = Compute(statement.output, statement.index, statement.body)
            return self._walk(statement, inner, lambda at: self._at(store, reads.with_axes(at)))
        else:
            value = reads.apply(statement.body)
        value = converted(value, statement)
        if in_row:
            nodes.append(self._across(Compute(local_name(statement.output), row_index, value)))
            value = Load(local_name(statement.output), row_index, statement.type.dtype)
        if statement.output not in self.group.locals:
            index = tuple(reads.apply(i) for i in statement.index)
            nodes.append(self._across(Compute(statement.output, index, value)))
        return nodes

    def _at(self, store: Compute, reads: RowReads) -> Node:
        statement = next(s for s in self.group.statements if s.output == store.tensor)
        index = tuple(reads.apply(i) for i in store.index)
        return Compute(store.tensor, index, converted(reads.apply(store.value), statement))

    def _reduction(self, statement: TensorExpr, inner: tuple[Axis, ...], reads: RowReads) -> list[Node]:
        combine = statement.combine or Combine.SUM
        acc, lanes = acc_name(statement.output), self._lanes_of(statement)
        start = identity(combine, statement.accumulator)
        if lanes == 1:
            index = (ref(LANE),) if self.vector else ()

            def join(at: dict[str, Expr]) -> Node:
                return Compute(acc, index, reads.with_axes(at).apply(statement.body), combine)

            return [self._across(Compute(acc, index, start)), *self._walk(statement, inner, join)]

        def join_lane(at: dict[str, Expr]) -> Node:
            return Compute(acc, (ref(LANE),), reads.with_axes(at).apply(statement.body), combine)

        def join_total(at: dict[str, Expr]) -> Node:
            return Compute(f"{acc}.total", (), reads.with_axes(at).apply(statement.body), combine)

        return [
            Loop(LANE, lanes, LoopKind.VECTOR, (Compute(acc, (ref(LANE),), start),)),
            *self._pieces(statement, inner, join_lane),
            *self._fold_lanes(acc, lanes, combine, statement.accumulator),
            *self._remainder(inner, join_total),
        ]

    def _fold_lanes(self, acc: str, lanes: int, combine: Combine, dtype: DType) -> list[Node]:
        """Vectors onto each other until one is left, then its lanes in pairs."""
        nodes: list[Node] = []
        while lanes > self.native:
            lanes //= 2
            other = Load(acc, (add(ref(LANE), num(lanes)),), dtype)
            nodes.append(Loop(LANE, lanes, LoopKind.VECTOR, (Compute(acc, (ref(LANE),), other, combine),)))
        parts: list[Expr] = [Load(acc, (num(i),), dtype) for i in range(lanes)]
        while len(parts) > 1:
            parts = [
                Op(JOINS[combine], (a, b), dtype) for a, b in zip(parts[::2], parts[1::2], strict=True)
            ]
        return [*nodes, Compute(f"{acc}.total", (), parts[0])]

    def _pieces(
        self, statement: TensorExpr, inner: tuple[Axis, ...], visit: Callable[[dict[str, Expr]], Node]
    ) -> list[Node]:
        """Loops over the inner axes, the innermost in pieces of `lanes`, then whole vectors of what is left."""
        lanes, last, rest = self._lanes_of(statement), inner[-1], inner[:-1]
        at: dict[str, Expr] = {a.name: ref(a.name) for a in rest}
        nodes: list[Node] = []
        if full := last.extent // lanes:
            piece = ref(f"{last.name}.piece")
            whole = visit({**at, last.name: add(mul(piece, num(lanes)), ref(LANE))})
            vector = without_guards_inside(Loop(LANE, lanes, LoopKind.VECTOR, (whole,)))
            nodes.append(Loop(piece.name, full, LoopKind.SERIAL, (vector,)))
        done = full * lanes
        if vectors := (last.extent - done) // self.native * self.native:
            part = visit({**at, last.name: add(num(done), ref(LANE))})
            nodes.append(Loop(LANE, vectors, LoopKind.VECTOR, (part,)))
        return self._around(rest, nodes)

    def _remainder(self, inner: tuple[Axis, ...], visit: Callable[[dict[str, Expr]], Node]) -> list[Node]:
        """Loops over what is less than a vector at the end of the innermost axis."""
        last, rest = inner[-1], inner[:-1]
        count = last.extent % self.native
        if not count:
            return []
        at: dict[str, Expr] = {a.name: ref(a.name) for a in rest}
        node = visit({**at, last.name: add(num(last.extent - count), ref(LANE))})
        return self._around(rest, [Loop(LANE, count, LoopKind.SERIAL, (node,))])

    @staticmethod
    def _around(axes: tuple[Axis, ...], nodes: list[Node]) -> list[Node]:
        for axis in reversed(axes):
            nodes = [Loop(axis.name, axis.extent, LoopKind.SERIAL, tuple(nodes))]
        return nodes

    def _walk(
        self, statement: TensorExpr, inner: tuple[Axis, ...], visit: Callable[[dict[str, Expr]], Node]
    ) -> list[Node]:
        """Loops over the inner axes; the lanes are the outer points at hand or pieces of the innermost axis."""
        if self._lanes_of(statement) == 1:
            return self._around(inner, [self._across(visit({a.name: ref(a.name) for a in inner}))])
        return [*self._pieces(statement, inner, visit), *self._remainder(inner, visit)]
