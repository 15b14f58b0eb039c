"""Operators of com.microsoft against numpy. The formulas agree with onnxruntime 1.32 on these cases."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import onnx
import pytest
from dot_specs import BYTES_SPEC
from onnx import helper, numpy_helper

from roller_svc import hardware
from roller_svc.errors import ArgumentError, InvariantError, RollerError, UnsupportedModelError
from roller_svc.frontend.onnx.microsoft import MICROSOFT, SAME
from roller_svc.frontend.onnx.microsoft.functions import FUNCTIONS
from roller_svc.frontend.onnx.model import import_model
from roller_svc.graph.interpret import interpret
from roller_svc.graph.weights import Weights
from roller_svc.ir.graph import verify
from roller_svc.model import find_devices
from roller_svc.semantics.interpreter import reference

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(5)


def f32(*shape: int) -> Array:
    return RNG.normal(size=shape).astype(np.float32)


def u8(*shape: int) -> Array:
    return RNG.integers(0, 256, shape).astype(np.uint8)


def s8(*shape: int) -> Array:
    return RNG.integers(-127, 128, shape).astype(np.int8)


def model_of(
    op_type: str,
    tensors: Sequence[Array | None],
    attributes: dict[str, Any],
    constants: Sequence[int],
    results: int,
    omitted: Sequence[int] = (),
) -> Any:
    names = ["" if tensor is None else f"t{i}" for i, tensor in enumerate(tensors)]
    outputs = ["" if i in omitted else f"y{i}" for i in range(results)]
    node = helper.make_node(op_type, names, outputs, "node", domain="com.microsoft", **attributes)
    inputs = [
        helper.make_tensor_value_info(f"t{i}", helper.np_dtype_to_tensor_dtype(tensor.dtype), tensor.shape)
        for i, tensor in enumerate(tensors)
        if tensor is not None and i not in constants
    ]
    kept = [numpy_helper.from_array(tensor, f"t{i}") for i in constants if (tensor := tensors[i]) is not None]
    types = [onnx.ValueInfoProto(name=name) for name in outputs if name]
    graph = helper.make_graph([node], "graph", inputs, types, kept)
    opsets = [helper.make_opsetid("", 17), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(graph, opset_imports=opsets)


def run(
    op_type: str,
    tensors: Sequence[Array | None],
    attributes: dict[str, Any] | None = None,
    *,
    constants: Sequence[int] = (),
    results: int = 1,
    omitted: Sequence[int] = (),
    byte_group: int = 0,
) -> list[Array]:
    weights = Weights()
    model = model_of(op_type, tensors, attributes or {}, constants, results, omitted)
    graph = verify(import_model(model, weights, reference, byte_group=byte_group))
    given = {f"t{i}": tensor for i, tensor in enumerate(tensors) if tensor is not None and i not in constants}
    return list(interpret(graph, weights, given).values())


def close(got: Array, want: Array, tolerance: float = 1e-5) -> None:
    assert got.shape == want.shape
    np.testing.assert_allclose(got.astype(np.float64), want.astype(np.float64), rtol=tolerance, atol=tolerance)


def sigmoid(x: Array) -> Array:
    return 1 / (1 + np.exp(-x))


def gelu(x: Array) -> Array:
    return x * (1 + np.vectorize(math.erf)(x / math.sqrt(2))) / 2


def softmax(x: Array, axis: int = -1) -> Array:
    e = np.exp(x - x.max(axis, keepdims=True))
    return e / e.sum(axis, keepdims=True)


def layer_norm(x: Array, scale: Array, shift: Array | float = 0.0, epsilon: float = 1e-12) -> Array:
    centred = x - x.mean(-1, keepdims=True)
    return centred / np.sqrt((centred**2).mean(-1, keepdims=True) + epsilon) * scale + shift


def quantized(x: Array, scale: float, zero: int, dtype: Any = np.uint8) -> Array:
    bounds = np.iinfo(dtype)
    return np.clip(np.round(x / np.float32(scale)) + zero, bounds.min, bounds.max).astype(dtype)


def real(x: Array, scale: Any, zero: Any) -> Array:
    return (x.astype(np.float32) - np.float32(zero)) * np.float32(scale)


def number(value: float) -> Array:
    return np.array(value, np.float32)


def zero_point(value: int, dtype: Any = np.uint8) -> Array:
    return np.array(value, dtype)


X, BIAS, M = f32(2, 3, 8), f32(8), f32(8, 5)
ACTIVATIONS: list[tuple[str, list[Array], dict[str, Any], Array]] = [
    ("BiasAdd", [X, BIAS, X], {}, X + BIAS + X),
    ("BiasGelu", [X, BIAS], {}, gelu(X + BIAS)),
    ("BiasSplitGelu", [X, BIAS], {}, (X + BIAS)[..., :4] * gelu((X + BIAS)[..., 4:])),
    ("FastGelu", [X, BIAS], {}, (y := X + BIAS) / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (y + 0.044715 * y**3)))),
    ("FastGelu", [X], {}, X / 2 * (1 + np.tanh(math.sqrt(2 / math.pi) * (X + 0.044715 * X**3)))),
    ("QuickGelu", [X], {}, X * sigmoid(1.702 * X)),
    ("QuickGelu", [X], {"alpha": 1.5}, X * sigmoid(1.5 * X)),
    ("FusedMatMul", [X, M], {"alpha": 0.5}, X @ M / 2),
    ("FusedMatMul", [X, M.T.copy()], {"transB": 1}, X @ M),
    ("TransposeMatMul", [X, X], {"transA": 1}, X.swapaxes(1, 2) @ X),
    ("FusedGemm", [X[0], M, f32(5) * 0], {"activation": "LeakyRelu", "activation_alpha": 0.2},
     np.where((y := X[0] @ M) > 0, y, 0.2 * y)),
    ("FusedGemm", [X[0], M], {"activation": "Relu", "alpha": 0.5}, np.maximum(X[0] @ M / 2, 0)),
    ("FusedConv", [X, w := f32(4, 3, 1), b := f32(4), z := f32(2, 4, 8)],
     {"activation": "Clip", "activation_params": [0.0, 1.0]},
     np.clip(np.einsum("ncw,oc->now", X, w[..., 0]) + b[:, None] + z, 0, 1)),
    ("FusedConv", [X, w], {"activation": "HardSigmoid", "activation_params": [0.3, 0.4]},
     np.clip(0.3 * np.einsum("ncw,oc->now", X, w[..., 0]) + 0.4, 0, 1)),
]  # fmt: skip


@pytest.mark.parametrize(("op_type", "tensors", "attributes", "want"), ACTIVATIONS)
def test_fused_operators(op_type: str, tensors: list[Array], attributes: dict[str, Any], want: Array) -> None:
    close(run(op_type, tensors, attributes)[0], want, 1e-4)


def test_norms_of_a_sum() -> None:
    skip, gamma, beta, bias = f32(2, 3, 8), f32(8), f32(8), f32(8)
    total = X + skip + bias
    got = run("SkipLayerNormalization", [X, skip, gamma, beta, bias], {"epsilon": 1e-5}, results=4, omitted=(1, 2))
    close(got[0], layer_norm(total, gamma, beta, 1e-5), 1e-4)
    close(got[1], total)
    close(run("SkipLayerNormalization", [X, skip[0], gamma])[0], layer_norm(X + skip[0], gamma), 1e-4)
    got = run("SkipSimplifiedLayerNormalization", [X, skip, gamma, bias], {"epsilon": 1e-6}, results=4, omitted=(1, 2))
    close(got[0], total / np.sqrt((total**2).mean(-1, keepdims=True) + 1e-6) * gamma, 1e-4)
    close(got[1], total)
    with pytest.raises(UnsupportedModelError, match="a mean or deviation"):
        run("SkipSimplifiedLayerNormalization", [X, skip, gamma], results=2)


@pytest.mark.parametrize("with_places", [False, True])
def test_embeddings(*, with_places: bool) -> None:
    ids, kinds = np.array([[1, 2, 3], [4, 0, 2]], np.int32), np.array([[0, 0, 1], [1, 1, 0]], np.int32)
    words, positions, segments, gamma, beta = f32(6, 8), f32(7, 8), f32(2, 8), f32(8), f32(8)
    places = np.array([[2, 1, 0], [4, 5, 6]], np.int32) if with_places else None
    mask = np.array([[1, 1, 0], [1, 1, 1]], np.int32)
    total = words[ids] + positions[np.arange(3) if places is None else places] + segments[kinds]
    tensors = [ids, kinds, words, positions, segments, gamma, beta, mask, *([] if places is None else [places])]
    got = run("EmbedLayerNormalization", tensors, {"epsilon": 1e-6}, results=3)
    close(got[0], layer_norm(total, gamma, beta, 1e-6), 1e-4)
    assert got[1].tolist() == [2, 3]
    close(got[2], total)
    plain = run("EmbedLayerNormalization", [ids, None, words, positions, None, gamma, beta], results=2)
    close(plain[0], layer_norm(words[ids] + positions[:3], gamma, beta), 1e-4)
    assert plain[1].tolist() == [0, 0]


A, B = u8(2, 3, 4, 4), u8(2, 3, 4, 4)
OF_A, OF_B, OF_Y = (number(0.1), zero_point(100)), (number(0.2), zero_point(130)), (number(0.3), zero_point(90))
RA, RB = real(A, 0.1, 100), real(B, 0.2, 130)
CONDITION = RNG.integers(0, 2, A.shape).astype(np.bool_)
QUANTIZED: list[tuple[str, list[Array], dict[str, Any], Array]] = [
    ("QLinearAdd", [A, *OF_A, B, *OF_B, *OF_Y], {}, RA + RB),
    ("QLinearMul", [A, *OF_A, B, *OF_B, *OF_Y], {}, RA * RB),
    ("QLinearLeakyRelu", [A, *OF_A, *OF_Y], {"alpha": 0.2}, np.where(RA > 0, RA, np.float32(0.2) * RA)),
    ("QLinearSigmoid", [A, *OF_A, *OF_Y], {}, sigmoid(RA)),
    ("QLinearReduceMean", [A, *OF_A, *OF_Y], {"axes": [1], "keepdims": 0}, RA.mean(1)),
    ("QLinearSoftmax", [A, *OF_A, *OF_Y], {"axis": -1, "opset": 13}, softmax(RA)),
    ("QLinearSoftmax", [A, *OF_A, *OF_Y], {"axis": 2, "opset": 9}, softmax(RA.reshape(2, 3, 16)).reshape(A.shape)),
    ("QLinearConcat", [*OF_Y, A, *OF_A, B, *OF_B], {"axis": 1}, np.concatenate([RA, RB], 1)),
    ("QLinearAveragePool", [A, *OF_A, *OF_Y], {"kernel_shape": [2, 2], "strides": [2, 2]},
     RA.reshape(2, 3, 2, 2, 2, 2).mean((3, 5))),
    ("QLinearGlobalAveragePool", [A, *OF_A, *OF_Y], {}, RA.mean((2, 3), keepdims=True)),
    ("QLinearGlobalAveragePool", [A, *OF_A, *OF_Y], {"channels_last": 1}, RA.mean((1, 2), keepdims=True)),
    ("QLinearWhere", [CONDITION, A, *OF_A, B, *OF_B, *OF_Y], {}, np.where(CONDITION, RA, RB)),
]  # fmt: skip


@pytest.mark.parametrize(("op_type", "tensors", "attributes", "want"), QUANTIZED)
def test_functions_of_dequantized_tensors(op_type: str, tensors: list[Array], attributes: dict[str, Any], want: Array) -> None:
    (got,) = run(op_type, tensors, attributes)
    assert got.dtype == np.uint8
    close(got, quantized(want, 0.3, 90), 0 if op_type in ("QLinearAdd", "QLinearConcat", "QLinearWhere") else 1)


def test_a_quantized_convolution_with_channels_last() -> None:
    x, w = u8(1, 4, 4, 3), s8(5, 3, 1, 1)
    scales, zeros = np.array([0.01, 0.02, 0.03, 0.04, 0.05], np.float32), np.zeros(5, np.int8)
    tensors = [x, number(0.1), zero_point(100), w, scales, zeros, number(0.5), zero_point(128)]
    (got,) = run("QLinearConv", tensors, {"channels_last": 1}, constants=range(1, 8))
    want = np.einsum("nhwc,oc->nhwo", real(x, 0.1, 100), real(w[..., 0, 0], scales[:, None], 0))
    close(got, quantized(want, 0.5, 128), 1)


@pytest.mark.parametrize("columns", [False, True])
def test_products_of_integers(*, columns: bool) -> None:
    a, b, bias = u8(2, 3, 8), s8(8, 5), f32(5)
    scale = np.array([0.01, 0.02, 0.03, 0.04, 0.05], np.float32) if columns else number(0.02)
    zero = np.array([1, 2, 3, 4, 5], np.int8) if columns else zero_point(3, np.int8)
    want = real(a, 0.1, 100) @ real(b, scale, zero)
    got = run("MatMulIntegerToFloat", [a, b, number(0.1), scale, zero_point(100), zero, bias], constants=(1, 3, 5))
    close(got[0], want + bias, 1e-4)
    x = f32(3, 8)
    low, high = min(x.min(), 0), max(x.max(), 0)
    step = (high - low) / np.float32(255)
    rounded = quantized(x, step, origin := int(np.clip(np.round(-low / step), 0, 255)))
    got = run("DynamicQuantizeMatMul", [x, b, scale, zero, bias], constants=(1, 2, 3))
    close(got[0], real(rounded, step, origin) @ real(b, scale, zero) + bias, 1e-4)
    added = np.array([1, -20, 3, 400, 5], np.int32)
    tensors = [a[0], number(0.1), zero_point(100), b, scale, zero * 0, added]
    want = real(a[0], 0.1, 100) @ real(b, scale, 0) + added * np.float32(0.1) * scale
    close(run("QGemm", tensors, {"alpha": 0.5})[0], want / 2, 1e-4)
    tensors[3] = b.T.copy()
    close(run("QGemm", [*tensors, *OF_Y], {"transB": 1})[0], quantized(want, 0.3, 90), 1)


@pytest.mark.parametrize(("bits", "block"), [(2, 16), (4, 16), (4, 32), (8, 32)])
@pytest.mark.parametrize("zeros", ["none", "packed", "floats"])
def test_weights_in_blocks(bits: int, block: int, zeros: str) -> None:
    rows, columns = 6, 40  # the last block is not full
    blocks = -(-columns // block)
    numbers, scales = RNG.integers(0, 1 << bits, (rows, blocks * block)), f32(rows, blocks)
    zero, given = np.full((rows, blocks), 1 << (bits - 1)), None
    if zeros != "none":
        zero = RNG.integers(0, 1 << bits, (rows, blocks))
        given = zero.astype(np.float32) if zeros == "floats" else packed(zero, bits).reshape(-1)
    dense = (numbers[:, :columns] - zero.repeat(block, 1)[:, :columns]) * scales.repeat(block, 1)[:, :columns]
    x, bias = f32(3, columns), f32(rows)
    stored = packed(numbers, bits).reshape(rows, blocks, -1)
    attributes = {"K": columns, "N": rows, "bits": bits, "block_size": block}
    (got,) = run("MatMulNBits", [x, stored, scales.reshape(-1), given, None, bias], attributes, constants=(1, 2, 3, 5))
    close(got, x @ dense.T + bias, 1e-4)


@pytest.mark.parametrize("bits", [4, 8])
def test_rows_are_rounded_to_bytes_where_device_and_file_allow_it(bits: int) -> None:
    rows, columns, block = 6, 64, 32
    numbers, scales = RNG.integers(0, 1 << bits, (rows, columns)), f32(rows, 2)
    dense = (numbers - (1 << bits - 1)) * scales.repeat(block, 1)
    x = f32(3, columns)
    x[1, :block] = 0
    steps = np.abs(x.reshape(3, 2, block)).max(-1).repeat(block, 1) / np.float32(127)
    rounded = np.rint(np.divide(x, steps, out=np.zeros_like(x), where=steps > 0)) * steps
    tensors = [x, packed(numbers, bits).reshape(rows, 2, -1), scales.reshape(-1)]

    def got(level: int, *, byte_group: int, given: Sequence[Array] = tensors) -> Array:
        attributes = {"K": columns, "N": rows, "bits": bits, "block_size": block, "accuracy_level": level}
        constants = range(1, len(given))
        return run("MatMulNBits", given, attributes, constants=constants, byte_group=byte_group)[0]

    close(got(4, byte_group=4), rounded @ dense.T, 1e-4)
    exact = x @ dense.T
    close(got(4, byte_group=0), exact, 1e-4)
    close(got(1, byte_group=4), exact, 1e-4)
    assert (np.abs(rounded @ dense.T - exact) <= steps / 2 @ np.abs(dense).T).all(), "half a step of each element"
    zeros = RNG.integers(1, 1 << bits, (rows, 2))
    dense = (numbers - zeros.repeat(block, 1)) * scales.repeat(block, 1)
    want = (rounded if bits == 4 else x) @ dense.T
    close(got(4, byte_group=4, given=[*tensors, packed(zeros, bits).reshape(-1)]), want, 1e-4)


@pytest.mark.parametrize(
    ("block", "byte_group", "rounds"), [(16, 4, True), (20, 4, True), (8, 4, False), (18, 4, False), (16, 0, False)]
)
def test_rows_are_rounded_in_blocks_that_kernels_scale(block: int, byte_group: int, rounds: bool) -> None:
    """One instruction's products have one scale, and blocks have at least 16 numbers."""
    tensors = [f32(3, 2 * block), u8(5, 2, block), f32(10)]
    attributes = {"K": 2 * block, "N": 5, "bits": 8, "block_size": block, "accuracy_level": 4}
    model = model_of("MatMulNBits", tensors, attributes, (1, 2), 1, ())
    operators = {node.operator for node in import_model(model, Weights(), reference, byte_group=byte_group).nodes}
    assert ("quantize_linear" in operators) is rounds


@pytest.mark.parametrize(("dtype", "step"), [(np.float16, 2.0**-10), (ml_dtypes.bfloat16, 2.0**-7)])
def test_rounded_rows_of_narrow_floats_are_multiplied_as_float32(dtype: type[np.generic], step: float) -> None:
    """Only the result is rounded to the type: factors of it are no bytes with scales."""
    numbers, scales = RNG.integers(0, 16, (6, 64)), f32(6, 2).astype(dtype)
    x: Array = f32(3, 64).astype(dtype)
    bias: Array = f32(6).astype(dtype)
    tensors = [x, packed(numbers, 4).reshape(6, 2, -1), scales.reshape(-1), None, None, bias]
    attributes = {"K": 64, "N": 6, "bits": 4, "block_size": 32, "accuracy_level": 4}
    model = model_of("MatMulNBits", tensors, attributes, (1, 2, 5), 1, ())
    nodes = import_model(model, Weights(), reference, byte_group=4).nodes
    producers = {tensor: node for node in nodes for tensor in node.outputs}
    (product,) = (node for node in nodes if node.operator == "linear")
    assert [producers[each].operator for each in product.inputs[:2]] == ["dequantize_linear"] * 2
    (got,) = run("MatMulNBits", tensors, attributes, constants=(1, 2, 5), byte_group=4)
    wide = x.astype(np.float32)
    steps = np.abs(wide.reshape(3, 2, 32)).max(-1).repeat(32, 1) / np.float32(127)
    want = (np.rint(wide / steps) * steps) @ ((numbers - 8) * scales.astype(np.float32).repeat(32, 1)).T + bias.astype(np.float32)
    close(got, want, step)


def test_a_label_may_name_a_node_that_rounds_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """The file is read for the target, as compile_model reads it."""
    load, gpu = hardware.load, "nvidia-h200-sxm"
    monkeypatch.setattr(hardware, "load", lambda target: BYTES_SPEC if target == "cpu-x86-avx512" else load(target))
    attributes = {"K": 64, "N": 5, "bits": 4, "block_size": 32, "accuracy_level": 4}
    model = model_of("MatMulNBits", [f32(3, 64), u8(5, 2, 16), f32(10)], attributes, (1, 2), 1)
    labels = {"*/quantize_linear": gpu}
    assert find_devices(model, "cpu-x86-avx512", devices=labels) == {gpu, BYTES_SPEC.id}
    with pytest.raises(ArgumentError, match="no node is called"):
        find_devices(model, "cpu-x86-avx2", devices=labels)


def test_numbers_may_all_be_below_their_zero_point() -> None:
    """Bytes less their zero point are below zero."""
    numbers, scales, x = RNG.integers(0, 5, (6, 64)), f32(6, 2), f32(3, 64)
    tensors = [x, packed(numbers, 4).reshape(6, 2, -1), scales.reshape(-1), np.full(6, 0x99, np.uint8)]
    attributes = {"K": 64, "N": 6, "bits": 4, "block_size": 32}
    (got,) = run("MatMulNBits", tensors, attributes, constants=(1, 2, 3))
    close(got, x @ ((numbers - 9) * scales.repeat(32, 1)).T, 1e-4)


def test_a_block_with_an_infinity_or_none_has_no_finite_sum() -> None:
    x = f32(3, 64)
    x[0, 3], x[1, 40] = np.inf, np.nan
    tensors = [x, u8(5, 2, 16), f32(10)]
    attributes = {"K": 64, "N": 5, "bits": 4, "block_size": 32, "accuracy_level": 4}
    (got,) = run("MatMulNBits", tensors, attributes, constants=(1, 2), byte_group=4)
    assert np.isnan(got[:2]).all()
    assert np.isfinite(got[2]).all()


def packed(numbers: Array, bits: int) -> Array:
    """Return rows of numbers in bytes, the first in the lowest bits."""
    count = 8 // bits
    padded = np.pad(numbers, ((0, 0), (0, -numbers.shape[1] % count)))
    parts = padded.reshape(len(numbers), -1, count) << (np.arange(count) * bits)
    return parts.sum(-1).astype(np.uint8)


@pytest.mark.parametrize(("bits", "axis"), [(4, 1), (8, -1), (8, 0)])
def test_rows_of_a_table_in_blocks(bits: int, axis: int) -> None:
    numbers, indices = RNG.integers(0, 1 << bits, (32, 32)), np.array([[1, 3], [9, -1]])
    scales = f32(*((32, 2) if axis else (2, 32)))
    attributes = {"bits": bits, "block_size": 16, "quantize_axis": axis}
    (got,) = run("GatherBlockQuantized", [packed(numbers, bits), indices, scales], attributes, constants=(0, 2))
    close(got, ((numbers - (1 << (bits - 1))) * scales.repeat(16, 1 if axis else 0))[indices], 1e-4)


@pytest.mark.parametrize("direction", ["forward", "bidirectional"])
@pytest.mark.parametrize("by_row", [False, True])
def test_an_lstm_with_quantized_weights(direction: str, *, by_row: bool) -> None:
    directions, hidden = 1 + (direction == "bidirectional"), 5
    x, w, r, bias = f32(4, 2, 6), s8(directions, 6, 4 * hidden), s8(directions, hidden, 4 * hidden), f32(directions, 40)
    shape = (directions, 4 * hidden) if by_row else (directions,)
    scales = [np.full(shape, 0.01, np.float32) * (1 + np.arange(shape[-1], dtype=np.float32) / 40) for _ in range(2)]
    zeros = [np.full(shape, value, np.int8) for value in (3, -2)]
    tensors = [x, w, r, bias, None, None, None, None, scales[0], zeros[0], scales[1], zeros[1]]
    attributes = {"hidden_size": hidden, "direction": direction}
    got = run("DynamicQuantizeLSTM", tensors, attributes, constants=(1, 2, 3, 8, 9, 10, 11), results=3)
    dense = [
        real(weight, scale.reshape(directions, 1, -1), zero.reshape(directions, 1, -1)).swapaxes(1, 2)
        for weight, scale, zero in zip((w, r), scales, zeros, strict=True)
    ]
    model = model_of("LSTM", [x, *dense, bias], attributes, (1, 2, 3), 3)
    model.graph.node[0].domain = ""
    weights = Weights()
    wanted = interpret(import_model(model, weights, reference), weights, {"t0": x})
    for value, want in zip(got, wanted.values(), strict=True):
        close(value, want, 1e-5)


HEADS, FEATURES, KEYS = 3, 8, 7
WIDTH = HEADS * FEATURES


def heads_of(x: Array, heads: int = HEADS) -> Array:
    return x.reshape(*x.shape[:2], heads, -1).swapaxes(1, 2)


def attention(q: Array, k: Array, v: Array, mask: Any = 0.0, scale: float | None = None) -> Array:
    """Return the attention of [batch, heads, length, features], as [batch, length, heads * features]."""
    shared = q.shape[1] // k.shape[1]
    k, v = k.repeat(shared, 1), v.repeat(shared, 1)
    scores = q @ k.swapaxes(2, 3) * (1 / math.sqrt(q.shape[3]) if scale is None else scale) + mask
    result = softmax(scores) @ v
    return result.swapaxes(1, 2).reshape(q.shape[0], q.shape[2], -1)


def later(queries: int, keys: int) -> Array:
    """Return -inf where a key comes after the query. The last query sees all keys."""
    return np.where(np.arange(keys) <= np.arange(keys - queries, keys)[:, None], 0, -np.inf)


RAW = np.array([[1, 1, 1, 0, 0], [1, 0, 1, 1, 1]], np.int32)
SQUARE = RNG.integers(0, 2, (2, 5, 5)).astype(np.int32)
WIDE = np.tril(np.ones((2, 1, 9, 9), np.int32))


@pytest.mark.parametrize(
    ("mask", "used", "attributes"),
    [
        (None, 1, {}),
        (None, 1, {"scale": 0.2}),
        (np.array([3, 5], np.int32), np.arange(5) < np.array([3, 5]).reshape(2, 1, 1, 1), {}),
        (
            np.array([3, 5, 1, 0], np.int32),
            (np.arange(5) < np.array([3, 5]).reshape(2, 1, 1, 1)) & (np.arange(5) >= np.array([1, 0]).reshape(2, 1, 1, 1)),
            {},
        ),
        (RAW, RAW[:, None, None], {}),
        (SQUARE, SQUARE[:, None], {"mask_filter_value": -50.0}),
        (WIDE, WIDE[:, :, :5, :5], {}),
    ],
)
def test_attention_by_one_matrix(mask: Array | None, used: Any, attributes: dict[str, Any]) -> None:
    x, w, bias = f32(2, 5, 16), f32(16, 3 * WIDTH) * 0.3, f32(3 * WIDTH)
    q, k, v = (heads_of(part) for part in np.split(x @ w + bias, 3, -1))
    hidden = np.where(used, 0, attributes.get("mask_filter_value", -10000.0))
    (got,) = run("Attention", [x, w, bias, mask], {"num_heads": HEADS} | attributes, constants=(1, 2))
    close(got, attention(q, k, v, hidden, attributes.get("scale")), 1e-4)


@pytest.mark.parametrize("past", [0, 4])
def test_attention_with_a_cache(past: int) -> None:
    x, w, bias, cache = f32(2, 5, 16), f32(16, 3 * WIDTH) * 0.3, f32(3 * WIDTH), f32(2, 2, HEADS, past, FEATURES)
    q, k, v = (heads_of(part) for part in np.split(x @ w + bias, 3, -1))
    k, v = np.concatenate([cache[0], k], 2), np.concatenate([cache[1], v], 2)
    attributes = {"num_heads": HEADS, "unidirectional": 1}
    got = run("Attention", [x, w, bias, None, cache], attributes, constants=(1, 2), results=2)
    close(got[0], attention(q, k, v, later(5, 5 + past)), 1e-4)
    close(got[1], np.stack([k, v]))


def test_attention_of_quantized_tensors() -> None:
    x, w, bias = u8(2, 5, 16), s8(16, 3 * WIDTH), f32(3 * WIDTH)
    q, k, v = (heads_of(part) for part in np.split(real(x, 0.02, 128) @ real(w, 0.02, 0) + bias, 3, -1))
    hidden = np.where(RAW[:, None, None], 0, -10000.0)
    tensors = [x, w, bias, number(0.02), number(0.02), RAW, zero_point(128), zero_point(0, np.int8)]
    (got,) = run("QAttention", tensors, {"num_heads": HEADS}, constants=(1, 2, 3, 4, 6, 7))
    close(got, attention(q, k, v, hidden), 1e-4)


def test_attention_of_several_forms() -> None:
    q, k, v, bias = f32(2, 5, WIDTH), f32(2, KEYS, WIDTH), f32(2, KEYS, HEADS * 4), f32(2 * WIDTH + HEADS * 4)
    plain = {"num_heads": HEADS}
    parts = np.split(bias, [WIDTH, 2 * WIDTH])
    biased = [heads_of(x + part) for x, part in zip((q, k, v), parts, strict=True)]
    close(run("MultiHeadAttention", [q, k, v, bias], plain)[0], attention(*biased), 1e-4)
    whole = heads_of(q), heads_of(k), heads_of(v)
    close(run("MultiHeadAttention", [q, whole[1], whole[2]], plain)[0], attention(*whole), 1e-4)
    mask, added = RNG.integers(0, 2, (2, KEYS)).astype(np.int32), f32(1, HEADS, 5, KEYS)
    got = run("MultiHeadAttention", [q, k, v, None, mask, added], plain | {"scale": 0.3})
    close(got[0], attention(*whole, np.where(mask[:, None, None], 0, -10000.0) + added, 0.3), 1e-4)
    three, two = f32(2, 5, HEADS, 3, FEATURES), f32(2, KEYS, HEADS, 2, FEATURES)
    moved = np.moveaxis(three, 3, 0).swapaxes(2, 3)
    close(run("MultiHeadAttention", [three], plain)[0], attention(moved[0], moved[1], moved[2]), 1e-4)
    moved = np.moveaxis(two, 3, 0).swapaxes(2, 3)
    close(run("MultiHeadAttention", [q, two], plain)[0], attention(whole[0], moved[0], moved[1]), 1e-4)


@pytest.mark.parametrize("past", [0, 4])
def test_attention_with_caches_of_keys_and_values(past: int) -> None:
    q, k, v = f32(2, 5, WIDTH), f32(2, 5, WIDTH), f32(2, 5, WIDTH)
    caches = f32(2, HEADS, past, FEATURES), f32(2, HEADS, past, FEATURES)
    tensors = [q, k, v, None, None, None, *caches]
    got = run("MultiHeadAttention", tensors, {"num_heads": HEADS, "unidirectional": 1}, results=3)
    keys, values = (np.concatenate([cache, heads_of(x)], 2) for cache, x in zip(caches, (k, v), strict=True))
    close(got[0], attention(heads_of(q), keys, values, later(5, 5 + past)), 1e-4)
    close(got[1], keys)
    close(got[2], values)


def rotated(x: Array, cosine: Array, sine: Array, *, interleaved: bool) -> Array:
    """Return [batch, heads, length, features] rotated by angles [batch, length, pairs]."""
    pairs = cosine.shape[-1]
    a, b = (x[..., : 2 * pairs : 2], x[..., 1 : 2 * pairs : 2]) if interleaved else np.split(x[..., : 2 * pairs], 2, -1)
    c, s = cosine[:, None], sine[:, None]
    both = a * c - b * s, a * s + b * c
    turned = np.stack(both, -1).reshape(*x.shape[:-1], -1) if interleaved else np.concatenate(both, -1)
    return np.concatenate([turned, x[..., 2 * pairs :]], -1)


ANGLES = f32(20, FEATURES // 2)


@pytest.mark.parametrize("interleaved", [0, 1])
def test_rotations(interleaved: int) -> None:
    x, places = f32(2, 5, WIDTH), np.array([[0, 1, 2, 3, 4], [3, 4, 5, 6, 7]])
    cosine, sine = np.cos(ANGLES), np.sin(ANGLES)
    (got,) = run("RotaryEmbedding", [x, places, cosine, sine], {"interleaved": interleaved})
    want = rotated(heads_of(x), cosine[places], sine[places], interleaved=bool(interleaved))
    close(got, want.swapaxes(1, 2).reshape(x.shape), 1e-4)
    (got,) = run("RotaryEmbedding", [heads_of(x), np.array([2]), cosine, sine], {"interleaved": interleaved})
    places = np.arange(2, 7)[None]
    close(got, rotated(heads_of(x), cosine[places], sine[places], interleaved=bool(interleaved)), 1e-4)
    attributes = {"interleaved": interleaved, "num_heads": HEADS, "rotary_embedding_dim": 4}
    (got,) = run("RotaryEmbedding", [x, np.array([2]), cosine[:, :2], sine[:, :2]], attributes)
    want = rotated(heads_of(x), cosine[places, :2], sine[places, :2], interleaved=bool(interleaved))
    close(got, want.swapaxes(1, 2).reshape(x.shape), 1e-4)


@pytest.mark.parametrize(
    ("length", "stored", "last", "total", "attributes"),
    [
        (5, 0, [4, 4], 5, {}),
        (5, 0, [2, 4], 5, {}),
        (5, 0, [4, 4], 5, {"local_window_size": 2}),
        (5, 0, [4, 4], 5, {"do_rotary": 1}),
        (1, 6, [4, 5], 6, {}),
        (1, 6, [6, 6], 7, {}),
        (1, 6, [3, 5], 6, {"do_rotary": 1, "rotary_interleaved": 1}),
        (3, 8, [6, 6], 7, {"do_rotary": 1}),
        (4, 9, [3, 3], 4, {"scale": 0.2}),
    ],
)
@pytest.mark.parametrize("is_packed", [False, True])
def test_attention_of_shared_heads_with_a_cache(
    length: int, stored: int, last: list[int], total: int, attributes: dict[str, Any], *, is_packed: bool
) -> None:
    heads = 2
    x = f32(2, length, (heads + 2) * FEATURES)
    parts: list[Array | None] = [*np.split(x, [heads * FEATURES, (heads + 1) * FEATURES], -1)]
    q, k, v = (heads_of(part, count) for part, count in zip(parts, (heads, 1, 1), strict=True) if part is not None)
    caches, tables = (f32(2, 1, stored, FEATURES), f32(2, 1, stored, FEATURES)), (np.cos(ANGLES), np.sin(ANGLES))
    lengths = np.array(last, np.int32), np.array(total, np.int32)
    first: list[Array | None] = [x, None, None] if is_packed else parts
    tensors = [*first, *caches, *lengths, *(tables if "do_rotary" in attributes else ())]
    got = run("GroupQueryAttention", tensors, {"num_heads": heads, "kv_num_heads": 1} | attributes, constants=(6,), results=3)
    window = attributes.get("local_window_size", 99)
    for row, end in enumerate(last):
        start = 0 if total == length else end + 1 - length
        count = min(length, end + 1 - start)  # a prompt may be padded
        places = np.arange(start, start + length)[None]
        one = [part[row : row + 1] for part in (q, k, v)]
        if "do_rotary" in attributes:
            turn = bool(attributes.get("rotary_interleaved", 0))
            one[:2] = [rotated(part, tables[0][places], tables[1][places], interleaved=turn) for part in one[:2]]
        keys, values = (
            np.concatenate([cache[row : row + 1, :, :start], new[:, :, :count]], 2)
            for cache, new in zip(caches, one[1:], strict=True)
        )
        distance = places[0, :count, None] - np.arange(end + 1)
        mask = np.where((distance >= 0) & (distance < window), 0, -np.inf)
        want = attention(one[0][:, :, :count], keys, values, mask, attributes.get("scale"))
        close(got[0][row : row + 1, :count], want, 1e-4)
        close(got[1][row : row + 1, :, : end + 1], keys, 1e-4)
        close(got[2][row : row + 1, :, : end + 1], values, 1e-4)
    assert got[1].shape == (2, 1, max(stored, total), FEATURES)


@pytest.mark.parametrize(
    ("op_type", "tensors", "attributes", "match"),
    [
        ("Snpe", [X], {}, "the operator of com.microsoft is not supported; add a function with its name"),
        ("BiasGelu", [X, BIAS], {"surprise": 1}, "attribute surprise is not supported"),
        ("BiasGelu", [X, BIAS, BIAS], {}, "input 2 is not supported"),
        ("FusedGemm", [X[0], M], {"activation": "Sine"}, "activation 'Sine' is not supported; supported are Clip"),
        ("FusedMatMul", [X, M], {"transBatchA": 1}, "transBatchA=1"),
        ("FusedMatMul", [X, M], {"surprise": 1}, "attribute surprise"),
        (
            "MatMulNBits",
            [X, u8(5, 1, 8), f32(5)],
            {"K": 8, "N": 5, "block_size": 16, "bits": 4},
            r'B \(input 1\) must be a constant, and depends on the input t1; .* with constants={"t1": \.\.\.}',
        ),
        ("MatMulNBits", [X, u8(5, 1, 8), f32(5)], {"K": 8, "N": 5, "block_size": 16, "bits": 3}, "bits=3"),
        (
            "DynamicQuantizeLSTM",
            [f32(4, 2, 6), s8(1, 6, 20), s8(1, 5, 20), None, None, None, None, None, f32(1), s8(1), f32(1), s8(1)],
            {"hidden_size": 5},
            r"W \(input 1\) must be a constant.* input t1",
        ),
        (
            "GroupQueryAttention",
            [X, None, None, None, None, np.zeros(2, np.int32), np.array(3, np.int32)],
            {"num_heads": 2, "kv_num_heads": 1},
            r'total_sequence_length \(input 6\) must be a constant.*"t6": \.\.\.',
        ),
    ],
)
def test_what_is_refused(op_type: str, tensors: list[Array | None], attributes: dict[str, Any], match: str) -> None:
    with pytest.raises(UnsupportedModelError, match=match):
        run(op_type, tensors, attributes)


def test_every_operator_is_tried() -> None:
    source = Path(__file__).read_text(encoding="utf-8")
    tried = {name for name in {*FUNCTIONS, *MICROSOFT} if f'"{name}"' in source}
    assert {*FUNCTIONS, *MICROSOFT} - tried == set()


def test_operators_that_are_those_of_onnx() -> None:
    close(run("Gelu", [X])[0], gelu(X), 1e-4)
    got = run("DequantizeLinear", [A, number(0.1), zero_point(100)])
    close(got[0], RA)
    assert "QuantizeLinear" in SAME


def cases_of_all_operators() -> dict[str, tuple[list[Array | None], dict[str, Any], tuple[int, ...], int]]:
    """Return tensors, attributes, constants and the number of results of a call of each operator that succeeds."""
    cases: dict[str, Any] = {name: (tensors, attributes, (), 1) for name, tensors, attributes, _ in (*ACTIVATIONS, *QUANTIZED)}
    scale, zero = number(0.1), zero_point(3)
    gamma, ids = f32(8), np.zeros((2, 3), np.int32)
    heads = {"num_heads": 2}
    cases |= {
        "Attention": (
            [f32(2, 3, 4), f32(4, 12), f32(12), np.ones((2, 5), np.int32), f32(2, 2, 2, 2, 2), f32(1, 2, 3, 5)],
            heads,
            (1,),
            2,
        ),
        "DynamicQuantizeLSTM": (
            [
                f32(4, 2, 6),
                s8(1, 6, 20),
                s8(1, 5, 20),
                f32(1, 40),
                None,
                None,
                None,
                None,
                f32(1),
                zero_point(1, np.int8).reshape(1),
                f32(1),
                zero_point(1, np.int8).reshape(1),
            ],
            {"hidden_size": 5},
            (1, 2, 3, 8, 9, 10, 11),
            3,
        ),
        "DynamicQuantizeMatMul": ([f32(3, 8), s8(8, 5), scale, zero_point(3, np.int8), f32(5)], {}, (1,), 1),
        "EmbedLayerNormalization": ([ids, ids, f32(6, 8), f32(7, 8), f32(2, 8), gamma, gamma, ids, ids], {}, (), 3),
        "GatherBlockQuantized": ([u8(4, 8), ids, f32(4, 1), u8(4, 1)], {"bits": 4, "block_size": 16}, (0, 2, 3), 1),
        "GroupQueryAttention": (
            [
                f32(2, 1, 8),
                f32(2, 1, 4),
                f32(2, 1, 4),
                f32(2, 1, 6, 4),
                f32(2, 1, 6, 4),
                np.array([5, 5], np.int32),
                np.array([6], np.int32),
                f32(9, 2),
                f32(9, 2),
                np.array([[5], [5]]),
                f32(1, 2, 1, 6),
            ],
            {"num_heads": 2, "kv_num_heads": 1, "do_rotary": 1},
            (6,),
            3,
        ),
        "MatMulIntegerToFloat": ([u8(3, 8), s8(8, 5), scale, scale, zero, zero_point(0, np.int8), f32(5)], {}, (1,), 1),
        "MatMulNBits": (
            [f32(3, 40), u8(6, 3, 8), f32(18), u8(12), np.arange(40, dtype=np.int32) // 16, f32(6)],
            {"K": 40, "N": 6, "bits": 4, "block_size": 16},
            (1, 2, 3, 4),
            1,
        ),
        "MultiHeadAttention": (
            [
                f32(2, 3, 4),
                f32(2, 3, 4),
                f32(2, 3, 4),
                f32(12),
                np.ones((2, 5), np.int32),
                f32(1, 2, 3, 5),
                f32(2, 2, 2, 2),
                f32(2, 2, 2, 2),
            ],
            heads,
            (),
            3,
        ),
        "QAttention": (
            [u8(2, 3, 4), s8(4, 12), f32(12), scale, scale, np.ones((2, 3), np.int32), zero, zero_point(0, np.int8)],
            heads,
            (1, 2, 3, 4, 6, 7),
            1,
        ),
        "QGemm": ([u8(3, 8), scale, zero, s8(8, 5), scale, zero_point(0, np.int8), np.zeros(5, np.int32), *OF_Y], {}, (), 1),
        "QLinearConv": (
            [u8(1, 4, 4, 3), scale, zero, s8(5, 3, 1, 1), f32(5), np.zeros(5, np.int8), scale, zero, np.zeros(5, np.int32)],
            {"channels_last": 1},
            range(1, 9),
            1,
        ),
        "RotaryEmbedding": ([f32(2, 3, 8), np.zeros((2, 3), np.int64), f32(5, 2), f32(5, 2)], heads, (), 1),
        "SkipLayerNormalization": ([X, X, gamma, gamma, gamma], {}, (), 4),
        "SkipSimplifiedLayerNormalization": ([X, X, gamma, gamma], {}, (), 1),
    }
    return cases


CASES = cases_of_all_operators()


def odd_variants(tensor: Array) -> list[Array | None]:
    """Return variants of a tensor with other ranks, extents and element types, and none."""
    flat = tensor.reshape(-1)
    kinds = (np.float32, np.float16, np.int32, np.int64, np.uint8, np.int8, np.bool_)
    return [
        None,
        flat[0].reshape(()),
        flat[:1],
        flat[:2],
        flat,
        np.tile(flat, 3)[: flat.size + 1],
        flat.reshape(1, -1),
        flat.reshape(-1, 1),
        tensor[None],
        tensor[..., None],
        tensor[:0] if tensor.ndim else flat[:0],
        np.concatenate([tensor, tensor]) if tensor.ndim else np.concatenate([flat, flat]),
        np.moveaxis(tensor, 0, -1).copy() if tensor.ndim > 1 else flat,
        *(tensor.astype(kind) for kind in kinds if kind != tensor.dtype),
    ]


def outcome(
    op_type: str, tensors: Sequence[Array | None], attributes: dict[str, Any], constants: Sequence[int], results: int
) -> str:
    """Import a node, and check the graph; return what became of it. Other errors than RollerError pass through."""
    kept = [i for i in constants if i < len(tensors)]
    try:
        verify(import_model(model_of(op_type, tensors, attributes, kept, results), Weights(), reference))
    except InvariantError:
        raise
    except RollerError:
        return "refused"
    return "taken"


@pytest.mark.parametrize("op_type", sorted({*MICROSOFT, *FUNCTIONS}))
def test_odd_tensors_get_a_result_or_are_refused(op_type: str) -> None:
    tensors, attributes, constants, results = CASES[op_type]
    assert outcome(op_type, tensors, attributes, constants, results) == "taken"
    outcomes = [outcome(op_type, tensors[:count], attributes, constants, results) for count in range(len(tensors))]
    for position, tensor in enumerate(tensors):
        for odd in [] if tensor is None else odd_variants(tensor):
            changed = [*tensors[:position], odd, *tensors[position + 1 :]]
            for known in {tuple(constants), (), tuple(range(len(tensors)))}:
                outcomes.append(outcome(op_type, changed, attributes, known, results))
    assert "refused" in outcomes


@pytest.mark.parametrize("op_type", sorted({*MICROSOFT, *FUNCTIONS}))
def test_odd_attributes_get_a_result_or_are_refused(op_type: str) -> None:
    tensors, attributes, constants, results = CASES[op_type]
    for name in {*attributes, "activation_params", "scale", "axis", "unidirectional", "qkv_hidden_sizes"}:
        for odd in (0, -1, 1, 3, 1 << 40, 0.5, float("nan"), "text", [1, 2], [0.5, 1.5, 2.5], [-4, 4, 12]):
            outcome(op_type, tensors, {**attributes, name: odd}, constants, results)


@pytest.mark.parametrize(
    ("op_type", "tensors", "attributes", "message"),
    [
        ("MatMulNBits", [f32(3, 1), u8(1), f32(2)], {"K": 1, "N": 2, "block_size": 1}, "blocks of 4 bits"),
        ("FusedConv", [X, f32(4, 3, 1)], {"activation": "LeakyRelu", "activation_params": [1.0, 2.0]}, "1 parameters"),
        ("FusedConv", [X, f32(4, 3, 1)], {"activation": "Relu", "activation_params": 1.0}, "a list of numbers"),
        ("FusedGemm", [X[0], M], {"activation": "Relu", "activation_alpha": 0.5}, "0 parameters"),
        ("MultiHeadAttention", [f32(4), X, X], {"num_heads": 2}, r"input 0 has the shape \[4\], expected 3 or 4 or 5"),
    ],
)
def test_refusals_say_what_is_expected(op_type: str, tensors: Any, attributes: dict[str, Any], message: str) -> None:
    with pytest.raises(UnsupportedModelError, match=message):
        run(op_type, tensors, attributes, constants=(1, 2) if op_type == "MatMulNBits" else ())
