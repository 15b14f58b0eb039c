"""Integer expressions of numbers and extents → their value; casts of numbers → numbers."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Op, OpKind

# The first magnitude that rounds to infinity, or saturates: the greatest value and half its last step.
_FLOAT_LIMIT = {
    DType.FLOAT64: float("inf"),
    DType.FLOAT32: (2.0 - 2.0**-24) * 2.0**127,
    DType.BFLOAT16: (2.0 - 2.0**-8) * 2.0**127,
    DType.FLOAT16: 65520.0,
    DType.FLOAT8_E4M3FN: 464.0,
    DType.FLOAT8_E5M2: 61440.0,
}
# The magnitude up to which a type has every integer.
_EXACT_INTEGERS = {
    DType.FLOAT64: 1 << 53,
    DType.FLOAT32: 1 << 24,
    DType.BFLOAT16: 1 << 8,
    DType.FLOAT16: 1 << 11,
    DType.FLOAT8_E4M3FN: 1 << 4,
    DType.FLOAT8_E5M2: 1 << 3,
}
INTEGER_FUNCTIONS: dict[OpKind, Callable[[int, int], int]] = {
    OpKind.ADD: operator.add, OpKind.SUB: operator.sub, OpKind.MUL: operator.mul, OpKind.FLOORDIV: operator.floordiv,
    OpKind.MOD: operator.mod, OpKind.MAX: max, OpKind.MIN: min, OpKind.POW: operator.pow, OpKind.SHL: operator.lshift,
    OpKind.SHR: operator.rshift,
}  # fmt: skip
_DIVISIONS = frozenset({OpKind.FLOORDIV, OpKind.MOD})
_OF_COUNTS = frozenset({OpKind.POW, OpKind.SHL, OpKind.SHR})
_GROWING = frozenset({OpKind.POW, OpKind.SHL})
_MOST_BITS = 64  # beyond which no power or shift fits a type


def holds(value: int | float, dtype: DType) -> bool:
    """Whether a type can hold a number: an integer exactly, a float to rounding. Casts to float8 give no infinity."""
    if dtype.is_float and math.isinf(value):
        return dtype not in (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
    if dtype.is_float:
        return abs(value) < _FLOAT_LIMIT[dtype]
    low, high = dtype.integer_range
    return isinstance(value, int) and low <= value <= high


def constant_int(x: Expr) -> int | None:
    """Return the value of an integer expression of numbers and extents; None for any other expression."""
    match x:
        case Const(value=int(value)):
            return value
        case Cast(arg=arg, dtype=dtype) if not dtype.is_float:
            value_below = constant_int(arg)
            return value_below if value_below is not None and holds(value_below, dtype) else None
        case Op(kind=kind, args=args) if (kind is OpKind.NEG or kind in INTEGER_FUNCTIONS) and not x.dtype.is_float:
            values = [constant_int(arg) for arg in args]
            result = None if None in values else _folded(kind, [v for v in values if v is not None])
            return None if result is not None and kind in _GROWING and not holds(result, x.dtype) else result
        case _:
            return None


def fold_casts(expr: Expr) -> Expr:
    """Return the number that casts of an integer or an infinity give, where they keep its value; else the expression."""
    if not isinstance(expr, Cast):
        return expr
    number, dtype = fold_casts(expr.arg), expr.dtype
    if not isinstance(number, Const):
        return expr
    value = number.value
    if dtype.is_float and math.isinf(value):
        return Const(float(value), dtype) if holds(value, dtype) else expr
    if not math.isfinite(value) or value != int(value):
        return expr
    if dtype.is_float:
        return Const(float(value), dtype) if abs(value) <= _EXACT_INTEGERS[dtype] else expr
    return Const(int(value), dtype) if holds(int(value), dtype) else expr


def _folded(kind: OpKind, v: list[int]) -> int | None:
    if kind is OpKind.NEG:
        return -v[0]
    a, b = v
    if kind in _DIVISIONS and b == 0:
        return None
    if kind in _OF_COUNTS and (b < 0 or (kind in _GROWING and b > _MOST_BITS)):
        return None
    return INTEGER_FUNCTIONS[kind](a, b)
