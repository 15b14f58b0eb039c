"""Statements of a nest at one outer point, for any loops over the inner axes.

Register tensors of a group are values of the outer point ("rows"): storage nodes that later statements read.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr, Load, rewrite, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.program import Axis, StatementKind, TensorExpr
from roller_svc.ir.schedule import Compute, Loop, LoopKind, Node, Scope, Storage

ACCUMULATOR = ".acc"


def local_name(tensor: str) -> str:
    """Return the name of the storage node of a tensor's value at the outer point. Names of programs have no dots."""
    return f"{tensor}.row"


def acc_name(tensor: str) -> str:
    return f"{tensor}{ACCUMULATOR}"


def inner_axes(statement: TensorExpr, outer: Iterable[Axis]) -> tuple[Axis, ...]:
    names = {a.name for a in outer}
    return tuple(a for a in statement.axes if a.name not in names)


def row_tensors(group: KernelGroup) -> frozenset[str]:
    """Return the tensors that the group writes and later reads: one value for each outer point."""
    read = {t for s in group.statements for t in s.reads_tensors}
    return frozenset(s.output for s in group.statements if s.output in read)


def row_dtype(statement: TensorExpr) -> DType:
    return statement.type.dtype.compute


def convert_to_type(value: Expr, statement: TensorExpr) -> Expr:
    """Convert a value to the statement's type: integers wrap, floats are not rounded until they are stored."""
    dtype = statement.type.dtype
    if value.dtype is dtype:
        return value
    return Cast(value, dtype, implicit=dtype.is_float)


@dataclass(frozen=True, slots=True)
class RowReads:
    """Replaces loads of row tensors by their storage at `index`, and axes by the values in `axes`."""

    rows: frozenset[str]
    index: tuple[Expr, ...]
    axes: Mapping[str, Expr]

    def apply(self, expr: Expr) -> Expr:
        def change(node: Expr) -> Expr:
            if isinstance(node, Load) and node.tensor in self.rows:
                return Load(local_name(node.tensor), self.index, node.dtype)
            return node

        return substitute(rewrite(expr, change), self.axes)

    def store(self, group: KernelGroup, statement: TensorExpr, value: Expr) -> Iterator[Compute]:
        """Yield the stores of a statement's value: in its row tensor, if it has one, then in memory."""
        value = convert_to_type(value, statement)
        if statement.output in self.rows:
            yield Compute(local_name(statement.output), self.index, value)
            value = Load(local_name(statement.output), self.index, statement.type.dtype)
        if statement.output not in group.register_tensors:
            yield Compute(statement.output, tuple(self.apply(i) for i in statement.index), value)

    def with_axes(self, more: Mapping[str, Expr]) -> RowReads:
        return replace(self, axes={**self.axes, **more})


def row_storages(
    statements: Iterable[TensorExpr], rows: frozenset[str], *shape: int, scope: Scope = Scope.REGISTER
) -> list[Storage]:
    """Return the storages of those outputs that are row tensors, at outer points of a shape."""
    return [Storage(local_name(s.output), row_dtype(s), shape, scope, ()) for s in statements if s.output in rows]


def nest_loops(kind: LoopKind, loops: Iterable[tuple[str, int]], nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Return the nodes inside loops of these variables and extents, the first one outermost."""
    nodes = tuple(nodes)
    for var, extent in reversed(list(loops)):
        nodes = (Loop(var, extent, kind, nodes),)
    return nodes


def wrap_in_storages(storages: Iterable[Storage], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes inside all of the storages."""
    for storage in reversed(list(storages)):
        nodes = (replace(storage, body=nodes),)
    return nodes


def register(name: str, dtype: DType, *shape: int) -> Storage:
    return Storage(name, dtype, tuple(shape), Scope.REGISTER, ())


def is_reduction(statement: TensorExpr) -> bool:
    return statement.kind is StatementKind.REDUCE
