"""Maps over ragged rows → the same over one flat axis, so that threads take whole vectors.

A row whose length is no multiple of the widest access starts at no aligned place. Where the tensors that matter have
the row and the axis before it side by side, the two become one; what has only one of them finds it by division.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from roller_svc.construct.axis_fusion import Fused
from roller_svc.ir.build import div, mod, ref
from roller_svc.ir.expr import AxisRef, Expr, Load, children, with_children
from roller_svc.ir.program import Axis, StatementKind, TensorExpr, TensorType

WIDEST_BYTES = 16  # of one access of a thread (LD.128)
MOST = 0.75  # of the bytes lie in tensors that the flat axis walks from end to end
MAX_POINTS = 2**31 - 1  # a flat place is computed in 32 bits


def flat_rows(fused: Fused) -> Fused:
    """Rows joined with the axis before them until they are whole vectors, or nothing more can be joined."""
    while (pair := _ragged(fused)) is not None and (flat := _flattened(fused, *pair)) is not None:
        fused = flat
    return fused


def _ragged(fused: Fused) -> tuple[Axis, Axis] | None:
    """The last two axes of the results, where the last is no multiple of a vector."""
    first = fused.statements[0]
    axes = {a.name: a for a in first.axes}
    if any(s.kind is not StatementKind.MAP or {a.name for a in s.axes} != set(axes) for s in fused.statements):
        return None
    names = [i.name for i in first.index[-2:] if isinstance(i, AxisRef)]
    if len(names) != 2 or names[0] == names[1]:
        return None
    outer, row = axes[names[0]], axes[names[1]]
    narrowest = min(fused.types[s.output].dtype.bytes for s in fused.statements)
    whole = row.extent % (WIDEST_BYTES // narrowest) == 0
    return None if whole or outer.extent * row.extent > MAX_POINTS else (outer, row)


def _flattened(fused: Fused, outer: Axis, row: Axis) -> Fused | None:
    places: dict[str, int | None] = {}
    for statement in fused.statements:
        for tensor, index, checked in _uses(statement):
            d = _place(index, checked, fused.types[tensor], (outer, row))
            if places.setdefault(tensor, d) != d:
                return None
    if any(places[s.output] is None for s in fused.statements):
        return None
    joined = {tensor: d for tensor, d in places.items() if d is not None}
    moved = {tensor: fused.types[tensor].bytes for tensor in places}
    if sum(moved[tensor] for tensor in joined) < MOST * sum(moved.values()):
        return None
    taken = {a.name for a in fused.statements[0].axes} | fused.types.keys()
    name = f"{outer.name}_{row.name}"
    while name in taken:
        name += "_"
    flat = Axis(name, outer.extent * row.extent, outer.kind)
    values = {outer.name: div(ref(name), row.extent), row.name: mod(ref(name), row.extent)}
    types = dict(fused.types)
    for tensor, d in joined.items():
        shape = types[tensor].shape
        types[tensor] = TensorType(types[tensor].dtype, (*shape[:d], math.prod(shape[d : d + 2]), *shape[d + 2 :]))
    statements = tuple(_rewritten(s, (outer, row, flat), joined, values, types) for s in fused.statements)
    return Fused(statements, types)


def _uses(statement: TensorExpr) -> list[tuple[str, tuple[Expr, ...], tuple[bool, ...]]]:
    reads = [(load.tensor, load.index, load.checked) for load in statement.reads]
    return [(statement.output, statement.index, ()), *reads]


def _place(
    index: tuple[Expr, ...], checked: tuple[bool, ...], type_: TensorType, pair: tuple[Axis, Axis]
) -> int | None:
    """The dimension that the outer axis of the pair indexes, the row the next; None where they do not."""
    outer, row = pair
    for d in range(len(index) - 1):
        if index[d] == AxisRef(outer.name) and index[d + 1] == AxisRef(row.name):
            return d if type_.shape[d + 1] == row.extent and not any(checked[d : d + 2]) else None
    return None


def _rewritten(
    statement: TensorExpr, axes: tuple[Axis, Axis, Axis], joined: Mapping[str, int], values: Mapping[str, Expr],
    types: Mapping[str, TensorType],
) -> TensorExpr:  # fmt: skip
    outer, row, flat = axes

    def changed(expr: Expr) -> Expr:
        if isinstance(expr, AxisRef):
            return values.get(expr.name, expr)
        if isinstance(expr, Load) and expr.tensor in joined:
            checked = (*expr.checked[: joined[expr.tensor]], *expr.checked[joined[expr.tensor] + 1 :])
            return replace(expr, index=merged(expr.tensor, expr.index), checked=checked)
        parts = children(expr)
        return with_children(expr, tuple(changed(part) for part in parts)) if parts else expr

    def merged(tensor: str, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        d = joined[tensor]
        return (*(changed(i) for i in index[:d]), ref(flat.name), *(changed(i) for i in index[d + 2 :]))

    kept = tuple(flat if a.name == outer.name else a for a in statement.axes if a.name != row.name)
    return replace(
        statement, axes=kept, type=types[statement.output], index=merged(statement.output, statement.index),
        body=changed(statement.body),
    )  # fmt: skip
