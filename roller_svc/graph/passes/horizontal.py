"""Horizontal fusion: nodes that apply different weights to the same inputs become one node.

Examples are the projections of queries, keys and values, and the 1x1 convolutions at the head of an Inception block.
An axis that indexes results and constants alone is concatenated; the results are slices of the merged node's result.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from roller_svc.graph.branches import Branch, as_branch, merge_branches, slice_result
from roller_svc.graph.concats import is_contiguous_concat
from roller_svc.graph.costs import CostTable
from roller_svc.graph.passes.boundaries import Boundaries
from roller_svc.graph.passes.dead import remove_dead_nodes
from roller_svc.graph.passes.fusion import fuse_operators
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Constant, Graph, LoopNode, Node, OpNode


def fuse_horizontally(
    graph: Graph, weights: Weights, costs: CostTable, boundaries: Boundaries | None = None, runs: int = 1
) -> Graph:
    """Return the graph with branches merged where the performance model expects it to be faster.

    Run it after `fuse_operators`, which has `boundaries` and `runs` too. Results that are slices with a stride are offered
    to their readers.
    """
    nodes = tuple(
        replace(node, body=fuse_horizontally(node.body, weights, costs, boundaries, runs * node.steps))
        if isinstance(node, LoopNode)
        else node
        for node in graph.nodes
    )
    graph = replace(graph, nodes=nodes)
    groups = _groups(graph)
    contiguous = [group for group in groups if group[0].is_contiguous]
    faster = [
        group for group in contiguous if costs.is_faster(merge_branches(group), (branch.node for branch in group), graph.constants)
    ]
    best = _merge_groups(graph, faster, weights)
    if len(contiguous) < len(groups):
        strided = [group for group in groups if not group[0].is_contiguous]
        other = fuse_operators(_merge_groups(best, strided, weights), costs, boundaries, runs)
        before, after = costs.graph_seconds(best), costs.graph_seconds(other)
        if before is not None and after is not None and after < before:
            return other
    return best


def _groups(graph: Graph) -> list[list[Branch]]:
    """Return the sets of branches that can be merged."""
    outputs = {tensor for _, tensor in graph.outputs}
    readers = graph.readers
    found: dict[tuple[object, ...], list[Branch]] = {}
    for node in graph.nodes:
        # a result that the caller or a concatenation receives without a copy stays so
        if not isinstance(node, OpNode) or any(
            tensor in outputs or any(is_contiguous_concat(reader) for reader in readers.get(tensor, ())) for tensor in node.outputs
        ):
            continue
        branch = as_branch(node, graph.constants.__contains__)
        if branch is not None:
            found.setdefault(branch.key, []).append(branch)
    return [branches for branches in found.values() if len(branches) > 1]


def _merge_groups(graph: Graph, groups: Sequence[Sequence[Branch]], weights: Weights) -> Graph:
    """Return the graph with each group as one node, in the place of its first member, with slices."""
    constants = dict(graph.constants)
    placed: dict[str, tuple[Node, ...]] = {}
    for group in groups:
        merged = _with_weights(merge_branches(group), group, constants, weights)
        placed |= {branch.node.name: () for branch in group}
        placed[group[0].node.name] = (merged, *slice_result(group, merged.outputs[0]))
    nodes = tuple(new for node in graph.nodes for new in placed.get(node.name, (node,)))
    return remove_dead_nodes(replace(graph, nodes=nodes, constants=constants))


def _with_weights(merged: OpNode, group: Sequence[Branch], constants: dict[str, Constant], weights: Weights) -> OpNode:
    """Return the merged node with the weights of all branches, and add these to the constants."""
    inputs = list(merged.inputs)
    for position, dim in group[0].merged_inputs():
        name, type_ = merged.program.inputs[position]
        arrays = [weights.array(constants[branch.node.inputs[position]]) for branch in group]
        inputs[position] = f"{merged.outputs[0]}.{name}"
        constants[inputs[position]] = weights.add_typed(np.concatenate(arrays, axis=dim), type_)
    return replace(merged, inputs=tuple(inputs))
