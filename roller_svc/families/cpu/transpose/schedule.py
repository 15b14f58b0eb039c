"""Layout changes → schedule tree for a CPU: maps that read along another axis than they write, transposed in registers.

A tile is read in blocks of whole vectors, transposed into an L1 buffer, and mapped from there by rows. Short rows are
deinterleaved into vectors, or interleaved from them.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from roller_svc.families.common.cpu.parallel_loops import SimdRows, loop_over_points, task_loops, whole_or_tail
from roller_svc.families.common.cpu.prefetch import PREFETCH_DISTANCE_BYTES
from roller_svc.families.cpu.transpose.workload import TransposeKind, TransposeSpace
from roller_svc.ir.expr import Expr, Load, rewrite, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, ceil_div, linearize, min_, mul, num, ref
from roller_svc.ir.program import Axis, TensorExpr
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import (
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
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import RowReads, nest_loops, row_storages, row_tensors, wrap_in_storages

LANE = ".lane"
BLOCK_ROW, BLOCK_COLUMN = ".block.row", ".block.column"
INTERLEAVED = ".interleaved"
# Multiple of the L2 size above which results are prefetched (measured on Skylake-SP: slower at 2.5 times,
# equal at 8 times, faster from 12 times on).
PREFETCH_L2_RATIO = 4
# Row segments of at most this many bytes are prefetched: from the LLC, and from DRAM.
MAX_PREFETCHED_ROW_BYTES, MAX_PREFETCHED_ROW_BYTES_DRAM = 128, 256

Point = dict[str, Expr]


def lower(group: KernelGroup, program: RProgram, workload: Workload[TransposeSpace]) -> tuple[ScheduleTree, ...]:
    """Return one tree: parallel tasks, then the tiles of each.

    Tiles that share lines of the results are adjacent in time. For groups much larger than L2, tiles that share lines
    of the operand are.
    """
    return (ScheduleTree(group.name, _Layout(group, program, workload.facts, workload.machine.hw).tasks()),)


@dataclass(frozen=True)
class _Layout:
    group: KernelGroup
    program: RProgram
    layout: TransposeSpace
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
        nodes = self._dispatch_edge(self.row, lambda width: self._dispatch_edge(column, lambda count: self._tile(width, count)))
        nodes = wrap_in_storages(self._buffers(), nodes)
        first, then = (self.row, column) if self._is_large else (column, self.row)
        nodes = self._steps(first, self._steps(then, nodes))
        for axis in reversed(self.group.outer):
            if axis not in (self.row, *self.columns):
                nodes = self._steps(axis, nodes)
        return task_loops(self.group.outer, self.program, nodes)

    def _steps(self, axis: Axis, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        tile = self.program.thread[axis.name]
        simd_rows = SimdRows(axis, tile, num(0)) if axis in (self.row, *self.columns) else None
        return loop_over_points(axis, self.program.block[axis.name], simd_rows, nodes)

    def _dispatch_edge(self, axis: Axis, nodes_at: Callable[[int], tuple[Node, ...]]) -> tuple[Node, ...]:
        """Return nodes for full tiles along an axis and for the tail at its end."""
        return whole_or_tail(ref(f"{axis.name}.first"), self.program.thread[axis.name], axis.extent, nodes_at)

    # tiles ----------------------------------------------------------------------------------------------------------
    def _tile(self, width: int, count: int) -> tuple[Node, ...]:
        if self.layout.kind is TransposeKind.INTERLEAVE:
            return self._interleave(count)
        staging = [node for i in range(len(self.layout.transposed)) for node in self._stage_tile(i, width, self._fused(count))]
        prefetches = (
            *self._prefetch_next_tile(width, self._fused(count)),
            *self._over_columns(count, self._prefetch_results(width)),
        )
        return (*prefetches, *staging, *self._rows(width, count))

    def _buffers(self) -> list[Storage]:
        """Return buffers for a whole tile: rows of the result, or columns of short rows."""
        width, count = self._whole(self.row), self._whole(self.columns[0])
        if self.layout.kind is TransposeKind.INTERLEAVE:
            (statement,) = [s for s in self.group.statements if s.output not in self.group.register_tensors]
            return [Storage(INTERLEAVED, statement.type.dtype, (self.layout.short_row, count), Scope.STACK, ())]
        shape = (self._fused(count), width)
        return [Storage(self._buffer_name(load), load.dtype, shape, Scope.STACK, ()) for load in self.layout.transposed]

    def _whole(self, axis: Axis) -> int:
        return min(self.program.thread[axis.name], axis.extent)

    def _fused(self, count: int) -> int:
        return count * math.prod(a.extent for a in self.columns[1:])

    def _stage_tile(self, which: int, width: int, count: int) -> tuple[Node, ...]:
        """Transpose a tile into its buffer block by block; the last block may overlap the one before."""
        load, stride, lanes = self.layout.transposed[which], self.layout.stride[which], self.layout.lanes
        deinterleaves = self.layout.kind is TransposeKind.DEINTERLEAVE
        row = _block(ref(BLOCK_ROW), lanes, width)
        column = num(0) if deinterleaves else _block(ref(BLOCK_COLUMN), lanes, count)
        at = {self.row.name: add(ref(f"{self.row.name}.first"), row)}
        at |= {a.name: num(0) for a in self.columns[1:]} | {self.columns[0].name: ref(f"{self.columns[0].name}.first")}
        at[self.columns[-1].name] = add(at[self.columns[-1].name], column)
        source = replace(load, index=tuple(substitute(i, at) for i in load.index))
        short = self.layout.short_row if deinterleaves else None
        pitch = self._whole(self.row)
        block = Transpose(self._buffer_name(load), (column, row), pitch, source, stride, columns=short, lanes=lanes)
        nodes: tuple[Node, ...] = (block,)
        if not deinterleaves:
            nodes = (Loop(BLOCK_COLUMN, ceil_div(count, lanes), LoopKind.SERIAL, nodes),)
        return (Loop(BLOCK_ROW, ceil_div(width, lanes), LoopKind.SERIAL, nodes),)

    def _rows(self, width: int, count: int) -> tuple[Node, ...]:
        """Map from the buffers, row by row of the result."""
        at = self._at(ref(LANE))
        column = linearize((ref(f"{axis.name}.column"), axis.extent) for axis in self.columns)

        def from_buffer(node: Expr) -> Expr:
            if isinstance(node, Load) and node in self.layout.transposed:
                return Load(self._buffer_name(node), (column, ref(LANE)), node.dtype)
            return node

        bodies = {s.output: rewrite(s.body, from_buffer) for s in self.group.statements}
        return self._over_columns(count, self._map(at, width, bodies))

    def _map(self, at: Point, width: int, bodies: dict[str, Expr]) -> tuple[Node, ...]:
        """Execute all statements at `width` adjacent points as vectors."""
        locals_ = row_tensors(self.group)
        reads = RowReads(locals_, (ref(LANE),), at)
        nodes: list[Node] = []
        for s in self.group.statements:
            for store in reads.store(self.group, s, reads.apply(bodies[s.output])):
                nodes.append(_lanes(width, store if store.tensor != s.output else self._stored_result(store)))
        return wrap_in_storages(row_storages(self.group.statements, locals_, width), tuple(nodes))

    def _stored_result(self, store: Compute) -> Compute:
        """Return the store of a result, to the buffer of short rows if they are interleaved."""
        if self.layout.kind is TransposeKind.INTERLEAVE:
            return Compute(INTERLEAVED, (ref(f"{self.row.name}.short"), ref(LANE)), store.value)
        return replace(store, nontemporal=self.program.pipeline.nontemporal)

    def _prefetch_next_tile(self, width: int, count: int) -> tuple[Node, ...]:
        """Prefetch the next tile along the columns if a tile reads short segments of many rows.

        Hardware prefetchers see too few consecutive lines of each row.
        """
        size = self.layout.transposed[0].dtype.bytes
        in_memory = self.group.space.compulsory_bytes > self.hw.levels[1].capacity_bytes
        short = MAX_PREFETCHED_ROW_BYTES_DRAM if in_memory else MAX_PREFETCHED_ROW_BYTES
        if not self._is_large or count * size > short or self.layout.kind is not TransposeKind.BLOCK:
            return ()
        line = self.hw.dram.transaction_bytes // size
        at: Point = {a.name: num(0) for a in self.columns[1:]}
        at[self.columns[0].name] = ref(f"{self.columns[0].name}.first")
        at[self.row.name] = add(ref(f"{self.row.name}.first"), ref(BLOCK_ROW))
        prefetches = tuple(
            Prefetch(load.tensor, tuple(substitute(i, at) for i in load.index), count + first)
            for load in self.layout.transposed
            for first in range(0, count, line)
        )
        return (Loop(BLOCK_ROW, width, LoopKind.SERIAL, prefetches),)

    def _prefetch_results(self, width: int) -> tuple[Node, ...]:
        """Prefetch the lines that the tile's results fill while it is staged; few of them are adjacent."""
        if self.program.pipeline.nontemporal or not self._is_large:
            return ()
        prefetches: list[Node] = []
        for s in self.group.statements:
            if s.output not in self.group.register_tensors:
                step = self.hw.dram.transaction_bytes // s.type.dtype.bytes
                for first in range(0, width, step):
                    at = self._at(num(first))
                    prefetches.append(Prefetch(s.output, tuple(substitute(i, at) for i in s.index), 0, for_write=True))
        return tuple(prefetches)

    @property
    def _is_large(self) -> bool:
        """Return whether the group accesses much more than L2 holds."""
        return self.group.space.compulsory_bytes > PREFETCH_L2_RATIO * self.hw.block_level.capacity_bytes

    def _at(self, lane: Expr) -> Point:
        """Return the position of an element along the row, in loops over the columns."""
        at: Point = {a.name: ref(f"{a.name}.column") for a in self.columns[1:]}
        first = self.columns[0].name
        at[first] = add(ref(f"{first}.first"), ref(f"{first}.column"))
        at[self.row.name] = add(ref(f"{self.row.name}.first"), lane)
        return at

    def _over_columns(self, count: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        if not nodes:
            return ()
        first, *others = self.columns
        loops = [(f"{first.name}.column", count), *((f"{axis.name}.column", axis.extent) for axis in others)]
        return nest_loops(LoopKind.SERIAL, loops, nodes)

    def _interleave(self, count: int) -> tuple[Node, ...]:
        """Map along the columns, one element of the short rows at a time, then interleave all."""
        short, lanes, (column,) = self.layout.short_row, self.layout.lanes, self.columns
        (statement,) = [s for s in self.group.statements if s.output not in self.group.register_tensors]
        at: Point = {self.row.name: ref(f"{self.row.name}.short")}
        at[column.name] = add(ref(f"{column.name}.first"), ref(LANE))
        nodes = self._map(at, count, {s.output: s.body for s in self.group.statements})
        mapped = Loop(f"{self.row.name}.short", short, LoopKind.SERIAL, nodes)
        block = _block(ref(BLOCK_COLUMN), lanes, count)
        position = {self.row.name: num(0), column.name: add(ref(f"{column.name}.first"), block)}
        index = tuple(substitute(i, position) for i in statement.index)
        source = Load(INTERLEAVED, (num(0), block), statement.type.dtype)
        pitch = self._whole(column)
        interleave = Transpose(statement.output, index, short, source, pitch, rows=short, lanes=lanes, column_dim=len(index) - 2)
        prefetches = self._prefetch_interleaved(statement, index) if self._is_large else ()
        blocks = Loop(BLOCK_COLUMN, ceil_div(count, lanes), LoopKind.SERIAL, (interleave, *prefetches))
        return (mapped, blocks)

    def _prefetch_interleaved(self, statement: TensorExpr, index: tuple[Expr, ...]) -> tuple[Node, ...]:
        """Prefetch as many lines as a block of short rows fills, further on in memory."""
        size = statement.type.dtype.bytes
        step, distance = self.hw.dram.transaction_bytes // size, PREFETCH_DISTANCE_BYTES // size
        lines = range(0, self.layout.short_row * self.layout.lanes, step)
        return tuple(Prefetch(statement.output, index, distance + first, for_write=True) for first in lines)

    def _buffer_name(self, load: Load) -> str:
        return f"{load.tensor}.transposed{self.layout.transposed.index(load)}"


def _block(number: Expr, lanes: int, extent: int) -> Expr:
    """Return the start of a block; the last one ends with the tile."""
    start = mul(number, num(lanes))
    return start if extent % lanes == 0 else min_(start, num(extent - lanes))


def _lanes(width: int, node: Compute) -> Node:
    return Loop(LANE, width, LoopKind.VECTOR, (node,))
