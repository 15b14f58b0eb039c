"""Scan with few, long rows → totals of pieces, a scan of them, scans of pieces (reduce-then-scan, Blelloch).

The total of a piece of a recurrence is a linear step: the state that it makes of zero, and the product of its gates. The
pieces of a row are an axis of their own: another view of the same memory, so that all three are ordinary groups.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from roller_svc.analysis.scans import LinearStep, Scan, gate_product_dtype, match_scan
from roller_svc.errors import InvariantError, require
from roller_svc.fusion.space import nest_space, scan_space
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Op, OpKind, Select, convert, rewrite, substitute
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.index import add, eq, mul, num, ref, sub
from roller_svc.ir.program import COMBINE_OPS, Axis, AxisKind, Combine, StatementKind, TensorExpr, TensorType, identity

Types = tuple[tuple[str, TensorType], ...]


@dataclass(frozen=True, slots=True)
class ScanLaunches:
    """The groups of a split scan, in order, and the tensors between them."""

    totals: KernelGroup
    before: KernelGroup
    pieces: KernelGroup
    workspaces: Types


def may_split_scan(scan: Scan, group: KernelGroup) -> bool:
    """Return whether the rows of a scan can be seen as pieces.

    A tensor that has the row as a dimension must be read along it everywhere, so that it has one view.
    """
    if group.kind is not GroupKind.SCAN or (scan.step is not None and scan.statement.accumulator is DType.FLOAT64):
        return False  # no type is wide enough for the products of gates of float64
    here = AxisRef(scan.axis.name)
    loads = _loads(scan, group)
    along = {(load.tensor, d) for load in loads for d, index in enumerate(load.index) if index == here}
    written = {s.output for s in group.statements}
    shapes = {tensor: type_.shape for tensor, type_ in group.inputs}
    if any(tensor in shapes and shapes[tensor][d] != scan.axis.extent for tensor, d in along):
        return False
    return scan.neutral.value == identity(scan.combine, scan.value.dtype).value and all(
        load.index[d] == here and not any(load.bounds_checked[d : d + 1])
        for load in loads
        if load.tensor not in written
        for tensor, d in along
        if tensor == load.tensor
    )


def _loads(scan: Scan, group: KernelGroup) -> Iterable[Load]:
    return (*scan.points.reads, *(load for s in group.statements[1:] for load in s.reads))


def scan_totals(group: KernelGroup) -> tuple[TensorExpr, ...] | None:
    """Return the statements of the totals of a recurrence, state and product of gates; None of other groups."""
    return group.statements[1:] if group.kind is GroupKind.SCAN_TOTALS else None


def split_scan(group: KernelGroup, pieces: int) -> ScanLaunches:
    """Split the rows of a scan into equal pieces. Raises InvariantError if their number does not divide the rows."""
    scan = require(match_scan(group.statements[0]), "a scan")
    if scan.axis.extent % pieces or not may_split_scan(scan, group):
        raise InvariantError(f"rows of {scan.axis.extent} of {group.name} cannot be split into {pieces} equal pieces")
    split = _Split(scan, group, pieces) if scan.step is None else _SplitRecurrence(scan, group, pieces)
    return ScanLaunches(split.totals(), split.before(), split.pieces_group(), split.workspaces)


@dataclass(frozen=True)
class _Split:
    scan: Scan
    group: KernelGroup
    pieces: int

    @property
    def piece(self) -> Axis:
        return Axis(f"{self.scan.axis.name}_piece_", self.pieces, AxisKind.SPATIAL)

    @property
    def place(self) -> Axis:
        return Axis(f"{self.scan.axis.name}_place_", self.scan.axis.extent // self.pieces, AxisKind.SPATIAL)

    @property
    def dtype(self) -> DType:
        return self.scan.statement.accumulator

    @property
    def outer(self) -> tuple[Axis, ...]:
        return self.group.outer

    @property
    def type_(self) -> TensorType:
        return TensorType(self.dtype, (*(a.extent for a in self.outer), self.pieces))

    @property
    def workspaces(self) -> Types:
        return ((f"{self.scan.statement.output}.totals", self.type_), (f"{self.scan.statement.output}.before", self.type_))

    def _load(self, which: int, piece: Expr) -> Load:
        index = (*(ref(a.name) for a in self.outer), piece)
        name, type_ = self.workspaces[which]
        return Load(name, index, type_.dtype, (False,) * len(index))

    def _statement(self, which: int, reduced: Axis, body: Expr) -> TensorExpr:
        name = self.workspaces[which][0]
        axes = (*self.outer, self.piece)
        return TensorExpr(
            name, name, StatementKind.REDUCE, self.type_,
            (*axes, replace(reduced, kind=AxisKind.REDUCE)), tuple(ref(a.name) for a in axes), body, self.scan.combine,
        )  # fmt: skip

    def totals(self) -> KernelGroup:
        statement = self._statement(0, self.place, self._in_pieces(self.scan.value))
        types = self._views()
        space = nest_space((statement,), statement.spatial, types | dict(self.workspaces))
        inputs = tuple((t, types[t]) for t in statement.reads_tensors)
        return KernelGroup(
            f"{self.group.name}_totals", GroupKind.NEST, (statement,), statement.spatial, frozenset(),
            self.workspaces[:1], inputs, space,
        )  # fmt: skip

    def before(self) -> KernelGroup:
        """Combine the totals of the pieces before each one."""
        other = Axis(f"{self.scan.axis.name}_other_", self.pieces, AxisKind.REDUCE)
        value = self._load(0, ref(other.name))
        statement = self._statement(1, other, self._joined_before(other, self.piece, value, is_exclusive=True))
        scan = require(match_scan(statement), "a scan of totals")
        space = scan_space(scan, (statement,), dict(self.workspaces))
        return KernelGroup(
            f"{self.group.name}_before", GroupKind.SCAN, (statement,), self.outer, frozenset(),
            self.workspaces[1:], self.workspaces[:1], space,
        )  # fmt: skip

    def pieces_group(self) -> KernelGroup:
        """Scan each piece, and combine it with what is before it; then the group's maps."""
        first, views = self.scan.statement, self._views()
        own = f"{first.output}.piece"
        type_ = TensorType(self.dtype, tuple(a.extent for a in self._points))
        index = tuple(ref(a.name) for a in self._points)
        inside = self._in_piece(own, type_, index, self.scan.value)
        whole = (self._load(1, ref(self.piece.name)), Load(own, index, self.dtype, (False,) * len(index)))
        result = replace(
            first, kind=StatementKind.MAP, combine=None, axes=self._points, index=self._index(first),
            type=views[first.output], body=Op(COMBINE_OPS[self.scan.combine], whole, self.dtype),
        )  # fmt: skip
        return self._scan_of_pieces((inside, result), frozenset({own}))

    @property
    def _points(self) -> tuple[Axis, ...]:
        return (*self.outer, self.piece, self.place)

    def _in_piece(self, output: str, type_: TensorType, index: tuple[Expr, ...], value: Expr) -> TensorExpr:
        """Return the scan of a piece."""
        other = Axis(f"{self.scan.axis.name}_other_", self.place.extent, AxisKind.REDUCE)
        body = substitute(self._in_pieces(value), {self.place.name: ref(other.name)})
        joined = self._joined_before(other, self.place, body, is_exclusive=self.scan.is_exclusive)
        axes = (*self._points, other)
        return TensorExpr(output, output, StatementKind.REDUCE, type_, axes, index, joined, self.scan.combine)

    def _scan_of_pieces(self, first: tuple[TensorExpr, ...], registers: frozenset[str]) -> KernelGroup:
        """Return the group of scans of pieces, whose statements are these and the maps."""
        views = self._views()
        maps = tuple(
            replace(s, axes=self._points, index=self._index(s), type=views[s.output], body=self._in_pieces(s.body))
            for s in self.group.statements[1:]
        )
        statements = (*first, *maps)
        types = views | dict(self.workspaces)
        read = dict.fromkeys(t for s in statements for t in s.reads_tensors)
        written = {s.output for s in statements}
        in_memory = {t: ty for t, ty in types.items() if t not in self.group.register_tensors}
        space = scan_space(require(match_scan(first[0]), "a scan of pieces"), statements, in_memory)
        return KernelGroup(
            self.group.name, GroupKind.SCAN, statements, (*self.outer, self.piece),
            self.group.register_tensors | registers, tuple((t, views[t]) for t, _ in self.group.stored),
            tuple((t, types[t]) for t in read if t not in written), space,
        )  # fmt: skip

    def _joined_before(self, other: Axis, here: Axis, value: Expr, *, is_exclusive: bool) -> Expr:
        """Return the value where `other` comes before `here` in the order of the scan, else the neutral one."""
        if self.scan.is_reversed:
            kind = OpKind.GT if is_exclusive else OpKind.GE
        else:
            kind = OpKind.LT if is_exclusive else OpKind.LE
        guard = Op(kind, (ref(other.name), ref(here.name)), DType.INT8)
        return Select(guard, value, identity(self.scan.combine, value.dtype), value.dtype)

    # views ----------------------------------------------------------------------------------------------------------
    def _views(self) -> dict[str, TensorType]:
        """Return the types of the group's tensors with rows as pieces."""
        here = AxisRef(self.scan.axis.name)
        along: dict[str, set[int]] = {}
        uses = [(load.tensor, load.index) for load in _loads(self.scan, self.group)]
        for tensor, index in (*uses, *((s.output, s.index) for s in self.group.statements)):
            along.setdefault(tensor, set()).update(d for d, i in enumerate(index) if i == here)
        types = {s.output: s.type for s in self.group.statements} | dict((*self.group.inputs, *self.group.stored))
        sizes = (self.pieces, self.place.extent)
        return {
            t: replace(ty, shape=tuple(n for d, size in enumerate(ty.shape) for n in (sizes if d in along.get(t, ()) else (size,))))
            for t, ty in types.items()
        }

    def _index(self, statement: TensorExpr) -> tuple[Expr, ...]:
        return self._split_index(statement.index)

    def _split_index(self, index: Iterable[Expr]) -> tuple[Expr, ...]:
        here, pair = AxisRef(self.scan.axis.name), (ref(self.piece.name), ref(self.place.name))
        return tuple(part for i in index for part in (pair if i == here else (self._moved(i),)))

    def _moved(self, expr: Expr) -> Expr:
        position = add(mul(ref(self.piece.name), num(self.place.extent)), ref(self.place.name))
        return substitute(expr, {self.scan.axis.name: position})

    def _in_pieces(self, expr: Expr) -> Expr:
        """Replace the axis of the scan, and as an index by the pair of piece and place."""
        here = AxisRef(self.scan.axis.name)

        def change(node: Expr) -> Expr:
            if not isinstance(node, Load) or here not in node.index:
                return node
            checked = tuple(
                c for i, c in zip(node.index, node.bounds_checked, strict=False) for c in ((c, c) if i == here else (c,))
            )
            return Load(node.tensor, self._split_index(node.index), node.dtype, checked)

        return self._moved(rewrite(expr, change))


class _SplitRecurrence(_Split):
    """A recurrence in pieces. Totals, and the states before pieces, have the type of products of gates."""

    @property
    def workspaces(self) -> Types:
        type_ = replace(self.type_, dtype=gate_product_dtype(self.dtype))
        name = self.scan.statement.output
        return ((f"{name}.totals", type_), (f"{name}.gates", type_), (f"{name}.states", type_))

    @property
    def step(self) -> LinearStep:
        return require(self.scan.step, "a recurrence")

    def totals(self) -> KernelGroup:
        """Find the state that each piece makes of a state of zero, and the product of its gates."""
        axes = (*self.outer, self.piece)
        index, points = tuple(ref(a.name) for a in axes), tuple(ref(a.name) for a in self._points)
        own = f"{self.scan.statement.output}.piece"
        type_ = TensorType(self.dtype, tuple(a.extent for a in self._points))
        start = Const(0.0 if self.dtype.is_float else 0, self.step.value.dtype)
        inside = self._in_piece(own, type_, points, self._with_initial(start))
        last = num(0 if self.scan.is_reversed else self.place.extent - 1)
        state = Load(own, (*index, last), self.dtype, (False,) * len(points))
        (name, wide), (gates, _) = self.workspaces[:2]
        after = TensorExpr(name, name, StatementKind.MAP, wide, axes, index, convert(state, wide.dtype))
        product = TensorExpr(
            gates, gates, StatementKind.REDUCE, wide, (*axes, replace(self.place, kind=AxisKind.REDUCE)), index,
            convert(self._in_pieces(self.step.gate), wide.dtype), Combine.PROD,
        )  # fmt: skip
        statements = (inside, after, product)
        types = self._views() | dict(self.workspaces)
        scan = require(match_scan(inside), "a recurrence of a piece")
        read = tuple((t, types[t]) for t in dict.fromkeys(t for s in statements for t in s.reads_tensors) if t != own)
        return KernelGroup(
            f"{self.group.name}_totals", GroupKind.SCAN_TOTALS, statements, axes, frozenset({own}),
            self.workspaces[:2], read, scan_space(scan, statements, types),
        )  # fmt: skip

    def before(self) -> KernelGroup:
        """Find the state after each piece: a recurrence whose steps are the totals."""
        name, wide = self.workspaces[2]
        other = Axis(f"{self.scan.axis.name}_other_", self.pieces, AxisKind.REDUCE)
        total, gate = self._load(0, ref(other.name)), self._gate_of_piece(ref(other.name), wide.dtype)
        step = Op(OpKind.FMA, (gate, convert(self.step.initial, wide.dtype), total), wide.dtype)
        axes = (*self.outer, self.piece)
        statement = TensorExpr(
            name, name, StatementKind.REDUCE, wide, (*axes, other), tuple(ref(a.name) for a in axes),
            self._joined_before(other, self.piece, step, is_exclusive=False), self.scan.combine,
        )  # fmt: skip
        types = dict((*self.group.inputs, *self.workspaces))
        scan = require(match_scan(statement), "a recurrence of totals")
        return KernelGroup(
            f"{self.group.name}_before", GroupKind.SCAN_STEPS, (statement,), self.outer, frozenset(), self.workspaces[2:],
            tuple((t, types[t]) for t in dict.fromkeys(statement.reads_tensors)), scan_space(scan, (statement,), types),
        )  # fmt: skip

    def _gate_of_piece(self, piece: Expr, dtype: DType) -> Expr:
        """Return the product of a piece's gates. It is a choice of zero where it may reset, as the gates are."""
        gate, zero = self._load(1, piece), Const(0.0 if dtype.is_float else 0, dtype)
        return Select(Op(OpKind.NE, (gate, zero), DType.INT8), gate, zero, dtype) if self.step.may_reset else gate

    def pieces_group(self) -> KernelGroup:
        """Apply the steps of each piece to the state after the piece before it; then the group's maps."""
        first, views = self.scan.statement, self._views()
        piece, dtype = ref(self.piece.name), self.step.value.dtype
        is_first, before = eq(piece, num(0)), sub(piece, num(1))
        if self.scan.is_reversed:
            is_first, before = eq(piece, num(self.pieces - 1)), add(piece, num(1))
        initial = Select(is_first, self.step.initial, convert(self._load(2, before), dtype), dtype)
        type_ = views[first.output]
        return self._scan_of_pieces(
            (self._in_piece(first.output, type_, self._index(first), self._with_initial(initial)),), frozenset()
        )

    def _with_initial(self, initial: Expr) -> Expr:
        """Return the step with another initial state."""
        return Op(OpKind.FMA, (self.step.gate, initial, self.step.value), self.step.value.dtype)
