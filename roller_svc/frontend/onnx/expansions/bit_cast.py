"""Expansion of BitCast: other types for the same bits."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.table import DATA_TYPES, data_type_name
from roller_svc.frontend.onnx.tensors import Tensor, constant_of
from roller_svc.frontend.onnx.use import Node


def _bit_cast(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Convert constants, and integers to integers, where a cast wraps."""
    x, value, target = node.operand(0), node.constants[0], DATA_TYPES.get(node.integer("to", 0))
    if target is None:
        raise node.unsupported(f"to={data_type_name(node.integer('to', 0))}")
    if target.bits != x.dtype.bits:
        raise node.invalid(f"{x.dtype.value} has {x.dtype.bits} bits, {target.value} {target.bits}")
    if isinstance(value, np.ndarray):
        return [constant_of(np.ascontiguousarray(value).view(target.value).reshape(x.shape), target, builder)]
    if x.dtype is target or not (x.dtype.is_float or target.is_float):
        return [Tensor(builder.cast(x, target))]
    raise node.unsupported(f"the bits of {x.dtype.value} as {target.value}, unless they are constant,")


BIT_CAST: dict[str, Expansion] = {"BitCast": _bit_cast}
