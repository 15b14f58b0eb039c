"""Fold batch norms of convolutions into weights and biases."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from roller_svc.frontend.graph_builder import program_of_call
from roller_svc.graph.weights import Array, Weights
from roller_svc.ir.graph import Constant, Graph, Node, OpNode
from roller_svc.ir.program import TensorType

_CONVOLUTIONS = ("conv1d", "conv2d", "conv3d", "depthwise_conv2d")


def fold_batch_norms(graph: Graph, weights: Weights) -> Graph:
    """Replace a convolution and the batch norm that alone reads it by a convolution with scaled weights.

    Their weights must be constants. The scales are computed in float64 and rounded once.
    """
    constants = dict(graph.constants)
    producers, readers = graph.producers, graph.readers
    outputs = {tensor for _, tensor in graph.outputs}
    replaced: dict[str, Node] = {}
    dropped: set[str] = set()
    for norm in graph.nodes:
        convolution = producers.get(norm.inputs[0]) if norm.inputs else None
        if (
            not isinstance(norm, OpNode)
            or norm.operator != "batch_norm"
            or dict(norm.parameters).get("axis", 1) != 1
            or not isinstance(convolution, OpNode)
            or convolution.operator not in _CONVOLUTIONS
            or convolution.outputs[0] in outputs
            or readers[convolution.outputs[0]] != [norm]
            or dict(convolution.parameters).get("activation", "none") != "none"
            or not all(tensor in constants for tensor in (*norm.inputs[1:], *convolution.inputs[1:]))
        ):
            continue
        folded = _folded(convolution, norm, constants, weights)
        replaced[norm.name] = folded
        dropped.add(convolution.name)
    nodes = tuple(replaced.get(node.name, node) for node in graph.nodes if node.name not in dropped)
    return replace(graph, nodes=nodes, constants=constants)


def _folded(convolution: OpNode, norm: OpNode, constants: dict[str, Constant], weights: Weights) -> OpNode:
    """Return the convolution with the norm's output, and add its weights to the constants."""

    def value(tensor: str) -> Array:
        return weights.array(constants[tensor]).astype(np.float64)

    scale, shift, mean, variance = (value(tensor) for tensor in norm.inputs[1:])
    epsilon: Any = dict(norm.parameters).get("epsilon", 1e-5)
    factor = scale / np.sqrt(variance + epsilon)
    filters = convolution.inputs[1]
    weight_type = constants[filters].type
    weight = value(filters) * factor.reshape(-1, *(1,) * (len(weight_type.shape) - 1))
    old_bias = value(convolution.inputs[2]) if len(convolution.inputs) > 2 else np.zeros_like(mean)
    bias = shift + (old_bias - mean) * factor
    names = []
    for role, array in (("weight", weight), ("bias", bias)):
        type_ = TensorType(weight_type.dtype, tuple(array.shape))
        name = f"{norm.outputs[0]}.{role}"
        constants[name] = weights.add_typed(array.astype(weights.array(constants[filters]).dtype), type_)
        names.append(name)
    types = (convolution.input_types[0], *(constants[name].type for name in names))
    program = program_of_call(convolution.operator, types, convolution.parameters)
    return OpNode(norm.name, convolution.operator, program, (convolution.inputs[0], *names), norm.outputs, convolution.parameters)
