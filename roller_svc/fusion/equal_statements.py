"""Statements that compute what an earlier one does → one statement, which the readers of both read.

Operators that share steps, such as top_k_indices and top_k_values of one tensor, state them twice.
"""

from __future__ import annotations

from dataclasses import replace

from roller_svc.ir.expr import AxisRef, Expr, substitute
from roller_svc.ir.program import StatementKind, TensorExpr, TensorProgram, rename_tensors


def merge_equal_statements(program: TensorProgram) -> TensorProgram:
    """Return the program without the maps and reductions whose intermediate results earlier ones have.

    Targets of scatters stay: a scatter may update one in place.
    """
    single = {output.tensor for output in program.outputs} | {s.target for s in program.statements}
    first: dict[str, str] = {}  # a statement with its names removed → the tensor that it writes
    renamed: dict[str, str] = {}
    statements: list[TensorExpr] = []

    for statement in program.statements:
        read = rename_tensors(statement, renamed) if renamed else statement
        is_pure = statement.kind is not StatementKind.SCATTER and statement.output not in single
        same = first.setdefault(repr(_anonymous(read)), statement.output) if is_pure else statement.output
        if same == statement.output:
            statements.append(read)
        else:
            renamed[statement.output] = same
    return replace(program, statements=tuple(statements)) if renamed else program


def _anonymous(statement: TensorExpr) -> TensorExpr:
    """Return the statement without names: axes are numbered, and the result has none."""
    names: dict[str, Expr] = {axis.name: AxisRef(f".{place}") for place, axis in enumerate(statement.axes)}
    return replace(
        statement,
        output="",
        name="",
        axes=tuple(replace(axis, name=f".{place}") for place, axis in enumerate(statement.axes)),
        index=tuple(substitute(index, names) for index in statement.index),
        body=substitute(statement.body, names),
    )
