"""Horizontal fusion: nodes that apply different weights to the same inputs become one node.

Examples are the projections of queries, keys and values, and the 1x1 convolutions at the head of an Inception block.
An axis that indexes results and constants alone is concatenated; the results are slices of the merged node's result.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from roller_svc.frontend.graph_builder import program_of_call
from roller_svc.graph.concats import is_contiguous_concat
from roller_svc.graph.passes.dead import remove_dead_nodes
from roller_svc.graph.passes.fusion import CostTable, fuse_operators
from roller_svc.graph.views import view_offset_elements
from roller_svc.graph.weights import Weights
from roller_svc.ir.expr import AxisRef, Expr, Load, children
from roller_svc.ir.graph import Constant, Graph, LoopNode, Node, OpNode
from roller_svc.ir.program import Axis, StatementKind, TensorExpr, TensorProgram, TensorType

MAX_NAME = 200  # characters of a merged node's name


@dataclass(frozen=True, slots=True)
class _Branch:
    """A node with one result, whose `dim` only constants vary along."""

    node: OpNode
    dim: int
    dims: Mapping[str, int]  # of each tensor of the program that has the concatenated axis: its dimension

    @property
    def extent(self) -> int:
        return self.node.output_types[0].shape[self.dim]

    @property
    def is_contiguous(self) -> bool:
        """Return whether a slice along `dim` is contiguous."""
        return math.prod(self.node.output_types[0].shape[: self.dim]) == 1

    @property
    def key(self) -> tuple[object, ...]:
        """Return what the branches of one merged node share: the program but for the extent, and other inputs."""
        named = zip(self.node.program.inputs, self.node.inputs, strict=True)
        shared = tuple(tensor for (name, _), tensor in named if name not in self.dims)
        return (self.dim, _resized(self.node.program, self.dims, 1), shared)


def fuse_horizontally(graph: Graph, weights: Weights, costs: CostTable) -> Graph:
    """Return the graph with branches merged where the performance model expects it to be faster.

    Run it after `fuse_operators`. Results that are slices with a stride are offered to their readers.
    """
    nodes = tuple(
        replace(node, body=fuse_horizontally(node.body, weights, costs)) if isinstance(node, LoopNode) else node
        for node in graph.nodes
    )
    graph = replace(graph, nodes=nodes)
    groups = _groups(graph)
    contiguous = [group for group in groups if group[0].is_contiguous]
    best = _merge_groups(graph, [g for g in contiguous if _is_faster(g, graph, costs)], weights)
    if len(contiguous) < len(groups):
        strided = [group for group in groups if not group[0].is_contiguous]
        other = fuse_operators(_merge_groups(best, strided, weights), costs)
        before, after = _seconds(best, costs), _seconds(other, costs)
        if before is not None and after is not None and after < before:
            return other
    return best


def _groups(graph: Graph) -> list[list[_Branch]]:
    """Return the sets of branches that can be merged."""
    outputs = {tensor for _, tensor in graph.outputs}
    readers = graph.readers
    found: dict[tuple[object, ...], list[_Branch]] = {}
    for node in graph.nodes:
        # a result that the caller or a concatenation receives without a copy stays so
        if not isinstance(node, OpNode) or any(
            tensor in outputs or any(is_contiguous_concat(reader) for reader in readers.get(tensor, ()))
            for tensor in node.outputs
        ):
            continue
        branch = _as_branch(node, graph.constants)
        if branch is not None:
            found.setdefault(branch.key, []).append(branch)
    return [branches for branches in found.values() if len(branches) > 1]


def _as_branch(node: OpNode, constants: Mapping[str, Constant]) -> _Branch | None:
    """Return the node as a branch along its first dimension that has more than one element and qualifies."""
    if len(node.outputs) != 1 or view_offset_elements(node) is not None:
        return None
    named = dict(zip((name for name, _ in node.program.inputs), node.inputs, strict=True))
    for dim, extent in enumerate(node.output_types[0].shape):
        dims = _concatenated_dims(node.program, dim) if extent > 1 else None
        read = [name for name in named if dims is not None and name in dims]
        if dims is not None and read and all(named[name] in constants for name in read):
            return _Branch(node, dim, dims)
    return None


def _concatenated_dims(program: TensorProgram, dim: int) -> dict[str, int] | None:
    """Return the dimension of each tensor that has the axis of the result's dimension `dim`.

    None if a statement uses the axis in another way than as a whole index.
    """
    (output,) = program.outputs
    dims = {output.tensor: dim}
    plain: set[str] = set()  # tensors that some statement reads without the axis
    for statement in reversed(program.statements):
        if statement.kind is StatementKind.SCATTER:
            return None
        position = dims.get(statement.output)
        axis = None if position is None else statement.index[position]
        if position is not None and not isinstance(axis, AxisRef):
            return None
        name = axis.name if isinstance(axis, AxisRef) else None
        uses = _uses(statement.body, name)
        if uses is None:
            return None
        for tensor, used in uses:
            if used is None:
                plain.add(tensor)
            elif dims.setdefault(tensor, used) != used:
                return None
    return None if plain & dims.keys() else dims


def _uses(expr: Expr, axis: str | None) -> list[tuple[str, int | None]] | None:
    """Return each load with the dimension that the axis indexes; None if it is used elsewhere."""
    if isinstance(expr, AxisRef):
        return None if expr.name == axis else []
    if isinstance(expr, Load):
        at = [i for i, index in enumerate(expr.index) if isinstance(index, AxisRef) and index.name == axis]
        rest = [_uses(index, axis) for i, index in enumerate(expr.index) if i not in at]
        if len(at) > 1 or any(uses is None for uses in rest):
            return None
        nested = [use for uses in rest if uses is not None for use in uses]
        return [(expr.tensor, at[0] if at else None), *nested]
    found: list[tuple[str, int | None]] = []
    for child in children(expr):
        uses = _uses(child, axis)
        if uses is None:
            return None
        found += uses
    return found


def _resized(program: TensorProgram, dims: Mapping[str, int], extent: int) -> TensorProgram:
    """Return the program with another extent of the concatenated axis."""

    def resized_type(tensor: str, type_: TensorType) -> TensorType:
        if tensor not in dims:
            return type_
        shape = list(type_.shape)
        shape[dims[tensor]] = extent
        return TensorType(type_.dtype, tuple(shape))

    def resized_statement(statement: TensorExpr) -> TensorExpr:
        if statement.output not in dims:
            return statement
        index = statement.index[dims[statement.output]]
        name = index.name if isinstance(index, AxisRef) else None
        axes = tuple(Axis(a.name, extent if a.name == name else a.extent, a.kind) for a in statement.axes)
        return replace(statement, axes=axes, type=resized_type(statement.output, statement.type))

    return replace(
        program, inputs=tuple((name, resized_type(name, type_)) for name, type_ in program.inputs),
        statements=tuple(resized_statement(statement) for statement in program.statements),
    )  # fmt: skip


def _merge_groups(graph: Graph, groups: Sequence[Sequence[_Branch]], weights: Weights) -> Graph:
    """Return the graph with each group as one node, in the place of its first member, with slices."""
    constants = dict(graph.constants)
    placed: dict[str, tuple[Node, ...]] = {}
    for group in groups:
        merged = _with_weights(_merged(group), group, constants, weights)
        placed |= {branch.node.name: () for branch in group}
        placed[group[0].node.name] = (merged, *_slices(group, merged.outputs[0]))
    nodes = tuple(new for node in graph.nodes for new in placed.get(node.name, (node,)))
    return remove_dead_nodes(replace(graph, nodes=nodes, constants=constants))


def _merged(group: Sequence[_Branch]) -> OpNode:
    """Return the merged node, with the inputs of the first branch."""
    first = group[0]
    names = "|".join(branch.node.name for branch in group)
    return replace(
        first.node,
        name=names if len(names) <= MAX_NAME else f"{first.node.name}|{len(group) - 1} more",
        program=_resized(first.node.program, first.dims, sum(branch.extent for branch in group)),
        outputs=(f"{first.node.outputs[0]}.merged",),
    )


def _with_weights(merged: OpNode, group: Sequence[_Branch], constants: dict[str, Constant], weights: Weights) -> OpNode:
    """Return the merged node with the weights of all branches, and add these to the constants."""
    dims = group[0].dims
    inputs = list(merged.inputs)
    for position, (name, type_) in enumerate(merged.program.inputs):
        if name in dims:
            arrays = [weights.array(constants[branch.node.inputs[position]]) for branch in group]
            inputs[position] = f"{merged.outputs[0]}.{name}"
            constants[inputs[position]] = weights.add_typed(np.concatenate(arrays, axis=dims[name]), type_)
    return replace(merged, inputs=tuple(inputs))


def _slices(group: Sequence[_Branch], result: str) -> list[OpNode]:
    """Return a node for the result of each branch."""
    first = group[0]
    (type_,) = first.node.output_types
    shape = list(type_.shape)
    shape[first.dim] = sum(branch.extent for branch in group)
    nodes = []
    begin = 0
    for branch in group:
        parameters = (("axes", (first.dim,)), ("starts", (begin,)), ("stops", (begin + branch.extent,)))
        program = program_of_call("slice", (TensorType(type_.dtype, tuple(shape)),), parameters)
        name = f"{branch.node.name}/slice"
        nodes.append(OpNode(name, "slice", program, (result,), branch.node.outputs, parameters))
        begin += branch.extent
    return nodes


def _is_faster(group: Sequence[_Branch], graph: Graph, costs: CostTable) -> bool:
    """Return whether the model expects the merged node to take less time than its members."""
    merged = costs.cost(_merged(group), graph.constants)
    members = [costs.cost(branch.node, graph.constants) for branch in group]
    known = [cost.seconds for cost in members if cost is not None]
    return merged is not None and len(known) == len(members) and merged.seconds < sum(known)


def _seconds(graph: Graph, costs: CostTable) -> float | None:
    """Return the estimate of all nodes but loops, one after the other; None if one has no candidate."""
    total = 0.0
    for node in graph.nodes:
        if isinstance(node, OpNode) and view_offset_elements(node) is None and not is_contiguous_concat(node):
            cost = costs.cost(node, graph.constants)
            if cost is None:
                return None
            total += cost.seconds
    return total
