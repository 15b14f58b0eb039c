"""Statements → the same with neighbouring axes fused (ROLLER, axis fusion).

Two axes that stand next to each other in every tensor that has them, or are absent from it, act as one. Tensors are
dense, so that fusing two of their dimensions is only another view of the same memory.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Op, OpKind, rewrite, walk
from roller_svc.ir.program import Axis, StatementKind, TensorExpr, TensorType


@dataclass(frozen=True, slots=True)
class Fused:
    statements: tuple[TensorExpr, ...]
    types: dict[str, TensorType]  # the views, of every tensor that the statements touch


def fuse_axes(statements: tuple[TensorExpr, ...], types: dict[str, TensorType]) -> Fused:
    """Fuse until no pair is left. All statements share axis names; axes are fused in all of them or in none."""
    state = Fused(statements, dict(types))
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
    """Pairs of axes that some tensor holds side by side as bare indices."""
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


def _fuse_pair(state: Fused, outer: Axis, inner: Axis) -> Fused | None:
    places: dict[str, int] = {}
    for statement in state.statements:
        names = {a.name for a in statement.axes}
        if (outer.name in names) != (inner.name in names):
            return None
        if outer.name not in names:
            continue
        if statement.kind is StatementKind.SCATTER or not _agrees(statement, state.types, outer, inner, places):
            return None
    if any(_checks_merged_dims(load, places) for s in state.statements for load in s.reads):
        return None
    taken = {a.name for s in state.statements for a in s.axes}
    name = f"{outer.name}_{inner.name}"
    while name in taken or name in state.types:
        name += "_"
    axis = Axis(name, outer.extent * inner.extent, outer.kind)
    statements = tuple(_rewritten(s, outer, inner, axis, places) for s in state.statements)
    types = {
        tensor: _merged_type(type_, places[tensor]) if tensor in places else type_
        for tensor, type_ in state.types.items()
    }
    return Fused(statements, types)


def _agrees(
    statement: TensorExpr, types: dict[str, TensorType], outer: Axis, inner: Axis, places: dict[str, int]
) -> bool:
    """Whether both axes occur only as neighbouring bare indices, and in each tensor at one place (noted in places)."""
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
        if not follows or types[tensor].shape[d + 1] != inner.extent or places.setdefault(tensor, d) != d:
            return False
        bare += 2
    nodes = [statement.body, *statement.index]
    mentions = sum(
        1 for part in nodes for n in walk(part) if isinstance(n, AxisRef) and n.name in (outer.name, inner.name)
    )
    return mentions == bare


def _checks_merged_dims(load: Load, places: dict[str, int]) -> bool:
    """A run-time check is of one dimension: merged with another it could not tell which was left."""
    d = places.get(load.tensor)
    return d is not None and any(load.checked[d : d + 2])


def _merged_type(type_: TensorType, d: int) -> TensorType:
    shape = type_.shape
    return TensorType(type_.dtype, (*shape[:d], shape[d] * shape[d + 1], *shape[d + 2 :]))


def _rewritten(statement: TensorExpr, outer: Axis, inner: Axis, axis: Axis, places: dict[str, int]) -> TensorExpr:
    def merged(tensor: str, index: tuple[Expr, ...]) -> tuple[Expr, ...]:
        d = places.get(tensor)
        if d is None:
            return index
        return (*index[:d], _flat(index[d], index[d + 1], outer, inner, axis), *index[d + 2 :])

    def change(node: Expr) -> Expr:
        if isinstance(node, Load) and node.tensor in places:
            d = places[node.tensor]
            checked = (*node.checked[:d], *node.checked[d + 1 :])
            return replace(node, index=merged(node.tensor, node.index), checked=checked)
        return node

    axes: list[Axis] = []
    for a in statement.axes:
        if a.name == outer.name:
            axes.append(replace(axis, kind=a.kind))  # one statement's reduced axis is another's spatial one
        elif a.name != inner.name:
            axes.append(a)
    type_ = statement.type
    if statement.output in places:
        type_ = _merged_type(type_, places[statement.output])
    return replace(
        statement, axes=tuple(axes), type=type_, index=merged(statement.output, statement.index),
        body=rewrite(statement.body, change),
    )  # fmt: skip


def _flat(first: Expr, second: Expr, outer: Axis, inner: Axis, axis: Axis) -> Expr:
    if first == AxisRef(outer.name) and second == AxisRef(inner.name):
        return AxisRef(axis.name)
    if isinstance(first, Const) and isinstance(second, Const):
        return Const(int(first.value) * inner.extent + int(second.value), DType.INT32)
    scaled = Op(OpKind.MUL, (first, Const(inner.extent, DType.INT32)), DType.INT32)
    return Op(OpKind.ADD, (scaled, second), DType.INT32)
