"""Linear forms of index expressions, whose terms need not be affine."""

from __future__ import annotations

import math
from collections.abc import Mapping

from roller_svc.analysis.intervals import bounds
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Op, OpKind, axes_of
from roller_svc.ir.index import add, div, mod, mul, num

# term → coefficient; None → the constant. A term is a loop variable or any expression but a sum.
Linear = dict[Expr | None, int]


def linear(expr: Expr) -> Linear:
    """Return the linear form of an expression. Index arithmetic does not wrap: the checker proves it."""
    terms: Linear = {}
    _collect(expr, 1, terms)
    return {term: c for term, c in terms.items() if c}


def _collect(expr: Expr, factor: int, terms: Linear) -> None:
    match expr:
        case Const(value=int(value)):
            terms[None] = terms.get(None, 0) + factor * value
            return
        case Cast(arg=AxisRef() | Op() as arg) if expr.is_exact:
            _collect(arg, factor, terms)
            return
        case Op(kind=OpKind.NEG, args=(x,)) if _is_index(expr):
            _collect(x, -factor, terms)
            return
        case Op(kind=OpKind.ADD | OpKind.SUB as kind, args=(x, y)) if _is_index(expr):
            _collect(x, factor, terms)
            _collect(y, factor if kind is OpKind.ADD else -factor, terms)
            return
        case Op(kind=OpKind.MUL, args=(x, Const(value=int(value)))) if _is_index(expr):
            _collect(x, factor * value, terms)
            return
        case Op(kind=OpKind.MUL, args=(Const(value=int(value)), x)) if _is_index(expr):
            _collect(x, factor * value, terms)
            return
        case _:
            pass
    terms[expr] = terms.get(expr, 0) + factor


def _is_index(op: Op) -> bool:
    return not op.dtype.is_float and op.dtype.is_signed and op.dtype.bits >= 32


def expression(terms: Linear) -> Expr:
    """Return the expression of a linear form."""
    result: Expr = num(0)
    for term, c in terms.items():
        if term is not None:
            result = add(result, mul(term, num(c)))
    return add(result, num(terms.get(None, 0)))


def span(terms: Linear, extents: Mapping[str, int]) -> tuple[int, int]:
    """Return the lowest and the highest value, for loop variables from 0 to their extents."""
    low = high = terms.get(None, 0)
    for term, c in terms.items():
        if term is not None:
            found = bounds(term, extents)
            ends = c * found.low, c * found.high
            low, high = low + min(ends), high + max(ends)
    return low, high


def divide(kind: OpKind, terms: Linear, by: int, ranges: Mapping[str, int]) -> Expr:
    """Return floor(x / by) or x mod by, with multiples of `by` and negligible low terms taken out of the division.

    Low terms are the constant and the variables that have ranges; terms of such variables, if none else would remain.
    """
    quotient: Linear = {t: c // by for t, c in terms.items() if c // by * by == c or t is None}
    remainder: Linear = {t: c % by if t is None else c for t, c in terms.items() if c % by}
    if _is_within(remainder, by, ranges):
        return expression(quotient if kind is OpKind.FLOORDIV else remainder)
    low: Linear = {t: c for t, c in remainder.items() if t is None or (isinstance(t, AxisRef) and t.name in ranges)}
    high: Linear = {t: c for t, c in remainder.items() if t not in low}
    unit = math.gcd(by, *high.values())
    first, last = span(low, ranges)
    if first < 0 or last >= unit:
        low, high, unit = {}, remainder, 1
    scaled = expression({t: c // unit for t, c in high.items()})
    if kind is OpKind.FLOORDIV:
        return add(expression(quotient), div(scaled, by // unit))
    return add(mul(mod(scaled, by // unit), num(unit)), expression(low))


def _is_within(terms: Linear, size: int, ranges: Mapping[str, int]) -> bool:
    """Return whether the value is in 0 .. size - 1, as far as the variables have ranges."""
    if not all(t is None or axes_of(t) <= ranges.keys() for t in terms):
        return False
    first, last = span(terms, ranges)
    return first >= 0 and last < size


def is_uniform(cond: Expr, varying: str, width: int) -> bool:
    """Return whether the condition is the same for `width` values of `varying` from a multiple of `width` on."""
    if varying not in axes_of(cond):
        return True
    match cond:
        case Op(kind=OpKind.LAND | OpKind.LOR, args=args):
            return all(is_uniform(arg, varying, width) for arg in args)
        case Op(kind=OpKind.LT | OpKind.GE, args=(a, b)):  # a - b < 0; b - a - 1 >= 0
            return _is_multiple(a, b, 0, varying, width) or _is_multiple(b, a, -1, varying, width)
        case Op(kind=OpKind.LE | OpKind.GT, args=(a, b)):  # a - b - 1 < 0; b - a >= 0
            return _is_multiple(a, b, -1, varying, width) or _is_multiple(b, a, 0, varying, width)
        case _:
            return False


def _is_multiple(a: Expr, b: Expr, offset: int, varying: str, width: int) -> bool:
    """Return whether a - b + offset has stride 1 along `varying` and is a multiple of `width` wherever `varying` is.

    Its sign then changes only at multiples of `width`.
    """
    terms = linear(a)
    for term, c in (*linear(b).items(), (None, -offset)):
        terms[term] = terms.get(term, 0) - c
    stride = terms.pop(AxisRef(varying), 0)
    return stride == 1 and all(c % width == 0 and (t is None or varying not in axes_of(t)) for t, c in terms.items())
