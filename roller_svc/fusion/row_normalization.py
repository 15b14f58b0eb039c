"""A contraction of rows that are divided by a value of theirs → the quotients as a map, and a contraction of those.

Attention sums e * v / z over rows of exponentials e, z being a row's sum of them. With e divided where it is made, its
maximum, sum and quotients are one walk over each row, and the contraction reads plain memory. On a GPU the factor is
divided as it is staged, which costs nothing there.
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
    """`contraction` multiplies `rows`[..., k] / `divisor` with `other`; `made` is the map that writes the rows."""

    contraction: TensorExpr
    rows: Load
    divisor: Load
    other: Expr
    made: TensorExpr

    @property
    def quotients(self) -> TensorExpr:
        """The rows, already divided: nobody else sees them."""
        axes = {there.name: here for there, here in zip(_names(self.rows), self.made.index, strict=True)}
        divisor = substitute(self.divisor, axes)
        return replace(self.made, body=Op(OpKind.DIV, (self.made.body, divisor), self.made.body.dtype))

    @property
    def product(self) -> TensorExpr:
        body = Op(OpKind.MUL, (self.rows, self.other), self.contraction.body.dtype)
        return replace(self.contraction, body=body)


def divided_rows(statements: Statements, wanted: Collection[str]) -> Statements:
    """The statements with such quotients computed where the rows are. `wanted` tensors stay what they are."""
    for statement in statements:
        division = _division(statement, statements, wanted)
        if division is not None:
            return divided_rows(_rearranged(division, statements), wanted)
    return statements


def _rearranged(division: _Division, statements: Statements) -> Statements:
    """What else read the rows computes them for itself."""
    made = division.made

    def change(node: Expr) -> Expr:
        return value_of(made, node.index) if isinstance(node, Load) and node.tensor == made.output else node

    found: list[TensorExpr] = []
    for statement in statements:
        if statement is division.contraction:
            found += [division.quotients, division.product]
        elif statement is not made:
            found.append(replace(statement, body=rewrite(statement.body, change)))
    return tuple(found)


def _division(statement: TensorExpr, statements: Statements, wanted: Collection[str]) -> _Division | None:
    contraction = as_contraction(statement)
    if contraction is None:
        return None
    for factor, other in ((contraction.a, contraction.b), (contraction.b, contraction.a)):
        match factor:
            case Op(kind=OpKind.DIV, args=(Load() as rows, Load() as divisor)):
                made = next((s for s in statements if s.output == rows.tensor), None)
                if made is None or made.output in wanted or not _is_of_row(rows, divisor, made):
                    continue
                if _only_summed(made, divisor.tensor, statement, statements):
                    return _Division(statement, rows, divisor, other, made)
    return None


def _is_of_row(rows: Load, divisor: Load, made: TensorExpr) -> bool:
    """Whether the rows are read as a map writes them, each point of a row with the same divisor."""
    plain = made.kind is StatementKind.MAP and all(isinstance(i, AxisRef) for i in (*made.index, *rows.index))
    checked = any((*rows.bounds_checked, *divisor.bounds_checked))
    return plain and not checked and made.body.dtype is rows.dtype and axes_of(divisor) < axes_of(rows)


def _only_summed(made: TensorExpr, divisor: str, contraction: TensorExpr, statements: Statements) -> bool:
    """Whether nothing but the contraction and the reduction that gives the divisor reads the rows, each once."""
    readers = [s for s in statements for load in s.reads if load.tensor == made.output]
    if len(readers) != 2 or contraction not in readers:
        return False
    (total,) = [s for s in readers if s is not contraction]
    reduced = total.kind is StatementKind.REDUCE and total.output == divisor and total.points == made.points
    return reduced and statements.index(total) < statements.index(contraction)


def _names(load: Load) -> tuple[AxisRef, ...]:
    return tuple(i for i in load.index if isinstance(i, AxisRef))
