"""Integers in products that fit into a byte → bytes, which matrix units multiply.

A weight of four bits is computed in int32: `bitwise_and(word >> shift, 15) - 8`. Converted to float32, it has a type that
no unit of 16 bits takes, although its values are those of an int8. A cast to int8 changes no value.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roller_svc.analysis.intervals import bounds
from roller_svc.analysis.operand import value_dtype
from roller_svc.analysis.sum_of_products import sum_of_products
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr, Load, loads_of, rewrite
from roller_svc.ir.program import TensorExpr

BYTES = (DType.INT8, DType.UINT8)  # signed first: more units take it
UNIT_BITS = 16  # of values that units take as they are
MIN_FACTORS = 2


def state_bytes(statement: TensorExpr, *, beside_bytes: bool = False) -> TensorExpr:
    """Return a sum of products with the factors that are integers of a byte cast to it; the same one without any.

    `beside_bytes`: only where another factor is a byte. CPUs have no units that multiply bytes with 16-bit floats.
    """
    form = sum_of_products(statement)
    if form is None or len(form.factors) < MIN_FACTORS:
        return statement
    if beside_bytes and not any(value_dtype(factor) in BYTES for factor in form.factors):
        return statement
    integers = {integer for factor in form.factors if (integer := _wide_integer(factor)) is not None}
    stated = {each: Cast(each, dtype) for each in integers if (dtype := _byte_of(each, statement.extents)) is not None}
    if not stated:
        return statement
    return replace(statement, body=rewrite(statement.body, lambda node: _stated(node, stated)))


def _stated(node: Expr, stated: Mapping[Expr, Expr]) -> Expr:
    byte = stated.get(node)
    return node if byte is None else Cast(byte, node.dtype, implicit=True)


def _wide_integer(factor: Expr) -> Expr | None:
    """Return the computed integer that a factor converts to more than 16 bits; None for other factors."""
    if (value_dtype(factor) or factor.dtype).bits <= UNIT_BITS:
        return None
    while isinstance(factor, Cast) and factor.dtype.is_float:
        factor = factor.arg
    dtype = value_dtype(factor)
    is_wide = dtype is not None and not dtype.is_float and dtype.bits > DType.INT8.bits
    return factor if is_wide and not isinstance(factor, Load) and loads_of(factor) else None


def _byte_of(integer: Expr, extents: Mapping[str, int]) -> DType | None:
    """Return the type of a byte that holds every value of an integer, or None."""
    known = bounds(integer, extents)
    return next((t for t in BYTES if t.integer_range[0] <= known.low and known.high <= t.integer_range[1]), None)
