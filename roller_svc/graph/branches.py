"""Nodes that become one along an axis of their results: the dimensions that have it, and the merged node.

`dims` has, for each tensor of a program that has the axis, its dimension.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from roller_svc.frontend.graph_builder import program_of_call
from roller_svc.graph.views import view_offset_elements
from roller_svc.ir.expr import AxisRef, Expr, Load, children
from roller_svc.ir.graph import OpNode
from roller_svc.ir.program import Axis, StatementKind, TensorExpr, TensorProgram, TensorType

MAX_NAME = 200  # characters of a merged node's name


@dataclass(frozen=True, slots=True)
class Branch:
    """A node with one result, whose dimension `dim` can be concatenated with that of other nodes."""

    node: OpNode
    dim: int
    dims: Mapping[str, int]

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
        return (self.dim, resized_program(self.node.program, self.dims, 1), shared)

    def merged_inputs(self) -> list[tuple[int, int]]:
        """Return the position of each input that has the axis, with its dimension."""
        return [(i, self.dims[name]) for i, (name, _) in enumerate(self.node.program.inputs) if name in self.dims]


def as_branch(node: OpNode, has_axis: Callable[[str], bool]) -> Branch | None:
    """Return the node as a branch along the first dimension that qualifies.

    The axis must be in some inputs, and `has_axis` must accept the tensor of each of them.
    """
    if len(node.outputs) != 1 or view_offset_elements(node) is not None:
        return None
    for dim in range(len(node.output_types[0].shape)):
        dims = concatenated_dims(node.program, dim)
        if dims is not None:
            branch = Branch(node, dim, dims)
            positions = branch.merged_inputs()
            if positions and all(has_axis(node.inputs[position]) for position, _ in positions):
                return branch
    return None


def merge_branches(group: Sequence[Branch]) -> OpNode:
    """Return the merged node, with the inputs of the first branch."""
    first = group[0]
    names = "|".join(branch.node.name for branch in group)
    return replace(
        first.node,
        name=names if len(names) <= MAX_NAME else f"{first.node.name}|{len(group) - 1} more",
        program=resized_program(first.node.program, first.dims, sum(branch.extent for branch in group)),
        outputs=(f"{first.node.outputs[0]}.merged",),
    )


def slice_result(group: Sequence[Branch], result: str) -> list[OpNode]:
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


def concatenated_dims(program: TensorProgram, dim: int) -> dict[str, int] | None:
    """Return the dimension of each tensor that has the axis of the result's dimension `dim`.

    None if a statement uses the axis in another way than as an index of whole dimensions.
    """
    (output,) = program.outputs
    types = program.types
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
            elif dims.setdefault(tensor, used) != used or types[tensor].shape[used] != statement.extents[str(name)]:
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


def resized_program(program: TensorProgram, dims: Mapping[str, int], extent: int) -> TensorProgram:
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
        program,
        inputs=tuple((name, resized_type(name, type_)) for name, type_ in program.inputs),
        statements=tuple(resized_statement(statement) for statement in program.statements),
    )
