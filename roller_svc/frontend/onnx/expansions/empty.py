"""EMPTY: nodes that read empty tensors, which programs cannot express; numpy evaluates them."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import onnx.defs

from roller_svc.frontend.graph_builder import MAX_GENERATED_ELEMENTS, Array, GraphBuilder
from roller_svc.frontend.onnx.table import DATA_TYPES, RESULT_TYPES, data_type_name
from roller_svc.frontend.onnx.tensors import Tensor, constant_of
from roller_svc.frontend.onnx.use import Node
from roller_svc.frontend.ops.operator import Operand

# Returns None if the result has elements that the operands do not decide.
Evaluation = Callable[[Node, Sequence[Any]], Any]


def convert_empty(node: Node, builder: GraphBuilder) -> Sequence[Tensor] | None:
    """Return the result of a node that reads an empty tensor; None if it does not, or is not in the table.

    Zeros stand for operands that are not known: the shape of a result, and a sum of nothing, do not depend on them.
    """
    evaluate = EMPTY.get(node.op_type)
    known = [value for value in node.constants if isinstance(value, np.ndarray)]
    if evaluate is None or all(value.size for value in known):
        return None
    if node.op_type in _OF_FIRST and not isinstance(node.constants[0], np.ndarray):
        return None  # what is empty are axes or a shape
    _check_present(node)
    arrays = [_stand_in(value, operand) for value, operand in zip(node.constants, node.operands, strict=True)]
    if math.prod(extent for array in known for extent in array.shape if extent) > MAX_GENERATED_ELEMENTS:
        raise node.invalid(f"shapes {[list(array.shape) for array in known]} are too large")
    try:
        found = evaluate(node, arrays)
    except (ValueError, IndexError) as error:
        raise node.invalid(f"shapes do not fit: {error}") from error
    if found is None:
        return None
    result: Array = np.asarray(found)
    if result.size and len(known) < len(arrays) and node.op_type != "MatMul":
        return None
    node.read.update(range(len(arrays)))
    return [constant_of(result, node.dtype_of(result), builder)]


def _check_present(node: Node) -> None:
    """Raise ArgumentError if an operand is omitted that the operator's schema requires."""
    try:
        schema: Any = onnx.defs.get_schema(node.op_type, node.opset, "")
    except onnx.defs.SchemaError:
        return
    for position, formal in enumerate(schema.inputs):
        if formal.option == onnx.defs.OpSchema.FormalParameterOption.Single and not node.has(position):
            raise node.invalid(f"input {position} is missing")


def _all_known(node: Node) -> bool:
    return all(isinstance(value, np.ndarray) for value in node.constants)


def _stand_in(value: object, operand: Operand | None) -> Any:
    """Return a known value, or zeros of the operand's type, which take no memory."""
    if isinstance(value, np.ndarray) or operand is None:
        return value
    return np.broadcast_to(np.zeros((), operand.dtype.value), operand.shape)


def _elementwise(node: Node, arrays: Sequence[Any]) -> Any:
    """Return the empty result of an operator on elements."""
    node.used.update(_WITHOUT_EFFECT.get(node.op_type, ()))
    present = [array for array in arrays if array is not None]
    dtype = RESULT_TYPES[node.op_type].value if node.op_type in RESULT_TYPES else present[-1].dtype
    return np.empty(np.broadcast_shapes(*(array.shape for array in present)), dtype)


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
        raise node.unsupported(f"a cast to {data_type_name(node.integer('to', 0))}")
    node.integer("saturate", 1)
    node.attribute("round_mode")
    return arrays[0].astype(dtype.value)


def _gather(node: Node, arrays: Sequence[Any]) -> Any:
    data, indices = arrays
    axis = _axis(node, data.ndim, 0)
    if _all_known(node):
        return np.take(data, indices.astype(np.int64), axis=axis)
    if indices.size and not data.shape[axis]:
        raise node.invalid(f"indices {list(indices.shape)} of a dimension without elements")
    return np.empty((*data.shape[:axis], *indices.shape, *data.shape[axis + 1 :]), data.dtype)


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
    present = [array for array in arrays if array is not None]
    axis = _axis(node, present[0].ndim, 1)
    others = {(*array.shape[:axis], *array.shape[axis + 1 :]) for array in present}
    if len(others) > 1 or len(present) < len(arrays):
        raise node.invalid(f"tensors {[list(array.shape) for array in present][:4]} do not fit along axis {axis}")
    if _all_known(node):
        return np.concatenate(arrays, axis=axis)
    total = sum(array.shape[axis] for array in present)
    (rest,) = others
    return np.empty((*rest[:axis], total, *rest[axis:]), present[0].dtype) if 0 in rest else None


def _axis(node: Node, rank: int, default: int) -> int:
    axis = node.integer("axis", default)
    if not -rank <= axis < rank:
        raise node.invalid(f"axis {axis} is not one of {rank} dimensions")
    return axis % rank


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

# Operators whose operands after the first are axes, a shape or bounds.
_OF_FIRST = frozenset({"Expand", "Reshape", "Slice", "Squeeze", "Unsqueeze", "ReduceProd", "ReduceSum",
                       *(f"Reduce{name}" for name in _NEUTRAL)})  # fmt: skip

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
