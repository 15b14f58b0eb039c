"""Orders of nodes."""

from __future__ import annotations

import pytest
from graphs import add_input, builder_of

from roller_svc.errors import InvariantError
from roller_svc.ir.graph import OpNode, in_dependency_order


def chain() -> list[OpNode]:
    builder, _ = builder_of()
    x = add_input(builder, "x", 4)
    for operator in ("exp", "relu", "tanh"):
        x = builder.call(operator, [x])
    return [node for node in builder.finish([("y", x)]).nodes if isinstance(node, OpNode)]


def test_nodes_follow_what_they_read() -> None:
    exp, relu, tanh = chain()
    assert in_dependency_order([tanh, exp, relu]) == (exp, relu, tanh)


def test_nodes_that_depend_on_each_other_are_refused() -> None:
    _, relu, tanh = chain()
    again = OpNode("again", "relu", relu.program, tanh.outputs, relu.inputs)
    with pytest.raises(InvariantError, match="depends on itself"):
        in_dependency_order([relu, tanh, again])
