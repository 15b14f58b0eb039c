"""Linear forms of index expressions, whose terms need not be affine."""

from __future__ import annotations

import math
from collections.abc import Mapping

from roller_svc.analysis.intervals import bounds
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Op, OpKind, rewrite
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


def simplify_divisions(expr: Expr) -> Expr:
    """Simplify divisions by constants: (8 x + 3) // 4 is 2 x, and (8 x + 3) % 8 is 3."""

    def change(node: Expr) -> Expr:
        match node:
            case Op(kind=OpKind.FLOORDIV | OpKind.MOD as kind, args=(x, Const(value=int(by)))) if _is_index(node):
                return (_simplify_division(kind, linear(x), by) if by > 0 else None) or node
            case _:
                return node

    return rewrite(expr, change)


def _simplify_division(kind: OpKind, terms: Linear, divisor: int) -> Expr | None:
    """Simplify (g X + r) // (g n) to X // n, and the remainder to g (X % n) + r, for 0 <= r < g."""
    common = math.gcd(divisor, *(c for term, c in terms.items() if term is not None))
    if common == 1:
        return None
    remainder = terms.get(None, 0) % common
    quotient: Linear = {term: c // common for term, c in terms.items() if term is not None}
    quotient[None] = (terms.get(None, 0) - remainder) // common
    if kind is OpKind.FLOORDIV:
        return div(expression(quotient), divisor // common)
    return add(mul(mod(expression(quotient), divisor // common), num(common)), num(remainder))
