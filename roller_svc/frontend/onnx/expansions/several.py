"""Nodes that become a few calls, or constants: one-hot tensors, softmaxes, shifts, powers, selections."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import partial

import numpy as np

from roller_svc.frontend.graph_builder import MAX_GENERATED_ELEMENTS, GraphBuilder
from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.table import DATA_TYPES, SHIFTS, data_type_name, few_factors
from roller_svc.frontend.onnx.tensors import Tensor, constant_of
from roller_svc.frontend.onnx.use import Node
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType, promote


def _one_hot(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    indices, values = node.operand(0), node.operand(2)
    depth = node.scalar(1, "depth")
    if depth is None or not 1 <= depth == int(depth):
        raise node.invalid(f"depth is {depth}; a whole number from 1 on is expected")
    if values.shape != (2,):
        raise node.invalid(f"values is {list(values.shape)}; the value elsewhere and the value there are expected")
    if indices.dtype.is_float:
        indices = builder.cast(indices, DType.INT64)
    chosen = builder.call("one_hot", [indices], depth=int(depth), axis=node.integer("axis", -1), dtype="bool", negative=True)
    off, on = (builder.call("slice", [values], starts=(i,), stops=(i + 1,)) for i in range(2))
    return [Tensor(builder.call("where", [chosen, on, off]))]


def _softmax(node: Node, builder: GraphBuilder, operator: str) -> Sequence[Tensor]:
    """Return a softmax. Before operator set 13 it is over all dimensions from the axis on."""
    x = node.operand(0)
    axis = node.integer("axis", -1 if node.opset >= 13 else 1)
    if not -x.rank <= axis < x.rank:
        raise node.invalid(f"axis is {axis}, the tensor has {x.rank} dimensions")
    axis %= x.rank
    if node.opset >= 13 or axis == x.rank - 1:
        return [Tensor(_along(x, axis, operator, builder))]
    flat = builder.call("reshape", [x], shape=(math.prod(x.shape[:axis]), math.prod(x.shape[axis:])))
    return [Tensor(builder.call("reshape", [_along(flat, 1, operator, builder)], shape=x.shape))]


def _along(x: Operand, axis: int, operator: str, builder: GraphBuilder) -> Operand:
    if operator != "hardmax":
        return builder.call(operator, [x], axis=axis)
    greatest = builder.call("argmax", [x], axis=axis)
    return builder.call("one_hot", [greatest], depth=x.shape[axis], axis=axis, dtype=x.dtype.value)


def _bit_shift(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return shifted integers. A negative number of bits shifts all of them out, as a large one does."""
    direction = node.choice("direction", "", SHIFTS)
    x, bits = node.operand(0), node.operand(1)
    if bits.dtype.is_signed:
        zero, width = (builder.fill(n, bits.dtype) for n in (0, x.dtype.bits))
        bits = builder.call("where", [builder.call("less", [bits, zero]), width, bits])
    return [Tensor(builder.call(SHIFTS[direction], [x, bits]))]


def _pow(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return a power in the type of the base. Integers to the power of floats are formed in float64, and truncated."""
    base, factors = node.operand(0), few_factors(node)
    if factors is not None:
        return [Tensor(builder.call("mul", [base] * factors))]
    exponent = node.operand(1)
    wide = promote(base.dtype, exponent.dtype)
    if wide.is_float and not base.dtype.is_float:
        wide = DType.FLOAT64
    power = builder.call("pow", [builder.cast(base, wide), builder.cast(exponent, wide)])
    return [Tensor(builder.cast(power, base.dtype))]


def _compress(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return the elements for which a constant condition holds."""
    x, condition = node.operand(0), node.constants[1]
    node.read.add(1)
    if not isinstance(condition, np.ndarray):
        raise node.unsupported("a condition that is not constant", "the result's shape depends on it")
    axis = node.integer("axis", 0)
    if node.attribute("axis") is None:
        x = builder.call("reshape", [x], shape=(-1,))
    if not -x.rank <= axis < x.rank or condition.size > x.shape[axis]:
        raise node.invalid(f"{condition.size} conditions for dimension {axis} of {list(x.shape)}")
    places = np.flatnonzero(condition)
    if not places.size:
        return [Tensor(value=np.empty([0 if d == axis % x.rank else n for d, n in enumerate(x.shape)], x.dtype.value))]
    return [Tensor(builder.call("gather", [x, builder.add_constant(places, DType.INT64)], axis=axis))]


def _non_zero(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return where a constant is not 0."""
    value = node.constants[0]
    node.read.add(0)
    if not isinstance(value, np.ndarray):
        raise node.unsupported("a tensor that is not constant", "the result's shape depends on data")
    places = np.stack(np.nonzero(np.atleast_1d(value))).astype(np.int64)
    return [constant_of(places if value.ndim else places[:0], DType.INT64, builder)]


def _max_unpool(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return zeros with the elements at their flat indices, at the start of the requested shape."""
    x, indices, kernel = node.operand(0), node.operand(1), node.integers("kernel_shape") or ()
    spatial = x.rank - 2
    strides = node.integers("strides") or (1,) * spatial
    pads = node.integers("pads") or (0,) * (2 * spatial)
    if spatial < 1 or (len(kernel), len(strides), len(pads)) != (spatial, spatial, 2 * spatial):
        raise node.invalid(f"kernel_shape, strides and pads do not fit {spatial} spatial dimensions")
    if indices.shape != x.shape:
        raise node.invalid(f"indices are {list(indices.shape)}, the tensor is {list(x.shape)}")
    sizes = zip(x.shape[2:], strides, kernel, pads[:spatial], pads[spatial:], strict=True)
    shape = (*x.shape[:2], *((size - 1) * step + extent - low - high for size, step, extent, low, high in sizes))
    if min(shape) < 1:
        raise node.invalid(f"the shape before pooling is {list(shape)}")
    zero = builder.add_constant(np.zeros((), x.dtype.value), x.dtype)
    zeros = builder.call("broadcast_to", [zero], shape=(math.prod(shape),))
    flat = [builder.call("reshape", [operand], shape=(-1,)) for operand in (indices, x)]
    result = builder.call("reshape", [builder.call("scatter_elements", [zeros, *flat])], shape=shape)
    requested = node.constant(2, "output_shape") or shape
    if len(requested) != x.rank or any(after < before for after, before in zip(requested, shape, strict=True)):
        raise node.invalid(f"output_shape is {list(requested)}, and must hold {list(shape)}")
    if requested == shape:
        return [Tensor(result)]
    after = [more - size for more, size in zip(requested, shape, strict=True)]
    return [Tensor(builder.call("pad", [result], pads=[0] * x.rank + after))]


def _eye_like(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    x, target = node.operand(0), node.attribute("dtype")
    dtype = x.dtype if target is None else DATA_TYPES.get(node.integer("dtype", 1))
    if dtype is None:
        raise node.unsupported(f"the element type {data_type_name(node.integer('dtype', 1))}")
    if x.rank != 2 or math.prod(x.shape) > MAX_GENERATED_ELEMENTS:
        raise node.invalid(f"the tensor is {list(x.shape)}; 2 dimensions and at most 2^26 elements are expected")
    eye = np.eye(x.shape[0], x.shape[1], node.integer("k", 0), np.float32)
    return [Tensor(builder.cast(builder.add_constant(eye, DType.FLOAT32), dtype))]


def _prelu(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return a PRelu. Before operator set 7 the slope is a vector along dimension 1."""
    x, slope = node.operand(0), node.operand(1)
    if node.opset < 7 and x.rank > 2 and slope.shape == x.shape[1:2]:
        slope = builder.call("reshape", [slope], shape=(*slope.shape, *(1 for _ in x.shape[2:])))
    return [Tensor(builder.call("prelu", [x, slope]))]


SEVERAL: dict[str, Expansion] = {
    "BitShift": _bit_shift,
    "Compress": _compress,
    "EyeLike": _eye_like,
    "Hardmax": partial(_softmax, operator="hardmax"),
    "LogSoftmax": partial(_softmax, operator="log_softmax"),
    "MaxUnpool": _max_unpool,
    "NonZero": _non_zero,
    "OneHot": _one_hot,
    "PRelu": _prelu,
    "Pow": _pow,
    "Softmax": partial(_softmax, operator="softmax"),
}
