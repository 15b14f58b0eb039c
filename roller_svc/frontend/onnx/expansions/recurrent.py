"""Expansions of RNN, GRU and LSTM."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.tensors import Tensor
from roller_svc.frontend.onnx.use import Node
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.recurrent import (
    ACTIVATIONS,
    DEFAULT_ACTIVATIONS,
    Activation,
    Cell,
    CellKind,
    CellWeights,
    add_direction,
    select_part,
)

# Direction → whether each direction runs backward.
_DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}
# ONNX's names in lower case → ours.
_NAMES = {name.replace("_", ""): name for name in ACTIVATIONS}


def _recurrent(node: Node, builder: GraphBuilder, kind: CellKind) -> Sequence[Tensor]:
    directions = _DIRECTIONS[node.choice("direction", "forward", _DIRECTIONS)]
    batch_first = bool(node.integer("layout", 0))
    x, hidden_weights = node.operand(0), node.operand(2)
    if x.rank != 3 or hidden_weights.rank != 3:
        raise node.invalid("X must be [steps, batch, inputs], and R [directions, gates * hidden, hidden]")
    hidden = node.integer("hidden_size", hidden_weights.shape[2])
    if hidden != hidden_weights.shape[2]:
        raise node.invalid(f"hidden_size is {hidden}, R has {hidden_weights.shape[2]} hidden units")
    cells = _cells(node, kind, len(directions))
    x = builder.call("transpose", [x], permutation=(1, 0, 2)) if batch_first else x
    states = [node.optional(position) for position in ((5, 6) if kind is CellKind.LSTM else (5,))]
    if batch_first:
        states = [None if state is None else builder.call("transpose", [state], permutation=(1, 0, 2)) for state in states]
    lengths, wanted = _lengths(node, x.shape[0], x.shape[1]), [*node.results, False, False, False]
    outputs, last = list[Operand](), list[tuple[Operand, ...]]()
    for d, (reverse, cell) in enumerate(zip(directions, cells, strict=True)):
        weights = _weights(node, builder, kind, d, len(directions))
        initial = [None if state is None else _select(node, builder, state, d, len(directions)) for state in states]
        output, after = add_direction(builder, cell, x, weights, initial, reverse=reverse, lengths=lengths, stacked=wanted[0])
        outputs += [] if output is None else [output]
        last.append(after)
    joined = [_join(builder, [states_[i] for states_ in last], 1 if batch_first else 0) for i in range(len(last[0]))]
    if not wanted[0]:
        return [Tensor(), *map(Tensor, joined)]
    whole = _join(builder, outputs, 1)  # [steps, directions, batch, hidden]
    whole = builder.call("transpose", [whole], permutation=(2, 0, 1, 3)) if batch_first else whole
    return [Tensor(whole), *map(Tensor, joined)]


def _cells(node: Node, kind: CellKind, directions: int) -> list[Cell]:
    """Return the cell of each direction."""
    count = len(DEFAULT_ACTIVATIONS[kind])
    activations = _activations(node, count * directions) or DEFAULT_ACTIVATIONS[kind] * directions
    clip = node.attribute("clip")
    if clip is not None and not isinstance(clip, int | float):
        raise node.invalid(f"attribute clip must be a number, got {clip!r:.60}")
    before_reset = bool(node.integer("linear_before_reset", 0)) if kind is CellKind.GRU else False
    input_forget = bool(node.integer("input_forget", 0)) if kind is CellKind.LSTM else False
    return [
        Cell(kind, tuple(activations[d * count : (d + 1) * count]), kind.value, clip or None, before_reset, input_forget)
        for d in range(directions)
    ]


def _activations(node: Node, count: int) -> tuple[Activation, ...] | None:
    """Return the activations of all directions; None if they are the default ones.

    The lists of alpha and beta have a number for each activation that takes one, in order.
    """
    names = node.attribute("activations")
    parameters = {name: list(_numbers(node, f"activation_{name}")) for name in ("alpha", "beta")}
    if names is None:
        if any(parameters.values()):
            raise node.invalid("activation_alpha and activation_beta need activations")
        return None
    if not isinstance(names, list) or len(names) != count:
        raise node.invalid(f"activations must be {count} names, got {names!r:.80}")
    result = []
    for name in names:
        text = name.decode("utf-8", "replace") if isinstance(name, bytes) else str(name)
        known = _NAMES.get(text.lower())
        if known is None:
            raise node.unsupported(f"activation {text[:40]!r}", f"supported are {', '.join(sorted(_NAMES))}")
        values = {key: parameters[key].pop(0) for key in ACTIVATIONS[known] if parameters[key]}
        result.append(Activation(known, **values))
    for key, left in parameters.items():
        if left:
            raise node.invalid(f"activation_{key} has {len(left)} numbers more than activations take")
    return tuple(result)


def _numbers(node: Node, name: str) -> list[float]:
    value = node.attribute(name)
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(item, int | float) for item in value):
        raise node.invalid(f"attribute {name} must be a list of numbers, got {value!r:.60}")
    return [float(item) for item in value]


def _lengths(node: Node, steps: int, batch: int) -> Operand | None:
    """Return the lengths of the sequences; None if all have every step."""
    node.read.add(4)
    if not node.has(4):
        return None
    lengths, value = node.operand(4), node.constants[4]
    if lengths.shape != (batch,):
        raise node.invalid(f"sequence_lens must have the shape [{batch}], got {list(lengths.shape)}")
    if isinstance(value, np.ndarray):
        if value.min() < 0 or value.max() > steps:
            raise node.invalid(f"sequence_lens must be from 0 to {steps}, got {value.min()} to {value.max()}")
        if value.min() == steps:
            return None
    return lengths


def _select(node: Node, builder: GraphBuilder, x: Operand, d: int, directions: int) -> Operand:
    """Return the part of one direction, without the dimension of directions."""
    if x.shape[:1] != (directions,):
        raise node.invalid(f"an input of {directions} directions is {list(x.shape)}")
    value = builder.value(x)
    if value is not None:
        return builder.add_constant(value[d], x.dtype)
    return builder.call("squeeze", [select_part(builder, x, 0, d, d + 1)], axis=(0,))


def _weights(node: Node, builder: GraphBuilder, kind: CellKind, d: int, directions: int) -> CellWeights:
    first, second = (_select(node, builder, node.operand(position), d, directions) for position in (1, 2))
    biases: tuple[Operand | None, Operand | None] = (None, None)
    if node.has(3):
        both = _select(node, builder, node.operand(3), d, directions)
        half = len(kind.value) * second.shape[-1]
        if both.shape != (2 * half,):
            raise node.invalid(f"B must have {2 * half} numbers for each direction, got {list(both.shape)}")
        biases = (select_part(builder, both, 0, 0, half), select_part(builder, both, 0, half, 2 * half))
    peepholes = None
    if kind is CellKind.LSTM and node.has(7):
        peepholes = _select(node, builder, node.operand(7), d, directions)
    return CellWeights(first, second, *biases, peepholes=peepholes)


def _join(builder: GraphBuilder, parts: Sequence[Operand], axis: int) -> Operand:
    """Return the directions along a new dimension."""
    pieces = [builder.call("unsqueeze", [part], axis=(axis,)) for part in parts]
    return builder.join("concat", pieces, axis=axis)


RECURRENT: dict[str, Expansion] = {kind.name: partial(_recurrent, kind=kind) for kind in CellKind}
