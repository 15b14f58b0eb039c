"""Reductions over windows and their rProgram → schedule tree for a CPU: staged planes, long runs of vectors."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from roller_svc.ir.build import add, ceil_div, less_equal, mul, num, ref, sub
from roller_svc.ir.expr import Expr, Load, loads_of, rewrite, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorType
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    Let,
    Loop,
    LoopKind,
    Node,
    Prefetch,
    Routine,
    ScheduleTree,
    Scope,
    Storage,
)
from roller_svc.lower.micro_kernel_cpu import SCARCE_REGISTERS
from roller_svc.lower.packing_cpu import LINE_BYTES
from roller_svc.lower.rows import (
    RowReads,
    converted,
    is_reduction,
    local_name,
    row_dtype,
    row_tensors,
    wrapped,
)
from roller_svc.lower.window_planes import LANE, MAX_HINTS, Ahead, StagedSum, ahead_of, along, over
from roller_svc.perf.plane_layout import Layout, layout
from roller_svc.perf.plane_tile import PlaneSpace, WindowedSum

# Elements of a line of results below which it is walked one by one. Longer ones are vectors, though one that lies
# across two that were stored a moment ago waits for both to reach the cache: others go on meanwhile. A loop of few
# rounds takes more instructions, and more or less time by where its code lies (Zen 4: lines of 11).
SHORTEST_VECTOR = 4


def lower_window_cpu(
    group: KernelGroup, program: RProgram, space: PlaneSpace, hw: HardwareSpec
) -> tuple[ScheduleTree, ...]:
    """One tree: parallel tasks over blocks of planes and bands of them; staging, sums, results plane by plane."""
    return (ScheduleTree(group.name, _Windows(group, program, space, hw).tasks()),)


@dataclass(frozen=True, slots=True)
class _Windows:
    group: KernelGroup
    program: RProgram
    space: PlaneSpace
    hw: HardwareSpec

    def tasks(self) -> tuple[Node, ...]:
        lanes, registers = self.program.unit.shape[-1], self.hw.limits.max_registers_per_thread
        sums = [StagedSum(s, self._layout(s), lanes, registers) for s in self.space.sums]
        nodes = tuple(node for s in sums for node in s.filled())
        nodes += self._each_plane(sums)
        nodes = wrapped([room for s in sums for room in s.rooms()] + self._line_rooms(), nodes)
        for axis in self.space.axes:
            first = mul(ref(f"{axis.name}.task"), num(self.program.block[axis.name]))
            nodes = (Let(f"{axis.name}.first", first, nodes),)
        for axis in reversed(self.group.outer):
            count = ceil_div(axis.extent, self.program.block[axis.name])
            nodes = (Loop(f"{axis.name}.task", count, LoopKind.PARALLEL, nodes),)
        return nodes

    def _layout(self, of: WindowedSum) -> Layout:
        axes = self.group.outer
        block, thread = (tuple(t[a.name] for a in axes) for t in (self.program.block, self.program.thread))
        return layout(self.space, of, block, thread)

    def _each_plane(self, sums: list[StagedSum]) -> tuple[Node, ...]:
        nodes = tuple(node for s in sums for node in s.staged(self._next_planes(s)))
        nodes += self._each_run(sums)
        # 16 registers: as a function of its own 5 x 5 taps ran a tenth slower (Skylake-SP, AVX2; on AVX-512 the same)
        if self.hw.limits.max_registers_per_thread > SCARCE_REGISTERS:
            nodes = (Routine("plane", nodes),)
        for axis in reversed(self.space.leading):
            tile = self.program.block[axis.name]
            start = mul(ref(f"{axis.name}.task"), num(tile))
            nodes = (Let(axis.name, add(start, ref(f"{axis.name}.step")), nodes),)
            limit = sub(num(axis.extent), start) if axis.extent % tile else None
            nodes = (Loop(f"{axis.name}.step", tile, LoopKind.SERIAL, nodes, limit),)
        return nodes

    def _each_run(self, sums: list[StagedSum]) -> tuple[Node, ...]:
        nodes = (*self._prefetched_results(sums), *(node for s in sums for node in s.run()), *self._lines(sums))
        for dim in reversed(sums[0].layout.dims[:-2]):
            nodes = (over(dim, f"{dim.slide.axis}.line", nodes),)
        return nodes

    # memory ---------------------------------------------------------------------------------------------------------
    def _is_far(self, type_: TensorType) -> bool:
        """Whether a tensor comes from beyond the core's own caches."""
        return type_.bytes > self.hw.block_level.capacity_bytes

    def _next_planes(self, one: StagedSum) -> tuple[Ahead | None, ...]:
        """For each plane of a sum how what it is staged from moves on to the task's next plane."""
        types, moving = dict(self.group.inputs), [a for a in self.space.leading if self.program.block[a.name] > 1]
        found: list[Ahead | None] = []
        for plane in one.sum.planes:
            loads = [x for x in loads_of(plane.value) if x.tensor in types and self._is_far(types[x.tensor])]
            found.append(ahead_of(loads[0], types[loads[0].tensor], moving[-1].name) if loads and moving else None)
        return tuple(found)

    def _prefetched_results(self, sums: list[StagedSum]) -> Iterator[Node]:
        """Hints that the lines of results of a run will be written, while it is computed."""
        dims, stored = sums[0].layout.dims, dict(self.group.stored)
        at: dict[str, Expr] = {a.name: ref(f"{a.name}.first") for a in self.space.axes}
        for dim in dims[:-1]:
            at[dim.slide.axis] = add(at[dim.slide.axis], ref(f"{dim.slide.axis}.line"))
        for statement in self.group.statements:
            if statement.output not in stored or not self._is_far(stored[statement.output]):
                continue
            step = LINE_BYTES // statement.type.dtype.bytes
            index = tuple(substitute(i, at) for i in statement.index)
            hints = tuple(
                Prefetch(statement.output, index, ahead, for_write=True)
                for ahead in range(0, min(dims[-1].block, MAX_HINTS * step), step)
            )
            yield from (over(dims[-2], f"{dims[-2].slide.axis}.line", hints),) if len(dims) > 1 else hints

    # results --------------------------------------------------------------------------------------------------------
    def _lines(self, sums: list[StagedSum]) -> tuple[Node, ...]:
        """The statements at every output of the run, line by line."""
        width = sums[0].layout.dims[-1]
        tail = width.slide.extent % width.block
        nodes = self._line(sums, width.block)
        if tail:
            start = ref(f"{width.slide.axis}.first")
            whole = less_equal(add(start, num(width.block)), num(width.slide.extent))
            nodes = (Branch(whole, nodes, self._line(sums, tail)),)
        for one in sums:
            nodes = one.at_line(nodes)
        if len(sums[0].layout.dims) > 1:
            rows = sums[0].layout.dims[-2]
            nodes = (over(rows, f"{rows.slide.axis}.line", nodes),)
        return nodes

    def _line(self, sums: list[StagedSum], width: int) -> tuple[Node, ...]:
        nodes: list[Node] = []
        for node in self._statements(sums):
            if width < SHORTEST_VECTOR:
                nodes.append(Loop(LANE, width, LoopKind.SERIAL, (node,)))
            else:
                nodes += along(width, node)
        return tuple(nodes)

    def _statements(self, sums: list[StagedSum]) -> Iterator[Compute]:
        results = {s.sum.statement.output: s.result(ref(LANE)) for s in sums}
        rows = self._rows()
        unkept = {name: total for name, total in results.items() if name not in rows}
        at: dict[str, Expr] = {}
        for axis in self.space.axes:
            inside = ref(LANE) if axis is self.space.axes[-1] else ref(f"{axis.name}.line")
            at[axis.name] = add(ref(f"{axis.name}.first"), inside)
        reads = RowReads(rows, (ref(LANE),), at)
        for statement in self.group.statements:
            value = results[statement.output] if is_reduction(statement) else reads.apply(_put(statement.body, unkept))
            value = converted(value, statement)
            if statement.output in rows:
                yield Compute(local_name(statement.output), (ref(LANE),), value)
                value = Load(local_name(statement.output), (ref(LANE),), statement.type.dtype)
            if statement.output not in self.group.locals:
                yield Compute(statement.output, tuple(reads.apply(i) for i in statement.index), value)

    def _rows(self) -> frozenset[str]:
        """What later statements read from a room of its own. Totals that are results as they stand have one already: a
        vector across two that were stored a moment ago waits, 20 cycles a line of 11 on Zen 4."""
        statements = (one.statement for one in self.space.sums)
        return row_tensors(self.group) - {s.output for s in statements if s.accumulator is s.type.dtype}

    def _line_rooms(self) -> list[Storage]:
        rows, width = self._rows(), self.space.axes[-1]
        count = min(width.extent, self.program.block[width.name])
        return [
            Storage(local_name(s.output), row_dtype(s), (count,), Scope.STACK, ())
            for s in self.group.statements if s.output in rows
        ]  # fmt: skip


def _put(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """The expression with values in place of what it reads of those tensors."""
    return rewrite(expr, lambda node: values.get(node.tensor, node) if isinstance(node, Load) else node)
