"""Maps in place of the loads of them, as a schedule asks for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from roller_svc.errors import ScheduleError
from roller_svc.ir.expr import Expr, Load, rewrite, walk
from roller_svc.ir.inlining import value_of
from roller_svc.ir.program import StatementKind, TensorExpr

# A statement grows to no more nodes than this: text of this size still compiles in seconds.
MAX_NODES = 4000


def is_inlinable(statement: TensorExpr, readers: Iterable[TensorExpr]) -> bool:
    """Maps are, unless some reader needs the tensor itself: to scatter into, to check an index from data against."""
    if statement.kind is not StatementKind.MAP:
        return False
    return not any(
        reader.target == statement.output
        or any(load.tensor == statement.output and any(load.checked) for load in reader.reads)
        for reader in readers
    )


def inlined_body(statement: TensorExpr, producers: Mapping[str, TensorExpr]) -> TensorExpr:
    """The statement with its loads of `producers` (whose own loads are replaced already) become their values."""
    if not any(name in producers for name in statement.reads_tensors):
        return statement
    sizes = {name: _nodes(p.body) for name, p in producers.items()}
    grown = sum(sizes[x.tensor] * max([1, *map(_nodes, x.index)]) for x in statement.reads if x.tensor in sizes)
    if grown > MAX_NODES:
        raise ScheduleError(
            f"{statement.output} would grow to more than {MAX_NODES} operations", code="schedule-inline",
            hint="compute one of the functions it reads at root",
        )  # fmt: skip

    def change(node: Expr) -> Expr:
        if isinstance(node, Load) and node.tensor in producers:
            return value_of(producers[node.tensor], node.index)
        return node

    return replace(
        statement,
        index=tuple(rewrite(i, change) for i in statement.index),
        body=rewrite(statement.body, change),
        predicate=None if statement.predicate is None else rewrite(statement.predicate, change),
    )


def _nodes(expr: Expr) -> int:
    return sum(1 for _ in walk(expr))
