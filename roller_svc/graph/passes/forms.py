"""Forms of operators and expressions: a node gets the statements with which the performance model expects it to be fastest.

Run it before nodes are fused: a merged program has the statements of one form.
"""

from __future__ import annotations

from dataclasses import replace

from roller_svc.frontend.graph_builder import forms_of_call
from roller_svc.frontend.ops import OPS
from roller_svc.graph.costs import CostTable
from roller_svc.ir.graph import Graph, LoopNode, Node, OpNode
from roller_svc.ir.program import Forms


def choose_forms(graph: Graph, costs: CostTable) -> Graph:
    """Return the graph with the fastest form of each node that has several, in bodies of loops too."""

    def choose(node: Node) -> Node:
        if isinstance(node, LoopNode):
            return replace(node, body=choose_forms(node.body, costs))
        if not isinstance(node, OpNode):
            return node
        nodes = [replace(node, program=program, forms=()) for program in _forms(node)]
        timed = [(cost.seconds, other) for other in nodes if (cost := costs.cost(other, graph.constants)) is not None]
        return min(timed, key=lambda pair: pair[0])[1] if timed else node

    return replace(graph, nodes=tuple(map(choose, graph.nodes)))


def _forms(node: OpNode) -> Forms:
    """Return the forms of a node's program; none of a program with one form."""
    operator, forms = OPS.get(node.operator), node.forms
    if operator is not None and operator.write_other is not None:
        forms = forms_of_call(node.operator, node.input_types, node.parameters)
    return forms if len(forms) > 1 and node.program == forms[0] else ()
