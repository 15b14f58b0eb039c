"""ATen's recurrent layers, as loops over the steps."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.torch.aten.shapes import concat, select
from roller_svc.frontend.torch.call import AtenCall, Converter
from roller_svc.ir.program import TensorType

# (builder, products of the input, products of the first state, states) → next states
Cell = Callable[[GraphBuilder, Operand, Operand, Sequence[Operand]], list[Operand]]


def _parts(builder: GraphBuilder, x: Operand, count: int) -> list[Operand]:
    """Return equal parts of the last dimension."""
    size = x.shape[-1] // count
    return [
        builder.call("slice", [x], starts=(i * size,), stops=((i + 1) * size,), axes=(x.rank - 1,))
        for i in range(count)
    ]


def _lstm_cell(builder: GraphBuilder, x: Operand, h: Operand, states: Sequence[Operand]) -> list[Operand]:
    gates = _parts(builder, builder.call("add", [x, h]), 4)
    i, f, o = (builder.call("sigmoid", [gates[n]]) for n in (0, 1, 3))
    g = builder.call("tanh", [gates[2]])
    c = builder.call("add", [builder.call("mul", [f, states[1]]), builder.call("mul", [i, g])])
    return [builder.call("mul", [o, builder.call("tanh", [c])]), c]


def _gru_cell(builder: GraphBuilder, x: Operand, h: Operand, states: Sequence[Operand]) -> list[Operand]:
    """Compute torch's gated unit: the reset gate scales the product of the state, its bias included."""
    of_x, of_h = _parts(builder, x, 3), _parts(builder, h, 3)
    r, z = (builder.call("sigmoid", [builder.call("add", [of_x[n], of_h[n]])]) for n in (0, 1))
    n = builder.call("tanh", [builder.call("add", [of_x[2], builder.call("mul", [r, of_h[2]])])])
    difference = builder.call("mul", [z, builder.call("sub", [states[0], n])])
    return [builder.call("add", [n, difference])]


def _plain_cell(
    builder: GraphBuilder, x: Operand, h: Operand, states: Sequence[Operand], activation: str
) -> list[Operand]:
    return [builder.call(activation, [builder.call("add", [x, h])])]


def _layers(call: AtenCall, cell: Cell, states_of_cell: int) -> list[Operand]:
    """Convert layers of one or two directions: output, then the last states."""
    x, count = call.operand("input"), call.integer("num_layers")
    if call.flag("train") and call.number("dropout"):
        raise call.unsupported("dropout between layers, as in training,")
    call.value("dropout")
    first = call.operands("hx") if states_of_cell > 1 else [call.operand("hx")]
    weights, biased = call.operands("params"), call.flag("has_biases")
    directions = 2 if call.flag("bidirectional") else 1
    each = 4 if biased else 2
    if len(weights) != each * directions * count or len(first) != states_of_cell:
        raise call.unsupported("a projection of the states")
    single = x.rank == 2
    if single:
        x = call.run("unsqueeze", x, axis=(1,))
        first = [call.run("unsqueeze", state, axis=(1,)) for state in first]
    if batch_first := call.flag("batch_first") and not single:
        x = call.run("transpose", x, permutation=(1, 0, 2))
    last: list[list[Operand]] = [[] for _ in first]
    for layer in range(count):
        outputs = []
        for direction in range(directions):
            number = layer * directions + direction
            states = [select(call, state, 0, number) for state in first]
            results = _run(
                call, cell, x, states, weights[each * number : each * (number + 1)], backward=bool(direction)
            )
            for stacked, state in zip(last, results[:-1], strict=True):
                stacked.append(call.run("unsqueeze", state, axis=(0,)))
            outputs.append(results[-1])
        x = concat(call, outputs, 2)
    if batch_first:
        x = call.run("transpose", x, permutation=(1, 0, 2))
    whole = [x, *(concat(call, stacked, 0) for stacked in last)]
    return [call.run("squeeze", y, axis=(1,)) for y in whole] if single else whole


def _run(
    call: AtenCall, cell: Cell, x: Operand, states: Sequence[Operand], weights: Sequence[Operand], *, backward: bool
) -> tuple[Operand, ...]:
    """Return the last states and the outputs of one layer in one direction. The input's products need no loop."""
    w, u, *biases = weights
    products = call.run("linear", x, w, *biases[:1])
    body = call.builder.subgraph("cell")
    inner = [body.add_input(state.type) for state in states]
    piece = body.add_input(TensorType(products.dtype, products.shape[1:]))
    fixed = [u, *biases[1:]]
    known = [call.builder.constants.get(weight.name) for weight in fixed]
    operands = [
        body.add_input(weight.type) if constant is None else body.use_constant(constant)
        for weight, constant in zip(fixed, known, strict=True)
    ]
    following = cell(body, piece, body.call("linear", [inner[0], *operands]), inner)
    graph = body.finish([(f"result_{i}", y) for i, y in enumerate([*following, following[0]])])
    captured = [weight for weight, constant in zip(fixed, known, strict=True) if constant is None]
    return call.builder.add_loop(
        graph, x.shape[0], len(states), [backward], [backward], [*states, products, *captured]
    )  # fmt: skip


TABLE: dict[str, Converter] = {
    "aten.lstm.input": partial(_layers, cell=_lstm_cell, states_of_cell=2),
    "aten.gru.input": partial(_layers, cell=_gru_cell, states_of_cell=1),
    "aten.rnn_tanh.input": partial(_layers, cell=partial(_plain_cell, activation="tanh"), states_of_cell=1),
    "aten.rnn_relu.input": partial(_layers, cell=partial(_plain_cell, activation="relu"), states_of_cell=1),
}
