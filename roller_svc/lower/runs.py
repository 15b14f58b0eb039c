"""Index expressions over axes → over loop variables, divisions of what is walked in runs taken apart.

An axis walked as run * chunk + place has the same axis / 8 at eight places: taken apart, the load behind it is one.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from roller_svc.ir.build import add, div, mod, mul, num
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Op, OpKind, axes_of, children, loads_of, with_children
from roller_svc.lang.intervals import bounds
from roller_svc.lower.linear import Linear, expression, linear, span


@dataclass(frozen=True, slots=True)
class Walked:
    """Where axes stand: `at` over loop variables, of which those in `places` go from 0 to their extents."""

    extents: Mapping[str, int]  # of the axes
    at: Mapping[str, Expr]
    places: Mapping[str, int]

    def apply(self, expr: Expr) -> Expr:
        """The expression with every axis replaced."""
        match expr:
            case AxisRef(name=name):
                return self.at.get(name, expr)
            case Op(kind=OpKind.FLOORDIV | OpKind.MOD as kind, args=(x, Const(value=int(by)))) if by > 0:
                if self._is_exact(x):
                    return _typed(_divided(kind, linear(self.apply(x)), by, self.places), expr)
            case _:
                pass
        operands = children(expr)
        return with_children(expr, tuple(self.apply(x) for x in operands)) if operands else expr

    def _is_exact(self, expr: Expr) -> bool:
        """Whether it is arithmetic of axes alone that stays within its type."""
        if expr.dtype.is_float or not expr.dtype.is_signed or expr.dtype.bits < 32 or loads_of(expr):
            return False
        return not bounds(expr, self.extents).wraps


def alike(cond: Expr, place: str, run: int) -> bool:
    """Whether a condition holds in all places of a run or in none, `place` going from 0 to `run` - 1."""
    if place not in axes_of(cond):
        return True
    if not (isinstance(cond, Op) and cond.kind is OpKind.LT and isinstance(cond.args[1], Const)):
        return False
    terms = linear(cond.args[0])
    own = terms.pop(AxisRef(place), 0)
    return (
        own == 1
        and all(c % run == 0 for c in (int(cond.args[1].value), *terms.values()))
        and not any(place in axes_of(term) for term in terms if term is not None)
    )


def _typed(value: Expr, like: Expr) -> Expr:
    return value if value.dtype is like.dtype else Cast(value, like.dtype, implicit=True)


def _divided(kind: OpKind, terms: Linear, by: int, places: Mapping[str, int]) -> Expr:
    """floor(x / by) or x mod by: multiples of `by` leave the division, and so does what is too small to matter."""
    whole: Linear = {t: c // by for t, c in terms.items() if c // by * by == c or t is None}
    rest: Linear = {t: c % by if t is None else c for t, c in terms.items() if c % by}
    low: Linear = {t: c for t, c in rest.items() if t is None or (isinstance(t, AxisRef) and t.name in places)}
    high: Linear = {t: c for t, c in rest.items() if t not in low}
    unit = math.gcd(by, *high.values())
    fits = _within(low, unit, places)
    if not fits:
        low, high, unit = {}, rest, 1
    scaled = expression({t: c // unit for t, c in high.items()})
    if kind is OpKind.FLOORDIV:
        return add(expression(whole), div(scaled, by // unit))
    return add(mul(mod(scaled, by // unit), num(unit)), expression(low))


def _within(low: Linear, unit: int, places: Mapping[str, int]) -> bool:
    first, last = span(low, places)
    return first >= 0 and last < unit
