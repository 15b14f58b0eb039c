"""Parts of graphs as graphs of their own."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from roller_svc.ir.graph import Graph, Node


def extract_nodes(graph: Graph, nodes: Sequence[Node], name: str, also: Collection[str] = ()) -> Graph:
    """Return some nodes as a graph, whose inputs and outputs have the names of the tensors.

    Args:
        graph: the graph.
        nodes: some of its nodes, in an order of execution.
        name: the name of the new graph.
        also: tensors that are outputs also if no other node reads them.
    """
    types = graph.types
    inside = {node.name for node in nodes}
    written = [tensor for node in nodes for tensor in node.outputs]
    read = dict.fromkeys(tensor for node in nodes for tensor in node.inputs)
    outside = {tensor for node in graph.nodes if node.name not in inside for tensor in node.inputs}
    needed = outside.union(also, (tensor for _, tensor in graph.outputs))
    return Graph(
        name,
        tuple((tensor, types[tensor]) for tensor in read if tensor not in written and tensor not in graph.constants),
        {tensor: graph.constants[tensor] for tensor in read if tensor in graph.constants},
        tuple(nodes),
        tuple((tensor, tensor) for tensor in written if tensor in needed),
    )
