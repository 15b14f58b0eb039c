"""Constants, shapes, ranges, and tensors that are joined or split."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from roller_svc.frontend.graph_builder import MAX_GENERATED_ELEMENTS, GraphBuilder
from roller_svc.frontend.onnx.expansions.expansion import Expansion, add_use
from roller_svc.frontend.onnx.table import NODES
from roller_svc.frontend.onnx.tensors import Tensor, constant_of
from roller_svc.frontend.onnx.use import Node
from roller_svc.ir.dtype import DType


def _constant(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    for name, dtype in (
        ("value_float", DType.FLOAT32),
        ("value_floats", DType.FLOAT32),
        ("value_int", DType.INT64),
        ("value_ints", DType.INT64),
    ):
        value = node.attribute(name)
        if value is not None:
            kinds = int | float if dtype.is_float else int
            if not all(isinstance(item, kinds) for item in (value if isinstance(value, list) else [value])):
                raise node.invalid(f"attribute {name} is {value!r:.60}, expected {dtype.value}")
            return [constant_of(np.asarray(value, dtype.value), dtype, builder)]
    value = node.attribute("value")
    if not isinstance(value, np.ndarray):
        raise node.unsupported("a constant that is a string, or sparse")
    return [constant_of(value, node.dtype_of(value), builder)]


def _shape_of(node: Node) -> tuple[int, ...]:
    if not node.operands:
        raise node.invalid("input 0 is missing")
    node.read.add(0)
    operand, value = node.operands[0], node.constants[0]
    if operand is not None:
        return operand.shape
    if isinstance(value, np.ndarray):
        return tuple(value.shape)
    raise node.invalid("input 0 is missing")


def _shape(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    shape = _shape_of(node)
    end = node.integer("end", len(shape))
    return [constant_of(np.asarray(shape[node.integer("start", 0) : end], np.int64), DType.INT64, builder)]


def _size(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    return [constant_of(np.asarray(math.prod(_shape_of(node)), np.int64), DType.INT64, builder)]


def _constant_of_shape(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    shape = node.constant(0, "shape")
    value = node.attribute("value")
    fill = value.reshape(-1)[:1] if isinstance(value, np.ndarray) and value.size == 1 else np.zeros(1, np.float32)
    if shape is None or any(extent < 0 for extent in shape) or math.prod(shape) > MAX_GENERATED_ELEMENTS:
        raise node.invalid(f"shape is {shape}; extents must not be negative, nor their product above 2^26")
    return [constant_of(np.full(shape, fill[0], fill.dtype), node.dtype_of(fill), builder)]


def _range(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    bounds = []
    for position, what in enumerate(("start", "limit", "delta")):
        node.read.add(position)
        value = node.constants[position]
        if not isinstance(value, np.ndarray) or value.size != 1:
            raise node.invalid(f"{what} (input {position}) must be a constant number, as shapes are static")
        bounds.append(value.reshape(-1)[0])
    start, limit, delta = bounds
    dtype = node.dtype_of(start)
    if node.integer("stash_type", 1) not in (1, 11):
        raise node.invalid(f"stash_type is {node.integer('stash_type', 1)}, not 1 or 11")
    # Narrow floats are counted in a wide type and rounded once.
    wide = start.dtype if start.dtype.kind in "iu" else np.dtype(np.float64)
    first, last, step = (number.astype(wide).item() for number in (start, limit, delta))
    if not step or not (last - first) / step <= MAX_GENERATED_ELEMENTS:
        raise node.invalid(f"a range from {start} to {limit} by {delta} has no or too many elements")
    count = max(math.ceil((last - first) / step), 0)
    array = first + np.arange(count) * step
    return [constant_of(array.astype(start.dtype), dtype, builder)]


def _identity(node: Node, _: GraphBuilder) -> Sequence[Tensor]:
    if node.operands[0] is None and isinstance(node.constants[0], np.ndarray):
        node.read.add(0)
        return [Tensor(value=node.constants[0])]
    return [Tensor(node.operand(0))]


def _cast_like(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    node.attribute("round_mode")
    if not node.has(1):
        raise node.invalid("input 1 is missing")
    node.read.add(1)
    operand, value = node.operands[1], node.constants[1]
    target = operand.dtype if operand is not None else node.dtype_of(value)
    parameters = {} if node.integer("saturate", 1) else {"saturate": False}
    return [Tensor(builder.call("cast", [node.operand(0)], dtype=target.value, **parameters))]


def _concat(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Concatenate; empty tensors add nothing."""
    if node.opset >= 4 and node.attribute("axis") is None:
        raise node.invalid("attribute axis is missing")
    node.read.update(range(len(node.operands)))
    operands = [operand for operand in node.operands if operand is not None]
    if not operands:
        return [Tensor(value=value) for value in node.constants[:1] if isinstance(value, np.ndarray)]
    if len(operands) == 1:
        return [Tensor(operands[0])]
    return [Tensor(builder.call("concat", operands, axis=node.integer("axis", 1)))]


def _slice(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Return a part, which may be empty."""
    use, x, shape = NODES["Slice"](node), node.operand(0), list(node.operand(0).shape)
    starts, stops = node.required("starts", 1), node.required("ends", 2)
    axes = node.setting("axes", 3) or tuple(range(len(starts)))
    steps = node.setting("steps", 4) or (1,) * len(starts)
    for start, stop, axis, step in zip(starts, stops, axes, steps, strict=False):
        if step and -x.rank <= axis < x.rank:
            shape[axis] = len(range(x.shape[axis])[start:stop:step])
    return [Tensor(value=np.empty(shape, x.dtype.value)) if 0 in shape else Tensor(add_use(use, builder))]


def _split(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    shape, axis = _shape_of(node), node.integer("axis", 0)
    if not -len(shape) <= axis < len(shape):
        raise node.invalid(f"axis is {axis}, the tensor has {len(shape)} dimensions")
    axis %= len(shape)
    extent, count = shape[axis], node.integer("num_outputs", len(node.results))
    sizes = node.setting("split", 1)
    if sizes is None:
        step = -(-extent // count)
        sizes = tuple(max(min(step, extent - step * i), 0) for i in range(count))
    if sum(sizes) != extent or len(sizes) != len(node.results) or any(size < 0 for size in sizes):
        raise node.invalid(f"split is {list(sizes)} for {len(node.results)} results of an extent of {extent}")
    results, start, whole = [], 0, node.constants[0]
    for size in sizes:
        piece = tuple(size if d == axis else n for d, n in enumerate(shape))
        if math.prod(piece):
            bounds = {"starts": (start,), "stops": (start + size,), "axes": (axis,)}
            results.append(Tensor(builder.call("slice", [node.operand(0)], **bounds)))
        else:
            dtype = whole.dtype if isinstance(whole, np.ndarray) else np.dtype(node.operand(0).dtype.value)
            results.append(Tensor(value=np.empty(piece, dtype)))
        start += size
    return results


SHAPES: dict[str, Expansion] = {
    "CastLike": _cast_like,
    "Concat": _concat,
    "Constant": _constant,
    "ConstantOfShape": _constant_of_shape,
    "Identity": _identity,
    "Range": _range,
    "Shape": _shape,
    "Size": _size,
    "Slice": _slice,
    "Split": _split,
}
