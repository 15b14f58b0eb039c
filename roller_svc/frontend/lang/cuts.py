"""Arithmetic of axes that may leave its type → the same below a cast to that type, which says so.

Whoever reads index arithmetic takes it exactly, as mathematics. What a program itself asks for wraps: a condition on
`i * 1000003`, an element that is `i * 1000003`. A cast of integers to their own type marks it, and no reader goes on
below one (`Cast.is_exact`). It computes nothing. Indices need no mark: they are in int64 where they must be.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roller_svc.analysis.intervals import Bounds, bounds, cast_bounds, leaves_type, operation_bounds
from roller_svc.ir.expr import (
    COMPARISONS,
    AxisRef,
    Cast,
    Const,
    Expr,
    Load,
    Op,
    OpKind,
    Select,
    children,
    loads_of,
    with_children,
)

_MARKED = frozenset({OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.NEG})
_CONDITIONS = COMPARISONS | {OpKind.LAND, OpKind.LOR, OpKind.LNOT}


def with_cuts(expr: Expr, extents: Mapping[str, int]) -> Expr:
    """Return the value or condition with every sum, difference and product of axes that may wrap below a cut."""
    return _cut(expr, extents)[0]


def index_with_cuts(index: Expr, extents: Mapping[str, int]) -> Expr:
    """Return the index with cuts in the conditions in it, and all over where it comes from data."""
    if loads_of(index):
        return with_cuts(index, extents)
    if isinstance(index, Op) and index.kind in _CONDITIONS:
        return with_cuts(index, extents)
    if isinstance(index, Select):
        then, otherwise = (index_with_cuts(part, extents) for part in (index.then, index.otherwise))
        return replace(index, cond=with_cuts(index.cond, extents), then=then, otherwise=otherwise)
    parts = children(index)
    return with_children(index, tuple(index_with_cuts(part, extents) for part in parts)) if parts else index


def _cut(expr: Expr, extents: Mapping[str, int]) -> tuple[Expr, Bounds | None]:
    """Return the expression with cuts, and its bounds: None for what is no integer of axes alone."""
    if isinstance(expr, Load):
        return replace(expr, index=tuple(index_with_cuts(i, extents) for i in expr.index)), None
    if isinstance(expr, Const | AxisRef):
        return expr, None if expr.dtype.is_float else bounds(expr, extents)
    done = [_cut(part, extents) for part in children(expr)]
    new = with_children(expr, tuple(part for part, _ in done))
    found = [known for _, known in done if known is not None]
    if expr.dtype.is_float or len(found) < len(done):
        return new, None
    match new:
        case Op(kind=kind) if kind in _MARKED and leaves_type(new, found):
            return Cast(new, new.dtype), operation_bounds(new, found)
        case Op():
            return new, operation_bounds(new, found)
        case Cast(dtype=dtype):
            return new, cast_bounds(found[0], dtype)
        case _:
            _, a, b = found
            return new, Bounds(min(a.low, b.low), max(a.high, b.high))
