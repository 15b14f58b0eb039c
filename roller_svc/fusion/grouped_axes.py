"""Axes that are read as quotient and remainder: the axis of all filters → a group and a filter in the group.

A grouped convolution reads channel f // 8 * 4 + c of filter f. With f = 8 g + i its operands share the axis g and no
other, so it is a batch of convolutions. Softmax over heads h = 4 g + i reads scores of g and i, which share keys.
Results are viewed with one dimension more, and so are tensors that later statements compute from them point by point.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from roller_svc.analysis.sum_of_products import is_window
from roller_svc.errors import require
from roller_svc.fusion.delinearize import simplify_division
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Op, OpKind, axes_of, iter_subexpressions, rewrite, substitute
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import Axis, StatementKind, TensorExpr, TensorType

_DIVISIONS = (OpKind.FLOORDIV, OpKind.MOD)


@dataclass(frozen=True, slots=True)
class GroupedStatements:
    statements: tuple[TensorExpr, ...]
    types: dict[str, TensorType]  # views of results


@dataclass(frozen=True, slots=True)
class _Split:
    """A dimension of a tensor that is viewed as two."""

    dim: int
    members: int  # extent of the inner one


def split_grouped_axes(statements: tuple[TensorExpr, ...], types: Mapping[str, TensorType]) -> GroupedStatements:
    """Return the statements with grouped reductions as batches; unchanged if a reader needs another view."""
    return _split_axes(statements, types, _grouped)


def split_reshaped_axes(statements: tuple[TensorExpr, ...], types: Mapping[str, TensorType]) -> GroupedStatements:
    """Return the statements with the axes that results of others have, where they read these with two dimensions as one.

    Unchanged if a reader needs another view.
    """
    written = {statement.output for statement in statements}
    return _split_axes(statements, types, lambda statement, extents: _reshaped(statement, extents, written))


def _split_axes(
    statements: tuple[TensorExpr, ...],
    types: Mapping[str, TensorType],
    find: Callable[[TensorExpr, Mapping[str, int]], dict[str, int]],
) -> GroupedStatements:
    splits: dict[str, _Split] = {}
    result: list[TensorExpr] = []
    for statement in statements:
        members = _members(statement, splits, find)
        if members is None:
            return GroupedStatements(statements, dict(types))
        changed = statement
        for axis, count in members.items():
            changed = _split_axis(changed, axis, count)
        written = [d for d, index in enumerate(statement.index) if _axis_name(index) in members]
        if written:
            splits[statement.output] = _Split(written[0], members[str(_axis_name(statement.index[written[0]]))])
        result.append(_with_views(changed, splits) if splits else changed)
    views = {t: _split_type(types[t], split) for t, split in splits.items()}
    return GroupedStatements(tuple(result), dict(types) | views)


def _members(
    statement: TensorExpr, splits: Mapping[str, _Split], find: Callable[[TensorExpr, Mapping[str, int]], dict[str, int]]
) -> dict[str, int] | None:
    """Return the axes to split, with the extent of the inner part; None if they cannot be split.

    These are the axes that `find` returns, and axes that index a dimension that is split. A dimension of which another
    index has both parts needs no axis to be split.
    """
    spatial = {axis.name: axis.extent for axis in statement.spatial}
    found = find(statement, spatial)
    for load in statement.reads:
        split = splits.get(load.tensor)
        if split is None:
            continue
        if any(load.bounds_checked):
            return None
        index = load.index[split.dim]
        if _parts_of(index, split.members, statement.extents) is not None:
            continue
        name = _axis_name(index)
        if name not in spatial or found.setdefault(name, split.members) != split.members:
            return None
    if found and (statement.kind is StatementKind.SCATTER or len(found) > 1):
        return None
    return found


def _parts_of(index: Expr, members: int, extents: Mapping[str, int]) -> tuple[Expr, Expr] | None:
    """Return quotient and remainder of an index of several axes, as members * g + i; None if a division remains."""
    if isinstance(index, AxisRef):
        return None
    parts = tuple(simplify_division(Op(kind, (index, num(members)), index.dtype), dict(extents)) for kind in _DIVISIONS)
    return None if any(isinstance(part, Op) and part.kind in _DIVISIONS for part in parts) else (parts[0], parts[1])


def _reshaped(statement: TensorExpr, spatial: Mapping[str, int], written: Collection[str]) -> dict[str, int]:
    """Return the axis whose quotient and remainder index two dimensions of a result."""
    for load in statement.reads:
        for pair in itertools.pairwise(load.index) if load.tensor in written else ():
            match pair:
                case (
                    Op(kind=OpKind.FLOORDIV, args=(AxisRef(name=name), Const(value=int(by)))),
                    Op(kind=OpKind.MOD, args=(AxisRef(name=same), Const(value=int(period)))),
                ) if name == same and by == period and name in spatial and 1 < by < spatial[name] and spatial[name] % by == 0:
                    return {name: by}
                case _:
                    pass
    return {}


def _grouped(statement: TensorExpr, spatial: Mapping[str, int]) -> dict[str, int]:
    """Return the axis whose quotient, plus a reduced axis, indexes a dimension of a load."""
    reduced = {axis.name for axis in statement.reduced}
    for load in statement.reads:
        for index in load.index:
            if not is_window(index, reduced):
                continue
            for node in iter_subexpressions(index):
                match node:
                    case Op(kind=OpKind.FLOORDIV, args=(AxisRef(name=name), Const(value=int(by)))):
                        shared = all(name in axes_of(each) for each in statement.reads)  # by both operands
                        if shared and name in spatial and 1 < by < spatial[name] and spatial[name] % by == 0:
                            return {name: by}
                    case _:
                        pass
    return {}


def _axis_name(index: Expr) -> str | None:
    return index.name if isinstance(index, AxisRef) else None


def _split_axis(statement: TensorExpr, name: str, members: int) -> TensorExpr:
    """Replace an axis f by f.g and f.i, where f = members * f.g + f.i. The index of the result has both."""
    old = next(axis for axis in statement.axes if axis.name == name)
    parts = (Axis(f"{name}.g", old.extent // members, old.kind), Axis(f"{name}.i", members, old.kind))
    value = add(mul(ref(parts[0].name), num(members)), ref(parts[1].name))
    extents = {part.name: part.extent for part in parts}
    body = rewrite(substitute(statement.body, {name: value}), lambda node: simplify_division(node, extents))
    at = statement.axes.index(old)
    index = tuple(
        new for each in statement.index
        for new in ([ref(part.name) for part in parts] if _axis_name(each) == name else [each])
    )  # fmt: skip
    return replace(statement, axes=(*statement.axes[:at], *parts, *statement.axes[at + 1 :]), index=index, body=body)


def _with_views(statement: TensorExpr, splits: Mapping[str, _Split]) -> TensorExpr:
    """Return the statement with the view of its result, and both indices in loads of split tensors."""
    extents = statement.extents

    def change(node: Expr) -> Expr:
        if not isinstance(node, Load):
            return simplify_division(node, extents) if node.dtype is DType.INT32 else node
        split = splits.get(node.tensor)
        if split is None:
            return node
        before, index, after = node.index[: split.dim], node.index[split.dim], node.index[split.dim + 1 :]
        parts = require(_parts_of(index, split.members, extents), "parts of an index, which were found before")
        checked = (*node.bounds_checked[: split.dim], *[False] * min(1, len(node.bounds_checked)),
                   *node.bounds_checked[split.dim :])  # fmt: skip
        return Load(node.tensor, (*before, *parts, *after), node.dtype, checked)

    own = splits.get(statement.output)
    type_ = statement.type if own is None else _split_type(statement.type, own)
    return replace(statement, type=type_, body=rewrite(statement.body, change))


def _split_type(type_: TensorType, split: _Split) -> TensorType:
    extent = type_.shape[split.dim]
    shape = (*type_.shape[: split.dim], extent // split.members, split.members, *type_.shape[split.dim + 1 :])
    return TensorType(type_.dtype, shape)
