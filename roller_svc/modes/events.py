"""Nodes that have run, as a caller sees them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from roller_svc.errors import ArgumentError
from roller_svc.frontend.lang.input_types import kind_of
from roller_svc.ir.graph import Node
from roller_svc.ir.kernel import Buffer, Role
from roller_svc.runtime.binding import Array, NumpyArrays

MEMBERS = Callable[[Node, Mapping[str, Array]], "tuple[Member, ...]"]


class Member(NamedTuple):
    """An operator of a fused node, evaluated by the interpreter."""

    node: str
    operator: str
    outputs: dict[str, Array]


class Event:
    """A node that has run. Arrays are by the names of the graph's tensors, and no later node changes them."""

    __slots__ = ("_evaluate", "_node", "device", "inputs", "outputs", "seconds")

    def __init__(
        self,
        node: Node,
        device: str,
        inputs: dict[str, Array],
        outputs: dict[str, Array],
        seconds: float,
        evaluate: MEMBERS,
    ) -> None:
        self._node = node
        self._evaluate = evaluate
        self.device = device  # id of the device, or python:NAME
        self.inputs = inputs  # with constants
        self.outputs = outputs
        self.seconds = seconds  # of the node's call

    @property
    def node(self) -> str:
        """The name of the node."""
        return self._node.name

    @property
    def operator(self) -> str:
        """The node's operator; "fused" for several, or for an expression."""
        return self._node.operator

    def replace(self, arrays: Mapping[str, Any]) -> None:
        """Go on with copies of other arrays in place of some outputs. Raises ArgumentError for one that does not fit."""
        if not isinstance(arrays, Mapping):
            raise ArgumentError(f"replace takes arrays by the names of tensors, got {kind_of(arrays)}", code="not-an-array")
        types = dict(zip(self._node.outputs, self._node.output_types, strict=True))
        checked: dict[str, Array] = {}
        for tensor, array in arrays.items():
            if tensor not in types:
                known = ", ".join(types)
                raise ArgumentError(f"{tensor!r} is not an output of {self.node}; these are {known}", code="unknown-output")
            buffer = Buffer(tensor, tensor, Role.INPUT, types[tensor].dtype, types[tensor].shape)
            view = NumpyArrays().view("replacement", buffer, array)
            checked[tensor] = np.array(view, order="C").reshape(buffer.shape)
        self.outputs.update(checked)

    def members(self) -> tuple[Member, ...]:
        """Return the operators of a fused node with their results on this event's inputs, by the interpreter.

        Another node, and one whose operators were rewritten before they were fused, is its only member.
        """
        return self._evaluate(self._node, self.inputs)

    def __repr__(self) -> str:
        shown = ", ".join(f"{name}: {array.dtype}{list(array.shape)}" for name, array in self.outputs.items())
        return f"<roller_svc.Event {self.node} on {self.device}: {shown}>"
