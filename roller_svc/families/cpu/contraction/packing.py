"""Contraction operand → packed panels of MR rows or NR columns for each k, as the micro-kernel reads them (BLIS packm).

This is ROLLER's tile load: index arithmetic, guards and inlined producers are evaluated here, once. Memory is read
along its rows. Panels along these rows fill in parallel, one k after the other; panels across them are transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.analysis.fused_axis import member_values
from roller_svc.families.common.cpu.memory import LINE_BYTES
from roller_svc.families.common.cpu.micro_kernel import LANE
from roller_svc.families.common.cpu.parallel_loops import whole_or_tail
from roller_svc.families.common.cpu.prefetch import PREFETCH_DISTANCE_BYTES
from roller_svc.families.common.view import bind_members
from roller_svc.families.cpu.contraction.workload import CpuOperand, OperandLayout
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, substitute
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import add, ceil_div, div, le, lt, min_, mod, mul, num, ref, sub
from roller_svc.ir.program import Combine, identity
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    Let,
    Loop,
    LoopKind,
    Node,
    Prefetch,
    Routine,
    Scope,
    Storage,
    Transpose,
)
from roller_svc.schedule.guards import unswitch_guards

K_ROW, K_COUNT, K_FIRST = "k.row", "k.count", "k.first"
PAGE_BYTES = 4096  # hardware prefetchers do not cross a page
K_CHUNK, PANEL_ROW = "k.chunk", ".panel.row"
_VECTOR, _OFFSETS = ".vector", "place.of"


@dataclass(frozen=True, slots=True)
class Panels:
    """A task's panels along m or n: at most `count` of `size` elements, `{role}.panels` of them from `{role}.first`."""

    axis: TileAxis
    count: int
    size: int
    fill: int  # width of a packed edge panel of columns with its zeros; rows are not padded
    shared_buffer: bool = False  # all panels are packed to one buffer

    @property
    def role(self) -> str:
        return self.axis.role.value

    @property
    def panel(self) -> Expr:
        return ref(f"{self.role}.panel")

    @property
    def buffer_index(self) -> Expr:
        """Return the index of the packed panel in its buffer."""
        return num(0) if self.shared_buffer else self.panel

    @property
    def position(self) -> Expr:
        return ref(f"{self.role}.place")

    @property
    def tail(self) -> int:
        return self.axis.extent % self.size

    def bind_first(self, first: Expr, remaining: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind the first panel number and the number of panels, at most `remaining`, around the nodes."""
        nodes = (Let(f"{self.role}.panels", min_(num(self.count), remaining), nodes),)
        return (Let(f"{self.role}.first", mul(first, num(self.size)), nodes),)

    def loop(self, nodes: tuple[Node, ...], limit: Expr | None = None) -> Node:
        """Loop over all panels of the task and bind the position of each."""
        position = add(ref(f"{self.role}.first"), mul(self.panel, num(self.size)))
        nodes = (Let(f"{self.role}.place", position, nodes),)
        limit = ref(f"{self.role}.panels") if limit is None else limit
        return Loop(f"{self.role}.panel", self.count, LoopKind.SERIAL, nodes, limit)

    def dispatch_edge(self, nodes_of: Callable[[int], tuple[Node, ...]]) -> tuple[Node, ...]:
        """Return the nodes of a full panel or of one cut by the end of the axis, by a test if both occur."""
        return whole_or_tail(self.position, self.size, self.axis.extent, nodes_of)


@dataclass(frozen=True, slots=True)
class Packing:
    """Copy of one operand to the buffer `packed[panel][k][lane]`."""

    packed: str
    source: Expr
    operand: CpuOperand
    k: TileAxis
    kc: int
    lanes: int
    dtype: DType

    def nodes(self, panels: Panels) -> tuple[Node, ...]:
        """Pack the operand's block of `k.count` k from `k.first`."""
        match self.operand.layout:
            case OperandLayout.PANEL_MAJOR:
                return (_routine(self._pack_contiguous(panels)),)
            case OperandLayout.K_MAJOR:
                return (panels.loop(panels.dispatch_edge(lambda count: (_routine(self._pack_transposed(panels, count)),))),)
            case OperandLayout.STRIDED:
                return (panels.loop((_routine(self._pack_strided(panels)),)),)

    def pack_edge(self, panels: Panels) -> tuple[Node, ...]:
        """Pack the panel at the end of the axis alone; the operand is contiguous along the panel."""
        return (self._loop_over_k(self._pack_row(panels, _coordinates(panels), panels.tail)),)

    def _pack_contiguous(self, panels: Panels) -> tuple[Node, ...]:
        along = {panels.axis.members[0].name: add(panels.position, ref(LANE))}
        if not panels.tail:
            return (self._loop_over_k((panels.loop(self._pack_row(panels, along, panels.size)),)),)
        edge = self._pack_row(panels, along, panels.tail)
        if panels.axis.extent < panels.size:
            return (self._loop_over_k((panels.loop(edge),)),)
        whole = div(sub(num(panels.axis.extent), ref(f"{panels.role}.first")), panels.size)
        last = Let(
            f"{panels.role}.panel",
            ref(f"{panels.role}.whole"),
            (Let(f"{panels.role}.place", num(panels.axis.extent - panels.tail), edge),),
        )
        rows = (
            panels.loop(self._pack_row(panels, along, panels.size), ref(f"{panels.role}.whole")),
            Branch(lt(ref(f"{panels.role}.whole"), ref(f"{panels.role}.panels")), (last,)),
        )
        return (Let(f"{panels.role}.whole", whole, (self._loop_over_k(rows),)),)

    def _loop_over_k(self, nodes: tuple[Node, ...]) -> Node:
        nodes = bind_members(self.k, add(ref(K_FIRST), ref(K_ROW)), nodes)
        return Loop(K_ROW, self.kc, LoopKind.SERIAL, nodes, ref(K_COUNT))

    def _pack_row(self, panels: Panels, at: dict[str, Expr], count: int) -> tuple[Node, ...]:
        """Copy a row: packed[panel][k][lane] = source, and 0 beyond the end of the axis."""
        value = substitute(Cast(self.source, self.dtype, implicit=True), at)
        row = Compute(self.packed, (panels.buffer_index, ref(K_ROW), ref(LANE)), value)
        copied = unswitch_guards(Loop(LANE, count, LoopKind.VECTOR, (row,)))
        return (*self._prefetch_rows(panels, at, count), copied, *self._zero_fill(panels, count))

    def _prefetch_rows(self, panels: Panels, at: dict[str, Expr], count: int) -> tuple[Node, ...]:
        """Prefetch a row of a later k; hardware prefetchers do not follow short rows that are far apart."""
        source, row_bytes = self.source, panels.count * panels.size * self.dtype.bytes
        if row_bytes > PAGE_BYTES or not self.operand.plain or not isinstance(source, Load):
            return ()
        later = ceil_div(PREFETCH_DISTANCE_BYTES, row_bytes) * self.operand.k_stride
        index = tuple(substitute(i, at) for i in source.index)
        return tuple(
            Prefetch(source.tensor, tuple(substitute(i, {LANE: num(first)}) for i in index), later)
            for first in range(0, count, LINE_BYTES // self.dtype.bytes)
        )

    def _zero_fill(self, panels: Panels, count: int) -> tuple[Node, ...]:
        if count >= panels.fill:
            return ()
        zero = identity(Combine.SUM, self.dtype)
        index = (panels.buffer_index, ref(K_ROW), add(num(count), ref(LANE)))
        return (Loop(LANE, panels.fill - count, LoopKind.VECTOR, (Compute(self.packed, index, zero),)),)

    def _pack_transposed(self, panels: Panels, count: int) -> tuple[Node, ...]:
        """Transpose blocks of `lanes` k by `lanes` rows, then copy the remaining k one by one.

        All k of a block's rows come before the next rows. Otherwise the 64 rows of a panel, 16 KiB apart, would evict
        lines shared by two blocks from L1.
        """
        blocks = tuple(self._block(panels, first, min(self.lanes, count - first)) for first in range(0, count, self.lanes))
        chunks, tail = self.kc // self.lanes, self._max_remainder()
        nodes: tuple[Node, ...] = ()
        if chunks:
            limit = div(ref(K_COUNT), self.lanes)
            nodes = tuple(Loop(K_CHUNK, chunks, LoopKind.SERIAL, (block,), limit) for block in blocks)
        if tail:
            row = add(mul(div(ref(K_COUNT), self.lanes), num(self.lanes)), ref(K_ROW))
            single = Loop(PANEL_ROW, count, LoopKind.SERIAL, (self._element(panels, row, ref(PANEL_ROW)),))
            nodes = (*nodes, Loop(K_ROW, tail, LoopKind.SERIAL, (single,), mod(ref(K_COUNT), self.lanes)))
        if filled := self._zero_fill(panels, count):
            nodes = (*nodes, Loop(K_ROW, self.kc, LoopKind.SERIAL, filled, ref(K_COUNT)))
        return nodes

    def _max_remainder(self) -> int:
        """Return the largest number of k beyond whole vectors, of a full k block or the last one."""
        ends = {self.kc % self.lanes, self.k.extent % self.kc % self.lanes}
        return max(ends)

    def _block(self, panels: Panels, first: int, count: int) -> Node:
        """Transpose one block, of `lanes` rows or fewer, in registers."""
        corner = self._element(panels, mul(ref(K_CHUNK), num(self.lanes)), num(first))
        source = corner.value.arg if isinstance(corner.value, Cast) else corner.value
        if count == 1 or not isinstance(source, Load):
            along = self._element(panels, add(mul(ref(K_CHUNK), num(self.lanes)), ref(LANE)), num(first))
            return Loop(LANE, self.lanes, LoopKind.SERIAL, (along,))
        stride = self.operand.panel_stride
        return Transpose(self.packed, corner.index, panels.size, source, stride, count)

    def _element(self, panels: Panels, row: Expr, lane: Expr) -> Compute:
        at = {panels.axis.members[0].name: add(panels.position, lane), **member_values(self.k, add(ref(K_FIRST), row))}
        return Compute(self.packed, (panels.panel, row, lane), substitute(self.source, at))

    # fused axes -----------------------------------------------------------------------------------------------------
    def _pack_strided(self, panels: Panels) -> tuple[Node, ...]:
        def rows(at: dict[str, Expr], count: int) -> tuple[Node, ...]:
            return (self._loop_over_k(self._pack_row(panels, at, count)),)

        def cut(count: int) -> tuple[Node, ...]:
            gathered = self._pack_gathered(panels, count)
            return for_panel(panels, rows, count) if gathered is None else contiguous_or(panels, rows, count, gathered)

        return panels.dispatch_edge(cut)

    def _pack_gathered(self, panels: Panels, count: int) -> tuple[Node, ...] | None:
        """Gather rows by a table of element offsets; None if the source is not a plain load with affine address.

        One table of offsets compiles three times as fast as one for each member axis.
        """
        source, strides = self.source, self.operand.member_strides
        if not isinstance(source, Load) or any(source.bounds_checked) or not strides:
            return None
        members = panels.axis.members
        *outer, last = (substitute(i, {member.name: num(0) for member in members}) for i in source.index)
        values = member_values(panels.axis, add(panels.position, ref(LANE)))
        index: Expr = Const(0, DType.INT64)
        for member, stride in zip(members, strides, strict=True):  # add and mul would compute in 32 bits
            offset = Op(OpKind.MUL, (Cast(values[member.name], DType.INT64), Const(stride, DType.INT64)), DType.INT64)
            index = Op(OpKind.ADD, (index, offset), DType.INT64)

        def row(first: Expr, lanes: int) -> Node:
            lane = add(first, ref(LANE))
            element = (*outer, add(last, Load(_OFFSETS, (lane,), DType.INT64)))
            value = Cast(Load(source.tensor, element, source.dtype), self.dtype, implicit=True)
            return Loop(LANE, lanes, LoopKind.VECTOR, (Compute(self.packed, (panels.buffer_index, ref(K_ROW), lane), value),))

        vectors, tail = divmod(count, self.lanes)
        nodes = self._zero_fill(panels, count)
        if tail:
            nodes = (row(num(vectors * self.lanes), tail), *nodes)
        if vectors:
            each = row(mul(ref(_VECTOR), num(self.lanes)), self.lanes)
            nodes = (Loop(_VECTOR, vectors, LoopKind.SERIAL, (each,)), *nodes)
        fill = Loop(LANE, count, LoopKind.SERIAL, (Compute(_OFFSETS, (ref(LANE),), index),))
        return (Storage(_OFFSETS, DType.INT64, (count,), Scope.STACK, (fill, self._loop_over_k(nodes))),)


@dataclass(frozen=True, slots=True)
class RunPacking(Packing):
    """Packing of one value for each run of `run` words of `group` points along k. `kc` counts runs."""

    run: int
    group: int = 1

    def _loop_over_k(self, nodes: tuple[Node, ...]) -> Node:
        first = mul(add(ref(K_FIRST), mul(ref(K_ROW), num(self.run))), num(self.group))
        runs = div(add(ref(K_COUNT), num(self.run - 1)), self.run)
        return Loop(K_ROW, self.kc, LoopKind.SERIAL, bind_members(self.k, first, nodes), runs)


def _routine(nodes: tuple[Node, ...]) -> Node:
    """Wrap the nodes in a routine, which candidates with equal packing share."""
    return Routine("pack", nodes)


def for_panel(panels: Panels, lanes: Callable[[dict[str, Expr], int], tuple[Node, ...]], count: int) -> tuple[Node, ...]:
    """Return `lanes(coordinates, count)` for the first `count` elements of the panel at `place`.

    A full panel within one row of the innermost member axis is contiguous and needs no table.
    """
    return contiguous_or(panels, lanes, count, _with_coordinates(panels, count, lanes(_coordinates(panels), count)))


def contiguous_or(
    panels: Panels, lanes: Callable[[dict[str, Expr], int], tuple[Node, ...]], count: int, nodes: tuple[Node, ...]
) -> tuple[Node, ...]:
    """Return `lanes` of the panel at `place` if it is contiguous along the innermost member, else the nodes."""
    axis, size = panels.axis, panels.size
    innermost = axis.members[-1]
    if count < size or len(axis.members) == 1 or innermost.extent < size:
        return nodes
    along = {innermost.name: add(ref(innermost.name), ref(LANE))}
    inside_row = le(mod(panels.position, innermost.extent), num(innermost.extent - size))
    return (Branch(inside_row, bind_members(axis, panels.position, lanes(along, size)), nodes),)


def _coordinates(panels: Panels) -> dict[str, Expr]:
    """Return the coordinates of lane `lane` of the panel: computed, or read from tables if members divide."""
    members = panels.axis.members
    if len(members) == 1:
        return {members[0].name: add(panels.position, ref(LANE))}
    return {a.name: Load(f"{a.name}.of", (ref(LANE),), DType.INT32) for a in members}


def _with_coordinates(panels: Panels, count: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Wrap the nodes in tables of the member axes' values for each lane, if there are several members."""
    axis = panels.axis
    if len(axis.members) == 1:
        return nodes
    position = add(panels.position, ref(LANE))
    fill = tuple(Compute(f"{name}.of", (ref(LANE),), value) for name, value in member_values(axis, position).items())
    nodes = (Loop(LANE, count, LoopKind.SERIAL, fill), *nodes)
    for member in axis.members:
        nodes = (Storage(f"{member.name}.of", DType.INT32, (count,), Scope.STACK, nodes),)
    return nodes
