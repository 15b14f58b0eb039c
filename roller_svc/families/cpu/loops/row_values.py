"""Values that all inner points of a row share → statements of one value per row, before the loops that read them.

Each vector of each row in flight prints its whole statement: a long expression over results of the row would be in the
source once for each of them.
"""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import replace

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    AxisRef,
    Expr,
    Load,
    Op,
    Select,
    children,
    iter_subexpressions,
    loads_of,
    rewrite,
    with_children,
)
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import ref
from roller_svc.ir.program import StatementKind, TensorExpr, TensorType
from roller_svc.schedule.nest_statements import inner_axes, is_reduction, row_dtype, row_tensors


def share_row_values(group: KernelGroup) -> KernelGroup:
    """Return the group with a statement for each value over results of the row that statements need at inner points.

    The values read registers alone, so that they exist where a condition fails. Equal ones are one statement.
    """
    rows, shared = row_tensors(group), dict[str, TensorExpr]()  # by the value's text, in which -0.0 is not 0.0
    statements: list[TensorExpr] = []
    index = tuple(ref(axis.name) for axis in group.outer)

    def share(value: Expr) -> Load:
        if (text := repr(value)) not in shared:
            name = f"{group.name}.value{len(shared)}"
            type_ = TensorType(value.dtype, tuple(axis.extent for axis in group.outer))
            shared[text] = TensorExpr(name, name, StatementKind.MAP, type_, group.outer, index, value)
            statements.append(shared[text])
        return Load(shared[text].output, index, value.dtype)

    def change(expr: Expr) -> Expr:
        if _may_be_shared(expr) and loads_of(expr) and _reads_rows_alone(expr, rows):
            return share(expr)
        return expr if isinstance(expr, Load) else with_children(expr, tuple(map(change, children(expr))))

    for statement in group.statements:
        has_inner_points = math.prod(axis.extent for axis in inner_axes(statement, group.outer)) > 1
        statements.append(replace(statement, body=change(statement.body)) if has_inner_points else statement)
    names = {statement.output for statement in shared.values()}
    return replace(group, statements=tuple(statements), register_tensors=group.register_tensors | names)


def _may_be_shared(value: Expr) -> bool:
    """Return whether a value is computed, and is as wide as a lane: truth values are masks of other widths."""
    is_computed = any(isinstance(part, Op | Select) for part in iter_subexpressions(value))
    return is_computed and value.dtype.compute.bits >= DType.INT32.bits


def _reads_rows_alone(value: Expr, rows: Collection[str]) -> bool:
    """Return whether a value depends on results of the row and constants: arithmetic of axes is exact, and stays."""
    if isinstance(value, Load):
        return value.tensor in rows
    return not isinstance(value, AxisRef) and all(_reads_rows_alone(part, rows) for part in children(value))


def recurring_reductions(group: KernelGroup) -> frozenset[str]:
    """Return the outputs of reductions of a row that differ from others only in the results of the row that they read."""
    rows, outputs = row_tensors(group), dict[str, list[str]]()

    def without_name(node: Expr) -> Expr:
        return replace(node, tensor="") if isinstance(node, Load) and node.tensor in rows else node

    for statement in group.statements:
        if is_reduction(statement) and statement.output in rows:
            axes = inner_axes(statement, group.outer)
            form = (rewrite(statement.body, without_name), axes, statement.combine, statement.accumulator, row_dtype(statement))
            outputs.setdefault(repr(form), []).append(statement.output)
    return frozenset(output for same in outputs.values() if len(same) > 1 for output in same)
