"""Literals and promotion: which type operands meet in, and the explicit conversions to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from roller_svc.ir.dtype import DType, promote
from roller_svc.ir.expr import Cast, Const, Expr, Op, OpKind


@dataclass(frozen=True, slots=True)
class Weak:
    """A number that takes the type of what it meets."""

    value: int | float

    @property
    def natural(self) -> DType:
        """Its type when it stands alone."""
        return DType.INT32 if isinstance(self.value, int) else DType.FLOAT32


Typed = Expr | Weak

# The first magnitude that rounds to infinity, or saturates: the greatest value and half its last step.
_FLOAT_LIMIT = {
    DType.FLOAT64: float("inf"),
    DType.FLOAT32: (2.0 - 2.0**-24) * 2.0**127,
    DType.BFLOAT16: (2.0 - 2.0**-8) * 2.0**127,
    DType.FLOAT16: 65520.0,
    DType.FLOAT8_E4M3FN: 464.0,
    DType.FLOAT8_E5M2: 61440.0,
}


def holds(value: int | float, dtype: DType) -> bool:
    """Whether a type can hold a number: an integer exactly, a float to rounding."""
    if dtype.is_float:
        return abs(value) < _FLOAT_LIMIT[dtype]
    low, high = dtype.integer_range
    return isinstance(value, int) and low <= value <= high


def constant(value: int | float, dtype: DType) -> Const:
    """The number in a type that holds it."""
    return Const(float(value) if dtype.is_float else int(value), dtype)


def common_type(operands: Iterable[Typed]) -> DType:
    """The type that operands meet in: weak numbers follow the others, a weak float with integers gives float32."""
    operands = tuple(operands)
    strong = [x.dtype for x in operands if not isinstance(x, Weak)]
    has_weak_float = any(isinstance(x, Weak) and isinstance(x.value, float) for x in operands)
    if not strong:
        return DType.FLOAT32 if has_weak_float else DType.INT32
    found = reduce(promote, strong)
    return DType.FLOAT32 if has_weak_float and not found.is_float else found


def comparison_type(left: Typed, right: Typed) -> DType:
    """The type two operands are compared in; integers of mixed sign meet in int64, so that values compare."""
    found = common_type((left, right))
    if found.is_float or isinstance(left, Weak) or isinstance(right, Weak):
        return found
    return found if left.dtype.is_signed is right.dtype.is_signed else DType.INT64


def converted(x: Expr, dtype: DType) -> Expr:
    """The expression in that type: the language's own conversion, which need not round."""
    return x if x.dtype is dtype else Cast(x, dtype, implicit=True)


def literal_cast(value: int | float, dtype: DType) -> Cast:
    """A number cast to a type: strong, and as precise before the cast as the cast can show."""
    if isinstance(value, int):
        before = DType.INT32 if holds(value, DType.INT32) else DType.INT64
        if not holds(value, before):
            before = DType.UINT64 if holds(value, DType.UINT64) else DType.FLOAT64
    else:
        wide = dtype is DType.FLOAT64 or (not dtype.is_float and dtype.bits >= 32)
        before = DType.FLOAT64 if wide or not holds(value, DType.FLOAT32) else DType.FLOAT32
    return Cast(constant(value, before), dtype)


def condition(x: Expr) -> Expr:
    """The expression as a truth value: int8, not 0 where it holds."""
    if x.dtype is DType.INT8:
        return x
    return Op(OpKind.NE, (x, constant(0, x.dtype)), DType.INT8)


def constant_int(x: Expr) -> int | None:
    """The value of an integer expression of numbers and extents; None where it is none."""
    match x:
        case Const(value=int(value)):
            return value
        case Cast(arg=arg, dtype=dtype) if not dtype.is_float:
            value_below = constant_int(arg)
            return value_below if value_below is not None and holds(value_below, dtype) else None
        case Op(kind=kind, args=args) if kind in _FOLDED and not x.dtype.is_float:
            values = [constant_int(arg) for arg in args]
            return None if None in values else _folded(kind, [v for v in values if v is not None])
        case _:
            return None


_FOLDED = frozenset(
    {OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.FLOORDIV, OpKind.MOD, OpKind.NEG, OpKind.MAX, OpKind.MIN}
)


def _folded(kind: OpKind, v: list[int]) -> int | None:
    match kind:
        case OpKind.ADD:
            return v[0] + v[1]
        case OpKind.SUB:
            return v[0] - v[1]
        case OpKind.MUL:
            return v[0] * v[1]
        case OpKind.FLOORDIV:
            return v[0] // v[1] if v[1] else None
        case OpKind.MOD:
            return v[0] % v[1] if v[1] else None
        case OpKind.NEG:
            return -v[0]
        case OpKind.MAX:
            return max(v)
        case OpKind.MIN:
            return min(v)
        case _:
            return None
