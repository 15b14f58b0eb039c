"""Mark arithmetic of axes that may wrap with a cast to its own type.

Analyses of index arithmetic are exact over the integers, but values and conditions of a program wrap, such as
`i * 1000003`. A cast of integers to their own type marks them; analyses stop there (`Cast.is_exact`). It computes
nothing. Indices need no mark: they are in int64 if necessary.
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


def mark_wrapping(expr: Expr, extents: Mapping[str, int]) -> Expr:
    """Return the value or condition with every sum, difference and product of axes that may wrap marked."""
    return _mark(expr, extents)[0]


def mark_wrapping_index(index: Expr, extents: Mapping[str, int]) -> Expr:
    """Return the index with marks in its conditions; everywhere if the index comes from data."""
    if loads_of(index):
        return mark_wrapping(index, extents)
    if isinstance(index, Op) and index.kind in _CONDITIONS:
        return mark_wrapping(index, extents)
    if isinstance(index, Select):
        then, otherwise = (mark_wrapping_index(part, extents) for part in (index.then, index.otherwise))
        return replace(index, cond=mark_wrapping(index.cond, extents), then=then, otherwise=otherwise)
    parts = children(index)
    return with_children(index, tuple(mark_wrapping_index(part, extents) for part in parts)) if parts else index


def _mark(expr: Expr, extents: Mapping[str, int]) -> tuple[Expr, Bounds | None]:
    """Return the marked expression and its bounds, which are None unless it is an integer of axes alone."""
    if isinstance(expr, Load):
        return replace(expr, index=tuple(mark_wrapping_index(i, extents) for i in expr.index)), None
    if isinstance(expr, Const | AxisRef):
        return expr, None if expr.dtype.is_float else bounds(expr, extents)
    marked = [_mark(part, extents) for part in children(expr)]
    new = with_children(expr, tuple(part for part, _ in marked))
    ranges = [bounds_below for _, bounds_below in marked if bounds_below is not None]
    if expr.dtype.is_float or len(ranges) < len(marked):
        return new, None
    match new:
        case Op(kind=kind) if kind in _MARKED and leaves_type(new, ranges):
            return Cast(new, new.dtype), operation_bounds(new, ranges)
        case Op():
            return new, operation_bounds(new, ranges)
        case Cast(dtype=dtype):
            return new, cast_bounds(ranges[0], dtype)
        case _:
            _, a, b = ranges
            return new, Bounds(min(a.low, b.low), max(a.high, b.high))
