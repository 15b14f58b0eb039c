"""Axis fusion (ROLLER), and flattening of maps over ragged rows.

Two axes act as one if they are adjacent in every tensor that has them. Tensors are dense, so fusing two dimensions is
another view of the same memory.

Rows whose length is not a multiple of the widest access are misaligned. If most bytes are in tensors that have the row
and the axis before it, the two become one flat axis; tensors with only one of them are indexed by division.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import (
    AxisRef,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    children,
    iter_subexpressions,
    rewrite,
    with_children,
)
from roller_svc.ir.index import div, mod, ref
from roller_svc.ir.program import Axis, StatementKind, TensorExpr, TensorType


@dataclass(frozen=True, slots=True)
class FusedAxes:
    statements: tuple[TensorExpr, ...]
    types: dict[str, TensorType]  # views of all accessed tensors


def fuse_axes(statements: tuple[TensorExpr, ...], types: dict[str, TensorType]) -> FusedAxes:
    """Fuse axes until no pair is left. Statements share axis names; a pair is fused in all of them or in none."""
    state = FusedAxes(statements, dict(types))
    merged = True
    while merged:
        merged = False
        for outer, inner in _neighbours(state.statements):
            fused = _fuse_pair(state, outer, inner)
            if fused is not None:
                state, merged = fused, True
                break
    return state


def _neighbours(statements: tuple[TensorExpr, ...]) -> list[tuple[Axis, Axis]]:
    """Return the pairs of axes that are adjacent plain indices of some tensor."""
    pairs: dict[tuple[str, str], tuple[Axis, Axis]] = {}
    for statement in statements:
        axes = {a.name: a for a in statement.axes}
        for index in (statement.index, *(load.index for load in statement.reads)):
            for a, b in itertools.pairwise(index):
                if isinstance(a, AxisRef) and isinstance(b, AxisRef) and a.name != b.name:
                    first, second = axes[a.name], axes[b.name]
                    if first.kind is second.kind:
                        pairs[a.name, b.name] = (first, second)
    return list(pairs.values())


def _fuse_pair(state: FusedAxes, outer: Axis, inner: Axis) -> FusedAxes | None:
    dims: dict[str, int] = {}
    for statement in state.statements:
        names = {a.name for a in statement.axes}
        if (outer.name in names) != (inner.name in names):
            return None
        if outer.name not in names:
            continue
        if statement.kind is StatementKind.SCATTER or not _agrees(statement, state.types, outer, inner, dims):
            return None
    if any(_checks_merged_dims(load, dims) for s in state.statements for load in s.reads):
        return None
    used = {a.name for s in state.statements for a in s.axes}
    name = f"{outer.name}_{inner.name}"
    while name in used or name in state.types:
        name += "_"
    axis = Axis(name, outer.extent * inner.extent, outer.kind)
    statements = tuple(_rewrite_statement(s, outer, inner, axis, dims) for s in state.statements)
    types = {tensor: _merged_type(type_, dims[tensor]) if tensor in dims else type_ for tensor, type_ in state.types.items()}
    return FusedAxes(statements, types)


def _agrees(statement: TensorExpr, types: dict[str, TensorType], outer: Axis, inner: Axis, dims: dict[str, int]) -> bool:
    """Return whether both axes occur only as adjacent plain indices, at one dimension of each tensor (kept in dims)."""
    kinds = {a.name: a.kind for a in statement.axes}
    if kinds[outer.name] is not kinds[inner.name]:
        return False
    uses = [(load.tensor, load.index) for load in statement.reads]
    uses.append((statement.output, statement.index))
    bare = 0
    for tensor, index in uses:
        at = [d for d, i in enumerate(index) if isinstance(i, AxisRef) and i.name == outer.name]
        if not at:
            continue
        d = at[0]
        follows = d + 1 < len(index) and index[d + 1] == AxisRef(inner.name)
        if not follows or types[tensor].shape[d + 1] != inner.extent or dims.setdefault(tensor, d) != d:
            return False
        bare += 2
    nodes = [statement.body, *statement.index]
    mentions = sum(
        1 for part in nodes for n in iter_subexpressions(part) if isinstance(n, AxisRef) and n.name in (outer.name, inner.name)
    )
    return mentions == bare


def _checks_merged_dims(load: Load, dims: dict[str, int]) -> bool:
    """Return whether a merged dimension has a run-time check, which is of one dimension only."""
    d = dims.get(load.tensor)
    return d is not None and any(load.bounds_checked[d : d + 2])


def _merged_type(type_: TensorType, d: int) -> TensorType:
    shape = type_.shape
    return TensorType(type_.dtype, (*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]))


def _rewrite_statement(statement: TensorExpr, outer: Axis, inner: Axis, axis: Axis, dims: dict[str, int]) -> TensorExpr:
    def merged(tensor: str, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        d = dims.get(tensor)
        if d is None:
            return index
        return (*index[:d], _flat(index[d], index[d + 1], outer, inner, axis), *index[d + 2 :])

    def change(node: Expr) -> Expr:
        if isinstance(node, Load) and node.tensor in dims:
            d = dims[node.tensor]
            checked = (*node.bounds_checked[:d], *node.bounds_checked[d + 1 :])
            return replace(node, index=merged(node.tensor, node.index), bounds_checked=checked)
        return node

    axes: list[Axis] = []
    for a in statement.axes:
        if a.name == outer.name:
            axes.append(replace(axis, kind=a.kind))  # one statement's reduced axis is another's spatial one
        elif a.name != inner.name:
            axes.append(a)
    type_ = statement.type
    if statement.output in dims:
        type_ = _merged_type(type_, dims[statement.output])
    return replace(
        statement,
        axes=tuple(axes),
        type=type_,
        index=merged(statement.output, statement.index),
        body=rewrite(statement.body, change),
    )


def _flat(first: Expr, second: Expr, outer: Axis, inner: Axis, axis: Axis) -> Expr:
    if first == AxisRef(outer.name) and second == AxisRef(inner.name):
        return AxisRef(axis.name)
    if isinstance(first, Const) and isinstance(second, Const):
        return Const(int(first.value) * inner.extent + int(second.value), DType.INT32)
    scaled = Op(OpKind.MUL, (first, Const(inner.extent, DType.INT32)), DType.INT32)
    return Op(OpKind.ADD, (scaled, second), DType.INT32)


WIDEST_BYTES = 16  # of one access of a thread (LD.128)
MIN_FLAT_FRACTION = 0.75  # of the bytes that are in tensors contiguous along the flat axis
MAX_POINTS = 2**31 - 1  # flat indices are computed in 32 bits


def flatten_rows(fused: FusedAxes) -> FusedAxes:
    """Fuse rows with the axis before them until they are whole vectors or nothing more can be fused."""
    while (pair := _ragged_pair(fused)) is not None and (flat := _flatten_pair(fused, *pair)) is not None:
        fused = flat
    return fused


def _ragged_pair(fused: FusedAxes) -> tuple[Axis, Axis] | None:
    """Return the last two axes of the results if the last is not a multiple of a vector."""
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


def _flatten_pair(fused: FusedAxes, outer: Axis, row: Axis) -> FusedAxes | None:
    dims: dict[str, int | None] = {}
    for statement in fused.statements:
        for tensor, index, checked in _uses(statement):
            d = _pair_dimension(index, checked, fused.types[tensor], (outer, row))
            if dims.setdefault(tensor, d) != d:
                return None
    if any(dims[s.output] is None for s in fused.statements):
        return None
    flat_dims = {tensor: d for tensor, d in dims.items() if d is not None}
    bytes_by_tensor = {tensor: fused.types[tensor].bytes for tensor in dims}
    if sum(bytes_by_tensor[tensor] for tensor in flat_dims) < MIN_FLAT_FRACTION * sum(bytes_by_tensor.values()):
        return None
    used = {a.name for a in fused.statements[0].axes} | fused.types.keys()
    name = f"{outer.name}_{row.name}"
    while name in used:
        name += "_"
    flat = Axis(name, outer.extent * row.extent, outer.kind)
    values = {outer.name: div(ref(name), row.extent), row.name: mod(ref(name), row.extent)}
    types = dict(fused.types)
    for tensor, d in flat_dims.items():
        shape = types[tensor].shape
        types[tensor] = TensorType(types[tensor].dtype, (*shape[:d], math.prod(shape[d : d + 2]), *shape[d + 2 :]))
    statements = tuple(_flatten_statement(s, (outer, row, flat), flat_dims, values, types) for s in fused.statements)
    return FusedAxes(statements, types)


def _uses(statement: TensorExpr) -> list[tuple[str, tuple[Expr, ...], tuple[bool, ...]]]:
    reads = [(load.tensor, load.index, load.bounds_checked) for load in statement.reads]
    return [(statement.output, statement.index, ()), *reads]


def _pair_dimension(index: tuple[Expr, ...], checked: tuple[bool, ...], type_: TensorType, pair: tuple[Axis, Axis]) -> int | None:
    """Return the dimension indexed by the outer axis if the row indexes the next one, else None."""
    outer, row = pair
    for d in range(len(index) - 1):
        if index[d] == AxisRef(outer.name) and index[d + 1] == AxisRef(row.name):
            return d if type_.shape[d + 1] == row.extent and not any(checked[d : d + 2]) else None
    return None


def _flatten_statement(
    statement: TensorExpr,
    axes: tuple[Axis, Axis, Axis],
    flat_dims: Mapping[str, int],
    values: Mapping[str, Expr],
    types: Mapping[str, TensorType],
) -> TensorExpr:
    outer, row, flat = axes

    def changed(expr: Expr) -> Expr:
        if isinstance(expr, AxisRef):
            return values.get(expr.name, expr)
        if isinstance(expr, Load) and expr.tensor in flat_dims:
            checked = (
                *expr.bounds_checked[: flat_dims[expr.tensor]],
                *expr.bounds_checked[flat_dims[expr.tensor] + 1 :],
            )
            return replace(expr, index=merged(expr.tensor, expr.index), bounds_checked=checked)
        parts = children(expr)
        return with_children(expr, tuple(changed(part) for part in parts)) if parts else expr

    def merged(tensor: str, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        d = flat_dims[tensor]
        return (*(changed(i) for i in index[:d]), ref(flat.name), *(changed(i) for i in index[d + 2 :]))

    flat_axes = tuple(flat if a.name == outer.name else a for a in statement.axes if a.name != row.name)
    return replace(
        statement,
        axes=flat_axes,
        type=types[statement.output],
        index=merged(statement.output, statement.index),
        body=changed(statement.body),
    )
