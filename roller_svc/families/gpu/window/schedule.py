"""Windowed group and its rProgram → schedule tree for a GPU: a thread's neighbouring outputs share their inputs.

A thread computes a few outputs along each window's axis, and vectors along a row without a window. It holds the inputs
under one line of its windows in registers and reads each once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from roller_svc.errors import InvariantError
from roller_svc.families.gpu.window.cost import window_registers
from roller_svc.families.gpu.window.workload import UNROLLED_STATEMENTS, Window, WindowSpace, window_space
from roller_svc.ir.affine import affine
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind, Select, axes_of, children, loads_of, with_children
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, ceil_div, le, logical_and, lt, mul, num, ref
from roller_svc.ir.program import Combine, TensorExpr, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree, Storage
from roller_svc.perf.occupancy import BlockResources, blocks_per_core
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

WIDEST_BYTES = 16  # of one access of a thread (LD.128)


def lower(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """One tree. The outputs of a thread are neighbours along every axis."""
    space = window_space(program.space)
    if space is None:
        raise InvariantError(f"{group.name} has no windows for threads to slide")
    lowered = _Windows(group, program, space)
    needs = BlockResources(program.threads, window_registers(space, lowered.thread, hw.limits), 0)
    # as many blocks as the model counts on: left alone, the compiler reads all lines ahead and leaves room for few
    resident = min(blocks_per_core(needs, hw), ceil_div(program.grid, hw.num_cores))
    return (ScheduleTree(group.name, lowered.blocks(), resident=resident),)


@dataclass(frozen=True)
class _Windows:
    group: KernelGroup
    program: RProgram
    space: WindowSpace

    @cached_property
    def names(self) -> tuple[str, ...]:
        return tuple(a.name for a in self.program.space.axes)

    @cached_property
    def thread(self) -> tuple[int, ...]:
        return tuple(self.program.thread[name] for name in self.names)

    @cached_property
    def slid(self) -> tuple[Window, ...]:
        return self.space.register_windows(self.thread)

    @cached_property
    def row(self) -> str:
        return self.names[self.space.row]

    @cached_property
    def lanes(self) -> int:
        return self.space.lanes(self.thread)

    @cached_property
    def elements(self) -> tuple[tuple[str, int], ...]:
        """Variable and count of each axis along which a thread has several outputs, that along the row last."""
        found = [(f"{self.names[w.axis]}.element", self.thread[w.axis]) for w in self.slid]
        if self.lanes > 1:
            found.append((f"{self.row}.element", self.lanes))
        return tuple(sorted(found, key=lambda e: e[0] == f"{self.row}.element"))

    # places ---------------------------------------------------------------------------------------------------------
    def blocks(self) -> tuple[Node, ...]:
        nodes = self._statements()
        for axis in self.group.outer:
            threads = self.program.block[axis.name] // self.program.thread[axis.name]
            at = add(mul(ref(f"{axis.name}.block"), num(threads)), ref(f"{axis.name}.thread"))
            nodes = (Let(f"{axis.name}.first", mul(at, num(self.program.thread[axis.name])), nodes),)
        order = sorted(self.group.outer, key=lambda a: a.name == self.row)
        for axis in reversed(order):
            threads = self.program.block[axis.name] // self.program.thread[axis.name]
            nodes = (Loop(f"{axis.name}.thread", threads, LoopKind.THREAD, nodes),)
        for axis in reversed(self.group.outer):
            count = ceil_div(axis.extent, self.program.block[axis.name])
            nodes = (Loop(f"{axis.name}.block", count, LoopKind.BLOCK, nodes),)
        return nodes

    def _first(self) -> dict[str, Expr]:
        return {a.name: ref(f"{a.name}.first") for a in self.group.outer}

    def _at(self) -> dict[str, Expr]:
        """The place of one of the thread's outputs, its element variables bound."""
        moving = {var for var, _ in self.elements}
        return {
            name: add(first, ref(f"{name}.element")) if f"{name}.element" in moving else first
            for name, first in self._first().items()
        }

    def _overhangs(self, axis: str) -> bool:
        extent = next(a.extent for a in self.group.outer if a.name == axis)
        return extent % self.program.block[axis] != 0

    def _inside(self, place: Expr, axis: str) -> Expr | None:
        extent = next(a.extent for a in self.group.outer if a.name == axis)
        return lt(place, num(extent)) if self._overhangs(axis) else None

    def _each_output(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """The body for each of the thread's outputs; neighbours along the row are lanes of a vector."""
        for var, count in reversed(self.elements):
            kind = LoopKind.VECTOR if var == f"{self.row}.element" else LoopKind.UNROLL
            body = (Loop(var, count, kind, body),)
        return body

    # statements -----------------------------------------------------------------------------------------------------
    def _statements(self) -> tuple[Node, ...]:
        rooms: list[Storage] = []
        nodes: list[Node] = []
        index = tuple(ref(var) for var, _ in self.elements)
        shape = tuple(count for _, count in self.elements)
        for statement in self.group.statements:
            if is_reduction(statement):
                combine = statement.combine or Combine.SUM
                rooms.append(register(acc_name(statement.output), statement.accumulator, *shape))
                start = Compute(acc_name(statement.output), index, identity(combine, statement.accumulator))
                nodes += (*self._each_output((start,)), *self._reduced(statement, combine))
            if statement.output in row_tensors(self.group):
                rooms.append(register(local_name(statement.output), row_dtype(statement), *shape))
        return wrap_in_storages(rooms, (*self._only_inside(tuple(nodes)), *self._stored()))

    def _only_inside(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Under the condition that the thread's first output is one."""
        inside: Expr | None = None
        for axis in self.group.outer:
            inside = logical_and(inside, self._inside(ref(f"{axis.name}.first"), axis.name))
        return nodes if inside is None else (Branch(inside, nodes),)

    def _stored(self) -> tuple[Node, ...]:
        """The statements at each output, once all are reduced: vectors along the row where all of them are outputs."""
        nodes = self._epilogue()
        done = ""
        if self.elements:
            done = self.elements[-1][0].removesuffix(".element")
            nodes = self._row_stored(self.elements[-1], nodes)
        at = self._at()
        for axis in self.group.outer:
            if axis.name != done and (inside := self._inside(at[axis.name], axis.name)) is not None:
                nodes = (Branch(inside, nodes),)
        for var, count in reversed(self.elements[:-1]):
            nodes = (Loop(var, count, LoopKind.UNROLL, nodes),)
        return nodes

    def _row_stored(self, last: tuple[str, int], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        var, count = last
        axis = var.removesuffix(".element")
        kind = LoopKind.VECTOR if axis == self.row else LoopKind.UNROLL
        whole = (Loop(var, count, kind, nodes),)
        if not self._overhangs(axis):
            return whole
        extent = next(a.extent for a in self.group.outer if a.name == axis)
        first = ref(f"{axis}.first")
        each = (Branch(lt(add(first, ref(var)), num(extent)), nodes),)
        rest = (Loop(var, count, LoopKind.UNROLL, each),)
        if kind is LoopKind.UNROLL:
            return rest
        if extent % count == 0:
            return (Branch(lt(first, num(extent)), whole),)
        return (Branch(le(add(first, num(count)), num(extent)), whole, rest),)

    def _epilogue(self) -> tuple[Node, ...]:
        rows = row_tensors(self.group)
        index = tuple(ref(var) for var, _ in self.elements)
        reads = RowReads(rows, index, self._at())
        nodes: list[Node] = []
        for statement in self.group.statements:
            if is_reduction(statement):
                value: Expr = Load(acc_name(statement.output), index, statement.accumulator)
            else:
                value = reads.apply(statement.body)
            value = convert_to_type(value, statement)
            if statement.output in rows:
                nodes.append(Compute(local_name(statement.output), index, value))
                value = Load(local_name(statement.output), index, statement.type.dtype)
            if statement.output not in self.group.register_tensors:
                nodes.append(Compute(statement.output, tuple(reads.apply(i) for i in statement.index), value))
        return tuple(nodes)

    # windows --------------------------------------------------------------------------------------------------------
    def _reduced(self, statement: TensorExpr, combine: Combine) -> tuple[Node, ...]:
        """All outputs' windows: lines of inputs one after the other, each held while the windows slide along it."""
        inner = inner_axes(statement, self.group.outer)
        slid = tuple(w for w in self.slid if any(a.name == w.inner for a in inner))
        held = tuple(dict.fromkeys(_under_windows(statement.body, self._pairs(slid)))) if slid else ()
        reads = RowReads(row_tensors(self.group), (), self._at())
        places = {expr: Load(f".line{i}", self._line_index(slid), expr.dtype) for i, expr in enumerate(held)}
        value = reads.apply(_replaced(statement.body, places))
        acc = Compute(acc_name(statement.output), tuple(ref(var) for var, _ in self.elements), value, combine)
        fills = [self._line(f".line{i}", expr, slid) for i, expr in enumerate(held)]
        nodes: tuple[Node, ...] = ()
        for line in itertools.product(*(range(w.input_extent(self.thread[w.axis])) for w in slid[:-1])):
            joins = self._joined(acc, slid, line)
            here = wrap_in_storages([room for room, _ in fills], (*(node for _, fill in fills for node in fill), *joins))
            for window, place in zip(slid, line, strict=False):
                here = (Let(f"{window.inner}.line", num(place), here),)
            nodes += here
        unrolled = self.space.unrolled_statements(self.thread)
        for axis in reversed([a for a in inner if all(a.name != w.inner for w in slid)]):
            unrolled *= axis.extent
            kind = LoopKind.UNROLL if unrolled <= UNROLLED_STATEMENTS else LoopKind.SERIAL
            nodes = (Loop(axis.name, axis.extent, kind, nodes),)
        return nodes

    def _pairs(self, slid: tuple[Window, ...]) -> dict[str, tuple[str, int]]:
        """Inner axis → outer axis, stride."""
        return {w.inner: (self.names[w.axis], w.stride) for w in slid}

    def _joined(self, acc: Compute, slid: tuple[Window, ...], line: tuple[int, ...]) -> tuple[Node, ...]:
        """The part that a line of inputs has in each output that it lies under: `line` is its place along each window
        but the last."""
        nodes: tuple[Node, ...] = (acc,)
        if self.elements and self.elements[-1][0] == f"{self.row}.element":
            var, count = self.elements[-1]
            nodes = (Loop(var, count, LoopKind.VECTOR, nodes),)
        if slid:
            nodes = (Loop(slid[-1].inner, slid[-1].taps, LoopKind.UNROLL, self._element_loop(slid[-1], nodes)),)
        for window, place in zip(slid, line, strict=False):
            over: tuple[Node, ...] = ()
            for element in range(self.thread[window.axis]):
                tap = place - element * window.stride
                if 0 <= tap < window.taps:
                    under = (Let(window.inner, num(tap), nodes),)
                    over += (Let(f"{self.names[window.axis]}.element", num(element), under),)
            nodes = over
        for window in self.slid:
            if window not in slid:
                nodes = self._element_loop(window, nodes)
        return nodes

    def _element_loop(self, window: Window, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        name = self.names[window.axis]
        if name == self.row:
            return nodes  # it is the vector loop
        return (Loop(f"{name}.element", self.thread[window.axis], LoopKind.UNROLL, nodes),)

    def _line_index(self, slid: tuple[Window, ...]) -> tuple[Expr, ...]:
        """Where an output's input lies in the line: under tap `inner` of the window of its element."""
        along = slid[-1]
        place = add(mul(ref(f"{self.names[along.axis]}.element"), num(along.stride)), ref(along.inner))
        return (place, *((ref(f"{self.row}.element"),) if self.lanes > 1 else ()))

    def _line(self, name: str, expr: Expr, slid: tuple[Window, ...]) -> tuple[Storage, tuple[Node, ...]]:
        """Registers for what lies under one line of all windows, and the loop that fills them."""
        along, first = slid[-1], self._first()
        reach = along.input_extent(self.thread[along.axis])
        place: dict[str, Expr] = {**first, along.inner: ref(".place")}
        for window in slid[:-1]:
            place[window.inner] = ref(f"{window.inner}.line")
        lane = ref(f"{self.row}.element")
        if self.lanes > 1:
            place[self.row] = add(first[self.row], lane)
        value = RowReads(row_tensors(self.group), (), place).apply(expr)
        inside: Expr | None = None
        for window in slid:
            inside = logical_and(inside, self._reached(window, place[window.inner]))
        if inside is not None:
            value = Select(inside, value, Const(0.0 if expr.dtype.is_float else 0, expr.dtype), expr.dtype)
        index = (ref(".place"), *((lane,) if self.lanes > 1 else ()))
        node = Compute(name, index, value)
        room = register(name, expr.dtype.compute, reach, *((self.lanes,) if self.lanes > 1 else ()))
        if self.lanes > 1:
            vector = Loop(lane.name, self.lanes, LoopKind.VECTOR, (node,))
            return room, (Loop(".place", reach, LoopKind.UNROLL, (vector,)),)
        return room, tuple(_vectors(".place", reach, node, self._aligned(expr, along)))

    def _aligned(self, expr: Expr, along: Window) -> tuple[int, int]:
        """(first place of a line that lies at an aligned address, neighbours that are then loaded together)."""
        load = loads_of(expr)[0]
        place = affine(load.index[-1]) if load.index else None
        width = math.gcd(WIDEST_BYTES // load.dtype.bytes, along.stride * self.thread[along.axis])
        if place is None or place.coeff(along.inner) != 1 or width == 1:
            return 0, 1
        return -place.offset % width, width

    def _reached(self, window: Window, place: Expr) -> Expr | None:
        """Whether some output has the place under its window: those beyond the edge have none."""
        axis = self.names[window.axis]
        if not self._overhangs(axis):
            return None
        extent = next(a.extent for a in self.group.outer if a.name == axis)
        at = add(mul(ref(f"{axis}.first"), num(window.stride)), place)
        return lt(at, num(window.input_extent(extent)))


def _vectors(var: str, count: int, node: Compute, aligned: tuple[int, int]) -> Iterator[Node]:
    """A loop in parts: what lies before an aligned place, whole vectors, and the rest."""
    first, width = aligned
    first = min(first, count)
    whole = (count - first) // width * width if width > 1 else 0
    rest = count - first - whole
    parts = ((0, first, LoopKind.UNROLL), (first, whole, LoopKind.VECTOR), (first + whole, rest, LoopKind.UNROLL))
    for start, extent, kind in parts:
        if extent:
            yield Loop(f"{var}.part", extent, kind, (Let(var, add(ref(f"{var}.part"), num(start)), (node,)),))


# expressions ----------------------------------------------------------------------------------------------------------
def _under_windows(expr: Expr, pairs: dict[str, tuple[str, int]]) -> Iterator[Expr]:
    """The largest parts of a body that read memory and depend on windows' axes only as stride * outer + inner.

    Not those in a branch of a Select that is itself no such part: it may guard them.
    """
    loads = loads_of(expr)
    if loads and _slides(expr, pairs) and not any(any(x.bounds_checked) for x in loads):
        if axes_of(expr) & pairs.keys():
            yield expr
        return
    match expr:
        case Load() | Select() | Op(kind=OpKind.LAND | OpKind.LOR):
            return
        case _:
            for child in children(expr):
                yield from _under_windows(child, pairs)


def _slides(expr: Expr, pairs: dict[str, tuple[str, int]]) -> bool:
    moving = pairs.keys() | {outer for outer, _ in pairs.values()}
    if not axes_of(expr) & moving:
        return True
    if not isinstance(expr, Load) and (found := affine(expr)) is not None:
        return all(found.coeff(outer) == stride * found.coeff(inner) for inner, (outer, stride) in pairs.items())
    return all(_slides(child, pairs) for child in children(expr))


def _replaced(expr: Expr, places: dict[Expr, Load]) -> Expr:
    """The expression with those parts of it replaced."""
    if expr in places:
        return places[expr]
    parts = children(expr)
    return with_children(expr, tuple(_replaced(part, places) for part in parts)) if parts else expr
