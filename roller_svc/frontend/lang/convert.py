"""Literals and type promotion: common types of operands, and conversions to them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce

import numpy as np

from roller_svc.analysis.constant_folding import holds
from roller_svc.analysis.intervals import bounds
from roller_svc.analysis.narrowing import round_to_narrow
from roller_svc.ir.dtype import DType, promote
from roller_svc.ir.expr import Cast, Const, Expr, Op, OpKind

# Operators whose result depends on more than the operands' bits, so that a conversion that wraps would change it.
BY_VALUE = frozenset({
    OpKind.FLOORDIV, OpKind.MOD, OpKind.TRUNC_DIV, OpKind.FMOD, OpKind.REMAINDER, OpKind.POW, OpKind.MAX, OpKind.MIN,
    OpKind.FMAX, OpKind.FMIN, OpKind.CLIP,
})  # fmt: skip
_EXTREMA = frozenset({OpKind.MAX, OpKind.MIN, OpKind.FMAX, OpKind.FMIN})
_GREATEST = frozenset({OpKind.MAX, OpKind.FMAX})
_INT64_MAX = DType.INT64.integer_range[1]


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
        wide = dtype is DType.FLOAT64 or (not dtype.is_float and dtype.bits >= 32) or not holds(value, DType.FLOAT32)
        if dtype.is_narrow_float and not wide:
            number = np.asarray(value)
            wide = bool(round_to_narrow(number, dtype) != round_to_narrow(number.astype(np.float32), dtype))
        literal_type = DType.FLOAT64 if wide else DType.FLOAT32
    return Cast(constant(value, literal_type), dtype)


def condition(x: Expr) -> Expr:
    """Return the expression as a truth value: int8, nonzero for true."""
    if x.dtype is DType.INT8:
        return x
    return Op(OpKind.NE, (x, constant(0, x.dtype)), DType.INT8)


def holds_all(dtype: DType, other: DType) -> bool:
    """Return whether an integer type holds every value of another one."""
    low, high = other.integer_range
    return holds(low, dtype) and holds(high, dtype)


def apply_by_value(kind: OpKind, args: Sequence[Expr], dtype: DType) -> Expr:
    """Apply an operator of BY_VALUE to the values of integers of any types, and wrap the result to a type.

    Divisions and powers of uint64 and a signed type are the exception: their operands are converted first.
    """
    if dtype.is_float or all(arg.dtype is dtype for arg in args):
        args = [convert_to(arg, dtype) for arg in args]
        return reduce(lambda a, b: Op(kind, (a, b), dtype), args) if kind in _EXTREMA else Op(kind, tuple(args), dtype)
    if kind in _EXTREMA:
        value = reduce(partial(_extremum, kind), args)
    elif kind is OpKind.CLIP:
        value = _extremum(OpKind.MIN, _extremum(OpKind.MAX, args[0], args[1]), args[2])
    else:
        wide = exact_type(arg.dtype for arg in args) or dtype
        value = Op(kind, tuple(convert_to(arg, wide) for arg in args), wide)
    return value if value.dtype is dtype else Cast(value, dtype)


def exact_type(dtypes: Iterable[DType]) -> DType | None:
    """Return a type that holds all values of integer types; None for uint64 with a signed type."""
    dtypes = tuple(dtypes)
    common = reduce(promote, dtypes)
    wider = (common, DType.INT32, DType.INT64)
    return next((wide for wide in wider if all(holds_all(wide, dtype) for dtype in dtypes)), None)


def _extremum(kind: OpKind, a: Expr, b: Expr) -> Expr:
    """Return the greater or the lesser of two integers, in a type that holds it."""
    wide = exact_type((a.dtype, b.dtype))
    if wide is None:
        signed, unsigned = (a, b) if a.dtype.is_signed else (b, a)
        if kind in _GREATEST:
            wide, a, b = DType.UINT64, _at_least(signed, 0), unsigned
        else:
            wide, a, b = DType.INT64, signed, _at_most(unsigned, _INT64_MAX)
    return Op(kind, (convert_to(a, wide), convert_to(b, wide)), wide)


def compare(kind: OpKind, left: Expr, right: Expr, extents: Mapping[str, int]) -> Expr:
    """Compare two integers by their values, whatever their types are. `extents` are those of axes."""
    wide = exact_type((left.dtype, right.dtype))
    if wide is not None:
        return Op(kind, (convert_to(left, wide), convert_to(right, wide)), DType.INT8)
    if not left.dtype.is_signed:
        return compare(_SWAPPED[kind], right, left, extents)
    signed, unsigned, wide = left, right, DType.UINT64
    if bounds(signed, extents).low >= 0:
        left = convert_to(signed, wide)
    elif kind in (OpKind.LE, OpKind.GT):  # below 0 compares as 0 does
        left = convert_to(_at_least(signed, 0), wide)
    elif kind in (OpKind.LT, OpKind.GE):  # s < u as s + 1 <= u, where -1 + 1 wraps to 0
        left = Op(OpKind.ADD, (convert_to(_at_least(signed, -1), wide), constant(1, wide)), wide)
        kind = OpKind.LE if kind is OpKind.LT else OpKind.GT
    else:  # below 0 becomes the greatest uint64, which the other side never is
        left = convert_to(_at_least(signed, -1), wide)
        unsigned = _at_most(unsigned, _INT64_MAX + 1)
    return Op(kind, (left, unsigned), DType.INT8)


def _at_least(x: Expr, low: int) -> Expr:
    return Op(OpKind.MAX, (x, constant(low, x.dtype)), x.dtype)


def _at_most(x: Expr, high: int) -> Expr:
    return Op(OpKind.MIN, (x, constant(high, x.dtype)), x.dtype)


_SWAPPED = {
    OpKind.LT: OpKind.GT, OpKind.GT: OpKind.LT, OpKind.LE: OpKind.GE, OpKind.GE: OpKind.LE, OpKind.EQ: OpKind.EQ,
    OpKind.NE: OpKind.NE,
}  # fmt: skip


def shift_type(left: Typed, count: Typed) -> DType:
    """Return the type of a shift: the left operand's, or int32 if that is narrower than the count and than int32."""
    if isinstance(left, Weak) or isinstance(count, Weak) or left.dtype.is_float or count.dtype.is_float:
        return common_type((left, count))
    is_narrow = left.dtype.bits < min(count.dtype.bits, DType.INT32.bits) or left.dtype is DType.BOOL
    return DType.INT32 if is_narrow else left.dtype


def convert_count(count: Expr, dtype: DType, extents: Mapping[str, int]) -> Expr:
    """Convert a shift's count to the type of the shift. A count that the type does not hold shifts all bits or none."""
    known, (least, greatest) = bounds(count, extents), dtype.integer_range
    if known.low < least:
        count = _at_least(count, 0)
    if known.high > greatest:
        count = _at_most(count, dtype.bits)
    return convert_to(count, dtype)
