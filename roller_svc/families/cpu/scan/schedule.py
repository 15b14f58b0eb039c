"""Scan and its rProgram → schedule tree for a CPU: chunks of a row in L1, or rows of many columns with their carries.

A chunk's values are computed in vectors, combined in steps of a few elements, and stored in vectors. In a step, each
element of a slow operation is first combined with those before it in the step: only the step's total waits for the carry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.analysis.scans import gate_product_dtype
from roller_svc.errors import require
from roller_svc.families.common.cpu.parallel_loops import SimdRows, loop_over_points, task_loops, whole_or_tail
from roller_svc.families.cpu.scan.cost import STEP
from roller_svc.families.cpu.scan.workload import ScanSpace
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, convert, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, mul, num, ref, sub
from roller_svc.ir.program import COMBINE_OPS, Axis
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Compute, Let, Loop, LoopKind, Node, ScheduleTree, Scope, Storage
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import RowReads, row_storages, row_tensors, wrap_in_storages

CHUNK = 512  # elements of a row in scratch memory; a multiple of STEP and of all vectors
RUNS = 8  # of a chunk, whose steps of a recurrence are composed side by side
VALUES, GATES, INSIDE, CARRY, LANE = ".values", ".gates", ".inside", ".carry", ".lane"
PRODUCT, RUN, RUN_PRODUCT = ".product", ".run", ".run_product"  # of gates up to the carry; state and gates of runs


def lower(group: KernelGroup, program: RProgram, workload: Workload[ScanSpace]) -> tuple[ScheduleTree, ...]:
    facts = workload.facts
    scan = _CpuScan(group, program, facts, program.unit.shape[-1])
    column = None if facts.column is None else program.space.axes[facts.column].members[0]
    nodes = scan.rows() if column is None else scan.columns(column)
    for axis in reversed(group.outer):
        if axis != column:
            nodes = loop_over_points(axis, program.block[axis.name], None, nodes)
    return (ScheduleTree(group.name, task_loops(group.outer, program, nodes)),)


@dataclass(frozen=True, slots=True)
class _CpuScan:
    group: KernelGroup
    program: RProgram
    space: ScanSpace
    width: int  # of a vector

    # rows -----------------------------------------------------------------------------------------------------------
    def rows(self) -> tuple[Node, ...]:
        """Visit the chunks of a row in order, with a carry."""
        scan = self.space.scan
        dtype, extent = scan.statement.accumulator, scan.axis.extent
        whole, rest = divmod(extent, CHUNK)
        first: Expr = mul(ref(".chunk"), num(CHUNK))
        if scan.is_reversed:
            first = mul(sub(num(whole - 1), ref(".chunk")), num(CHUNK))
        parts: list[tuple[Node, ...]] = []
        if whole:
            parts.append((Loop(".chunk", whole, LoopKind.SERIAL, self._chunk(first, CHUNK)),))
        if rest:
            parts.append(self._chunk(num(whole * CHUNK), rest))
        ordered = reversed(parts) if scan.is_reversed else parts
        storages = [
            Storage(CARRY, dtype, (), Scope.REGISTER, ()),
            Storage(VALUES, dtype, (min(CHUNK, extent),), Scope.STACK, ()),
            *self._total_storages(Scope.REGISTER),
        ]
        if self.space.step is not None:
            storages.append(Storage(GATES, dtype, (min(CHUNK, extent),), Scope.STACK, ()))
        nodes = (Compute(CARRY, (), self._start({})), *self._start_product(), *(n for part in ordered for n in part))
        return wrap_in_storages(storages, (*nodes, *self._store_totals({})))

    def _chunk(self, first: Expr, size: int) -> tuple[Node, ...]:
        rows = row_tensors(self.group)

        def load(element: Expr, lane: tuple[Expr, ...]) -> tuple[Node, ...]:
            at = {self.space.scan.axis.name: add(ref(".first"), element)}
            if (step := self.space.step) is None:
                return (Compute(VALUES, (element,), self._value(at)),)
            parts = ((GATES, step.gate), (VALUES, step.value))
            return tuple(Compute(name, (element,), self._converted(substitute(part, at))) for name, part in parts)

        def store(element: Expr, lane: tuple[Expr, ...]) -> tuple[Node, ...]:
            reads = RowReads(rows, lane, {self.space.scan.axis.name: add(ref(".first"), element)})
            return self._stores(reads, self._load(VALUES, element))

        nodes = self._in_vectors(size, load)
        if self.space.totals is not None:
            return (Let(".first", first, (*nodes, *self._fold_chunk(size))),)
        return (Let(".first", first, (*nodes, *self._scan_chunk(size), *self._in_vectors(size, store))),)

    def _in_vectors(self, size: int, visit: Callable[[Expr, tuple[Expr, ...]], tuple[Node, ...]]) -> tuple[Node, ...]:
        """Visit the elements of a chunk in vectors, then the rest one by one."""
        whole, rest = divmod(size, self.width)
        nodes: tuple[Node, ...] = ()
        if whole:
            element = add(mul(ref(".vector"), num(self.width)), ref(LANE))
            lanes = (Loop(LANE, self.width, LoopKind.VECTOR, visit(element, (ref(LANE),))),)
            nodes += (Loop(".vector", whole, LoopKind.SERIAL, self._with_rows(lanes, self.width)),)
        if rest:
            each = self._with_rows(visit(add(num(whole * self.width), ref(".rest")), (num(0),)), 1)
            nodes += (Loop(".rest", rest, LoopKind.SERIAL, each),)
        return nodes

    def _with_rows(self, nodes: tuple[Node, ...], width: int) -> tuple[Node, ...]:
        return wrap_in_storages(row_storages(self.group.statements, row_tensors(self.group), width), nodes)

    def _scan_chunk(self, size: int) -> tuple[Node, ...]:
        """Combine the values of a chunk in steps; those of the last, short step one by one."""
        whole, rest = divmod(size, STEP)
        step: Expr = mul(ref(".step"), num(STEP))
        if self.space.scan.is_reversed:
            step = mul(sub(num(whole - 1), ref(".step")), num(STEP))
        parts: list[tuple[Node, ...]] = []
        if whole:
            parts.append((Loop(".step", whole, LoopKind.SERIAL, (Let(".start", step, self._scan_step(STEP)),)),))
        if rest:
            parts.append((Let(".start", num(whole * STEP), self._scan_step(rest)),))
        ordered = reversed(parts) if self.space.scan.is_reversed else parts
        return tuple(node for part in ordered for node in part)

    def _scan_step(self, size: int) -> tuple[Node, ...]:
        scan = self.space.scan
        places = list(range(size))
        order = [add(ref(".start"), num(place)) for place in (places[::-1] if scan.is_reversed else places)]
        if not self.space.has_slow_chain:
            return self._serial_step(order)
        inside = [self._load(INSIDE, num(place)) for place in places]
        carry = self._load(CARRY)
        nodes = [Compute(INSIDE, (num(0),), self._load(VALUES, order[0]))]
        for place in places[1:]:
            joined = self._joined(inside[place - 1], self._load(VALUES, order[place]))
            nodes.append(Compute(INSIDE, (num(place),), joined))
        earlier = [None, *inside] if scan.is_exclusive else list(inside)
        for at, before in zip(order, earlier, strict=False):
            nodes.append(Compute(VALUES, (at,), carry if before is None else self._joined(carry, before)))
        nodes.append(Compute(CARRY, (), self._joined(carry, inside[-1])))
        return wrap_in_storages([Storage(INSIDE, carry.dtype, (size,), Scope.STACK, ())], tuple(nodes))

    def _serial_step(self, order: list[Expr]) -> tuple[Node, ...]:
        """Combine one element after the other with the carry."""
        nodes: list[Node] = []
        carry = self._load(CARRY)
        for at in order:
            value = self._load(VALUES, at)
            if (linear := self.space.step) is not None:
                state = linear.applied(carry, self._load(GATES, at), value, is_composed=self.space.is_composed)
                nodes += [Compute(CARRY, (), state), Compute(VALUES, (at,), carry)]
            elif self.space.scan.is_exclusive:
                own = self._load(INSIDE, num(0))
                nodes += [Compute(INSIDE, (num(0),), value), Compute(VALUES, (at,), carry)]
                nodes.append(Compute(CARRY, (), self._joined(carry, own)))
            else:
                nodes += [Compute(CARRY, (), self._joined(carry, value)), Compute(VALUES, (at,), carry)]
        return wrap_in_storages([Storage(INSIDE, carry.dtype, (1,), Scope.STACK, ())], tuple(nodes))

    # totals of recurrences ------------------------------------------------------------------------------------------
    def _fold_chunk(self, size: int) -> tuple[Node, ...]:
        """Compose the steps of equal runs of a chunk side by side, then the runs; then the steps of the rest."""
        length, rest = divmod(size, RUNS)
        nodes: list[Node] = []
        if length:
            runs = [(num(run),) for run in range(RUNS)]
            nodes += [node for run in runs for node in self._identity(RUN, RUN_PRODUCT, run)]
            inside = [
                node
                for run in range(RUNS)
                for node in self._composed(RUN, RUN_PRODUCT, runs[run], *self._step_at(size, add(num(run * length), ref(".step"))))
            ]
            nodes.append(Loop(".step", length, LoopKind.SERIAL, tuple(inside)))
            for run in runs:
                gate, value = self._load(RUN_PRODUCT, *run), self._load(RUN, *run)
                nodes += self._composed(CARRY, PRODUCT, (), gate, value, is_composed=True)
        if rest:
            step = self._step_at(size, add(num(length * RUNS), ref(".step")))
            nodes.append(Loop(".step", rest, LoopKind.SERIAL, self._composed(CARRY, PRODUCT, (), *step)))
        return tuple(nodes)

    def _step_at(self, size: int, place: Expr) -> tuple[Expr, Expr]:
        """Return gate and value of a step of a chunk by its place in the order of the scan."""
        at = sub(num(size - 1), place) if self.space.scan.is_reversed else place
        return self._load(GATES, at), self._load(VALUES, at)

    def _identity(self, state: str, product: str, index: tuple[Expr, ...]) -> tuple[Compute, ...]:
        """Return what sets a state and a product of gates to steps that change no state."""
        one = Const(1.0 if self._gate_dtype.is_float else 1, self._gate_dtype)
        return (Compute(state, index, self.space.scan.neutral), Compute(product, index, one))

    def _composed(
        self, state: str, product: str, index: tuple[Expr, ...], gate: Expr, value: Expr, *, is_composed: bool = False
    ) -> tuple[Compute, ...]:
        """Let a step, or composed ones, follow the steps whose state and product of gates are at the index."""
        step = require(self.space.step, "a recurrence")
        after = step.applied(self._load(state, *index), gate, value, is_composed=is_composed)
        gates = step.product(convert(gate, self._gate_dtype), self._load(product, *index))
        return (Compute(state, index, after), Compute(product, index, gates))

    @property
    def _gate_dtype(self) -> DType:
        """The type of products of gates."""
        return gate_product_dtype(self.space.scan.statement.accumulator)

    def _total_storages(self, scope: Scope, *shape: int) -> list[Storage]:
        """Return the storages of products of gates: of the carry, and of the runs of a chunk."""
        if self.space.totals is None:
            return []
        found = [Storage(PRODUCT, self._gate_dtype, shape, scope, ())]
        if self.space.column is None:
            found.append(Storage(RUN, self.space.scan.statement.accumulator, (RUNS,), Scope.STACK, ()))
            found.append(Storage(RUN_PRODUCT, self._gate_dtype, (RUNS,), Scope.STACK, ()))
        return found

    def _start_product(self, *index: Expr) -> tuple[Node, ...]:
        return () if self.space.totals is None else self._identity(CARRY, PRODUCT, index)[1:]

    def _store_totals(self, at: dict[str, Expr], *index: Expr) -> tuple[Node, ...]:
        """Store the states after all steps, and the products of their gates."""
        return tuple(
            Compute(s.output, tuple(substitute(i, at) for i in s.index), convert(self._load(name, *index), s.type.dtype))
            for s, name in zip(self.space.totals or (), (CARRY, PRODUCT), strict=False)
        )

    # columns --------------------------------------------------------------------------------------------------------
    def columns(self, column: Axis) -> tuple[Node, ...]:
        """Visit the rows of a task's columns in order; each column has a carry."""
        scan, tile = self.space.scan, self.program.block[column.name]
        dtype, extent = scan.statement.accumulator, scan.axis.extent
        rows = row_tensors(self.group)
        step, start = ref(f"{column.name}.step"), ref(f"{column.name}.first")
        lane = ref(LANE)
        index = add(mul(step, num(self.width)), lane)
        place: Expr = sub(num(extent - 1), ref(".place")) if scan.is_reversed else ref(".place")
        at = {column.name: add(start, lane), scan.axis.name: ref(scan.axis.name)}
        reads = RowReads(rows, (lane,), at)
        carry = self._load(CARRY, index)
        if (linear := self.space.step) is None:
            update: tuple[Node, ...] = (Compute(CARRY, (index,), self._joined(carry, self._value(at))),)
        else:
            gate, value = (self._converted(substitute(part, at)) for part in (linear.gate, linear.value))
            update = (Compute(CARRY, (index,), linear.applied(carry, gate, value, is_composed=self.space.is_composed)),)
            if self.space.totals is not None:
                update = self._composed(CARRY, PRODUCT, (index,), gate, value)
        stores = () if self.space.totals is not None else self._stores(reads, carry)
        visited = (*stores, *update) if scan.is_exclusive else (*update, *stores)

        def over_columns(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
            groups = whole_or_tail(start, self.width, column.extent, lambda n: (Loop(LANE, n, LoopKind.VECTOR, nodes),))
            return loop_over_points(column, tile, SimdRows(column, self.width, lane), groups)

        fill = over_columns((Compute(CARRY, (index,), self._start(at)), *self._start_product(index)))
        visit = over_columns(visited)
        along = Loop(".place", extent, LoopKind.SERIAL, (Let(scan.axis.name, place, self._with_rows(visit, self.width)),))
        storages = [Storage(CARRY, dtype, (tile,), Scope.STACK, ()), *self._total_storages(Scope.STACK, tile)]
        if totals := self._store_totals(at, index):
            return wrap_in_storages(storages, (*fill, along, *over_columns(totals)))
        return wrap_in_storages(storages, (*fill, along))

    # values ---------------------------------------------------------------------------------------------------------
    def _load(self, name: str, *index: Expr) -> Load:
        is_product = name in (PRODUCT, RUN_PRODUCT)
        return Load(name, index, self._gate_dtype if is_product else self.space.scan.statement.accumulator)

    def _joined(self, a: Expr, b: Expr) -> Expr:
        return Op(COMBINE_OPS[self.space.scan.combine], (a, b), a.dtype)

    def _start(self, at: dict[str, Expr]) -> Expr:
        """Return what precedes the first element."""
        step = self.space.step
        return self.space.scan.neutral if step is None else self._converted(substitute(step.initial, at))

    def _value(self, at: dict[str, Expr]) -> Expr:
        return self._converted(substitute(self.space.scan.value, at))

    def _converted(self, value: Expr) -> Expr:
        return convert(value, self.space.scan.statement.accumulator)

    def _stores(self, reads: RowReads, result: Expr) -> tuple[Node, ...]:
        """Store the result at a point, and those of the maps that read it."""
        scan, group = self.space.scan, self.group
        nodes = [*reads.store(group, scan.statement, result)]
        for statement in group.statements[1:]:
            nodes += reads.store(group, statement, reads.apply(statement.body))
        return tuple(nodes)
