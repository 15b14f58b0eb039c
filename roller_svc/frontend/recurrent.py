"""Recurrent layers (RNN, GRU, LSTM): one product over all time steps, then a loop over the steps.

The product of the inputs with their weights does not depend on the states, so it is one matrix product before the
loop. A step of the loop adds the product of the hidden state with its weights, and applies the activations.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import Enum

import numpy as np

from roller_svc.errors import ArgumentError, ShapeError
from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType


class CellKind(Enum):
    """A recurrent cell. The value has a letter for each gate, in ONNX's order.

    Gates: i input, o output, f forget, c cell; z update, r reset, h hidden.
    """

    RNN = "h"
    GRU = "zrh"
    LSTM = "iofc"


@dataclass(frozen=True, slots=True)
class Activation:
    """An activation function and its parameters."""

    name: str  # of ACTIVATIONS
    alpha: float | None = None
    beta: float | None = None


SIGMOID, TANH = Activation("sigmoid"), Activation("tanh")
# Activations of each cell: of the gates, of the new value, of the LSTM's output.
DEFAULT_ACTIVATIONS = {CellKind.RNN: (TANH,), CellKind.GRU: (SIGMOID, TANH), CellKind.LSTM: (SIGMOID, TANH, TANH)}


@dataclass(frozen=True, slots=True)
class Cell:
    """A recurrent cell and its options."""

    kind: CellKind
    activations: tuple[Activation, ...]
    gates: str  # order of the gates in weights and biases; a permutation of the kind's value
    clip: float | None = None  # bound on the arguments of activations; not on an LSTM's cell state, as in onnxruntime
    linear_before_reset: bool = False  # GRU: the reset gate scales the product, and not the hidden state
    input_forget: bool = False  # LSTM: the forget gate is 1 minus the input gate


@dataclass(frozen=True, slots=True)
class CellWeights:
    """Weights of one direction of a layer with G gates."""

    input: Operand  # [G * hidden, inputs]
    hidden: Operand  # [G * hidden, hidden]
    input_bias: Operand | None = None  # [G * hidden]
    hidden_bias: Operand | None = None  # [G * hidden]
    peepholes: Operand | None = None  # LSTM: [3 * hidden], for the gates i, o, f


def add_direction(
    builder: GraphBuilder,
    cell: Cell,
    x: Operand,
    weights: CellWeights,
    states: Sequence[Operand | None],
    *,
    reverse: bool = False,
    lengths: Operand | None = None,
    stacked: bool = True,
) -> tuple[Operand | None, tuple[Operand, ...]]:
    """Add one direction of a layer. Return the hidden states of all steps and the last states.

    Args:
        x: [steps, batch, inputs].
        states: initial hidden state, and cell state of an LSTM, both [batch, hidden]; None is 0.
        reverse: run from the last step to the first.
        lengths: steps of each sequence, [batch]. Later steps keep the states, and their outputs are 0.
        stacked: whether the hidden states of all steps are needed; None is returned in place of them if not.

    Raises:
        ShapeError: a weight, bias or state does not fit.
    """
    hidden = _check(cell, x, weights, states)
    steps, batch = x.shape[:2]
    products, biases = _products(builder, cell, x, weights, hidden)
    initial = [builder.fill(0, x.dtype, (batch, hidden)) if state is None else state for state in states]
    scanned = [products] if lengths is None else [products, _running(builder, lengths, steps)]
    body = _Body(builder, builder.subgraph("step"))
    inner = body.builder
    carried = [inner.add_input(state.type) for state in initial]
    slices = [inner.add_input(type(whole.type)(whole.dtype, whole.shape[1:])) for whole in scanned]
    after = list(_STEPS[cell.kind](body, cell, slices[0], carried, weights, biases))
    output = after[0]
    if lengths is not None:
        after = [inner.call("where", [slices[1], new, old]) for new, old in zip(after, carried, strict=True)]
        output = inner.call("where", [slices[1], output, inner.fill(0, x.dtype)])
    outputs = [*after, output] if stacked else after
    graph = inner.finish([(f"result_{i}", result) for i, result in enumerate(outputs)])
    results = builder.add_loop(
        graph,
        steps,
        len(carried),
        [reverse] * len(scanned),
        [reverse] * stacked,
        [*initial, *scanned, *body.captured],
    )
    return (results[-1] if stacked else None), results[: len(carried)]


@dataclass(slots=True)
class _Body:
    """The body of the loop, and the tensors outside of it that every step reads."""

    outer: GraphBuilder
    builder: GraphBuilder
    captured: list[Operand]

    def __init__(self, outer: GraphBuilder, builder: GraphBuilder) -> None:
        self.outer, self.builder, self.captured = outer, builder, []

    def read(self, operand: Operand) -> Operand:
        """Return a tensor of the outer graph as one of the body."""
        constant = self.outer.constants.get(operand.name)
        if constant is not None:
            return self.builder.use_constant(constant)
        self.captured.append(operand)
        return self.builder.add_input(operand.type)


def _check(cell: Cell, x: Operand, weights: CellWeights, states: Sequence[Operand | None]) -> int:
    """Return the number of hidden units. Raises ShapeError if shapes do not fit."""
    count, kind = len(cell.kind.value), cell.kind.name
    if x.rank != 3 or weights.hidden.rank != 2:
        raise ShapeError(
            f"{kind}: inputs must be [steps, batch, inputs] and hidden weights a matrix, got "
            f"{list(x.shape)} and {list(weights.hidden.shape)}",
            code="operand-shape",
        )
    hidden = weights.hidden.shape[1]
    expected: list[tuple[str, Operand | None, tuple[int, ...]]] = [
        ("input weights", weights.input, (count * hidden, x.shape[2])),
        ("hidden weights", weights.hidden, (count * hidden, hidden)),
        ("input bias", weights.input_bias, (count * hidden,)),
        ("hidden bias", weights.hidden_bias, (count * hidden,)),
        ("peepholes", weights.peepholes, (3 * hidden,)),
        *((f"state {i}", state, (x.shape[1], hidden)) for i, state in enumerate(states)),
    ]
    for what, operand, shape in expected:
        if operand is not None and (operand.shape != shape or operand.dtype is not x.dtype):
            raise ShapeError(
                f"{kind}: {what} must be {x.dtype.value}{list(shape)}, got {operand.dtype.value}{list(operand.shape)}",
                code="operand-shape",
            )
    return hidden


def _products(builder: GraphBuilder, cell: Cell, x: Operand, weights: CellWeights, hidden: int) -> tuple[Operand, Operand | None]:
    """Return the products of all inputs, with biases, and the bias that a step adds to its own product."""
    first, second = weights.input_bias, weights.hidden_bias
    step_bias = None
    if cell.kind is CellKind.GRU and cell.linear_before_reset and second is not None:
        step_bias = _gate(builder, cell, second, "h", hidden)
        pieces = [
            builder.fill(0, x.dtype, (hidden,)) if gate == "h" else _gate(builder, cell, second, gate, hidden)
            for gate in cell.gates
        ]
        second = builder.call("concat", pieces, axis=0)
    biases = [bias for bias in (first, second) if bias is not None]
    if len(biases) == 2:
        biases = [builder.call("add", biases)]
    return builder.call("linear", [x, weights.input, *biases]), step_bias


def _running(builder: GraphBuilder, lengths: Operand, steps: int) -> Operand:
    """Return for each step and sequence, [steps, batch, 1], whether the sequence has that step."""
    numbers = builder.call("unsqueeze", [builder.count(steps)], axis=(1, 2))
    column = builder.call("unsqueeze", [builder.cast(lengths, DType.INT64)], axis=(1,))
    return builder.call("less", [numbers, column])


def select_part(builder: GraphBuilder, x: Operand, axis: int, start: int, stop: int) -> Operand:
    """Return a part of a tensor along an axis; of a constant of any size, as a constant."""
    if (start, stop) == (0, x.shape[axis]):
        return x
    value = builder.value(x)
    if value is None:
        return builder.call("slice", [x], starts=(start,), stops=(stop,), axes=(axis,))
    index = (slice(None),) * axis + (slice(start, stop),)
    return builder.add_constant(np.ascontiguousarray(value[index]), x.dtype)


def _gate(builder: GraphBuilder, cell: Cell, x: Operand, gates: str, hidden: int, axis: int = -1) -> Operand:
    """Return the part of adjacent gates."""
    start = cell.gates.index(gates[0])
    return select_part(builder, x, axis % x.rank, start * hidden, (start + len(gates)) * hidden)


def _activate(builder: GraphBuilder, cell: Cell, position: int, x: Operand) -> Operand:
    if cell.clip is not None:
        x = builder.call("clip", [x], least=-cell.clip, most=cell.clip)
    return apply_activation(builder, cell.activations[position], x)


def _step_rnn(
    body: _Body, cell: Cell, product: Operand, states: Sequence[Operand], weights: CellWeights, _: Operand | None
) -> tuple[Operand, ...]:
    builder = body.builder
    total = builder.call("add", [product, builder.call("linear", [states[0], body.read(weights.hidden)])])
    return (_activate(builder, cell, 0, total),)


def _step_gru(
    body: _Body, cell: Cell, product: Operand, states: Sequence[Operand], weights: CellWeights, bias: Operand | None
) -> tuple[Operand, ...]:
    builder, (state,), hidden = body.builder, states, weights.hidden.shape[1]

    def part(x: Operand, gate: str) -> Operand:
        return _gate(builder, cell, x, gate, hidden)

    if cell.linear_before_reset:
        recurrent = builder.call("linear", [state, body.read(weights.hidden)])
        update, reset = (_activate(builder, cell, 0, builder.call("add", [part(product, g), part(recurrent, g)])) for g in "zr")
        inner = part(recurrent, "h")
        inner = inner if bias is None else builder.call("add", [inner, body.read(bias)])
        inner = builder.call("mul", [reset, inner])
    else:
        # The two gates are neighbours in every order of gates.
        gates = "zr" if "zr" in cell.gates else "rz"
        outer = _gate(body.outer, cell, weights.hidden, gates, hidden, 0)
        both = builder.call("linear", [state, body.read(outer)])
        sums = builder.call("add", [part(product, gates), both])
        update, reset = (
            _activate(builder, cell, 0, select_part(builder, sums, 1, at * hidden, (at + 1) * hidden))
            for at in map(gates.index, "zr")
        )
        last = _gate(body.outer, cell, weights.hidden, "h", hidden, 0)
        inner = builder.call("linear", [builder.call("mul", [reset, state]), body.read(last)])
    new = _activate(builder, cell, 1, builder.call("add", [part(product, "h"), inner]))
    rest = builder.call("sub", [builder.fill(1.0, state.dtype), update])
    return (builder.call("add", [builder.call("mul", [rest, new]), builder.call("mul", [update, state])]),)


def _step_lstm(
    body: _Body, cell: Cell, product: Operand, states: Sequence[Operand], weights: CellWeights, _: Operand | None
) -> tuple[Operand, ...]:
    builder, (state, memory), hidden = body.builder, states, weights.hidden.shape[1]
    total = builder.call("add", [product, builder.call("linear", [state, body.read(weights.hidden)])])

    def gate(name: str, seen: Operand, position: int = 0) -> Operand:
        """Return a gate's activation. `seen`: the cell state that a peephole looks at."""
        value = _gate(builder, cell, total, name, hidden)
        if weights.peepholes is not None and name in "iof":
            at = "iof".index(name) * hidden
            peephole = body.read(select_part(body.outer, weights.peepholes, 0, at, at + hidden))
            value = builder.call("add", [value, builder.call("mul", [peephole, seen])])
        return _activate(builder, cell, position, value)

    enter = gate("i", memory)
    if cell.input_forget:
        keep = builder.call("sub", [builder.fill(1.0, state.dtype), enter])
    else:
        keep = gate("f", memory)
    added = builder.call("mul", [enter, gate("c", memory, 1)])
    new = builder.call("add", [builder.call("mul", [keep, memory]), added])
    leave = gate("o", new)
    return builder.call("mul", [leave, apply_activation(builder, cell.activations[2], new)]), new


_Step = Callable[[_Body, Cell, Operand, Sequence[Operand], CellWeights, Operand | None], tuple[Operand, ...]]
_STEPS: dict[CellKind, _Step] = {CellKind.RNN: _step_rnn, CellKind.GRU: _step_gru, CellKind.LSTM: _step_lstm}


def _affine(builder: GraphBuilder, x: Operand, alpha: float, beta: float) -> Operand:
    scaled = builder.call("mul", [builder.fill(alpha, x.dtype), x])
    return builder.call("add", [scaled, builder.fill(beta, x.dtype)])


def _scaled_tanh(builder: GraphBuilder, x: Operand, alpha: float, beta: float) -> Operand:
    inner = builder.call("tanh", [builder.call("mul", [builder.fill(beta, x.dtype), x])])
    return builder.call("mul", [builder.fill(alpha, x.dtype), inner])


# Activation → the parameters that it has, with defaults. None: there is no default.
ACTIVATIONS: dict[str, dict[str, float | None]] = {
    "relu": {}, "tanh": {}, "sigmoid": {}, "softsign": {}, "softplus": {},
    "leaky_relu": {"alpha": 0.01}, "thresholded_relu": {"alpha": 1.0}, "elu": {"alpha": 1.0},
    "hard_sigmoid": {"alpha": 0.2, "beta": 0.5},
    "affine": {"alpha": None, "beta": None}, "scaled_tanh": {"alpha": None, "beta": None},
}  # fmt: skip


def apply_activation(builder: GraphBuilder, activation: Activation, x: Operand) -> Operand:
    """Apply an activation. Raises ArgumentError if a parameter without a default is missing."""
    parameters: dict[str, float] = {}
    for name, default in ACTIVATIONS[activation.name].items():
        given = activation.alpha if name == "alpha" else activation.beta
        value = default if given is None else given
        if value is None:
            raise ArgumentError(f"activation {activation.name} needs {name}", code="missing-parameter")
        parameters[name] = value
    if activation.name == "affine":
        return _affine(builder, x, **parameters)
    if activation.name == "scaled_tanh":
        return _scaled_tanh(builder, x, **parameters)
    return builder.call(activation.name, [x], **parameters)
