"""Concatenations whose inputs are written in place, compiled and run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from graphs import add_input, add_random, builder_of, load_linked, random_arrays

from roller_svc import hardware
from roller_svc.compiler.kernel_cache import KernelCache
from roller_svc.frontend.graph_builder import GraphBuilder
from roller_svc.frontend.ops.operator import Operand
from roller_svc.graph.compile import ModelOptions, build_model
from roller_svc.graph.concats import Piece, is_contiguous_concat, place_pieces
from roller_svc.graph.interpret import interpret
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Graph
from roller_svc.ir.model_plan import CopyStep, iter_steps
from roller_svc.ir.options import SelectionMode


def product(builder: GraphBuilder, x: Operand, seed: int, columns: int) -> Operand:
    return builder.call("relu", [builder.call("matmul", [x, add_random(builder, seed, x.shape[-1], columns)])])


def copies_and_outputs(graph: Graph, weights: Weights, folder: Path) -> int:
    """The copies of the compiled model, whose outputs are compared with the interpreter's."""
    options = ModelOptions(hardware.load("local"), select=SelectionMode.MODEL, top_k=1)
    built = build_model(graph, weights, options, KernelCache(folder))
    model = load_linked(built, weights)
    arrays = random_arrays(graph)
    got: Any = model.run(arrays)
    want = interpret(graph, weights, arrays)
    for name, value in want.items():
        np.testing.assert_allclose(got[name], value, rtol=1e-4, atol=1e-4, err_msg=name)
    return sum(isinstance(step, CopyStep) for step in iter_steps(built.plan.steps))


def test_growing_features_lie_in_the_last_concatenation(tmp_path: Path) -> None:
    """A dense block: each layer reads all before it, and each concatenation repeats the earlier ones."""
    builder, weights = builder_of()
    features = [product(builder, add_input(builder, "x", 1, 24), 0, 16)]
    for layer in range(1, 4):
        seen = features[0] if layer == 1 else builder.call("concat", features, axis=1)
        features.append(product(builder, seen, layer, 8))
    graph = builder.finish([("y", builder.call("exp", [builder.call("concat", features, axis=1)]))])
    pieces = place_pieces(graph)
    concats = [node.outputs[0] for node in graph.nodes if is_contiguous_concat(node)]
    assert pieces[features[1].name] == Piece(concats[-1], 64)
    assert pieces[concats[0]] == Piece(concats[-1], 0)
    assert copies_and_outputs(graph, weights, tmp_path) == 0


def test_what_cannot_lie_in_the_result_is_copied(tmp_path: Path) -> None:
    """An input of the model, a constant, a tensor that is concatenated twice, and an output."""
    builder, weights = builder_of()
    x = add_input(builder, "x", 2, 3, 4)
    a, b = builder.call("exp", [x]), builder.call("tanh", [x])
    whole = builder.call("concat", [x, add_random(builder, 0, 2, 3, 4), a, a, b], axis=0)
    graph = builder.finish([("b", b), ("whole", whole)])
    assert not place_pieces(graph)
    assert copies_and_outputs(graph, weights, tmp_path) == 5


def test_two_orders_of_the_same_tensors(tmp_path: Path) -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 1, 24)
    a, b = product(builder, x, 0, 16), product(builder, x, 1, 8)
    graph = builder.finish(
        [
            ("ab", builder.call("exp", [builder.call("concat", [a, b], axis=1)])),
            ("ba", builder.call("exp", [builder.call("concat", [b, a], axis=1)])),
        ]
    )
    assert copies_and_outputs(graph, weights, tmp_path) == 2


def test_a_concatenation_of_a_concatenation(tmp_path: Path) -> None:
    builder, weights = builder_of()
    x = add_input(builder, "x", 1, 24)
    parts = [product(builder, x, seed, 8) for seed in range(4)]
    inner = builder.call("concat", parts[1:3], axis=1)
    outer = builder.call("concat", [parts[0], inner, parts[3]], axis=1)
    graph = builder.finish([("outer", outer), ("inner", builder.call("exp", [inner]))])
    assert copies_and_outputs(graph, weights, tmp_path) == 0


@pytest.mark.parametrize(
    ("shape", "axis", "expected"),
    [
        ((1, 4, 5), 1, True),
        ((1, 4, 5), 0, True),
        ((2, 4, 5), 0, True),
        ((2, 4, 5), 1, False),
        ((1, 1, 5), -1, True),
    ],
)
def test_contiguous_axes(shape: tuple[int, ...], axis: int, expected: bool) -> None:
    builder, _ = builder_of()
    builder.call("concat", [add_input(builder, "x", *shape), add_input(builder, "y", *shape)], axis=axis)
    assert is_contiguous_concat(builder.nodes[0]) is expected
