"""Online reductions: pairs of reductions over a row, the second dependent on the first, that share one pass.

Three kinds: maximum and sum of exp(x - maximum) (online softmax: Milakov and Gimelshein, arXiv:1805.02867); sum and sum
of squared distances from the mean (Welford, 1962; combined after Chan, Golub and LeVeque, 1979); maximum or minimum and
its index. Each keeps a running pair and corrects the second value when the first changes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from roller_svc.ir.affine import affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, Select, axes_of
from roller_svc.ir.program import Axis, Combine, StatementKind, TensorExpr


class OnlineReductionKind(Enum):
    SOFTMAX = "exponentials"
    VARIANCE = "squares"
    ARG = "place"


@dataclass(frozen=True, slots=True)
class OnlineReduction:
    """A pair of reductions that share a pass."""

    kind: OnlineReductionKind
    first: TensorExpr
    second: TensorExpr
    value: Expr  # reduced by the first
    mean: Expr | None = None  # VARIANCE: subtracted before squaring, the same for the whole row
    index: Expr | None = None  # ARG: reduced by the second where the value is the maximum or minimum
    neutral_index: Expr | None = None  # ARG: reduced by the second elsewhere


def online_reductions(statements: Iterable[TensorExpr]) -> tuple[OnlineReduction, ...]:
    """Return the online reductions among the statements. No statement is in two of them."""
    results: list[OnlineReduction] = []
    paired: set[str] = set()
    earlier: list[TensorExpr] = []
    for second in statements:
        for first in earlier:
            if first.output in paired or second.output in paired:
                continue
            reduction = _match(first, second)
            if reduction is not None:
                results.append(reduction)
                paired |= {first.output, second.output}
        earlier.append(second)
    return tuple(results)


def _match(first: TensorExpr, second: TensorExpr) -> OnlineReduction | None:
    if first.kind is not StatementKind.REDUCE or second.kind is not StatementKind.REDUCE:
        return None
    if first.axes != second.axes:
        return None
    return _match_softmax(first, second) or _match_variance(first, second) or _match_arg(first, second)


def strip_casts(expr: Expr) -> Expr:
    """Strip implicit casts and casts to the same type."""
    while isinstance(expr, Cast) and (expr.implicit or expr.arg.dtype is expr.dtype):
        expr = expr.arg
    return expr


def _is_row(expr: Expr, statement: TensorExpr) -> bool:
    """Return whether the expression is the statement's value of the same row."""
    expr = strip_casts(expr)
    return isinstance(expr, Load) and expr.tensor == statement.output and expr.index == statement.index


def _match_softmax(first: TensorExpr, second: TensorExpr) -> OnlineReduction | None:
    if first.combine is not Combine.MAX or second.combine is not Combine.SUM or not first.accumulator.is_float:
        return None
    match strip_casts(second.body):
        case Op(kind=OpKind.EXP, args=(x,)):
            below = strip_casts(x)
        case _:
            return None
    match below:
        case Op(kind=OpKind.SUB, args=(value, row)) if _is_row(row, first) and strip_casts(value) == strip_casts(first.body):
            return OnlineReduction(OnlineReductionKind.SOFTMAX, first, second, first.body)
        case _:
            return None


def _match_variance(first: TensorExpr, second: TensorExpr) -> OnlineReduction | None:
    if first.combine is not Combine.SUM or second.combine is not Combine.SUM or not first.accumulator.is_float:
        return None
    match strip_casts(second.body):
        case Op(kind=OpKind.MUL, args=(x, y)) if x == y:
            root = strip_casts(x)
        case Op(kind=OpKind.SQUARE, args=(x,)):
            root = strip_casts(x)
        case _:
            return None
    match root:
        case Op(kind=OpKind.SUB, args=(value, centre)) if strip_casts(value) == strip_casts(first.body):
            if {a.name for a in first.reduced} & axes_of(centre):
                return None
            return OnlineReduction(OnlineReductionKind.VARIANCE, first, second, first.body, mean=centre)
        case _:
            return None


def _match_arg(first: TensorExpr, second: TensorExpr) -> OnlineReduction | None:
    """Match max or min and its index. The neutral index must not win against any index of the row."""
    if {first.combine, second.combine} - {Combine.MAX, Combine.MIN}:
        return None
    casts: list[Cast] = []
    body = second.body
    while isinstance(body, Cast) and not body.dtype.is_float and not body.arg.dtype.is_float:
        casts.append(body)
        body = body.arg
    match body:
        case Select(cond=Op(kind=OpKind.EQ, args=(x, y)), then=index, otherwise=neutral):
            value = y if _is_row(x, first) else x if _is_row(y, first) else None
            limit = _constant(neutral)
            if value is None or strip_casts(value) != strip_casts(first.body) or limit is None or index.dtype.is_float:
                return None
            if not _exceeds_all_indices(limit, index, second):
                return None
            for cast in reversed(casts):
                index, neutral = Cast(index, cast.dtype, cast.implicit), Cast(neutral, cast.dtype, cast.implicit)
            return OnlineReduction(OnlineReductionKind.ARG, first, second, first.body, index=index, neutral_index=neutral)
        case _:
            return None


def _constant(expr: Expr) -> int | None:
    while isinstance(expr, Cast):
        expr = expr.arg
    return int(expr.value) if isinstance(expr, Const) and not expr.dtype.is_float else None


def _exceeds_all_indices(limit: int, index: Expr, second: TensorExpr) -> bool:
    """Return whether no index is past the limit. Indices are affine, perhaps converted."""
    while isinstance(index, Cast):
        index = index.arg
    index_form = affine(index)
    if index_form is None or index.dtype is not DType.INT32:
        return False
    ends = [(0, c * (second.extents[name] - 1)) for name, c in index_form.coeffs]
    if second.combine is Combine.MAX:
        return limit <= index_form.offset + sum(min(end) for end in ends)
    return limit >= index_form.offset + sum(max(end) for end in ends)


def joint_reductions(statements: Iterable[TensorExpr]) -> tuple[tuple[TensorExpr, ...], ...]:
    """Return reductions over the same points that share a pass, since none reads a result of the statements.

    Each tuple has at least two. Those of online reductions are in none.
    """
    statements = tuple(statements)
    online = {s.output for pair in online_reductions(statements) for s in (pair.first, pair.second)}
    written = {s.output for s in statements}
    joint: dict[tuple[Axis, ...], list[TensorExpr]] = {}
    for statement in statements:
        is_alone = statement.output not in online and not written & set(statement.reads_tensors)
        if statement.kind is StatementKind.REDUCE and is_alone:
            joint.setdefault(statement.axes, []).append(statement)
    return tuple(tuple(reductions) for reductions in joint.values() if len(reductions) > 1)
