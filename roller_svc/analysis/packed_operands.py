"""Operand of a matrix unit → whether it is unpacked in pairs of 16-bit floats, and its instructions for an element.

`packed_values.py` recognises packed values. An operand is one of these with scales, offsets in float and a guard, which
are applied to it before it is stored for the unit. Its values may lie along any row of memory.
`codegen/cuda/packed_lanes.py` prints such operands.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from roller_svc.analysis.packed_values import (
    BYTE_BITS,
    FLOAT8,
    WORD_BITS,
    PackedValue,
    Packing,
    is_shared,
    packed_integer,
    packed_value,
    table_field,
)
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, loads_of
from roller_svc.ir.hardware import Arch
from roller_svc.ir.program import operators

VECTOR_ELEMENTS, MAX_LOAD_BYTES = 8, 16  # of a vector, which share scales; of one load
PAIRS = (DType.FLOAT16, DType.BFLOAT16)
PAIR_SLOTS = 0.5  # of one element: an instruction for two
FIELD_SLOTS = 3 * PAIR_SLOTS  # prmt, lop3, subtraction of the exponent with a constant zero point
BYTE_SLOTS = 2 * PAIR_SLOTS  # prmt with the exponent's bytes, subtraction
SIGN_SLOTS = 0.25  # the sign bits of a word of four are flipped
# Of values looked up by four bits in registers, by the bytes of a value. Eight indices: selectors, three prmt for four
# bytes, one prmt for a pair.
LOOKUP_SLOTS = {1: 2.0, 2: 2.75}
MEMORY_LOOKUP_SLOTS = 4.0  # shift, mask, address and load
# Of integers that no pair of 16-bit floats holds: a conversion at half the rate, for a field after a shift and a mask.
ELEMENT_SLOTS = {Packing.BYTE: 2.0, Packing.FIELD: 4.0}
FLOAT8_ARCH = Arch("sm_", 89)  # first that converts pairs of e4m3 (PTX ISA, "cvt")
# A conversion of two float8 at half the rate of other instructions (CUDA Programming Guide, table of throughputs), and
# a shift for every second one.
FLOAT8_CONVERSION_SLOTS = 1.25
# Quotients of a row's position and its shift, for each vector of a row whose words hold other rows, too. With them
# GPTQ's order is counted at 0.95 times its SASS on an A100 (NVRTC 13, m = 16).
ROW_SLOTS = 3.0


@dataclass(frozen=True, slots=True)
class Unpacking:
    """Instructions for an element, and loads for the elements of one vector."""

    slots: float
    loads: int


@lru_cache(maxsize=256)
def unpacking_of(expr: Expr, dtype: DType, shared: frozenset[Load] = frozenset(), rows: int = 1) -> Unpacking | None:
    """Return how packed integers, values looked up by them, or float8 are unpacked; None for any other operand.

    Args:
        shared: Loads whose words `rows` rows of a thread share, so that it prepares them once.
    """
    form = _form(expr, dtype, _Rows(shared, rows)) if dtype in PAIRS else None
    if form is None:
        return None
    tables = {load for load in loads_of(expr) if any(map(loads_of, load.index))}  # are in registers or in L1
    operations = sum(map(operators, form.scales)) / VECTOR_ELEMENTS
    loads = sum(map(_load_instructions, set(loads_of(expr)) - tables))
    return Unpacking(form.slots + form.scale_slots + operations, loads)


def has_pair_conversions(expr: Expr, arch: Arch) -> bool:
    """Return whether an architecture has the conversions of a packed operand."""
    return arch >= FLOAT8_ARCH or all(load.dtype is not DType.FLOAT8_E4M3FN or not _is_row(load) for load in loads_of(expr))


@dataclass(frozen=True, slots=True)
class _Rows:
    """Adjacent rows of a thread, and the loads that they share."""

    shared: frozenset[Load]
    count: int

    def sharing(self, expr: Expr) -> int:
        """Return the rows that share a value."""
        return self.count if self.shared.issuperset(loads_of(expr)) else 1


@dataclass(frozen=True, slots=True)
class _Form:
    """A field of bits with an offset, or values that it looks up, and scales and offsets in float."""

    slots: float  # of the value before scales
    scales: tuple[Expr, ...] = ()  # and float offsets
    is_pair: bool = True  # else float32, which is looked up in L1
    has_offset: bool = False  # in float, which pairs of 16 bits would round

    @property
    def scale_slots(self) -> float:
        """Slots of an element: pairs times one 16-bit float, else products in float32, rounded in pairs."""
        if not self.scales:
            return 0.0 if self.is_pair else PAIR_SLOTS
        if self.is_pair and not self.has_offset and len(self.scales) == 1 and _is_scale(self.scales[0]):
            return PAIR_SLOTS
        are_joined = self.is_pair and not self.has_offset and len(self.scales) == 2 and all(map(_is_scale, self.scales))
        return float(self.is_pair) + (1 if are_joined else len(self.scales)) + PAIR_SLOTS


def _form(expr: Expr, dtype: DType, rows: _Rows) -> _Form | None:
    """Return a packed value with scales, float offsets and a guard; None for other operands."""
    value = packed_value(expr, _is_in_row)
    if value is not None:
        return _value_form(value, expr.dtype, dtype, rows)
    match expr:
        case Select(then=then, otherwise=Const(value=0)):
            inner = _form(then, dtype, rows)
            return None if inner is None else replace(inner, slots=inner.slots + PAIR_SLOTS)
        case Cast(arg=arg) if arg.dtype.is_float:
            return _form(arg, dtype, rows)
        case Op(kind=OpKind.MUL, args=(x, y)):
            first = _form(x, dtype, rows)
            form, other = (first, y) if first is not None else (_form(y, dtype, rows), x)
            return None if form is None or _looks_up(other) else replace(form, scales=(*form.scales, other))
        case Op(kind=OpKind.ADD | OpKind.SUB as kind, args=(x, y)) if expr.dtype.is_float:
            form, other = _form(x, dtype, rows), y
            if form is None and kind is OpKind.ADD:
                form, other = _form(y, dtype, rows), x
            if form is None or _looks_up(other) or not _is_shared_by_vector(other, x if other is y else y):
                return None
            return replace(form, scales=(*form.scales, other), has_offset=True)
        case _:
            return None


def _value_form(value: PackedValue, converted: DType, dtype: DType, rows: _Rows) -> _Form | None:
    """Return the form of a packed value that is converted to a type, of an operand whose elements are `dtype`."""
    if value.table is not None:
        slots = register_lookup_slots(value.table, dtype)
        return _Form(MEMORY_LOOKUP_SLOTS, is_pair=False) if slots is None else _Form(slots)
    if value.packing is Packing.FLOAT8:
        return _Form(FLOAT8_CONVERSION_SLOTS) if dtype is DType.FLOAT16 else None
    fits_fraction = converted is not DType.BFLOAT16 or value.bits < BYTE_BITS  # which holds the stored integer
    if not (fits_fraction and value.is_exact_in(converted)):
        return _Form(ELEMENT_SLOTS[value.packing] + len(value.zeros), is_pair=False)
    return _Form(_integer_slots(value, rows))


def is_looked_up(load: Load, dtype: DType) -> bool:
    """Return whether a load is a look-up in registers, of an operand whose elements are `dtype`."""
    return register_lookup_slots(load, dtype) is not None


def register_lookup_slots(load: Load, dtype: DType) -> float | None:
    """Return the slots of a look-up in registers, as `dtype` or as float16; None for other loads."""
    return lookup_slots(load, dtype) or lookup_slots(load, DType.FLOAT16)


def lookup_slots(load: Load, dtype: DType) -> float | None:
    """Return the slots of a value that four bits look up in registers, as `dtype`; None for other loads."""
    is_narrower = dtype is DType.FLOAT16 and load.dtype in FLOAT8
    if any(load.bounds_checked) or table_field(load) is None or not (load.dtype is dtype or is_narrower):
        return None
    return LOOKUP_SLOTS[1 if load.dtype is DType.FLOAT8_E5M2 else 2]


def _looks_up(expr: Expr) -> bool:
    return any(any(map(loads_of, load.index)) for load in loads_of(expr))


def _is_shared_by_vector(expr: Expr, packed: Expr) -> bool:
    """Return whether an expression is equal for the elements of a vector of packed ones."""
    axes = {axis for load in loads_of(packed) for axis in _row_axes(load)}
    return bool(axes) and all(is_shared(expr, axis, VECTOR_ELEMENTS) for axis in axes)


def _row_axes(load: Load) -> frozenset[str]:
    """Return the axis along which elements or words of a tensor are adjacent."""
    match load.index:
        case (*_, AxisRef(name=name)):
            return frozenset((name,))
        case (*_, Op(kind=OpKind.FLOORDIV, args=(AxisRef(name=name), Const(value=int(per))))) if per <= WORD_BITS:
            return frozenset((name,))
        case _:
            return frozenset()


def _is_in_row(value: PackedValue) -> bool:
    """Return whether the elements of a row have adjacent values, or a word each of adjacent words."""
    is_field = value.packing in (Packing.FIELD, Packing.LOOKUP)
    is_row = _is_row(value.source) and value.source.dtype.bits <= WORD_BITS
    return is_row or (is_field and _is_packed_row(value.source))


def _integer_slots(value: PackedValue, rows: _Rows) -> float:
    """Return the slots of an integer less its zero points."""
    slots = _stored_slots(value, rows)
    for _, zero in value.zeros:
        other = zero.arg if isinstance(zero, Cast) else zero
        if isinstance(other, Const):
            continue
        packed = packed_integer(other, _is_in_row) if not isinstance(other, Load) else None  # along the row too
        prepared = 0.0 if packed is None else _integer_slots(packed, rows)
        slots += prepared / rows.sharing(other) + PAIR_SLOTS
    return slots


def _stored_slots(value: PackedValue, rows: _Rows) -> float:
    """Return the slots of a byte or field as it is stored."""
    if value.packing is Packing.BYTE:
        return BYTE_SLOTS + (SIGN_SLOTS if value.source.dtype.is_signed else 0.0)
    if _is_packed_row(value.source):
        return FIELD_SLOTS
    # each lane shifts a word of its own; by less than a byte, and once, if a thread unpacks all of it
    sharing, bits = rows.sharing(value.source), value.source.dtype.bits
    shifted = bits / WORD_BITS / (sharing if sharing % (bits // value.bits) == 0 else 1)
    return FIELD_SLOTS + shifted + (ROW_SLOTS if sharing == 1 else 0.0)


def _is_row(load: Load) -> bool:
    """Return whether adjacent elements of a row are adjacent in memory."""
    return bool(load.index) and isinstance(load.index[-1], AxisRef)


def _load_instructions(load: Load) -> int:
    """Return the load instructions for the elements of one vector."""
    return max(1, VECTOR_ELEMENTS * load.dtype.bytes // MAX_LOAD_BYTES) if _is_row(load) else 1


def _is_packed_row(word: Load) -> bool:
    """Return whether adjacent words hold adjacent elements of a row."""
    match word:
        case Load(index=(*_, Op(kind=OpKind.FLOORDIV, args=(AxisRef(), Const())))):
            return True
        case _:
            return False


def _is_scale(expr: Expr) -> bool:
    """Return whether a scale is a float of 16 or 8 bits in memory, or is rounded to 16 bits."""
    if isinstance(expr, Cast) and expr.dtype in PAIRS and not expr.implicit:
        return True
    while isinstance(expr, Cast):
        expr = expr.arg
    return isinstance(expr, Load) and (expr.dtype in PAIRS or expr.dtype in FLOAT8)
