"""Maps in place of the loads of them, as a schedule asks for it.

Statements as loops can run them, and a map's value in place of a load of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from roller_svc.errors import ScheduleError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Load, Op, OpKind, iter_subexpressions, rewrite, substitute
from roller_svc.ir.program import Combine, StatementKind, TensorExpr


def canonicalize(statement: TensorExpr) -> TensorExpr:
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


# A statement grows to no more nodes than this: text of this size still compiles in seconds.
MAX_NODES = 4000


def is_inlinable(statement: TensorExpr, readers: Iterable[TensorExpr]) -> bool:
    """Maps are, unless some reader needs the tensor itself: to scatter into, to check an index from data against."""
    if statement.kind is not StatementKind.MAP:
        return False
    return not any(
        reader.target == statement.output
        or any(load.tensor == statement.output and any(load.bounds_checked) for load in reader.reads)
        for reader in readers
    )


def inline_producers(statement: TensorExpr, producers: Mapping[str, TensorExpr]) -> TensorExpr:
    """The statement with its loads of `producers` (whose own loads are replaced already) become their values."""
    if not any(name in producers for name in statement.reads_tensors):
        return statement
    sizes = {name: _nodes(p.body) for name, p in producers.items()}
    total_nodes = sum(sizes[x.tensor] * max([1, *map(_nodes, x.index)]) for x in statement.reads if x.tensor in sizes)
    if total_nodes > MAX_NODES:
        raise ScheduleError(
            f"{statement.output} would grow to more than {MAX_NODES} operations", code="schedule-inline",
            hint="compute one of the functions it reads at root",
        )  # fmt: skip

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


def _nodes(expr: Expr) -> int:
    return sum(1 for _ in iter_subexpressions(expr))
