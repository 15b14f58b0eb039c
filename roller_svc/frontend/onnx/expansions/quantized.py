"""Expansions of products of quantized tensors: integer sums, corrected by zero points, then scaled."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.table import NODES
from roller_svc.frontend.onnx.tensors import Tensor
from roller_svc.frontend.onnx.use import Node
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType


def _matmul_integer(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    a, b = node.operand(0), node.operand(1)
    return [Tensor(convert_integer_product(node, builder, (a, b), (node.optional(2), node.optional(3))))]


def _qlinear_matmul(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    a, a_scale, a_zero, b, b_scale, b_zero, y_scale, y_zero = (node.operand(i) for i in range(8))
    total = convert_integer_product(node, builder, (a, b), (a_zero, b_zero))
    if any(x.type.elements != 1 for x in (y_scale, y_zero)):
        raise node.unsupported("a scale of each row of the result")
    rows, columns = _column(builder, a_scale), b_scale
    scale = builder.call("div", [builder.call("mul", [rows, columns]), y_scale])
    if scale.type.elements > 1:
        total = builder.call("mul", [builder.cast(total, DType.FLOAT32), builder.cast(scale, DType.FLOAT32)])
        scale = builder.fill(1.0, DType.FLOAT32)
    return [Tensor(builder.call("requantize", [total, _scalar(builder, scale), _scalar(builder, y_zero)]))]


def _scalar(builder: GraphBuilder, x: Operand) -> Operand:
    return x if x.rank <= 1 else builder.call("reshape", [x], shape=())


def _column(builder: GraphBuilder, x: Operand) -> Operand:
    """Return numbers of rows, as a column if they are a vector."""
    return builder.call("unsqueeze", [x], axis=(1,)) if x.rank == 1 and x.type.elements > 1 else x


def _is_zero(builder: GraphBuilder, x: Operand | None) -> bool:
    value = None if x is None else builder.value(x)
    return x is None or (value is not None and not np.any(value))


def convert_integer_product(
    node: Node, builder: GraphBuilder, factors: tuple[Operand, Operand], zeros: tuple[Operand | None, Operand | None]
) -> Operand:
    """Return `(a - a_zero) @ (b - b_zero)`.

    The bytes are multiplied as they are. Sums over rows of a and columns of b, times the zero points, correct the
    result: those of a constant factor are constants.
    """
    (a, b), (a_zero, b_zero) = factors, zeros
    if any(x.dtype not in (DType.INT8, DType.UINT8) for x in factors):
        raise node.unsupported(f"a product of {a.dtype.value} and {b.dtype.value}")
    for name, x, zero in (("a", a, a_zero), ("b", b, b_zero)):
        if zero is not None and zero.dtype is not x.dtype:
            raise node.invalid(f"{name} is {x.dtype.value}, its zero point {zero.dtype.value}")
    whole = DType.INT32
    result = builder.call("matmul", factors, dtype=whole.value)
    no_a, no_b = _is_zero(builder, a_zero), _is_zero(builder, b_zero)
    vectors = a.rank == 1 or b.rank == 1
    if vectors and not (no_a and no_b):
        raise node.unsupported("a vector with a zero point")
    if a_zero is not None and not no_a:
        left = builder.cast(_column(builder, a_zero), whole)
        columns = builder.call("reduce_sum", [b], axis=(-2,), keepdims=True, dtype=whole.value)
        result = builder.call("sub", [result, builder.call("mul", [left, columns])])
    if b_zero is not None and not no_b:
        right = builder.cast(b_zero, whole)
        rows = builder.call("reduce_sum", [a], axis=(-1,), keepdims=True, dtype=whole.value)
        if a_zero is not None and not no_a:
            left = builder.cast(_column(builder, a_zero), whole)
            rows = builder.call("sub", [rows, builder.call("mul", [left, builder.fill(a.shape[-1], whole)])])
        result = builder.call("sub", [result, builder.call("mul", [rows, right])])
    return result


def _convolution(
    node: Node,
    builder: GraphBuilder,
    factors: tuple[Operand, Operand],
    zeros: tuple[Operand | None, Operand | None],
    bias: Operand | None,
) -> Operand:
    """Return the convolution of `x - x_zero` and `weight - weight_zero`. Padding has the zero point."""
    plain = Node("Conv", node.opset, node.attributes, factors, (None, None), used=node.used)
    use = NODES["Conv"](plain)
    if (moved := _move_zero_point(builder, factors, zeros, use.parameters)) is not None:
        padded, parameters, correction = moved
        correction = correction if bias is None else builder.call("add", [bias, correction])
        return builder.call(use.operator, [padded, factors[1], correction], **{**parameters, "dtype": DType.INT32.value})
    shifted = []
    for x, zero in zip(factors, zeros, strict=True):
        if zero is None or _is_zero(builder, zero):
            shifted.append(x)
            continue
        if zero.dtype is not x.dtype:
            raise node.invalid(f"a tensor is {x.dtype.value}, its zero point {zero.dtype.value}")
        filters = zero.type.elements
        zero = builder.call("reshape", [zero], shape=(filters, *[1] * (x.rank - 1)) if filters > 1 else ())
        shifted.append(builder.call("sub", [builder.cast(x, DType.INT32), builder.cast(zero, DType.INT32)]))
    operands = [*shifted, *([] if bias is None else [bias])]
    return builder.call(use.operator, operands, **{**use.parameters, "dtype": DType.INT32.value})


def _move_zero_point(
    builder: GraphBuilder,
    factors: tuple[Operand, Operand],
    zeros: tuple[Operand | None, Operand | None],
    parameters: Mapping[str, object],
) -> tuple[Operand, dict[str, object], Operand] | None:
    """Return padded bytes, the parameters of their convolution, and what to add for each filter; None for other bytes.

    Σ (x - z) w = Σ x w - z Σ w, modulo 2^32, where padding has the zero point, which must be known for it.
    """
    (x, weight), (zero, weight_zero) = factors, zeros
    is_plain = zero is not None and zero.dtype is x.dtype and zero.type.elements == 1 and not _is_zero(builder, zero)
    if zero is None or not is_plain or not _is_zero(builder, weight_zero):
        return None
    pads, spatial = parameters.get("padding", 0), x.rank - 2
    if isinstance(pads, int):
        listed = [pads] * spatial
    elif isinstance(pads, tuple | list):
        listed = list(pads)
    elif pads == "valid":
        listed = []
    else:
        return None  # the operator finds the padding
    moved = dict(parameters)
    if any(listed):
        value, before, after = builder.value(zero), listed[:spatial], listed[-spatial:]
        if value is None or len(listed) not in (spatial, 2 * spatial):
            return None
        x = builder.call("pad", [x], pads=[0, 0, *before, 0, 0, *after], value=int(value.reshape(())))
        moved["padding"] = 0
    sums = builder.call("reduce_sum", [weight], axis=tuple(range(1, weight.rank)), dtype=DType.INT32.value)
    scalar = builder.call("reshape", [builder.cast(zero, DType.INT32)], shape=())
    return x, moved, builder.call("neg", [builder.call("mul", [scalar, sums])])


def _conv_integer(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    factors = node.operand(0), node.operand(1)
    return [Tensor(_convolution(node, builder, factors, (node.optional(2), node.optional(3)), None))]


def _qlinear_conv(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    x, x_scale, x_zero, weight, weight_scale, weight_zero, y_scale, y_zero = (node.operand(i) for i in range(8))
    total = _convolution(node, builder, (x, weight), (x_zero, weight_zero), node.optional(8))
    scale = builder.call("div", [builder.call("mul", [x_scale, weight_scale]), y_scale])
    return [Tensor(builder.call("requantize", [total, _scalar(builder, scale), _scalar(builder, y_zero)]))]


QUANTIZED: dict[str, Expansion] = {
    "ConvInteger": _conv_integer,
    "MatMulInteger": _matmul_integer,
    "QLinearConv": _qlinear_conv,
    "QLinearMatMul": _qlinear_matmul,
}
