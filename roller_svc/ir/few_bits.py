"""Functions of a few bits of an integer, as of a weight's four: all their values fit a vector of a table."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import COMPARISONS, Cast, Const, Expr, Op, OpKind, Select, children, loads_of

ENTRY_BITS = 32  # of a table's entry, and of what chooses one
TABLE_BYTES = (32, 64)  # vectors of which any lane may become any other in one instruction
# what compilers compute of constants
_FOLDED = COMPARISONS | {
    OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.DIV, OpKind.NEG, OpKind.SHL, OpKind.SHR, OpKind.LAND, OpKind.LOR,
    OpKind.LNOT, OpKind.BITAND, OpKind.BITOR, OpKind.BITXOR, OpKind.BITNOT, OpKind.MAX, OpKind.MIN, OpKind.ABS,
    OpKind.RELU, OpKind.SQUARE,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class FewBits:
    """`value` is what `mask` leaves of the lowest bits of `source`."""

    value: Expr
    source: Expr
    mask: int


def table_of(expr: Expr, entries: int) -> FewBits | None:
    """The value of few bits, read from memory, of which alone an expression is a function that a table of so many
    `entries` has; None where it is none, or no more than that value itself."""
    fits = ENTRY_BITS * entries // 8 in TABLE_BYTES and expr.dtype.compute.bits == ENTRY_BITS
    if not fits or _is_plain(expr, entries):
        return None
    found: FewBits | None = None
    stack = [expr]
    while stack:
        node = stack.pop()
        if (few := _few_bits(node, entries)) is not None:
            if found is not None and found.value != few.value:
                return None
            found = few
        elif isinstance(node, Cast | Select) or (isinstance(node, Op) and node.kind in _FOLDED):
            stack += children(node)
        elif not isinstance(node, Const):
            return None
    return found if found is not None and loads_of(found.value) else None


def _is_plain(expr: Expr, entries: int) -> bool:
    """Whether nothing is computed of the bits, or nothing yet."""
    unchanged = isinstance(expr, Cast) and expr.implicit and expr.dtype.compute is expr.arg.dtype.compute
    return unchanged or _few_bits(expr, entries) is not None


def _few_bits(expr: Expr, entries: int) -> FewBits | None:
    if expr.dtype.is_float or expr.dtype is DType.BOOL:
        return None
    match expr:
        case Op(kind=OpKind.BITAND, args=(x, Const(value=int(mask))) | (Const(value=int(mask)), x)):
            return FewBits(expr, x, mask) if 0 < mask < entries else None
        case Op(kind=OpKind.MOD, args=(x, Const(value=int(by)))):
            return FewBits(expr, x, by - 1) if 1 < by <= entries and by & (by - 1) == 0 else None
        case Op(kind=OpKind.SHR, args=(x, Const(value=int(by)))) if 0 <= by < x.dtype.bits and not x.dtype.is_signed:
            mask = (1 << (x.dtype.bits - by)) - 1
            return FewBits(expr, expr, mask) if mask < entries else None
        case _:
            return None
