"""The type of converters of nodes that become several calls, and a step they share."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.onnx.tensors import Tensor
from roller_svc.frontend.onnx.use import Node, Use
from roller_svc.frontend.ops.operator import Operand

Expansion = Callable[[Node, GraphBuilder], Sequence[Tensor]]


def add_use(use: Use, builder: GraphBuilder) -> Operand:
    """Add the call of an operator that a node becomes."""
    return builder.call(use.operator, use.operands, **use.parameters)
