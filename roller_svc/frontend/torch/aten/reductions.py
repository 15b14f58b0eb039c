"""ATen operators that reduce dimensions."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.torch.call import AtenCall, Converter
from roller_svc.ir.dtype import DType


def _axes(call: AtenCall, rank: int) -> tuple[int, ...]:
    return call.dimensions("dim", rank) if "dim" in call.arguments else tuple(range(rank))


def _keepdim(call: AtenCall) -> bool:
    return "keepdim" in call.arguments and call.flag("keepdim")


def _reduced(call: AtenCall, operator: str, x: Operand, axes: Sequence[int]) -> Operand:
    return call.run(operator, x, axis=tuple(axes), keepdims=_keepdim(call)) if axes else x


def _reduce(call: AtenCall, operator: str) -> Operand:
    """Convert a reduction in the result's type: sums of whole numbers are int64."""
    x = call.cast(call.x)
    return _reduced(call, operator, x, _axes(call, x.rank))


def _extremum(call: AtenCall, operator: str) -> Operand:
    x = call.x
    if x.dtype is DType.BOOL:
        operator = "reduce_any" if operator == "reduce_max" else "reduce_all"
    return call.cast(_reduced(call, operator, x, _axes(call, x.rank)))


def _extremum_with_index(call: AtenCall, operator: str) -> list[Operand | None]:
    """Convert `max.dim`: the values, and the first place of each."""
    x, keepdims = call.x, call.flag("keepdim")
    axis = call.axis("dim", x.rank)
    if x.rank == 0:
        return [x, call.scalar(0, DType.INT64)]
    values = call.run(f"reduce_{operator}", x, axis=(axis,), keepdims=keepdims) if 0 in call.needed else None
    places = call.run(f"arg{operator}", x, axis=axis, keepdims=keepdims) if 1 in call.needed else None
    return [values, places]


def _histogram(call: AtenCall) -> Operand:
    """Convert `histc`: the number of elements in each of equal bins. The last bin has both ends."""
    bins, low, high = call.integer("bins"), call.number("min"), call.number("max")
    x, dtype = call.reshape(call.x, (call.x.type.elements, 1)), call.dtype
    if low != high:
        bounds = [call.scalar(low, dtype), call.scalar(high, dtype)]
    else:
        one = call.scalar(1, dtype)
        axes = tuple(range(call.x.rank))
        bounds = [call.run(f"reduce_{name}", call.x, axis=axes) for name in ("min", "max")]  # the extrema of the data
        are_equal = call.run("equal", *bounds)
        bounds = [
            call.run("where", are_equal, call.run(operator, bound, one), bound)
            for operator, bound in zip(("sub", "add"), bounds, strict=True)
        ]
    width = call.run("sub", bounds[1], bounds[0])
    scaled = call.run("mul", call.run("sub", x, bounds[0]), call.scalar(bins, dtype))
    if not dtype.is_float:
        place = call.run("div", scaled, width, rounding="trunc")
    else:
        place = call.run("floor", call.run("div", scaled, width))
    place = call.run("min", place, call.scalar(bins - 1, dtype))
    numbers = call.constant(np.arange(bins), dtype)
    inside = call.run("logical_and", call.run("greater_equal", x, bounds[0]), call.run("less_equal", x, bounds[1]))
    counted = call.run("logical_and", call.run("equal", place, numbers), inside)
    return call.run("reduce_sum", call.cast(counted), axis=(0,))


def _arg(call: AtenCall, operator: str) -> Operand:
    x, dim, keepdims = call.x, call.value("dim"), call.flag("keepdim")
    if x.rank == 0:
        return call.scalar(0, DType.INT64)
    if dim is None:
        y = call.run(operator, call.reshape(x, (x.type.elements,)), axis=0)
        return call.reshape(y, call.shape)
    return call.run(operator, x, axis=call.dimension(dim, x.rank), keepdims=keepdims)


def _logical(call: AtenCall, operator: str) -> Operand:
    x = call.cast(call.x, DType.BOOL)
    return call.cast(_reduced(call, operator, x, _axes(call, x.rank)))


def _variance(call: AtenCall, x: Operand, axes: Sequence[int]) -> Operand:
    """Return the variance with its dimensions kept."""
    correction = _correction(call)
    count = math.prod(x.shape[d] for d in axes)
    if count <= correction:
        raise call.unsupported(f"a variance of {count} elements with correction {correction}")
    mean = call.run("reduce_mean", x, axis=tuple(axes), keepdims=True)
    total = call.run("reduce_sum_square", call.run("sub", x, mean), axis=tuple(axes), keepdims=True)
    return call.run("div", total, call.scalar(count - correction, x.dtype))


def _correction(call: AtenCall) -> float:
    if "unbiased" in call.arguments:
        return float(call.flag("unbiased"))
    return float(call.number("correction")) if call.has("correction") else 1.0


def _var(call: AtenCall, *, root: bool = False) -> Operand:
    x = call.x
    axes = _axes(call, x.rank)
    y = _variance(call, x, axes)
    return _shaped(call, call.run("sqrt", y) if root else y)


def _var_mean(call: AtenCall) -> list[Operand]:
    x = call.x
    axes = _axes(call, x.rank)
    mean = call.run("reduce_mean", x, axis=tuple(axes), keepdims=True)
    return [_shaped(call, y) for y in (_variance(call, x, axes), mean)]


def _shaped(call: AtenCall, y: Operand) -> Operand:
    _keepdim(call)
    return call.reshape(y, call.shape)


def _vector_norm(call: AtenCall) -> Operand:
    order = call.number("ord")
    x = call.cast(call.x)
    axes = _axes(call, x.rank)
    names = {1: "reduce_l1", 2: "reduce_l2", math.inf: "reduce_max", -math.inf: "reduce_min"}
    if order not in names:
        raise call.unsupported(f"a norm of order {order}")
    if not axes:
        return call.run("abs", x)
    return _reduced(call, names[order], call.run("abs", x) if math.isinf(order) else x, axes)


def _cumulate(call: AtenCall, operator: str) -> Operand:
    x = call.cast(call.x)
    return x if x.rank == 0 else call.run(operator, x, axis=call.axis("dim", x.rank))


TABLE: dict[str, Converter] = {
    "aten.histc.default": _histogram,
    **{f"aten.sum.{form}": partial(_reduce, operator="reduce_sum") for form in ("default", "dim_IntList")},
    **{f"aten.mean.{form}": partial(_reduce, operator="reduce_mean") for form in ("default", "dim")},
    **{f"aten.prod.{form}": partial(_reduce, operator="reduce_prod") for form in ("default", "dim_int")},
    "aten.logsumexp.default": partial(_reduce, operator="reduce_log_sum_exp"),
    **{
        f"aten.{name}.default": partial(_extremum, operator=f"reduce_{kind}")
        for name, kind in (("amax", "max"), ("amin", "min"), ("max", "max"), ("min", "min"))
    },
    **{f"aten.{kind}.dim": partial(_extremum_with_index, operator=kind) for kind in ("max", "min")},
    **{f"aten.arg{kind}.default": partial(_arg, operator=f"arg{kind}") for kind in ("max", "min")},
    **{
        f"aten.{kind}.{form}": partial(_logical, operator=f"reduce_{kind}")
        for kind in ("all", "any")
        for form in ("default", "dim", "dims")
    },
    **{f"aten.var.{form}": _var for form in ("correction", "default", "dim")},
    **{f"aten.std.{form}": partial(_var, root=True) for form in ("correction", "default", "dim")},
    "aten.var_mean.correction": _var_mean,
    "aten.cumsum.default": partial(_cumulate, operator="cumsum"),
    "aten.cumprod.default": partial(_cumulate, operator="cumprod"),
    "aten.linalg_vector_norm.default": _vector_norm,
}
