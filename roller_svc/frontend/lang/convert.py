"""Literals and type promotion: common types of operands, and conversions to them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import reduce

from roller_svc.analysis.constant_folding import holds
from roller_svc.ir.dtype import DType, promote
from roller_svc.ir.expr import Cast, Const, Expr, Op, OpKind


@dataclass(frozen=True, slots=True)
class Weak:
    """A weakly typed number, which takes the type of the other operand."""

    value: int | float

    @property
    def natural(self) -> DType:
        """The type without another operand."""
        return DType.INT32 if isinstance(self.value, int) else DType.FLOAT32


Typed = Expr | Weak


def constant(value: int | float, dtype: DType) -> Const:
    """Return the number in a type that can hold it."""
    return Const(float(value) if dtype.is_float else int(value), dtype)


def common_type(operands: Iterable[Typed]) -> DType:
    """Return the common type of operands. Weak numbers follow the others; a weak float with integers gives float32."""
    operands = tuple(operands)
    strong = [x.dtype for x in operands if not isinstance(x, Weak)]
    has_weak_float = any(isinstance(x, Weak) and isinstance(x.value, float) for x in operands)
    if not strong:
        return DType.FLOAT32 if has_weak_float else DType.INT32
    dtype = reduce(promote, strong)
    return DType.FLOAT32 if has_weak_float and not dtype.is_float else dtype


def comparison_type(left: Typed, right: Typed) -> DType:
    """Return the type in which two operands are compared: int64 for integers of mixed signedness."""
    dtype = common_type((left, right))
    if dtype.is_float or isinstance(left, Weak) or isinstance(right, Weak):
        return dtype
    return dtype if left.dtype.is_signed is right.dtype.is_signed else DType.INT64


def convert_to(x: Expr, dtype: DType) -> Expr:
    """Convert the expression implicitly, without a guarantee of rounding."""
    return x if x.dtype is dtype else Cast(x, dtype, implicit=True)


def literal_cast(value: int | float, dtype: DType) -> Cast:
    """Cast a number to a type, from a literal type that is precise enough for the cast."""
    if isinstance(value, int):
        literal_type = DType.INT32 if holds(value, DType.INT32) else DType.INT64
        if not holds(value, literal_type):
            literal_type = DType.UINT64 if holds(value, DType.UINT64) else DType.FLOAT64
    else:
        wide = dtype is DType.FLOAT64 or (not dtype.is_float and dtype.bits >= 32)
        literal_type = DType.FLOAT64 if wide or not holds(value, DType.FLOAT32) else DType.FLOAT32
    return Cast(constant(value, literal_type), dtype)


def condition(x: Expr) -> Expr:
    """Return the expression as a truth value: int8, nonzero for true."""
    if x.dtype is DType.INT8:
        return x
    return Op(OpKind.NE, (x, constant(0, x.dtype)), DType.INT8)
