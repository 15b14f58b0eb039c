"""Operand of a contraction → panels of MR rows or NR columns for every k, packed for a CPU's micro-kernel.

ROLLER's tile load: any index arithmetic, guard or inlined producer is evaluated here, once. Memory is read along its
rows: panels that lie along them fill side by side, one k after the other; panels across them are transposed.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.families.common.cpu.memory import LINE_BYTES
from roller_svc.families.common.cpu.micro_kernel import LANE
from roller_svc.families.common.cpu.prefetch import AHEAD_BYTES
from roller_svc.families.common.view import decoded, member_values
from roller_svc.families.cpu.contraction.workload import CpuOperand, Lie
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, substitute
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import add, ceil_div, div, le, lt, min_, mod, mul, num, ref, sub
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
from roller_svc.schedule.guards import without_guards_inside

K_ROW, K_COUNT, K_FIRST = "k.row", "k.count", "k.first"
PAGE_BYTES = 4096  # what a core's own prefetchers stay within
K_CHUNK, PANEL_ROW = "k.chunk", ".panel.row"
_VECTOR, _PLACES = ".vector", "place.of"


@dataclass(frozen=True, slots=True)
class Panels:
    """A task's panels along m or n: at most `count` of `size` neighbours, `{role}.panels` of them from `{role}.first`.

    `fill`: columns that stand in a packed panel at the edge, the rest being 0; of rows only those that exist.
    `one_room`: each is packed where the one before it was.
    """

    axis: TileAxis
    count: int
    size: int
    fill: int
    one_room: bool = False

    @property
    def role(self) -> str:
        return self.axis.role.value

    @property
    def panel(self) -> Expr:
        return ref(f"{self.role}.panel")

    @property
    def room(self) -> Expr:
        """Which packed panel it is."""
        return num(0) if self.one_room else self.panel

    @property
    def place(self) -> Expr:
        return ref(f"{self.role}.place")

    @property
    def tail(self) -> int:
        return self.axis.extent % self.size

    def begun(self, first: Expr, left: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes where panels begin at number `first` of their axis, as many as fit of those that are `left`."""
        nodes = (Let(f"{self.role}.panels", min_(num(self.count), left), nodes),)
        return (Let(f"{self.role}.first", mul(first, num(self.size)), nodes),)

    def loop(self, nodes: tuple[Node, ...], limit: Expr | None = None) -> Node:
        """Over all panels of the task, `place` being where each begins."""
        place = add(ref(f"{self.role}.first"), mul(self.panel, num(self.size)))
        nodes = (Let(f"{self.role}.place", place, nodes),)
        limit = ref(f"{self.role}.panels") if limit is None else limit
        return Loop(f"{self.role}.panel", self.count, LoopKind.SERIAL, nodes, limit)

    def cut(self, whole: tuple[Node, ...], edge: tuple[Node, ...]) -> tuple[Node, ...]:
        """What is done at `place`: for a panel inside of the axis, or one cut at its end."""
        if not self.tail:
            return whole
        if self.axis.extent < self.size:
            return edge
        return (Branch(le(add(self.place, num(self.size)), num(self.axis.extent)), whole, edge),)


@dataclass(frozen=True, slots=True)
class Packing:
    """One operand: what its elements are, how it lies, and the room `packed[panel][k][lane]` they go to."""

    packed: str
    factor: Expr
    operand: CpuOperand
    k: TileAxis
    kc: int
    lanes: int
    dtype: DType

    def nodes(self, panels: Panels) -> tuple[Node, ...]:
        """The operand's block of this step, for k from `k.first`, `k.count` of them."""
        match self.operand.lie:
            case Lie.ALONG_PANEL:
                return (_routine(self._side_by_side(panels)),)
            case Lie.ALONG_K:
                whole, edge = self._across(panels, panels.size), self._across(panels, panels.tail)
                return (panels.loop(panels.cut((_routine(whole),), (_routine(edge),))),)
            case Lie.APART:
                return (panels.loop((_routine(self._looked_up(panels)),)),)

    @property
    def along(self) -> Load | None:
        """What a micro-kernel may read where it lies, vectors along a panel; None where there is something to do."""
        plain = self.operand.plain and self.operand.lie is Lie.ALONG_PANEL
        return self.factor if plain and isinstance(self.factor, Load) else None

    def edge(self, panels: Panels) -> tuple[Node, ...]:
        """The panel that is cut at the end of the axis, alone, where it lies along memory's rows."""
        return (self._rows(self._row(panels, _coordinates(panels), panels.tail)),)

    def _side_by_side(self, panels: Panels) -> tuple[Node, ...]:
        along = {panels.axis.members[0].name: add(panels.place, ref(LANE))}
        if not panels.tail:
            return (self._rows((panels.loop(self._row(panels, along, panels.size)),)),)
        edge = self._row(panels, along, panels.tail)
        if panels.axis.extent < panels.size:
            return (self._rows((panels.loop(edge),)),)
        whole = div(sub(num(panels.axis.extent), ref(f"{panels.role}.first")), panels.size)
        last = Let(f"{panels.role}.panel", ref(f"{panels.role}.whole"), (
            Let(f"{panels.role}.place", num(panels.axis.extent - panels.tail), edge),
        ))  # fmt: skip
        rows = (
            panels.loop(self._row(panels, along, panels.size), ref(f"{panels.role}.whole")),
            Branch(lt(ref(f"{panels.role}.whole"), ref(f"{panels.role}.panels")), (last,)),
        )
        return (Let(f"{panels.role}.whole", whole, (self._rows(rows),)),)

    def _rows(self, nodes: tuple[Node, ...]) -> Node:
        nodes = decoded(self.k, add(ref(K_FIRST), ref(K_ROW)), nodes)
        return Loop(K_ROW, self.kc, LoopKind.SERIAL, nodes, ref(K_COUNT))

    def _row(self, panels: Panels, at: dict[str, Expr], count: int) -> tuple[Node, ...]:
        """packed[panel][k][lane] = factor there; beyond the edge of the axis 0, which adds nothing."""
        value = substitute(Cast(self.factor, self.dtype, implicit=True), at)
        row = Compute(self.packed, (panels.room, ref(K_ROW), ref(LANE)), value)
        copied = without_guards_inside(Loop(LANE, count, LoopKind.VECTOR, (row,)))
        return (*self._rows_ahead(panels, at, count), copied, *self._filled(panels, count))

    def _rows_ahead(self, panels: Panels, at: dict[str, Expr], count: int) -> tuple[Node, ...]:
        """Hints for a row of a later k: a core's own prefetchers do not follow short rows that lie far apart."""
        source, row_bytes = self.factor, panels.count * panels.size * self.dtype.bytes
        if row_bytes > PAGE_BYTES or not self.operand.plain or not isinstance(source, Load):
            return ()
        later = ceil_div(AHEAD_BYTES, row_bytes) * self.operand.k_stride
        index = tuple(substitute(i, at) for i in source.index)
        return tuple(
            Prefetch(source.tensor, tuple(substitute(i, {LANE: num(first)}) for i in index), later)
            for first in range(0, count, LINE_BYTES // self.dtype.bytes)
        )

    def _filled(self, panels: Panels, count: int) -> tuple[Node, ...]:
        if count >= panels.fill:
            return ()
        zero = Const(0.0 if self.dtype.is_float else 0, self.dtype)
        place = (panels.room, ref(K_ROW), add(num(count), ref(LANE)))
        return (Loop(LANE, panels.fill - count, LoopKind.VECTOR, (Compute(self.packed, place, zero),)),)

    def _across(self, panels: Panels, count: int) -> tuple[Node, ...]:
        """Blocks of `lanes` k by as many rows, then the k that are left, one by one. All k of a block's rows before the
        next rows': those of 64 side by side, 16 KiB apart, push from L1 lines that two blocks share."""
        blocks = tuple(
            self._block(panels, first, min(self.lanes, count - first)) for first in range(0, count, self.lanes)
        )
        chunks, rest = self.kc // self.lanes, self._rest()
        nodes: tuple[Node, ...] = ()
        if chunks:
            limit = div(ref(K_COUNT), self.lanes)
            nodes = tuple(Loop(K_CHUNK, chunks, LoopKind.SERIAL, (block,), limit) for block in blocks)
        if rest:
            row = add(mul(div(ref(K_COUNT), self.lanes), num(self.lanes)), ref(K_ROW))
            single = Loop(PANEL_ROW, count, LoopKind.SERIAL, (self._element(panels, row, ref(PANEL_ROW)),))
            nodes = (*nodes, Loop(K_ROW, rest, LoopKind.SERIAL, (single,), mod(ref(K_COUNT), self.lanes)))
        if filled := self._filled(panels, count):
            nodes = (*nodes, Loop(K_ROW, self.kc, LoopKind.SERIAL, filled, ref(K_COUNT)))
        return nodes

    def _rest(self) -> int:
        """The most k that are no whole vector, in a full step or the last."""
        ends = {self.kc % self.lanes, self.k.extent % self.kc % self.lanes}
        return max(ends)

    def _block(self, panels: Panels, first: int, count: int) -> Node:
        """One square, or of fewer rows: turned in registers."""
        corner = self._element(panels, mul(ref(K_CHUNK), num(self.lanes)), num(first))
        if count == 1 or not isinstance(corner.value, Load):
            along = self._element(panels, add(mul(ref(K_CHUNK), num(self.lanes)), ref(LANE)), num(first))
            return Loop(LANE, self.lanes, LoopKind.SERIAL, (along,))
        stride = self.operand.panel_stride
        return Transpose(self.packed, corner.index, panels.size, corner.value, stride, count)

    def _element(self, panels: Panels, row: Expr, lane: Expr) -> Compute:
        at = {panels.axis.members[0].name: add(panels.place, lane), self.k.members[0].name: add(ref(K_FIRST), row)}
        return Compute(self.packed, (panels.panel, row, lane), substitute(self.factor, at))

    # axes of several fused ones -------------------------------------------------------------------------------------
    def _looked_up(self, panels: Panels) -> tuple[Node, ...]:
        def rows(at: dict[str, Expr], count: int) -> tuple[Node, ...]:
            return (self._rows(self._row(panels, at, count)),)

        def cut(count: int) -> tuple[Node, ...]:
            gathered = self._gathered(panels, count)
            return in_panel(panels, rows, count) if gathered is None else beside_or(panels, rows, count, gathered)

        return panels.cut(cut(panels.size), cut(panels.tail))

    def _gathered(self, panels: Panels, count: int) -> tuple[Node, ...] | None:
        """Rows whose elements lie anywhere, each at a place of its own from where the row's k begins: one table instead
        of one per member leaves a third of the compiler's work. None for what is no plain load of a sum of axes."""
        source, strides = self.factor, self.operand.member_strides
        if not isinstance(source, Load) or any(source.bounds_checked) or not strides:
            return None
        members = panels.axis.members
        *outer, last = (substitute(i, {member.name: num(0) for member in members}) for i in source.index)
        values = member_values(panels.axis, add(panels.place, ref(LANE)))
        place: Expr = Const(0, DType.INT64)
        for member, stride in zip(members, strides, strict=True):  # not add and mul: they count in 32 bits
            moved = Op(OpKind.MUL, (Cast(values[member.name], DType.INT64), Const(stride, DType.INT64)), DType.INT64)
            place = Op(OpKind.ADD, (place, moved), DType.INT64)

        def row(first: Expr, lanes: int) -> Node:
            lane = add(first, ref(LANE))
            there = (*outer, add(last, Load(_PLACES, (lane,), DType.INT64)))
            value = Cast(Load(source.tensor, there, source.dtype), self.dtype, implicit=True)
            return Loop(LANE, lanes, LoopKind.VECTOR, (Compute(self.packed, (panels.room, ref(K_ROW), lane), value),))

        vectors, rest = divmod(count, self.lanes)
        nodes = self._filled(panels, count)
        if rest:
            nodes = (row(num(vectors * self.lanes), rest), *nodes)
        if vectors:
            each = row(mul(ref(_VECTOR), num(self.lanes)), self.lanes)
            nodes = (Loop(_VECTOR, vectors, LoopKind.SERIAL, (each,)), *nodes)
        fill = Loop(LANE, count, LoopKind.SERIAL, (Compute(_PLACES, (ref(LANE),), place),))
        return (Storage(_PLACES, DType.INT64, (count,), Scope.STACK, (fill, self._rows(nodes))),)


def _routine(nodes: tuple[Node, ...]) -> Node:
    """Where candidates pack alike it is compiled once: what is turned in registers or gathered is long."""
    return Routine("pack", nodes)


def in_panel(panels: Panels, lanes: Callable[[dict[str, Expr], int], tuple[Node, ...]], count: int) -> tuple[Node, ...]:
    """What `lanes(coordinates, count)` does for the first `count` of the panel at `place`.

    A whole panel inside one row of the innermost member axis has neighbours in memory for neighbours.
    """
    return beside_or(panels, lanes, count, _with_coordinates(panels, count, lanes(_coordinates(panels), count)))


def beside_or(
    panels: Panels, lanes: Callable[[dict[str, Expr], int], tuple[Node, ...]], count: int, nodes: tuple[Node, ...]
) -> tuple[Node, ...]:
    """`lanes` of the panel at `place` where its elements are neighbours along the innermost member, else the nodes."""
    axis, size = panels.axis, panels.size
    innermost = axis.members[-1]
    if count < size or len(axis.members) == 1 or innermost.extent < size:
        return nodes
    along = {innermost.name: add(ref(innermost.name), ref(LANE))}
    inside_row = le(mod(panels.place, innermost.extent), num(innermost.extent - size))
    return (Branch(inside_row, decoded(axis, panels.place, lanes(along, size)), nodes),)


def _coordinates(panels: Panels) -> dict[str, Expr]:
    """Where lane `lane` of the panel at `place` stands: computed on the spot, or looked up where that divides."""
    members = panels.axis.members
    if len(members) == 1:
        return {members[0].name: add(panels.place, ref(LANE))}
    return {a.name: Load(f"{a.name}.of", (ref(LANE),), DType.INT32) for a in members}


def _with_coordinates(panels: Panels, count: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes below tables of the member axes' values, lane by lane, where there are several members."""
    axis = panels.axis
    if len(axis.members) == 1:
        return nodes
    position = add(panels.place, ref(LANE))
    fill = tuple(Compute(f"{name}.of", (ref(LANE),), value) for name, value in member_values(axis, position).items())
    nodes = (Loop(LANE, count, LoopKind.SERIAL, fill), *nodes)
    for member in axis.members:
        nodes = (Storage(f"{member.name}.of", DType.INT32, (count,), Scope.STACK, nodes),)
    return nodes
