"""Thread mapping of row reductions on a GPU: which rows a thread processes, and which part of each.

A row is one outer point with all inner points. `lanes` threads share a row. If memory is contiguous along the row,
these are adjacent threads. If it is contiguous along an outer axis, adjacent threads have adjacent rows, and the lanes
of a row are strided.

`RowTiling` splits a row into chunks of `vector_elems` contiguous elements that are distributed cyclically over the
lanes. Rows of odd length begin at any alignment: `PeeledRow` gives the elements before the first aligned vector of a
row, and lanes take single elements of its head and tail.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from enum import Enum

from roller_svc.analysis.index_map import IndexMap
from roller_svc.families.common.gpu.row_space import row_periods, row_start_access
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    AxisRef,
    Expr,
    Select,
    loads_of,
    substitute,
)
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.index import add, ceil_div, div, logical_and, lt, min_, mod, mul, num, ref, sub
from roller_svc.ir.program import Axis, TensorExpr
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Barrier, Branch, Let, Loop, LoopKind, Node
from roller_svc.schedule.nest_statements import inner_axes

LANE, POINT = ".lane", ".point"


@dataclass(frozen=True, slots=True)
class ThreadRows:
    """Mapping of a group's rows to threads; `warp` is the number of threads of a warp."""

    group: KernelGroup
    program: RProgram
    warp: int
    # Of peeled rows, the outer axes along which they differ in alignment, and the steps after which it repeats. The
    # rows of a block have one alignment, and those of a thread follow one another. None: rows are not peeled.
    periods: Mapping[str, int] | None = None

    @property
    def lanes(self) -> int:
        return self.program.reduce_threads

    @property
    def points(self) -> int:
        """Return the number of threads of a block that have the same lane in different rows."""
        return self.program.threads // self.lanes

    @property
    def lanes_are_adjacent(self) -> bool:
        """Return whether the lanes of a row are adjacent threads."""
        return self.program.space.vector_axis not in {a.name for a in self.group.outer}

    @property
    def vector(self) -> str | None:
        """Return the outer axis along which a thread has adjacent points, if there is one."""
        for axis in self.group.outer:
            width = self.program.thread[axis.name]
            if axis.name == self.program.space.vector_axis and width > 1 and axis.extent % width == 0:
                return axis.name
        return None

    @property
    def vector_element(self) -> str | None:
        """Return the variable of the loop over a thread's adjacent points, if there are any."""
        return None if self.vector is None else f"{self.vector}.element"

    @property
    def multi_point_axes(self) -> tuple[Axis, ...]:
        """Return outer axes with several points for each thread at once, the vector axis last."""
        if self.periods is not None:
            return ()
        wide = [a for a in self.group.outer if self.program.thread[a.name] > 1]
        return tuple(sorted(wide, key=lambda a: a.name == self.vector))

    @property
    def elements(self) -> tuple[AxisRef, ...]:
        """Return the variables of the current row among the thread's rows."""
        return tuple(ref(_element(a)) for a in self.multi_point_axes)

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.program.thread[a.name] for a in self.multi_point_axes)

    @property
    def flat_element(self) -> Expr:
        flat: Expr = num(0)
        for var, extent in zip(self.elements, self.shape, strict=True):
            flat = add(mul(flat, num(extent)), var)
        return flat

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    # loops ----------------------------------------------------------------------------------------------------------
    def thread_loops(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Loop over blocks and threads and bind a thread's position around the nodes."""
        for axis in reversed(self.group.outer):
            nodes = (Let(_first(axis), self._first_of(axis), nodes),)
        threads = [(_thread(a), self._threads(a)) for a in self._by_adjacency()]
        point: Expr = num(0)
        for var, extent in threads:
            point = add(mul(point, num(extent)), ref(var))
        nodes = (Let(POINT, point, nodes),)
        order = [*threads, (LANE, self.lanes)] if self.lanes_are_adjacent else [(LANE, self.lanes), *threads]
        for var, extent in reversed(order):
            nodes = (Loop(var, extent, LoopKind.THREAD, nodes),)
        for axis in reversed(self.group.outer):
            blocks = ceil_div(axis.extent, self._rows_of_blocks(axis)) * self.period(axis)
            nodes = (Loop(f"{axis.name}.block", blocks, LoopKind.BLOCK, nodes),)
        return nodes

    def for_each_row(self, nodes: tuple[Node, ...], *, guarded: bool = False, vector: bool = True) -> tuple[Node, ...]:
        """Loop over the thread's rows, only the existing ones if `guarded`.

        With `vector`, adjacent rows are lanes of a vector loop, for which the nodes must be straight-line code.
        """
        for axis in reversed(self.multi_point_axes):
            kind = LoopKind.VECTOR if vector and axis.name == self.vector else LoopKind.UNROLL
            if guarded and axis.name != self.vector:
                nodes = _branch(self._inside(axis), nodes)
            nodes = (Loop(_element(axis), self.program.thread[axis.name], kind, nodes),)
            if guarded and axis.name == self.vector:
                nodes = _branch(self._inside(axis), nodes)
        if guarded:
            inside: Expr | None = None
            for axis in self.group.outer:
                inside = logical_and(inside, None if axis in self.multi_point_axes else self._inside(axis))
            nodes = _branch(inside, nodes)
        return nodes

    def for_each_serial_row(self, nodes: tuple[Node, ...], *, has_barrier: bool) -> tuple[Node, ...]:
        """Loop over the rows of a thread that follow one another.

        Args:
            nodes: the statements of a row.
            has_barrier: whether a barrier must separate the shared memory of two rows.
        """
        if has_barrier and self.serial_axes:
            nodes = (*nodes, Barrier())
        for axis in reversed(self.serial_axes):
            nodes = (Loop(_element(axis), self.program.thread[axis.name], LoopKind.SERIAL, nodes),)
        return nodes

    @property
    def serial_axes(self) -> tuple[Axis, ...]:
        """Return outer axes along which a thread has several peeled rows."""
        if self.periods is None:
            return ()
        return tuple([a for a in self.group.outer if self.program.thread[a.name] > 1])

    # positions ------------------------------------------------------------------------------------------------------
    @property
    def read_at(self) -> dict[str, Expr]:
        """Return the outer axes for reads: beyond the edge the last row, since all lanes must arrive at barriers."""
        return {a.name: self._at(a, clamped=self._has_tail(a)) for a in self.group.outer}

    @property
    def write_at(self) -> dict[str, Expr]:
        return {a.name: self._at(a, clamped=False) for a in self.group.outer}

    @property
    def element_ranges(self) -> dict[str, int]:
        """Return the extents of the variables of loops over a thread's rows."""
        return {_element(a): self.program.thread[a.name] for a in self.multi_point_axes}

    def _at(self, axis: Axis, *, clamped: bool) -> Expr:
        first, unit = ref(_first(axis)), self._unit(axis)
        if unit > 1:
            chunk = min_(first, num(axis.extent // unit - 1)) if clamped else first
            return add(mul(chunk, num(unit)), ref(_element(axis)))
        if axis in self.serial_axes:
            return self._serial_at(axis, clamped=clamped)
        position: Expr = first
        if axis in self.multi_point_axes:
            position = add(first, mul(ref(_element(axis)), num(self._threads(axis))))
        return min_(position, num(axis.extent - 1)) if clamped else position

    def _serial_at(self, axis: Axis, *, clamped: bool) -> Expr:
        """Return a position along a serial axis; beyond the edge the block's last, which has the same alignment."""
        first: Expr = ref(_first(axis))
        period = self.period(axis)
        number = add(mul(ref(_element(axis)), num(self._threads(axis))), ref(_thread(axis)))
        if clamped:
            first = min_(first, num(axis.extent - 1))
            number = min_(number, div(sub(num(axis.extent - 1), first), period))
        return add(first, mul(number, num(period)))

    @property
    def first_of_block(self) -> dict[str, Expr]:
        """Return the positions of a block's first row along the serial axes."""
        firsts: dict[str, Expr] = {}
        for axis in self.serial_axes:
            first: Expr = ref(_first(axis))
            firsts[axis.name] = min_(first, num(axis.extent - 1)) if self._has_tail(axis) else first
        return firsts

    def _inside(self, axis: Axis) -> Expr | None:
        if not self._has_tail(axis):
            return None
        if (unit := self._unit(axis)) > 1:
            return lt(ref(_first(axis)), num(axis.extent // unit))
        return lt(self._at(axis, clamped=False), num(axis.extent))

    def _first_of(self, axis: Axis) -> Expr:
        """Return the thread's first position, in units of its vector; along a serial axis, that of the block."""
        block = ref(f"{axis.name}.block")
        if axis in self.serial_axes:
            period = self.period(axis)
            return add(mul(div(block, period), num(self._rows_of_blocks(axis))), mod(block, period))
        return add(mul(block, num(self.program.block[axis.name] // self._unit(axis))), ref(_thread(axis)))

    def period(self, axis: Axis) -> int:
        """Return the blocks whose rows alternate, so that those of each have one alignment."""
        return (self.periods or {}).get(axis.name, 1) if axis in self.serial_axes else 1

    def _rows_of_blocks(self, axis: Axis) -> int:
        """Return the rows of blocks whose rows alternate."""
        return self.program.block[axis.name] * self.period(axis)

    def _unit(self, axis: Axis) -> int:
        return self.program.thread[axis.name] if axis.name == self.vector else 1

    def _has_tail(self, axis: Axis) -> bool:
        return axis.extent % self._rows_of_blocks(axis) != 0

    def _threads(self, axis: Axis) -> int:
        return self.program.block[axis.name] // self.program.thread[axis.name]

    def _by_adjacency(self) -> list[Axis]:
        """Return outer axes, the one along which threads are adjacent last."""
        return sorted(self.group.outer, key=lambda a: a.name == self.program.space.vector_axis)


def _branch(cond: Expr | None, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    return nodes if cond is None else (Branch(cond, nodes),)


def _element(axis: Axis) -> str:
    return f"{axis.name}.element"


def _first(axis: Axis) -> str:
    return f"{axis.name}.first"


def _thread(axis: Axis) -> str:
    return f"{axis.name}.thread"


# Unrolled chunks of a lane; registers hold no longer rows.
MAX_CHUNKS_IN_FLIGHT = 128
CHUNK, VECTOR_ELEMENT, ROUND, STEP, IN_FLIGHT = ".chunk", ".place", ".round", ".step", ".in_flight"
HEAD, VECTORS = ".head", ".vectors"


@dataclass(frozen=True, slots=True)
class PeeledRow:
    """Loop peeling of a row that begins at any alignment: a head of elements, aligned vectors, a tail of elements."""

    start: Expr  # elements before the row in memory
    extent: int
    vector_elems: int

    def bind(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind the elements of the head and the number of vectors around the nodes."""
        width = self.vector_elems
        head = mod(sub(num(width), mod(self.start, width)), width)
        vectors = div(sub(num(self.extent), ref(HEAD)), width)
        return (Let(HEAD, head, (Let(VECTORS, vectors, nodes),)),)


class RowPart(Enum):
    """The part of a row that a tiling covers."""

    WHOLE = "whole"
    VECTORS = "vectors"  # of a peeled row
    EDGES = "edges"  # head and tail of a peeled row


@dataclass(frozen=True, slots=True)
class RowTiling:
    """Chunks of a row; `chunks_in_flight` chunks of a lane are in flight together."""

    axes: tuple[Axis, ...]
    vector_elems: int
    lanes: int
    chunks_in_flight: int
    part: RowPart = RowPart.WHOLE
    peeled: PeeledRow | None = None

    @property
    def parts(self) -> tuple[RowTiling, ...]:
        """Return the tilings that cover the row together: a peeled row's vectors, then its edges."""
        if self.peeled is None:
            return (self,)
        edges = replace(self, vector_elems=1, chunks_in_flight=MAX_CHUNKS_IN_FLIGHT, part=RowPart.EDGES)
        return self, edges

    @property
    def points(self) -> int:
        """Return the elements of the row."""
        return math.prod(a.extent for a in self.axes)

    @property
    def chunks(self) -> int:
        """Return the most chunks of a row."""
        if self.part is RowPart.EDGES and self.peeled is not None:
            return 2 * (self.peeled.vector_elems - 1)
        return self.points // self.vector_elems

    @property
    def min_chunks(self) -> int:
        """Return the chunks that every row has, whatever its alignment is."""
        match self.part:
            case RowPart.WHOLE:
                return self.chunks
            case RowPart.VECTORS:
                return (self.points - self.vector_elems + 1) // self.vector_elems
            case RowPart.EDGES:
                return 0

    @property
    def _stop(self) -> Expr:
        """Return the number of chunks of the current row."""
        match self.part:
            case RowPart.WHOLE:
                return num(self.chunks)
            case RowPart.VECTORS:
                return ref(VECTORS)
            case RowPart.EDGES:
                return sub(num(self.points), self._in_vectors)

    @property
    def _in_vectors(self) -> Expr:
        """Return the elements of a peeled row that are in vectors."""
        return mul(ref(VECTORS), num(self.peeled.vector_elems if self.peeled is not None else 0))

    @property
    def iterations(self) -> int:
        return ceil_div(self.chunks, self.lanes)

    @property
    def holds_row(self) -> bool:
        """Return whether the whole row is in flight."""
        return self.chunks_in_flight >= self.iterations

    @property
    def tile_shape(self) -> tuple[int, ...]:
        """Return a key that is equal for tilings with equal positions in a row."""
        return (self.vector_elems, *(a.extent for a in self.axes))

    @property
    def at(self) -> dict[str, Expr]:
        """Return the values of the axes in a chunk.

        Variables are named by position, since statements may name the axes of one row differently.
        """
        positions: dict[str, Expr] = {a.name: ref(_position(i)) for i, a in enumerate(self.axes)}
        if self.vector_elems > 1:
            last = self.axes[-1].name
            positions[last] = add(mul(positions[last], num(self.vector_elems)), ref(VECTOR_ELEMENT))
            if self.part is RowPart.VECTORS:
                positions[last] = add(ref(HEAD), positions[last])
        return positions

    @property
    def vector_chunk(self) -> Expr:
        """Return the number of the current vector in a row of one axis."""
        return ref(_position(0))

    @property
    def chunks_of_lane(self) -> Expr:
        """Return the number of chunks that a lane has."""
        full = self.min_chunks // self.lanes
        count: Expr = num(full)
        for round_ in range(full, self.iterations):
            is_there = lt(add(num(round_ * self.lanes), ref(LANE)), self._stop)
            count = Select(is_there, num(round_ + 1), count, DType.INT32)
        return count

    def for_each_chunk(self, body: Callable[[], tuple[Node, ...]]) -> tuple[Node, ...]:
        """Loop over a lane's chunks: unrolled groups, the remaining full iterations, then the guarded tail."""
        full = self.min_chunks // self.lanes
        steps = full // self.chunks_in_flight if full > self.chunks_in_flight else 0
        nodes: list[Node] = []
        if steps:
            first = mul(ref(STEP), num(self.chunks_in_flight))
            nodes.append(Loop(STEP, steps, LoopKind.SERIAL, self._unrolled_iterations(first, self.chunks_in_flight, body())))
        done = steps * self.chunks_in_flight
        if full > done:
            nodes += self._unrolled_iterations(num(done), full - done, body())
        for round_ in range(full, self.iterations):
            chunk = add(num(round_ * self.lanes), ref(LANE))
            last = Branch(lt(ref(CHUNK), self._stop), self.at_positions(body()))
            nodes.append(Let(ROUND, num(round_), (Let(CHUNK, chunk, (last,)),)))
        return tuple(nodes)

    def _unrolled_iterations(self, first: Expr, count: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        chunk = ref(ROUND) if self.lanes == 1 else add(mul(ref(ROUND), num(self.lanes)), ref(LANE))
        nodes = (Let(CHUNK, chunk, self.at_positions(nodes)),)
        return (Loop(IN_FLIGHT, count, LoopKind.UNROLL, (Let(ROUND, add(first, ref(IN_FLIGHT)), nodes),)),)

    def at_positions(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind the positions of a chunk around the nodes."""
        if self.part is RowPart.EDGES:
            after = add(ref(CHUNK), self._in_vectors)
            place = Select(lt(ref(CHUNK), ref(HEAD)), ref(CHUNK), after, DType.INT32)
            return (Let(_position(0), place, nodes),)
        stride = 1
        for i in range(len(self.axes) - 1, -1, -1):
            extent = self.axes[i].extent // (self.vector_elems if i == len(self.axes) - 1 else 1)
            index = div(ref(CHUNK), stride)
            nodes = (Let(_position(i), index if i == 0 else mod(index, extent), nodes),)
            stride *= extent
        return nodes


def row_tiling(statement: TensorExpr, outer: tuple[Axis, ...], program: RProgram, peeled: PeeledRow | None) -> RowTiling | None:
    """Return the tiling of a statement's inner axes, or None if it has none.

    Args:
        statement: one of the group.
        outer: axes that all statements share.
        program: the tiles.
        peeled: how a row is peeled whose extent the vector does not divide.
    """
    axes = inner_axes(statement, outer)
    if not axes:
        return None
    (inner,) = program.space.role(AxisRole.INNER)
    # the contiguous axis goes last
    axes = tuple(sorted(axes, key=lambda a: a.name == inner.members[-1].name))
    vector_elems, part = program.thread[inner.name], RowPart.WHOLE
    if axes[-1].extent % vector_elems == 0:
        peeled = None
    elif peeled is not None and len(axes) == 1 and axes[0].extent == peeled.extent:
        part = RowPart.VECTORS
    else:
        vector_elems, peeled = 1, None
    chunks_in_flight = ceil_div(program.block[inner.name], program.reduce_threads * vector_elems)
    chunks_in_flight = max(1, min(chunks_in_flight, MAX_CHUNKS_IN_FLIGHT))
    return RowTiling(axes, vector_elems, program.reduce_threads, chunks_in_flight, part, peeled)


def thread_rows(group: KernelGroup, program: RProgram, warp: int) -> ThreadRows:
    """Return the mapping of rows to threads: where rows are peeled, those of a block have one alignment."""
    rows = ThreadRows(group, program, warp)
    inner = next(iter(program.space.role(AxisRole.INNER)), None)
    if inner is None or not _may_be_peeled(rows, inner.extent, program.thread[inner.name]):
        return rows
    return replace(rows, periods=row_periods(program.space, program.thread[inner.name]))


def _may_be_peeled(rows: ThreadRows, extent: int, vector_elems: int) -> bool:
    return extent % vector_elems != 0 and extent >= 2 * vector_elems and rows.lanes_are_adjacent


def index_map(statement: TensorExpr, rows: ThreadRows, tiling: RowTiling | None, outer: dict[str, Expr]) -> IndexMap:
    """Return the values of the statement's axes, with the given outer ones."""
    if tiling is None:
        return IndexMap(statement.extents, outer, rows.element_ranges)
    return IndexMap(statement.extents, outer | tiling.at, rows.element_ranges | {VECTOR_ELEMENT: tiling.vector_elems})


def peeled_row(rows: ThreadRows) -> PeeledRow | None:
    """Return how rows are peeled whose extent a thread's vector does not divide, or None if they are not.

    The alignment is that of the tensor whose rows are the largest.
    """
    inner = next(iter(rows.program.space.role(AxisRole.INNER)), None)
    if inner is None:  # a single element
        return None
    vector_elems, access = rows.program.thread[inner.name], row_start_access(rows.program.space)
    if access is None or not _may_be_peeled(rows, inner.extent, vector_elems):
        return None
    for statement in rows.group.statements:
        axes = inner_axes(statement, rows.group.outer)
        index = next((load.index for load in loads_of(statement.body) if load.tensor == access.tensor), None)
        if access.is_output and statement.output == access.tensor:
            index = statement.index
        if index is None or len(axes) != 1:
            continue
        start: Expr = num(0)
        values: dict[str, Expr] = {**rows.read_at, **rows.first_of_block, axes[0].name: num(0)}
        stride = 1
        for place, dim in zip(reversed(index), reversed(access.dims), strict=True):
            start = add(start, mul(substitute(place, values), num(stride)))
            stride *= dim.size
        return PeeledRow(start, inner.extent, vector_elems)
    return None


def _position(axis: int) -> str:
    return f".k{axis}"
