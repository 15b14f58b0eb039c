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
class TableIndex:
    """`value` is what `mask` leaves of the lowest bits of `source`."""

    value: Expr
    source: Expr
    mask: int


@dataclass(frozen=True, slots=True)
class LookupTables:
    """Vectors of so many `entries`, in which lanes look up that go `along` these axes."""

    entries: int
    varying_axes: Set[str] = frozenset()

    def find_index(self, expr: Expr, *, is_factor: bool = False) -> TableIndex | None:
        """The value of few bits, read from memory, of which alone an expression is a function that a table has; None
        where it is none, or no more than that value itself. `is_factor`: of a product, whose table may have in it what
        is the same for all lanes."""
        fits = ENTRY_BITS * self.entries // 8 in TABLE_BYTES and expr.dtype.compute.bits == ENTRY_BITS
        if not fits or _is_trivial(expr, self.entries):
            return None
        result: TableIndex | None = None
        stack = [expr]
        while stack:
            node = stack.pop()
            if isinstance(node, Const) or (is_factor and self._is_invariant(node)):
                continue
            if (index := _table_index(node, self.entries)) is not None:
                if result is not None and result.value != index.value:
                    return None
                result = index
            elif isinstance(node, Cast | Select) or (isinstance(node, Op) and node.kind in _FOLDED):
                stack += children(node)
            else:
                return None
        return result if result is not None and loads_of(result.value) else None

    def group_invariant_factors(self, expr: Expr) -> Expr:
        """A product of floats with the factors that are the same for all lanes next to one that a table has, so that
        they go into the table: x * (s * f) as s * (x * f). Others as they are: x * f joined to a sum is one
        multiply-add, and would be an addition beside x's table."""
        factors = _factors(expr)
        looked_up = next((f for f in factors if self.find_index(f) is not None), None)
        invariant = [f for f in factors if self._is_invariant(f)]
        others = [f for f in factors if f is not looked_up and not self._is_invariant(f)]
        if looked_up is None or not invariant or not others:
            return expr
        return reduce(_times, [*others, reduce(_times, [*invariant, looked_up])])

    def _is_invariant(self, expr: Expr) -> bool:
        return isinstance(expr, Const) or (bool(self.varying_axes) and self.varying_axes.isdisjoint(axes_of(expr)))


def is_float_product(expr: Expr) -> bool:
    """Whether it is one of floats, whose factors may have tables with fixed values in them."""
    return isinstance(expr, Op) and expr.kind is OpKind.MUL and expr.dtype.is_float


def _factors(expr: Expr) -> list[Expr]:
    """Of a product of floats of one type."""
    if not is_float_product(expr):
        return [expr]
    return [f for arg in children(expr) for f in (_factors(arg) if arg.dtype is expr.dtype else [arg])]


def _times(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.MUL, (a, b), a.dtype)


def _is_trivial(expr: Expr, entries: int) -> bool:
    """Whether nothing is computed of the bits, or nothing yet."""
    unchanged = isinstance(expr, Cast) and expr.implicit and expr.dtype.compute is expr.arg.dtype.compute
    return unchanged or _table_index(expr, entries) is not None


def _table_index(expr: Expr, entries: int) -> TableIndex | None:
    if expr.dtype.is_float or expr.dtype is DType.BOOL:
        return None
    match expr:
        case Op(kind=OpKind.BITAND, args=(x, Const(value=int(mask))) | (Const(value=int(mask)), x)):
            return TableIndex(expr, x, mask) if 0 < mask < entries else None
        case Op(kind=OpKind.MOD, args=(x, Const(value=int(by)))):
            return TableIndex(expr, x, by - 1) if 1 < by <= entries and by & (by - 1) == 0 else None
        case Op(kind=OpKind.SHR, args=(x, Const(value=int(by)))) if 0 <= by < x.dtype.bits and not x.dtype.is_signed:
            mask = (1 << (x.dtype.bits - by)) - 1
            return TableIndex(expr, expr, mask) if mask < entries else None
        case _:
            return None
