"""Sum of products with packed weights → the weight that 16 bits hold exactly, and the factors beside it.

Weights are small integers (fields of packed words, bytes) less a zero point, float8, or values that fields look up.
`codegen/cuda/packed_lanes.py` unpacks them in pairs. A factor that is equal along a chunk of the sum, a group's scale,
multiplies the chunk's sum instead of its elements.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from roller_svc.analysis.index_ranges import range_of
from roller_svc.analysis.linear import linear
from roller_svc.analysis.packed_operands import (
    BYTE_SLOTS,
    FLOAT8,
    PAIR_SLOTS,
    SIGN_SLOTS,
    advances,
    is_shared,
    lookup_slots,
)
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, axes_of, children, loads_of
from roller_svc.ir.program import Combine, StatementKind, TensorExpr

MAX_EXACT = 1024  # integers that float16 holds with the exponent's value added
SHARED_ZERO_SLOTS = 8.0  # of a chunk's: a load, a shift, a mask, and words of two floats
FIELD_SLOTS = 2 * PAIR_SLOTS + 0.125  # lop3, addition or fma; a word's shift for its eight fields
FLOAT8_SLOTS = PAIR_SLOTS + 0.25  # a conversion, and a word's shift for its four bytes
FIELD_BITS = (1, 2, 4, 8)
WORD_BITS = 32


@dataclass(frozen=True, slots=True)
class PackedSum:
    """A float32 sum of `weight` times the product of `factors`."""

    weight: Expr
    factors: tuple[Expr, ...]
    dtype: DType  # 16-bit float that holds the weight
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


class _Unpacked(NamedTuple):
    slots: float
    low: int
    high: int
    bits: int
    zero: Expr | None = None
    zero_slots: float = 0.0
    dtype: DType = DType.FLOAT16


def packed_sum(statement: TensorExpr, axis: str, chunk: int) -> PackedSum | None:
    """Return the sum if its weights can be unpacked in pairs along an axis, in aligned chunks; None if not."""
    is_float_sum = statement.kind is StatementKind.REDUCE and statement.combine is Combine.SUM
    if not is_float_sum or statement.accumulator is not DType.FLOAT32 or chunk % 4:
        return None
    factors = tuple(_as_integer(factor) for factor in _factors(statement.body))
    weights = [(i, w) for i, f in enumerate(factors) if (w := _weight(f, axis, chunk)) is not None]
    if len(weights) != 1 or len(factors) < 2:
        return None
    ((place, unpacked),) = weights
    weight, others = factors[place], (*factors[:place], *factors[place + 1 :])
    if isinstance(weight, Cast) and not weight.arg.dtype.is_float:
        weight = Cast(weight.arg, DType.FLOAT32, implicit=True)
    return PackedSum(
        weight, others, unpacked.dtype, unpacked.slots, unpacked.bits, unpacked.zero, unpacked.zero_slots
    )  # fmt: skip


def _factors(expr: Expr) -> Iterator[Expr]:
    """Yield the factors of a product that is not rounded before its end."""
    match expr:
        case Op(kind=OpKind.MUL, args=(x, y), dtype=dtype) if dtype.is_float and dtype.compute is DType.FLOAT32:
            yield from _factors(x)
            yield from _factors(y)
        case Cast(arg=arg, dtype=dtype) if _keeps(arg, dtype):
            yield from _factors(arg)
        case _:
            yield expr


def _as_integer(factor: Expr) -> Expr:
    """Return a factor of integers that are subtracted or added as floats as one conversion of integers."""
    whole = _integer_value(factor) if isinstance(factor, Op) else None
    return factor if whole is None else Cast(whole, DType.FLOAT32, implicit=True)


def _integer_value(expr: Expr) -> Expr | None:
    match expr:
        case Const(value=value) if float(value).is_integer() and abs(value) <= MAX_EXACT:
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


def _weight(factor: Expr, axis: str, chunk: int) -> _Unpacked | None:
    match factor:
        case Cast(arg=Load() as load) | (Load() as load) if _is_lossless(factor, load):
            dtype = DType.BFLOAT16 if load.dtype is DType.BFLOAT16 else DType.FLOAT16
            slots = None if any(load.bounds_checked) else lookup_slots(load, dtype)
            if slots is not None:
                field = _integer(load.index[0], axis, chunk)
                return None if field is None else _Unpacked(slots, 0, 0, field.bits, dtype=dtype)
            is_float8 = load.dtype in FLOAT8 and _is_row(load, axis)
            return _Unpacked(FLOAT8_SLOTS, 0, 0, 8) if is_float8 else None
        case Cast(arg=arg, dtype=dtype) if not arg.dtype.is_float:
            unpacked = _integer(arg, axis, chunk)
            exact = 256 if dtype is DType.BFLOAT16 else MAX_EXACT
            fits = unpacked is not None and -exact <= unpacked.low and unpacked.high <= exact
            return unpacked if fits and dtype.is_float and dtype.bits >= 16 else None
        case _:
            return None


def _integer(expr: Expr, axis: str, chunk: int) -> _Unpacked | None:
    match expr:
        case Cast(arg=arg) if not arg.dtype.is_float and expr.is_exact:
            return _integer(arg, axis, chunk)
        case Op(kind=OpKind.SUB | OpKind.ADD as kind, args=(x, y)):
            field, other = _integer(x, axis, chunk), y
            if field is None and kind is OpKind.ADD:
                field, other = _integer(y, axis, chunk), x
            offset = None if field is None else _offset(field, kind, other, (axis, chunk))
            least, greatest = expr.dtype.integer_range
            return offset if offset is not None and least <= offset.low and offset.high <= greatest else None
        case Op(kind=OpKind.BITAND, args=(Op(kind=OpKind.SHR, args=(word, shift)), Const(value=int(mask)))):
            bits = mask.bit_length()
            if mask != (1 << bits) - 1 or bits not in FIELD_BITS or not _is_word(word, shift, (axis, chunk), bits):
                return None
            return _Unpacked(FIELD_SLOTS, 0, mask, bits)
        case Load(dtype=DType.INT8 | DType.UINT8 as dtype):
            low, high = dtype.integer_range
            slots = BYTE_SLOTS + (SIGN_SLOTS if low else 0.0)
            return _Unpacked(slots, low, high, 8) if _is_row(expr, axis) else None
        case _:
            return None


def _is_lossless(factor: Expr, load: Load) -> bool:
    """Return whether a factor has the loaded float's value: float8 in any float, others in float32 or as they are."""
    is_same = factor.dtype in (load.dtype, DType.FLOAT32)
    return load.dtype.is_float and factor.dtype.is_float and (is_same or load.dtype in FLOAT8)


def _offset(field: _Unpacked, kind: OpKind, other: Expr, along: tuple[str, int]) -> _Unpacked | None:
    """Return a field minus or plus an integer: a constant, one of the chunk, or another field."""
    zero, zero_slots = field.zero, field.zero_slots
    if is_shared(other, *along):
        bounds = integer_bounds(other)
        if loads_of(other):
            zero, zero_slots = other, SHARED_ZERO_SLOTS / along[1]
    else:
        added = _integer(other, *along)
        bounds = None if added is None else (added.low, added.high)
        zero, zero_slots = other, 0.0 if added is None else added.slots + PAIR_SLOTS
    if bounds is None:
        return None
    low, high = bounds if kind is OpKind.ADD else (-bounds[1], -bounds[0])
    return _Unpacked(field.slots, field.low + low, field.high + high, field.bits, zero, zero_slots)


def integer_bounds(value: Expr) -> tuple[int, int] | None:
    """Return the range of an integer by its form and type."""
    match value:
        case Load(dtype=DType.INT8 | DType.UINT8 as dtype):
            return dtype.integer_range
        case Cast(arg=arg) if value.is_exact:
            return integer_bounds(arg)
        case Op(kind=OpKind.ADD | OpKind.SUB as kind, args=(x, y)):
            a, b = integer_bounds(x), integer_bounds(y)
            if a is None or b is None:
                return None
            return (a[0] + b[0], a[1] + b[1]) if kind is OpKind.ADD else (a[0] - b[1], a[1] - b[0])
        case _:
            return range_of(value, {})


def _is_word(word: Expr, shift: Expr, along: tuple[str, int], bits: int) -> bool:
    """Return whether elements of memory have some fields along the axis each, at shifts that repeat."""
    axis, chunk = along
    while isinstance(word, Cast) and not word.arg.dtype.is_float and word.dtype.bits >= word.arg.dtype.bits:
        word = word.arg
    if not isinstance(word, Load) or word.dtype.bits > WORD_BITS or any(word.bounds_checked):
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
