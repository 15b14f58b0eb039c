"""A row's statements → the values of its points that a reduction computes and a later map wants again: they wait where
the map will write.

In softmax these are the exponentials: computed once, they are stored on the way to their sum and scaled in place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roller_svc.ir.expr import (
    AxisRef,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    axes_of,
    children,
    iter_subexpressions,
    rewrite,
    substitute,
)
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import ref
from roller_svc.ir.program import StatementKind, TensorExpr
from roller_svc.schedule.nest_statements import inner_axes, is_reduction

# At most a few vector instructions: to compute such a value again costs no more than to store and load it.
_CHEAP = frozenset({
    OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.NEG, OpKind.ABS, OpKind.SQUARE, OpKind.RELU, OpKind.MAX, OpKind.MIN,
    OpKind.FMAX, OpKind.FMIN, OpKind.FMA, OpKind.CLIP,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class Kept:
    """`value`, a part of the reduction's body, waits at `index` of the tensor that `map_` writes: both over the axes of
    the reduction. `body`: the map's, with what waits in its place."""

    map_: TensorExpr
    value: Expr
    index: tuple[Expr, ...]
    body: Expr

    @property
    def waiting(self) -> Load:
        return Load(self.map_.output, self.index, self.map_.type.dtype)


def kept_values(group: KernelGroup) -> dict[str, Kept]:
    """What waits of each reduction, by its output. A map has room for one."""
    found: dict[str, Kept] = {}
    for at, map_ in enumerate(group.statements):
        if not _has_room(map_, group):
            continue
        for reduction in group.statements[:at]:
            kept = _kept(reduction, map_, group) if is_reduction(reduction) and reduction.output not in found else None
            if kept is not None:
                found[reduction.output] = kept
                break
    return found


def _has_room(map_: TensorExpr, group: KernelGroup) -> bool:
    """Whether it writes an element of its own, in the type of its values, for each inner point of a row."""
    plain = map_.kind is StatementKind.MAP and map_.output not in group.register_tensors
    narrow = map_.type.dtype.is_narrow_float or not map_.type.dtype.is_float
    return plain and not narrow and bool(inner_axes(map_, group.outer))


def _kept(reduction: TensorExpr, map_: TensorExpr, group: KernelGroup) -> Kept | None:
    mine, theirs = inner_axes(reduction, group.outer), inner_axes(map_, group.outer)
    if [a.extent for a in mine] != [a.extent for a in theirs]:
        return None
    names: dict[str, Expr] = {a.name: ref(b.name) for a, b in zip(mine, theirs, strict=True)}
    back: dict[str, Expr] = {b.name: ref(a.name) for a, b in zip(mine, theirs, strict=True)}
    inner = {a.name for a in mine if a.extent > 1}
    parts = set(iter_subexpressions(map_.body))
    for value in _outermost(reduction.body):
        there = substitute(value, names)
        if value.dtype is map_.type.dtype and inner <= axes_of(value) and there in parts and _is_costly(value):
            body = _replaced(map_.body, there, Load(map_.output, map_.index, map_.type.dtype))
            return Kept(map_, value, tuple(substitute(i, back) for i in map_.index), body)
    return None


def _replaced(expr: Expr, part: Expr, by: Expr) -> Expr:
    return rewrite(expr, lambda node: by if node == part else node)


def _outermost(expr: Expr) -> Iterator[Expr]:
    """Parts of an expression that are computed whatever happens, the largest first."""
    stack = [expr]
    while stack:
        node = stack.pop(0)
        if isinstance(node, Const | AxisRef | Load):
            continue
        yield node
        if isinstance(node, Cast) or (isinstance(node, Op) and node.kind not in (OpKind.LAND, OpKind.LOR)):
            stack += children(node)


def _is_costly(value: Expr) -> bool:
    return any(
        isinstance(node, Op) and node.kind not in _CHEAP and node.dtype.is_float for node in iter_subexpressions(value)
    )
