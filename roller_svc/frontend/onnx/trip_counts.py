"""Trip counts of loops: the part of a body that computes the condition is run while the graph is built."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from roller_svc.errors import ArgumentError
from roller_svc.frontend.graph_builder import Array, GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.graph import OpNode

MAX_COUNTED_STEPS = 1 << 14


def find_deciding_inputs(body: GraphBuilder, condition: Operand, after: Mapping[str, Operand]) -> list[str]:
    """Return the inputs of a body on which its condition depends, in this step or in a later one.

    `after` has the new value of each state, by the name of the input with the old one.
    """
    found: dict[str, None] = {}
    waiting = [condition]
    while waiting:
        new = [name for name in body.inputs_of(waiting.pop()) if name not in found]
        found |= dict.fromkeys(new)
        waiting += [after[name] for name in new if name in after]
    return list(found)


def count_steps(
    body: GraphBuilder,
    condition: Operand,
    counter: str,
    after: Mapping[str, Operand],
    first: Mapping[str, Array],
    most: int | None,
) -> int:
    """Return the number of steps of a loop that has at least one.

    Args:
        body: the body of the loop.
        condition: computed by each step; whether there is another one.
        counter: the input that has the number of the step.
        after: the new value of each state, by the name of the input with the old one.
        first: the first values of the states that decide the condition.
        most: the greatest number of steps; None if there is none.

    Raises:
        ArgumentError: the loop does not end, or a loop decides its condition.
    """
    fixed = body.value(condition)
    if fixed is not None and (most is not None or not fixed.all()):
        return 1 if most is None or not fixed.all() else most
    nodes = _nodes_before(body, [condition, *(after[name] for name in first)])
    values: dict[str, Array] = dict(first)
    limit = MAX_COUNTED_STEPS if most is None else most
    for step in range(min(limit, MAX_COUNTED_STEPS)):
        values[counter] = np.asarray(step, np.int64)
        for node in nodes:
            operands = [_value(body, values, name) for name in node.inputs]
            arrays = {name: value for (name, _), value in zip(node.program.inputs, operands, strict=True)}
            results = body.evaluate(node.program, arrays)
            values |= {tensor: results[output.name] for tensor, output in zip(node.outputs, node.program.outputs, strict=True)}
        if not _value(body, values, condition.name).all():
            return step + 1
        values |= {name: _value(body, values, after[name].name) for name in first}
    if most is not None and most <= MAX_COUNTED_STEPS:
        return most
    raise ArgumentError(
        f"the loop does not end within {MAX_COUNTED_STEPS} steps",
        code="unsupported-attribute",
        hint="give it a trip count, and a condition that stays true",
    )


def _nodes_before(body: GraphBuilder, results: list[Operand]) -> list[OpNode]:
    """Return the nodes that compute these tensors, in order."""
    needed = {operand.name for operand in results}
    nodes: list[OpNode] = []
    for node in reversed(body.nodes):
        if needed.isdisjoint(node.outputs):
            continue
        if not isinstance(node, OpNode):
            raise ArgumentError(
                "a loop inside of the loop decides its condition", code="unsupported-attribute", hint="give the loop a trip count"
            )
        needed |= set(node.inputs)
        nodes.append(node)
    return nodes[::-1]


def _value(body: GraphBuilder, values: Mapping[str, Array], name: str) -> Array:
    """Return the value of a tensor in this step."""
    return values[name] if name in values else body.weights.array(body.constants[name])
