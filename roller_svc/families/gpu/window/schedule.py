"""Windowed reduction and its rProgram → schedule tree for a GPU: adjacent outputs of a thread share their inputs.

A thread computes some outputs along each window's axis, and vectors along a row without a window. It loads the inputs
under one line of its windows to registers once.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from roller_svc.families.gpu.window.cost import window_registers
from roller_svc.families.gpu.window.workload import UNROLLED_STATEMENTS, Window, WindowFacts, WindowSpace
from roller_svc.ir.affine import affine
from roller_svc.ir.expr import Expr, Load, Op, OpKind, Select, axes_of, children, loads_of, with_children
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, ceil_div, le, logical_and, lt, mul, num, ref
from roller_svc.ir.program import Combine, TensorExpr, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree, Storage
from roller_svc.perf.occupancy import BlockResources, blocks_per_core
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import (
    RowReads,
    acc_name,
    inner_axes,
    is_reduction,
    nest_loops,
    register,
    row_storages,
    row_tensors,
    wrap_in_storages,
)

MAX_ACCESS_BYTES = 16  # one access of a thread (LD.128)


def lower(group: KernelGroup, program: RProgram, workload: Workload[WindowFacts]) -> tuple[ScheduleTree, ...]:
    """Return one tree; the outputs of a thread are adjacent along every axis."""
    space, hw = workload.facts.windows, workload.machine.hw
    lowered = _Windows(group, program, space)
    needs = BlockResources(program.threads, window_registers(space, lowered.thread, hw.limits), 0)
    # launch bounds: without them the compiler hoists all line loads, and registers allow few blocks
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
    def register_windows(self) -> tuple[Window, ...]:
        return self.space.register_windows(self.thread)

    @cached_property
    def row(self) -> str:
        return self.names[self.space.row]

    @cached_property
    def lanes(self) -> int:
        return self.space.lanes(self.thread)

    @cached_property
    def elements(self) -> tuple[tuple[str, int], ...]:
        """Return variable and count of each axis along which a thread has several outputs, the row's last."""
        elements = [(f"{self.names[w.axis]}.element", self.thread[w.axis]) for w in self.register_windows]
        if self.lanes > 1:
            elements.append((f"{self.row}.element", self.lanes))
        return tuple(sorted(elements, key=lambda e: e[0] == f"{self.row}.element"))

    # positions ------------------------------------------------------------------------------------------------------
    def blocks(self) -> tuple[Node, ...]:
        nodes = self._statements()
        for axis in self.group.outer:
            threads = self.program.block[axis.name] // self.program.thread[axis.name]
            at = add(mul(ref(f"{axis.name}.block"), num(threads)), ref(f"{axis.name}.thread"))
            nodes = (Let(f"{axis.name}.first", mul(at, num(self.program.thread[axis.name])), nodes),)
        block, thread = self.program.block, self.program.thread
        order = sorted((a.name for a in self.group.outer), key=lambda name: name == self.row)
        nodes = nest_loops(LoopKind.THREAD, [(f"{name}.thread", block[name] // thread[name]) for name in order], nodes)
        blocks = [(f"{axis.name}.block", ceil_div(axis.extent, block[axis.name])) for axis in self.group.outer]
        return nest_loops(LoopKind.BLOCK, blocks, nodes)

    def _first_outputs(self) -> dict[str, Expr]:
        return {a.name: ref(f"{a.name}.first") for a in self.group.outer}

    def _at(self) -> dict[str, Expr]:
        """Return the position of one of the thread's outputs; its element variables are bound."""
        varying = {var for var, _ in self.elements}
        return {
            name: add(first, ref(f"{name}.element")) if f"{name}.element" in varying else first
            for name, first in self._first_outputs().items()
        }

    def _has_tail(self, axis: str) -> bool:
        extent = next(a.extent for a in self.group.outer if a.name == axis)
        return extent % self.program.block[axis] != 0

    def _inside(self, position: Expr, axis: str) -> Expr | None:
        extent = next(a.extent for a in self.group.outer if a.name == axis)
        return lt(position, num(extent)) if self._has_tail(axis) else None

    def _for_each_output(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Loop over the thread's outputs; adjacent ones along the row are lanes of a vector."""
        for var, count in reversed(self.elements):
            kind = LoopKind.VECTOR if var == f"{self.row}.element" else LoopKind.UNROLL
            body = (Loop(var, count, kind, body),)
        return body

    # statements -----------------------------------------------------------------------------------------------------
    def _statements(self) -> tuple[Node, ...]:
        storages: list[Storage] = []
        nodes: list[Node] = []
        index = tuple(ref(var) for var, _ in self.elements)
        shape = tuple(count for _, count in self.elements)
        for statement in self.group.statements:
            if is_reduction(statement):
                combine = statement.combine or Combine.SUM
                storages.append(register(acc_name(statement.output), statement.accumulator, *shape))
                start = Compute(acc_name(statement.output), index, identity(combine, statement.accumulator))
                nodes += (*self._for_each_output((start,)), *self._reduce_windows(statement, combine))
            storages += row_storages((statement,), row_tensors(self.group), *shape)
        return wrap_in_storages(storages, (*self._guard_first_output(tuple(nodes)), *self._store_outputs()))

    def _guard_first_output(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Guard the nodes by the condition that the thread's first output exists."""
        inside: Expr | None = None
        for axis in self.group.outer:
            inside = logical_and(inside, self._inside(ref(f"{axis.name}.first"), axis.name))
        return nodes if inside is None else (Branch(inside, nodes),)

    def _store_outputs(self) -> tuple[Node, ...]:
        """Execute the statements at each output after all reductions, by full vectors along the row if possible."""
        nodes = self._epilogue()
        done = ""
        if self.elements:
            done = self.elements[-1][0].removesuffix(".element")
            nodes = self._store_row(self.elements[-1], nodes)
        at = self._at()
        for axis in self.group.outer:
            if axis.name != done and (inside := self._inside(at[axis.name], axis.name)) is not None:
                nodes = (Branch(inside, nodes),)
        return nest_loops(LoopKind.UNROLL, self.elements[:-1], nodes)

    def _store_row(self, last: tuple[str, int], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        var, count = last
        axis = var.removesuffix(".element")
        kind = LoopKind.VECTOR if axis == self.row else LoopKind.UNROLL
        full = (Loop(var, count, kind, nodes),)
        if not self._has_tail(axis):
            return full
        extent = next(a.extent for a in self.group.outer if a.name == axis)
        first = ref(f"{axis}.first")
        guarded = (Branch(lt(add(first, ref(var)), num(extent)), nodes),)
        tail = (Loop(var, count, LoopKind.UNROLL, guarded),)
        if kind is LoopKind.UNROLL:
            return tail
        if extent % count == 0:
            return (Branch(lt(first, num(extent)), full),)
        return (Branch(le(add(first, num(count)), num(extent)), full, tail),)

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
            nodes += reads.store(self.group, statement, value)
        return tuple(nodes)

    # windows --------------------------------------------------------------------------------------------------------
    def _reduce_windows(self, statement: TensorExpr, combine: Combine) -> tuple[Node, ...]:
        """Reduce the windows of all outputs, one line of inputs in registers after the other."""
        inner = inner_axes(statement, self.group.outer)
        windows = tuple(w for w in self.register_windows if any(a.name == w.inner for a in inner))
        line_inputs = tuple(dict.fromkeys(_window_inputs(statement.body, self._strides(windows)))) if windows else ()
        reads = RowReads(row_tensors(self.group), (), self._at())
        in_registers = {expr: Load(f".line{i}", self._line_index(windows), expr.dtype) for i, expr in enumerate(line_inputs)}
        value = reads.apply(_replace_subexpressions(statement.body, in_registers))
        acc = Compute(acc_name(statement.output), tuple(ref(var) for var, _ in self.elements), value, combine)
        fills = [self._line(f".line{i}", expr, windows) for i, expr in enumerate(line_inputs)]
        nodes: tuple[Node, ...] = ()
        for line in itertools.product(*(range(w.input_extent(self.thread[w.axis])) for w in windows[:-1])):
            updates = self._accumulate_line(acc, windows, line)
            body = wrap_in_storages(
                [registers for registers, _ in fills], (*(node for _, fill in fills for node in fill), *updates)
            )
            for window, position in zip(windows, line, strict=False):
                body = (Let(f"{window.inner}.line", num(position), body),)
            nodes += body
        unrolled = self.space.unrolled_statements(self.thread)
        for axis in reversed([a for a in inner if all(a.name != w.inner for w in windows)]):
            unrolled *= axis.extent
            kind = LoopKind.UNROLL if unrolled <= UNROLLED_STATEMENTS else LoopKind.SERIAL
            nodes = (Loop(axis.name, axis.extent, kind, nodes),)
        return nodes

    def _strides(self, windows: tuple[Window, ...]) -> dict[str, tuple[str, int]]:
        """Return outer axis and stride of each inner axis."""
        return {w.inner: (self.names[w.axis], w.stride) for w in windows}

    def _accumulate_line(self, acc: Compute, windows: tuple[Window, ...], line: tuple[int, ...]) -> tuple[Node, ...]:
        """Accumulate a line of inputs into each output whose window covers it.

        `line` is its position along each window but the last.
        """
        nodes: tuple[Node, ...] = (acc,)
        if self.elements and self.elements[-1][0] == f"{self.row}.element":
            var, count = self.elements[-1]
            nodes = (Loop(var, count, LoopKind.VECTOR, nodes),)
        if windows:
            nodes = (Loop(windows[-1].inner, windows[-1].taps, LoopKind.UNROLL, self._element_loop(windows[-1], nodes)),)
        for window, input_position in zip(windows, line, strict=False):
            outputs: tuple[Node, ...] = ()
            for element in range(self.thread[window.axis]):
                tap = input_position - element * window.stride
                if 0 <= tap < window.taps:
                    body = (Let(window.inner, num(tap), nodes),)
                    outputs += (Let(f"{self.names[window.axis]}.element", num(element), body),)
            nodes = outputs
        for window in self.register_windows:
            if window not in windows:
                nodes = self._element_loop(window, nodes)
        return nodes

    def _element_loop(self, window: Window, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        name = self.names[window.axis]
        if name == self.row:
            return nodes  # this axis is the vector loop
        return (Loop(f"{name}.element", self.thread[window.axis], LoopKind.UNROLL, nodes),)

    def _line_index(self, windows: tuple[Window, ...]) -> tuple[Expr, ...]:
        """Return the index of an output's input in the line, under tap `inner` of its window."""
        last = windows[-1]
        position = add(mul(ref(f"{self.names[last.axis]}.element"), num(last.stride)), ref(last.inner))
        return (position, *((ref(f"{self.row}.element"),) if self.lanes > 1 else ()))

    def _line(self, name: str, expr: Expr, windows: tuple[Window, ...]) -> tuple[Storage, tuple[Node, ...]]:
        """Return the registers of the inputs under one line of all windows, and the loop that loads them."""
        last, first = windows[-1], self._first_outputs()
        extent = last.input_extent(self.thread[last.axis])
        positions: dict[str, Expr] = {**first, last.inner: ref(".place")}
        for window in windows[:-1]:
            positions[window.inner] = ref(f"{window.inner}.line")
        lane = ref(f"{self.row}.element")
        if self.lanes > 1:
            positions[self.row] = add(first[self.row], lane)
        value = RowReads(row_tensors(self.group), (), positions).apply(expr)
        inside: Expr | None = None
        for window in windows:
            inside = logical_and(inside, self._is_under_window(window, positions[window.inner]))
        if inside is not None:
            value = Select(inside, value, identity(Combine.SUM, expr.dtype), expr.dtype)
        index = (ref(".place"), *((lane,) if self.lanes > 1 else ()))
        node = Compute(name, index, value)
        registers = register(name, expr.dtype.compute, extent, *((self.lanes,) if self.lanes > 1 else ()))
        if self.lanes > 1:
            vector = Loop(lane.name, self.lanes, LoopKind.VECTOR, (node,))
            return registers, (Loop(".place", extent, LoopKind.UNROLL, (vector,)),)
        return registers, tuple(_aligned_loops(".place", extent, node, self._aligned(expr, last)))

    def _aligned(self, expr: Expr, window: Window) -> tuple[int, int]:
        """Return (first aligned position of a line, elements of one aligned load)."""
        load = loads_of(expr)[0]
        form = affine(load.index[-1]) if load.index else None
        width = math.gcd(MAX_ACCESS_BYTES // load.dtype.bytes, window.stride * self.thread[window.axis])
        if form is None or form.coeff(window.inner) != 1 or width == 1:
            return 0, 1
        return -form.offset % width, width

    def _is_under_window(self, window: Window, position: Expr) -> Expr | None:
        """Return the condition that some output's window covers the position; those beyond the edge have none."""
        axis = self.names[window.axis]
        if not self._has_tail(axis):
            return None
        extent = next(a.extent for a in self.group.outer if a.name == axis)
        at = add(mul(ref(f"{axis}.first"), num(window.stride)), position)
        return lt(at, num(window.input_extent(extent)))


def _aligned_loops(var: str, count: int, node: Compute, aligned: tuple[int, int]) -> Iterator[Node]:
    """Yield loops up to the first aligned position, over full vectors, and over the tail."""
    first, width = aligned
    first = min(first, count)
    vectors = (count - first) // width * width if width > 1 else 0
    tail = count - first - vectors
    segments = (
        (0, first, LoopKind.UNROLL),
        (first, vectors, LoopKind.VECTOR),
        (first + vectors, tail, LoopKind.UNROLL),
    )
    for start, extent, kind in segments:
        if extent:
            yield Loop(f"{var}.part", extent, kind, (Let(var, add(ref(f"{var}.part"), num(start)), (node,)),))


# expressions ----------------------------------------------------------------------------------------------------------
def _window_inputs(expr: Expr, strides: dict[str, tuple[str, int]]) -> Iterator[Expr]:
    """Yield the largest parts of a body that load memory and use window axes only as stride * outer + inner.

    Parts within a branch of another Select are left out, since the Select may guard them.
    """
    loads = loads_of(expr)
    if loads and _moves_with_windows(expr, strides) and not any(any(x.bounds_checked) for x in loads):
        if axes_of(expr) & strides.keys():
            yield expr
        return
    match expr:
        case Load() | Select() | Op(kind=OpKind.LAND | OpKind.LOR):
            return
        case _:
            for child in children(expr):
                yield from _window_inputs(child, strides)


def _moves_with_windows(expr: Expr, strides: dict[str, tuple[str, int]]) -> bool:
    varying = strides.keys() | {outer for outer, _ in strides.values()}
    if not axes_of(expr) & varying:
        return True
    if not isinstance(expr, Load) and (form := affine(expr)) is not None:
        return all(form.coeff(outer) == stride * form.coeff(inner) for inner, (outer, stride) in strides.items())
    return all(_moves_with_windows(child, strides) for child in children(expr))


def _replace_subexpressions(expr: Expr, loads: dict[Expr, Load]) -> Expr:
    """Replace these parts of the expression by their loads."""
    if expr in loads:
        return loads[expr]
    operands = children(expr)
    return with_children(expr, tuple(_replace_subexpressions(operand, loads) for operand in operands)) if operands else expr
