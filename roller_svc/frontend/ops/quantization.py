"""Quantization operators: quantize_linear, dequantize_linear, requantize."""

from __future__ import annotations

from collections.abc import Sequence

from roller_svc.errors import ExprTypeError
from roller_svc.frontend.ops.elementwise import cast_element
from roller_svc.frontend.ops.operator import Call, Operand, Operator
from roller_svc.frontend.ops.parameters import Parameter, dtype, flag, integer
from roller_svc.frontend.ops.text import statement
from roller_svc.ir.dtype import DType, promote


def _scale_at(call: Call, operand: Operand, axes: Sequence[str]) -> str:
    """Return the load of the scale or zero point of an element.

    It is a scalar, has an element for each index of the axis, or one for each block along the axis.
    """
    x, block = call.x, call.integer("block") if "block" in call.parameters else 0
    if operand.type.elements == 1 and operand.rank <= 1:
        return operand.at(*["0"] * operand.rank)
    axis = call.one_axis(x.rank)
    if not block:
        call.check_shape(operand, (x.shape[axis],))
        return operand.at(axes[axis])
    blocks = -(-x.shape[axis] // block)
    call.check_shape(operand, (*x.shape[:axis], blocks, *x.shape[axis + 1 :]))
    return operand.at(*axes[:axis], f"{axes[axis]} // {block}", *axes[axis + 1 :])


def _target(call: Call, zero: Operand | None) -> DType:
    """Return the quantized type: that of the zero point, else the parameter, else uint8."""
    stated = call.dtype()
    if zero is not None and stated not in (None, zero.dtype):
        raise ExprTypeError(f"{call.operator}: dtype is {call.text('dtype')}, the zero point is {zero.dtype.value}")
    target = stated or (DType.UINT8 if zero is None else zero.dtype)
    if target.bits > 16 or target in (DType.FLOAT16, DType.BFLOAT16, DType.BOOL):
        raise ExprTypeError(f"{call.operator}: {target.value} is no quantized type; those have 8 or 16 bits")
    return target


def _rounded(call: Call, value: str, zero: Operand | None, axes: Sequence[str], target: DType) -> str:
    """Return a float32 or float64 value in the quantized type. Integers saturate."""
    if target.is_float:
        return cast_element(call, value, DType.FLOAT32, target, saturate=call.flag("saturate"))
    value = f"round({value})"
    if zero is not None:
        value = f"({value} + {_scale_at(call, zero, axes)})"
    return f"{value}.cast(`{target.value}`)"


def _quantize(call: Call) -> str:
    x, scale = call.operands[:2]
    zero, axes = call.operand(2), call.axes(x.rank)
    target = _target(call, zero)
    divided = DType(call.text("precision")) if call.has("precision") else promote(x.dtype, scale.dtype)
    if not divided.is_float:
        raise ExprTypeError(f"{call.operator}: the scale is {scale.dtype.value}; scales are floats")
    terms = [(x.at(*axes), x.dtype), (_scale_at(call, scale, axes), scale.dtype)]
    value = " / ".join(load if kind is divided else f"{load}.cast(`{divided.value}`)" for load, kind in terms)
    # The cast rounds the quotient: half a step must be a tie.
    value = f"({value}).cast(`{divided.value}`)"
    value = value if divided.compute is divided else f"{value}.cast(`float32`)"
    return statement(call.output, axes, "=", _rounded(call, value, zero, axes, target))


def _dequantize(call: Call) -> str:
    x, scale = call.operands[:2]
    zero, axes = call.operand(2), call.axes(x.rank)
    if not scale.dtype.is_float:
        raise ExprTypeError(f"{call.operator}: the scale is {scale.dtype.value}; scales are floats")
    value = x.at(*axes)
    if zero is not None and not x.dtype.is_float:
        if zero.dtype is not x.dtype:
            raise ExprTypeError(f"{call.operator}: `{x.name}` is {x.dtype.value}, the zero point {zero.dtype.value}")
        value = f"({value}.cast(`int32`) - {_scale_at(call, zero, axes)}.cast(`int32`))"
    wide = DType.FLOAT64 if scale.dtype is DType.FLOAT64 else DType.FLOAT32
    value = f"{value}.cast(`{wide.value}`) * {_scale_at(call, scale, axes)}"
    target = call.dtype() or scale.dtype
    return statement(call.output, axes, "=", value if target is wide else f"({value}).cast(`{target.value}`)")


def _requantize(call: Call) -> str:
    x, scale = call.operands[:2]
    zero, axes = call.operand(2), call.axes(x.rank)
    factor = _scale_at(call, scale, axes)
    factor = factor if scale.dtype is DType.FLOAT32 else f"{factor}.cast(`float32`)"
    value = f"({x.at(*axes)}.cast(`float32`) * {factor}).cast(`float32`)"
    return statement(call.output, axes, "=", _rounded(call, value, zero, axes, _target(call, zero)))


_AXIS = integer("axis", 1, "the dimension that a scale of more than one element belongs to")


def _scaled(*more: Parameter) -> tuple[Parameter, ...]:
    about = "elements along the axis that share a scale; 0: a scale has one element, or one for each index"
    return (_AXIS, integer("block", 0, about, minimum=0), *more)


_SATURATE = flag("saturate", "what is beyond float8 becomes its greatest number, else no number", default=True)

OPERATORS = (
    Operator(
        "quantize_linear",
        "`x / scale`, rounded to even, plus `zero_point`, in an integer type that saturates; or in float8.",
        ("x", "scale", "zero_point"),
        _quantize,
        _scaled(
            dtype("dtype", None, "type of the result; that of the zero point by default, or uint8"),
            dtype("precision", None, "type in which the quotient is formed; that of `x` and `scale` by default"),
            _SATURATE,
        ),
        needed=2,
    ),
    Operator(
        "dequantize_linear",
        "`(x - zero_point) * scale`.",
        ("x", "scale", "zero_point"),
        _dequantize,
        _scaled(dtype("dtype", None, "type of the result; that of the scale by default")),
        needed=2,
    ),
    Operator(
        "requantize",
        "`x * scale` of an integer sum, rounded to even, plus `zero_point`, in an integer type that saturates.",
        ("x", "scale", "zero_point"),
        _requantize,
        (_AXIS, dtype("dtype", None, "type of the result; that of the zero point by default, or uint8"), _SATURATE),
        needed=2,
    ),
)
