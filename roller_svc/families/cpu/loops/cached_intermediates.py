"""Cache intermediates that a row reduction computes and a later map needs again in the map's output buffer.

In softmax these are the exponentials: computed once, stored while they are summed, and scaled in place.
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

# A few vector instructions at most: recomputing the value costs no more than a store and a load.
_CHEAP = frozenset({
    OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.NEG, OpKind.ABS, OpKind.SQUARE, OpKind.RELU, OpKind.MAX, OpKind.MIN,
    OpKind.FMAX, OpKind.FMIN, OpKind.FMA, OpKind.CLIP,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class CachedIntermediate:
    """A cached part of a reduction's body, over the axes of the reduction."""

    map_: TensorExpr  # writes the buffer that caches the value
    value: Expr
    index: tuple[Expr, ...]  # of the cached value in the output of `map_`
    body: Expr  # of the map, with a load of the cached value

    @property
    def cached_load(self) -> Load:
        return Load(self.map_.output, self.index, self.map_.type.dtype)


def find_cached_intermediates(group: KernelGroup) -> dict[str, CachedIntermediate]:
    """Return the cached intermediate of each reduction, by its output; a map's buffer caches one."""
    by_reduction: dict[str, CachedIntermediate] = {}
    for position, map_ in enumerate(group.statements):
        if not _can_cache(map_, group):
            continue
        for reduction in group.statements[:position]:
            if not is_reduction(reduction) or reduction.output in by_reduction:
                continue
            cached = _cached_intermediate(reduction, map_, group)
            if cached is not None:
                by_reduction[reduction.output] = cached
                break
    return by_reduction


def _can_cache(map_: TensorExpr, group: KernelGroup) -> bool:
    """Return whether the map writes one element of its values' type for each inner point of a row."""
    plain = map_.kind is StatementKind.MAP and map_.output not in group.register_tensors
    narrow = map_.type.dtype.is_narrow_float or not map_.type.dtype.is_float
    return plain and not narrow and bool(inner_axes(map_, group.outer))


def _cached_intermediate(reduction: TensorExpr, map_: TensorExpr, group: KernelGroup) -> CachedIntermediate | None:
    reduction_axes, map_axes = inner_axes(reduction, group.outer), inner_axes(map_, group.outer)
    if [a.extent for a in reduction_axes] != [a.extent for a in map_axes]:
        return None
    names: dict[str, Expr] = {a.name: ref(b.name) for a, b in zip(reduction_axes, map_axes, strict=True)}
    to_reduction_axes: dict[str, Expr] = {b.name: ref(a.name) for a, b in zip(reduction_axes, map_axes, strict=True)}
    inner = {a.name for a in reduction_axes if a.extent > 1}
    subexpressions = set(iter_subexpressions(map_.body))
    for value in _outermost(reduction.body):
        map_value = substitute(value, names)
        if value.dtype is map_.type.dtype and inner <= axes_of(value) and map_value in subexpressions and _is_costly(value):
            body = _replaced(map_.body, map_value, Load(map_.output, map_.index, map_.type.dtype))
            return CachedIntermediate(map_, value, tuple(substitute(i, to_reduction_axes) for i in map_.index), body)
    return None


def _replaced(expr: Expr, part: Expr, by: Expr) -> Expr:
    return rewrite(expr, lambda node: by if node == part else node)


def _outermost(expr: Expr) -> Iterator[Expr]:
    """Yield the parts of an expression that are always evaluated, the largest first."""
    stack = [expr]
    while stack:
        node = stack.pop(0)
        if isinstance(node, Const | AxisRef | Load):
            continue
        yield node
        if isinstance(node, Cast) or (isinstance(node, Op) and node.kind not in (OpKind.LAND, OpKind.LOR)):
            stack += children(node)


def _is_costly(value: Expr) -> bool:
    return any(isinstance(node, Op) and node.kind not in _CHEAP and node.dtype.is_float for node in iter_subexpressions(value))
