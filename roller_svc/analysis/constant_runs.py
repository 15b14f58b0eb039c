"""Runs of a fused axis along which an expression has one value: 128 positions of `k // 128`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.expr import AxisRef, Const, Expr, Op, OpKind, axes_of, children
from roller_svc.ir.program import Axis


def constant_run(expr: Expr, members: Sequence[Axis]) -> int:
    """Return a length: the expression has one value from each multiple of it up to the next, along the fused axis.

    It is the extent of the axis for an expression that does not vary along it, and 1 if nothing is known.

    Args:
        expr: The expression.
        members: Axes that are fused, outermost first.
    """
    places: dict[str, tuple[int, int]] = {}
    stride = 1
    for axis in reversed(members):
        places[axis.name] = (stride, axis.extent)
        stride *= axis.extent
    return _run(expr, places) or stride


_Places = Mapping[str, tuple[int, int]]  # stride and extent of each member of the fused axis, innermost first


def _run(expr: Expr, places: _Places) -> int:
    """Return the length of a run; 0 if the expression does not vary along the axis."""
    if axes_of(expr).isdisjoint(places):
        return 0
    match expr:
        case AxisRef(name=name):
            return places[name][0]
        case Op(kind=OpKind.FLOORDIV, args=(x, Const(value=int(by)))) if by > 0 and (form := affine(x)) is not None:
            return _run_of_quotient(form, by, places)
        case _:
            return math.gcd(*(_run(each, places) for each in children(expr)))


def _run_of_quotient(form: Affine, by: int, places: _Places) -> int:
    """Return the length of a run of a quotient: longer than that of the dividend if it takes consecutive values."""
    own = [(*places[name], coeff) for name, coeff in form.coeffs if name in places]
    unit = math.gcd(*(stride for stride, _, _ in own))
    others = [coeff for name, coeff in form.coeffs if name not in places]
    count = math.prod(extent for _, extent, _ in own)
    spanned = sum((extent - 1) * stride for stride, extent, _ in own) // unit + 1
    if count != spanned or any(coeff * unit != stride for stride, _, coeff in own):
        return unit
    is_outermost = unit * count == math.prod(extent for _, extent in places.values())
    return unit * math.gcd(by, form.offset, *others, *([] if is_outermost else [count]))
