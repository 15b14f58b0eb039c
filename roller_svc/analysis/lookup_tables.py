"""Lookup tables of functions of a few bits, such as 4-bit weights (T-MAC: Wei et al., arXiv:2407.00088), or of a byte.

All values of the function fit in one vector register, which a shuffle indexes, or in two if a tensor has them. A factor
that is the same in all lanes can multiply the table instead of its entries; the table is then recomputed when the
factor changes. A tensor of bytes with an element for each byte fills four registers.
"""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass
from functools import reduce

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import COMPARISONS, Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, children, loads_of

ENTRY_BITS = 32  # of an entry and of an index
TABLE_BYTES = (32, 64)  # vectors with a full-permute instruction
BYTE_ENTRIES = 256  # of a table with an element for each byte
BYTE_PERMUTATIONS = 2  # of two registers each, for bytes of a table of four
# Bytes that AVX2 looks up at once in such a table, the fewest for which it does, and the instructions: 8 shuffles, 8
# blends, and what prepares their operands.
SHUFFLED_BYTES, MIN_SHUFFLED_BYTES, SHUFFLES_OF_TABLE = 16, 8, 24
# operators that compilers fold for constants
_FOLDED = COMPARISONS | {
    OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.DIV, OpKind.NEG, OpKind.SHL, OpKind.SHR, OpKind.LAND, OpKind.LOR,
    OpKind.LNOT, OpKind.BITAND, OpKind.BITOR, OpKind.BITXOR, OpKind.BITNOT, OpKind.MAX, OpKind.MIN, OpKind.ABS,
    OpKind.RELU, OpKind.SQUARE,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TableIndex:
    """The index of a table: `value` is `source` & `mask`, its lowest bits."""

    value: Expr
    source: Expr
    mask: int


@dataclass(frozen=True, slots=True)
class LookupTables:
    """Lookup tables that each fill one vector register with `entries` entries."""

    entries: int
    varying_axes: Set[str] = frozenset()  # axes that vary over the lanes

    def find_index(self, expr: Expr, *, is_factor: bool = False) -> TableIndex | None:
        """Return the index of a table that has all values of the expression, or None.

        The index comes from memory, and the expression is more than the index itself. With `is_factor` the expression
        is a factor of a product, and its table may contain values that are the same in all lanes.
        """
        fits = ENTRY_BITS * self.entries // 8 in TABLE_BYTES and expr.dtype.compute.bits == ENTRY_BITS
        if not fits or _is_trivial(expr, self.entries):
            return None
        result: TableIndex | None = None
        stack = [expr]
        while stack:
            node = stack.pop()
            if isinstance(node, Const) or (is_factor and self._is_invariant(node)):
                continue
            if (index := self._index_of(node)) is not None:
                if result is not None and result.value != index.value:
                    return None
                result = index
            elif isinstance(node, Cast | Select) or (isinstance(node, Op) and node.kind in _FOLDED):
                stack += children(node)
            else:
                return None
        return result if result is not None and loads_of(result.value) else None

    def _index_of(self, node: Expr) -> TableIndex | None:
        """Return the index that the node is, or of the tensor that it loads from: a table of one or two vectors."""
        if not isinstance(node, Load):
            return _table_index(node, self.entries)
        if len(node.index) != 1 or any(node.bounds_checked):
            return None
        index = _table_index(without_casts(node.index[0]), 2 * self.entries)
        return index if index is not None and index.mask + 1 in (self.entries, 2 * self.entries) else None

    def group_invariant_factors(self, expr: Expr) -> Expr:
        """Group the factors of a float product that are the same in all lanes with one that a table has.

        They become part of the table: s * (x * f) as x * (s * f). A product without another factor is not changed: it
        is part of a multiply-add, and would become an addition.
        """
        factors = _factors(expr)
        looked_up = next((f for f in factors if self.find_index(f) is not None), None)
        invariant = [f for f in factors if self._is_invariant(f)]
        others = [f for f in factors if f is not looked_up and not self._is_invariant(f)]
        if looked_up is None or not invariant or not others:
            return expr
        return reduce(_times, [*others, reduce(_times, [*invariant, looked_up])])

    def _is_invariant(self, expr: Expr) -> bool:
        return isinstance(expr, Const) or (bool(self.varying_axes) and self.varying_axes.isdisjoint(axes_of(expr)))


def find_byte_index(load: Load) -> Expr | None:
    """Return the byte, chosen by data, that is the index of a load; None for other loads."""
    if len(load.index) != 1 or any(load.bounds_checked):
        return None
    index = without_casts(load.index[0])
    return index if index.dtype is DType.UINT8 and loads_of(index) else None


def without_casts(index: Expr) -> Expr:
    """Return an index without conversions that keep its value."""
    while isinstance(index, Cast) and index.is_exact:
        index = index.arg
    return index


def is_float_product(expr: Expr) -> bool:
    """Return whether it is a product of floats."""
    return isinstance(expr, Op) and expr.kind is OpKind.MUL and expr.dtype.is_float


def _factors(expr: Expr) -> list[Expr]:
    """Return the factors of a product of floats of one type."""
    if not is_float_product(expr):
        return [expr]
    return [f for arg in children(expr) for f in (_factors(arg) if arg.dtype is expr.dtype else [arg])]


def _times(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.MUL, (a, b), a.dtype)


def _is_trivial(expr: Expr, entries: int) -> bool:
    """Return whether the expression is only the index, or a conversion that does nothing."""
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
