"""Constant columns of dot products as unsigned integers of 4 or 8 bits plus a number: `q - 8`, or `q - z[k // 32]`.

The integers are the unsigned bytes of dot products; a shift and a mask make words of bytes of those of 4 bits. The number
times the sum of a row's elements, which all columns share, is what a sum begins with. So each run of k has a sum for each
row, which is computed, in place of one for each column, which would be read.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.analysis.constant_runs import constant_run
from roller_svc.analysis.fused_axis import member_values
from roller_svc.analysis.packed_values import integer_bounds, packed_field
from roller_svc.families.common.cpu.dot import WORD, DotOperands, cast_element
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, substitute
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import add, mul, num

FIELD_BITS, BYTE_BITS = 4, 8
_SIGN_BITS = Const(0x80808080 - (1 << 32), WORD)
_FIELDS = 0x0F0F0F0F  # the lower field of each byte of a word
ONES = Const(0x01010101, WORD)  # four bytes


@dataclass(frozen=True, slots=True)
class PackedWords:
    """Say how words of a column are read: an element is an unsigned integer plus `offset`."""

    integer: Expr  # a field; or a signed byte, whose sign bit is flipped
    bits: int
    offset: Expr  # an int8
    run: int  # points along k, from each multiple of it on, with one offset
    dot: DotOperands  # of the unsigned integers

    @property
    def words(self) -> int:
        """Words of dot products in one word of a panel."""
        return BYTE_BITS // self.bits

    @property
    def operations(self) -> float:
        """Instructions that make a word: a mask, and a shift of all but the first one."""
        return 1 + (self.words - 1) / self.words if self.words > 1 else 0.0

    def source(self, k: TileAxis, first: Expr) -> Expr:
        """Return a word of a panel: the fields of the first word of dot products are the lower ones of its bytes."""
        group = self.dot.group
        parts = [substitute(self.integer, member_values(k, add(first, num(i)))) for i in range(self.words * group)]
        if self.bits == BYTE_BITS:
            return Op(OpKind.BITXOR, (Op(OpKind.WORD, tuple(parts), WORD), _SIGN_BITS), WORD)
        return Op(OpKind.WORD, tuple(_byte(low, high) for low, high in zip(parts[:group], parts[group:], strict=True)), WORD)

    def word(self, stored: Load, number: Expr) -> Expr:
        """Return a word of dot products from a word of a panel."""
        if self.bits == BYTE_BITS:
            return stored
        shifted = Op(OpKind.SHR, (stored, mul(number, num(FIELD_BITS))), WORD)
        return Op(OpKind.BITAND, (shifted, Const(_FIELDS, WORD)), WORD)

    @property
    def is_shared(self) -> bool:
        """Whether all elements have one offset."""
        return isinstance(self.offset, Const)

    def first_sum(self, row_sum: Expr, offset: Expr) -> Expr:
        """Return what a sum begins with, from the sum of a row's elements and an offset."""
        return Op(OpKind.MUL, (Cast(offset, DType.INT32), row_sum), DType.INT32)


def packed_words(operand: Expr, k: TileAxis, dot: DotOperands | None) -> PackedWords | None:
    """Return how words of a constant operand are read; None where words do not end with k, or the other is unsigned."""
    if dot is None or (dot.a, dot.b) != (DType.INT8, DType.INT8) or k.extent % dot.group:
        return None
    element, unsigned = cast_element(operand, dot.b), replace(dot, b=DType.UINT8)
    least, _ = dot.b.integer_range
    return _packed_fields(element, k, unsigned) or PackedWords(element, BYTE_BITS, Const(least, DType.INT8), k.extent, unsigned)


def _packed_fields(element: Expr, k: TileAxis, dot: DotOperands) -> PackedWords | None:
    """Return how an int8 is read from fields; None where it has none that end with k."""
    match _without_casts(element):
        case Op(kind=OpKind.SUB | OpKind.ADD as kind, args=(field, number)):
            field, number = map(_without_casts, (field, number))
        case _:
            return None
    packed, bounds, run = packed_field(field), _bounds(number), constant_run(number, k.members)
    if packed is None or packed.bits != FIELD_BITS or bounds is None:
        return None
    _, greatest = DType.INT8.integer_range
    is_byte = max(map(abs, bounds)) <= greatest - (1 << FIELD_BITS)
    found = PackedWords(field, FIELD_BITS, number if kind is OpKind.ADD else _negative(number), run, dot)
    return found if is_byte and all(points % (found.words * dot.group) == 0 for points in (run, k.extent)) else None


def _bounds(number: Expr) -> tuple[int, int] | None:
    return (int(number.value),) * 2 if isinstance(number, Const) else integer_bounds(number)


def _negative(number: Expr) -> Expr:
    if isinstance(number, Const):
        return Const(-number.value, DType.INT8)
    return Cast(Op(OpKind.NEG, (number,), number.dtype), DType.INT8)


def _without_casts(expr: Expr) -> Expr:
    """Return an integer without conversions to others, which keep its lowest byte."""
    while isinstance(expr, Cast) and not expr.arg.dtype.is_float and expr.dtype is not DType.BOOL:
        expr = expr.arg
    return expr


def _byte(low: Expr, high: Expr) -> Expr:
    low, high = (each if each.dtype is WORD else Cast(each, WORD, implicit=True) for each in (low, high))
    shifted = Op(OpKind.SHL, (high, Const(FIELD_BITS, WORD)), WORD)
    return Cast(Op(OpKind.BITOR, (low, shifted), WORD), DType.UINT8)
