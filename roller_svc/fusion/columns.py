"""Columns of short rows, such as x[i, 0], x[i, 1] and x[i, 2] → places in one dimension, x[3 * i + c].

There one access of a thread may load the columns of several points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from roller_svc.analysis.columns import LINE_BYTES
from roller_svc.fusion.axis_fusion import FusedAxes
from roller_svc.ir.affine import affine
from roller_svc.ir.expr import Const, Expr, Load, rewrite
from roller_svc.ir.index import add, mul, num
from roller_svc.ir.program import StatementKind, TensorExpr, TensorType


def flatten_columns(fused: FusedAxes) -> FusedAxes:
    """Make one dimension of the last two of inputs of maps that are read at constant places along the last."""
    if any(s.kind is not StatementKind.MAP for s in fused.statements):
        return fused
    while tensors := _column_tensors(fused):
        types = dict(fused.types)
        for name in tensors:
            *outer, rows, columns = types[name].shape
            types[name] = TensorType(types[name].dtype, (*outer, rows * columns))
        statements = tuple(_flatten_loads(s, {name: fused.types[name].shape[-1] for name in tensors}) for s in fused.statements)
        fused = FusedAxes(statements, types)
    return fused


def _column_tensors(fused: FusedAxes) -> frozenset[str]:
    """Return the inputs of which several columns, and columns alone, are read."""
    written = {s.output for s in fused.statements}
    loads: dict[str, list[Load]] = {}
    for load in (load for s in fused.statements for load in s.reads):
        loads.setdefault(load.tensor, []).append(load)
    return frozenset(name for name, reads in loads.items() if name not in written and _are_columns(reads, fused.types[name]))


def _are_columns(loads: Sequence[Load], type_: TensorType) -> bool:
    if len(type_.shape) < 2 or type_.shape[-1] * type_.dtype.bytes > LINE_BYTES:
        return False
    in_columns = all(isinstance(load.index[-1], Const) and not any(load.bounds_checked[-2:]) for load in loads)
    in_rows = all(affine(load.index[-2]) is not None for load in loads)
    return in_columns and in_rows and len({load.index[-1] for load in loads}) > 1


def _flatten_loads(statement: TensorExpr, columns: Mapping[str, int]) -> TensorExpr:
    """Return the statement with one index instead of the last two of tensors with these columns."""

    def change(node: Expr) -> Expr:
        if not isinstance(node, Load) or node.tensor not in columns:
            return node
        place = add(mul(node.index[-2], num(columns[node.tensor])), node.index[-1])
        return replace(node, index=(*node.index[:-2], place), bounds_checked=node.bounds_checked[:-1])

    return replace(statement, body=rewrite(statement.body, change))
