"""Contractions of rows divided by a value of the row → a map that divides, and a contraction of its result (CPU).

Attention accumulates e * v / z over rows of exponentials e with row sum z. If e is divided by its producer, maximum,
sum and division are one pass over each row, and the contraction reads plain memory. On a GPU the operand is divided
while it is staged, at no cost.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from roller_svc.analysis.inlining import value_of
from roller_svc.fusion.contraction import as_contraction
from roller_svc.ir.expr import AxisRef, Expr, Load, Op, OpKind, axes_of, rewrite, substitute
from roller_svc.ir.program import StatementKind, TensorExpr

Statements = tuple[TensorExpr, ...]


@dataclass(frozen=True, slots=True)
class _Division:
    """`contraction` multiplies `rows`[..., k] / `divisor` by `other`; `producer` is the map that writes the rows."""

    contraction: TensorExpr
    rows: Load
    divisor: Load
    other: Expr
    producer: TensorExpr

    @property
    def division_map(self) -> TensorExpr:
        """Return the producer with the division. It has no other readers."""
        axes = {there.name: here for there, here in zip(_names(self.rows), self.producer.index, strict=True)}
        divisor = substitute(self.divisor, axes)
        return replace(self.producer, body=Op(OpKind.DIV, (self.producer.body, divisor), self.producer.body.dtype))

    @property
    def product(self) -> TensorExpr:
        body = Op(OpKind.MUL, (self.rows, self.other), self.contraction.body.dtype)
        return replace(self.contraction, body=body)


def hoist_row_divisions(statements: Statements, outputs: Collection[str]) -> Statements:
    """Move divisions of rows from contractions to the producers of the rows. `outputs` are not changed."""
    for statement in statements:
        division = _match_division(statement, statements, outputs)
        if division is not None:
            return hoist_row_divisions(_rearrange(division, statements), outputs)
    return statements


def _rearrange(division: _Division, statements: Statements) -> Statements:
    """Replace the producer by the division, and inline it into its other readers."""
    producer = division.producer

    def inline_producer(node: Expr) -> Expr:
        return value_of(producer, node.index) if isinstance(node, Load) and node.tensor == producer.output else node

    result: list[TensorExpr] = []
    for statement in statements:
        if statement is division.contraction:
            result += [division.division_map, division.product]
        elif statement is not producer:
            result.append(replace(statement, body=rewrite(statement.body, inline_producer)))
    return tuple(result)


def _match_division(statement: TensorExpr, statements: Statements, outputs: Collection[str]) -> _Division | None:
    contraction = as_contraction(statement)
    if contraction is None:
        return None
    for factor, other in ((contraction.a, contraction.b), (contraction.b, contraction.a)):
        match factor:
            case Op(kind=OpKind.DIV, args=(Load() as rows, Load() as divisor)):
                producer = next((s for s in statements if s.output == rows.tensor), None)
                if producer is None or producer.output in outputs or not _is_of_row(rows, divisor, producer):
                    continue
                if _only_reduced(producer, divisor.tensor, statement, statements):
                    return _Division(statement, rows, divisor, other, producer)
    return None


def _is_of_row(rows: Load, divisor: Load, producer: TensorExpr) -> bool:
    """Return whether a map writes the rows, and all points of a row have the same divisor."""
    is_map = producer.kind is StatementKind.MAP and all(isinstance(i, AxisRef) for i in (*producer.index, *rows.index))
    checked = any((*rows.bounds_checked, *divisor.bounds_checked))
    return is_map and not checked and producer.body.dtype is rows.dtype and axes_of(divisor) < axes_of(rows)


def _only_reduced(producer: TensorExpr, divisor: str, contraction: TensorExpr, statements: Statements) -> bool:
    """Return whether only the contraction and the reduction of the divisor read the rows, each once."""
    readers = [s for s in statements for load in s.reads if load.tensor == producer.output]
    if len(readers) != 2 or contraction not in readers:
        return False
    (total,) = [s for s in readers if s is not contraction]
    reduced = total.kind is StatementKind.REDUCE and total.output == divisor and total.points == producer.points
    return reduced and statements.index(total) < statements.index(contraction)


def _names(load: Load) -> tuple[AxisRef, ...]:
    return tuple(i for i in load.index if isinstance(i, AxisRef))
