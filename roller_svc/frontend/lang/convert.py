"""Literals and promotion: which type operands meet in, and the explicit conversions to it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from roller_svc.analysis.constant_folding import holds
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
