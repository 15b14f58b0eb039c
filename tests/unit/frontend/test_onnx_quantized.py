"""Quantized products of ONNX against the library's reference evaluator."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx.helper
import onnx.numpy_helper
import pytest
from onnx_node_models import check_node, import_node, model_of, run_node

from roller_svc.errors import UnsupportedModelError
from roller_svc.ir.graph import OpNode

RNG = np.random.default_rng(3)


def random(shape: tuple[int, ...], dtype: Any) -> Any:
    info = np.iinfo(dtype)
    return RNG.integers(info.min, info.max + 1, shape).astype(dtype)


@pytest.mark.parametrize("left", [np.uint8, np.int8])
@pytest.mark.parametrize("right", [np.uint8, np.int8])
@pytest.mark.parametrize("zeros", [(None, None), (7, None), (None, 5), (7, 5), (0, 0)])
def test_matmul_integer(left: Any, right: Any, zeros: tuple[int | None, int | None]) -> None:
    given = [None if zero is None else np.asarray(zero, kind) for zero, kind in zip(zeros, (left, right), strict=True)]
    tensors = [random((4, 6), left), random((6, 3), right), *given]
    while tensors[-1] is None:
        tensors.pop()
    check_node("MatMulInteger", {}, tensors, constants=[i for i in (1, 2, 3) if i < len(tensors)])
    check_node("MatMulInteger", {}, tensors)


def test_zero_points_of_rows_and_columns() -> None:
    a, b = random((2, 4, 6), np.uint8), random((2, 6, 3), np.int8)
    rows, columns = random((4,), np.uint8), random((3,), np.int8)
    (found,) = run_node(model_of("MatMulInteger", {}, [a, b, rows, columns]), [a, b, rows, columns])
    expected = (a.astype(int) - rows[:, None]) @ (b.astype(int) - columns)
    np.testing.assert_array_equal(found, expected)


def test_sums_of_a_constant_factor_are_constants() -> None:
    """A zero point of the first factor only costs one multiplication and addition for each result."""
    tensors = [random((4, 6), np.uint8), random((6, 3), np.int8), np.uint8(7), np.int8(0)]
    graph, _ = import_node(model_of("MatMulInteger", {}, tensors, constants=(1, 2, 3)))
    assert [node.operator for node in graph.nodes] == ["matmul", "sub"]


@pytest.mark.parametrize("kind", [np.uint8, np.int8])
@pytest.mark.parametrize("scale", [np.float32, np.float16])
def test_qlinear_matmul(kind: Any, scale: Any) -> None:
    tensors = [
        random((2, 4, 6), kind), scale(0.01), kind(3), random((2, 6, 3), kind), scale(0.02), kind(5), scale(0.03),
        kind(7),
    ]  # fmt: skip
    check_node("QLinearMatMul", {}, [np.asarray(t) for t in tensors])


def test_scales_of_rows_and_columns() -> None:
    a, b = random((4, 6), np.uint8), random((6, 3), np.int8)
    rows, columns = np.array([0.01, 0.02, 0.03, 0.01], np.float32), np.array([0.1, 0.2, 0.3], np.float32)
    tensors = [a, rows, np.uint8(3), b, columns, np.zeros(3, np.int8), np.float32(0.5), np.uint8(9)]
    tensors = [np.asarray(t) for t in tensors]
    (found,) = run_node(model_of("QLinearMatMul", {}, tensors), tensors)
    total = (a.astype(int) - 3) @ b.astype(int)
    expected = np.clip(np.round(total * (rows[:, None] * columns / 0.5)) + 9, 0, 255)
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    ("attributes", "zeros"),
    [
        ({}, ()),
        ({"pads": [1, 0, 1, 2], "strides": [2, 1]}, (np.uint8(9),)),
        ({"dilations": [2, 1]}, (np.uint8(0), np.array([1, 2, 3], np.int8))),
    ],
)
def test_conv_integer(attributes: dict[str, Any], zeros: tuple[Any, ...]) -> None:
    tensors = [random((1, 2, 6, 5), np.uint8), random((3, 2, 3, 2), np.int8), *map(np.asarray, zeros)]
    x, w, *given = [t.astype(np.int64) for t in tensors]
    x = x - (given[0] if given else 0)
    w = w - (given[1][:, None, None, None] if len(given) > 1 else 0)
    (found,) = run_node(model_of("ConvInteger", attributes, tensors), tensors)
    (expected,) = run_node(
        model_of("Conv", attributes, [x.astype(np.float64), w.astype(np.float64)]), [x.astype(np.float64), w.astype(np.float64)]
    )
    assert found.dtype == np.int32
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(
    "attributes",
    [
        {"pads": [1, 1, 1, 1]},
        {"pads": [2, 0, 1, 1], "strides": [2, 1], "dilations": [1, 2]},
        {"auto_pad": "SAME_UPPER"},
        {},
    ],
)
@pytest.mark.parametrize("bias", [False, True])
def test_qlinear_conv(bias: bool, attributes: dict[str, Any]) -> None:
    x, w = random((1, 2, 6, 5), np.uint8), random((3, 2, 3, 2), np.int8)
    scales = np.array([0.01, 0.02, 0.03], np.float32)
    tensors = [x, np.float32(0.1), np.uint8(9), w, scales, np.zeros(3, np.int8), np.float32(0.4), np.uint8(100)]
    tensors = [*map(np.asarray, tensors), *([np.array([500, -700, 9], np.int32)] if bias else [])]
    check_node("QLinearConv", attributes, tensors, constants=range(1, len(tensors)))


def test_convolutions_multiply_bytes_as_they_are() -> None:
    """A known zero point is padding and a correction of the sums; an unknown one is subtracted if there is padding."""
    tensors = [random((1, 2, 6), np.uint8), random((3, 2, 3), np.int8), np.asarray(np.uint8(9))]
    for attributes, constants, operators in [
        ({"pads": [1, 2]}, (1, 2), {"pad", "conv1d"}),
        ({}, (1, 2), {"conv1d"}),
        ({"pads": [1, 2]}, (1,), {"cast", "reshape", "sub", "conv1d"}),
    ]:
        graph, _ = import_node(model_of("ConvInteger", attributes, tensors, constants=constants))
        assert {node.operator for node in graph.nodes if isinstance(node, OpNode)} == operators


def test_dynamic_quantization() -> None:
    check_node("DynamicQuantizeLinear", {}, [np.array([0, 2, -3, -2.5, 1.34, 0.5], np.float32)], results=3)


@pytest.mark.parametrize(
    ("op_type", "tensors", "match"),
    [
        ("MatMulInteger", [np.zeros((2, 2), np.uint8), np.zeros((2, 2), np.uint8), np.int8(1)], "its zero point int8"),
        ("MatMulInteger", [np.zeros((2, 2), np.int16), np.zeros((2, 2), np.uint8)], "a product of int16"),
        ("MatMulInteger", [np.zeros(2, np.int8), np.zeros((2, 2), np.uint8), np.int8(1)], "a vector with a zero point"),
        ("ConvInteger", [np.zeros((1, 1, 2), np.int8), np.zeros((1, 1, 2), np.int8), np.uint8(1)], "point uint8"),
    ],
)
def test_what_does_not_fit_is_refused(op_type: str, tensors: list[Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        import_node(model_of(op_type, {}, [np.asarray(t) for t in tensors]))


def four_bit_model(data_type: int, op_type: str = "DequantizeLinear") -> tuple[onnx.ModelProto, Any]:
    """A model whose node reads 5 x 33 elements of 4 bits, with zero points, and its floats by the library."""
    is_signed = data_type == onnx.TensorProto.INT4
    numbers = RNG.integers(-8 if is_signed else 0, 8 if is_signed else 16, (5, 33))
    zeros = RNG.integers(-8 if is_signed else 0, 8 if is_signed else 16, (5, 3))
    constants = [
        onnx.helper.make_tensor("w", data_type, numbers.shape, numbers.reshape(-1)),
        onnx.numpy_helper.from_array(RNG.random((5, 3)).astype(np.float32), "s"),
        onnx.helper.make_tensor("z", data_type, zeros.shape, zeros.reshape(-1)),
    ]
    attributes = {"axis": 1, "block_size": 16} if op_type == "DequantizeLinear" else {}
    first = onnx.helper.make_node(op_type, ["w", "s", "z"] if attributes else ["w"], ["f"], **attributes)
    nodes = [first, onnx.helper.make_node("Add", ["f", "x0"], ["y"])] if attributes else [first]
    shape = [5, 33]
    values = [onnx.helper.make_tensor_value_info(n, onnx.TensorProto.FLOAT, shape) for n in ("x0", "y" if attributes else "f")]
    graph = onnx.helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    scale = onnx.numpy_helper.to_array(constants[1])
    of_column = np.arange(33) // 16
    return (
        onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 21)], ir_version=10),
        (numbers - zeros[:, of_column]).astype(np.float32) * scale[:, of_column],
    )


@pytest.mark.parametrize("data_type", [onnx.TensorProto.INT4, onnx.TensorProto.UINT4])
def test_constants_of_four_bits_are_dequantized(data_type: int) -> None:
    model, want = four_bit_model(data_type)
    x = np.ones((5, 33), np.float32)
    (found,) = run_node(model, [x])
    np.testing.assert_array_equal(found, want + x)


def test_constants_of_four_bits_are_moved_and_cast() -> None:
    """Weights of a Constant node behind operators that move them, and as whole numbers."""
    int4, helper = onnx.TensorProto.INT4, onnx.helper
    numbers = RNG.integers(-8, 8, (32, 6))
    nodes = [
        helper.make_node("Constant", [], ["c"], value=helper.make_tensor("v", int4, [192], numbers.reshape(-1))),
        helper.make_node("Identity", ["c"], ["i"]),
        helper.make_node("Reshape", ["i", "shape"], ["w"]),
        helper.make_node("Transpose", ["w"], ["t"]),
        helper.make_node("DequantizeLinear", ["t", "s", "z"], ["f"], axis=1, block_size=16),
        helper.make_node("Cast", ["t"], ["g"], to=onnx.TensorProto.FLOAT),
        helper.make_node("Add", ["f", "g"], ["h"]),
        helper.make_node("Add", ["h", "x0"], ["y"]),
    ]
    scale = RNG.random((6, 2)).astype(np.float32)
    constants = [
        onnx.numpy_helper.from_array(np.array([32, 6]), "shape"),
        onnx.numpy_helper.from_array(scale, "s"),
        helper.make_tensor("z", int4, [6, 2], [1] * 12),
    ]
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [6, 32]) for name in ("x0", "y")]
    graph = helper.make_graph(nodes, "g", values[:1], values[1:], constants)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    x, moved = np.ones((6, 32), np.float32), numbers.T.astype(np.float32)
    (found,) = run_node(model, [x])
    np.testing.assert_array_equal(found, (moved - 1) * scale.repeat(16, axis=1) + moved + x)


@pytest.mark.parametrize("op_type", ["Add", "Concat", "QuantizeLinear"])
def test_other_nodes_read_no_elements_of_four_bits(op_type: str) -> None:
    """Bytes hold them: what rounds or saturates to 4 bits would be wrong."""
    model, _ = four_bit_model(onnx.TensorProto.INT4, op_type)
    with pytest.raises(UnsupportedModelError, match="elements of 4 bits are only read by DequantizeLinear"):
        import_node(model)


def test_casts_to_four_bits_are_refused() -> None:
    model, _ = four_bit_model(onnx.TensorProto.INT4, "Cast")
    model.graph.node[0].attribute.append(onnx.helper.make_attribute("to", onnx.TensorProto.UINT4))
    with pytest.raises(UnsupportedModelError, match="a cast to uint4 is not supported"):
        import_node(model)
