"""Nest group and its rProgram → schedule tree for a GPU: blocks, threads, and threads that share a reduction."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.ir.build import add, both, ceil_div, div, equal, least, less, mod, mul, num, ref
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.program import Axis, Combine, TensorExpr, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Barrier, Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree, Scope, Storage
from roller_svc.lower.map_gpu import is_map_group, lower_map_gpu
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
from roller_svc.lower.window_gpu import lower_window_gpu, slides_windows

LANE, THREAD = ".lane", ".thread"


def lower_nest_gpu(group: KernelGroup, program: RProgram) -> tuple[ScheduleTree, ...]:
    """One tree. Element i of a thread lies i * (threads on its axis) further on, so that neighbours stay neighbours."""
    if is_map_group(group):
        return lower_map_gpu(group, program)
    if slides_windows(group, program):
        return lower_window_gpu(group, program)
    order = _thread_order(group, program)
    body = _rows(group, program)
    for axis in reversed(group.outer):
        threads = program.block[axis.name] // program.thread[axis.name]
        at = add(mul(ref(f"{axis.name}.block"), num(program.block[axis.name])), ref(f"{axis.name}.thread"))
        if (elements := program.thread[axis.name]) > 1:
            at = add(at, mul(ref(f"{axis.name}.element"), num(threads)))
        body = (Let(f"{axis.name}.at", at, body),)
        if elements > 1:
            body = (Loop(f"{axis.name}.element", elements, LoopKind.UNROLL, body),)
    thread: Expr = num(0)
    for var, extent in order:
        thread = add(mul(thread, num(extent)), ref(var))
    body = (Let(THREAD, thread, body),)
    for var, extent in reversed(order):
        body = (Loop(var, extent, LoopKind.THREAD, body),)
    for axis in reversed(group.outer):
        blocks = ceil_div(axis.extent, program.block[axis.name])
        body = (Loop(f"{axis.name}.block", blocks, LoopKind.BLOCK, body),)
    return (ScheduleTree(group.name, body),)


def _thread_order(group: KernelGroup, program: RProgram) -> list[tuple[str, int]]:
    """Thread loops, the fastest last: lanes, before them the vector axis."""
    axes = sorted(group.outer, key=lambda a: a.name == program.space.vector_axis)
    order = [(f"{a.name}.thread", program.block[a.name] // program.thread[a.name]) for a in axes]
    return [*order, (LANE, program.lanes)]


def _rows(group: KernelGroup, program: RProgram) -> tuple[Node, ...]:
    """What a thread does at one outer point.

    Threads beyond the edge repeat the last point, for all threads of a block must meet at its barriers; they store
    nothing. Without barriers they do nothing at all.
    """
    inside: Expr | None = None
    at: dict[str, Expr] = {}
    for axis in group.outer:
        place = ref(f"{axis.name}.at")
        at[axis.name] = place
        if axis.extent % program.block[axis.name]:
            inside = both(inside, less(place, num(axis.extent)))
            if program.lanes > 1:
                at[axis.name] = least(place, num(axis.extent - 1))
    rows = _Rows(group, program, at, inside if program.lanes > 1 else None)
    nodes = rows.nodes()
    if program.lanes == 1 and inside is not None:
        nodes = (Branch(inside, nodes),)
    return nodes


@dataclass(frozen=True, slots=True)
class _Rows:
    group: KernelGroup
    program: RProgram
    at: dict[str, Expr]
    inside: Expr | None  # whether this thread's point is one; None: it is

    def nodes(self) -> tuple[Node, ...]:
        rows = row_tensors(self.group)
        reads = RowReads(rows, (), self.at)
        storages: list[Storage] = []
        nodes: list[Node] = []
        for statement in self.group.statements:
            if is_reduction(statement):
                storages.append(register(acc_name(statement.output), statement.accumulator))
                if self.program.lanes > 1:
                    shape = (self.program.threads,)
                    storages.append(
                        Storage(_shared(statement), statement.accumulator, shape, Scope.SHARED, ())
                    )
            if statement.output in rows:
                storages.append(register(local_name(statement.output), row_dtype(statement)))
            nodes += self._statement(statement, reads, in_row=statement.output in rows)
        return wrapped(storages, tuple(nodes))

    def _statement(self, statement: TensorExpr, reads: RowReads, *, in_row: bool) -> list[Node]:
        nodes: list[Node] = []
        inner = inner_axes(statement, self.group.outer)
        if is_reduction(statement):
            nodes += self._reduction(statement, inner, reads)
            value: Expr = Load(acc_name(statement.output), (), statement.accumulator)
        elif inner:

            def store(at: dict[str, Expr]) -> tuple[Node, ...]:
                here = reads.with_axes(at)
                index = tuple(here.apply(i) for i in statement.index)
                return (Compute(statement.output, index, converted(here.apply(statement.body), statement)),)

            return self._guarded(self._walk(inner, store), None)
        else:
            value = reads.apply(statement.body)
        value = converted(value, statement)
        if in_row:
            nodes.append(Compute(local_name(statement.output), (), value))
            value = Load(local_name(statement.output), (), statement.type.dtype)
        if statement.output not in self.group.locals:
            index = tuple(reads.apply(i) for i in statement.index)
            first = equal(ref(LANE), num(0)) if self.program.lanes > 1 else None
            nodes += self._guarded([Compute(statement.output, index, value)], first)
        return nodes

    def _guarded(self, nodes: list[Node], also: Expr | None) -> list[Node]:
        cond = both(self.inside, also)
        return nodes if cond is None else [Branch(cond, tuple(nodes))]

    def _reduction(self, statement: TensorExpr, inner: tuple[Axis, ...], reads: RowReads) -> list[Node]:
        combine, dtype = statement.combine or Combine.SUM, statement.accumulator
        acc = acc_name(statement.output)

        def join(at: dict[str, Expr]) -> tuple[Node, ...]:
            return (Compute(acc, (), reads.with_axes(at).apply(statement.body), combine),)

        nodes: list[Node] = [Compute(acc, (), identity(combine, dtype)), *self._walk(inner, join)]
        if self.program.lanes > 1:
            nodes += self._combine_lanes(_shared(statement), acc, combine, dtype)
        return nodes

    def _combine_lanes(self, shared: str, acc: str, combine: Combine, dtype: DType) -> list[Node]:
        """Halving steps through shared memory; afterwards every lane has the total."""
        thread, lanes = ref(THREAD), self.program.lanes
        nodes: list[Node] = [Compute(shared, (thread,), Load(acc, (), dtype)), Barrier()]
        step = lanes // 2
        while step:
            other = Load(shared, (add(thread, num(step)),), dtype)
            nodes += [Branch(less(ref(LANE), num(step)), (Compute(shared, (thread,), other, combine),)), Barrier()]
            step //= 2
        first = mul(div(thread, lanes), num(lanes))
        return [*nodes, Compute(acc, (), Load(shared, (first,), dtype)), Barrier()]

    def _walk(
        self, inner: tuple[Axis, ...], visit: Callable[[dict[str, Expr]], tuple[Node, ...]]
    ) -> list[Node]:
        """Loops over the inner axes, their points dealt to the lanes in turn."""
        lanes = self.program.lanes
        if lanes == 1:
            nodes = visit({a.name: ref(a.name) for a in inner})
            for axis in reversed(inner):
                nodes = (Loop(axis.name, axis.extent, LoopKind.SERIAL, nodes),)
            return list(nodes)
        points = 1
        for axis in inner:
            points *= axis.extent
        flat, nodes, stride = ref(".point"), visit({a.name: ref(a.name) for a in inner}), 1
        for axis in reversed(inner):
            place = div(flat, stride)
            nodes = (Let(axis.name, place if stride * axis.extent >= points else mod(place, axis.extent), nodes),)
            stride *= axis.extent
        limit = less(flat, num(points))
        if points % lanes:
            nodes = (Branch(limit, nodes),)
        nodes = (Let(flat.name, add(mul(ref(".round"), num(lanes)), ref(LANE)), nodes),)
        return [Loop(".round", ceil_div(points, lanes), LoopKind.SERIAL, nodes)]


def _shared(statement: TensorExpr) -> str:
    return f"{statement.output}.shared"
