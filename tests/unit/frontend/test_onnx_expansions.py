"""Models of one node or a few against ONNX's reference: several results, empty tensors, constants."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from onnx_node_models import check_node, import_node, run_node
from onnx_node_models import model_of as node_model

import roller_svc
from roller_svc.errors import UnsupportedModelError
from roller_svc.frontend.onnx.model import import_model
from roller_svc.graph.interpret import interpret
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import Graph, OpNode, verify
from roller_svc.ir.printer import text
from roller_svc.semantics.interpreter import reference

Arrays = dict[str, Any]
RNG = np.random.default_rng(5)
X = RNG.uniform(-1, 1, (3, 4)).astype(np.float32)
CUBE = RNG.uniform(-1, 1, (2, 3, 4)).astype(np.float32)
IMAGE = RNG.uniform(-1, 1, (2, 2, 5, 6)).astype(np.float32)
TIES = np.array([[3, 9, 9, 1], [0, 0, -1, -1], [2, 2, 2, 2]], np.float32)
ONE = RNG.uniform(0.5, 1, (4,)).astype(np.float32)


def model_of(nodes: list[Any], inputs: Arrays, constants: Arrays, results: list[str], opset: int) -> Any:
    """Return a model. Types of outputs are not stated."""
    infos = [
        helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(array.dtype), array.shape)
        for name, array in inputs.items()
    ]
    values = [numpy_helper.from_array(array, name) for name, array in constants.items()]
    outputs = [onnx.ValueInfoProto(name=name) for name in results]
    graph = helper.make_graph(nodes, "model", infos, outputs, values)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)])


def imported(model: Any, inputs: Arrays) -> tuple[Graph, list[Any]]:
    weights = Weights()
    graph = verify(import_model(model, weights, reference))
    return graph, list(interpret(graph, weights, inputs).values())


def one_node(
    op_type: str, operands: list[Any], results: int, attributes: dict[str, Any], opset: int, constant: set[int]
) -> tuple[Any, Arrays]:
    """Return a model of one node, and its inputs. `constant`: positions of operands that are initializers."""
    names = ["" if array is None else f"t{i}" for i, array in enumerate(operands)]
    given = {name: array for name, array in zip(names, operands, strict=True) if name}
    constants = {f"t{i}": given.pop(f"t{i}") for i in constant}
    outputs = [f"y{i}" for i in range(results)]
    node = helper.make_node(op_type, names, outputs, **attributes)
    return model_of([node], given, constants, outputs, opset), given


# op type, operands, positions of constant operands, number of results, attributes, operator set
CASES: list[tuple[str, list[Any], set[int], int, dict[str, Any], int]] = [
    *(("LayerNormalization", [CUBE, np.ones(CUBE.shape[axis:], np.float32)], set(), 3, {"axis": axis}, 17)
      for axis in (0, 1, 2, -1, -3)),
    ("LayerNormalization", [CUBE, ONE, ONE], set(), 3, {"epsilon": 0.1}, 17),
    ("MaxPool", [IMAGE], set(), 2, {"kernel_shape": [2, 3], "pads": [1, 1, 0, 1], "strides": [2, 2]}, 12),
    ("MaxPool", [IMAGE[:1, :1]], set(), 2, {"kernel_shape": [2, 2], "strides": [1, 2], "storage_order": 1}, 12),
    ("Dropout", [X], set(), 2, {}, 10),
    ("Dropout", [X, np.float32(0.5), np.array(False)], {1, 2}, 2, {}, 13),
    ("Dropout", [X, np.float32(0), np.array(True)], {1, 2}, 2, {}, 13),
    *(("TopK", [array, np.array([2])], {1}, 2, {"axis": axis, "largest": largest}, 11)
      for array in (X, TIES, TIES.astype(np.int64)) for axis in (0, -1) for largest in (0, 1)),
    ("TopK", [X], set(), 2, {"k": 3}, 1),
    ("OneHot", [np.array([1, -1, 7, -9, 0]), np.array(3), np.array([2, 5], np.int32)], {1}, 1, {}, 11),
    ("OneHot", [np.array([[1, 2]], np.float32), np.array(3.0), np.array([0.5, -1], np.float32)], {1}, 1,
     {"axis": 1}, 11),
    *(("Hardmax", [array], set(), 1, {"axis": axis}, 13) for array in (CUBE, TIES) for axis in (0, -1)),
    ("IsInf", [np.array([1, np.inf, -np.inf, np.nan], np.float32)], set(), 1, {"detect_negative": 0}, 10),
    *(("BitShift", [np.array([-9, 9, 100, -1, 77], kind), np.array([1, -1, 3, 70, 0], kind)], set(), 1,
       {"direction": direction}, 26) for kind in (np.int8, np.int32, np.int64) for direction in ("LEFT", "RIGHT")),
    ("Pow", [np.array([-3, 2, 9]), np.array([2.0, 0.5, -1.0], np.float32)], set(), 1, {}, 15),
    ("Pow", [np.array([3, 2], np.float16), np.array([2.0, 0.5])], set(), 1, {}, 15),
    ("Pow", [np.array([3, 2], np.int32), np.array([2, 33])], set(), 1, {}, 15),
    ("Pow", [X, np.array(2.0, np.float32)], {1}, 1, {}, 15),
    ("Pow", [np.array([3, -2], np.int32), np.array([3])], {1}, 1, {}, 15),
    ("Pow", [X, np.array([[[3.0]]], np.float32)], {1}, 1, {}, 15),
    ("Compress", [X, np.array([False, True, True])], {1}, 1, {"axis": 0}, 11),
    ("Compress", [X, np.array([False, True, True, False, True])], {1}, 1, {}, 11),
    ("EyeLike", [X], set(), 1, {"k": 1}, 9),
    ("EyeLike", [X], set(), 1, {"dtype": TensorProto.INT32, "k": -1}, 9),
    ("NonZero", [np.array([[0, 2.5], [-1, 0]], np.float32)], {0}, 1, {}, 13),
    ("MaxUnpool", [IMAGE[:1, :1, :2, :2], np.array([[[[5, 7], [13, 0]]]])], set(), 1,
     {"kernel_shape": [2, 2], "strides": [2, 2]}, 11),
    ("MaxUnpool", [IMAGE[:1, :1, :2, :2], np.array([[[[5, 7], [13, 0]]]]), np.array([1, 1, 5, 6])], {2}, 1,
     {"kernel_shape": [2, 2], "strides": [2, 2]}, 11),
    ("MeanVarianceNormalization", [IMAGE], set(), 1, {}, 13),
    ("Pad", [X, np.array([1, 0, 0, 2]), np.float32(-np.inf)], {1, 2}, 1, {}, 13),
    ("Slice", [X, np.array([1]), np.array([3]), np.array([-1]), np.array([1])], {1, 2, 3, 4}, 1, {}, 13),
]  # fmt: skip


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{case[4]}".replace(" ", ""))
def test_results_are_those_of_onnx(case: tuple[str, list[Any], set[int], int, dict[str, Any], int]) -> None:
    op_type, operands, constant, results, attributes, opset = case
    model, given = one_node(op_type, operands, results, attributes, opset, constant)
    _, got = imported(model, given)
    for value, want in zip(got, ReferenceEvaluator(model).run(None, given), strict=True):
        assert (value.shape, value.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("shape", "axis", "k"), [((2, 5000), 1, 7), ((9001, 2), 0, 300), ((4096,), -1, 9)])
@pytest.mark.parametrize("largest", [0, 1])
def test_the_greatest_of_a_long_axis_are_chosen_in_rounds(shape: tuple[int, ...], axis: int, k: int, largest: int) -> None:
    dtype = np.int64 if k == 300 else np.float32  # a type that is not selected from
    array = np.random.default_rng(3).integers(0, 2000, shape).astype(dtype)  # with ties
    model, given = one_node("TopK", [array, np.array([k])], 2, {"axis": axis, "largest": largest}, 11, {1})
    graph, (values, indices) = imported(model, given)
    want = np.take(np.argsort(-array if largest else array, axis, kind="stable"), np.arange(k), axis)
    np.testing.assert_array_equal(indices, want)
    np.testing.assert_array_equal(values, np.take_along_axis(array, want, axis))
    ranked = [node for node in graph.nodes if isinstance(node, OpNode) and node.operator == "top_k_indices"]
    assert (len(ranked) > 1) is (dtype is np.int64)


@pytest.mark.parametrize("is_sorted", [0, 1])
@pytest.mark.parametrize("axis", [None, 0, -1])
def test_unique_elements_of_a_constant(axis: int | None, is_sorted: int) -> None:
    array = np.array([[2, 1, 1], [2, 1, 1], [0, 3, 3]], np.float32)
    attributes = {"sorted": is_sorted} | ({} if axis is None else {"axis": axis})
    model, _ = one_node("Unique", [array], 4, attributes, 11, {0})
    _, (values, first, inverse, counts) = imported(model, {})
    whole = array.reshape(-1) if axis is None else array
    np.testing.assert_array_equal(np.take(values, inverse, axis=axis or 0), whole)
    np.testing.assert_array_equal(np.take(whole, first, axis=axis or 0), values)
    np.testing.assert_array_equal(counts, np.bincount(inverse))
    assert [int(np.flatnonzero(inverse == i)[0]) for i in range(len(counts))] == first.tolist()
    if not is_sorted:
        assert first.tolist() == sorted(first)
    elif axis is None:
        assert values.tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("op_type", "operands", "constant", "attributes", "reason"),
    [
        ("Unique", [X], set(), {}, "a tensor that is not constant"),
        ("Compress", [X, np.array([True, False, True])], set(), {"axis": 0}, "a condition that is not constant"),
        ("Compress", [X, np.ones(5, np.bool_)], {1}, {"axis": 1}, "5 conditions for dimension 1"),
        ("NonZero", [X], set(), {}, "a tensor that is not constant"),
        ("MaxUnpool", [IMAGE, np.zeros(IMAGE.shape, np.int64)], set(), {"kernel_shape": [2]}, "do not fit 2 spatial"),
        ("TopK", [X, np.array([2])], set(), {}, "k \\(input 1\\) must be a constant"),
        ("TopK", [X, np.array([9])], {1}, {}, "k is 9, but dimension 1 has 4"),
        ("OneHot", [np.array([1]), np.array(0), np.array([0, 1])], {1}, {}, "depth is 0"),
        ("OneHot", [np.array([1]), np.array(2), np.array([0, 1, 2])], {1}, {}, "values is \\[3\\]"),
        ("EyeLike", [CUBE], set(), {}, "2 dimensions"),
        ("BitShift", [np.array([1]), np.array([1])], set(), {"direction": "UP"}, "not one of LEFT, RIGHT"),
    ],
)
def test_what_cannot_be_converted_is_refused(
    op_type: str, operands: list[Any], constant: set[int], attributes: dict[str, Any], reason: str
) -> None:
    model, _ = one_node(op_type, operands, 1, attributes, 20, constant)
    with pytest.raises(UnsupportedModelError, match=reason):
        import_model(model, Weights(), reference)


@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax", "Hardmax"])
@pytest.mark.parametrize("axis", [0, 1, 2, -2])
def test_an_old_softmax_takes_all_dimensions_from_the_axis_on(operator: str, axis: int) -> None:
    model, given = one_node(operator, [CUBE], 1, {"axis": axis}, 11, set())
    _, (got,) = imported(model, given)
    flat = CUBE.reshape(int(np.prod(CUBE.shape[: axis % 3])), -1)
    newer, _ = one_node(operator, [flat], 1, {"axis": 1}, 13, set())
    (want,) = ReferenceEvaluator(newer).run(None, {"t0": flat})
    np.testing.assert_allclose(got, want.reshape(CUBE.shape), rtol=1e-5, atol=1e-6)


def test_a_result_that_nothing_reads_is_not_computed() -> None:
    model, _ = one_node("MaxPool", [IMAGE], 1, {"kernel_shape": [2, 2]}, 12, set())
    graph, _ = imported(model, {"t0": IMAGE})
    assert [node.operator for node in graph.nodes if isinstance(node, OpNode)] == ["max_pool2d"]


def test_defaults_of_a_function_precede_those_of_the_schema() -> None:
    model, given = one_node("LeakyRelu", [X], 1, {}, 16, set())
    body = [helper.make_node("ThresholdedRelu", ["a"], ["b"])]
    body[0].attribute.append(onnx.AttributeProto(name="alpha", ref_attr_name="alpha", type=onnx.AttributeProto.FLOAT))
    function = helper.make_function(
        "",
        "LeakyRelu",
        ["a"],
        ["b"],
        body,
        [helper.make_opsetid("", 16)],
        attribute_protos=[helper.make_attribute("alpha", 0.5)],
    )
    model.functions.append(function)
    _, (got,) = imported(model, given)
    np.testing.assert_array_equal(got, np.where(X > 0.5, X, 0))


def shape_arithmetic(start: int) -> list[Any]:
    """Return the nodes that reshape a tensor to [product of leading extents, rest] by its shape."""
    return [
        helper.make_node("Shape", ["x"], ["shape"]),
        helper.make_node("Slice", ["shape", "zero", "start"], ["lead"]),
        helper.make_node("Slice", ["shape", "start", "end"], ["rest"]),
        helper.make_node("ReduceProd", ["lead"], ["rows"], keepdims=1),
        helper.make_node("Mul", ["lead", "rows"], ["scaled"]),
        helper.make_node("Cast", ["scaled"], ["wide"], to=TensorProto.DOUBLE),
        helper.make_node("Unsqueeze", ["wide", "zero"], ["row"]),
        helper.make_node("Squeeze", ["row", "zero"], ["back"]),
        helper.make_node("Cast", ["back"], ["narrow"], to=TensorProto.INT64),
        helper.make_node("Gather", ["shape", "narrow"], ["none"])
        if start == 0
        else helper.make_node("Slice", ["shape", "zero", "zero"], ["none"]),
        helper.make_node("Concat", ["none", "rows", "rest"], ["target"], axis=0),
        helper.make_node("Reshape", ["x", "target"], ["y"]),
    ]


@pytest.mark.parametrize("start", [0, 1, 3])
def test_empty_lists_of_extents_are_evaluated(start: int) -> None:
    constants = {"zero": np.array([0]), "start": np.array([start]), "end": np.array([99])}
    model = model_of(shape_arithmetic(start), {"x": CUBE}, constants, ["y"], 18)
    graph, (got,) = imported(model, {"x": CUBE})
    (want,) = ReferenceEvaluator(model).run(None, {"x": CUBE})
    np.testing.assert_array_equal(got, want)
    assert [node.operator for node in graph.nodes if isinstance(node, OpNode)] == ["reshape"]


def run_compiled(graph: Graph, weights: Weights, inputs: Arrays) -> list[Any]:
    """Evaluate a graph by a kernel for each node, compiled from the text of its program."""
    values = dict(inputs) | {name: weights.array(constant) for name, constant in graph.constants.items()}
    for node in graph.nodes:
        assert isinstance(node, OpNode)
        types = {name: (type_.dtype.value, type_.shape) for name, type_ in node.program.inputs}
        kernel = roller_svc.compile(text(node.program), types, select="model", top_k=1)
        results = kernel(**dict(zip(types, (values[tensor] for tensor in node.inputs), strict=True)))
        values |= zip(node.outputs, (results[output.name] for output in node.program.outputs), strict=True)
    return [values[tensor] for _, tensor in graph.outputs]


def check_compiled(case: tuple[str, list[Any], set[int], int, dict[str, Any], int]) -> None:
    op_type, operands, constant, results, attributes, opset = case
    model, given = one_node(op_type, operands, results, attributes, opset, constant)
    weights = Weights()
    graph = import_model(model, weights, reference)
    want = interpret(graph, weights, given).values()
    for value, expected in zip(run_compiled(graph, weights, given), want, strict=True):
        np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("op_type", ["MaxPool", "TopK", "Pad", "MaxUnpool"])
def test_kernels_of_nodes_agree(op_type: str) -> None:
    check_compiled(next(case for case in CASES if case[0] == op_type))


# Attention ----------------------------------------------------------------------------------------------------------
def heads(*shape: int, dtype: Any = np.float32) -> Any:
    return np.random.default_rng(sum(shape)).normal(size=shape).astype(dtype)


Q, K, VALUES = heads(2, 4, 3, 8), heads(2, 2, 5, 8), heads(2, 2, 5, 6)
MASK = np.where(heads(3, 5) > 0, np.float32(0), np.float32(-np.inf))
MASK[1] = -np.inf  # a query without a key
LENGTHS = np.array([5, 2])
# operands, positions of constant operands, number of results, attributes
ATTENTIONS: list[tuple[list[Any], set[int], int, dict[str, Any]]] = [
    ([Q, K, VALUES], set(), 1, {}),
    ([Q, K, VALUES], set(), 1, {"is_causal": 1, "scale": 0.5}),
    ([Q, K[:, :, :3], VALUES[:, :, :3]], set(), 1, {"is_causal": 1}),
    ([Q, K, VALUES, MASK], set(), 1, {}),
    ([Q, K, VALUES, MASK], {3}, 1, {}),
    ([Q, K, VALUES, MASK > -1], set(), 1, {"is_causal": 1}),
    ([Q, K, VALUES, MASK[:1] > -1], {3}, 1, {}),
    ([Q, K[:, :, :3], VALUES[:, :, :3], None, K, VALUES], set(), 3, {"is_causal": 1}),
    ([Q, K[:, :, :3], VALUES[:, :, :3], MASK[0, :4], K, VALUES], set(), 1, {}),
    ([Q, K, VALUES, None, None, None, LENGTHS], set(), 1, {"is_causal": 1}),
    ([Q, K, VALUES, MASK > -1, None, None, LENGTHS], set(), 1, {}),
    ([Q, K, VALUES], set(), 1, {"left_window_size": 1, "right_window_size": 0}),
    ([Q, K, VALUES, None, None, None, LENGTHS], set(), 1, {"is_causal": 1, "left_window_size": 1}),
    ([heads(2, 3, 32), heads(2, 5, 16), heads(2, 5, 12)], set(), 1, {"q_num_heads": 4, "kv_num_heads": 2}),
]
EXPANDED: list[tuple[list[Any], set[int], int, dict[str, Any]]] = [
    ([Q, K, VALUES, MASK], set(), 1, {"softcap": 2.0}),
    ([Q, K, VALUES, None], set(), 4, {"qk_matmul_output_mode": 3}),
    ([Q, K, VALUES], set(), 1, {"softmax_precision": TensorProto.DOUBLE}),
]


@pytest.mark.parametrize("case", [*ATTENTIONS, *EXPANDED], ids=lambda case: f"{sum(x is not None for x in case[0])}-{case[3]}")
def test_attention_is_that_of_onnx(case: tuple[list[Any], set[int], int, dict[str, Any]]) -> None:
    operands, constant, results, attributes = case
    model, given = one_node("Attention", operands, results, attributes, 25, constant)
    graph, got = imported(model, given)
    for value, want in zip(got, ReferenceEvaluator(model).run(None, given), strict=True):
        assert (value.shape, value.dtype) == (want.shape, want.dtype)
        np.testing.assert_allclose(value, want, rtol=1e-5, atol=1e-6)
    is_called = any(isinstance(node, OpNode) and node.operator == "attention" for node in graph.nodes)
    assert is_called == any(case is each for each in ATTENTIONS)


@pytest.mark.parametrize("case", [ATTENTIONS[i] for i in (5, 9)], ids=lambda case: str(case[3]))
def test_kernels_of_attention_agree(case: tuple[list[Any], set[int], int, dict[str, Any]]) -> None:
    operands, constant, results, attributes = case
    check_compiled(("Attention", operands, constant, results, attributes, 25))


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("attributes", [{}, {"is_causal": 1}])
def test_attention_of_16_bits_is_nearer_to_the_exact_result_than_onnx(dtype: Any, attributes: dict[str, Any]) -> None:
    """ONNX's reference rounds every intermediate result, and sums of bfloat16 after each summand."""
    operands = [array.astype(dtype) for array in (Q, K, VALUES)]
    model, given = one_node("Attention", operands, 1, attributes, 25, set())
    _, (got,) = imported(model, given)
    (want,) = ReferenceEvaluator(model).run(None, given)
    wide = [array.astype(np.float64) for array in operands]
    exact_model, exact_given = one_node("Attention", wide, 1, attributes, 25, set())
    (exact,) = ReferenceEvaluator(exact_model).run(None, exact_given)
    assert got.dtype == dtype
    assert np.abs(got - exact).max() <= np.abs(want - exact).max()


def test_an_old_prelu_has_a_slope_for_each_channel() -> None:
    slope = np.array([0.25, 4], np.float32)
    model, inputs = one_node("PRelu", [IMAGE, slope], 1, {}, 6, {1})
    (result,) = imported(model, inputs)[1]
    np.testing.assert_allclose(result, np.where(IMAGE < 0, IMAGE * slope[:, None, None], IMAGE), rtol=1e-6)


@pytest.mark.parametrize(("exponent", "operator"), [(2.0, "mul"), (3.0, "mul"), (2.5, "pow"), (4.0, "pow")])
def test_a_power_of_few_factors_is_a_product(exponent: float, operator: str) -> None:
    model, given = one_node("Pow", [X, np.array(exponent, np.float32)], 1, {}, 15, {1})
    graph, _ = imported(model, given)
    assert [node.operator for node in graph.nodes if isinstance(node, OpNode)] == [operator]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint8])
@pytest.mark.parametrize("name", ["L2", "Mean"])
def test_reductions_of_integers_are_truncated(name: str, dtype: Any) -> None:
    tensors = [np.array([[1, 2, 4], [9, 3, 1]], dtype), np.array([1])]
    check_node(f"Reduce{name}", {}, tensors, constants=(1,), opset=18)


@pytest.mark.parametrize(("name", "expected"), [("ReduceLogSum", [[1], [2]]), ("ReduceLogSumExp", [[4], [9]])])
def test_logarithms_of_integers_are_truncated(name: str, expected: list[list[int]]) -> None:
    tensors = [np.array([[1, 2, 4], [9, 3, 1]], np.int32), np.array([1])]
    (found,) = run_node(node_model(name, {}, tensors, constants=(1,), opset=18), tensors)
    assert found.dtype == np.int32
    assert found.tolist() == expected


def test_a_mean_of_large_integers_is_exact() -> None:
    tensors = [np.array([2**30 + 1, 2**30 + 1, 2**30 + 1], np.int32), np.array([0])]
    (found,) = run_node(node_model("ReduceMean", {}, tensors, constants=(1,), opset=18), tensors)
    assert found.tolist() == [2**30 + 1]


@pytest.mark.parametrize(
    ("op_type", "attributes", "tensors"),
    [
        ("GridSample", {}, [np.float32(1), np.zeros((1, 2, 2, 2), np.float32)]),
        ("GridSample", {}, [np.zeros((1, 1, 4, 4), np.float32), np.float32(1)]),
        ("Pad", {}, [np.float32(1), np.array([0, 0]), np.float32(0), np.array([0])]),
        ("Pad", {}, [np.zeros(3, np.float32), np.array([0, 0]), np.float32(0), np.array([4])]),
        (
            "ConvTranspose",
            {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
            [np.zeros((1, 1, 4, 4), np.float32), np.zeros((1, 1, 3), np.float32)],
        ),
        (
            "ConvTranspose",
            {"auto_pad": "SAME_UPPER", "strides": [2, 2]},
            [np.zeros((1, 1, 4), np.float32), np.zeros((1, 1, 3, 3), np.float32)],
        ),
        (
            "Attention",
            {},
            [*[np.zeros((1, 2, 3, 4), np.float32)] * 3, np.zeros((3, 3), np.float32), *[np.zeros(2, np.float32)] * 2],
        ),
        ("Unique", {"axis": 1}, [np.zeros(3, np.float32)]),
    ],
)
def test_odd_ranks_are_refused(op_type: str, attributes: Any, tensors: list[Any]) -> None:
    arrays = [np.asarray(tensor) for tensor in tensors]
    known = (0,) if op_type == "Unique" else (1, 2, 3) if op_type == "Pad" else ()
    with pytest.raises(UnsupportedModelError):
        import_node(node_model(op_type, attributes, arrays, constants=known, opset=24))
