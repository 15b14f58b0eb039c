"""Inlining of maps into their readers, and canonical reductions."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from operator import is_

from roller_svc.errors import ScheduleError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    AxisRef,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    children,
    convert,
    iter_subexpressions,
    rewrite,
    with_children,
)
from roller_svc.ir.program import Combine, StatementKind, TensorExpr


def canonicalize(statement: TensorExpr) -> TensorExpr:
    """Rewrite all and any to min and max of truth values, and a reduction over no axis to a map."""
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
    """Return a map's value at an index: its body with the axes replaced, in the type of its tensor."""
    at = {axis.name: i for axis, i in zip(producer.index, index, strict=True) if isinstance(axis, AxisRef)}
    value = _replace_axes(producer.body, at)
    if value.dtype is producer.type.dtype:
        return value
    # Only explicit casts and outputs round: intermediate floats are not rounded.
    return Cast(value, producer.type.dtype, implicit=producer.type.dtype.is_float)


def _replace_axes(expr: Expr, values: Mapping[str, Expr]) -> Expr:
    """Replace axes, which are int32, by values of any type: an index of a load as it is, an operand as int32."""
    if isinstance(expr, AxisRef):
        return convert(values.get(expr.name, expr), expr.dtype)
    if isinstance(expr, Load):
        index = tuple(values.get(i.name, i) if isinstance(i, AxisRef) else _replace_axes(i, values) for i in expr.index)
        return replace(expr, index=index)
    operands = children(expr)
    new = tuple(_replace_axes(child, values) for child in operands)
    return expr if all(map(is_, new, operands)) else with_children(expr, new)


# A statement that has grown by as many nodes still compiles in seconds.
MAX_NODES = 4000


def is_inlinable(statement: TensorExpr, readers: Iterable[TensorExpr]) -> bool:
    """Return whether it is a map, and no reader needs the tensor itself: as a scatter's target, or for a check."""
    if statement.kind is not StatementKind.MAP:
        return False
    return not any(
        reader.target == statement.output
        or any(load.tensor == statement.output and any(load.bounds_checked) for load in reader.reads)
        for reader in readers
    )


def inline_producers(statement: TensorExpr, producers: Mapping[str, TensorExpr]) -> TensorExpr:
    """Replace loads of `producers`, which are inlined already, by their values. Raises ScheduleError if too large."""
    if not any(name in producers for name in statement.reads_tensors):
        return statement
    inlined = inline_loads(statement, producers)
    if inlined is None:
        raise ScheduleError(
            f"inlining into {statement.output} would add more than {MAX_NODES} operations",
            code="schedule-inline",
            hint="compute one of the functions it reads at root",
        )
    return inlined


def inline_loads(statement: TensorExpr, producers: Mapping[str, TensorExpr]) -> TensorExpr | None:
    """Replace loads of `producers`, which are inlined already, by their values. None if too large.

    Maps that read the one before twice double with each of them, and so do nested indices.
    """
    if not any(name in producers for name in statement.reads_tensors):
        return statement
    predicate = () if statement.predicate is None else (statement.predicate,)
    if not is_small_inlined((*statement.index, statement.body, *predicate), producers):
        return None

    def inline_load(node: Expr) -> Expr:
        if isinstance(node, Load) and node.tensor in producers:
            return value_of(producers[node.tensor], node.index)
        return node

    return replace(
        statement,
        index=tuple(rewrite(i, inline_load) for i in statement.index),
        body=rewrite(statement.body, inline_load),
        predicate=None if statement.predicate is None else rewrite(statement.predicate, inline_load),
    )


def is_small_inlined(expressions: Iterable[Expr], producers: Mapping[str, TensorExpr]) -> bool:
    """Return whether expressions grow by at most MAX_NODES nodes when values replace their loads of `producers`."""
    nodes: dict[str, Counter[str | None]] = {}  # of producers: how often each axis occurs; None: other nodes

    def count(expr: Expr) -> int:
        operands = [count(child) for child in children(expr)]
        if not isinstance(expr, Load) or expr.tensor not in producers:
            return 1 + sum(operands)
        producer = producers[expr.tensor]
        if expr.tensor not in nodes:
            nodes[expr.tensor] = Counter(
                node.name if isinstance(node, AxisRef) else None for node in iter_subexpressions(producer.body)
            )
        sizes = {axis.name: size for axis, size in zip(producer.index, operands, strict=True) if isinstance(axis, AxisRef)}
        return sum(times * (1 if name is None else sizes.get(name, 1)) for name, times in nodes[expr.tensor].items())

    return sum(count(expr) - _count_nodes(expr) for expr in expressions) <= MAX_NODES


def _count_nodes(expr: Expr) -> int:
    return sum(1 for _ in iter_subexpressions(expr))
