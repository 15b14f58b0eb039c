"""Inputs of ONNX models: bound to constants, without elements, and with extents that are left open."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from onnx import TensorProto, helper, numpy_helper

from roller_svc.errors import ArgumentError, UnsupportedModelError
from roller_svc.frontend.onnx.model import import_model
from roller_svc.graph.interpret import interpret
from roller_svc.graph.weights import Weights
from roller_svc.ir.dtype import DType
from roller_svc.ir.graph import Graph, verify
from roller_svc.ir.program import TensorType
from roller_svc.semantics.interpreter import reference

FLOAT, INT = TensorProto.FLOAT, TensorProto.INT64
X = np.array([[1, -2, 3]], np.float32)
info = helper.make_tensor_value_info


def resampler(rate: Any = ()) -> Any:
    """Return a model with a branch: x * 2 for the rate 16000, else the sum of x and the rate."""
    fast = helper.make_graph([helper.make_node("Add", ["x", "x"], ["f"])], "fast", [], [info("f", FLOAT, None)])
    slow = helper.make_graph(
        [helper.make_node("Cast", ["rate"], ["r"], to=FLOAT), helper.make_node("Add", ["x", "r"], ["s"])],
        "slow",
        [],
        [info("s", FLOAT, None)],
    )
    nodes = [
        helper.make_node("Add", ["rate", "zero"], ["same"]),
        helper.make_node("Equal", ["same", "high"], ["is_high"]),
        helper.make_node("If", ["is_high"], ["y"], "choose", then_branch=fast, else_branch=slow),
    ]
    kept = [numpy_helper.from_array(np.int64(0), "zero"), numpy_helper.from_array(np.int64(16000), "high")]
    graph = helper.make_graph(
        nodes, "resampler", [info("x", FLOAT, ["batch", 3]), info("rate", INT, rate)], [info("y", FLOAT, None)], kept
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)


def imported(model: Any, **options: Any) -> tuple[Graph, Weights]:
    weights = Weights()
    return verify(import_model(model, weights, reference, **options)), weights


@pytest.mark.parametrize(
    ("rate", "value", "want"),
    [
        ((), 16000, 2 * X),
        ((), 8000, X + 8000),
        ((), np.int64(16000), 2 * X),
        ((), np.array(8000), X + 8000),
        ((1,), 16000, 2 * X),
        ((1,), [16000], 2 * X),
        (("n",), [16000], 2 * X),
    ],
)
def test_a_bound_input_chooses_the_branch(rate: Any, value: object, want: Any) -> None:
    graph, weights = imported(resampler(rate), dims={"batch": 1}, constants={"rate": value})
    assert [name for name, _ in graph.inputs] == ["x"]
    np.testing.assert_array_equal(interpret(graph, weights, {"x": X})["y"], want)


def test_a_condition_that_is_not_constant_names_the_inputs() -> None:
    with pytest.raises(UnsupportedModelError) as refusal:
        imported(resampler(), dims={"batch": 1})
    (node,) = refusal.value.nodes
    assert (node.operator, node.name) == ("If", "choose")
    assert node.reason == (
        'the condition must be a constant, and depends on the input rate; give its value with constants={"rate": ...}'
    )


def test_a_shape_that_is_an_input_names_it_inside_of_a_loop_too() -> None:
    def model(*, in_loop: bool) -> Any:
        node = helper.make_node("Reshape", ["x", "shape"], ["r"], "inner")
        if in_loop:
            body = helper.make_graph(
                [node, helper.make_node("Identity", ["c"], ["d"])],
                "body",
                [info("i", INT, []), info("c", 9, [])],
                [info("d", 9, []), info("r", FLOAT, None)],
            )
            node = helper.make_node("Loop", ["trips", ""], ["y"], "outer", body=body)
        else:
            node.output[0] = "y"
        kept = [numpy_helper.from_array(np.int64(2), "trips")]
        graph = helper.make_graph([node], "g", [info("x", FLOAT, [1, 3]), info("shape", INT, [2])], [info("y", FLOAT, None)], kept)
        return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)

    for in_loop, want in ((False, X.T), (True, np.stack([X.T, X.T]))):
        with pytest.raises(UnsupportedModelError, match=r'depends on the input shape; .*constants={"shape": \.\.\.}'):
            imported(model(in_loop=in_loop))
        graph, weights = imported(model(in_loop=in_loop), constants={"shape": [3, 1]})
        np.testing.assert_array_equal(interpret(graph, weights, {"x": X})["y"], want)


class TensorThatRefuses:
    """A tensor of another library that numpy cannot read."""

    def __init__(self, error: Exception) -> None:
        self.error = error

    def __array__(self, *_: object, **__: object) -> Any:
        raise self.error


@pytest.mark.parametrize(
    ("options", "code", "words"),
    [
        ({"constants": {"rat": 1}}, "unknown-argument", ("rat", "did you mean `rate`?")),
        ({"constants": {"rate": 1.5}}, "dtype-mismatch", ("1.5", "int64")),
        ({"constants": {"rate": True}}, "dtype-mismatch", ("True", "int64")),
        ({"constants": {"rate": 1 << 70}}, "dtype-mismatch", ("int64",)),
        ({"constants": {"rate": "16000"}}, "dtype-mismatch", ("'16000'", "int64")),
        ({"constants": {"rate": {}}}, "dtype-mismatch", ("int64",)),
        ({"constants": {"rate": 10**5000}}, "dtype-mismatch", ("a value of type int", "int64")),
        ({"constants": {"rate": TensorThatRefuses(RuntimeError("detach it"))}}, "invalid-option", ("detach it",)),
        ({"constants": {"rate": TensorThatRefuses(TypeError("BFloat16"))}}, "invalid-option", ("BFloat16", "numpy")),
        ({"constants": {"rate": []}}, "shape-mismatch", ("[0]", "[]")),
        ({"constants": {"rate": [[1], [2, 3]]}}, "invalid-option", ("a number or an array",)),
        ({"constants": {"rate": np.int32(1)}}, "dtype-mismatch", ("int32", "int64", "convert it")),
        ({"constants": {"rate": [1, 2]}}, "shape-mismatch", ("[2]", "[]")),
        ({"constants": {"x": np.ones((1, 4), np.float32), "rate": 1}}, "shape-mismatch", ("[1, 4]", "[1, 3]")),
        (
            {"constants": {"rate": 1}, "inputs": {"rate": TensorType(DType.INT64, ())}},
            "invalid-option",
            ("'rate'", "leave it out of one"),
        ),
    ],
)
def test_a_value_that_does_not_fit_is_refused(options: dict[str, Any], code: str, words: tuple[str, ...]) -> None:
    with pytest.raises(ArgumentError) as refusal:
        imported(resampler(), dims={"batch": 1}, **options)
    assert refusal.value.code == code
    assert all(word in refusal.value.reason for word in words)


@pytest.mark.parametrize(
    ("value", "data_type", "want"),
    [
        (1, FLOAT, 1.0),
        (0.1, FLOAT, np.float32(0.1)),
        (True, TensorProto.BOOL, True),
        (-3, TensorProto.INT8, -3),
        (2, TensorProto.BFLOAT16, 2.0),
    ],
)
def test_numbers_take_the_declared_type(value: object, data_type: int, want: object) -> None:
    node = helper.make_node("Identity", ["k"], ["y"])
    graph = helper.make_graph([node], "g", [info("k", data_type, [])], [info("y", data_type, [])])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    found, weights = imported(model, constants={"k": value})
    assert interpret(found, weights, {})["y"] == want


@pytest.mark.parametrize("data_type", [INT, FLOAT, TensorProto.BOOL])
@pytest.mark.parametrize("shape", [(0,), (0, 3), (2, 0), (2, 0, 3)])
@pytest.mark.parametrize("is_list", [False, True])
def test_values_without_elements_have_no_kind(data_type: int, shape: tuple[int, ...], *, is_list: bool) -> None:
    value = np.empty(shape, helper.tensor_dtype_to_np_dtype(data_type))
    nodes = [helper.make_node("Shape", ["k"], ["y"]), helper.make_node("Cast", ["k"], ["c"], to=FLOAT),
             helper.make_node("ReduceSum", ["c"], ["z"], keepdims=0)]  # fmt: skip
    outputs = [info("y", INT, None), info("z", FLOAT, [])]
    graph = helper.make_graph(nodes, "g", [info("k", data_type, shape)], outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    found, weights = imported(model, constants={"k": value.tolist() if is_list else value})
    got = interpret(found, weights, {})
    assert (got["y"].tolist(), got["z"].tolist()) == (list(shape), 0.0)


def test_open_extents_are_named_with_an_example() -> None:
    node = helper.make_node("Add", ["x", "x"], ["y"])
    x = info("x", FLOAT, ["batch", None, "?", 4])
    shapeless = info("z", INT, None)
    graph = helper.make_graph([node], "g", [x, shapeless], [info("y", FLOAT, None)])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    with pytest.raises(ArgumentError) as refusal:
        imported(model)
    assert refusal.value.message == ("the model leaves extents open: x[0] (batch), x[1] (no name), x[2] (?), all dimensions of z")
    assert refusal.value.hint == (
        'give them, as dims={"batch": 1} and inputs={"x": ("float32", (1, 1, 1, 4)), "z": ("int64", (1, 1))}'
    )


def test_an_input_without_elements_stays_an_input() -> None:
    past = info("past", FLOAT, [1, 2, "length", 4])
    node = helper.make_node("Concat", ["past", "x"], ["y"], axis=2)
    graph = helper.make_graph(
        [node, helper.make_node("Identity", ["past"], ["z"])],
        "g",
        [past, info("x", FLOAT, [1, 2, 3, 4])],
        [info("y", FLOAT, None), info("z", FLOAT, None)],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    found, weights = imported(model, dims={"length": 0})
    assert [(name, kind.shape) for name, kind in found.inputs] == [("past", (1, 2, 0, 4)), ("x", (1, 2, 3, 4))]
    x = np.arange(24, dtype=np.float32).reshape(1, 2, 3, 4)
    got = interpret(found, weights, {"past": np.zeros((1, 2, 0, 4), np.float32), "x": x})
    np.testing.assert_array_equal(got["y"], x)
    assert got["z"].shape == (1, 2, 0, 4)


@pytest.mark.parametrize("dims", [[-4], [2, -2], [-1, -4], [-1]])
def test_a_weight_with_a_negative_extent_is_damaged(dims: list[int]) -> None:
    weight = TensorProto(name="w", data_type=FLOAT, dims=dims, raw_data=bytes(16))
    for nodes, initializers in (
        ([helper.make_node("Add", ["x", "w"], ["y"])], [weight]),
        ([helper.make_node("Constant", [], ["w"], value=weight), helper.make_node("Add", ["x", "w"], ["y"])], []),
    ):
        graph = helper.make_graph(nodes, "g", [info("x", FLOAT, [4])], [info("y", FLOAT, None)], initializers)
        with pytest.raises((ArgumentError, UnsupportedModelError), match="extents of 0 or more"):
            imported(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10))
