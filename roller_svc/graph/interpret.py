"""Evaluate a graph by the reference interpreter. It defines the result of a model."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from roller_svc.errors import ArgumentError
from roller_svc.graph.python_ops import run_python_op
from roller_svc.graph.weights import Array, Weights
from roller_svc.ir.graph import Graph, HostNode, LoopNode, Node, OpNode
from roller_svc.semantics.interpreter import reference


def interpret(graph: Graph, weights: Weights, arrays: Mapping[str, Array]) -> dict[str, Array]:
    """Return the outputs by name. Each node rounds its results to their types.

    Raises:
        ArgumentError: an input is missing or has another type.
    """
    values = {name: _checked(name, arrays) for name, _ in graph.inputs}
    values |= {name: weights.array(constant) for name, constant in graph.constants.items()}
    last_reads = {tensor: node.name for node in graph.nodes for tensor in node.inputs}
    outputs = {tensor for _, tensor in graph.outputs}
    for node in graph.nodes:
        results = _run(node, weights, [values[tensor] for tensor in node.inputs])
        values |= zip(node.outputs, results, strict=True)
        for tensor in set(node.inputs):
            if last_reads[tensor] == node.name and tensor not in outputs:
                del values[tensor]
    return {name: values[tensor] for name, tensor in graph.outputs}


def _checked(name: str, arrays: Mapping[str, Array]) -> Array:
    if name not in arrays:
        given = ", ".join(arrays) or "none"
        raise ArgumentError(f"input {name} is missing; given are {given}", code="missing-argument")
    return np.asarray(arrays[name])


def _run(node: Node, weights: Weights, inputs: list[Array]) -> list[Array]:
    if isinstance(node, LoopNode):
        return _run_loop(node, weights, inputs)
    if isinstance(node, HostNode):
        return run_python_op(node, inputs)
    return _run_program(node, inputs)


def _run_program(node: OpNode, inputs: list[Array]) -> list[Array]:
    arrays = {name: value for (name, _), value in zip(node.program.inputs, inputs, strict=True)}
    results = reference(node.program, arrays)
    return [results[output.name] for output in node.program.outputs]


def _run_loop(node: LoopNode, weights: Weights, inputs: list[Array]) -> list[Array]:
    states, count = inputs[: node.carried], len(node.scanned)
    scanned, fixed = inputs[node.carried : node.carried + count], inputs[node.carried + count :]
    names = [name for name, _ in node.body.inputs]
    stacked: list[list[Array]] = [[] for _ in node.stacked]
    for step in range(node.steps):
        slices = [x[node.steps - 1 - step if back else step] for x, back in zip(scanned, node.scanned, strict=True)]
        named = dict(zip(names, [*states, *slices, *fixed], strict=True))
        results = list(interpret(node.body, weights, named).values())
        states = results[: node.carried]
        for pieces, piece in zip(stacked, results[node.carried :], strict=True):
            pieces.append(piece)
    whole = [np.stack(p[::-1] if back else p) for p, back in zip(stacked, node.stacked, strict=True)]
    return [*states, *whole]
