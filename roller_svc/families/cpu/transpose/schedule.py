"""Maps whose results lie along another axis than what they read → schedule tree for a CPU: tiles turned in registers.

A tile is read in blocks of whole vectors, turned into a room in L1, and mapped from there in rows; short rows are dealt
to vectors, or woven of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from roller_svc.errors import InvariantError
from roller_svc.families.common.cpu.parallel_loops import Together, steps
from roller_svc.families.common.cpu.prefetch import AHEAD_BYTES
from roller_svc.families.cpu.transpose.workload import LayoutSpace, Turn, layout_space
from roller_svc.ir.expr import Expr, Load, rewrite, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, ceil_div, le, min_, mul, num, ref
from roller_svc.ir.program import Axis, TensorExpr
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    Loop,
    LoopKind,
    Node,
    Prefetch,
    ScheduleTree,
    Scope,
    Storage,
    Transpose,
)
from roller_svc.schedule.nest_statements import (
    RowReads,
    converted,
    local_name,
    register,
    row_dtype,
    row_tensors,
    wrapped,
)

LANE = ".lane"
BLOCK_ROW, BLOCK_COLUMN = ".block.row", ".block.column"
WOVEN = ".woven"
# Times the second cache: hints for results cost an eighth where all was 2.5 times as large, gave nothing at 8 times,
# and gained an eighth to a quarter from 12 times on (Skylake-SP).
HINTED = 4
# Pieces of rows that are asked for ahead, and those beyond all caches: hints took off a tenth of the time of pieces of
# 64 and 128 bytes there, a twelfth of 256; where the last cache holds all, those of 256 cost a tenth (Skylake-SP).
SHORT_PIECE_BYTES, SHORT_IN_MEMORY_BYTES = 128, 256

Point = dict[str, Expr]


def lower(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """One tree: parallel tasks, the tiles of each. Those that share lines of the results follow each other, where much
    lies beyond a core's cache those that share lines of what is read: 331 x 331 x 3 reversed takes 7 % less time the
    first way, 4096 x 4096 a third less the second (Skylake-SP)."""
    layout = layout_space(group, hw)
    if layout is None:
        raise InvariantError(f"{group.name} is not a layout change")
    return (ScheduleTree(group.name, _Layout(group, program, layout, hw).tasks()),)


@dataclass(frozen=True)
class _Layout:
    group: KernelGroup
    program: RProgram
    layout: LayoutSpace
    hw: HardwareSpec

    @cached_property
    def row(self) -> Axis:
        return self._axis(self.layout.row)

    @cached_property
    def columns(self) -> tuple[Axis, ...]:
        return tuple(self._axis(c) for c in self.layout.columns)

    def _axis(self, position: int) -> Axis:
        name = self.program.space.axes[position].name
        return next(a for a in self.group.outer if a.name == name)

    # loops ----------------------------------------------------------------------------------------------------------
    def tasks(self) -> tuple[Node, ...]:
        column = self.columns[0]
        nodes = self._cut(self.row, lambda width: self._cut(column, lambda count: self._tile(width, count)))
        nodes = wrapped(self._rooms(), nodes)
        first, then = (self.row, column) if self._is_large else (column, self.row)
        nodes = self._steps(first, self._steps(then, nodes))
        for axis in reversed(self.group.outer):
            if axis not in (self.row, *self.columns):
                nodes = self._steps(axis, nodes)
        for axis in reversed(self.group.outer):
            tasks = ceil_div(axis.extent, self.program.block[axis.name])
            nodes = (Loop(f"{axis.name}.task", tasks, LoopKind.PARALLEL, nodes),)
        return nodes

    def _steps(self, axis: Axis, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        tile = self.program.thread[axis.name]
        together = Together(axis, tile, num(0)) if axis in (self.row, *self.columns) else None
        return steps(axis, self.program.block[axis.name], together, nodes)

    def _cut(self, axis: Axis, nodes_at: Callable[[int], tuple[Node, ...]]) -> tuple[Node, ...]:
        """Nodes for whole tiles along an axis, and for what is left at its end."""
        tile = self.program.thread[axis.name]
        whole, rest = nodes_at(self._whole(axis)), axis.extent % tile
        if not rest or axis.extent < tile:
            return whole
        inside = le(add(ref(f"{axis.name}.first"), num(tile)), num(axis.extent))
        return (Branch(inside, whole, nodes_at(rest)),)

    # tiles ----------------------------------------------------------------------------------------------------------
    def _tile(self, width: int, count: int) -> tuple[Node, ...]:
        if self.layout.turn is Turn.WOVEN:
            return self._woven(count)
        staging = [node for i in range(len(self.layout.turned)) for node in self._stage(i, width, self._fused(count))]
        hints = (*self._read_next(width, self._fused(count)), *self._over_columns(count, self._ahead(width)))
        return (*hints, *staging, *self._rows(width, count))

    def _rooms(self) -> list[Storage]:
        """Room for a whole tile, row by row of the result, or column by column of short rows."""
        width, count = self._whole(self.row), self._whole(self.columns[0])
        if self.layout.turn is Turn.WOVEN:
            (statement,) = [s for s in self.group.statements if s.output not in self.group.register_tensors]
            return [Storage(WOVEN, statement.type.dtype, (self.layout.short, count), Scope.STACK, ())]
        shape = (self._fused(count), width)
        return [Storage(self._room(load), load.dtype, shape, Scope.STACK, ()) for load in self.layout.turned]

    def _whole(self, axis: Axis) -> int:
        return min(self.program.thread[axis.name], axis.extent)

    def _fused(self, count: int) -> int:
        return count * math.prod(a.extent for a in self.columns[1:])

    def _stage(self, which: int, width: int, count: int) -> tuple[Node, ...]:
        """A tile into its room, turned block by block: the last block may overlap the one before it."""
        load, stride, lanes = self.layout.turned[which], self.layout.stride[which], self.layout.lanes
        dealt = self.layout.turn is Turn.DEALT
        row = _block(ref(BLOCK_ROW), lanes, width)
        column = num(0) if dealt else _block(ref(BLOCK_COLUMN), lanes, count)
        at = {self.row.name: add(ref(f"{self.row.name}.first"), row)}
        at |= {a.name: num(0) for a in self.columns[1:]} | {self.columns[0].name: ref(f"{self.columns[0].name}.first")}
        at[self.columns[-1].name] = add(at[self.columns[-1].name], column)
        source = replace(load, index=tuple(substitute(i, at) for i in load.index))
        short = self.layout.short if dealt else None
        pitch = self._whole(self.row)
        block = Transpose(self._room(load), (column, row), pitch, source, stride, columns=short, lanes=lanes)
        nodes: tuple[Node, ...] = (block,)
        if not dealt:
            nodes = (Loop(BLOCK_COLUMN, ceil_div(count, lanes), LoopKind.SERIAL, nodes),)
        return (Loop(BLOCK_ROW, ceil_div(width, lanes), LoopKind.SERIAL, nodes),)

    def _rows(self, width: int, count: int) -> tuple[Node, ...]:
        """The map, from the rooms, row by row of the result."""
        at = self._at(ref(LANE))
        column: Expr = num(0)
        for axis in self.columns:
            column = add(mul(column, num(axis.extent)), ref(f"{axis.name}.column"))

        def from_room(node: Expr) -> Expr:
            if isinstance(node, Load) and node in self.layout.turned:
                return Load(self._room(node), (column, ref(LANE)), node.dtype)
            return node

        bodies = {s.output: rewrite(s.body, from_room) for s in self.group.statements}
        return self._over_columns(count, self._map(at, width, bodies))

    def _map(self, at: Point, width: int, bodies: dict[str, Expr]) -> tuple[Node, ...]:
        """All statements at `width` neighbours, lanes of vectors."""
        locals_ = row_tensors(self.group)
        reads = RowReads(locals_, (ref(LANE),), at)
        nodes: list[Node] = []
        for s in self.group.statements:
            value = converted(reads.apply(bodies[s.output]), s)
            if s.output in locals_:
                nodes.append(_lanes(width, Compute(local_name(s.output), (ref(LANE),), value)))
                value = Load(local_name(s.output), (ref(LANE),), row_dtype(s))
            if s.output not in self.group.register_tensors:
                nodes.append(_lanes(width, self._store(s, tuple(reads.apply(i) for i in s.index), value)))
        rooms = [
            register(local_name(s.output), row_dtype(s), width) for s in self.group.statements if s.output in locals_
        ]
        return wrapped(rooms, tuple(nodes))

    def _store(self, statement: TensorExpr, index: tuple[Expr, ...], value: Expr) -> Compute:
        if self.layout.turn is Turn.WOVEN:
            return Compute(WOVEN, (ref(f"{self.row.name}.short"), ref(LANE)), value)
        return Compute(statement.output, index, converted(value, statement), nontemporal=self.program.nontemporal)

    def _read_next(self, width: int, count: int) -> tuple[Node, ...]:
        """Hints for the lines of the next tile along the columns, where a tile reads short pieces of many rows: too few
        lines of each follow each other for the core to see that they do."""
        size = self.layout.turned[0].dtype.bytes
        in_memory = self.group.space.compulsory_bytes > self.hw.levels[1].capacity_bytes
        short = SHORT_IN_MEMORY_BYTES if in_memory else SHORT_PIECE_BYTES
        if not self._is_large or count * size > short or self.layout.turn is not Turn.SQUARE:
            return ()
        line = self.hw.dram.transaction_bytes // size
        at: Point = {a.name: num(0) for a in self.columns[1:]}
        at[self.columns[0].name] = ref(f"{self.columns[0].name}.first")
        at[self.row.name] = add(ref(f"{self.row.name}.first"), ref(BLOCK_ROW))
        hints = tuple(
            Prefetch(load.tensor, tuple(substitute(i, at) for i in load.index), count + first)
            for load in self.layout.turned
            for first in range(0, count, line)
        )
        return (Loop(BLOCK_ROW, width, LoopKind.SERIAL, hints),)

    def _ahead(self, width: int) -> tuple[Node, ...]:
        """Hints for the lines that the tile's results fill, while it is staged: few of those follow each other."""
        if self.program.nontemporal or not self._is_large:
            return ()
        hints: list[Node] = []
        for s in self.group.statements:
            if s.output not in self.group.register_tensors:
                step = self.hw.dram.transaction_bytes // s.type.dtype.bytes
                for first in range(0, width, step):
                    at = self._at(num(first))
                    hints.append(Prefetch(s.output, tuple(substitute(i, at) for i in s.index), 0, for_write=True))
        return tuple(hints)

    @property
    def _is_large(self) -> bool:
        """Whether a core's own cache holds but little of what the group touches."""
        return self.group.space.compulsory_bytes > HINTED * self.hw.block_level.capacity_bytes

    def _at(self, lane: Expr) -> Point:
        """Where a neighbour along the row stands, in loops over the columns."""
        at: Point = {a.name: ref(f"{a.name}.column") for a in self.columns[1:]}
        first = self.columns[0].name
        at[first] = add(ref(f"{first}.first"), ref(f"{first}.column"))
        at[self.row.name] = add(ref(f"{self.row.name}.first"), lane)
        return at

    def _over_columns(self, count: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        if not nodes:
            return ()
        for axis in reversed(self.columns):
            extent = count if axis is self.columns[0] else axis.extent
            nodes = (Loop(f"{axis.name}.column", extent, LoopKind.SERIAL, nodes),)
        return nodes

    def _woven(self, count: int) -> tuple[Node, ...]:
        """The map first, along the columns, one short row's element after the other; then all woven together."""
        short, lanes, (column,) = self.layout.short, self.layout.lanes, self.columns
        (statement,) = [s for s in self.group.statements if s.output not in self.group.register_tensors]
        at: Point = {self.row.name: ref(f"{self.row.name}.short")}
        at[column.name] = add(ref(f"{column.name}.first"), ref(LANE))
        nodes = self._map(at, count, {s.output: s.body for s in self.group.statements})
        mapped = Loop(f"{self.row.name}.short", short, LoopKind.SERIAL, nodes)
        block = _block(ref(BLOCK_COLUMN), lanes, count)
        here = {self.row.name: num(0), column.name: add(ref(f"{column.name}.first"), block)}
        index = tuple(substitute(i, here) for i in statement.index)
        source = Load(WOVEN, (num(0), block), statement.type.dtype)
        pitch = self._whole(column)
        woven = Transpose(
            statement.output, index, short, source, pitch, rows=short, lanes=lanes, column_dim=len(index) - 2
        )
        hints = self._ahead_of(statement, index) if self._is_large else ()
        blocks = Loop(BLOCK_COLUMN, ceil_div(count, lanes), LoopKind.SERIAL, (woven, *hints))
        return (mapped, blocks)

    def _ahead_of(self, statement: TensorExpr, index: tuple[Expr, ...]) -> tuple[Node, ...]:
        """Hints for as many lines as a block of short rows fills, further on in memory."""
        size = statement.type.dtype.bytes
        step, ahead = self.hw.dram.transaction_bytes // size, AHEAD_BYTES // size
        lines = range(0, self.layout.short * self.layout.lanes, step)
        return tuple(Prefetch(statement.output, index, ahead + first, for_write=True) for first in lines)

    def _room(self, load: Load) -> str:
        return f"{load.tensor}.turned{self.layout.turned.index(load)}"


def _block(number: Expr, lanes: int, extent: int) -> Expr:
    """Where a block starts, the last one so that it ends with the tile."""
    start = mul(number, num(lanes))
    return start if extent % lanes == 0 else min_(start, num(extent - lanes))


def _lanes(width: int, node: Compute) -> Node:
    return Loop(LANE, width, LoopKind.VECTOR, (node,))
