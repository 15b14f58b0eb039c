"""Scatters that overwrite, on devices whose threads write in any order → two scatters without a conflict.

t[a[i], j] =. x[i, j] becomes w[a[i], 0] >=. i and t[a[i], j] =. x[i, j].when([w[a[i], 0] == i]): the first finds the
last writer of each row, which alone writes in the second. Dimensions whose index is an axis of its own, such as j, have
the same writers along them, so `w` has extent 1 there.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from roller_svc.analysis.intervals import widen_to_int64
from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Expr, Load, Op, OpKind, axes_of
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.program import Axis, Combine, StatementKind, TensorExpr, TensorType

MAX_SERIAL_POINTS = 32  # that one thread visits in order: further launches take longer


def order_scatters(statements: Sequence[TensorExpr]) -> tuple[TensorExpr, ...]:
    """Return the statements with each scatter that may overwrite an element twice as two that keep its order."""
    return tuple(part for statement in statements for part in _order(statement))


def ordered_axes(statement: TensorExpr) -> tuple[Axis, ...]:
    """Return the axes along which a scatter may overwrite an element; () where the order of writes does not matter."""
    is_plain = statement.kind is StatementKind.SCATTER and statement.combine is None
    if not is_plain or statement.writes_once or _is_injective(statement):
        return ()
    shared = dict(_shared_dimensions(statement)).values()
    return tuple(axis for axis in statement.axes if axis.name not in shared)


def _order(statement: TensorExpr) -> tuple[TensorExpr, ...]:
    axes = ordered_axes(statement)
    if math.prod(axis.extent for axis in axes) <= MAX_SERIAL_POINTS:
        return (statement,)
    shared = dict(_shared_dimensions(statement))
    dtype = DType.INT32 if math.prod(a.extent for a in axes) <= DType.INT32.integer_range[1] else DType.INT64
    position, name = _position(axes, dtype), f"{statement.output}.writer"
    index = tuple(num(0) if d in shared else i for d, i in enumerate(statement.index)) or (num(0),)
    shape = tuple(1 if d in shared else extent for d, extent in enumerate(statement.type.shape)) or (1,)
    last = replace(
        statement,
        output=name,
        type=TensorType(dtype, shape),
        axes=axes,
        index=index,
        body=position,
        combine=Combine.MAX,
        target=None,
        in_place=False,
    )
    is_last: Expr = Op(OpKind.EQ, (Load(name, index, dtype, statement.bounds_checked), position), DType.INT8)
    if statement.predicate is not None:
        is_last = Op(OpKind.LAND, (statement.predicate, is_last), DType.INT8)
    return last, replace(statement, predicate=is_last, writes_once=True)


def _shared_dimensions(statement: TensorExpr) -> Iterator[tuple[int, str]]:
    """Yield the dimensions whose index is an axis that no other index and no condition depends on, with the axis."""
    for d, index in enumerate(statement.index):
        others = (*statement.index[:d], *statement.index[d + 1 :], statement.predicate)
        if isinstance(index, AxisRef) and not any(index.name in axes_of(x) for x in others if x is not None):
            yield d, index.name


def _position(axes: Sequence[Axis], dtype: DType) -> Expr:
    """Return the number of a point in the program's order."""
    position: Expr = num(0)
    for axis in axes:
        position = add(mul(position, num(axis.extent)), ref(axis.name))
    return position if dtype is DType.INT32 else widen_to_int64(position)


def _is_injective(statement: TensorExpr) -> bool:
    """Return whether affine indices alone tell that no two points write one element."""
    extents, known = statement.extents, {axis.name for axis in statement.axes if axis.extent == 1}
    forms = [form for form in map(affine, statement.index) if form is not None]
    while forms:
        found = next((form for form in forms if _determines(form, known, extents)), None)
        if found is None:
            break
        forms.remove(found)
        known.update(name for name, _ in found.coeffs)
    return known >= extents.keys()


def _determines(form: Affine, known: set[str], extents: dict[str, int]) -> bool:
    """Return whether the value of an index determines its axes, as digits of a number, if some are known."""
    span = 0
    for coefficient, name in sorted((abs(c), name) for name, c in form.coeffs if name not in known):
        if coefficient <= span:
            return False
        span += coefficient * (extents[name] - 1)
    return True
