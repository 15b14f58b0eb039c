"""Constant columns of a product whose panels stay integers of 4 or 8 bits, from which the micro-kernel computes them.

`(q[n, k] - z[n, k // 32]) * s[n, k // 32]` has one integer that varies with each k. What else it is made of has one value
along runs of k, and a buffer has it for each run. A product of few rows then reads what is stored, not what it multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from roller_svc.analysis.constant_runs import constant_run
from roller_svc.analysis.lookup_tables import LookupTables
from roller_svc.analysis.packed_values import BYTES, packed_field
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, children, loads_of, substitute, with_children
from roller_svc.ir.index import mul, num
from roller_svc.ir.program import Axis

MIN_RUN = 16  # points along k with one scale: shorter runs have as many values as integers
FIELD_BITS, WORD = 4, DType.INT32
FIELDS = WORD.bits // FIELD_BITS  # of a word, along k
_ARITHMETIC = frozenset({OpKind.ADD, OpKind.SUB, OpKind.MUL})
_COMPUTED = frozenset({DType.FLOAT32, DType.INT32})  # types of a vector's lanes


@dataclass(frozen=True, slots=True)
class PackedColumns:
    """How a column is computed from an integer that varies along k."""

    expr: Expr
    integer: Expr
    bits: int  # 4 or 8, of the integer in its panel
    run: int  # points along k, from each multiple of it on, with one value of each of `values`
    values: tuple[Expr, ...]

    @property
    def points(self) -> int:
        """Points along k in one element of a panel."""
        return FIELDS if self.bits == FIELD_BITS else 1

    def words(self, points: int) -> int:
        """Return the elements of a panel for each column that hold `points` integers."""
        return points // self.points

    @property
    def dtype(self) -> DType:
        """Return the type of an element of a panel."""
        return WORD if self.bits == FIELD_BITS else self.byte_dtype

    @property
    def granule(self) -> int:
        """Points along k in whole elements of panels, of which a run has some."""
        return FIELDS if self.bits == FIELD_BITS else MIN_RUN

    @property
    def byte_dtype(self) -> DType:
        return self.integer.dtype if self.integer.dtype in (DType.INT8, DType.UINT8) else DType.UINT8

    @property
    def bytes_per_point(self) -> float:
        """Bytes that a column has in memory for each k."""
        return self.bits / 8 + sum(value.dtype.bytes for value in self.values) / self.run

    def source(self, places: Sequence[Mapping[str, Expr]]) -> Expr:
        """Return an element of a panel: the integer at a place, or a word with those at eight places along k."""
        fields = [substitute(self.integer, place) for place in places]
        if self.bits != FIELD_BITS:
            (integer,) = fields
            return integer if integer.dtype is self.dtype else Cast(integer, self.dtype)
        pairs = zip(fields[::2], fields[1::2], strict=True)
        return Op(OpKind.WORD, tuple(_byte(low, high) for low, high in pairs), WORD)

    def computed(self, element: Load, field: Expr, values: Sequence[Expr]) -> Expr:
        """Return the column from an element of its panel, the number of the field in it, and the values of its run."""
        integer: Expr = element
        if self.bits == FIELD_BITS:
            shifted = Op(OpKind.SHR, (element, mul(field, num(FIELD_BITS))), WORD)
            integer = Op(OpKind.BITAND, (shifted, Const((1 << FIELD_BITS) - 1, WORD)), WORD)
        if integer.dtype is not self.integer.dtype:
            integer = Cast(integer, self.integer.dtype, implicit=True)
        return _replaced(self.expr, {self.integer: integer, **dict(zip(self.values, values, strict=True))})

    def vector_operations(self, lanes: int) -> int:
        """Return the instructions that compute a vector of columns from registers."""
        element = Load("packed", (num(0),), self.dtype)
        return _operations(self.computed(element, num(1), self.values), LookupTables(lanes), self.values)


def packed_columns(expr: Expr, members: Sequence[Axis]) -> PackedColumns | None:
    """Return how an operand over the `members` of k is computed from integers of few bits; None for other operands."""
    integers, values = list[Expr](), list[Expr]()
    if any(any(load.bounds_checked) for load in loads_of(expr)) or not _split(expr, members, integers, values):
        return None
    if len(set(integers)) != 1:
        return None
    field, parts = packed_field(integers[0]), tuple(dict.fromkeys(values))
    depth = math.prod(axis.extent for axis in members)
    run = math.gcd(*(length for each in parts if (length := constant_run(each, members)) < depth)) or depth
    is_word = field is not None and field.bits == FIELD_BITS and run % FIELDS == depth % FIELDS == 0
    return PackedColumns(expr, integers[0], FIELD_BITS if is_word else DType.INT8.bits, run, parts) if run >= MIN_RUN else None


def _split(expr: Expr, members: Sequence[Axis], integers: list[Expr], values: list[Expr]) -> bool:
    """Return whether vectors of 32-bit lanes compute an expression from integers of few bits and values of runs.

    The lists grow: integers that vary along k, and the other parts.
    """
    if isinstance(expr, Const):
        return True
    field = packed_field(expr)
    is_integer = (isinstance(expr, Load) and expr.dtype in BYTES) or (field is not None and field.bits <= DType.INT8.bits)
    if expr.dtype in _COMPUTED and constant_run(expr, members) >= MIN_RUN:
        values.append(expr)
        return True
    if is_integer:
        integers.append(expr)
        return True
    is_computed = isinstance(expr, Cast) or (isinstance(expr, Op) and expr.kind in _ARITHMETIC)
    return is_computed and expr.dtype in _COMPUTED and all(_split(each, members, integers, values) for each in children(expr))


def _byte(low: Expr, high: Expr) -> Expr:
    """Return the byte of two fields."""
    low, high = (each if each.dtype is WORD else Cast(each, WORD, implicit=True) for each in (low, high))
    shifted = Op(OpKind.SHL, (high, Const(FIELD_BITS, WORD)), WORD)
    return Cast(Op(OpKind.BITOR, (low, shifted), WORD), DType.UINT8)


def _replaced(expr: Expr, parts: Mapping[Expr, Expr]) -> Expr:
    if (part := parts.get(expr)) is not None:
        return part
    return with_children(expr, tuple(_replaced(child, parts) for child in children(expr)))


def _operations(expr: Expr, tables: LookupTables, known: Collection[Expr]) -> int:
    if expr in known or isinstance(expr, Const | Load):
        return 0
    index = tables.find_index(expr)
    if index is not None:
        return 1 + _operations(index.source, tables, known)
    return 1 + sum(_operations(child, tables, known) for child in children(expr))
