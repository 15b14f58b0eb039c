"""Index expressions over the variables of loops, with divisions simplified.

An axis of vectors is 8 * chunk + element. Its quotient by 8 is equal for all elements of a vector, so that one load
suffices.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from roller_svc.analysis.intervals import bounds
from roller_svc.analysis.linear import divide, linear
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Op, OpKind, children, loads_of, with_children


@dataclass(frozen=True, slots=True)
class IndexMap:
    """Values of axes over loop variables, whose ranges `ranges` gives."""

    extents: Mapping[str, int]  # extents of the axes
    at: Mapping[str, Expr]
    ranges: Mapping[str, int]

    def apply(self, expr: Expr) -> Expr:
        """Replace every axis of the expression."""
        match expr:
            case AxisRef(name=name):
                return self.at.get(name, expr)
            case Op(kind=OpKind.FLOORDIV | OpKind.MOD as kind, args=(x, Const(value=int(by)))) if by > 0:
                if self._is_exact(x):
                    return _cast_like(divide(kind, linear(self.apply(x)), by, self.ranges), expr)
            case _:
                pass
        operands = children(expr)
        return with_children(expr, tuple(self.apply(x) for x in operands)) if operands else expr

    def _is_exact(self, expr: Expr) -> bool:
        """Return whether the expression is arithmetic of axes that stays within its type."""
        if expr.dtype.is_float or not expr.dtype.is_signed or expr.dtype.bits < 32 or loads_of(expr):
            return False
        return not bounds(expr, self.extents).wraps


def _cast_like(value: Expr, like: Expr) -> Expr:
    return value if value.dtype is like.dtype else Cast(value, like.dtype, implicit=True)
