"""What a softmax is made of, as expressions: exponentials below a row's maximum, and quotients by their sum."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, rewrite, substitute
from roller_svc.ir.operand import value_dtype
from roller_svc.ir.program import Combine, TensorExpr, identity

_NATURAL = {OpKind.EXP: 1.0, OpKind.EXP2: math.log(2.0)}  # of a function's base, the logarithm


@dataclass(frozen=True, slots=True)
class Exponential:
    """exp(scale (score - its row's maximum))."""

    score: Expr
    scale: float


def exponential(expr: Expr, high: TensorExpr) -> Exponential | None:
    """The expression as an exponential below the maximum that the statement `high` makes; None where it is none.

    One that a condition sets to 0 is that of a score of minus infinity: the maximum, which only keeps exponentials in
    range, is then that of the others.
    """
    match _value(expr):
        case Select(cond=cond, then=then, otherwise=otherwise) if value_dtype(otherwise) is None:
            inner = exponential(then, high)
            return None if inner is None else replace(inner, score=_where(cond, inner.score))
        case Op(kind=kind, args=(exponent,)) if kind in _NATURAL:
            below, factor = _scaled(_value(exponent))
            if factor > 0 and _is_below(below, high):
                return Exponential(high.body, factor * _NATURAL[kind])
            return None
        case _:
            return None


def _value(expr: Expr) -> Expr:
    """Without casts between floats: what they round away, the operands of a matrix unit do not have either."""
    while isinstance(expr, Cast) and expr.dtype.is_float and expr.arg.dtype.is_float:
        expr = expr.arg
    return expr


def _where(cond: Expr, score: Expr) -> Expr:
    """The score where the condition holds, else minus infinity."""
    match _value(score):
        case Select(cond=same, then=then) if same == cond:
            score = then
    return Select(cond, score, identity(Combine.MAX, score.dtype), score.dtype)


def _scaled(expr: Expr) -> tuple[Expr, float]:
    """(x, c) of a product c x, or of a quotient."""
    match expr:
        case Op(kind=OpKind.MUL, args=(x, Const(value=c))) | Op(kind=OpKind.MUL, args=(Const(value=c), x)):
            return _value(x), float(c)
        case Op(kind=OpKind.DIV, args=(x, Const(value=c))) if c:
            return _value(x), 1.0 / float(c)
        case _:
            return expr, 1.0


def _is_below(expr: Expr, high: TensorExpr) -> bool:
    """Whether it is a value that the maximum is of, less that maximum."""
    match expr:
        case Op(kind=OpKind.SUB, args=(value, row)):
            return _is_row(row, high) and _value(value) == _value(high.body)
        case _:
            return False


def _is_row(expr: Expr, statement: TensorExpr) -> bool:
    expr = _value(expr)
    return isinstance(expr, Load) and expr.tensor == statement.output and expr.index == statement.index


def undivided(expr: Expr, total: TensorExpr) -> Expr | None:
    """What is divided by the sum of its row; None where the expression is no such quotient."""
    match _value(expr):
        case Op(kind=OpKind.DIV, args=(value, row)) if _is_row(row, total):
            return value
        case _:
            return None


def quotients(statement: TensorExpr, mixed: TensorExpr, total: TensorExpr) -> TensorExpr | None:
    """The statement with loads of `mixed` in place of their quotients by the sum of their row; None where it reads
    either otherwise."""
    divided = f"{mixed.output}.divided"

    def change(node: Expr) -> Expr:
        match node:
            case Op(kind=OpKind.DIV, args=(value, row)):
                return _quotient(_value(value), _value(row)) or node
            case _:
                return node

    def _quotient(value: Expr, row: Expr) -> Expr | None:
        if not isinstance(value, Load) or not isinstance(row, Load) or value.tensor != mixed.output:
            return None
        at = {a.name: i for a, i in zip(mixed.index, value.index, strict=True) if isinstance(a, AxisRef)}
        same_row = row.tensor == total.output and row.index == tuple(substitute(i, at) for i in total.index)
        return replace(value, tensor=divided) if same_row else None

    body = rewrite(statement.body, change)
    found = replace(statement, body=body)
    if {mixed.output, total.output} & set(found.reads_tensors):
        return None
    own = rewrite(body, lambda n: replace(n, tensor=mixed.output) if isinstance(n, Load) and n.tensor == divided else n)
    return replace(statement, body=own)
