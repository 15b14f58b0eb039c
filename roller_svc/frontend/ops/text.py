"""Building blocks of expression text for operators."""

from __future__ import annotations

import math
from collections.abc import Sequence

from roller_svc.analysis.constant_folding import holds
from roller_svc.errors import ArgumentError
from roller_svc.frontend.ops.operator import Call, Operand, Where
from roller_svc.ir.dtype import DType

# Largest finite floats.
_FLOAT_MAX = {
    DType.FLOAT64: "1.7976931348623157e+308",
    DType.FLOAT32: "3.4028234663852886e+38",
    DType.BFLOAT16: "3.3895313892515355e+38",
    DType.FLOAT16: "65504.0",
    DType.FLOAT8_E4M3FN: "448.0",
    DType.FLOAT8_E5M2: "57344.0",
}

ACTIVATIONS = {
    "none": "{0}",
    "relu": "relu({0})",
    "gelu": "gelu({0})",
    "gelu_tanh": "0.5 * {1} * (1.0 + tanh(0.7978845608028654 * ({1} + 0.044715 * {1} * {1} * {1})))",
    "silu": "silu({0})",
    "sigmoid": "sigmoid({0})",
    "tanh": "tanh({0})",
}


def statement(output: str, index: Sequence[str], sign: str, body: str, *, where: Where = (), dtype: DType | None = None) -> str:
    """Return `output[index]: dtype sign body where axis in extent`."""
    stated = "" if dtype is None else f": {dtype.value}"
    clause = " where " + ", ".join(f"{axis} in {extent}" for axis, extent in where) if where else ""
    return f"{output}[{', '.join(index)}]{stated} {sign} {body}{clause}"


def join_statements(*statements: str) -> str:
    return ";\n".join(statements)


def affine(terms: Sequence[tuple[str, int]], offset: int = 0) -> str:
    """Return a sum such as `ho * 2 + kh - 1`. The first factor must be positive."""
    shown = ""
    for axis, factor in terms:
        size = axis if abs(factor) == 1 else f"{axis} * {abs(factor)}"
        shown += f" {'-' if factor < 0 else '+'} {size}" if shown else size
    if offset or not shown:
        shown += f" {'-' if offset < 0 else '+'} {abs(offset)}" if shown else str(offset)
    return shown


def product_term(value: str, factor: int) -> str:
    """Return a value times a number, in brackets if it is a sum."""
    return f"({value}) * {factor}" if " " in value else f"{value} * {factor}"


def number(value: float, dtype: DType) -> str:
    """Return a literal, with a fraction for a float type. Raises ArgumentError for an infinity of an integer type."""
    if math.isinf(value) and not dtype.is_float:
        raise ArgumentError(f"{dtype.value} has no infinity", code="invalid-parameter")
    if math.isinf(value):
        return f"const(`{value}`)"
    return repr(float(value)) if dtype.is_float else repr(int(value))


def zero(dtype: DType) -> str:
    return number(0, dtype)


def lowest(dtype: DType) -> str:
    """Return the smallest finite value of a type."""
    return f"-{_FLOAT_MAX[dtype]}" if dtype.is_float else str(dtype.integer_range[0])


def least(dtype: DType) -> str:
    """Return the neutral element of a maximum: an infinity, or the smallest value of a type whose casts give none."""
    return number(-math.inf, dtype) if dtype.is_float and holds(-math.inf, dtype) else lowest(dtype)


def guard(value: str, conditions: Sequence[str], otherwise: str) -> str:
    return f"{value}.when([{', '.join(conditions)}], {otherwise})" if conditions else value


def floating(value: str, dtype: DType) -> str:
    """Convert the value to a float, because a mean of integers is not an integer."""
    return value if dtype.is_float else f"{value}.cast(`float32`)"


def power(call: Call, value: str) -> str:
    """Return the power `p` of the magnitude of a value."""
    p = call.number("p")
    if p <= 0:
        raise call.wrong_parameter(f"p must be more than 0, got {p}")
    if p in (1, 2):
        return f"abs({value})" if p == 1 else f"square({value})"
    return f"pow(abs({value}), {float(p)!r})"


def root(call: Call, value: str) -> str:
    """Return the root `p` of a sum of powers."""
    p = call.number("p")
    if p in (1, 2):
        return value if p == 1 else f"sqrt({value})"
    return f"pow({value}, {1 / p!r})"


def widened(value: str, source: DType, dtype: DType | None) -> str:
    """Return a factor of a sum in the sum's integer type: a product of narrower integers would wrap."""
    if dtype is None or dtype.is_float or source.is_float or source is dtype:
        return value
    return f"{value}.cast(`{dtype.value}`)"


def activate(name: str, value: str) -> str:
    """Apply one of ACTIVATIONS to a value."""
    inner = value if value.endswith("]") and " " not in value.split("[")[0] and "] " not in value else f"({value})"
    return ACTIVATIONS[name].format(value, inner)


def contraction(call: Call, index: Sequence[str], body: str, where: Where, bias: str | None = None) -> str:
    """Return a sum of products, with a bias and the activation of the call if given."""
    activation = call.text("activation")
    if bias is None and activation == "none":
        return statement(call.output, index, "+=!", body, where=where, dtype=call.dtype())
    total = call.intermediate("sum")
    value = f"{total}[{', '.join(index)}]"
    value = value if bias is None else f"{value} + {bias}"
    return join_statements(
        statement(total, index, "+=!", body, where=where, dtype=call.dtype()),
        statement(call.output, index, "=", activate(activation, value)),
    )


def broadcast_shape(call: Call, shapes: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Return the broadcast shape by numpy's rules."""
    rank = max((len(shape) for shape in shapes), default=0)
    padded = [(1,) * (rank - len(shape)) + tuple(shape) for shape in shapes]
    result = []
    for d in range(rank):
        sizes = {shape[d] for shape in padded} - {1}
        if len(sizes) > 1:
            shown = " and ".join(str(list(shape)) for shape in shapes)
            raise call.wrong_shape(f"shapes {shown} do not broadcast")
        result.append(sizes.pop() if sizes else 1)
    return tuple(result)


def broadcast(operand: Operand, axes: Sequence[str], shape: Sequence[int]) -> str:
    """Return a load at axes of the broadcast shape."""
    return operand.at(*broadcast_index(operand.shape, axes, shape))


def broadcast_index(sizes: Sequence[int], axes: Sequence[str], shape: Sequence[int]) -> list[str]:
    skipped = len(shape) - len(sizes)
    pairs = zip(sizes, axes[skipped:], shape[skipped:], strict=True)
    return ["0" if size == 1 and extent != 1 else axis for size, axis, extent in pairs]
