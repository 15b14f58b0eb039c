"""Two reductions of a row, the second over what the first gave → how one pass can do both.

A maximum and the sum of exponentials below it (online softmax: Milakov and Gimelshein, arXiv:1805.02867); a sum and the
sum of squared distances from a centre (Welford 1962, joined by Chan, Golub and LeVeque 1979); an extreme and where it
is. Each keeps a running pair, and corrects the second value when the first has changed.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import Enum

from roller_svc.ir.affine import affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, Select, axes_of
from roller_svc.ir.program import Combine, StatementKind, TensorExpr


class JointKind(Enum):
    EXPONENTIALS = "exponentials"
    SQUARES = "squares"
    PLACE = "place"


@dataclass(frozen=True, slots=True)
class Joint:
    """`value`: what the first reduction joins. `centre` (SQUARES): what the squared distances are from, the same for
    all of the row. `place`, `idle` (PLACE): what the second joins where the value is the extreme, and elsewhere."""

    kind: JointKind
    first: TensorExpr
    second: TensorExpr
    value: Expr
    centre: Expr | None = None
    place: Expr | None = None
    idle: Expr | None = None


def joints(statements: Iterable[TensorExpr]) -> tuple[Joint, ...]:
    """The pairs among them, no statement in two."""
    found: list[Joint] = []
    taken: set[str] = set()
    earlier: list[TensorExpr] = []
    for second in statements:
        for first in earlier:
            if first.output in taken or second.output in taken:
                continue
            joint = _joint(first, second)
            if joint is not None:
                found.append(joint)
                taken |= {first.output, second.output}
        earlier.append(second)
    return tuple(found)


def _joint(first: TensorExpr, second: TensorExpr) -> Joint | None:
    if first.kind is not StatementKind.REDUCE or second.kind is not StatementKind.REDUCE:
        return None
    if first.axes != second.axes:
        return None
    return _exponentials(first, second) or _squares(first, second) or _place(first, second)


def _bare(expr: Expr) -> Expr:
    """Without the casts that only pass a value on."""
    while isinstance(expr, Cast) and (expr.implicit or expr.arg.dtype is expr.dtype):
        expr = expr.arg
    return expr


def _is_row(expr: Expr, statement: TensorExpr) -> bool:
    """Whether the expression is the value that the statement gave this very row."""
    expr = _bare(expr)
    return isinstance(expr, Load) and expr.tensor == statement.output and expr.index == statement.index


def _exponentials(first: TensorExpr, second: TensorExpr) -> Joint | None:
    if first.combine is not Combine.MAX or second.combine is not Combine.SUM or not first.accumulator.is_float:
        return None
    match _bare(second.body):
        case Op(kind=OpKind.EXP, args=(x,)):
            below = _bare(x)
        case _:
            return None
    match below:
        case Op(kind=OpKind.SUB, args=(value, row)) if _is_row(row, first) and _bare(value) == _bare(first.body):
            return Joint(JointKind.EXPONENTIALS, first, second, first.body)
        case _:
            return None


def _squares(first: TensorExpr, second: TensorExpr) -> Joint | None:
    if first.combine is not Combine.SUM or second.combine is not Combine.SUM or not first.accumulator.is_float:
        return None
    match _bare(second.body):
        case Op(kind=OpKind.MUL, args=(x, y)) if x == y:
            root = _bare(x)
        case Op(kind=OpKind.SQUARE, args=(x,)):
            root = _bare(x)
        case _:
            return None
    match root:
        case Op(kind=OpKind.SUB, args=(value, centre)) if _bare(value) == _bare(first.body):
            if {a.name for a in first.reduced} & axes_of(centre):
                return None
            return Joint(JointKind.SQUARES, first, second, first.body, centre=centre)
        case _:
            return None


def _place(first: TensorExpr, second: TensorExpr) -> Joint | None:
    """`idle` must be no better than any place, so that it may be joined to them without being asked for."""
    if {first.combine, second.combine} - {Combine.MAX, Combine.MIN}:
        return None
    casts: list[Cast] = []
    body = second.body
    while isinstance(body, Cast) and not body.dtype.is_float and not body.arg.dtype.is_float:
        casts.append(body)
        body = body.arg
    match body:
        case Select(cond=Op(kind=OpKind.EQ, args=(x, y)), then=place, otherwise=idle):
            value = y if _is_row(x, first) else x if _is_row(y, first) else None
            limit = _constant(idle)
            if value is None or _bare(value) != _bare(first.body) or limit is None or place.dtype.is_float:
                return None
            if not _is_beyond(limit, place, second):
                return None
            for cast in reversed(casts):
                place, idle = Cast(place, cast.dtype, cast.implicit), Cast(idle, cast.dtype, cast.implicit)
            return Joint(JointKind.PLACE, first, second, first.body, place=place, idle=idle)
        case _:
            return None


def _constant(expr: Expr) -> int | None:
    while isinstance(expr, Cast):
        expr = expr.arg
    return int(expr.value) if isinstance(expr, Const) and not expr.dtype.is_float else None


def _is_beyond(limit: int, place: Expr, second: TensorExpr) -> bool:
    """Whether no place is past the limit: places are sums of axes, perhaps converted."""
    while isinstance(place, Cast):
        place = place.arg
    walk = affine(place)
    if walk is None or place.dtype is not DType.INT32:
        return False
    ends = [(0, c * (second.extents[name] - 1)) for name, c in walk.coeffs]
    if second.combine is Combine.MAX:
        return limit <= walk.offset + sum(min(end) for end in ends)
    return limit >= walk.offset + sum(max(end) for end in ends)
