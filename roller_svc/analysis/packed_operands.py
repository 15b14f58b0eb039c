"""Operand of a contraction → whether it is unpacked in pairs of 16-bit floats, and its instructions for an element.

`codegen/cuda/packed_lanes.py` prints such values. This is what the performance model knows of them: the form, without
the alignment of a loop.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from roller_svc.analysis.index_ranges import range_of
from roller_svc.analysis.linear import linear
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, children, loads_of
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
TABLE_ENTRIES = 16
MEMORY_LOOKUP_SLOTS = 4.0  # shift, mask, address and load
FLOAT8 = (DType.FLOAT8_E4M3FN, DType.FLOAT8_E5M2)
FLOAT8_ARCH = Arch("sm_", 89)  # first that converts pairs of e4m3 (PTX ISA, "cvt")
# A conversion of two float8 at half the rate of other instructions (CUDA Programming Guide, table of throughputs), and
# a shift for every second one.
FLOAT8_CONVERSION_SLOTS = 1.25
WORD_BITS, FIELD_BITS = 32, (1, 2, 4, 8)
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
    return arch >= FLOAT8_ARCH or all(
        load.dtype is not DType.FLOAT8_E4M3FN or not _is_row(load) for load in loads_of(expr)
    )


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
    """Return a field of bits with an offset, scales and a guard, or its values by a table; None for others."""
    match expr:
        case Cast(arg=Load(dtype=source) as load) if source in FLOAT8 and _is_row(load):
            return _Form(FLOAT8_CONVERSION_SLOTS) if dtype is DType.FLOAT16 else None
        case Select(then=then, otherwise=Const(value=0)):
            inner = _form(then, dtype, rows)
            return None if inner is None else replace(inner, slots=inner.slots + PAIR_SLOTS)
        case Cast(arg=arg) if arg.dtype.is_float:
            return _form(arg, dtype, rows)
        case Cast(arg=arg):
            slots = _integer_slots(arg, rows)
            return None if slots is None else _Form(slots)
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
        case Load(index=(index,)) if is_table_index(index) and _integer_slots(index, rows) is not None:
            slots = register_lookup_slots(expr, dtype)
            return _Form(MEMORY_LOOKUP_SLOTS, is_pair=False) if slots is None else _Form(slots)
        case _:
            return None


def is_looked_up(load: Load, dtype: DType) -> bool:
    """Return whether a load is a look-up in registers, of an operand whose elements are `dtype`."""
    return register_lookup_slots(load, dtype) is not None


def register_lookup_slots(load: Load, dtype: DType) -> float | None:
    """Return the slots of a look-up in registers, as `dtype` or as float16; None for other loads."""
    return lookup_slots(load, dtype) or lookup_slots(load, DType.FLOAT16)


def lookup_slots(load: Load, dtype: DType) -> float | None:
    """Return the slots of a value that four bits look up in registers, as `dtype`; None for other loads."""
    is_narrower = dtype is DType.FLOAT16 and load.dtype in FLOAT8
    if len(load.index) != 1 or not is_table_index(load.index[0]) or not (load.dtype is dtype or is_narrower):
        return None
    return LOOKUP_SLOTS[1 if load.dtype is DType.FLOAT8_E5M2 else 2]


def without_fitting_casts(index: Expr) -> Expr:
    """Return an index without conversions that keep its value."""
    while isinstance(index, Cast) and not index.dtype.is_float and _fits(index):
        index = index.arg
    return index


def _fits(cast: Cast) -> bool:
    """Return whether an integer conversion keeps every value."""
    bounds = range_of(cast.arg, {})
    if cast.is_exact or bounds is None:
        return cast.is_exact
    least, greatest = cast.dtype.integer_range
    return least <= bounds[0] and bounds[1] <= greatest


def is_table_index(index: Expr) -> bool:
    """Return whether an index is a field of four bits, as that of a table in registers."""
    match without_fitting_casts(index):
        case Op(kind=OpKind.BITAND, args=(Op(kind=OpKind.SHR, args=(word, _)), Const(value=15))):
            return bool(loads_of(word))
        case _:
            return False


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


def _integer_slots(expr: Expr, rows: _Rows) -> float | None:
    match expr:
        case Cast(arg=arg):
            return _integer_slots(arg, rows)
        case Op(kind=OpKind.SUB | OpKind.ADD, args=(x, y)):
            integers, other = _integer_slots(x, rows), y.arg if isinstance(y, Cast) else y
            if integers is None or isinstance(other, Const):
                return integers
            zeros = None if isinstance(other, Load) else _integer_slots(other, rows)  # packed along the row too
            return integers + (zeros or 0.0) / rows.sharing(other) + PAIR_SLOTS
        case Op(kind=OpKind.BITAND, args=(Op(kind=OpKind.SHR, args=(word, _)), Const(value=int(mask)))):
            if _is_packed_row(word):
                return FIELD_SLOTS
            bits, field = _word_bits(word), mask.bit_length()
            if bits == 0 or field not in FIELD_BITS or mask != (1 << field) - 1:
                return None
            # each lane shifts a word of its own; by less than a byte, and once, if a thread unpacks all of it
            sharing = rows.sharing(word)
            shifted = bits / WORD_BITS / (sharing if sharing % (bits // field) == 0 else 1)
            return FIELD_SLOTS + shifted + (ROW_SLOTS if sharing == 1 else 0.0)
        case Load(dtype=dtype) if dtype.bits == 8 and _is_row(expr):
            return BYTE_SLOTS + (SIGN_SLOTS if dtype.is_signed else 0.0)
        case _:
            return None


def _is_row(load: Load) -> bool:
    """Return whether adjacent elements of a row are adjacent in memory."""
    return bool(load.index) and isinstance(load.index[-1], AxisRef)


def _load_instructions(load: Load) -> int:
    """Return the load instructions for the elements of one vector."""
    return max(1, VECTOR_ELEMENTS * load.dtype.bytes // MAX_LOAD_BYTES) if _is_row(load) else 1


def _word_bits(word: Expr) -> int:
    """Return the bits of words of which adjacent elements of a row have one each; 0 for other operands."""
    while isinstance(word, Cast):
        word = word.arg
    is_row = isinstance(word, Load) and _is_row(word)
    return word.dtype.bits if is_row and word.dtype.bits <= WORD_BITS else 0


def _is_packed_row(word: Expr) -> bool:
    """Return whether adjacent words hold adjacent elements of a row."""
    while isinstance(word, Cast):
        word = word.arg
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
