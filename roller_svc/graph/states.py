"""States of graphs: memory of the caller that a call updates."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace

from roller_svc.errors import ArgumentError
from roller_svc.frontend.lang.input_types import short_repr
from roller_svc.ir.graph import Graph, Node, OpNode

_ANY = "*"


def updates_of(node: Node) -> Iterator[tuple[str, str]]:
    """Yield the tensors that a node updates in place, each with the result that has its memory."""
    if isinstance(node, OpNode) and node.program.donated:
        inputs = {name: tensor for (name, _), tensor in zip(node.program.inputs, node.inputs, strict=True)}
        for output, tensor in zip(node.program.outputs, node.outputs, strict=True):
            if output.name in node.program.donated:
                yield inputs[output.name], tensor


def pair_states(graph: Graph, pairs: Mapping[str, str] | None) -> Graph:
    """Return the graph with inputs and outputs paired to states, which have the names of the inputs.

    Args:
        graph: the graph.
        pairs: the output with the new value of each input. A name of both may have one `*`, which stands for any text.

    Raises ArgumentError if an input or output does not exist or is in two pairs, or if their types differ.
    """
    types, inputs, outputs = graph.types, dict(graph.inputs), dict(graph.outputs)
    paired: dict[str, str] = {}  # state by output
    for before, after in (pairs or {}).items():
        for name, result in _expand(before, after, inputs):
            if result not in outputs:
                raise _unknown("output", result, outputs)
            if name in paired.values() or name in graph.states:
                raise ArgumentError(f"states: {name!r} is paired with {result!r}, and is a state already", code="invalid-option")
            if result in paired:
                other = paired[result]
                raise ArgumentError(
                    f"states: {result!r} is the new value of {other!r}, and cannot be that of {name!r} too", code="invalid-option"
                )
            if types[outputs[result]] != inputs[name]:
                kinds = f"{inputs[name].dtype.value}{list(inputs[name].shape)}", types[outputs[result]]
                raise ArgumentError(
                    f"states: {result!r} must have the type of {name!r}, whose new value it is, {kinds[0]}, "
                    f"got {kinds[1].dtype.value}{list(kinds[1].shape)}",
                    code="invalid-option",
                    hint="a cache that grows is no state: export the model with a cache of fixed length",
                )
            paired[result] = name
    renamed = tuple((paired.get(name, name), tensor) for name, tensor in graph.outputs)
    if len(dict(renamed)) < len(renamed):
        raise ArgumentError("states: another output has the name of a state", code="invalid-option")
    return replace(graph, outputs=renamed, states=(*graph.states, *paired.values()))


def _expand(before: object, after: object, inputs: Mapping[str, object]) -> Iterator[tuple[str, str]]:
    """Yield the pairs of names that two patterns stand for."""
    if not isinstance(before, str) or not isinstance(after, str) or not before.count(_ANY) == after.count(_ANY) <= 1:
        raise ArgumentError(
            f"states must map inputs to outputs, both with at most one *, got {short_repr(before)}: {short_repr(after)}",
            code="invalid-option",
            hint='states={"past_*": "present_*"}',
        )
    first, star, last = before.partition(_ANY)
    size = len(first) + len(last)
    matching = [n for n in inputs if n == before or (star and len(n) >= size and n.startswith(first) and n.endswith(last))]
    if not matching:
        raise _unknown("input", before, inputs)
    for name in matching:
        yield name, after.replace(_ANY, name[len(first) : len(name) - len(last)]) if star else after


def _unknown(kind: str, name: str, known: Mapping[str, object]) -> ArgumentError:
    listed = ", ".join(known) or "none"
    return ArgumentError(f"states: no {kind} is called {name!r}; {kind}s are {listed}", code="unknown-argument")
