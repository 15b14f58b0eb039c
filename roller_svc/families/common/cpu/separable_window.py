"""Window reductions without weights, separated: rows of a window are combined while a line is staged.

A maximum over 3 x 3 elements is that over 3 rows, then over 3 columns: 4 operations in place of 8. Rows are combined
before the elements of strided columns are sorted.
"""

from __future__ import annotations

from dataclasses import replace
from functools import reduce

from roller_svc.families.common.cpu.window_reduction import Plane, PlaneWindowDim, WindowedSum
from roller_svc.ir.expr import Cast, Expr, Load, Op, Select, substitute
from roller_svc.ir.index import add, le, logical_and, mul, num, ref
from roller_svc.ir.program import COMBINE_OPS, Combine

MAX_ROWS = 9  # of a window; each is a load in the staged value


def separate(window: WindowedSum) -> WindowedSum:
    """Return the reduction with the rows of its windows combined in the staged value, or the reduction itself.

    A staged line then belongs to one line of outputs, and the last dimension alone has windows.
    """
    if len(window.window_dims) < 2 or len(window.planes) != 1:
        return window
    (plane,), rows = window.planes, window.window_dims[-2]
    combine, accumulator = window.statement.combine, window.statement.accumulator
    is_plain = window.body == Load(plane.name, (), plane.dtype) and plane.dtype is accumulator
    is_idempotent = combine in (Combine.MAX, Combine.MIN)
    if not is_plain or not (is_idempotent or (combine is Combine.SUM and plane.margin.value == 0)):
        return window
    if combine is None or rows.inner is None or not 1 < rows.taps <= MAX_ROWS:
        return window
    if plane.work.is_expensive and rows.taps > rows.stride:  # computed once for each tap
        return window
    values = [_value_of_tap(plane, rows, tap, len(window.window_dims) - 2) for tap in range(rows.taps)]
    value = reduce(lambda a, b: Op(COMBINE_OPS[combine], (a, b), plane.dtype), values)
    still = PlaneWindowDim(rows.axis, rows.extent)
    inside = (*plane.inside[:-2], (0, rows.extent), plane.inside[-1])
    lines = min(rows.stride, rows.taps)
    separated = replace(plane, value=value, inside=inside, lines=lines)
    return replace(window, window_dims=(*window.window_dims[:-2], still, window.window_dims[-1]), planes=(separated,))


def _value_of_tap(plane: Plane, rows: PlaneWindowDim, tap: int, dim: int) -> Expr:
    """Return the value under one tap of the rows, a function of the output line; outside of the plane the margin."""
    line, first = ref(rows.position_name), rows.dilation * tap + rows.offset
    position = add(mul(line, num(rows.stride)), num(first))
    value = substitute(plane.value, {rows.position_name: position})
    value = value if value.dtype is plane.dtype else Cast(value, plane.dtype, implicit=True)
    low, high = plane.inside[dim]
    is_inside: Expr | None = None
    if first < low:
        is_inside = logical_and(is_inside, le(num(low), position))
    if first + rows.stride * (rows.extent - 1) >= high:
        is_inside = logical_and(is_inside, le(add(position, num(1)), num(high)))
    if is_inside is None:
        return value
    return Select(is_inside, value, plane.margin, plane.dtype)
