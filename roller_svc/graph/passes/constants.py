"""Constant folding."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Constant, Graph, LoopNode, Node, OpNode
from roller_svc.semantics.interpreter import reference


def fold_constants(graph: Graph, weights: Weights) -> Graph:
    """Replace nodes that read constants alone by their values, in bodies of loops too."""
    constants: dict[str, Constant] = dict(graph.constants)
    nodes: list[Node] = []
    for node in graph.nodes:
        if isinstance(node, LoopNode):
            nodes.append(replace(node, body=fold_constants(node.body, weights)))
        elif isinstance(node, OpNode) and node.inputs and all(tensor in constants for tensor in node.inputs):
            constants |= evaluate_node(node, constants, weights)
        else:
            nodes.append(node)
    return replace(graph, constants=constants, nodes=tuple(nodes))


def evaluate_node(node: OpNode, constants: Mapping[str, Constant], weights: Weights) -> dict[str, Constant]:
    """Return the values of a node that reads constants alone, by its results."""
    arrays = {name: weights.array(constants[tensor]) for (name, _), tensor in zip(node.program.inputs, node.inputs, strict=True)}
    results = reference(node.program, arrays)
    listed = zip(node.outputs, node.program.outputs, node.output_types, strict=True)
    return {tensor: weights.add_typed(results[output.name], type_) for tensor, output, type_ in listed}
