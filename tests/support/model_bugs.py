"""Small models after public reports of wrong results in other compilers; above each are the addresses of its reports.

Inputs are our own, and the right values are computed with numpy by the specification of ONNX or torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
from onnx import helper, numpy_helper

f16, f32, f64 = np.float16, np.float32, np.float64
u8, i8, i32, i64, boolean = np.uint8, np.int8, np.int32, np.int64, np.bool_
Arrays = dict[str, np.ndarray]


@dataclass(frozen=True)
class OnnxCase:
    """A model, its inputs, the right values, and the error that is allowed as part of the greatest value."""

    model: onnx.ModelProto
    inputs: Arrays
    expected: Arrays
    tolerance: float


ONNX_CASES: dict[str, Callable[[], OnnxCase]] = {}
# A module or function, its inputs, the right values (None: those of torch), and the error as above.
TORCH_CASES: dict[str, Callable[[Any], tuple[Any, list[Any], list[np.ndarray] | None, float]]] = {}


def case(name: str, about: str, kind: str = "onnx") -> Callable[[Any], Any]:
    def add(make: Any) -> Any:
        make.__doc__ = about
        (TORCH_CASES if kind == "torch" else ONNX_CASES)[name] = make
        return make

    return add


def rng(seed: int = 0) -> np.random.Generator:
    return np.random.default_rng(seed)


def onnx_case(
    inputs: Arrays,
    expected: Arrays,
    nodes: Sequence[Any],
    constants: Arrays | None = None,
    opset: int = 21,
    tol: float = 1e-5,
) -> OnnxCase:
    """Return a case of one graph; see `_node` for the nodes."""
    graph = helper.make_graph(
        [_node(*node) for node in nodes],
        "graph",
        [_value(name, array.dtype, array.shape) for name, array in inputs.items()],
        [_value(name, array.dtype, array.shape) for name, array in expected.items()],
        _initializers(constants),
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=10)
    return OnnxCase(model, inputs, expected, tol)


def subgraph(
    name: str, inputs: Sequence[Any], outputs: Sequence[Any], nodes: Sequence[Any], constants: Arrays | None = None
) -> onnx.GraphProto:
    """Return the body of a loop; inputs and outputs are (name, type, shape)."""
    values = [[_value(*value) for value in values] for values in (inputs, outputs)]
    return helper.make_graph([_node(*node) for node in nodes], name, *values, _initializers(constants))


def _node(operator: str, inputs: str, outputs: str, attributes: dict[str, Any] | None = None) -> onnx.NodeProto:
    """Names of inputs and outputs are separated by commas."""
    return helper.make_node(operator, inputs.split(",") if inputs else [], outputs.split(","), **(attributes or {}))


def _value(name: str, dtype: Any, shape: Sequence[int]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(np.dtype(dtype)), shape)


def _initializers(constants: Arrays | None) -> list[onnx.TensorProto]:
    return [numpy_helper.from_array(np.asarray(array), name) for name, array in (constants or {}).items()]


def describe_difference(result: np.ndarray, expected: np.ndarray, tolerance: float) -> str:
    """Return how a result differs from the right values, or "". Types, shapes, NaN and infinities are exact."""
    if (result.shape, result.dtype) != (expected.shape, expected.dtype):
        return f"{result.dtype}{list(result.shape)}, right {expected.dtype}{list(expected.shape)}"
    if expected.dtype.kind != "f":
        return "" if np.array_equal(result, expected) else f"{result.ravel()[:8]}, right {expected.ravel()[:8]}"
    got, right = result.astype(f64), expected.astype(f64)
    finite = np.isfinite(right)
    scale = float(np.max(np.abs(right[finite]), initial=1e-30))
    if np.array_equal(got[~finite], right[~finite], equal_nan=True) and np.all(
        np.abs(got[finite] - right[finite]) <= tolerance * scale
    ):
        return ""
    return f"{got.ravel()[:6]}, right {right.ravel()[:6]}"


# https://github.com/microsoft/onnxruntime/issues/11927 https://github.com/apache/tvm/pull/19450
@case("convt-same-upper", "ConvTranspose, auto_pad SAME_UPPER: the output is input times stride, the odd pad at the end")
def convt_same_upper():
    x, w = rng().normal(size=(1, 1, 4, 5)).astype(f32), rng(1).normal(size=(1, 2, 3, 3)).astype(f32)
    full = np.zeros((1, 2, 9, 11), f64)
    for i in range(4):
        for j in range(5):
            full[0, :, 2 * i : 2 * i + 3, 2 * j : 2 * j + 3] += x[0, 0, i, j] * w[0]
    return onnx_case(
        {"x": x},
        {"y": full[:, :, :8, :10].astype(f32)},
        [("ConvTranspose", "x,w", "y", {"strides": [2, 2], "auto_pad": "SAME_UPPER"})],
        {"w": w},
    )


# https://github.com/microsoft/onnxruntime/issues/24681
@case("avgpool-end-pad", "AveragePool 22, SAME_LOWER, count_include_pad: zeros of the end pad count too")
def avgpool_end_pad():
    x = np.arange(12, dtype=f32).reshape(1, 1, 6, 2) + 1
    p = np.pad(x, ((0, 0), (0, 0), (2, 2), (0, 0)))
    return onnx_case(
        {"x": x},
        {"y": np.stack([p[:, :, i : i + 5].sum(2) / 5 for i in range(6)], 2).astype(f32)},
        [("AveragePool", "x", "y", {"kernel_shape": [5, 1], "auto_pad": "SAME_LOWER", "count_include_pad": 1})],
        opset=22,
    )


# https://github.com/microsoft/onnxruntime/issues/15446 https://github.com/onnx/onnx/issues/4958
@case("maxpool-ceil-start", "MaxPool, ceil_mode: no window starts in the end pad")
def maxpool_ceil_start():
    x = rng(4).normal(size=(1, 1, 6, 5)).astype(f32)
    p = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    want = np.empty((1, 1, 3, 2), f32)
    for i in range(3):
        for j in range(2):
            want[0, 0, i, j] = p[0, 0, 3 * i : 3 * i + 3, 3 * j : 3 * j + 3].max()
    return onnx_case(
        {"x": x},
        {"y": want[:, :, :3]},
        [("MaxPool", "x", "y", {"kernel_shape": [3, 3], "strides": [3, 3], "pads": [1, 1, 1, 1], "ceil_mode": 1})],
        opset=22,
    )


# https://github.com/openvinotoolkit/openvino/issues/35898 https://github.com/onnx/onnx/issues/4716
@case("topk-nan-ties", "TopK: NaN is the greatest, equal values in the order of their indices, also for the least")
def topk_nan_ties():
    n = np.nan
    x = f32([[3, n, 3, 5, -1, 5, n, 2]])
    return onnx_case(
        {"x": x},
        {"v": f32([[n, n, 5, 5, 3]]), "i": i64([[1, 6, 3, 5, 0]]), "w": f32([[-1, 2, 3, 3]]), "j": i64([[4, 7, 0, 2]])},
        [("TopK", "x,k", "v,i", {"axis": 1}), ("TopK", "x,l", "w,j", {"axis": 1, "largest": 0})],
        {"k": i64([5]), "l": i64([4])},
    )


# https://github.com/apache/tvm/issues/18590
@case("round-ties", "Round takes ties to even, of a computed value too, and keeps values past 2^23 and signed zeros")
def round_ties():
    x = f32([0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 0.49999997, 8388609, -8388609.0, 4194304.5])
    z = np.zeros(3, f32)
    return onnx_case(
        {"x": x, "z": z},
        {"y": np.round(x), "w": np.zeros(3, f32)},
        [("Round", "x", "y"), ("Sigmoid", "z", "s"), ("Round", "s", "w")],
    )


# https://github.com/apache/tvm/issues/20217
@case("negative-indices", "Negative indices from data in GatherElements, GatherND, ScatterND, OneHot and Gather")
def negative_indices():
    x = np.arange(12, dtype=f32).reshape(3, 4)
    ge = i64([[-1, 0], [-4, -2], [3, -3]])
    nd = i64([[-1, -1], [0, -2]])
    s = i64([[-1], [0]])
    u = f32([[50, 60, 70, 80], [1, 2, 3, 4]])
    o = i64([0, 2, -1, 4, -5, 7])
    g = i64([-1, 1, -3])
    sc = x.copy()
    sc[-1] = u[0]
    sc[0] = u[1]
    oh = np.full((6, 5), -2, f32)
    for r, k in enumerate([0, 2, 4, 4, 0]):
        oh[r, k] = 9
    return onnx_case(
        {"x": x, "ge": ge, "nd": nd, "s": s, "u": u, "o": o, "g": g},
        {"a": np.take_along_axis(x, ge % 4, 1), "b": f32([11, 2]), "c": sc, "d": oh, "e": x[[2, 1, 0]]},
        [
            ("GatherElements", "x,ge", "a", {"axis": 1}),
            ("GatherND", "x,nd", "b"),
            ("ScatterND", "x,s,u", "c"),
            ("OneHot", "o,depth,values", "d"),
            ("Gather", "x,g", "e"),
        ],
        {"depth": i64(5), "values": f32([-2, 9])},
    )


# https://github.com/tracel-ai/burn-onnx/pull/487
@case("scatter-reduce", "ScatterElements with mul, max and min, duplicate and negative indices")
def scatter_reduce():
    x = rng(8).normal(size=(2, 5)).astype(f32)
    ind = i64([[0, -5, 4, -1, 2], [1, 1, 1, -4, 0]])
    u = rng(9).normal(size=(2, 5)).astype(f32)
    want = {}
    for name, f in (("mul", np.multiply), ("max", np.maximum), ("min", np.minimum)):
        w = x.astype(f64)
        for r in range(2):
            for c in range(5):
                w[r, ind[r, c]] = f(w[r, ind[r, c]], u[r, c])
        want[name] = w.astype(f32)
    return onnx_case({"x": x, "i": ind, "u": u}, want, [("ScatterElements", "x,i,u", n, {"axis": 1, "reduction": n}) for n in want])


# https://github.com/iree-org/iree/issues/20803
@case("x-minus-x-plus-one", "x - (x + 1): a difference keeps its order through simplification")
def x_minus_x_plus_one():
    x = f32([0.5, -3, 7])
    return onnx_case(
        {"x": x},
        {"y": -np.ones(3, f32), "z": f32([1, 1, 1]), "q": (x / (x + 1)).astype(f32)},
        [("Add", "x,one", "p"), ("Sub", "x,p", "y"), ("Sub", "p,x", "z"), ("Div", "x,p", "q")],
        {"one": f32(1)},
    )


# https://github.com/microsoft/onnxruntime/issues/4628
@case("gru-large", "GRU with large inputs of both signs: saturated gates, linear_before_reset 0 and 1")
def gru_large():
    r, T, B, size, H = rng(11), 6, 2, 40, 8
    x = (r.normal(size=(T, B, size)) * 30).astype(f32)
    W, R, bias = (
        (r.normal(size=(1, 3 * H, size))).astype(f32),
        r.normal(size=(1, 3 * H, H)).astype(f32),
        r.normal(size=(1, 6 * H)).astype(f32),
    )
    out = {}
    for lbr in (0, 1):
        h = np.zeros((B, H))
        Y = []
        for t in range(T):
            a = x[t].astype(f64) @ W[0].T + bias[0, : 3 * H]
            z = 1 / (1 + np.exp(-np.clip(a[:, :H] + h @ R[0, :H].T + bias[0, 3 * H : 4 * H], -700, 700)))
            s = 1 / (1 + np.exp(-np.clip(a[:, H : 2 * H] + h @ R[0, H : 2 * H].T + bias[0, 4 * H : 5 * H], -700, 700)))
            g = np.tanh(
                a[:, 2 * H :]
                + (s * (h @ R[0, 2 * H :].T + bias[0, 5 * H :]) if lbr else (s * h) @ R[0, 2 * H :].T + bias[0, 5 * H :])
            )
            h = (1 - z) * g + z * h
            Y.append(h)
        out[f"y{lbr}"] = np.array(Y)[:, None].astype(f32)
    return onnx_case(
        {"x": x},
        out,
        [("GRU", "x,W,R,b", f"y{lbr}", {"hidden_size": H, "linear_before_reset": lbr}) for lbr in (0, 1)],
        {"W": W, "R": R, "b": bias},
        tol=1e-4,
    )


# https://github.com/microsoft/onnxruntime/issues/29727
@case("qdq-softmax-saturates", "Softmax between int8 quantisations saturates at 127")
def qdq_softmax_saturates():
    x = i8([[100, -100, -100, -100], [0, 0, 0, 0]])
    return onnx_case(
        {"x": x},
        {"y": i8([[127, -128, -128, -128], [-64, -64, -64, -64]])},
        [("DequantizeLinear", "x,s,z", "a"), ("Softmax", "a", "b"), ("QuantizeLinear", "b,t,w", "y")],
        {"s": f32(0.1), "z": i8(0), "t": f32(1 / 256), "w": i8(-128)},
    )


# https://github.com/microsoft/onnxruntime/issues/32132
@case("qdq-add-ties", "Add between quantisations: the sum of dequantised values is rounded once, exact ties to even")
def qdq_add_ties():
    a, b = np.arange(256, dtype=u8), ((np.arange(256) * 7) % 256).astype(u8)
    s = (a.astype(f32) - f32(3)) * f32(0.25) + (b.astype(f32) - f32(128)) * f32(0.5)
    return onnx_case(
        {"a": a, "b": b},
        {"y": np.clip(np.round(s / f32(0.5)) + 100, 0, 255).astype(u8)},
        [
            ("DequantizeLinear", "a,sa,za", "p"),
            ("DequantizeLinear", "b,sb,zb", "q"),
            ("Add", "p,q", "r"),
            ("QuantizeLinear", "r,sy,zy", "y"),
        ],
        {"sa": f32(0.25), "za": u8(3), "sb": f32(0.5), "zb": u8(128), "sy": f32(0.5), "zy": u8(100)},
    )


# https://github.com/microsoft/onnxruntime/issues/32416 https://github.com/microsoft/onnxruntime/issues/32413
@case(
    "no-op-chain",
    "Casts to the same type, Identity, times 1/1, plus 0 disappear without losing a value that is an output too",
)
def no_op_chain():
    x = rng(17).normal(size=(2, 3)).astype(f32)
    return onnx_case(
        {"x": x},
        {"mid": x, "y": x, "x2": x},
        [
            ("Cast", "x", "mid", {"to": 1}),
            ("Div", "one,one", "q"),
            ("Mul", "mid,q", "w"),
            ("Identity", "w", "v"),
            ("Add", "v,zero", "y"),
            ("Identity", "x", "x2"),
        ],
        {"one": f32(1), "zero": f32(0)},
    )


# https://github.com/microsoft/onnxruntime/pull/7260 https://github.com/microsoft/onnxruntime/issues/4507
@case("weight-is-output", "An initializer that is an output too, and one that is listed among the inputs as a default")
def weight_is_output():
    x, w = rng(24).normal(size=(2, 3)).astype(f32), rng(25).normal(size=(3, 3)).astype(f32)
    made = onnx_case({"x": x}, {"y": (x @ w).astype(f32), "w": w}, [("MatMul", "x,w", "y")], {"w": w})
    made.model.graph.input.append(_value("w", f32, [3, 3]))
    return made


# https://github.com/microsoft/onnxruntime/issues/1272
@case("loop-zero", "Loop that runs no time: states are the initial values, scan outputs have a first extent of 0")
def loop_zero():
    g = subgraph(
        "b",
        [("k", i64, []), ("c", boolean, []), ("v", f32, [2])],
        [("c2", boolean, []), ("v2", f32, [2]), ("o", f32, [2])],
        [("Identity", "c", "c2"), ("Add", "v,v", "v2"), ("Identity", "v", "o")],
    )
    x = f32([3, 4])
    return onnx_case(
        {"x": x},
        {"y": x, "s": np.zeros((0, 2), f32), "z": x * 2},
        [("Loop", "n,t,x", "y,s", {"body": g}), ("Add", "y,y", "z")],
        {"n": i64(0), "t": boolean(True)},
    )


# https://github.com/onnx/onnx/pull/7964
@case(
    "scan-more-outputs",
    "Scan with one scanned input, two scanned outputs, one reversed, and a value of the outer graph",
)
def scan_more_outputs():
    g = subgraph(
        "b",
        [("h", f32, [3]), ("e", f32, [3])],
        [("h2", f32, [3]), ("p", f32, [3]), ("q", f32, [3])],
        [("Mul", "h,w", "a"), ("Add", "a,e", "h2"), ("Identity", "h2", "p"), ("Mul", "e,e", "q")],
    )
    x, w = rng(26).normal(size=(4, 3)).astype(f32), f32([0.5, -1, 2])
    h = np.zeros(3)
    hs = []
    for t in range(4):
        h = h * w + x[t]
        hs.append(h)
    return onnx_case(
        {"x": x, "w": w},
        {"y": h.astype(f32), "p": np.array(hs, f32), "q": (x * x)[::-1].copy()},
        [("Scan", "h0,x", "y,p,q", {"body": g, "num_scan_inputs": 1, "scan_output_directions": [0, 1]})],
        {"h0": np.zeros(3, f32)},
    )


# https://github.com/tinygrad/tinygrad/issues/11705 https://github.com/microsoft/onnxruntime/pull/29043
@case("half-sums", "float16: the mean of 4,096 values of 100 and a layer norm of values near 600 do not overflow inside")
def half_sums():
    x = f16(np.full((2, 4096), 100))
    x[1, ::2] = 60
    y = (rng(30).normal(size=(3, 256)) * 600).astype(f16)
    w = y.astype(f64)
    n = (w - w.mean(1, keepdims=True)) / np.sqrt(w.var(1, keepdims=True) + 1e-5)
    return onnx_case(
        {"x": x, "y": y},
        {
            "m": x.astype(f64).mean(1, keepdims=True).astype(f16),
            "n": n.astype(f16),
            "l": np.sqrt((y.astype(f64) ** 2).sum(1, keepdims=True)).astype(f16),
        },
        [("ReduceMean", "x,ax", "m"), ("LayerNormalization", "y,one", "n"), ("ReduceL2", "y,ax", "l")],
        {"ax": i64([1]), "one": np.ones(256, f16)},
        tol=2e-3,
    )


# https://github.com/microsoft/onnxruntime/issues/19298 https://github.com/tinygrad/tinygrad/pull/13605
@case("pow-integers", "Pow of integers is exact past 2^24 and for int64 past 2^53; exponent 1 and 0")
def pow_integers():
    a, b = i32([3, 3, 7, -5, 2, -2, 46341 - 1, 0]), i32([1, 0, 10, 9, 30, 31, 2, 0])
    c, d = i64([3, 10, -7]), i64([39, 18, 21])
    return onnx_case(
        {"a": a, "b": b, "c": c, "d": d},
        {"y": (a.astype(object) ** b).astype(i32), "z": (c.astype(object) ** d).astype(i64)},
        [("Pow", "a,b", "y"), ("Pow", "c,d", "z")],
    )


# https://github.com/iree-org/iree/issues/19996 https://github.com/huggingface/candle/pull/2439
@case("pow-negative-base", "Pow of a negative float by 2, 3, 0, -1 and by int64 exponents; by 0.5 it is NaN")
def pow_negative_base():
    x = f32([-2, -0.5, 3, 0])

    def w(p):
        return np.power(x.astype(f64), p).astype(f32)

    with np.errstate(all="ignore"):
        want = {"a": w(2), "b": w(3), "c": w(0), "d": w(-1), "e": w(0.5), "f": w([3, 2, -2, 5])}
    return onnx_case(
        {"x": x, "k": i64([3, 2, -2, 5]), "t": np.array(3, f32)},
        want,
        [
            ("Pow", "x,c2", "a"),
            ("Pow", "x,t", "b"),
            ("Pow", "x,c0", "c"),
            ("Pow", "x,c1", "d"),
            ("Pow", "x,ch", "e"),
            ("Pow", "x,k", "f"),
        ],
        {"c2": f32(2), "c0": f32(0), "c1": f32(-1), "ch": f32(0.5)},
    )


# https://github.com/apache/tvm/issues/18897 https://github.com/apache/tvm/issues/18901 https://github.com/apache/tvm/issues/18895
@case(
    "concat-split-barriers",
    "float16 Tan, Gelu, Sin and ReduceMean give the same with and without Concat and Split that cancel",
)
def concat_split_barriers():
    a, b = (rng(32).normal(size=(3, 1, 21)) * 0.7).astype(f16), (rng(33).normal(size=(3, 5, 21)) * 0.7).astype(f16)
    c = np.concatenate([a, b], 1)
    t = np.tan(c.astype(f32)).astype(f16)
    erf = np.vectorize(math.erf)
    w = t.astype(f64)
    gelu = (w * 0.5 * (1 + erf(w / 2**0.5))).astype(f16)
    m = np.sin(c.astype(f32)).astype(f16).astype(f64).mean(2, keepdims=True).astype(f16)
    return onnx_case(
        {"a": a, "b": b},
        {"y": gelu, "z": gelu, "m": m, "n": m},
        [
            ("Concat", "a,b", "c", {"axis": 1}),
            ("Tan", "c", "t"),
            ("Gelu", "t", "y"),
            ("Concat", "c,a", "d", {"axis": 1}),
            ("Split", "d,sp", "e,e2", {"axis": 1}),
            ("Split", "e,s3", "f,g2,h", {"axis": 1}),
            ("Concat", "f,g2,h", "k", {"axis": 1}),
            ("Tan", "k", "u"),
            ("Gelu", "u", "z"),
            ("Sin", "c", "sc"),
            ("ReduceMean", "sc,ax", "m"),
            ("Sin", "k", "sk"),
            ("ReduceMean", "sk,ax", "n"),
        ],
        {"sp": i64([6, 1]), "s3": i64([1, 2, 3]), "ax": i64([2])},
        tol=4e-3,
    )


# https://github.com/llvm/torch-mlir/pull/3598
@case("reduce-empty", "Reductions of nothing: max is -inf, min is inf, sum 0, product 1, of int32 max the least number")
def reduce_empty():
    x, y = np.zeros((2, 0, 3), f32), np.zeros((2, 0), i32)
    return onnx_case(
        {"x": x, "y": y},
        {
            "a": np.full((2, 1, 3), -np.inf, f32),
            "b": np.full((2, 1, 3), np.inf, f32),
            "c": np.zeros((2, 1, 3), f32),
            "d": np.ones((2, 1, 3), f32),
            "e": np.full((2, 1), -(2**31), i32),
        },
        [
            ("ReduceMax", "x,ax", "a"),
            ("ReduceMin", "x,ax", "b"),
            ("ReduceSum", "x,ax", "c"),
            ("ReduceProd", "x,ax", "d"),
            ("ReduceMax", "y,ax", "e"),
        ],
        {"ax": i64([1])},
    )


# https://github.com/onnx/onnx/issues/6165 https://github.com/microsoft/onnxruntime/issues/5934 https://github.com/onnx/onnx/issues/6003
@case("clip-min-above-max", "Clip with min above max gives max; NaN stays NaN; integers; bounds that are inputs")
def clip_min_above_max():
    x = f32([-3, 0.5, 4, np.nan, np.inf])
    y = i32([-9, 0, 9])
    return onnx_case(
        {"x": x, "y": y, "lo": np.array(2, f32)},
        {"a": f32([1, 1, 1, np.nan, 1]), "b": f32([-1, 0.5, 1, np.nan, 1]), "c": i32([-2, -2, -2])},
        [("Clip", "x,lo,hi", "a"), ("Clip", "x,m1,hi", "b"), ("Clip", "y,i5,im2", "c")],
        {"hi": f32(1), "m1": f32(-1), "i5": i32(5), "im2": i32(-2)},
    )


# https://github.com/microsoft/onnxruntime/issues/24971
@case("clip-after-reduce-shape", "Clip of a reduced tensor keeps its shape although a weight beside it has another")
def clip_after_reduce_shape():
    x = rng(34).normal(size=(1, 3, 4, 5)).astype(f32)
    m = x.astype(f64).mean((2, 3), keepdims=True)
    return onnx_case(
        {"x": x},
        {"y": np.clip(m, -0.1, 0.1).astype(f32), "z": (np.clip(m, -0.1, 0.1) * np.ones((1, 1, 1, 3))).astype(f32)},
        [("GlobalAveragePool", "x", "g"), ("Clip", "g,lo,hi", "y"), ("Mul", "y,w", "z")],
        {"lo": f32(-0.1), "hi": f32(0.1), "w": np.ones((1, 1, 1, 3), f32)},
    )


# https://github.com/microsoft/onnxruntime/issues/7375
@case("einsum-three", "Einsum of three tensors with an inner sum of the last")
def einsum_three():
    a, b, c = (
        rng(38).normal(size=(2, 3, 4)).astype(f32),
        rng(39).normal(size=(4, 5)).astype(f32),
        rng(40).normal(size=(5, 6, 7)).astype(f32),
    )
    return onnx_case(
        {"a": a, "b": b, "c": c},
        {"y": np.einsum("abc,cd,def->abd", a.astype(f64), b, c).astype(f32)},
        [("Einsum", "a,b,c", "y", {"equation": "abc,cd,def->abd"})],
    )


# https://github.com/pytorch/pytorch/issues/93829 https://github.com/pytorch/pytorch/issues/187018 https://github.com/pytorch/pytorch/issues/105264
@case("uint8-wraps", "uint8 wraps before it is compared, widened, concatenated or summed", kind="torch")
def uint8_wraps(torch):
    def f(x, y):
        n = -x
        a = -y.abs()
        return n, n < 4, (x + x).to(torch.int16), torch.cat([a, a]).sum(), (x * y) // 3

    x, y = torch.tensor([6, 128, 0, 255], dtype=torch.uint8), torch.tensor([200, 200, 3, 255], dtype=torch.uint8)
    return (
        f,
        [x, y],
        [
            u8([250, 128, 0, 1]),
            boolean([0, 0, 1, 1]),
            np.int16([12, 0, 0, 254]),
            i64(2 * (56 + 56 + 253 + 1)),
            u8([(1200 % 256) // 3, (25600 % 256) // 3, 0, (65025 % 256) // 3]),
        ],
        0,
    )


# https://github.com/pytorch/pytorch/issues/143566
@case("shift-by-width", "Shifts by the width and more: left gives 0, right of a negative gives -1", kind="torch")
def shift_by_width(torch):
    a = torch.tensor([1000, -1000, 7, -7])
    b = torch.tensor([64, 64, 63, 70])
    return (
        (lambda a, b: (torch.bitwise_left_shift(a, b), torch.bitwise_right_shift(a, b))),
        [a, b],
        [i64([0, 0, -(2**63), 0]), i64([0, -1, 0, -1])],
        0,
    )


# https://github.com/pytorch/pytorch/issues/194281
@case("conv3d-decoder", "A decoder of 3d convolutions with nearest upsampling at odd extents", kind="torch")
def conv3d_decoder(torch):
    torch.manual_seed(2)
    n = torch.nn
    m = n.Sequential(
        n.Conv3d(4, 16, 3, padding=1),
        n.GroupNorm(4, 16),
        n.SiLU(),
        n.Upsample(scale_factor=(1, 2, 2)),
        n.Conv3d(16, 8, 3, padding=1),
        n.SiLU(),
        n.Upsample(scale_factor=2),
        n.Conv3d(8, 3, 3, padding=1),
    ).eval()
    return m, [torch.randn(1, 4, 3, 23, 11)], None, 1e-5


# https://github.com/pytorch/pytorch/issues/189895
@case("pad-into-reduction", "A padded running sum whose greatest value and last values are read", kind="torch")
def pad_into_reduction(torch):
    x = torch.from_numpy(rng(44).integers(1, 9, 5000))
    F = torch.nn.functional

    def f(x):
        c = F.pad(torch.cumsum(x, 0), (1, 0))
        return (
            c,
            c.max(),
            (c[1:] - c[:-1]).max(),
            F.pad(x, (3, 2), value=-5).amin(),
            F.pad(x.float(), (4, 4), value=2.5).sum(),
        )

    return f, [x], None, 1e-5


# https://github.com/pytorch/pytorch/issues/128505 https://github.com/pytorch/pytorch/issues/100429
@case("repeat-interleave", "repeat_interleave along the last axis and over all elements", kind="torch")
def repeat_interleave(torch):
    return (
        (
            lambda x: (
                x.repeat_interleave(2, dim=-1),
                x.repeat_interleave(3),
                torch.cos(x).repeat_interleave(2, -1) * x.repeat_interleave(2, -1),
            )
        ),
        [torch.arange(6.0).reshape(2, 3)],
        None,
        1e-6,
    )


# https://github.com/pytorch/pytorch/issues/198081
@case("any-of-uint8", "any and all of uint8 keep its type, so that arithmetic wraps", kind="torch")
def any_of_uint8(torch):
    x = torch.tensor([[0, 3], [0, 0]], dtype=torch.uint8)
    return (lambda x: (torch.any(x) * 200 + 100, torch.all(x), x.any(0))), [x], None, 0


# https://github.com/pytorch/pytorch/issues/100466
@case(
    "times-mask",
    "x times (x >= 0) as float: no NaN appears, 0 where it is negative; inf times false is NaN",
    kind="torch",
)
def times_mask(torch):
    x = torch.tensor([1.0, -2.0, 0.0, -0.0, float("inf"), 3e38, -float("inf")])
    return (lambda x: (x * (x >= 0).float(), torch.where(x > 0, torch.log(x), torch.zeros(())))), [x], None, 1e-6


# https://github.com/openvinotoolkit/openvino/issues/20977
@case("loss-ignore", "SoftmaxCrossEntropyLoss with weights and an ignored class: the mean is by the weights that count")
def loss_ignore():
    x = rng(49).normal(size=(4, 5)).astype(f32)
    t = i64([1, 4, 2, 1])
    w = f32([0.2, 1.5, 0.7, 1, 2])
    lp = x.astype(f64) - np.log(np.exp(x.astype(f64)).sum(1, keepdims=True))
    k = np.where(t == 2, 0, w[t]).astype(f64)
    each = -lp[np.arange(4), t] * k
    return onnx_case(
        {"x": x, "t": t, "w": w},
        {"y": f32(each.sum() / k.sum()), "z": each.astype(f32)},
        [
            ("SoftmaxCrossEntropyLoss", "x,t,w", "y", {"ignore_index": 2}),
            ("SoftmaxCrossEntropyLoss", "x,t,w", "z", {"ignore_index": 2, "reduction": "none"}),
        ],
    )


# https://github.com/onnx/onnx/issues/7865
@case("attention-softcap", "Attention 24: softcap is applied before the mask, so that masked keys have no weight")
def attention_softcap():
    q, k, v = (rng(52 + s).normal(size=(1, 2, n, 8)).astype(f32) * 3 for s, n in enumerate((3, 5, 5)))
    m = np.where(rng(55).random((3, 5)) < 0.4, -np.inf, 0).astype(f32)
    m[:, 0] = 0
    s = np.einsum("bhqd,bhkd->bhqk", q.astype(f64), k) / 8**0.5
    s = 2 * np.tanh(s / 2) + m
    e = np.exp(s - s.max(-1, keepdims=True))
    return onnx_case(
        {"q": q, "k": k, "v": v, "m": m},
        {"y": (e / e.sum(-1, keepdims=True) @ v).astype(f32)},
        [("Attention", "q,k,v,m", "y", {"softcap": 2.0})],
        opset=24,
    )


# https://github.com/llvm/torch-mlir/issues/3988
@case(
    "loop-trip-from-shape",
    "Loop whose trip count is the extent of an input, and whose body reads a row by its step number",
)
def loop_trip_from_shape():
    g = subgraph(
        "b",
        [("k", i64, []), ("c", boolean, []), ("v", f32, [3])],
        [("c2", boolean, []), ("v2", f32, [3]), ("o", f32, [])],
        [
            ("Identity", "c", "c2"),
            ("Gather", "x,k", "r", {"axis": 0}),
            ("Max", "v,r", "v2"),
            ("ReduceMax", "r", "o", {"keepdims": 0}),
        ],
    )
    x = rng(57).normal(size=(5, 3)).astype(f32)
    return onnx_case(
        {"x": x},
        {"y": np.maximum(x.max(0), 0), "o": x.max(1)},
        [("Shape", "x", "s", {"start": 0, "end": 1}), ("Squeeze", "s", "n"), ("Loop", "n,t,z", "y,o", {"body": g})],
        {"t": boolean(True), "z": np.zeros(3, f32)},
    )


# https://github.com/pytorch/pytorch/issues/132107
@case("cumsum-inf", "A running sum of infinities is infinite, and NaN only after inf and -inf", kind="torch")
def cumsum_inf(torch):
    i = float("inf")
    return (
        (lambda x: (torch.cumsum(x, 1), torch.cumprod(x, 1), torch.logsumexp(x, 1))),
        [torch.tensor([[1.0, i, 2.0, i], [i, 1.0, -i, 3.0], [-i, -i, -i, -i]])],
        None,
        1e-6,
    )


# https://github.com/openvinotoolkit/openvino/issues/20879
@case(
    "maxpool-indices",
    "MaxPool with dilations and pads: values, and row-major and column-major indices of the unpadded input",
)
def maxpool_indices():
    x = rng(58).permutation(60).astype(f32).reshape(1, 2, 5, 6)
    p = np.pad(x, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=-np.inf)
    y = np.empty((1, 2, 3, 4), f32)
    r, c = np.empty((1, 2, 3, 4), i64), np.empty((1, 2, 3, 4), i64)
    for ch in range(2):
        for i in range(3):
            for j in range(4):
                w = p[0, ch, i : i + 5 : 2, j : j + 5 : 2]
                a, b = np.unravel_index(np.argmax(w), (3, 3))
                y[0, ch, i, j] = w[a, b]
                a, b = i + 2 * a - 1, j + 2 * b - 1
                r[0, ch, i, j] = ch * 30 + a * 6 + b
                c[0, ch, i, j] = ch * 30 + b * 5 + a
    k = {"kernel_shape": [3, 3], "dilations": [2, 2], "pads": [1, 1, 1, 1]}
    return onnx_case(
        {"x": x},
        {"y": y, "r": r, "c": c},
        [("MaxPool", "x", "y,r", k), ("MaxPool", "x", "y2,c", dict(k, storage_order=1))],
    )
