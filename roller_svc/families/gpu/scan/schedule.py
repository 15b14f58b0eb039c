"""Scan and its rProgram → schedule tree for a GPU: a block visits the tiles of its rows in order, with a carry.

A thread scans adjacent elements in registers, a warp the totals of its threads by shuffles, and a block the totals of
its warps in shared memory (Merrill and Grimshaw's raking scan, whose blocks own whole rows).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise

from roller_svc.analysis.scans import LinearStep, gate_product_dtype
from roller_svc.errors import require
from roller_svc.families.common.gpu.launch_bounds import min_resident_blocks
from roller_svc.families.gpu.scan import SCAN
from roller_svc.families.gpu.scan.workload import ScanSpace, ScanThreads, scan_threads
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, convert, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, ceil_div, div, eq, le, logical_and, lt, mod, mul, num, ref, sub
from roller_svc.ir.program import COMBINE_OPS
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import (
    Barrier,
    Branch,
    Compute,
    Let,
    Loop,
    LoopKind,
    Node,
    ScheduleTree,
    Scope,
    Storage,
    WarpReduce,
    WarpScan,
)
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import (
    RowReads,
    register,
    row_storages,
    row_tensors,
    wrap_in_storages,
)

THREAD, ROW, COLUMN, TILE, FIRST = ".thread", ".in_block", ".column", ".tile", ".first"
PLACE, WARP, LANE = ".place", ".warp", ".lane"  # of a thread along the scan; its warp and the place in that
ELEMENTS, BEFORE, PREFIX, CARRY, TOTAL, TOTALS = ".elements", ".before", ".prefix", ".carry", ".total", ".totals"
GATES = {name: f"{name}_gate" for name in (ELEMENTS, BEFORE, TOTAL, TOTALS, CARRY)}  # of linear steps, beside their values


def lower(group: KernelGroup, program: RProgram, workload: Workload[ScanSpace]) -> tuple[ScheduleTree, ...]:
    block, thread = workload.footprint.tile(program.block), workload.footprint.tile(program.thread)
    threads = scan_threads(workload, block, thread, program.reduce_threads)
    resident = min_resident_blocks(SCAN.model(workload), program)
    return (ScheduleTree(group.name, _ScanKernel(group, program, workload.facts, threads).nodes(), resident=resident),)


@dataclass(frozen=True)
class _ScanKernel:
    group: KernelGroup
    program: RProgram
    space: ScanSpace
    threads: ScanThreads

    def nodes(self) -> tuple[Node, ...]:
        scan, threads, group = self.space.scan, self.threads, self.group
        dtype = scan.statement.accumulator
        storages = [
            register(ELEMENTS, dtype, threads.elements),
            *(register(name, dtype) for name in (BEFORE, PREFIX, CARRY, TOTAL)),
            *row_storages(group.statements, row_tensors(group), threads.elements),
        ]
        if threads.meets_in_shared:
            storages.append(Storage(TOTALS, dtype, threads.total_shape, Scope.SHARED, ()))
        if self.step is not None:
            names = {*GATES} if self.space.totals is not None else {*GATES} - {CARRY}
            storages += [
                replace(s, tensor=GATES[s.tensor], dtype=self._gate_dtype(s.tensor)) for s in storages if s.tensor in names
            ]
        tile: tuple[Node, ...] = (*self._load(), *self._combined(), *self._store())
        tile = (Let(FIRST, self._first, tile),)
        nodes: tuple[Node, ...] = (
            *self._start(),
            Loop(TILE, threads.tiles, LoopKind.SERIAL, tile),
            *self._store_totals(),
        )
        nodes = wrap_in_storages(storages, nodes)
        for axis in reversed(group.outer):
            size = self.program.block[axis.name]
            start = mul(ref(f"{axis.name}.block"), num(size))
            nodes = (Let(axis.name, start if size == 1 else add(start, self._adjacent), nodes),)
        place = mod(div(ref(THREAD), threads.columns), threads.lanes)
        for name, value in (
            (LANE, mod(ref(PLACE), threads.in_warp)),
            (WARP, div(ref(PLACE), threads.in_warp)),
            (PLACE, place),
            (COLUMN, mod(ref(THREAD), threads.columns)),
            (ROW, div(ref(THREAD), threads.lanes * threads.columns)),
        ):
            nodes = (Let(name, value, nodes),)
        nodes = (Loop(THREAD, self.program.threads, LoopKind.THREAD, nodes),)
        for axis in reversed(group.outer):
            blocks = ceil_div(axis.extent, self.program.block[axis.name])
            nodes = (Loop(f"{axis.name}.block", blocks, LoopKind.BLOCK, nodes),)
        return nodes

    # positions ------------------------------------------------------------------------------------------------------
    @property
    def _adjacent(self) -> Expr:
        """Return the thread's place along the outer axis of which the block has several points."""
        return ref(ROW) if self.space.column is None else ref(COLUMN)

    @property
    def _first(self) -> Expr:
        """Return the first of the thread's elements. Threads and tiles of a reversed scan begin at the end."""
        threads = self.threads
        tile: Expr = ref(TILE)
        place: Expr = ref(PLACE)
        if self.space.scan.is_reversed:
            tile, place = sub(num(threads.tiles - 1), tile), sub(num(threads.lanes - 1), place)
        return mul(add(mul(tile, num(threads.lanes)), place), num(threads.elements))

    @property
    def _order(self) -> list[int]:
        """Return the places of a thread's elements in the order of the scan."""
        order = list(range(self.threads.elements))
        return order[::-1] if self.space.scan.is_reversed else order

    @cached_property
    def _guard(self) -> Expr | None:
        """The condition that the thread's row exists; None where all do."""
        guard: Expr | None = None
        for axis in self.group.outer:
            if axis.extent % self.program.block[axis.name]:
                guard = logical_and(guard, lt(ref(axis.name), num(axis.extent)))
        return guard

    def _for_elements(
        self, body: Callable[[Expr], tuple[Node, ...]], otherwise: Callable[[Expr], tuple[Node, ...]]
    ) -> tuple[Node, ...]:
        """Visit the thread's elements, in vectors where the whole of them exist; `otherwise` those that do not."""
        count, extent, width = self.threads.elements, self.space.scan.axis.extent, self.space.width
        element: Expr = ref(".element")

        def unrolled(visit: Callable[[Expr], tuple[Node, ...]]) -> tuple[Node, ...]:
            nodes = visit(element)
            return (Loop(".element", count, LoopKind.UNROLL, nodes),) if nodes else ()

        inside = unrolled(body)
        if width > 1 and count % width == 0:
            vector = add(mul(ref(".vector"), num(width)), ref(".element"))
            inside = (Loop(".vector", count // width, LoopKind.UNROLL, (Loop(".element", width, LoopKind.VECTOR, body(vector)),)),)
        tile = self.threads.lanes * count
        if extent % count == 0:
            guard = self._guard if extent % tile == 0 else logical_and(self._guard, lt(ref(FIRST), num(extent)))
            return inside if guard is None else (Branch(guard, inside, unrolled(otherwise)),)
        each = unrolled(lambda v: (Branch(lt(add(ref(FIRST), v), num(extent)), body(v), otherwise(v)),))
        nodes: tuple[Node, ...] = (Branch(le(add(ref(FIRST), num(count)), num(extent)), inside, each),)
        return nodes if self._guard is None else (Branch(self._guard, nodes, unrolled(otherwise)),)

    def _at(self, element: Expr) -> dict[str, Expr]:
        return {self.space.scan.axis.name: add(ref(FIRST), element)}

    # the scan -------------------------------------------------------------------------------------------------------
    @property
    def step(self) -> LinearStep | None:
        return self.space.step

    def _start(self) -> tuple[Node, ...]:
        """Set what precedes the first element."""
        neutral = Compute(CARRY, (), self.space.scan.neutral)
        if self.space.totals is not None:
            return self._identity(CARRY)
        if self.step is None:
            return (neutral,)
        start = Compute(CARRY, (), self._converted(self.step.initial))
        return (start,) if self._guard is None else (Branch(self._guard, (start,), (neutral,)),)

    def _converted(self, value: Expr) -> Expr:
        return convert(value, self.space.scan.statement.accumulator)

    def _gate_dtype(self, name: str) -> DType:
        """Return the type of a register's gates: those of elements are as the program states them."""
        dtype = self.space.scan.statement.accumulator
        return dtype if name == ELEMENTS else gate_product_dtype(dtype)

    def _one(self, name: str) -> Const:
        dtype = self._gate_dtype(name)
        return Const(1.0 if dtype.is_float else 1, dtype)

    def _identity(self, name: str) -> tuple[Node, ...]:
        """Return what sets a register to steps that change no state."""
        return (Compute(name, (), self.space.scan.neutral), Compute(GATES[name], (), self._one(name)))

    def _applied(self, state: str, steps: str, *index: Expr) -> tuple[Compute, ...]:
        """Return what applies an operand, or linear steps that are composed, to a state in a register."""
        if self.step is None:
            return (self._combine(state, self._register(steps, *index)),)
        gate, value = self._gate(steps, *index), self._register(steps, *index)
        return (Compute(state, (), self.step.applied(self._register(state), gate, value, is_composed=True)),)

    def _follow(self, steps: str, before: str) -> tuple[Node, ...]:
        """Let linear steps in registers follow those that are composed before them."""
        step = require(self.step, "a recurrence")
        gate, value = self._gate(steps), self._register(steps)
        after = step.applied(self._register(before), gate, value, is_composed=True)
        return (Compute(steps, (), after), Compute(GATES[steps], (), step.product(gate, self._gate(before))))

    def _carry_on(self, steps: str, *index: Expr) -> tuple[Node, ...]:
        """Return what lets the carry pass linear steps, or an operand; of totals its gate, too."""
        if self.step is None or self.space.totals is None:
            return self._applied(CARRY, steps, *index)
        product = Compute(GATES[CARRY], (), self.step.product(self._gate(steps, *index), self._gate(CARRY)))
        return (*self._applied(CARRY, steps, *index), product)

    def _copied(self, target: str, source: str, index: tuple[Expr, ...] = (), at: tuple[Expr, ...] = ()) -> list[Node]:
        gate: list[Node] = [] if self.step is None else [Compute(GATES[target], at, self._gate(source, *index))]
        return [Compute(target, at, self._register(source, *index)), *gate]

    def _register(self, name: str, *index: Expr) -> Load:
        return Load(name, index, self.space.scan.statement.accumulator)

    def _gate(self, name: str, *index: Expr) -> Load:
        return Load(GATES[name], index, self._gate_dtype(name))

    def _load(self) -> tuple[Node, ...]:
        scan, step = self.space.scan, self.step
        parts: tuple[tuple[str, Expr, Const], ...] = ((ELEMENTS, scan.value, scan.neutral),)
        if step is not None:
            parts = ((GATES[ELEMENTS], step.gate, self._one(ELEMENTS)), (ELEMENTS, step.value, scan.neutral))

        def load(element: Expr) -> tuple[Node, ...]:
            at = self._at(element)
            return tuple(Compute(name, (element,), self._converted(substitute(value, at))) for name, value, _ in parts)

        return self._for_elements(load, lambda element: tuple(Compute(name, (element,), neutral) for name, _, neutral in parts))

    def _combine(self, name: str, value: Expr, *index: Expr) -> Compute:
        return Compute(name, index, value, self.space.scan.combine)

    def _combined(self) -> tuple[Node, ...]:
        """Combine the thread's elements, and find what precedes them."""
        if self.step is None:
            return (*self._scan_elements(), *self._find_prefix())
        if self.threads.lanes == 1:
            return self._steps(CARRY, has_product=self.space.totals is not None)
        steps = (*self._identity(TOTAL), *self._steps(TOTAL, has_product=True), *self._find_prefix())
        return steps if self.space.totals is not None else (*steps, *self._steps(PREFIX, has_product=False))

    def _scan_elements(self) -> tuple[Node, ...]:
        pairs = pairwise(self._order)
        return tuple(self._combine(ELEMENTS, self._register(ELEMENTS, num(before)), num(here)) for before, here in pairs)

    def _steps(self, state: str, *, has_product: bool) -> tuple[Node, ...]:
        """Apply the steps of the thread's elements to a state in order.

        The elements become the states after them, or the product of their gates is formed.
        """
        nodes: list[Node] = []
        step = require(self.step, "a recurrence")
        for here in self._order:
            gate, value = self._gate(ELEMENTS, num(here)), self._register(ELEMENTS, num(here))
            nodes.append(Compute(state, (), step.applied(self._register(state), gate, value, is_composed=self.space.is_composed)))
            if has_product:
                product = step.product(convert(gate, self._gate_dtype(state)), self._gate(state))
                nodes.append(Compute(GATES[state], (), product))
            else:
                nodes.append(Compute(ELEMENTS, (num(here),), self._register(state)))
        return tuple(nodes)

    def _find_prefix(self) -> tuple[Node, ...]:
        """Find what all elements before the thread's combine to, and the carry into the next tile."""
        threads, scan = self.threads, self.space.scan
        last = (num(self._order[-1]),)
        own = self._register(ELEMENTS, *last)
        nodes: list[Node] = []
        if threads.in_warp > 1:
            gate, may_reset = (None, False) if self.step is None else (GATES[BEFORE], self.step.may_reset)
            nodes += [Compute(BEFORE, (), own)] if self.step is None else self._copied(BEFORE, TOTAL)
            nodes.append(
                WarpScan(
                    BEFORE, (), scan.combine, threads.in_warp, threads.columns, ref(LANE), scan.neutral, gate, may_reset
                )
            )  # fmt: skip
        else:
            nodes += [Compute(BEFORE, (), scan.neutral)] if self.step is None else self._identity(BEFORE)
        has_carry = threads.tiles > 1 or self.space.totals is not None
        if self.step is not None and (has_carry or threads.meets_in_shared):
            nodes += self._follow(TOTAL, BEFORE)
        elif has_carry or threads.meets_in_shared:
            nodes += [Compute(TOTAL, (), self._register(BEFORE)), self._combine(TOTAL, own)]
        if threads.meets_in_shared:
            nodes += self._meet_in_shared(has_carry=has_carry)
        else:
            if has_carry and threads.in_warp > 1:
                nodes += [Compute(TOTAL, (), own), WarpReduce(TOTAL, (), scan.combine, threads.in_warp)]
            nodes.append(Compute(PREFIX, (), self._register(CARRY)))
            if has_carry:
                nodes += self._carry_on(TOTAL)
        return tuple(nodes) if self.space.totals is not None else (*nodes, *self._applied(PREFIX, BEFORE))

    def _meet_in_shared(self, *, has_carry: bool) -> tuple[Node, ...]:
        """Write the totals of warps to shared memory, and combine those of the warps before."""
        threads, has_prefix = self.threads, self.space.totals is None
        buffer = mod(ref(TILE), threads.total_shape[0])

        def at(which: Expr) -> tuple[Expr, ...]:
            return (buffer, ref(ROW), which, ref(COLUMN))

        write: tuple[Node, ...] = (*self._copied(TOTALS, TOTAL, (), at(ref(WARP))),)
        if threads.in_warp > 1:
            write = (Branch(eq(ref(LANE), num(threads.in_warp - 1)), write),)
        other = at(ref(".other"))
        join: list[Node] = []
        if has_prefix:
            join.append(Branch(lt(ref(".other"), ref(WARP)), self._applied(PREFIX, TOTALS, *other)))
        if has_carry:
            join += self._carry_on(TOTALS, *other)
        return (
            *write,
            Barrier(),
            *((Compute(PREFIX, (), self._register(CARRY)),) if has_prefix else ()),
            Loop(".other", threads.warps, LoopKind.UNROLL, tuple(join)),
        )

    def _store_totals(self) -> tuple[Node, ...]:
        """Store the state after all steps, and the product of their gates."""
        if self.space.totals is None:
            return ()
        stores = [
            Compute(statement.output, statement.index, convert(total, statement.type.dtype))
            for statement, total in zip(self.space.totals, (self._register(CARRY), self._gate(CARRY)), strict=True)
        ]
        return (Branch(logical_and(self._guard, eq(ref(PLACE), num(0))), tuple(stores)),)

    def _store(self) -> tuple[Node, ...]:
        """Store the results, and those of the maps that read them."""
        if self.space.totals is not None:
            return ()
        scan, group = self.space.scan, self.group
        order = self._order
        shift: list[Node] = []
        if scan.is_exclusive:
            shift = [
                Compute(ELEMENTS, (num(here),), self._register(ELEMENTS, num(before)))
                for before, here in reversed(list(pairwise(order)))
            ]
            shift.append(Compute(ELEMENTS, (num(order[0]),), scan.neutral))
        rows = row_tensors(group)

        def store(element: Expr) -> tuple[Node, ...]:
            reads = RowReads(rows, (element,), self._at(element))
            result: Expr = self._register(ELEMENTS, element)
            if self.step is None:
                result = Op(COMBINE_OPS[scan.combine], (self._register(PREFIX), result), result.dtype)
            nodes = [*reads.store(group, scan.statement, result)]
            for statement in group.statements[1:]:
                nodes += reads.store(group, statement, reads.apply(statement.body))
            return tuple(nodes)

        return (*shift, *self._for_elements(store, lambda element: ()))
