"""Merge nodes into one whose program has the statements of all."""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache

from roller_svc.ir.expr import AxisRef, Expr, Load, rewrite
from roller_svc.ir.graph import FUSED, OpNode
from roller_svc.ir.program import Axis, Output, StatementKind, TensorExpr, TensorProgram, TensorType

# A merged program stays below the language's limits with room for what inlining adds.
MAX_STATEMENTS = 40
MAX_CACHED_MERGES = 4096
_TENSOR_NAME = re.compile(r"[xty]\d+")
_INNER = "#"  # begins the name of a tensor that only merged programs read


@dataclass(frozen=True, slots=True, eq=False)
class _Same:
    """A program that is equal to itself alone: nodes share programs, and their values are long to compare."""

    program: TensorProgram

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.program is other.program

    def __hash__(self) -> int:
        return id(self.program)


_Part = tuple[_Same, tuple[str, ...], tuple[str, ...]]  # a program with the names of its inputs and results


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
    written = dict.fromkeys(tensor for node in nodes for tensor in node.outputs)
    outside = dict.fromkeys(t for node in nodes for t in node.inputs if t not in written)
    results = [tensor for tensor in written if tensor in visible]
    names = {tensor: f"{_INNER}{i}" for i, tensor in enumerate(written)}
    names |= {tensor: f"x{i}" for i, tensor in enumerate(outside)}
    names |= {tensor: f"y{i}" for i, tensor in enumerate(results)}
    parts = tuple(
        (_Same(node.program), tuple(names[t] for t in node.inputs), tuple(names[t] for t in node.outputs)) for node in nodes
    )
    name = "+".join(node.name for node in nodes)
    program = _merge_programs(parts, len(outside), len(results))
    return OpNode(name, FUSED, program, tuple(outside), tuple(results), members=list_members(nodes))


@lru_cache(MAX_CACHED_MERGES)
def _merge_programs(parts: tuple[_Part, ...], num_inputs: int, num_results: int) -> TensorProgram:
    """Return one program for several, each with the names of what it reads and writes.

    Equal layers of a model merge equal programs: their statements are renamed once.
    """
    types: dict[str, TensorType] = {}
    statements: list[TensorExpr] = []
    names = {f"x{i}": f"x{i}" for i in range(num_inputs)}
    for same, inputs, outputs in parts:
        program, local = same.program, dict[str, str]()
        for (own, type_), tensor in zip(program.inputs, inputs, strict=True):
            types.setdefault(tensor, type_)
            local[own] = names[tensor]
        tensors = {output.tensor: tensor for output, tensor in zip(program.outputs, outputs, strict=True)}
        for statement in program.statements:
            tensor = tensors.get(statement.output, _INNER)
            name = names[tensor] = f"t{len(statements)}" if tensor.startswith(_INNER) else tensor
            local[statement.output] = name
            statements.append(_renamed(statement, name, local))
    return TensorProgram(
        tuple((f"x{i}", types[f"x{i}"]) for i in range(num_inputs)),
        tuple(statements),
        tuple(Output(f"y{i}", f"y{i}") for i in range(num_results)),
    )


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
