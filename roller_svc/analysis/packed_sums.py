"""Sum of products with packed weights → the weight that 16 bits hold exactly, and the factors beside it.

`packed_values.py` recognises the weights. Unlike operands of a matrix unit (`packed_operands.py`), they are unpacked
without their scales, in chunks along one axis, and in any order of a chunk. `codegen/cuda/packed_lanes.py` prints them.
A factor that is equal along a chunk of the sum, a group's scale, multiplies the chunk's sum instead of its elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roller_svc.analysis.linear import linear
from roller_svc.analysis.packed_operands import BYTE_SLOTS, PAIR_SLOTS, SIGN_SLOTS, lookup_slots
from roller_svc.analysis.packed_values import (
    FLOAT8,
    MAX_EXACT_FLOAT16,
    WORD_BITS,
    PackedValue,
    Packing,
    advances,
    is_shared,
    packed_integer,
    packed_value,
)
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, axes_of, children, loads_of
from roller_svc.ir.program import Combine, StatementKind, TensorExpr

SHARED_ZERO_SLOTS = 8.0  # of a chunk's: a load, a shift, a mask, and words of two floats
FIELD_SLOTS = 2 * PAIR_SLOTS + 0.125  # lop3, addition or fma; a word's shift for its eight fields
FLOAT8_SLOTS = PAIR_SLOTS + 0.25  # a conversion, and a word's shift for its four bytes


@dataclass(frozen=True, slots=True)
class PackedSum:
    """A float32 sum of `weight` times the product of `factors`."""

    weight: Expr
    factors: tuple[Expr, ...]
    dtype: DType  # 16-bit float that holds the weight
    exact_dtypes: frozenset[DType]  # all of these
    slots: float  # instructions that unpack one weight
    bits: int  # of a weight in memory
    zero: Expr | None  # the zero point
    zero_slots: float  # instructions to prepare one weight's zero point

    def shared_factors(self, axis: str, chunk: int) -> tuple[Expr, ...]:
        """Return the factors that are equal along aligned chunks of the axis.

        Those are hoisted out of the sum of the chunk if what remains has no rounding below the range of float32: one
        float of memory times an integer.
        """
        shared = tuple(f for f in self.factors if is_shared(f, axis, chunk))
        others = [f for f in self.factors if f not in shared]
        is_safe = len(others) <= 1 and all(self._is_exact_product(_uncast(f)) for f in others)
        return shared if is_safe else ()

    def _is_exact_product(self, factor: Expr) -> bool:
        """Return whether the factor's products with weights are multiples of the least float32."""
        weight = _uncast(self.weight)
        if not isinstance(factor, Load) or not weight.dtype.is_float:
            return isinstance(factor, Load)
        is_float16 = weight.dtype is DType.FLOAT16 and factor.dtype is DType.FLOAT16
        return is_float16 or (weight.dtype in FLOAT8 and factor.dtype.bits <= 16)


@dataclass(frozen=True, slots=True)
class _Chunks:
    """Aligned chunks of a sum along an axis, whose weights are unpacked together."""

    axis: str
    count: int  # weights

    def has_values(self, value: PackedValue) -> bool:
        """Return whether the values of a chunk are adjacent in memory, or fields of one word or of whole words."""
        if value.shift is None:
            return _is_row(value.source, self.axis)
        is_checked = value.table is not None and any(value.table.bounds_checked)
        return not is_checked and _is_word(value.source, value.shift, self, value.bits)

    def zero_point(self, value: PackedValue) -> tuple[Expr | None, float] | None:
        """Return the zero point in memory, if any, and its slots; None if there is one that cannot be unpacked."""
        zero, slots = None, 0.0
        for _, other in value.zeros:
            if is_shared(other, self.axis, self.count):
                if loads_of(other):
                    zero, slots = other, SHARED_ZERO_SLOTS / self.count
                continue
            packed = packed_integer(other, self.has_values)
            if packed is None or packed.bounds is None or self.zero_point(packed) is None:
                return None
            zero, slots = other, _stored_slots(packed) + PAIR_SLOTS
        return zero, slots


def packed_sum(statement: TensorExpr, axis: str, chunk: int) -> PackedSum | None:
    """Return the sum if its weights can be unpacked in pairs along an axis, in aligned chunks; None if not."""
    is_float_sum = statement.kind is StatementKind.REDUCE and statement.combine is Combine.SUM
    if not is_float_sum or statement.accumulator is not DType.FLOAT32 or chunk % 4:
        return None
    chunks, factors = _Chunks(axis, chunk), tuple(_as_integer(factor) for factor in product_factors(statement.body))
    splits = (_split(factors, place, chunks) for place in range(len(factors)))
    sums = [split for split in splits if split is not None]
    return sums[0] if len(sums) == 1 and len(factors) > 1 else None


def _split(factors: tuple[Expr, ...], place: int, chunks: _Chunks) -> PackedSum | None:
    """Return the sum whose weight is the factor at a place; None if that is not packed."""
    weight = factors[place]
    value = packed_value(weight, chunks.has_values)
    zero_point = None if value is None else chunks.zero_point(value)
    is_integer = isinstance(weight, Cast) and not weight.arg.dtype.is_float
    if value is None or zero_point is None or (is_integer and not value.is_exact_in(weight.dtype)):
        return None
    is_bfloat16 = value.table is not None and value.table.dtype is DType.BFLOAT16
    dtype = DType.BFLOAT16 if is_bfloat16 else DType.FLOAT16
    slots = _stored_slots(value) if value.table is None else lookup_slots(value.table, dtype)
    if slots is None:
        return None
    if isinstance(weight, Cast) and not weight.arg.dtype.is_float:
        weight = Cast(weight.arg, DType.FLOAT32, implicit=True)
    exact = frozenset({dtype}) if value.table is not None else _exact_dtypes(value)
    return PackedSum(weight, (*factors[:place], *factors[place + 1 :]), dtype, exact, slots, value.bits, *zero_point)


def _exact_dtypes(value: PackedValue) -> frozenset[DType]:
    """Return the 16-bit floats that hold a value without a table; float16 holds all that are packed."""
    is_float8 = value.packing is Packing.FLOAT8
    return frozenset({DType.FLOAT16, *(d for d in (DType.BFLOAT16,) if is_float8 or value.is_exact_in(d))})


def _stored_slots(value: PackedValue) -> float:
    """Return the instructions that unpack one weight as it is stored."""
    if value.packing is Packing.BYTE:
        return BYTE_SLOTS + (SIGN_SLOTS if value.source.dtype.is_signed else 0.0)
    return FLOAT8_SLOTS if value.packing is Packing.FLOAT8 else FIELD_SLOTS


def product_factors(expr: Expr) -> Iterator[Expr]:
    """Yield the factors of a product that is not rounded before its end."""
    match expr:
        case Op(kind=OpKind.MUL, args=(x, y), dtype=dtype) if dtype.is_float and dtype.compute is DType.FLOAT32:
            yield from product_factors(x)
            yield from product_factors(y)
        case Cast(arg=arg, dtype=dtype) if _keeps(arg, dtype):
            yield from product_factors(arg)
        case _:
            yield expr


def _as_integer(factor: Expr) -> Expr:
    """Return a factor of integers that are subtracted or added as floats as one conversion of integers."""
    whole = _integer_value(factor) if isinstance(factor, Op) else None
    return factor if whole is None else Cast(whole, DType.FLOAT32, implicit=True)


def _integer_value(expr: Expr) -> Expr | None:
    match expr:
        case Const(value=value) if float(value).is_integer() and abs(value) <= MAX_EXACT_FLOAT16:
            return Const(int(value), DType.INT32)
        case Cast(arg=Const() as arg):
            return _integer_value(arg)
        case Cast(arg=arg, dtype=DType.FLOAT16 | DType.FLOAT32) if not arg.dtype.is_float:
            whole = Cast(arg, DType.INT32, implicit=True)
            return arg if arg.dtype is DType.INT32 else whole if whole.is_exact else None
        case Op(kind=OpKind.ADD | OpKind.SUB | OpKind.MUL as kind, args=(x, y)):
            a, b = _integer_value(x), _integer_value(y)
            if a is None or b is None:
                return None
            if kind is OpKind.MUL:
                one = Const(1, DType.INT32)
                return a if b == one else b if a == one else None
            return Op(kind, (a, b), DType.INT32)
        case _:
            return None


def _keeps(arg: Expr, dtype: DType) -> bool:
    return arg.dtype.is_float and (dtype is DType.FLOAT32 or (isinstance(arg, Load) and arg.dtype is dtype))


def _uncast(expr: Expr) -> Expr:
    while isinstance(expr, Cast):
        expr = expr.arg
    return expr


def _is_word(word: Load, shift: Expr, chunks: _Chunks, bits: int) -> bool:
    """Return whether elements of memory have some fields along the axis each, at shifts that repeat."""
    axis, chunk = chunks.axis, chunks.count
    if word.dtype.bits > WORD_BITS or any(word.bounds_checked):
        return False
    per = word.dtype.bits // bits
    inside = [i for i in word.index if axis in axes_of(i)]
    if len(inside) != 1 or not _repeats(shift, axis, per):
        return False
    match inside[0]:
        case Op(kind=OpKind.FLOORDIV, args=(x, Const(value=by))) if by == per and advances(x, axis, per):
            is_row = inside[0] is word.index[-1]
            return chunk * bits % WORD_BITS == 0 if is_row and chunk > per else chunk == per
        case _:
            return False


def _repeats(shift: Expr, axis: str, period: int) -> bool:
    """Return whether a shift depends on the axis, and only by its remainder."""
    match shift:
        case Op(kind=OpKind.MOD, args=(x, Const(value=int(by)))) if axis in axes_of(x):
            return period % by == 0 and advances(x, axis, period)
        case AxisRef() | Const():
            return False
        case _:
            with_axis = [child for child in children(shift) if axis in axes_of(child)]
            return bool(with_axis) and all(_repeats(child, axis, period) for child in with_axis)


def _is_row(load: Load, axis: str) -> bool:
    """Return whether adjacent elements of memory follow the axis."""
    if not load.index or any(load.bounds_checked):
        return False
    *outer, inner = load.index
    terms = linear(inner)
    follows = terms.pop(AxisRef(axis), 0) == 1 and all(c % 4 == 0 for c in terms.values())
    return follows and not any(axis in axes_of(i) for i in outer)
