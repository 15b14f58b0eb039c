"""Split-KV attention (FlashDecoding: Dao, Haziza, Massa and Sizov, 2023): partial attention, then a combination.

Each split of the keys has its own row maximum; the combination rescales the splits to the largest one. It consists of
ordinary statements.
"""

from __future__ import annotations

from dataclasses import replace

from roller_svc.errors import InvariantError
from roller_svc.fusion.space import nest_space
from roller_svc.fusion.split.reduction import SplitGroups
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Op, OpKind
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.program import Axis, AxisKind, Combine, StatementKind, TensorExpr, TensorType
from roller_svc.ir.rprogram import RProgram

Workspaces = tuple[tuple[str, TensorType], ...]


def split_attention(group: KernelGroup, program: RProgram, workspaces: Workspaces) -> SplitGroups:
    """Split attention. `workspaces`: results, row maxima and row sums of all splits, [split, ...]."""
    partial = replace(group, name=f"{group.name}_partial", stored=workspaces)
    statements = _combine_statements(group, workspaces)
    types = {**dict(workspaces), **dict(group.inputs), **dict(group.stored)}
    written = {s.output for s in statements}
    read = {t for s in statements for t in s.reads_tensors} - written
    inputs = tuple((t, type_) for t, type_ in types.items() if t in read)
    locals_ = frozenset(written - {t for t, _ in group.stored})
    outer = statements[0].spatial
    space = nest_space(statements, outer, {t: type_ for t, type_ in types.items() if t not in locals_})
    combining = KernelGroup(f"{group.name}_combine", GroupKind.NEST, statements, outer, locals_, group.stored, inputs, space)
    return SplitGroups(partial, program, combining, workspaces)


def _combine_statements(group: KernelGroup, workspaces: Workspaces) -> tuple[TensorExpr, ...]:
    """Return the statements that combine the splits of a row, and the group's maps."""
    if group.attention is None:
        raise InvariantError(f"{group.name} is not attention")
    attention, (before, mixed, *maps) = group.attention, group.attention.unsplit
    (results, type_), (maxima, _), (totals, _) = workspaces
    piece = Axis("piece_", type_.shape[0], AxisKind.REDUCE)
    rows = before.index

    def partial(tensor: str, index: tuple[Expr, ...]) -> Load:
        return Load(tensor, (AxisRef(piece.name), *index), type_.dtype, (False,) * (len(index) + 1))

    def reduction(name: str, body: Expr, combine: Combine) -> TensorExpr:
        axes = (*mixed.spatial, piece)
        whole = TensorType(type_.dtype, mixed.type.shape)
        return TensorExpr(name, name, StatementKind.REDUCE, whole, axes, mixed.index, body, combine)

    def value(statement: TensorExpr) -> Load:
        return Load(statement.output, mixed.index, type_.dtype, (False,) * len(mixed.index))

    row_max = reduction(f"{attention.row_sum.output}.high", partial(maxima, rows), Combine.MAX)
    below = Op(OpKind.SUB, (partial(maxima, rows), value(row_max)), type_.dtype)
    scale = Const(attention.scale, type_.dtype)
    weight = Op(OpKind.EXP, (Op(OpKind.MUL, (below, scale), type_.dtype),), type_.dtype)

    def weighted(tensor: str, index: tuple[Expr, ...]) -> Expr:
        return Op(OpKind.MUL, (partial(tensor, index), weight), type_.dtype)

    total = reduction(attention.row_sum.output, weighted(totals, rows), Combine.SUM)
    result = reduction(f"{mixed.output}.joined", weighted(results, mixed.index), Combine.SUM)
    quotient = Op(OpKind.DIV, (value(result), value(total)), type_.dtype)
    mapped = replace(mixed, kind=StatementKind.MAP, combine=None, axes=mixed.spatial, body=quotient)
    return (row_max, total, result, mapped, *maps)
