"""ONNX nodes against numpy: conversion, older operator sets, constants, protos, rejected nodes."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from cases_ops import convolved, gelu, normed, overlapped, pooled, put, sigmoid, softmax, spread
from onnx_node_models import node_result

import roller_svc
from roller_svc.errors import InputError, UnknownOpError
from roller_svc.frontend.onnx.nodes import from_node, from_proto
from roller_svc.frontend.onnx.table import NODES
from roller_svc.frontend.ops import OPS, expression

RNG = np.random.default_rng(3)
IMAGE = RNG.uniform(-1, 1, (1, 2, 7, 6)).astype(np.float32)
WEIGHT = RNG.uniform(-1, 1, (4, 2, 3, 3)).astype(np.float32)
X = RNG.uniform(-1, 1, (3, 4)).astype(np.float32)
Y = RNG.uniform(0.5, 1, (3, 4)).astype(np.float32)
V = RNG.uniform(0.5, 1, (4,)).astype(np.float32)
INTS = np.array([[-7, 6, 5, 1]], np.int32)
MORE = np.array([[2, 4, -3, 1]], np.int32)
BOOLS = np.array([[True, False, True, True]])
BYTES = np.array([3, 9], np.uint8)
IDS = np.array([[1, -1]], np.int64)

GRID = RNG.uniform(-1.4, 1.4, (1, 4, 5, 2)).astype(np.float32)
ROIS = np.array([[0.5, 0.5, 4.0, 5.0], [2.0, 1.0, 9.0, 8.0]], np.float32)
OFFSETS = RNG.uniform(-1.5, 1.5, (1, 36, 5, 4)).astype(np.float32)
MASK = RNG.uniform(0, 1, (1, 18, 5, 4)).astype(np.float32)
SCALES = np.array([0.1, 0.2, 0.3, 0.4], np.float32)
ZEROS = np.array([1, 2, 3, 4], np.uint8)
CACHE = RNG.uniform(-1, 1, (2, 3, 5, 2)).astype(np.float32)


def by_onnx(op_type: str, attributes: dict[str, Any], tensors: list[Any], **options: Any) -> tuple[Any, ...]:
    """Return a case whose result is that of the library's reference evaluator, from tensors in their own types."""
    return op_type, attributes, tensors, {}, lambda *_: node_result(op_type, attributes, *tensors, **options)


# op type, attributes, tensors, constants by position, numpy
CASES: list[tuple[str, dict[str, Any], list[Any], dict[int, Any], Any]] = [
    ("MatMul", {}, [X, Y.T], {}, np.matmul),
    ("Gemm", {"transB": 1, "alpha": 0.5}, [X, Y, RNG.uniform(-1, 1, (3,)).astype(np.float32)], {},
     lambda a, b, c: 0.5 * a @ b.T + c),
    ("Einsum", {"equation": "ij,ij->i"}, [X, Y], {}, lambda x, y: (x * y).sum(1)),
    ("Conv", {"strides": [2, 2], "pads": [1, 1, 1, 1], "kernel_shape": [3, 3]}, [IMAGE, WEIGHT], {},
     lambda x, w: convolved(x, w, (2, 2), ((1, 1), (1, 1)), (1, 1))),
    ("Conv", {"auto_pad": "SAME_LOWER", "group": 2, "dilations": [1, 1]}, [IMAGE, WEIGHT[:, :1, :2, :2]], {},
     lambda x, w: convolved(x, w, (1, 1), ((1, 0), (1, 0)), (1, 1), 2)),
    ("ConvTranspose", {"strides": [2, 2], "pads": [1, 1, 1, 1], "output_padding": [1, 1]},
     [IMAGE, WEIGHT[:2]], {}, lambda x, w: spread(x, w, 2, 1, 1)),
    ("ConvTranspose", {"strides": [2, 2], "auto_pad": b"SAME_UPPER"}, [IMAGE, WEIGHT[:2]], {},
     lambda x, w: spread(x, w, 2, 0, 0)[:, :, :14, :12]),
    ("ConvTranspose", {"auto_pad": "SAME_UPPER", "output_shape": [8, 9]}, [IMAGE, WEIGHT[:2]], {},
     lambda x, w: np.pad(spread(x, w, 1, 0, 0), ((0, 0), (0, 0), (0, 0), (0, 1)))[:, :, :8]),
    ("ConvTranspose", {"auto_pad": "SAME_LOWER", "output_shape": [8, 7]}, [IMAGE, WEIGHT[:2]], {},
     lambda x, w: spread(x, w, 1, 0, 0)[:, :, 1:, 1:]),
    ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, [IMAGE], {},
     lambda x: pooled(x, (3, 3), (2, 2), 1, (4, 3))),
    ("MaxPool", {"kernel_shape": [2, 2]}, [IMAGE], {}, lambda x: pooled(x, (2, 2), (1, 1), 0, (6, 5))),
    ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, [IMAGE], {},
     lambda x: pooled(x, (3, 3), (2, 2), 1, (4, 3), mean=True, include_pad=False)),
    ("AveragePool", {"kernel_shape": [2, 2], "dilations": [2, 2]}, [IMAGE], {},
     lambda x: pooled(x, (2, 2), (1, 1), 0, (5, 4), mean=True, dilation=2)),
    ("LpPool", {"kernel_shape": [1, 4], "strides": [1, 3], "p": 1}, [IMAGE], {},
     lambda x: np.abs(x[..., :4]).sum(-1, keepdims=True)),
    ("GlobalLpPool", {}, [IMAGE], {}, lambda x: np.sqrt((x * x).sum((2, 3), keepdims=True))),
    ("LpNormalization", {"axis": 0, "p": 1}, [X], {}, lambda x: x / np.abs(x).sum(0)),
    ("CumSum", {"reverse": 1}, [X, None], {1: 1}, lambda x: np.cumsum(x[:, ::-1], 1)[:, ::-1]),
    ("CumProd", {"exclusive": 1}, [X, None], {1: [0]}, lambda x: np.cumprod([np.ones(4), x[0], x[1]], 0)),
    ("Trilu", {}, [X, None], {1: -1}, lambda x: np.triu(x, -1)),
    ("Trilu", {"upper": 0}, [X], {}, np.tril),
    ("Tile", {}, [X, None], {1: [2, 3]}, lambda x: np.tile(x, (2, 3))),
    ("DepthToSpace", {"blocksize": 2, "mode": "CRD"}, [WEIGHT.reshape(1, 8, 3, 3)], {},
     lambda x: x.reshape(1, 2, 2, 2, 3, 3).transpose(0, 1, 4, 2, 5, 3).reshape(1, 2, 6, 6)),
    ("SpaceToDepth", {"blocksize": 2}, [IMAGE[:, :, :6]], {},
     lambda x: x.reshape(1, 2, 3, 2, 3, 2).transpose(0, 3, 5, 1, 2, 4).reshape(1, 8, 3, 3)),
    ("Col2Im", {}, [IMAGE.reshape(1, 4, 21), None, None], {1: [3, 8], 2: [1, 2]},
     lambda x: overlapped(x, (3, 8), (1, 2), (1, 1), (0, 0), (1, 1))),
    ("CenterCropPad", {"axes": [-1, 0]}, [X, None], {1: [1, 6]}, lambda x: np.pad(x[:, 1:2], ((1, 2), (0, 0)))),
    ("CenterCropPad", {}, [X, None], {1: [2, 3]}, lambda x: x[:2, :3]),
    ("GatherND", {}, [X, IDS], {}, lambda x, i: x[i[:, 0], i[:, 1]]),
    ("ScatterElements", {"axis": 1, "reduction": "add"}, [X, IDS, Y[:1, :2]], {},
     lambda x, i, u: put(x, (np.zeros_like(i), i), u, np.add)),
    ("Scatter", {}, [X, IDS, Y[:1, :2]], {}, lambda x, i, u: put(x, (i, np.arange(2)[None]), u)),
    ("ScatterND", {"reduction": "max"}, [X, IDS, Y[0, :1]], {},
     lambda x, i, u: put(x, (i[:, 0], i[:, 1]), u, np.maximum)),
    ("ReverseSequence", {}, [X, IDS[0, [0, 0, 0, 0]] + 1], {},
     lambda x, n: np.concatenate([x[: n[0]][::-1], x[n[0] :]])),
    ("Shrink", {"lambd": 0.25, "bias": 0.125}, [X], {},
     lambda x: np.where(x < -0.25, x + 0.125, np.where(x > 0.25, x - 0.125, 0))),
    ("GlobalAveragePool", {}, [IMAGE], {}, lambda x: x.mean((2, 3), keepdims=True)),
    ("GlobalMaxPool", {}, [IMAGE], {}, lambda x: x.max((2, 3), keepdims=True)),
    ("Softmax", {"axis": 0}, [X], {}, lambda x: softmax(x, 0)),
    ("LogSoftmax", {}, [X], {}, lambda x: np.log(softmax(x))),
    ("LayerNormalization", {"epsilon": 0.1}, [X, V, V], {}, lambda x, w, b: normed(x, (1,), 0.1) * w + b),
    ("RMSNormalization", {}, [X, V], {}, lambda x, w: x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * w),
    ("SimplifiedLayerNormalization", {"epsilon": 1e-6}, [X, V], {},
     lambda x, w: x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-6) * w),
    ("BatchNormalization", {"momentum": 0.9}, [X, V, V, V, V], {},
     lambda x, s, b, m, v: (x - m) / np.sqrt(v + 1e-5) * s + b),
    ("InstanceNormalization", {}, [IMAGE, V[:2], V[:2]], {},
     lambda x, s, b: normed(x, (2, 3)) * s[:, None, None] + b[:, None, None]),
    ("GroupNormalization", {"num_groups": 1}, [IMAGE, V[:2], V[:2]], {},
     lambda x, s, b: normed(x, (1, 2, 3)) * s[:, None, None] + b[:, None, None]),
    *((f"Reduce{name}", {"keepdims": 0}, [Y, None], {1: [-1]}, lambda y, f=f: f(y)) for name, f in {
        "Sum": lambda y: y.sum(1), "Mean": lambda y: y.mean(1), "Max": lambda y: y.max(1), "Min": lambda y: y.min(1),
        "Prod": lambda y: y.prod(1), "L1": lambda y: np.abs(y).sum(1), "L2": lambda y: np.sqrt((y * y).sum(1)),
        "SumSquare": lambda y: (y * y).sum(1), "LogSum": lambda y: np.log(y.sum(1)),
        "LogSumExp": lambda y: np.log(np.exp(y).sum(1)),
    }.items()),
    ("ReduceSum", {}, [X], {}, lambda x: x.sum(keepdims=True)),
    ("ReduceSum", {"noop_with_empty_axes": 1}, [X], {}, lambda x: x),
    ("ArgMax", {"axis": 1, "keepdims": 0}, [X], {}, lambda x: x.argmax(1)),
    ("ArgMin", {}, [X], {}, lambda x: x.argmin(0, keepdims=True)),
    ("Transpose", {"perm": [0, 2, 3, 1]}, [IMAGE], {}, lambda x: x.transpose(0, 2, 3, 1)),
    ("Concat", {"axis": 1}, [X, Y], {}, lambda *t: np.concatenate(t, 1)),
    ("Pad", {}, [X, None, None], {1: [1, 0, 0, 2], 2: 0.5},
     lambda x: np.pad(x, ((1, 0), (0, 2)), constant_values=0.5)),
    ("Pad", {"mode": "edge"}, [X, None, None, None], {1: np.array([1, 2]), 3: np.array([-1])},
     lambda x: np.pad(x, ((0, 0), (1, 2)), mode="edge")),
    ("Gather", {"axis": 1}, [X, IDS], {}, lambda x, i: x[:, i]),
    ("GatherElements", {}, [X, IDS], {}, lambda x, i: np.take_along_axis(x[:, :2], i, 0)),
    ("Reshape", {}, [IMAGE, None], {1: [0, -1, 3]}, lambda x: x.reshape(1, 28, 3)),
    ("Flatten", {}, [IMAGE], {}, lambda x: x.reshape(1, -1)),
    ("Squeeze", {}, [IMAGE], {}, lambda x: x[0]),
    ("Unsqueeze", {}, [X, None], {1: [0]}, lambda x: x[None]),
    ("Expand", {}, [V, None], {1: [3, 4]}, lambda v: np.broadcast_to(v, (3, 4))),
    ("Slice", {}, [X, None, None, None], {1: [1], 2: [2**63 - 1], 3: [1]}, lambda x: x[:, 1:]),
    ("Slice", {}, [X, None, None, None, None], {1: [-1], 2: [-(2**63)], 3: [0], 4: [-1]}, lambda x: x[::-1]),
    ("Cast", {"to": 10}, [X], {}, lambda x: x.astype(np.float16)),
    ("Cast", {"to": 9}, [INTS - 1], {}, lambda x: x.astype(bool)),
    ("Clip", {}, [X, None, None], {1: -0.5, 2: np.float32(0.5)}, lambda x: np.clip(x, -0.5, 0.5)),
    ("Where", {}, [BOOLS, X, V], {}, np.where),
    ("Div", {}, [INTS, MORE], {}, lambda x, y: np.trunc(x / y)),
    ("Div", {}, [X, Y], {}, np.divide),
    ("Mod", {}, [INTS, MORE], {}, np.mod),
    ("Mod", {"fmod": 1}, [X, Y], {}, np.fmod),
    ("Pow", {}, [Y, X], {}, np.power),
    ("Pow", {}, [X, None], {1: np.float32(2)}, lambda x: x * x),
    ("Pow", {}, [X, None], {1: np.array([3], np.float32)}, lambda x: x * x * x),
    ("Pow", {}, [INTS, None], {1: np.array(2)}, lambda x: x * x),
    ("BitShift", {"direction": "LEFT"}, [BYTES, BYTES[:1]], {}, np.left_shift),
    ("BitwiseAnd", {}, [INTS, MORE], {}, np.bitwise_and),
    ("BitwiseOr", {}, [INTS, MORE], {}, np.bitwise_or),
    ("BitwiseXor", {}, [INTS, MORE], {}, np.bitwise_xor),
    ("BitwiseNot", {}, [INTS], {}, np.bitwise_not),
    ("And", {}, [BOOLS, ~BOOLS], {}, np.logical_and),
    ("Or", {}, [BOOLS, ~BOOLS], {}, np.logical_or),
    ("Xor", {}, [BOOLS, ~BOOLS], {}, np.logical_xor),
    ("Not", {}, [BOOLS], {}, np.logical_not),
    ("Dropout", {"ratio": 0.5}, [X], {}, lambda x: x),
    ("Gelu", {"approximate": "none"}, [X], {}, gelu),
    ("PRelu", {}, [X, V], {}, lambda x, s: np.where(x >= 0, x, x * s)),
    ("LeakyRelu", {"alpha": 0.5}, [X], {}, lambda x: np.where(x >= 0, x, 0.5 * x)),
    ("Elu", {"alpha": 2.0}, [X], {}, lambda x: np.where(x >= 0, x, 2 * np.expm1(x))),
    ("Celu", {"alpha": 2.0}, [X], {}, lambda x: np.where(x >= 0, x, 2 * np.expm1(x / 2))),
    ("Selu", {"alpha": 2.0, "gamma": 3.0}, [X], {}, lambda x: 3 * np.where(x >= 0, x, 2 * np.expm1(x))),
    ("HardSigmoid", {}, [X], {}, lambda x: np.clip(0.2 * x + 0.5, 0, 1)),
    ("ThresholdedRelu", {"alpha": 0.1}, [X], {}, lambda x: np.where(x > 0.1, x, 0)),
    by_onnx("GridSample", {"mode": "cubic", "padding_mode": "reflection", "align_corners": 1}, [IMAGE, GRID]),
    by_onnx("RoiAlign", {"output_height": 2, "output_width": 3, "sampling_ratio": 2, "spatial_scale": 0.75},
            [IMAGE, ROIS, np.zeros(2, np.int64)]),
    by_onnx("DeformConv", {}, [IMAGE, WEIGHT[:, :, :3], OFFSETS[:, :18], V, MASK[:, :9]], opset=22),
    by_onnx("DeformConv", {"strides": [2, 1], "pads": [1, 0, 2, 1], "dilations": [2, 1], "group": 2, "offset_group": 2},
            [IMAGE, WEIGHT[:, :1], RNG.uniform(-1, 1, (1, 36, 3, 5)).astype(np.float32)], opset=22),
    by_onnx("QuantizeLinear", {"axis": -1}, [X, SCALES, ZEROS]),
    by_onnx("QuantizeLinear", {"axis": 0, "block_size": 2, "output_dtype": 5}, [Y, np.array([SCALES, SCALES])]),
    by_onnx("DequantizeLinear", {}, [ZEROS[None], SCALES, ZEROS[::-1]]),
    by_onnx("LRN", {"size": 3, "alpha": 0.5}, [IMAGE[:1].repeat(2, 0).reshape(2, 2, 7, 6)]),
    by_onnx("TensorScatter", {}, [CACHE, CACHE[:, :, :2] + 1, np.array([1, 2], np.int64)], opset=24),
    by_onnx("TensorScatter", {"mode": "circular", "axis": 1}, [CACHE, CACHE[:, :2] + 1, np.array([1, 2], np.int64)],
            opset=24),
    ("Det", {}, [RNG.uniform(-1, 1, (2, 4, 4)).astype(np.float32)], {}, np.linalg.det),
    ("Sum", {}, [X, Y, V], {}, lambda x, y, v: x + y + v),
    ("Mean", {}, [X, Y, V], {}, lambda x, y, v: (x + y + v) / 3),
]  # fmt: skip
FUNCTIONS: dict[str, Any] = {
    "Abs": np.abs, "Acos": np.arccos, "Asin": np.arcsin, "Asinh": np.arcsinh, "Atan": np.arctan, "Atanh": np.arctanh,
    "Ceil": np.ceil, "Cos": np.cos, "Cosh": np.cosh, "Erf": np.vectorize(math.erf), "Exp": np.exp, "Floor": np.floor,
    "HardSwish": lambda x: x * np.clip(x / 6 + 0.5, 0, 1), "Identity": lambda x: x, "IsInf": np.isinf,
    "IsNaN": np.isnan, "Mish": lambda x: x * np.tanh(np.log1p(np.exp(x))), "Neg": np.negative,
    "Reciprocal": lambda x: 1 / x, "Relu": lambda x: np.maximum(x, 0), "Round": np.round, "Sigmoid": sigmoid,
    "Sign": np.sign, "Sin": np.sin, "Sinh": np.sinh, "Softplus": lambda x: np.log1p(np.exp(x)),
    "Softsign": lambda x: x / (1 + np.abs(x)), "Tan": np.tan, "Tanh": np.tanh,
}  # fmt: skip
POSITIVE: dict[str, Any] = {"Log": np.log, "Sqrt": np.sqrt, "Acosh": np.arccosh}
PAIRS: dict[str, Any] = {
    "Add": np.add, "Sub": np.subtract, "Mul": np.multiply, "Max": np.maximum, "Min": np.minimum, "Equal": np.equal,
    "Greater": np.greater, "GreaterOrEqual": np.greater_equal, "Less": np.less, "LessOrEqual": np.less_equal,
}  # fmt: skip
CASES += [(name, {}, [X], {}, function) for name, function in FUNCTIONS.items()]
CASES += [(name, {}, [Y + 0.5], {}, function) for name, function in POSITIVE.items()]
CASES += [(name, {}, [X, V], {}, function) for name, function in PAIRS.items()]


def typed(array: Any) -> tuple[str, tuple[int, ...]] | None:
    return None if array is None else (array.dtype.name, array.shape)


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'-'.join(case[1])}")
def test_a_node_is_what_onnx_says(case: tuple[str, dict[str, Any], list[Any], dict[int, Any], Any]) -> None:
    op_type, attributes, tensors, constants, expected = case
    names = [f"t{i}" for i in range(len(tensors))]
    arrays = {name: t for name, t in zip(names, tensors, strict=True) if t is not None}
    text, inputs = from_node(
        op_type,
        attributes,
        {name: typed(t) for name, t in zip(names, tensors, strict=True)},
        constants={f"t{i}": value for i, value in constants.items()},
    )
    assert list(inputs) == list(arrays)
    types = {name: (kind.dtype.value, kind.shape) for name, kind in inputs.items()}
    got = roller_svc.reference(text, types, arrays)["output0"]
    wide = [a.astype(np.float64) if a.dtype.kind == "f" else a for a in arrays.values()]
    want = np.asarray(expected(*wide))
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=1e-3, atol=1e-5)


def test_every_node_is_tried() -> None:
    assert sorted(set(NODES) - {case[0] for case in CASES}) == []


@pytest.mark.parametrize(
    ("op_type", "attributes", "inputs", "opset", "text"),
    [
        ("Squeeze", {"axes": [0]}, {"x": (1, 3)}, 11, "output0[i] = x[0, i]"),
        ("ReduceSum", {"axes": [0], "keepdims": 0}, {"x": (2, 3)}, 11, "output0[j] +=! x[i, j]"),
        ("Clip", {"min": 0.0, "max": 6.0}, {"x": (3,)}, 6, "output0[i] = min(max(x[i], 0.0), 6.0)"),
        ("Clip", {}, {"x": (3,)}, 13, "output0[i] = x[i]"),
        ("Pad", {"pads": [1, 0], "value": 2.0}, {"x": (3,)}, 2, "output0[i] = x[i - 1].when([i - 1 >= 0], 2.0) where i in 4"),
        ("Slice", {"starts": [1], "ends": [3]}, {"x": (3,)}, 9, "output0[i] = x[i + 1] where i in 2"),
        ("Softmax", {}, {"x": (2, 3)}, 12, None),
    ],
)
def test_older_operator_sets(
    op_type: str, attributes: dict[str, Any], inputs: dict[str, Any], opset: int, text: str | None
) -> None:
    found, _ = from_node(op_type, attributes, {n: ("float32", s) for n, s in inputs.items()}, opset=opset)
    assert text is None or found == text


@pytest.mark.parametrize(
    ("op_type", "attributes", "shapes", "opset", "code"),
    [
        ("Softmax", {"axis": 1}, [(2, 3, 4)], 12, "unsupported-attribute"),
        ("Conv", {"surprise": 1}, [(1, 2, 7, 6), (4, 2, 3, 3)], 21, "unsupported-attribute"),
        ("Conv", {"kernel_shape": [2, 2]}, [(1, 2, 7, 6), (4, 2, 3, 3)], 21, "invalid-node"),
        ("Conv", {"auto_pad": "SIDEWAYS"}, [(1, 2, 7, 6), (4, 2, 3, 3)], 21, "invalid-node"),
        ("Conv", {"strides": ["a"]}, [(1, 2, 7, 6), (4, 2, 3, 3)], 21, "invalid-node"),
        ("Conv", {}, [(1, 2), (4, 2)], 21, "unsupported-attribute"),
        ("Conv", {}, [(1, 2, 7, 6)], 21, "invalid-node"),
        ("ScatterND", {"reduction": "xor"}, [(2, 3), (1, 1), (1, 3)], 21, "invalid-parameter"),
        ("CumSum", {}, [(2, 3)], 21, "invalid-node"),
        ("DepthToSpace", {"blocksize": 2, "mode": "X"}, [(1, 4, 2, 2)], 21, "invalid-node"),
        ("MaxPool", {}, [(1, 2, 7, 6)], 21, "invalid-parameter"),
        ("BatchNormalization", {"training_mode": 1}, [(1, 2)] + [(2,)] * 4, 21, "unsupported-attribute"),
        ("GroupNormalization", {"num_groups": 2}, [(1, 2, 3)] + [(2,)] * 2, 18, "unsupported-attribute"),
        ("Reshape", {}, [(2, 3), (1,)], 21, "needs-constant"),
        ("Reshape", {"shape": [2, 2]}, [(2, 3)], 1, "operand-shape"),
        ("Cast", {"to": 8}, [(2, 3)], 21, "unsupported-attribute"),
        ("BitShift", {"direction": "LEFT"}, [(2,), (2,)], 21, "unsupported-attribute"),
        ("Einsum", {"equation": "ij,jk"}, [(2, 3), (2, 3)], 21, "extent-conflict"),
        ("Relu", {}, [], 21, "wrong-arguments"),
        ("Concat", {}, [(2, 3), (2, 3)], 21, "invalid-node"),
        ("Concat", {}, [(2, 3, 4)], 4, "invalid-node"),
        ("Conv", {"auto_pad": "SAME_UPPER", "pads": [1, 1, 1, 1]}, [(1, 2, 7, 6), (4, 2, 3, 3)], 21, "invalid-node"),
        ("Expand", {}, [(1, 3)], 21, "invalid-node"),
        ("Reshape", {}, [(1, 3)], 21, "invalid-node"),
        ("Slice", {}, [(4,)], 21, "invalid-node"),
        ("Unsqueeze", {}, [(4,)], 21, "invalid-node"),
        ("Dropout", {}, [(2, 3)], 6, "unsupported-attribute"),
        ("Dropout", {"is_test": 0}, [(2, 3)], 6, "unsupported-attribute"),
        ("Dropout", {}, [(2, 3), (1,), (1,)], 21, "needs-constant"),
        ("BatchNormalization", {}, [(1, 2)] + [(2,)] * 4, 6, "unsupported-attribute"),
        ("BatchNormalization", {"spatial": 0}, [(1, 2)] + [(2,)] * 4, 7, "unsupported-attribute"),
        ("LayerNormalization", {"stash_type": 10}, [(2, 3), (3,)], 21, "unsupported-attribute"),
        ("GroupNormalization", {"num_groups": 2, "stash_type": 16}, [(1, 2, 3)] + [(2,)] * 2, 21, "unsupported-attribute"),
        ("Relu", {"saturate": 1}, [(3,)], 21, "unsupported-attribute"),
        ("Relu", {"consumed_inputs": [0]}, [(3,)], 6, "unsupported-attribute"),
        ("RMSNormalization", {}, [(2, 3), (3,), (3,)], 21, "unsupported-attribute"),
        ("RoiAlign", {}, [(1, 2, 7, 6), (2, 4), (2,)], 21, "unsupported-attribute"),
        (
            "RoiAlign",
            {"sampling_ratio": 1, "coordinate_transformation_mode": "x"},
            [(1, 2, 7, 6), (2, 4), (2,)],
            21,
            "invalid-node",
        ),
        ("GridSample", {"mode": "x"}, [(1, 2, 7, 6), (1, 4, 5, 2)], 21, "invalid-parameter"),
        ("DeformConv", {}, [(1, 2, 7), (4, 2, 3), (1, 3, 5)], 21, "unsupported-attribute"),
        ("QuantizeLinear", {"output_dtype": 22}, [(2, 3), ()], 21, "unsupported-attribute"),
        ("TensorScatter", {"mode": "x"}, [(2, 3, 4, 5), (2, 3, 1, 5)], 24, "invalid-node"),
    ],
)
def test_invalid_arguments_are_rejected(op_type: str, attributes: dict[str, Any], shapes: list[Any], opset: int, code: str) -> None:
    inputs = {f"t{i}": ("float32", shape) for i, shape in enumerate(shapes)}
    with pytest.raises(InputError) as refused:
        from_node(op_type, attributes, inputs, opset=opset)
    assert refused.value.code == code


@pytest.mark.parametrize(
    ("op_type", "attributes", "shapes", "opset"),
    [
        ("Dropout", {"is_test": 1}, [(2, 3)], 6),
        ("Dropout", {"ratio": 0.9, "seed": 3}, [(2, 3)], 10),
        ("BatchNormalization", {"is_test": 1, "spatial": 1}, [(1, 2)] + [(2,)] * 4, 6),
        ("BatchNormalization", {"training_mode": 0, "momentum": 0.5}, [(1, 2)] + [(2,)] * 4, 21),
        ("LayerNormalization", {"stash_type": 1}, [(2, 3), (3,)], 21),
        ("IsInf", {"detect_negative": 1, "detect_positive": 1}, [(3,)], 21),
        ("MaxPool", {"kernel_shape": [2, 2], "storage_order": 1}, [(1, 2, 7, 6)], 21),
        ("Relu", {"consumed_inputs": [0]}, [(3,)], 5),
        ("Conv", {"auto_pad": "SAME_UPPER", "pads": [0, 0, 0, 0]}, [(1, 2, 7, 6), (4, 2, 3, 3)], 21),
    ],
)
def test_attributes_without_effect_are_accepted(op_type: str, attributes: dict[str, Any], shapes: list[Any], opset: int) -> None:
    inputs = {f"t{i}": ("float32", shape) for i, shape in enumerate(shapes)}
    assert list(from_node(op_type, attributes, inputs, opset=opset)[1]) == list(inputs)


# Every attribute that ONNX 1.23 has for these operators, but those that change nothing, with another value than CASES.
OTHER_VALUES: list[tuple[str, dict[str, Any]]] = [
    *((name, {"axis": 1, "broadcast": 1}) for name in ("Add", "And", "Div", "Equal", "Greater", "Less", "Mul", "Or",
                                                       "Pow", "Sub", "Xor")),
    ("ArgMax", {"axis": 0, "keepdims": 1, "select_last_index": 1}),
    ("ArgMin", {"axis": 1, "keepdims": 0, "select_last_index": 1}),
    ("AveragePool", {"auto_pad": "SAME_UPPER", "ceil_mode": 1, "count_include_pad": 1, "dilations": [2, 2],
                     "kernel_shape": [3, 2], "pads": [0, 0, 1, 1], "strides": [1, 2]}),
    ("CenterCropPad", {"axes": [0, 1]}),
    ("Col2Im", {"dilations": [1, 2], "pads": [1, 0, 1, 0], "strides": [1, 2]}),
    ("CumProd", {"exclusive": 0, "reverse": 1}),
    ("CumSum", {"exclusive": 1, "reverse": 0}),
    ("DepthToSpace", {"blocksize": 1, "mode": "DCR"}),
    ("GatherND", {"batch_dims": 1}),
    ("GlobalLpPool", {"p": 1}),
    ("LpNormalization", {"axis": 1, "p": 2}),
    ("LpPool", {"auto_pad": "SAME_UPPER", "ceil_mode": 1, "dilations": [2, 2], "kernel_shape": [3, 2], "p": 2,
                "pads": [0, 0, 1, 1], "strides": [1, 1]}),
    ("ReverseSequence", {"batch_axis": 0, "time_axis": 1}),
    ("Scatter", {"axis": 1}),
    ("ScatterElements", {"axis": 0, "reduction": "min"}),
    ("ScatterND", {"reduction": "none"}),
    ("Shrink", {"lambd": 0.5, "bias": 0.5}),
    ("SpaceToDepth", {"blocksize": 1}),
    ("Trilu", {"upper": 0}),
    ("BatchNormalization", {"epsilon": 0.5, "training_mode": 1, "spatial": 0, "is_test": 0}),
    ("BitShift", {"direction": "RIGHT"}),
    ("Cast", {"to": 11}),
    ("Celu", {"alpha": 0.5}),
    ("Clip", {"min": 0.0, "max": 0.1}),
    ("Concat", {"axis": 0}),
    ("Conv", {"auto_pad": "VALID", "dilations": [2, 1], "group": 2, "kernel_shape": [2, 2], "pads": [0, 0, 0, 0],
              "strides": [1, 1]}),
    ("ConvTranspose", {"auto_pad": "VALID", "dilations": [2, 1], "group": 2, "kernel_shape": [2, 2],
                       "output_padding": [0, 1], "output_shape": [13, 12], "pads": [0, 0, 0, 0], "strides": [1, 1]}),
    ("DeformConv", {"dilations": [1, 2], "group": 2, "kernel_shape": [2, 2], "offset_group": 2, "pads": [1, 1, 1, 1],
                    "strides": [2, 2]}),
    ("DequantizeLinear", {"axis": 0, "block_size": 2, "output_dtype": 10}),
    ("Dropout", {"is_test": 0}),
    ("Einsum", {"equation": "ij,ij->j"}),
    ("Elu", {"alpha": 0.5}),
    ("Flatten", {"axis": 2}),
    ("Gather", {"axis": 0}),
    ("GatherElements", {"axis": 1}),
    ("Gelu", {"approximate": "tanh"}),
    ("Gemm", {"alpha": 2.0, "beta": 0.5, "broadcast": 1, "transA": 1, "transB": 0}),
    ("GridSample", {"mode": "linear", "padding_mode": "border", "align_corners": 0}),
    ("GroupNormalization", {"epsilon": 0.5, "num_groups": 2, "stash_type": 10}),
    ("HardSigmoid", {"alpha": 0.5, "beta": 0.1}),
    ("InstanceNormalization", {"epsilon": 0.5}),
    ("IsInf", {"detect_negative": 0, "detect_positive": 0}),
    ("LRN", {"alpha": 0.1, "beta": 0.5, "bias": 2.0, "size": 2}),
    ("LayerNormalization", {"axis": 0, "epsilon": 0.5, "stash_type": 10}),
    ("LeakyRelu", {"alpha": 0.25}),
    ("LogSoftmax", {"axis": 0}),
    ("MaxPool", {"auto_pad": "SAME_UPPER", "ceil_mode": 1, "dilations": [2, 2], "kernel_shape": [3, 2],
                 "pads": [0, 0, 1, 1], "strides": [1, 2]}),
    ("Mod", {"fmod": 1}),
    ("Pad", {"mode": "edge", "pads": [0, 0, 0, 1], "value": 2.0, "paddings": [0, 0, 0, 1]}),
    ("QuantizeLinear", {"axis": 0, "block_size": 2, "output_dtype": 5, "precision": 10}),
    ("RMSNormalization", {"axis": 0, "epsilon": 0.5, "stash_type": 10}),
    *((f"Reduce{name}", {"keepdims": 1, "axes": [0]}) for name in ("Sum", "Mean", "Max", "Min", "Prod", "L1", "L2",
                                                                    "SumSquare", "LogSum", "LogSumExp")),
    ("Reshape", {"allowzero": 1, "shape": [1, 84]}),
    ("RoiAlign", {"coordinate_transformation_mode": "output_half_pixel", "mode": "max", "output_height": 1,
                  "output_width": 1, "sampling_ratio": 1, "spatial_scale": 0.5}),
    ("Selu", {"alpha": 0.5, "gamma": 0.5}),
    ("Slice", {"axes": [0], "ends": [2], "starts": [0]}),
    ("Softmax", {"axis": -1}),
    ("Squeeze", {"axes": [-5]}),
    ("TensorScatter", {"axis": 1, "mode": "circular"}),
    ("ThresholdedRelu", {"alpha": 0.5}),
    ("Transpose", {"perm": [0, 1, 3, 2]}),
    ("Unsqueeze", {"axes": [1]}),
]  # fmt: skip


def said(case: tuple[str, dict[str, Any], list[Any], dict[int, Any], Any], more: dict[str, Any]) -> str:
    """Return the expression of a case's node, or the error code."""
    op_type, attributes, tensors, constants, _ = case
    inputs = {f"t{i}": typed(t) for i, t in enumerate(tensors)}
    try:
        return from_node(op_type, attributes | more, inputs, constants={f"t{i}": value for i, value in constants.items()})[0]
    except InputError as refused:
        return f"refused: {refused.code}"


@pytest.mark.parametrize(
    ("op_type", "name", "value"), [(op, name, value) for op, values in OTHER_VALUES for name, value in values.items()]
)
def test_no_attribute_is_ignored(op_type: str, name: str, value: object) -> None:
    case = next(case for case in CASES if case[0] == op_type)
    assert not said(case, {}).startswith("refused")
    assert said(case, {name: value}) != said(case, {})


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case[0]}-{'-'.join(case[1])}")
def test_no_unknown_attribute_is_ignored(case: tuple[str, dict[str, Any], list[Any], dict[int, Any], Any]) -> None:
    assert said(case, {"surprise": 1}) == "refused: unsupported-attribute"


@pytest.mark.parametrize("op_type", sorted(set(NODES) - {"Concat", "Max", "Mean", "Min", "Sum"}))
def test_no_input_is_ignored(op_type: str) -> None:
    """For nodes with a bounded number of inputs."""
    name, attributes, tensors, constants, expected = next(case for case in CASES if case[0] == op_type)
    more = [*tensors, *[None] * (6 - len(tensors)), np.float32(1)]
    assert said((name, attributes, more, constants, expected), {}).startswith("refused: ")


def test_a_direction_is_one_of_two() -> None:
    inputs = {"x": ("uint8", (2,)), "y": ("uint8", (2,))}
    for node in ({}, {"direction": "UP"}):
        with pytest.raises(InputError, match="not one of LEFT, RIGHT"):
            from_node("BitShift", node, inputs)


# casts to float8 and Dropout ----------------------------------------------------------------------------------------
EDGES = [0.0, -1.0, 447.0, 448.0, 449.0, 463.9, 464.0, 464.25, 465.0, 472.0, 480.0, 481.0, 512.0, 57344.0, 65504.0,
         math.inf, math.nan, 1e-9, 0.4731, 0.4999, -448.0, -464.0, -466.0, -math.inf]  # fmt: skip


@pytest.mark.parametrize(
    "options", [None, {}, {"target": "nvidia-h200-sxm", "runtime": "emulator"}], ids=["interpreter", "local", "emulator"]
)
@pytest.mark.parametrize("source", ["float32", "float16", "bfloat16", "float64", "float8_e5m2", "int32", "int8"])
def test_a_cast_to_float8_that_does_not_saturate(source: str, options: dict[str, str] | None) -> None:
    """Overflow becomes NaN, as in ml_dtypes, ONNX's reference."""
    wide = np.array(EDGES)
    if source.startswith("int"):
        most = np.iinfo(source).max
        wide = np.clip(np.nan_to_num(wide, posinf=99999, neginf=-99999), -most, most)
    x = wide.astype(np.dtype(getattr(ml_dtypes, source, source)))
    text, _ = from_node("Cast", {"to": 17, "saturate": 0}, {"x": (source, x.shape)})
    want = x.astype(ml_dtypes.float8_e4m3fn)
    types = {"x": (source, x.shape)}
    if options is None:
        got = roller_svc.reference(text, types, {"x": x})["output0"]
    else:
        got = roller_svc.compile(text, types, select="model", top_k=1, **options).run({"x": x})["output0"]
    assert got.dtype == want.dtype
    np.testing.assert_array_equal(got.astype(np.float32), want.astype(np.float32))
    assert np.isnan(want.astype(np.float32)).any() == (source != "int8")
    saturated, _ = from_node("Cast", {"to": 17, "saturate": 1}, types)
    assert (saturated == text) is (source == "int8")


@pytest.mark.parametrize(
    ("source", "to", "refused"),
    [
        ("float32", 19, True),
        ("float16", 19, True),
        ("bfloat16", 19, True),
        ("float64", 19, True),
        ("uint16", 19, True),
        ("int16", 19, False),
        ("int8", 19, False),
        ("bool", 19, False),
        ("float8_e4m3fn", 19, False),
        ("float8_e5m2", 19, False),
        ("float32", 17, False),
        ("float32", 1, False),
        ("float64", 10, False),
    ],
)
def test_infinities_from_a_cast_are_rejected(source: str, to: int, refused: bool) -> None:
    node: dict[str, Any] = {"to": to, "saturate": 0}
    if not refused:
        assert from_node("Cast", node, {"x": (source, (4,))})[1]
        return
    with pytest.raises(InputError, match=f"^Cast: saturate=0, which makes infinities of {source}") as why:
        from_node("Cast", node, {"x": (source, (4,))})
    assert why.value.code == "unsupported-attribute"
    assert why.value.hint is not None
    with pytest.raises(InputError, match="infinities"):
        expression("cast", {"x": (source, (4,))}, dtype="float8_e5m2", saturate=False)


@pytest.mark.parametrize(
    ("constants", "identity"),
    [
        ({"r": 0.75, "t": False}, True),
        ({"r": 0.0, "t": True}, True),
        ({"r": np.float32(0), "t": np.array(1)}, True),
        ({"r": 0.75, "t": True}, False),
        ({"t": np.True_}, False),
        ({"t": np.False_}, True),
        ({"r": 0.75}, True),
        ({}, True),
    ],
)
def test_dropout_is_the_identity_or_rejected(constants: dict[str, Any], identity: bool) -> None:
    inputs = {"x": ("float32", (2, 3)), "r": None, "t": None}
    if identity:
        text, read = from_node("Dropout", {"seed": 7}, inputs, constants=constants)
        assert (text, list(read)) == ("output0[i, j] = x[i, j]", ["x"])
        return
    with pytest.raises(InputError, match=r"^Dropout: training_mode=true \(input 2\)") as why:
        from_node("Dropout", {"seed": 7}, inputs, constants=constants)
    assert why.value.code == "unsupported-attribute"


def test_the_ratio_may_be_data_where_nothing_trains() -> None:
    inputs = {"x": ("float32", (2, 3)), "r": ("float32", ()), "t": None}
    assert list(from_node("Dropout", {}, inputs)[1]) == ["x"]
    with pytest.raises(InputError, match="training_mode \\(input 2\\) must be a constant"):
        from_node("Dropout", {}, inputs | {"t": ("bool", ())})


def test_a_wanted_shape_counts_elements_behind() -> None:
    """ONNX, ConvTranspose: stride * (size - 1) + output_padding + window - output_shape is cut off."""
    shape = {"x": ("float32", (1, 1, 5)), "w": ("float32", (1, 1, 3))}
    texts = {
        extra: from_node("ConvTranspose", {"strides": [2], "output_shape": [10], "output_padding": [extra]}, shape)[0]
        for extra in (0, 1)
    }
    x, w = np.arange(1, 6, dtype=np.float32), np.array([1, 10, 100], np.float32)
    for extra, text in texts.items():
        full = np.zeros(11 + extra, np.float32)
        for i, value in enumerate(x):
            full[2 * i : 2 * i + 3] += value * w
        total = 11 + extra - 10
        want = full[total - total // 2 :][:10]
        got = roller_svc.reference(text, shape, {"x": x.reshape(1, 1, 5), "w": w.reshape(1, 1, 3)})["output0"]
        np.testing.assert_array_equal(got.reshape(-1), want)


def test_the_nearest_node_is_offered() -> None:
    with pytest.raises(UnknownOpError) as unknown:
        from_node("Convolution", {}, {})
    assert (unknown.value.code, unknown.value.hint) == ("unknown-op", None)
    with pytest.raises(UnknownOpError) as unknown:
        from_node("ConvTranpose", {}, {})
    assert unknown.value.hint == "did you mean `ConvTranspose`?"


def proto(op_type: str, names: list[str], attributes: list[Any], domain: str = "") -> Any:
    """Return an object with the attributes of onnx.NodeProto."""
    return SimpleNamespace(op_type=op_type, domain=domain, input=names, output=["y"], attribute=attributes)


def test_a_proto_with_names_that_are_no_identifiers() -> None:
    node = proto(
        "Conv",
        ["/block.0/x", "0.weight", ""],
        [
            SimpleNamespace(name="strides", type=7, ints=[2, 2]),
            SimpleNamespace(name="auto_pad", type=3, s=b"NOTSET"),
            SimpleNamespace(name="group", type=2, i=1),
        ],
    )
    types = {"/block.0/x": ("float32", (1, 2, 7, 6)), "0.weight": ("float32", (4, 2, 3, 3))}
    text, inputs = from_proto(node, types)
    assert list(inputs) == ["_block_0_x", "t0_weight"]
    assert text.startswith("output0[n, f, ho, wo] +=! _block_0_x[n, c, ho * 2 + kh, wo * 2 + kw] * t0_weight[f, c")


def test_a_proto_that_reads_a_tensor_twice() -> None:
    text, inputs = from_proto(proto("Mul", ["a.b", "a.b"], []), {"a.b": ("float32", (3,))})
    assert (text, list(inputs)) == ("output0[i] = a_b[i] * a_b[i]", ["a_b"])


def test_names_of_a_proto_do_not_collide() -> None:
    text, _ = from_proto(proto("Add", ["a.b", "a_b"], []), {"a.b": ("float32", (3,)), "a_b": ("float32", (3,))})
    assert text == "output0[i] = a_b_2[i] + a_b[i]"


def test_unsupported_protos_are_rejected() -> None:
    with pytest.raises(UnknownOpError):
        from_proto(proto("Relu", ["x"], [], domain="com.microsoft"), {"x": ("float32", (3,))})
    with pytest.raises(InputError) as refused:
        from_proto(proto("Relu", ["x"], [SimpleNamespace(name="t", type=4)]), {"x": ("float32", (3,))})
    assert refused.value.code == "unsupported-attribute"


def test_operators_of_nodes_exist() -> None:
    used = {
        value
        for reader in NODES.values()
        for value in getattr(reader, "keywords", {}).values()
        if isinstance(value, str) and value not in {"avg", "lp", "max"}
    }
    assert sorted(used - set(OPS)) == []
