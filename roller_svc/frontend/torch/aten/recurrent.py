"""ATen's recurrent layers, as loops over the steps."""

from __future__ import annotations

from functools import partial

from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.recurrent import DEFAULT_ACTIVATIONS, Activation, Cell, CellKind, CellWeights, add_direction
from roller_svc.frontend.torch.aten.shapes import concat, select
from roller_svc.frontend.torch.call import AtenCall, Converter

# Gates in torch's order, with the letters of the cells.
_LSTM = Cell(CellKind.LSTM, DEFAULT_ACTIVATIONS[CellKind.LSTM], "ifco")
_GRU = Cell(CellKind.GRU, DEFAULT_ACTIVATIONS[CellKind.GRU], "rzh", linear_before_reset=True)
_TANH = Cell(CellKind.RNN, DEFAULT_ACTIVATIONS[CellKind.RNN], "h")
_RELU = Cell(CellKind.RNN, (Activation("relu"),), "h")


def _layers(call: AtenCall, cell: Cell) -> list[Operand]:
    """Convert layers of one or two directions: output, then the last states."""
    x, count = call.operand("input"), call.integer("num_layers")
    if call.flag("train") and call.number("dropout"):
        raise call.unsupported("dropout between layers, as in training,")
    call.value("dropout")
    first = call.operands("hx") if cell.kind is CellKind.LSTM else [call.operand("hx")]
    weights, each = call.operands("params"), 4 if call.flag("has_biases") else 2
    directions = 2 if call.flag("bidirectional") else 1
    if len(weights) != each * directions * count:
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
            parameters = CellWeights(*weights[each * number : each * (number + 1)])
            output, after = add_direction(call.builder, cell, x, parameters, states, reverse=bool(direction))
            outputs += [] if output is None else [output]
            for stacked, state in zip(last, after, strict=True):
                stacked.append(call.run("unsqueeze", state, axis=(0,)))
        x = concat(call, outputs, 2)
    if batch_first:
        x = call.run("transpose", x, permutation=(1, 0, 2))
    whole = [x, *(concat(call, stacked, 0) for stacked in last)]
    return [call.run("squeeze", y, axis=(1,)) for y in whole] if single else whole


_LAYERS = {"lstm": _LSTM, "gru": _GRU, "rnn_tanh": _TANH, "rnn_relu": _RELU}
TABLE: dict[str, Converter] = {
    name: partial(_layers, cell=cell)
    for kind, cell in _LAYERS.items()
    for name in (f"aten.{kind}.input", f"roller_recurrent.{kind}.default")
}
