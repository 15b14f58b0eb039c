"""Merge nodes into one whose program has the statements of all."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from roller_svc.ir.expr import AxisRef, Expr, Load, rewrite
from roller_svc.ir.graph import FUSED, OpNode
from roller_svc.ir.program import Axis, Output, StatementKind, TensorExpr, TensorProgram, TensorType

# A merged program stays below the language's limits with room for what inlining adds.
MAX_STATEMENTS = 40
_TENSOR_NAME = re.compile(r"[xty]\d+")


def can_merge(nodes: Sequence[OpNode]) -> bool:
    """Return whether the nodes' statements fit in one program. Scatters update a tensor of theirs: they stay alone."""
    statements = [statement for node in nodes for statement in node.program.statements]
    return len(statements) <= MAX_STATEMENTS and all(s.kind is not StatementKind.SCATTER for s in statements)


def merge_nodes(nodes: Sequence[OpNode], visible: Collection[str]) -> OpNode:
    """Return one node for several, in order.

    Args:
        nodes: each reads what earlier ones or others write.
        visible: tensors that other nodes or the graph's outputs read.

    Equal merges give equal programs: inputs are x0, x1, ..., results y0, ..., other tensors t0, ...
    """
    written = {tensor for node in nodes for tensor in node.outputs}
    outside = dict.fromkeys(t for node in nodes for t in node.inputs if t not in written)
    names = {tensor: f"x{i}" for i, tensor in enumerate(outside)}
    results = [t for node in nodes for t in node.outputs if t in visible]
    names |= {tensor: f"y{i}" for i, tensor in enumerate(results)}
    types: dict[str, TensorType] = {}
    statements: list[TensorExpr] = []
    count = 0
    for node in nodes:
        local: dict[str, str] = {}
        for (name, type_), tensor in zip(node.program.inputs, node.inputs, strict=True):
            types.setdefault(tensor, type_)
            local[name] = names[tensor]
        tensors = {o.tensor: t for o, t in zip(node.program.outputs, node.outputs, strict=True)}
        for statement in node.program.statements:
            result = tensors.get(statement.output)
            name = f"t{count}" if result is None else names.setdefault(result, f"t{count}")
            count += 1
            local[statement.output] = name
            statements.append(_renamed(statement, name, local))
    program = TensorProgram(
        tuple((names[tensor], types[tensor]) for tensor in outside),
        tuple(statements),
        tuple(Output(names[tensor], names[tensor]) for tensor in results),
    )
    name = "+".join(node.name for node in nodes)
    return OpNode(name, FUSED, program, tuple(outside), tuple(results), members=list_members(nodes))


def list_members(nodes: Sequence[OpNode]) -> tuple[str, ...]:
    """Return the names of nodes, and of the members of those that are fused."""
    return tuple(name for node in nodes for name in node.members or (node.name,))


def _renamed(statement: TensorExpr, name: str, local: Mapping[str, str]) -> TensorExpr:
    axes = {a.name: f"{a.name}_" for a in statement.axes if _TENSOR_NAME.fullmatch(a.name)}

    def rename(node: Expr) -> Expr:
        if isinstance(node, Load):
            return Load(local[node.tensor], node.index, node.dtype, node.bounds_checked)
        if isinstance(node, AxisRef) and node.name in axes:
            return AxisRef(axes[node.name])
        return node

    renamed = tuple(Axis(axes.get(a.name, a.name), a.extent, a.kind) for a in statement.axes)
    return replace(
        statement,
        output=name,
        name=name,
        axes=renamed,
        index=tuple(rewrite(i, rename) for i in statement.index),
        body=rewrite(statement.body, rename),
    )
