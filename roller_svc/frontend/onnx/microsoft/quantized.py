"""Operators of com.microsoft on quantized tensors: integer products, and functions of dequantized tensors."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roller_svc.errors import require
from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.onnx.expansions import EXPANSIONS
from roller_svc.frontend.onnx.expansions.expansion import Expansion, add_use
from roller_svc.frontend.onnx.expansions.quantized import convert_integer_product
from roller_svc.frontend.onnx.table import NODES
from roller_svc.frontend.onnx.tensors import Tensor
from roller_svc.frontend.onnx.use import FLOATS, INTEGERS, Node
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType


def _dequantized(node: Node, builder: GraphBuilder, position: int, axis: int = 0) -> Operand:
    """Return `(x - zero) * scale` of three operands from a position on. A scale of several is along the axis."""
    operands = (node.operand(position), node.operand(position + 1), node.optional(position + 2))
    return builder.call("dequantize_linear", [x for x in operands if x is not None], axis=axis)


def _quantized(node: Node, builder: GraphBuilder, x: Operand, scale: int, kind: DType) -> Tensor:
    """Return a float quantized by the scale at a position, and the zero point after it."""
    zero = node.optional(scale + 1)
    operands = [x, node.operand(scale), *([] if zero is None else [zero])]
    return Tensor(builder.call("quantize_linear", operands, **({} if zero is not None else {"dtype": kind.value})))


def _scaled_product(
    node: Node,
    builder: GraphBuilder,
    factors: tuple[Operand, Operand],
    scales: tuple[Operand, Operand],
    zeros: tuple[Operand | None, Operand | None],
    added: Operand | None = None,
) -> Operand:
    """Return the product of integers less their zero points, plus integers, times both scales."""
    total = convert_integer_product(node, builder, factors, zeros)
    total = total if added is None else builder.call("add", [total, added])
    scale = builder.call("mul", list(scales))
    scale = builder.call("reshape", [scale], shape=()) if scale.type.elements == 1 else scale
    return builder.call("mul", [builder.cast(total, scale.dtype), scale])


def _matmul_integer_to_float(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    a, b, a_scale, b_scale = (node.operand(position) for position in range(4))
    result = _scaled_product(node, builder, (a, b), (a_scale, b_scale), (node.optional(4), node.optional(5)))
    bias = node.optional(6)
    return [Tensor(result if bias is None else builder.call("add", [result, bias]))]


def _qgemm(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return the product plus C, whose scale is that of the product; in floats without a scale of the result."""
    a, a_scale, a_zero, b, b_scale, b_zero = (node.operand(position) for position in range(6))
    left, right = (builder.call("transpose", [x]) if node.integer(name, 0) else x for x, name in ((a, "transA"), (b, "transB")))
    zeros = a_zero, b_zero
    result = _scaled_product(node, builder, (left, right), (a_scale, b_scale), zeros, node.optional(6))
    alpha = node.number("alpha", 1.0)
    result = result if alpha == 1 else builder.call("mul", [result, builder.fill(alpha, result.dtype)])
    return [_quantized(node, builder, result, 7, a.dtype) if node.has(7) else Tensor(result)]


def _concat(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return the concatenation of dequantized tensors: triples of operands from the third on."""
    if len(node.operands) < 5 or len(node.operands) % 3 != 2:
        raise node.invalid(f"{len(node.operands)} inputs are not a scale, a zero point and triples")
    parts = [_dequantized(node, builder, position) for position in range(2, len(node.operands), 3)]
    joined = builder.call("concat", parts, axis=node.integer("axis", 0))
    return [_quantized(node, builder, joined, 0, node.operand(2).dtype)]


def _with_channels_second(node: Node, builder: GraphBuilder, x: Operand) -> tuple[Operand, tuple[int, ...] | None]:
    """Return a tensor with its channels in dimension 1, and the permutation back; None if they are there."""
    if not node.integer("channels_last", 0):
        return x, None
    if x.rank < 3:
        raise node.invalid(f"a tensor {list(x.shape)} is not [batch, ..., channels]")
    spatial = range(1, x.rank - 1)
    return builder.call("transpose", [x], permutation=(0, x.rank - 1, *spatial)), (0, *range(2, x.rank), 1)


def _pool(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    x, back = _with_channels_second(node, builder, _dequantized(node, builder, 0))
    name = node.op_type.removeprefix("QLinear")
    plain = Node(name, node.opset, node.attributes, (x,), (None,), used=node.used)
    result = add_use(NODES[name](plain), builder)
    result = result if back is None else builder.call("transpose", [result], permutation=back)
    return [_quantized(node, builder, result, 3, node.operand(0).dtype)]


def _softmax(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return a softmax. The attribute opset says which dimensions it is over."""
    plain = Node(
        "Softmax", node.integer("opset", 13), {"axis": node.integer("axis", -1)}, (_dequantized(node, builder, 0),), (None,)
    )
    (result,) = EXPANSIONS["Softmax"](plain, builder)
    return [_quantized(node, builder, require(result.operand, "softmax"), 3, node.operand(0).dtype)]


def _qlinear_conv(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    x, back = _with_channels_second(node, builder, node.operand(0))
    attributes = {name: value for name, value in node.attributes.items() if name != "channels_last"}
    plain = replace(node, attributes=attributes, operands=(x, *node.operands[1:]))
    (result,) = EXPANSIONS["QLinearConv"](plain, builder)
    if back is None or result.operand is None:
        return [result]
    return [Tensor(builder.call("transpose", [result.operand], permutation=back))]


def _dynamic_quantize_lstm(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return an LSTM with the dequantized weights.

    onnxruntime also rounds the inputs of each product to 8 bits; here they keep their precision.
    """
    weights: dict[int, Operand] = {}
    for position, scale, name in ((1, 8, "W"), (2, 10, "R")):
        stored, factor = node.array(position, name, INTEGERS, rank=3), node.array(scale, f"{name}_scale", FLOATS)
        zero = node.array(scale + 1, f"{name}_zero_point", INTEGERS)
        directions, _, rows = stored.shape
        if any(each.size not in (directions, directions * rows) for each in (factor, zero)):
            raise node.invalid(
                f"{name} is {list(stored.shape)}, its scale {list(factor.shape)}, its zero point {list(zero.shape)}; "
                f"{directions} or {directions * rows} elements are expected"
            )
        # [directions, inputs, gates * hidden], with a scale of each direction or of each row of gates
        wide = stored.astype(np.float32) - zero.astype(np.float32).reshape(directions, 1, -1)
        dense = (wide * factor.astype(np.float32).reshape(directions, 1, -1)).transpose(0, 2, 1)
        weights[position] = builder.add_constant(np.ascontiguousarray(dense), DType.FLOAT32)
    operands = tuple(weights.get(position, operand) for position, operand in enumerate(node.operands[:8]))
    plain = replace(node, op_type="LSTM", opset=14, operands=operands, constants=node.constants[:8])
    return EXPANSIONS["LSTM"](plain, builder)


QUANTIZED: dict[str, Expansion] = {
    "DynamicQuantizeLSTM": _dynamic_quantize_lstm,
    "MatMulIntegerToFloat": _matmul_integer_to_float,
    "QGemm": _qgemm,
    "QLinearAveragePool": _pool,
    "QLinearConcat": _concat,
    "QLinearConv": _qlinear_conv,
    "QLinearGlobalAveragePool": _pool,
    "QLinearSoftmax": _softmax,
}
