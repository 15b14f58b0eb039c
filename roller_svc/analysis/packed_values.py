"""Expression → the value of few bits that it unpacks: a field of a word, a byte, a float8, or what a field looks up.

This is the only recogniser of packed weights. It knows the form of a value, and leaves to its callers where values lie
in memory: `packed_operands.py` prices operands of a matrix unit, `packed_sums.py` separates the weight of a sum from
its factors, and `codegen/cuda/packed_lanes.py` prints the lanes of a loop.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import Enum

from roller_svc.analysis.index_ranges import range_of
from roller_svc.analysis.linear import linear
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, axes_of, children

FLOAT8 = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
BYTES = (DType.INT8, DType.UINT8)
WORD_BITS, BYTE_BITS, FIELD_BITS = 32, 8, (1, 2, 4, 8)  # of a register; of fields
TABLE_BITS = 4  # of an index of a table in registers
TABLE_ENTRIES = 1 << TABLE_BITS
MAX_EXACT = {DType.BFLOAT16: 256}  # integers that a float holds exactly
MAX_EXACT_FLOAT16 = 1024  # with the exponent's value added


class Packing(Enum):
    """Memory layout of packed values."""

    FIELD = "field"  # of a word, at a shift
    BYTE = "byte"
    FLOAT8 = "float8"
    LOOKUP = "lookup"  # a field that is an index of a table


@dataclass(frozen=True, slots=True)
class PackedValue:
    """A value of few bits, with the zero points that are added to it or subtracted from it as integers."""

    packing: Packing
    source: Load  # of the word, the byte or the float8
    bits: int  # of the value in memory
    bounds: tuple[int, int] | None = None  # of an integer with its zero points; None: unknown, or it may wrap
    shift: Expr | None = None  # of a field in its word
    table: Load | None = None  # the look-up
    zeros: tuple[tuple[OpKind, Expr], ...] = ()

    def is_exact_in(self, dtype: DType) -> bool:
        """Return whether a float type holds all of the integers exactly."""
        limit = MAX_EXACT.get(dtype, MAX_EXACT_FLOAT16)
        is_wide = dtype.is_float and dtype.bits >= 16
        return is_wide and self.bounds is not None and -limit <= self.bounds[0] <= self.bounds[1] <= limit

    def with_zero(self, kind: OpKind, zero: Expr, dtype: DType) -> PackedValue:
        """Return the integer plus or minus a zero point, computed in a type."""
        zeros, added = (*self.zeros, (kind, zero)), integer_bounds(zero)
        if self.bounds is None or added is None:
            return replace(self, bounds=None, zeros=zeros)
        low, high = added if kind is OpKind.ADD else (-added[1], -added[0])
        low, high = self.bounds[0] + low, self.bounds[1] + high
        least, greatest = dtype.integer_range
        return replace(self, bounds=(low, high) if least <= low and high <= greatest else None, zeros=zeros)


Accepts = Callable[[PackedValue], bool]  # whether a value without zero points is where its caller can unpack it


def packed_value(expr: Expr, accepts: Accepts) -> PackedValue | None:
    """Return a float as a packed value; None for other expressions. A conversion of an integer may round it."""
    value: PackedValue | None = None
    match expr:
        case Cast(arg=arg, dtype=dtype) if not arg.dtype.is_float:
            return packed_integer(arg, accepts) if dtype.is_float else None
        case Cast(arg=Load() as load, dtype=dtype) | (Load(dtype=dtype) as load) if _is_lossless(load, dtype):
            if (field := table_field(load)) is not None:
                value = replace(field, packing=Packing.LOOKUP, bounds=None, table=load)
            elif load.dtype in FLOAT8:
                value = PackedValue(Packing.FLOAT8, load, BYTE_BITS)
    return value if value is not None and accepts(value) else None


def packed_integer(expr: Expr, accepts: Accepts) -> PackedValue | None:
    """Return an integer as a packed value with its zero points; None for other expressions."""
    match expr:
        case Cast(arg=arg) if not arg.dtype.is_float and keeps_value(expr):
            return packed_integer(arg, accepts)
        case Op(kind=OpKind.SUB | OpKind.ADD as kind, args=(x, y), dtype=dtype) if not dtype.is_float:
            value, zero = packed_integer(x, accepts), y
            if value is None and kind is OpKind.ADD:
                value, zero = packed_integer(y, accepts), x
            return None if value is None else value.with_zero(kind, zero, dtype)
        case Load(dtype=dtype) if dtype in BYTES:
            value = PackedValue(Packing.BYTE, expr, BYTE_BITS, dtype.integer_range)
        case _:
            value = packed_field(expr)
    return value if value is not None and accepts(value) else None


def packed_field(expr: Expr) -> PackedValue | None:
    """Return the field of `word >> shift & mask`, whose word is an element of memory; None for other expressions."""
    match expr:
        case (
            Op(kind=OpKind.BITAND, args=(shifted, Const(value=int(mask))))
            | Op(kind=OpKind.BITAND, args=(Const(value=int(mask)), shifted))
        ):
            pass
        case _:
            return None
    bits = mask.bit_length()
    while isinstance(shifted, Cast) and shifted.is_exact:
        shifted = shifted.arg
    if mask != (1 << bits) - 1 or bits not in FIELD_BITS or not isinstance(shifted, Op):
        return None
    word, *shifts = shifted.args
    while isinstance(word, Cast) and not word.arg.dtype.is_float and word.dtype.bits >= word.arg.dtype.bits:
        word = word.arg  # the field is inside the element, whose bits stay
    if shifted.kind is not OpKind.SHR or not isinstance(word, Load):
        return None
    return PackedValue(Packing.FIELD, word, bits, (0, mask), shifts[0])


def table_field(load: Load) -> PackedValue | None:
    """Return the field that is the index of a table of 16 values; None for other loads."""
    if len(load.index) != 1:
        return None
    field = packed_field(without_fitting_casts(load.index[0]))
    return field if field is not None and field.bits == TABLE_BITS else None


def _is_lossless(load: Load, dtype: DType) -> bool:
    """Return whether a float in memory is converted exactly: float8 to any float, others to float32 or as they are."""
    is_same = dtype in (load.dtype, DType.FLOAT32)
    return load.dtype.is_float and dtype.is_float and (is_same or load.dtype in FLOAT8)


# integers -----------------------------------------------------------------------------------------------------------
def without_fitting_casts(index: Expr) -> Expr:
    """Return an index without conversions that keep its value."""
    while isinstance(index, Cast) and not index.dtype.is_float and keeps_value(index):
        index = index.arg
    return index


def keeps_value(cast: Cast) -> bool:
    """Return whether an integer conversion keeps every value."""
    bounds = range_of(cast.arg, {})
    if cast.is_exact or bounds is None:
        return cast.is_exact
    least, greatest = cast.dtype.integer_range
    return least <= bounds[0] and bounds[1] <= greatest


def integer_bounds(value: Expr) -> tuple[int, int] | None:
    """Return the range of an integer by its form and type."""
    match value:
        case Load(dtype=dtype) if dtype in BYTES:
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


# chunks -------------------------------------------------------------------------------------------------------------
def is_shared(expr: Expr, axis: str, chunk: int) -> bool:
    """Return whether an expression is equal along aligned chunks of the axis."""
    match expr:
        case AxisRef(name=name):
            return name != axis
        case Op(kind=OpKind.FLOORDIV, args=(x, Const(value=int(by)))) if by % chunk == 0 and advances(x, axis, chunk):
            return True
        case _:
            return all(is_shared(child, axis, chunk) for child in children(expr))


def advances(x: Expr, axis: str, step: int) -> bool:
    """Return whether an index is the axis plus a multiple of `step`."""
    terms = linear(x)
    return terms.pop(AxisRef(axis), 0) == 1 and all(
        c % step == 0 and (term is None or axis not in axes_of(term)) for term, c in terms.items()
    )
