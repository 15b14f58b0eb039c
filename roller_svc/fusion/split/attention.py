"""Split-KV attention (FlashDecoding: Dao, Haziza, Massa and Sizov, 2023): partial attention, then a combination.

Each split of the keys has its own row maximum; the combination rescales the splits to the largest one. It consists of
ordinary statements.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.errors import InvariantError
from roller_svc.fusion.space import nest_space
from roller_svc.fusion.split.reduction import SplitGroups
from roller_svc.ir.attention import Attention, RowResults, state_names
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Op, OpKind, Select, rewrite
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.program import Axis, AxisKind, Combine, StatementKind, TensorExpr, TensorType, identity
from roller_svc.ir.rprogram import RProgram

Workspaces = tuple[tuple[str, TensorType], ...]
_PIECE = "piece_"


def split_attention(group: KernelGroup, program: RProgram, workspaces: Workspaces) -> tuple[SplitGroups, KernelGroup | None]:
    """Split attention. `workspaces`: results, row maxima and row sums of all splits, [split, ...].

    The second value combines what is stored of rows, if anything is: these have fewer points than the results.
    """
    if group.attention is None:
        raise InvariantError(f"{group.name} is not attention")
    partial = replace(group, name=f"{group.name}_partial", stored=workspaces)
    attention, (_, mixed, *_) = group.attention, group.attention.unsplit
    combining = _group(group, "combine", _combine_statements(_Combination(attention, workspaces, mixed)), workspaces)
    rows, of_rows = attention.unsplit_rows.stored, None
    if rows:
        combination = _Combination(attention, workspaces, rows[0])
        of_rows = _group(group, "combine_rows", (*combination.softmax, *rows), workspaces)
    return SplitGroups(partial, program, combining, workspaces), of_rows


def _group(group: KernelGroup, purpose: str, statements: tuple[TensorExpr, ...], workspaces: Workspaces) -> KernelGroup:
    types = {**dict(workspaces), **dict(group.inputs), **dict(group.stored)}
    written = {s.output for s in statements}
    read = {t for s in statements for t in s.reads_tensors} - written
    inputs = tuple((t, type_) for t, type_ in types.items() if t in read)
    stored = tuple((t, type_) for t, type_ in group.stored if t in written)
    locals_ = frozenset(written - dict(stored).keys())
    outer = statements[0].spatial
    space = nest_space(statements, outer, {t: type_ for t, type_ in types.items() if t not in locals_})
    return KernelGroup(f"{group.name}_{purpose}", GroupKind.NEST, statements, outer, locals_, stored, inputs, space)


@dataclass(frozen=True, slots=True)
class _Combination:
    """Statements that combine splits at the points of a statement: elements of results, or rows."""

    attention: Attention
    workspaces: Workspaces
    points: TensorExpr

    @property
    def softmax(self) -> tuple[TensorExpr, TensorExpr]:
        """Return the statements of the row's maximum and sum."""
        before = self.attention.unsplit[0]
        (_, (maxima, _), (totals, _)), (high, total, _) = self.workspaces, state_names(before)
        row_max = self._reduction(high, self._partial(maxima, before.index), Combine.MAX)
        # where rows are stored, the sum of the statements may be among them, in terms of the stored one
        name = total if self.attention.unsplit_rows.stored else before.output
        return row_max, self._reduction(name, self._weighted(totals, before.index), Combine.SUM)

    @property
    def result(self) -> TensorExpr:
        """Return the statement of undivided results."""
        tensor = self.workspaces[0][0]
        return self._reduction(f"{self.points.output}.joined", self._weighted(tensor, self.points.index), Combine.SUM)

    def value(self, statement: TensorExpr) -> Load:
        """Return the value of a statement at its point."""
        return Load(statement.output, self.points.index, self._dtype, (False,) * len(self.points.index))

    @property
    def _dtype(self) -> DType:
        return self.workspaces[0][1].dtype

    def _partial(self, tensor: str, index: tuple[Expr, ...]) -> Load:
        return Load(tensor, (AxisRef(_PIECE), *index), self._dtype, (False,) * (len(index) + 1))

    def _weighted(self, tensor: str, index: tuple[Expr, ...]) -> Expr:
        """Return a partial value times its split's exponential of the difference of maxima."""
        dtype, before = self._dtype, self.attention.unsplit[0]
        maximum = Load(state_names(before)[0], self.points.index, dtype, (False,) * len(self.points.index))
        below = Op(OpKind.SUB, (self._partial(self.workspaces[1][0], before.index), maximum), dtype)
        scale = Const(self.attention.scale, dtype)
        weight: Expr = Op(OpKind.EXP, (Op(OpKind.MUL, (below, scale), dtype),), dtype)
        if self.attention.unsplit_rows != RowResults():
            # a row without keys is 0 here: its divisor may be another than its sum
            is_empty = Op(OpKind.EQ, (maximum, identity(Combine.MAX, dtype)), DType.INT8)
            weight = Select(is_empty, Const(0.0, dtype), weight, dtype)
        return Op(OpKind.MUL, (self._partial(tensor, index), weight), dtype)

    def _reduction(self, name: str, body: Expr, combine: Combine) -> TensorExpr:
        piece = Axis(_PIECE, self.workspaces[0][1].shape[0], AxisKind.REDUCE)
        whole = TensorType(self._dtype, self.points.type.shape)
        axes = (*self.points.spatial, piece)
        return TensorExpr(name, name, StatementKind.REDUCE, whole, axes, self.points.index, body, combine)


def _combine_statements(combination: _Combination) -> tuple[TensorExpr, ...]:
    """Return the statements that combine the splits of a row, and the group's maps."""
    attention, (row_max, total), result = combination.attention, combination.softmax, combination.result
    before, mixed, *maps = attention.unsplit
    values = dict(zip(state_names(before), map(combination.value, (row_max, total, result)), strict=True))
    _, divisor, undivided = values.values()
    body: Expr = Op(OpKind.DIV, (undivided, divisor), undivided.dtype)
    if attention.unsplit_rows.result is not None:
        body = rewrite(attention.unsplit_rows.result, lambda n: values.get(n.tensor, n) if isinstance(n, Load) else n)
    mapped = replace(mixed, kind=StatementKind.MAP, combine=None, axes=mixed.spatial, body=body)
    return (row_max, total, result, mapped, *maps)
