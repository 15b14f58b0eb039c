"""Split online reductions: two reductions that share a pass are split, and their partial pairs are combined.

Each split has its own first value, and a second value relative to it. The combination corrects the second values for
the first value of the whole row (analysis/online_reduction.py). Splits have equal lengths and need no guards.
"""

from __future__ import annotations

import math
from dataclasses import replace

from roller_svc.analysis.online_reduction import OnlineReduction, OnlineReductionKind, online_reductions
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Op, OpKind, Select, rewrite, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import require_expr
from roller_svc.ir.program import Axis, AxisKind, StatementKind, TensorExpr, TensorType

MAX_EQUAL_SPLITS = 32  # equal splits of a row that keep a device busy
MIN_SPLIT_POINTS = 4  # points of a split: one vector access


def online_reduction_of(group: KernelGroup) -> OnlineReduction | None:
    """Return the online reduction of a group whose other statements are maps over its rows, or None."""
    outer = {a.name for a in group.outer}
    reductions = [s for s in group.statements if s.kind is StatementKind.REDUCE]
    others = [s for s in group.statements if s.kind is not StatementKind.REDUCE]
    rows = all(s.kind is StatementKind.MAP and {a.name for a in s.axes} == outer for s in others)
    if len(reductions) != 2 or not rows:
        return None
    return next(iter(online_reductions(group.statements)), None)


def splits_evenly(statement: TensorExpr) -> bool:
    """Return whether the row can be split into MAX_EQUAL_SPLITS equal parts."""
    return math.prod(a.extent for a in statement.reduced) % (MAX_EQUAL_SPLITS * MIN_SPLIT_POINTS) == 0


def equal_splits(extent: int, max_splits: int) -> int:
    """Return the largest number of equal splits of an axis that divides `max_splits`, a power of two."""
    return math.gcd(extent // MIN_SPLIT_POINTS, max_splits) if extent % MIN_SPLIT_POINTS == 0 else 1


def partial_reductions(
    pair: OnlineReduction, names: tuple[str, str], cut: Axis, position: Expr, piece: Axis
) -> tuple[TensorExpr, ...]:
    """Return both reductions over one split. `cut` is the axis within it, `position` its index in the row."""
    whole = {cut.name: position}
    first = _over_split(pair.first, names[0], cut, piece, substitute(pair.first.body, whole))
    first_load = Load(names[0], first.index, first.type.dtype, (False,) * len(first.index))
    if pair.kind is OnlineReductionKind.VARIANCE:
        points = math.prod(a.extent for a in first.reduced)
        mean = Op(OpKind.DIV, (first_load, Const(float(points), first_load.dtype)), first_load.dtype)
        distance = Op(OpKind.SUB, (substitute(pair.value, whole), mean), first_load.dtype)
        body: Expr = Op(OpKind.MUL, (distance, distance), first_load.dtype)
    else:
        body = rewrite(
            substitute(pair.second.body, whole),
            lambda node: first_load if isinstance(node, Load) and node.tensor == pair.first.output else node,
        )
    return first, _over_split(pair.second, names[1], cut, piece, body)


def combine_partials(
    pair: OnlineReduction, names: tuple[str, str], piece: Axis, points: int, statements: tuple[TensorExpr, ...]
) -> tuple[TensorExpr, ...]:
    """Return the group's statements, with both reductions over the partials of splits of `points` points."""
    axis = replace(piece, kind=AxisKind.REDUCE)
    loads = [
        Load(name, (AxisRef(piece.name), *s.index), s.accumulator, (False,) * (len(s.index) + 1))
        for name, s in zip(names, (pair.first, pair.second), strict=True)
    ]
    bodies = {pair.first.output: loads[0], pair.second.output: _correct(pair, loads[0], loads[1], points)}
    return tuple(replace(s, axes=(*s.spatial, axis), body=bodies[s.output]) if s.output in bodies else s for s in statements)


def _over_split(statement: TensorExpr, name: str, cut: Axis, piece: Axis, body: Expr) -> TensorExpr:
    axes = (piece, *(cut if a.name == cut.name else a for a in statement.axes))
    type_ = TensorType(statement.accumulator, (piece.extent, *statement.type.shape))
    return replace(
        statement,
        output=name,
        name=name,
        type=type_,
        axes=axes,
        index=(AxisRef(piece.name), *statement.index),
        body=body,
    )


def _correct(pair: OnlineReduction, first: Load, second: Load, points: int) -> Expr:
    """Return a split's second value relative to the first value of the whole row."""
    whole = Load(pair.first.output, pair.first.index, pair.first.type.dtype, (False,) * len(pair.first.index))
    same = Op(OpKind.EQ, (first, whole), DType.INT8)
    dtype = second.dtype
    match pair.kind:
        case OnlineReductionKind.ARG:
            return Select(same, second, require_expr(pair.neutral_index, "neutral index of the online reduction"), dtype)
        case OnlineReductionKind.SOFTMAX:
            empty = Op(OpKind.EQ, (first, Const(-math.inf, first.dtype)), DType.INT8)
            shrunk = Op(OpKind.EXP, (Op(OpKind.SUB, (first, whole), dtype),), dtype)
            rest = Select(empty, Const(0.0, dtype), Op(OpKind.MUL, (second, shrunk), dtype), dtype)
            return Select(same, second, rest, dtype)
        case OnlineReductionKind.VARIANCE:
            count = Const(float(points), dtype)
            mean = Op(OpKind.DIV, (first, count), dtype)
            distance = Op(OpKind.SUB, (mean, require_expr(pair.mean, "mean of the online reduction")), dtype)
            extra = Op(OpKind.MUL, (count, Op(OpKind.MUL, (distance, distance), dtype)), dtype)
            return Op(OpKind.ADD, (second, extra), dtype)
