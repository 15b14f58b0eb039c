"""ATen operators on elements. Operands are cast to the type to which torch promotes them."""

from __future__ import annotations

import math
from functools import partial

from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.torch.call import AtenCall, Converter
from roller_svc.ir.dtype import DType


def _unary(call: AtenCall, operator: str) -> Operand:
    """Convert a function of the operand in the result's type; of whole numbers torch makes a float where needed."""
    return call.run(operator, call.cast(call.x))


def _rounding(call: AtenCall, operator: str) -> Operand:
    return _unary(call, operator) if call.dtype.is_float else call.x


def _predicate(call: AtenCall, operator: str) -> Operand:
    x = call.x
    return call.run(operator, x if x.dtype.is_float else call.cast(x, DType.FLOAT32))


def _bitwise_not(call: AtenCall) -> Operand:
    return call.run("logical_not" if call.dtype is DType.BOOL else "bitwise_not", call.x)


# Operators on integers or floats → those that torch computes of bools.
_OF_BOOLS = {
    "add": "logical_or", "mul": "logical_and", "max": "logical_or", "min": "logical_and",
    "bitwise_and": "logical_and", "bitwise_or": "logical_or", "bitwise_xor": "logical_xor",
}  # fmt: skip


def _binary(call: AtenCall, operator: str) -> Operand:
    first, second = (call.cast(call.operand(name)) for name in list(call.arguments)[:2])
    return call.run(_OF_BOOLS.get(operator, operator) if call.dtype is DType.BOOL else operator, first, second)


def _shift(call: AtenCall, side: str) -> Operand:
    """Convert a shift. A negative number of bits shifts all of them out, as a large one does."""
    first, count = (call.cast(call.operand(name)) for name in list(call.arguments)[:2])
    if call.dtype.is_signed:
        none, width = (call.scalar(bits, call.dtype) for bits in (0, call.dtype.bits))
        count = call.run("where", call.run("less", count, none), width, count)
    return call.run(f"shift_{side}", first, count)


def _scaled(call: AtenCall, operator: str, *, swapped: bool = False) -> Operand:
    """Convert `self + alpha * other`, or the difference; `swapped`: `other - alpha * self`."""
    first, second = call.cast(call.operand("self")), call.cast(call.operand("other"))
    if swapped:
        first, second = second, first
    alpha = call.number("alpha")
    if alpha != 1:
        second = call.run("mul", second, call.scalar(alpha, call.dtype))
    if call.dtype is DType.BOOL:
        operator = _OF_BOOLS[operator]
    return call.run(operator, first, second)


def _divide(call: AtenCall, rounding: str | None = None) -> Operand:
    if rounding is None and "rounding_mode" in call.arguments and call.value("rounding_mode") is not None:
        rounding = call.text("rounding_mode")
    first, second = call.cast(call.operand("self")), call.cast(call.operand("other"))
    return call.run("div", first, second, rounding=rounding or "true")


def _compare(call: AtenCall, operator: str) -> Operand:
    dtype = call.common_dtype("self", "other")
    return call.run(operator, call.cast(call.operand("self"), dtype), call.cast(call.operand("other"), dtype))


def _logical(call: AtenCall, operator: str) -> Operand:
    first, second = call.operand("self"), call.operand("other")
    return call.run(operator, call.cast(first, DType.BOOL), call.cast(second, DType.BOOL))


_POWERS = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal", 1: "identity", 2: "square"}


def _pow_scalar(call: AtenCall) -> Operand:
    x, exponent = call.cast(call.operand("self")), call.number("exponent")
    operator = _POWERS.get(exponent)
    if operator is not None and (call.dtype.is_float or exponent in (1, 2)):
        return call.run(operator, x)
    if exponent == 3:
        return call.run("mul", x, x, x)
    return call.run("pow", x, call.scalar(exponent, call.dtype))


def _where(call: AtenCall) -> Operand:
    x, y = call.cast(call.operand("self")), call.cast(call.operand("other"))
    return call.run("where", call.operand("condition"), x, y)


def _masked_fill(call: AtenCall) -> Operand:
    value = call.cast(call.operand("value"))
    return call.run("where", call.operand("mask"), value, call.operand("self"))


def clip(call: AtenCall, x: Operand, low: float | None, high: float | None) -> Operand:
    """Return elements between two bounds, as far as they are given."""
    if any(bound is not None and math.isnan(bound) for bound in (low, high)):
        raise call.unsupported("a bound that is not a number")
    given = {name: bound for name, bound in (("least", low), ("most", high)) if bound is not None}
    return call.run("clip", x, **given) if given else x


def _clamp(call: AtenCall) -> Operand:
    bounds = {"min": None, "max": None} | {n: call.number(n) for n in ("min", "max") if call.has(n)}
    return clip(call, call.cast(call.operand("self")), bounds["min"], bounds["max"])


def _clamp_tensor(call: AtenCall) -> Operand:
    x = call.cast(call.operand("self"))
    for name, operator in (("min", "max"), ("max", "min")):
        if call.has(name):
            x = call.run(operator, x, call.cast(call.operand(name)))
    return x


def _elu(call: AtenCall) -> Operand:
    """Convert `scale * (x if x > 0 else alpha * expm1(input_scale * x))`."""
    x, alpha, scale, inner = call.x, *(float(call.number(n)) for n in ("alpha", "scale", "input_scale"))
    if inner != 1:
        raise call.unsupported(f"input_scale={inner}")
    return call.run("elu", x, alpha=alpha) if scale == 1 else call.run("selu", x, alpha=alpha, gamma=scale)


def _softplus(call: AtenCall) -> Operand:
    """Convert softplus. Above the threshold torch gives x, which differs from it by less than exp(-threshold)."""
    x, beta, threshold = call.x, float(call.number("beta")), float(call.number("threshold"))
    if threshold < 20 or beta == 0:
        raise call.unsupported(f"softplus with beta={beta} and threshold={threshold}")
    if beta == 1:
        return call.run("softplus", x)
    scaled = call.run("softplus", call.run("mul", x, call.scalar(beta, x.dtype)))
    return call.run("div", scaled, call.scalar(beta, x.dtype))


def _prelu(call: AtenCall) -> Operand:
    x, weight = call.operand("self"), call.operand("weight")
    channels = (1,) * (x.rank - 1) if weight.type.elements == 1 else (weight.type.elements, *(1,) * (x.rank - 2))
    return call.run("prelu", x, call.reshape(weight, channels))


def _threshold(call: AtenCall) -> Operand:
    x = call.x
    above = call.run("greater", x, call.scalar(call.number("threshold"), x.dtype))
    return call.run("where", above, x, call.scalar(call.number("value"), x.dtype))


def _cast(call: AtenCall) -> Operand:
    x, target = call.x, call.dtype
    if target is DType.FLOAT8_E4M3FN and x.dtype is not target:
        return call.run("cast", x, dtype=target.value, saturate=False)
    return call.cast(x)


def _copy(call: AtenCall) -> Operand:
    """Convert a copy of `src` into a tensor of the shape and type of `self`."""
    call.value("self")
    return call.expand(call.cast(call.operand("src")), call.shape)


_UNARY = {
    "abs": "abs", "acos": "acos", "acosh": "acosh", "asin": "asin", "asinh": "asinh", "atan": "atan", "atanh": "atanh",
    "cos": "cos", "cosh": "cosh", "erf": "erf", "exp": "exp", "exp2": "exp2", "expm1": "expm1", "log": "log",
    "log10": "log10", "log1p": "log1p", "log2": "log2", "neg": "neg", "reciprocal": "reciprocal", "relu": "relu",
    "rsqrt": "rsqrt", "sigmoid": "sigmoid", "sign": "sign", "silu": "silu", "sin": "sin", "sinh": "sinh",
    "sqrt": "sqrt", "square": "square", "tan": "tan", "tanh": "tanh", "hardswish": "hard_swish",
    "hardsigmoid": "hard_sigmoid", "mish": "mish",
}  # fmt: skip
_ROUNDING = ("ceil", "floor", "round", "trunc")
_BINARY = {
    "atan2.default": "atan2", "fmod.Scalar": "fmod", "fmod.Tensor": "fmod", "hypot.default": "hypot",
    "maximum.default": "max", "minimum.default": "min", "mul.Scalar": "mul", "mul.Tensor": "mul",
    "pow.Scalar": "pow", "pow.Tensor_Tensor": "pow", "remainder.Scalar": "mod", "remainder.Tensor": "mod",
    "remainder.Scalar_Tensor": "mod",
    **{f"bitwise_{kind}.{form}": f"bitwise_{kind}" for kind in ("and", "or", "xor") for form in ("Scalar", "Tensor")},
}  # fmt: skip
_COMPARISONS = {
    "eq": "equal", "ge": "greater_equal", "gt": "greater", "le": "less_equal", "lt": "less", "ne": "not_equal",
}  # fmt: skip

TABLE: dict[str, Converter] = {
    **{f"aten.{name}.default": partial(_unary, operator=operator) for name, operator in _UNARY.items()},
    "aten.hardsigmoid.default": lambda call: call.run("hard_sigmoid", call.x, alpha=1 / 6, beta=0.5),
    **{f"aten.{name}.default": partial(_rounding, operator=name) for name in _ROUNDING},
    **{f"aten.{name}.default": partial(_predicate, operator=name) for name in ("isinf", "isnan")},
    **{f"aten.{name}": partial(_binary, operator=operator) for name, operator in _BINARY.items()},
    **{
        f"aten.{name}.{form}": partial(_compare, operator=operator)
        for name, operator in _COMPARISONS.items()
        for form in ("Scalar", "Tensor")
    },
    **{
        f"aten.{name}.{form}": partial(_shift, side=side)
        for side in ("left", "right")
        for name, scalar in ((f"bitwise_{side}_shift", "Tensor_Scalar"), (f"__{side[0]}shift__", "Scalar"))
        for form in ("Tensor", scalar)
    },
    **{f"aten.logical_{kind}.default": partial(_logical, operator=f"logical_{kind}") for kind in ("and", "or", "xor")},
    **{f"aten.add.{form}": partial(_scaled, operator="add") for form in ("Scalar", "Tensor")},
    **{f"aten.sub.{form}": partial(_scaled, operator="sub") for form in ("Scalar", "Tensor")},
    **{f"aten.rsub.{form}": partial(_scaled, operator="sub", swapped=True) for form in ("Scalar", "Tensor")},
    **{f"aten.div.{form}": _divide for form in ("Scalar", "Scalar_mode", "Tensor", "Tensor_mode")},
    "aten.floor_divide.default": partial(_divide, rounding="floor"),
    "aten.logical_not.default": lambda call: call.run("logical_not", call.cast(call.x, DType.BOOL)),
    "aten.bitwise_not.default": _bitwise_not,
    "aten.pow.Tensor_Scalar": _pow_scalar,
    "aten.where.self": _where,
    "aten.masked_fill.Scalar": _masked_fill,
    "aten.masked_fill.Tensor": _masked_fill,
    **{f"aten.{name}.default": _clamp for name in ("clamp", "clamp_min", "clamp_max")},
    **{f"aten.{name}.Tensor": _clamp_tensor for name in ("clamp", "clamp_min", "clamp_max")},
    "aten.hardtanh.default": lambda call: clip(call, call.x, call.number("min_val"), call.number("max_val")),
    "aten.gelu.default": lambda call: call.run("gelu", call.x, approximate=call.text("approximate")),
    "aten.leaky_relu.default": lambda call: call.run("leaky_relu", call.x, alpha=float(call.number("negative_slope"))),
    "aten.elu.default": _elu,
    "aten.celu.default": lambda call: call.run("celu", call.x, alpha=float(call.number("alpha"))),
    "aten.selu.default": lambda call: call.run("selu", call.x),
    "aten.softplus.default": _softplus,
    "aten.log_sigmoid.default": lambda call: call.run("neg", call.run("softplus", call.run("neg", call.x))),
    "aten.prelu.default": _prelu,
    "aten._prelu_kernel.default": lambda call: call.run("prelu", call.operand("self"), call.operand("weight")),
    "aten.threshold.default": _threshold,
    "aten._to_copy.default": _cast,
    "prims.convert_element_type.default": _cast,
    **{f"aten.{name}.default": lambda call: call.x for name in ("alias", "clone", "contiguous", "detach", "lift_fresh_copy")},
    "aten.copy.default": _copy,
}
