"""Functions of a few bits of an integer, as of a weight's four: all their values fit a vector of a table.

What multiplies such a function, and is the same for all lanes, may multiply the table: made anew when it changes.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import reduce

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import COMPARISONS, Cast, Const, Expr, Op, OpKind, Select, axes_of, children, loads_of

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


@dataclass(frozen=True, slots=True)
class Tables:
    """Vectors of so many `entries`, in which lanes look up that go `along` these axes."""

    entries: int
    along: Set[str] = frozenset()

    def of(self, expr: Expr, *, is_factor: bool = False) -> FewBits | None:
        """The value of few bits, read from memory, of which alone an expression is a function that a table has; None
        where it is none, or no more than that value itself. `is_factor`: of a product, whose table may have in it what
        is the same for all lanes."""
        fits = ENTRY_BITS * self.entries // 8 in TABLE_BYTES and expr.dtype.compute.bits == ENTRY_BITS
        if not fits or _is_plain(expr, self.entries):
            return None
        found: FewBits | None = None
        stack = [expr]
        while stack:
            node = stack.pop()
            if isinstance(node, Const) or (is_factor and self._is_fixed(node)):
                continue
            if (few := _few_bits(node, self.entries)) is not None:
                if found is not None and found.value != few.value:
                    return None
                found = few
            elif isinstance(node, Cast | Select) or (isinstance(node, Op) and node.kind in _FOLDED):
                stack += children(node)
            else:
                return None
        return found if found is not None and loads_of(found.value) else None

    def product(self, expr: Expr) -> Expr:
        """A product of floats with the factors that are the same for all lanes next to one that a table has, so that
        they go into the table: x * (s * f) as s * (x * f). Others as they are: x * f joined to a sum is one
        multiply-add, and would be an addition beside x's table."""
        factors = _factors(expr)
        looked_up = next((f for f in factors if self.of(f) is not None), None)
        fixed = [f for f in factors if self._is_fixed(f)]
        others = [f for f in factors if f is not looked_up and not self._is_fixed(f)]
        if looked_up is None or not fixed or not others:
            return expr
        return reduce(_times, [*others, reduce(_times, [*fixed, looked_up])])

    def _is_fixed(self, expr: Expr) -> bool:
        return isinstance(expr, Const) or (bool(self.along) and self.along.isdisjoint(axes_of(expr)))


def is_product(expr: Expr) -> bool:
    """Whether it is one of floats, whose factors may have tables with fixed values in them."""
    return isinstance(expr, Op) and expr.kind is OpKind.MUL and expr.dtype.is_float


def _factors(expr: Expr) -> list[Expr]:
    """Of a product of floats of one type."""
    if not is_product(expr):
        return [expr]
    return [f for arg in children(expr) for f in (_factors(arg) if arg.dtype is expr.dtype else [arg])]


def _times(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.MUL, (a, b), a.dtype)


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
