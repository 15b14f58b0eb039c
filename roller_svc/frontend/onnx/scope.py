"""Which tensors the nodes of a graph, of a function's body or of a subgraph see."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import chain

from roller_svc.errors import ArgumentError
from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.onnx.tensors import Tensor
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType


@dataclass(slots=True)
class Scope:
    """Tensors by their ONNX names. A subgraph sees those of the graphs around it."""

    builder: GraphBuilder
    parent: Scope | None = None
    tensors: dict[str, Tensor] = field(default_factory=dict)
    captured: dict[str, Operand] = field(default_factory=dict)  # inputs of a loop's body → tensors outside of it
    caller: Scope | None = None  # of a function's body, which does not see its names

    def define(self, name: str, tensor: Tensor) -> None:
        if name in self.tensors:
            raise ArgumentError(f"two tensors are called {name!r}", code="invalid-graph")
        self.tensors[name] = tensor

    def find(self, name: str) -> Tensor | None:
        """Return a tensor, as one of this scope's builder."""
        if name in self.tensors:
            return self.tensors[name]
        outer = None if self.parent is None else self.parent.find(name)
        if outer is None or self.parent is None or self.parent.builder is self.builder:
            return outer
        self.tensors[name] = self.take(outer)
        return self.tensors[name]

    def take(self, outer: Tensor) -> Tensor:
        """Return a tensor of the graph around as one of this scope's builder, the body of a loop."""
        if outer.operand is None or self.parent is None:
            return outer
        constant = self.parent.builder.constants.get(outer.operand.name)
        if constant is not None:
            return Tensor(self.builder.use_constant(constant), outer.value)
        inside = self.builder.add_input(outer.operand.type)
        self.captured[inside.name] = outer.operand
        return Tensor(inside)

    def operand(self, tensor: Tensor, what: str) -> Operand:
        """Return the operand of a tensor; a constant if it has no elements. Raises ArgumentError if omitted."""
        if tensor.operand is not None:
            return tensor.operand
        if tensor.value is None:
            raise ArgumentError(f"{what} is omitted", code="invalid-node")
        return self.builder.add_constant(tensor.value, DType(tensor.value.dtype.name))

    def inputs_of(self, operand: Operand) -> list[str]:
        """Return the inputs of the model on which a tensor of this scope's builder depends; no states of loops."""
        scopes: list[Scope] = []
        scope: Scope | None = self
        while scope is not None and scope.builder is self.builder:
            scopes.append(scope)
            scope = scope.parent or scope.caller
        names = self.builder.inputs_of(operand)
        if scope is None:
            return names
        captured = (pair for each in scopes for pair in each.captured.items())
        outside = (scope.inputs_of(operand) for name, operand in captured if name in names)
        return list(dict.fromkeys(chain.from_iterable(outside)))
