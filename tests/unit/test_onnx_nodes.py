"""ONNX nodes against numpy: what each becomes, older operator sets, constants, protos, what is refused."""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from opcases import convolved, gelu, normed, pooled, sigmoid, softmax, spread

import roller_svc
from roller_svc.errors import InputError, UnknownOpError
from roller_svc.ops import OPS
from roller_svc.ops.onnx_nodes import from_node, from_proto
from roller_svc.ops.onnx_table import NODES

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
    ("MaxPool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, [IMAGE], {},
     lambda x: pooled(x, (3, 3), (2, 2), 1, (4, 3))),
    ("MaxPool", {"kernel_shape": [2, 2]}, [IMAGE], {}, lambda x: pooled(x, (2, 2), (1, 1), 0, (6, 5))),
    ("AveragePool", {"kernel_shape": [3, 3], "strides": [2, 2], "pads": [1, 1, 1, 1]}, [IMAGE], {},
     lambda x: pooled(x, (3, 3), (2, 2), 1, (4, 3), mean=True, include_pad=False)),
    ("GlobalAveragePool", {}, [IMAGE], {}, lambda x: x.mean((2, 3), keepdims=True)),
    ("GlobalMaxPool", {}, [IMAGE], {}, lambda x: x.max((2, 3), keepdims=True)),
    ("Softmax", {"axis": 0}, [X], {}, lambda x: softmax(x, 0)),
    ("LogSoftmax", {}, [X], {}, lambda x: np.log(softmax(x))),
    ("LayerNormalization", {"epsilon": 0.1}, [X, V, V], {}, lambda x, w, b: normed(x, (1,), 0.1) * w + b),
    ("RMSNormalization", {}, [X, V], {}, lambda x, w: x / np.sqrt((x * x).mean(1, keepdims=True) + 1e-5) * w),
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
        ("Pad", {"pads": [1, 0], "value": 2.0}, {"x": (3,)}, 2,
         "output0[i] = x[i - 1].when([i - 1 >= 0], 2.0) where i in 4"),
        ("Slice", {"starts": [1], "ends": [3]}, {"x": (3,)}, 9, "output0[i] = x[i + 1] where i in 2"),
        ("Softmax", {}, {"x": (2, 3)}, 12, None),
    ],
)  # fmt: skip
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
        ("AveragePool", {"kernel_shape": [2, 2], "dilations": [2, 2]}, [(1, 2, 7, 6)], 21, "unsupported-attribute"),
        ("MaxPool", {}, [(1, 2, 7, 6)], 21, "invalid-parameter"),
        ("BatchNormalization", {"training_mode": 1}, [(1, 2)] + [(2,)] * 4, 21, "unsupported-attribute"),
        ("GroupNormalization", {"num_groups": 2}, [(1, 2)] + [(2,)] * 2, 18, "unsupported-attribute"),
        ("Reshape", {}, [(2, 3), (1,)], 21, "invalid-node"),
        ("Reshape", {"shape": [2, 2]}, [(2, 3)], 1, "operand-shape"),
        ("Cast", {"to": 8}, [(2, 3)], 21, "unsupported-attribute"),
        ("BitShift", {"direction": "LEFT"}, [(2,), (2,)], 21, "unsupported-attribute"),
        ("Einsum", {"equation": "ij,jk"}, [(2, 3), (2, 3)], 21, "extent-conflict"),
        ("Relu", {}, [], 21, "wrong-arguments"),
    ],
)
def test_what_is_refused(op_type: str, attributes: dict[str, Any], shapes: list[Any], opset: int, code: str) -> None:
    inputs = {f"t{i}": ("float32", shape) for i, shape in enumerate(shapes)}
    with pytest.raises(InputError) as refused:
        from_node(op_type, attributes, inputs, opset=opset)
    assert refused.value.code == code


def test_the_nearest_node_is_offered() -> None:
    with pytest.raises(UnknownOpError) as unknown:
        from_node("Convolution", {}, {})
    assert (unknown.value.code, unknown.value.hint) == ("unknown-op", None)
    with pytest.raises(UnknownOpError) as unknown:
        from_node("ConvTranpose", {}, {})
    assert unknown.value.hint == "did you mean `ConvTranspose`?"


def proto(op_type: str, names: list[str], attributes: list[Any], domain: str = "") -> Any:
    """What onnx.NodeProto looks like."""
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


def test_protos_that_are_refused() -> None:
    with pytest.raises(UnknownOpError):
        from_proto(proto("Relu", ["x"], [], domain="com.microsoft"), {"x": ("float32", (3,))})
    with pytest.raises(InputError) as refused:
        from_proto(proto("Relu", ["x"], [SimpleNamespace(name="t", type=4)]), {"x": ("float32", (3,))})
    assert refused.value.code == "unsupported-attribute"


def test_what_nodes_use_is_there() -> None:
    used = {
        value for reader in NODES.values() for value in getattr(reader, "keywords", {}).values()
        if isinstance(value, str) and value not in {"avg", "max"}
    }  # fmt: skip
    assert sorted(used - set(OPS)) == []
