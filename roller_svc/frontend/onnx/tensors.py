"""Tensors of a model that is being imported, and values of its protos."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import AttributeProto, NodeProto, TensorProto, helper, numpy_helper

from roller_svc.errors import ArgumentError
from roller_svc.frontend.graph_builder import Array, GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the model. Without an operand it is omitted, empty (`value` has no element) or failed.

    `has_four_bits`: bytes hold its elements, which have 4 bits in the file. Only what computes no such elements reads it.
    """

    operand: Operand | None = None
    value: Array | None = None
    failed: bool = False
    has_four_bits: bool = False

    def known(self, builder: GraphBuilder) -> Array | None:
        """Return the value of a constant; None if it is not known."""
        return self.value if self.operand is None else builder.value(self.operand)


def constant_of(array: Array, dtype: DType, builder: GraphBuilder) -> Tensor:
    """Return a constant; an empty array has no operand."""
    return Tensor(builder.add_constant(array, dtype)) if array.size else Tensor(value=array)


def array_of(tensor: TensorProto) -> Array:
    """Return the value of a tensor. Raises ArgumentError if the proto is damaged."""
    if any(extent < 0 for extent in tensor.dims):  # numpy would infer it
        shape = list(tensor.dims)[:8]
        raise ArgumentError(
            f"tensor {tensor.name[:80]!r} is damaged: its shape is {shape}, expected extents of 0 or more", code="invalid-graph"
        )
    try:
        return np.asarray(numpy_helper.to_array(tensor))
    except (ValueError, TypeError, KeyError, NotImplementedError) as error:
        raise ArgumentError(f"tensor {tensor.name[:80]!r} is damaged: {error}", code="invalid-graph") from error


def attributes_of(node: NodeProto) -> dict[str, Any]:
    """Return the node's attributes: numbers, strings, arrays for tensors, protos for graphs."""
    return {attribute.name: _value(attribute) for attribute in node.attribute}


def _value(attribute: AttributeProto) -> Any:
    if attribute.type == AttributeProto.TENSOR:
        return array_of(attribute.t)
    try:
        value = helper.get_attribute_value(attribute)
    except ValueError as error:
        raise ArgumentError(f"attribute {attribute.name[:80]!r}: {error}", code="invalid-node") from error
    return list(value) if not isinstance(value, int | float | bytes) and hasattr(value, "__iter__") else value
