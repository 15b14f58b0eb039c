"""EMPTY: nodes that read empty tensors, which programs cannot express; numpy evaluates them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np

from roller_svc.frontend.graph_builder import MAX_GENERATED_ELEMENTS, Array, GraphBuilder
from roller_svc.frontend.onnx.table import DATA_TYPES, RESULT_TYPES
from roller_svc.frontend.onnx.tensors import Tensor, constant_of
from roller_svc.frontend.onnx.use import Node
from roller_svc.frontend.ops.operator import Operand

Evaluation = Callable[[Node, Sequence[Any]], Any]


def convert_empty(node: Node, builder: GraphBuilder) -> Sequence[Tensor] | None:
    """Return the result of a node that reads an empty tensor; None if it does not, or is not in the table.

    Zeros stand for operands that are not known: the shape of a result, and a sum of nothing, do not depend on them.
    """
    evaluate = EMPTY.get(node.op_type)
    known = [value for value in node.constants if isinstance(value, np.ndarray)]
    if evaluate is None or all(value.size for value in known):
        return None
    arrays = [_stand_in(value, operand) for value, operand in zip(node.constants, node.operands, strict=True)]
    if math.prod(extent for array in known for extent in array.shape if extent) > MAX_GENERATED_ELEMENTS:
        raise node.invalid(f"shapes {[list(array.shape) for array in known]} are too large")
    try:
        result: Array = np.asarray(evaluate(node, arrays))
    except (ValueError, IndexError) as error:
        raise node.invalid(f"shapes do not fit: {error}") from error
    if result.size and len(known) < len(arrays) and node.op_type != "MatMul":
        return None
    node.read.update(range(len(arrays)))
    return [constant_of(result, node.dtype_of(result), builder)]


def _stand_in(value: object, operand: Operand | None) -> Any:
    """Return a known value, or zeros of the operand's type, which take no memory."""
    if isinstance(value, np.ndarray) or operand is None:
        return value
    return np.broadcast_to(np.zeros((), operand.dtype.value), operand.shape)


def _elementwise(node: Node, arrays: Sequence[Any]) -> Any:
    """Return the empty result of an operator on elements."""
    node.used.update(_WITHOUT_EFFECT.get(node.op_type, ()))
    dtype = RESULT_TYPES[node.op_type].value if node.op_type in RESULT_TYPES else arrays[-1].dtype
    return np.empty(np.broadcast_shapes(*(array.shape for array in arrays)), dtype)


def _along(node: Node, arrays: Sequence[Any]) -> Any:
    """Return the empty result of an operator along an axis."""
    node.used.update(_WITHOUT_EFFECT.get(node.op_type, ()))
    return arrays[0]


def _matmul(_: Node, arrays: Sequence[Any]) -> Any:
    return np.matmul(*arrays)


def _expand(node: Node, arrays: Sequence[Any]) -> Any:
    return np.empty(np.broadcast_shapes(arrays[0].shape, node.required("shape", 1)), arrays[0].dtype)


def _reduce(node: Node, arrays: Sequence[Any], function: Any) -> Any:
    axes = node.setting("axes", 1)
    keepdims, nothing = bool(node.integer("keepdims", 1)), bool(node.integer("noop_with_empty_axes", 0))
    if not axes and nothing:
        return arrays[0]
    return function(arrays[0], axis=axes or None, keepdims=keepdims).astype(arrays[0].dtype)


def _lowest(array: Any) -> Any:
    """Return the greatest of no elements."""
    if array.dtype == np.bool_:
        return False
    return np.iinfo(array.dtype).min if array.dtype.kind in "iu" else -np.inf


def _highest(array: Any) -> Any:
    """Return the least of no elements."""
    if array.dtype == np.bool_:
        return True
    return np.iinfo(array.dtype).max if array.dtype.kind in "iu" else np.inf


def _of_none(array: Any, *, value: Callable[[Any], Any], axis: tuple[int, ...] | None, keepdims: bool) -> Any:
    """Return a reduction of no elements, which has one value; of an array that stays empty, an empty array."""
    return np.full(np.sum(array, axis=axis, keepdims=keepdims).shape, value(array), array.dtype)


def _cast(node: Node, arrays: Sequence[Any]) -> Any:
    dtype = DATA_TYPES.get(node.integer("to", 0))
    if dtype is None:
        raise node.unsupported("a cast to this type")
    node.integer("saturate", 1)
    node.attribute("round_mode")
    return arrays[0].astype(dtype.value)


def _gather(node: Node, arrays: Sequence[Any]) -> Any:
    return np.take(arrays[0], arrays[1].astype(np.int64), axis=node.integer("axis", 0))


def _squeeze(node: Node, arrays: Sequence[Any]) -> Any:
    return np.squeeze(arrays[0], node.setting("axes", 1))


def _unsqueeze(node: Node, arrays: Sequence[Any]) -> Any:
    return np.expand_dims(arrays[0], node.required("axes", 1))


def _reshape(node: Node, arrays: Sequence[Any]) -> Any:
    shape = node.required("shape", 1)
    if not node.integer("allowzero", 0):
        shape = tuple(extent or arrays[0].shape[d] for d, extent in enumerate(shape))
    return arrays[0].reshape(shape)


def _slice(node: Node, arrays: Sequence[Any]) -> Any:
    starts, stops = node.required("starts", 1), node.required("ends", 2)
    axes = node.setting("axes", 3) or tuple(range(len(starts)))
    steps = node.setting("steps", 4) or (1,) * len(starts)
    index = [slice(None)] * arrays[0].ndim
    for start, stop, axis, step in zip(starts, stops, axes, steps, strict=True):
        index[axis] = slice(start, stop, step)
    return arrays[0][tuple(index)]


def _transpose(node: Node, arrays: Sequence[Any]) -> Any:
    return np.transpose(arrays[0], node.integers("perm"))


def _concat(node: Node, arrays: Sequence[Any]) -> Any:
    return np.concatenate(arrays, axis=node.integer("axis", 1))


# Operators on elements whose result has the type of the last operand, or that of RESULT_TYPES.
_ELEMENTWISE = (
    "Abs", "Add", "And", "Ceil", "Cos", "Div", "Elu", "Equal", "Erf", "Exp", "Floor", "Gelu", "Greater",
    "GreaterOrEqual", "HardSigmoid", "HardSwish", "LeakyRelu", "Less", "LessOrEqual", "Log", "Max", "Mean", "Min",
    "Mod", "Mul", "Neg", "Not", "Or", "PRelu", "Reciprocal", "Relu", "Round", "Sigmoid", "Sign", "Sin", "Softplus",
    "Sqrt", "Sub", "Sum", "Tanh", "Where", "Xor",
)  # fmt: skip
# Attributes without effect on a result without elements.
_WITHOUT_EFFECT = {
    "Elu": ("alpha",), "Gelu": ("approximate",), "HardSigmoid": ("alpha", "beta"), "LeakyRelu": ("alpha",),
    "LogSoftmax": ("axis",), "Mod": ("fmod",), "Softmax": ("axis",),
}  # fmt: skip
# Reduction → its value for no elements.
_NEUTRAL: dict[str, Callable[[Any], Any]] = {
    "L1": lambda _: 0, "L2": lambda _: 0, "SumSquare": lambda _: 0, "LogSum": lambda _: -np.inf,
    "LogSumExp": lambda _: -np.inf, "Max": _lowest, "Min": _highest,
}  # fmt: skip

EMPTY: dict[str, Evaluation] = {
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(["LogSoftmax", "Softmax"], _along),
    "Cast": _cast,
    "Concat": _concat,
    "Expand": _expand,
    "Gather": _gather,
    "MatMul": _matmul,
    **{f"Reduce{name}": partial(_reduce, function=partial(_of_none, value=value)) for name, value in _NEUTRAL.items()},
    "ReduceProd": partial(_reduce, function=np.prod),
    "ReduceSum": partial(_reduce, function=np.sum),
    "Reshape": _reshape,
    "Slice": _slice,
    "Squeeze": _squeeze,
    "Transpose": _transpose,
    "Unsqueeze": _unsqueeze,
}
