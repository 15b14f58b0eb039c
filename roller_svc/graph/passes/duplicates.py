"""Common subexpression elimination."""

from __future__ import annotations

from dataclasses import replace

from roller_svc.ir.graph import Graph, HostNode, LoopNode, Node


def merge_duplicates(graph: Graph) -> Graph:
    """Replace each node that repeats an earlier one, by operator, parameters and inputs, in bodies of loops too."""
    same: dict[str, str] = {}  # tensor → the one that it equals
    first: dict[object, str] = {}
    for name, constant in graph.constants.items():
        same[name] = first.setdefault(constant, name)
    computed: dict[object, tuple[str, ...]] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        renamed = replace(node, inputs=tuple(same.get(tensor, tensor) for tensor in node.inputs))
        if isinstance(renamed, LoopNode):
            nodes.append(replace(renamed, body=merge_duplicates(renamed.body)))
            continue
        if isinstance(renamed, HostNode):  # it may have effects
            nodes.append(renamed)
            continue
        known = computed.setdefault((renamed.program, renamed.inputs), renamed.outputs)
        if known is renamed.outputs:
            nodes.append(renamed)
        else:
            same |= zip(renamed.outputs, known, strict=True)
    outputs = tuple((name, same.get(tensor, tensor)) for name, tensor in graph.outputs)
    return replace(graph, nodes=tuple(nodes), outputs=outputs)
