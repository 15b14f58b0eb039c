"""Builders of integer index expressions that fold constants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import overload

from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Op, OpKind


def num(value: int) -> Const:
    return Const(value, DType.INT32)


def ref(name: str) -> AxisRef:
    return AxisRef(name)


def _value(expr: Expr) -> int | None:
    return expr.value if isinstance(expr, Const) and isinstance(expr.value, int) else None


def add(a: Expr, b: Expr) -> Expr:
    x, y = _value(a), _value(b)
    if x is not None and y is not None:
        return num(x + y)
    if x == 0:
        return b
    if y == 0:
        return a
    return Op(OpKind.ADD, (a, b), DType.INT32)


def sub(a: Expr, b: Expr) -> Expr:
    x, y = _value(a), _value(b)
    if x is not None and y is not None:
        return num(x - y)
    return a if y == 0 else Op(OpKind.SUB, (a, b), DType.INT32)


def mul(a: Expr, b: Expr) -> Expr:
    x, y = _value(a), _value(b)
    if x is not None and y is not None:
        return num(x * y)
    if x == 0 or y == 0:
        return num(0)
    if x == 1:
        return b
    if y == 1:
        return a
    return Op(OpKind.MUL, (a, b), DType.INT32)


def div(a: Expr, divisor: int) -> Expr:
    """Return the floor division by a positive constant."""
    x = _value(a)
    if x is not None:
        return num(x // divisor)
    return a if divisor == 1 else Op(OpKind.FLOORDIV, (a, num(divisor)), DType.INT32)


def mod(a: Expr, divisor: int) -> Expr:
    """Return the floor modulo by a positive constant."""
    x = _value(a)
    if x is not None:
        return num(x % divisor)
    return num(0) if divisor == 1 else Op(OpKind.MOD, (a, num(divisor)), DType.INT32)


def lt(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.LT, (a, b), DType.INT8)


def le(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.LE, (a, b), DType.INT8)


def eq(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.EQ, (a, b), DType.INT8)


def min_(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.MIN, (a, b), DType.INT32)


def max_(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.MAX, (a, b), DType.INT32)


@overload
def logical_and(a: Expr, b: Expr | None) -> Expr: ...
@overload
def logical_and(a: Expr | None, b: Expr) -> Expr: ...
@overload
def logical_and(a: Expr | None, b: Expr | None) -> Expr | None: ...
def logical_and(a: Expr | None, b: Expr | None) -> Expr | None:
    """Return the conjunction; None stands for true."""
    if a is None or b is None:
        return b if a is None else a
    return Op(OpKind.LAND, (a, b), DType.INT8)


def linearize(digits: Iterable[tuple[Expr, int]]) -> Expr:
    """Return the row-major number of a point from its position along each dimension and the extent there."""
    number: Expr = num(0)
    for position, extent in digits:
        number = add(mul(number, num(extent)), position)
    return number


def require_expr(expr: Expr | None, what: str) -> Expr:
    """Return `expr`. Raises InvariantError, naming `what`, if it is None: `errors.require` with the type Expr."""
    if expr is None:
        raise InvariantError(f"there is no {what}")
    return expr


def conjuncts(cond: Expr | None) -> tuple[Expr, ...]:
    """Return the conditions whose conjunction it is; None stands for true."""
    match cond:
        case None:
            return ()
        case Op(kind=OpKind.LAND, args=args):
            return tuple(part for arg in args for part in conjuncts(arg))
        case _:
            return (cond,)


def conjunction(conditions: Iterable[Expr]) -> Expr | None:
    """Return the condition that all conditions hold; None without one."""
    result: Expr | None = None
    for condition in conditions:
        result = logical_and(result, condition)
    return result


def ceil_div(a: int, b: int) -> int:
    return -(-a // b)
