"""Dead code elimination."""

from __future__ import annotations

from dataclasses import replace

from roller_svc.ir.graph import Graph, HostNode, LoopNode, Node


def remove_dead_nodes(graph: Graph) -> Graph:
    """Remove the nodes and constants that no output depends on, in bodies of loops too. Nodes with effects stay."""
    needed = {tensor for _, tensor in graph.outputs}
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if needed.isdisjoint(node.outputs) and not (isinstance(node, HostNode) and node.effects.writes):
            continue
        nodes.append(replace(node, body=remove_dead_nodes(node.body)) if isinstance(node, LoopNode) else node)
        needed.update(node.inputs)
    constants = {name: constant for name, constant in graph.constants.items() if name in needed}
    return replace(graph, nodes=tuple(reversed(nodes)), constants=constants)
