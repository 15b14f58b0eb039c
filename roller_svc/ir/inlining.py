"""Statements as loops can run them, and a map's value in place of a load of it."""

from __future__ import annotations

from dataclasses import replace

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Op, OpKind, substitute
from roller_svc.ir.program import Combine, StatementKind, TensorExpr


def plain(statement: TensorExpr) -> TensorExpr:
    """all and any as min and max of truth values; a reduction over no axis as the map that it is."""
    if statement.kind is not StatementKind.REDUCE:
        return statement
    if statement.combine in (Combine.ALL, Combine.ANY):
        dtype = statement.body.dtype
        zero = Const(0.0 if dtype.is_float else 0, dtype)
        truth = Cast(Op(OpKind.NE, (statement.body, zero), DType.INT8), dtype, implicit=True)
        combine = Combine.MIN if statement.combine is Combine.ALL else Combine.MAX
        statement = replace(statement, body=truth, combine=combine)
    if not statement.reduced:
        return replace(statement, kind=StatementKind.MAP, combine=None)
    return statement


def value_of(producer: TensorExpr, index: tuple[Expr, ...]) -> Expr:
    """A map's value at an index: its body with the axes replaced, in the type it would have been stored in."""
    at = {axis.name: i for axis, i in zip(producer.index, index, strict=True) if isinstance(axis, AxisRef)}
    value = substitute(producer.body, at)
    if value.dtype is producer.type.dtype:
        return value
    # Only casts and outputs round: a float that was only passing through keeps its digits.
    return Cast(value, producer.type.dtype, implicit=producer.type.dtype.is_float)
