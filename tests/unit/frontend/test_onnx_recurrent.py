"""RNN, GRU and LSTM of ONNX against numpy: every option, and the graph that they become."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx_node_models import import_node, model_of, run_node

from roller_svc.errors import UnsupportedModelError
from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.recurrent import DEFAULT_ACTIVATIONS, Cell, CellKind, CellWeights, add_direction
from roller_svc.graph.interpret import interpret
from roller_svc.graph.weights import Weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import LoopNode
from roller_svc.ir.program import TensorType
from roller_svc.semantics.interpreter import reference

Array = np.ndarray[Any, Any]
STEPS, BATCH, INPUTS, HIDDEN = 4, 3, 5, 2
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
FUNCTIONS: dict[str, Any] = {
    "Relu": lambda x, a, b: np.maximum(x, 0), "Tanh": lambda x, a, b: np.tanh(x),
    "Sigmoid": lambda x, a, b: 1 / (1 + np.exp(-x)), "Affine": lambda x, a, b: a * x + b,
    "LeakyRelu": lambda x, a, b: np.where(x >= 0, x, (0.01 if a is None else a) * x),
    "ThresholdedRelu": lambda x, a, b: np.where(x > (1 if a is None else a), x, 0),
    "ScaledTanh": lambda x, a, b: a * np.tanh(b * x),
    "HardSigmoid": lambda x, a, b: np.clip((0.2 if a is None else a) * x + (0.5 if b is None else b), 0, 1),
    "Elu": lambda x, a, b: np.where(x >= 0, x, (1 if a is None else a) * np.expm1(x)),
    "Softsign": lambda x, a, b: x / (1 + np.abs(x)), "Softplus": lambda x, a, b: np.log1p(np.exp(x)),
}  # fmt: skip
WITH_BETA = ("Affine", "ScaledTanh", "HardSigmoid")
WITH_ALPHA = (*WITH_BETA, "LeakyRelu", "ThresholdedRelu", "Elu")
USUAL = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


def step(kind: str, functions: list[Any], product: Array, h: Array, c: Array, parts: dict[str, Any]) -> tuple[Array, Array]:
    """Return the next states. `product`: of the input with W, and its bias."""
    r, rb, p = parts["r"], parts["rb"], parts["p"]

    def part(x: Array, gate: int) -> Array:
        return x[..., gate * HIDDEN : (gate + 1) * HIDDEN]

    recurrent = h @ r.T
    if kind == "RNN":
        return functions[0](product + recurrent + rb), c
    if kind == "GRU":
        z, reset = (functions[0](part(product + recurrent + rb, gate)) for gate in (0, 1))
        if parts["before"]:
            inner = reset * (part(recurrent, 2) + part(rb, 2))
        else:
            inner = (reset * h) @ r[2 * HIDDEN :].T + part(rb, 2)
        new = functions[1](part(product, 2) + inner)
        return (1 - z) * new + z * h, c
    total = product + recurrent + rb
    i = functions[0](part(total, 0) + part(p, 0) * c)
    f = 1 - i if parts["forget"] else functions[0](part(total, 2) + part(p, 2) * c)
    new = f * c + i * functions[1](part(total, 3))
    o = functions[0](part(total, 1) + part(p, 1) * new)
    return o * parts["last"](new), new


def layer(kind: str, attributes: dict[str, Any], tensors: list[Array | None]) -> list[Array]:
    """Return Y, Y_h and Y_c by ONNX's equations, in float64."""
    x, w, r, b, lengths, h0, c0, p = [*(None if t is None else t.astype(np.float64) for t in tensors), *[None] * 8][:8]
    assert x is not None
    assert w is not None
    assert r is not None
    first = attributes.get("layout", 0)
    x = x.transpose(1, 0, 2) if first else x
    count, gates = len(w), GATES[kind]
    names = attributes.get("activations", USUAL[kind] * count)
    alphas, betas = (list(attributes.get(f"activation_{key}", [])) for key in ("alpha", "beta"))
    clip = attributes.get("clip", 0) or np.inf
    functions = []
    for name in names:
        a = alphas.pop(0) if alphas and name in WITH_ALPHA else None
        beta = betas.pop(0) if betas and name in WITH_BETA else None
        functions.append(lambda v, f=FUNCTIONS[name], a=a, beta=beta, c=clip: f(np.clip(v, -c, c), a, beta))
    states = [np.zeros((count, BATCH, HIDDEN)) if s is None else s.transpose(1, 0, 2) if first else s for s in (h0, c0)]
    y, last = np.zeros((STEPS, count, BATCH, HIDDEN)), [s.copy() for s in states]
    for d in range(count):
        parts = {
            "r": r[d], "rb": np.zeros(gates * HIDDEN) if b is None else b[d, gates * HIDDEN :],
            "p": np.zeros(3 * HIDDEN) if p is None else p[d], "before": attributes.get("linear_before_reset", 0),
            "forget": attributes.get("input_forget", 0),
        }  # fmt: skip
        mine = functions[d * len(USUAL[kind]) : (d + 1) * len(USUAL[kind])]
        if kind == "LSTM":  # the clip is not applied to the cell state
            parts["last"] = lambda v, f=mine[2]: f.__defaults__[0](v, *f.__defaults__[1:3])
        backward = attributes.get("direction") == "reverse" or d == 1
        h, c = states[0][d], states[1][d]
        for t in reversed(range(STEPS)) if backward else range(STEPS):
            product = x[t] @ w[d].T + (0 if b is None else b[d, : gates * HIDDEN])
            h2, c2 = step(kind, mine, product, h, c, parts)
            runs = np.ones((BATCH, 1), bool) if lengths is None else t < lengths[:, None]
            h, c = np.where(runs, h2, h), np.where(runs, c2, c)
            y[t, d] = np.where(runs, h, 0)
        last[0][d], last[1][d] = h, c
    if first:
        y, last = y.transpose(2, 0, 1, 3), [s.transpose(1, 0, 2) for s in last]
    return [y, *last[: 2 if kind == "LSTM" else 1]]


def tensors_of(kind: str, directions: int, optional: str, *, layout: int = 0, dtype: Any = np.float32) -> list[Array | None]:
    """Return the inputs. `optional`: letters of B, L (lengths), H, C, P that are given."""
    rng, gates = np.random.default_rng(11), GATES[kind]
    state = (BATCH, directions, HIDDEN) if layout else (directions, BATCH, HIDDEN)
    shapes: dict[str, tuple[int, ...]] = {
        "X": (BATCH, STEPS, INPUTS) if layout else (STEPS, BATCH, INPUTS), "W": (directions, gates * HIDDEN, INPUTS),
        "R": (directions, gates * HIDDEN, HIDDEN), "B": (directions, 2 * gates * HIDDEN), "L": (BATCH,), "H": state,
        "C": state, "P": (directions, 3 * HIDDEN),
    }  # fmt: skip
    found: list[Array | None] = []
    for letter, shape in shapes.items():
        array = rng.uniform(-1, 1, shape).astype(dtype) if letter != "L" else np.array([4, 1, 3], np.int32)
        found.append(array if letter in "XWR" or letter in optional else None)
    return found[: 8 if kind == "LSTM" else 6]


OPTIONS: list[tuple[str, dict[str, Any], str]] = [
    ("RNN", {}, "B"),
    ("RNN", {"direction": "bidirectional", "activations": ["Relu", "ScaledTanh"], "activation_alpha": [0.5],
             "activation_beta": [0.7]}, "BH"),
    ("RNN", {"direction": "reverse", "clip": 0.3, "activations": ["Softplus"]}, "BLH"),
    ("RNN", {"activations": ["Affine"], "activation_alpha": [0.5], "activation_beta": [0.1]}, ""),
    ("GRU", {}, ""),
    ("GRU", {"direction": "reverse", "linear_before_reset": 1}, "BH"),
    ("GRU", {"direction": "bidirectional", "clip": 0.4}, "BLH"),
    ("GRU", {"layout": 1, "linear_before_reset": 1}, "H"),
    ("GRU", {"activations": ["HardSigmoid", "Softsign"]}, "B"),
    ("GRU", {"activations": ["HardSigmoid", "Elu"], "activation_alpha": [0.3, 0.5], "activation_beta": [0.4]}, "B"),
    ("LSTM", {}, ""),
    ("LSTM", {"direction": "bidirectional", "input_forget": 1}, "BLHCP"),
    ("LSTM", {"direction": "reverse", "clip": 0.3}, "BHCP"),
    ("LSTM", {"layout": 1, "direction": "bidirectional"}, "BHC"),
    ("LSTM", {"activations": ["LeakyRelu", "ThresholdedRelu", "LeakyRelu"], "activation_alpha": [0.2, 0.1]}, "P"),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "attributes", "optional"), OPTIONS)
@pytest.mark.parametrize("constant", [True, False])
def test_a_layer_is_what_onnx_says(kind: str, attributes: dict[str, Any], optional: str, constant: bool) -> None:
    directions = 2 if attributes.get("direction") == "bidirectional" else 1
    tensors = tensors_of(kind, directions, optional, layout=attributes.get("layout", 0))
    model = model_of(
        kind,
        attributes | {"hidden_size": HIDDEN},
        tensors,
        results=3 if kind == "LSTM" else 2,
        constants=[i for i in (1, 2, 3, 4, 7) if i < len(tensors)] if constant else (),
    )
    found = run_node(model, tensors)
    for a, b in zip(found, layer(kind, attributes, tensors), strict=True):
        assert a.dtype == np.float32
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)


def test_a_layer_is_one_product_and_a_loop() -> None:
    """The product with the inputs is outside of the loop; nothing is unrolled, and unused outputs are not stacked."""
    tensors = tensors_of("LSTM", 1, "B")
    graph, _ = import_node(model_of("LSTM", {"hidden_size": HIDDEN}, tensors, results=3, omitted=(0,), constants=(1, 2, 3)))
    (loop,) = (node for node in graph.nodes if isinstance(node, LoopNode))
    products = [node for node in graph.nodes if node.operator == "linear"]
    assert [graph.types[node.outputs[0]].shape for node in products] == [(STEPS, BATCH, 4 * HIDDEN)]
    assert (loop.steps, loop.carried, loop.stacked) == (STEPS, 2, ())
    assert sum(node.operator == "linear" for node in loop.body.nodes) == 1


@pytest.mark.parametrize("dtype", [np.float64, np.float16])
def test_other_types(dtype: Any) -> None:
    tensors = tensors_of("GRU", 1, "BH", dtype=dtype)
    found = run_node(model_of("GRU", {"hidden_size": HIDDEN}, tensors, results=2), tensors)
    for a, b in zip(found, layer("GRU", {}, tensors), strict=True):
        assert a.dtype == dtype
        np.testing.assert_allclose(a.astype(np.float64), b, atol=1e-2 if dtype is np.float16 else 1e-12)


def test_other_orders_of_gates() -> None:
    """torch has i, f, g, o where ONNX has i, o, f, c."""
    w = tensors_of("LSTM", 1, "B")
    x, order = w[0], [0, 2, 3, 1]

    def reordered(array: Array) -> Array:
        return np.concatenate([array.reshape(4, HIDDEN, -1)[gate] for gate in order]).reshape(array.shape)

    weights = Weights()
    builder = GraphBuilder("layer", weights, reference)
    assert all(array is not None for array in w[:4])
    biases = np.split(w[3][0], 2)  # it is given
    operands = [builder.add_constant(reordered(a), DType.FLOAT32) for a in (w[1][0], w[2][0], *biases)]
    cell = Cell(CellKind.LSTM, DEFAULT_ACTIVATIONS[CellKind.LSTM], "ifco")
    entry = builder.add_input(TensorType(DType.FLOAT32, (STEPS, BATCH, INPUTS)), "x")
    output, last = add_direction(builder, cell, entry, CellWeights(*operands), [None, None])
    assert output is not None
    graph = builder.finish([("y", output), ("h", last[0]), ("c", last[1])])
    found = interpret(graph, weights, {"x": x})
    y, h, c = layer("LSTM", {}, w)
    np.testing.assert_allclose(found["y"], y[:, 0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["h"], h[0], rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(found["c"], c[0], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("attributes", "match"),
    [
        ({"direction": "sideways"}, "not one of forward, reverse, bidirectional"),
        ({"direction": "bidirectional"}, "2 directions"),
        ({"hidden_size": 7}, "hidden_size is 7"),
        ({"activations": ["Tanh", "Tanh"]}, "must be 1 names"),
        ({"activations": ["Cosh"]}, "'Cosh'"),
        ({"activations": ["Affine"]}, "needs alpha"),
        ({"activations": ["Tanh"], "activation_alpha": [0.5]}, "1 numbers more"),
        ({"activation_beta": [0.5]}, "need activations"),
        ({"clip": "x"}, "clip must be a number"),
        ({"linear_before_reset": 1}, "linear_before_reset"),
        ({"input_forget": 1}, "input_forget"),
    ],
)
def test_wrong_options_are_refused(attributes: dict[str, Any], match: str) -> None:
    tensors = tensors_of("RNN", 1, "B")
    with pytest.raises(UnsupportedModelError, match=match):
        import_node(model_of("RNN", attributes, tensors))


@pytest.mark.parametrize(
    ("position", "array", "match"),
    [
        (1, np.zeros((1, 3, 5), np.float32), "input weights must be"),
        (3, np.zeros((1, 3), np.float32), "B must have 4 numbers"),
        (4, np.array([4, 5, 1], np.int32), "sequence_lens must be from 0 to 4"),
        (4, np.array([4, 4], np.int32), r"must have the shape \[3\]"),
        (5, np.zeros((1, 2, 2), np.float32), "state 0 must be"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(position: int, array: Array, match: str) -> None:
    tensors = tensors_of("RNN", 1, "BH")
    tensors[position] = array
    with pytest.raises(UnsupportedModelError, match=match):
        import_node(model_of("RNN", {}, tensors, constants=(4,) if position == 4 else ()))
