"""Loops whose number of steps is known: by a trip count, a counter in the condition, or a constant condition."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_node_models import import_node

from roller_svc.errors import ArgumentError, UnsupportedModelError
from roller_svc.frontend.onnx.model import import_model
from roller_svc.graph.interpret import interpret
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import LoopNode
from roller_svc.semantics.interpreter import reference

FLOAT, INT, BOOL = TensorProto.FLOAT, TensorProto.INT64, TensorProto.BOOL
X, W = np.array([1, -2], np.float32), np.array([0.5, 3], np.float32)
COUNTS = [helper.make_node("Less", ["i2", "n"], ["c2"])]
FALSE, TRUE = (
    [helper.make_node("Constant", [], ["c2"], value=numpy_helper.from_array(np.bool_(value)))] for value in (False, True)
)
FROM_DATA = [helper.make_node("ReduceMax", ["v2"], ["q"], keepdims=0), helper.make_node("Less", ["q", "q"], ["c2"])]
info = helper.make_tensor_value_info


def while_loop(
    condition: list[Any],
    *,
    trips: int | None = None,
    first: bool | None = True,
    start: int = 0,
    stop: int = 5,
    step: int = 1,
) -> Any:
    """Return a model: i += step, v *= w while the condition holds. Its states are i, v and the bound n."""
    body = helper.make_graph(
        [
            helper.make_node("Add", ["i", "step"], ["i2"]),
            helper.make_node("Mul", ["v", "w"], ["v2"]),
            helper.make_node("Identity", ["n"], ["m"]),
            helper.make_node("Identity", ["m"], ["n2"]),
            helper.make_node("Neg", ["v2"], ["e"]),
            *condition,
        ],
        "body",
        [info("k", INT, []), info("c", BOOL, []), info("i", INT, []), info("v", FLOAT, [2]), info("n", INT, [])],
        [
            info("c2", BOOL, []),
            info("i2", INT, []),
            info("v2", FLOAT, [2]),
            info("n2", INT, []),
            info("e", FLOAT, None),
        ],
        [numpy_helper.from_array(np.int64(step), "step")],
    )
    kept = {"start": np.int64(start), "stop": np.int64(stop)}
    names = ["", "", "start", "x", "stop"]
    if trips is not None:
        kept["trips"], names[0] = np.int64(trips), "trips"
    if first is not None:
        kept["first"], names[1] = np.bool_(first), "first"
    loop = helper.make_node("Loop", names, ["last", "y", "bound", "each"], "loop", body=body)
    graph = helper.make_graph(
        [loop],
        "while",
        [info("x", FLOAT, [2]), info("w", FLOAT, [2])],
        [info("last", INT, []), info("y", FLOAT, [2]), info("bound", INT, []), info("each", FLOAT, None)],
        [numpy_helper.from_array(value, name) for name, value in kept.items()],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


@pytest.mark.parametrize(
    ("condition", "options", "steps"),
    [
        (COUNTS, {}, 5),
        (COUNTS, {"start": 3}, 2),
        (COUNTS, {"stop": 20, "step": 7}, 3),
        (COUNTS, {"trips": 3}, 3),
        (COUNTS, {"trips": 2}, 2),
        (COUNTS, {"trips": 100}, 5),
        (COUNTS, {"trips": 100, "first": None}, 5),
        (FALSE, {}, 1),
        (FALSE, {"trips": 7}, 1),
        (TRUE, {"trips": 7}, 7),
        (TRUE, {"trips": 0}, 0),
        (TRUE, {"first": False}, 0),
        (COUNTS, {"trips": 0}, 0),
        (FROM_DATA, {"trips": 0}, 0),
    ],
)
def test_the_number_of_steps_is_known(condition: list[Any], options: dict[str, Any], steps: int) -> None:
    model = while_loop(condition, **options)
    graph, weights = import_node(model)
    got = list(interpret(graph, weights, {"x": X, "w": W}).values())
    assert got[3].shape[0] == steps
    np.testing.assert_allclose(got[1], X * W**steps, rtol=1e-6)
    if steps and options.get("first", True):  # the evaluator has no stacked output of no steps, and needs a condition
        for value, want in zip(got, ReferenceEvaluator(model).run(None, {"x": X, "w": W}), strict=True):
            np.testing.assert_allclose(value, want, rtol=1e-6)


def test_a_state_that_stays_is_no_state() -> None:
    graph = import_model(while_loop(COUNTS), Weights(), reference)
    (loop,) = (node for node in graph.nodes if isinstance(node, LoopNode))
    assert loop.carried == 2


@pytest.mark.parametrize(
    ("condition", "options", "message"),
    [
        (TRUE, {}, "does not end within 16384 steps; give it a trip count"),
        (COUNTS, {"step": 0}, "does not end within 16384 steps"),
        (FROM_DATA, {}, r'depends on the inputs x, w; give its value with constants={"x": ..., "w": ...}'),
        (FROM_DATA, {"trips": 4}, "depends on the inputs x, w"),
        (TRUE, {"trips": 1 << 21}, "at most 1048576 are"),
    ],
)
def test_other_loops_are_refused(condition: list[Any], options: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        import_model(while_loop(condition, **options), Weights(), reference)
    assert message in refusal.value.nodes[0].reason


def loop_of(nodes: list[Any], functions: list[Any], trips: Any) -> Any:
    """Return a model of a loop whose state s becomes s2. Nodes may read the input `shape`."""
    body = helper.make_graph(
        [helper.make_node("Identity", ["c"], ["c2"]), *nodes],
        "body",
        [info("k", INT, []), info("c", BOOL, []), info("s", FLOAT, [2])],
        [info("c2", BOOL, []), info("s2", FLOAT, [2])],
    )
    loop = helper.make_node("Loop", ["trips", "", "x"], ["y"], "loop", body=body)
    graph = helper.make_graph(
        [loop],
        "g",
        [info("x", FLOAT, [2]), info("shape", INT, [1])],
        [info("y", FLOAT, [2])],
        [numpy_helper.from_array(np.asarray(trips), "trips")],
    )
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("my", 1)]
    return helper.make_model(graph, opset_imports=opsets, functions=functions, ir_version=10)


def function_of(domain: str, name: str, inputs: list[str], node: Any) -> Any:
    return helper.make_function(domain, name, inputs, list(node.output), [node], [helper.make_opsetid("", 17)])


@pytest.mark.parametrize("domain", ["my", ""])
def test_a_function_called_identity_is_no_copy(domain: str) -> None:
    doubled = function_of(domain, "Identity", ["a"], helper.make_node("Add", ["a", "a"], ["b"]))
    nodes = [helper.make_node("Identity", ["s"], ["s2"], domain=domain)]
    if not domain:  # the condition is a copy, too
        doubled = function_of("", "Identity", ["a"], helper.make_node("Or", ["a", "a"], ["b"]))
        nodes = [helper.make_node("Add", ["s", "s"], ["s2"])]
    weights = Weights()
    graph = import_model(loop_of(nodes, [doubled], 3), weights, reference)
    got = interpret(graph, weights, {"x": X, "shape": np.zeros(1, np.int64)})
    np.testing.assert_array_equal(got["y"], 8 * X)


@pytest.mark.parametrize("trips", [np.nan, np.inf, 2.5, True])
def test_a_trip_count_that_is_no_integer_is_refused(trips: Any) -> None:
    with pytest.raises(UnsupportedModelError, match=r"the trip count is (float64|bool); int64 is expected"):
        imported(loop_of([helper.make_node("Neg", ["s"], ["s2"])], [], trips))


@pytest.mark.parametrize(("inputs", "outputs"), [([], ["s2"]), (["s"], []), ([], [])])
def test_an_identity_without_inputs_or_outputs_is_refused(inputs: list[str], outputs: list[str]) -> None:
    nodes = [helper.make_node("Identity", inputs, outputs)]
    with pytest.raises((UnsupportedModelError, ArgumentError)):
        imported(loop_of(nodes, [], 3))


@pytest.mark.parametrize("in_function", [False, True])
def test_a_needed_constant_in_a_loop_is_named_as_the_input_of_the_graph(in_function: bool) -> None:
    function = function_of("my", "Shaped", ["a", "s"], helper.make_node("Reshape", ["a", "s"], ["b"]))
    operator = ("Shaped", "my") if in_function else ("Reshape", "")
    nodes = [helper.make_node(operator[0], ["s", "shape"], ["s2"], domain=operator[1])]
    with pytest.raises(UnsupportedModelError, match="depends on the input shape"):
        imported(loop_of(nodes, [function], 3))


@pytest.mark.parametrize(
    ("attributes", "shape"),
    [
        ({"num_scan_inputs": 1}, []),
        ({"num_scan_inputs": 1, "scan_input_axes": [3]}, [2]),
        ({"num_scan_inputs": 1, "scan_output_axes": [3]}, [2]),
        ({"num_scan_inputs": 1, "scan_input_axes": [0.5]}, [2]),
        ({"num_scan_inputs": [1]}, [2]),
        ({"num_scan_inputs": "one"}, [2]),
    ],
)
def test_malformed_scans_are_refused(attributes: dict[str, Any], shape: list[int]) -> None:
    body = helper.make_graph([helper.make_node("Neg", ["a"], ["b"])], "body", [info("a", FLOAT, [])], [info("b", FLOAT, [])])
    scan = helper.make_node("Scan", ["x"], ["y"], "scan", body=body, **attributes)
    graph = helper.make_graph([scan], "g", [info("x", FLOAT, shape)], [info("y", FLOAT, None)])
    with pytest.raises(UnsupportedModelError):
        imported(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)]))


def imported(model: Any) -> Any:
    return import_model(model, Weights(), reference)
