"""Operator batching: nodes that apply the same weights to different inputs become one node.

An unrolled recurrent layer multiplies each step's input by one matrix. The products do not depend on each other, so
one product with a row for each step reads the matrix once. Reference: Neubig et al., On-the-fly Operation Batching in
Dynamic Computation Graphs, 2017.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from roller_svc.frontend.graph_builder import program_of_call
from roller_svc.graph.branches import Branch, as_branch, merge_branches, slice_result
from roller_svc.graph.costs import CostTable
from roller_svc.ir.graph import Constant, Graph, LoopNode, Node, OpNode, in_dependency_order
from roller_svc.ir.program import StatementKind

MAX_BATCH = 64  # nodes: the inputs of a concatenation


def batch_operators(graph: Graph, costs: CostTable) -> Graph:
    """Return the graph with batches merged where the performance model expects it to be faster.

    Run it before `fuse_operators`, which then merges readers with slices of the result.
    """
    nodes: Sequence[Node] = [
        replace(node, body=batch_operators(node.body, costs)) if isinstance(node, LoopNode) else node for node in graph.nodes
    ]
    for group in _groups(nodes, graph.constants):
        batches = [
            batch
            for batch in _independent(group, nodes)
            if costs.is_faster(merge_branches(batch), (branch.node for branch in batch), graph.constants)
        ]
        if batches:
            nodes = _merge(nodes, batches)
    return replace(graph, nodes=tuple(nodes))


def _groups(nodes: Sequence[Node], constants: Mapping[str, Constant]) -> list[list[Branch]]:
    """Return the nodes with equal programs and weights. Concatenating their inputs takes no copy of strided slices."""
    found: dict[tuple[object, ...], list[Branch]] = {}
    for node in nodes:
        if isinstance(node, OpNode) and _reads_mostly_weights(node, constants):
            branch = as_branch(node, lambda tensor: tensor not in constants)
            if (
                branch is not None
                and branch.is_contiguous
                and all(math.prod(node.input_types[position].shape[:dim]) == 1 for position, dim in branch.merged_inputs())
            ):
                found.setdefault(branch.key, []).append(branch)
    return [branches for branches in found.values() if len(branches) > 1]


def _reads_mostly_weights(node: OpNode, constants: Mapping[str, Constant]) -> bool:
    """Return whether a node reduces, and its constants have more bytes than its other inputs and results."""
    if all(statement.kind is not StatementKind.REDUCE for statement in node.program.statements):
        return False
    sizes = [(tensor in constants, type_.bytes) for tensor, type_ in zip(node.inputs, node.input_types, strict=True)]
    others = sum(size for is_weight, size in sizes if not is_weight) + sum(type_.bytes for type_ in node.output_types)
    return sum(size for is_weight, size in sizes if is_weight) > others


def _independent(group: Sequence[Branch], nodes: Sequence[Node]) -> Iterator[list[Branch]]:
    """Yield sets of the branches in which none depends on another.

    A branch joins the first set without a node that it depends on. So it is in a later set than all these nodes, and
    merging every set makes no cycle.
    """
    bits = {branch.node.name: 1 << i for i, branch in enumerate(group)}
    depends: dict[str, int] = {}  # by tensor: the branches that it depends on
    before: dict[str, int] = {}  # by branch
    for node in nodes:
        mask = 0
        for tensor in node.inputs:
            mask |= depends.get(tensor, 0)
        before[node.name] = mask
        mask |= bits.get(node.name, 0)
        depends |= dict.fromkeys(node.outputs, mask)
    sets: list[tuple[int, list[Branch]]] = []
    by_name = {branch.node.name: branch for branch in group}
    for branch in (by_name[node.name] for node in nodes if node.name in by_name):
        for i, (members, branches) in enumerate(sets):
            if not members & before[branch.node.name]:
                sets[i] = (members | bits[branch.node.name], [*branches, branch])
                break
        else:
            sets.append((bits[branch.node.name], [branch]))
    for _, branches in sets:
        size = math.ceil(len(branches) / math.ceil(len(branches) / MAX_BATCH))
        pieces = (branches[i : i + size] for i in range(0, len(branches), size))
        yield from (piece for piece in pieces if len(piece) > 1)


def _merge(nodes: Sequence[Node], batches: Sequence[Sequence[Branch]]) -> tuple[Node, ...]:
    """Return the nodes with each batch as concatenations, one node, and slices."""
    placed: dict[str, list[OpNode]] = {}
    for batch in batches:
        merged = merge_branches(batch)
        inputs = list(merged.inputs)
        concatenations = []
        for position, dim in batch[0].merged_inputs():
            types = tuple(branch.node.input_types[position] for branch in batch)
            parameters = (("axis", dim),)
            inputs[position] = f"{merged.outputs[0]}.{merged.program.inputs[position][0]}"
            concatenations.append(
                OpNode(
                    f"{batch[0].node.name}/concat.{position}",
                    "concat",
                    program_of_call("concat", types, parameters),
                    tuple(branch.node.inputs[position] for branch in batch),
                    (inputs[position],),
                    parameters,
                )
            )
        placed |= {branch.node.name: [] for branch in batch}
        merged = replace(merged, inputs=tuple(inputs))
        placed[batch[0].node.name] = [*concatenations, merged, *slice_result(batch, merged.outputs[0])]
    return in_dependency_order([new for node in nodes for new in placed.get(node.name, [node])])
