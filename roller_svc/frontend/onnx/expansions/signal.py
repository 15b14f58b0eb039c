"""Expansions of DFT, STFT and MelWeightMatrix: contractions with constant matrices."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from roller_svc.frontend.graph_builder import MAX_GENERATED_ELEMENTS, Array, GraphBuilder
from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.table import DATA_TYPES, data_type_name
from roller_svc.frontend.onnx.tensors import Tensor
from roller_svc.frontend.onnx.use import Node
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType

_LETTERS = "abcdefghijklm"


def _transform_type(x: Operand) -> DType:
    """Return the type in which a transform is formed."""
    return DType.FLOAT64 if x.dtype is DType.FLOAT64 else DType.FLOAT32


def _single(node: Node, values: tuple[int, ...] | None, what: str, default: int) -> int:
    """Return a number that is an input of one element; the default if it is omitted."""
    if values is None:
        return default
    if len(values) != 1:
        raise node.invalid(f"{what} must be one number, got {len(values)}")
    return values[0]


def _dft(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    x = node.operand(0)
    inverse, onesided = bool(node.integer("inverse", 0)), bool(node.integer("onesided", 0))
    if node.opset < 20:
        axis = node.integer("axis", 1)
    else:
        axis = _single(node, node.constant(2, "axis"), "axis", -2)
    if x.rank < 2 or x.shape[-1] not in (1, 2) or not -x.rank <= axis < x.rank or axis % x.rank == x.rank - 1:
        raise node.invalid(f"input is {list(x.shape)} with axis {axis}; the last dimension has real and imaginary part")
    axis %= x.rank
    size = x.shape[axis]
    usual = 2 * (size - 1) if inverse and onesided else size
    length = _single(node, node.constant(1, "dft_length"), "dft_length", usual)
    if length < 1:
        raise node.invalid(f"dft_length is {length}, and must be positive")
    matrix = _dft_matrix(node, size, length, x.shape[-1], inverse=inverse, onesided=onesided)
    dtype = _transform_type(x)
    letters = _LETTERS[: x.rank - 1]
    result = letters[:axis] + "y" + letters[axis + 1 :]
    equation = f"{letters}z,{letters[axis]}zyx->{result}x"
    found = builder.call(
        "einsum", [builder.cast(x, dtype), builder.add_constant(matrix.astype(dtype.value), dtype)], equation=equation
    )
    return [Tensor(builder.cast(found, x.dtype))]


def _dft_matrix(node: Node, size: int, length: int, parts: int, *, inverse: bool, onesided: bool) -> Array:
    """Return the matrix [size, parts, result, parts of the result] of a transform.

    An input is cut off or padded with zeros to the length. A onesided inverse takes the first half of the frequencies
    and gives a real result; a onesided transform gives the first half.
    """
    half = length // 2 + 1
    used = min(size, half if inverse and onesided else length)
    count = half if onesided and not inverse else length
    parts_out = 1 if inverse and onesided else 2
    if size * parts * count * parts_out > MAX_GENERATED_ELEMENTS:
        raise node.unsupported(f"a transform of {size} elements to {count}")
    multiples = np.outer(np.arange(used), np.arange(count)) % length
    angle = (2 if inverse else -2) * math.pi / length * multiples
    cosine, sine = np.cos(angle), np.sin(angle)
    if inverse:
        cosine, sine = cosine / length, sine / length
    if inverse and onesided:
        # All frequencies but the first, and the last of an even length, stand for two.
        twice = np.full(used, 2.0)
        twice[0] = 1.0
        if length % 2 == 0 and used == half:
            twice[-1] = 1.0
        cosine, sine = cosine * twice[:, None], sine * twice[:, None]
    matrix = np.zeros((size, parts, count, parts_out))
    matrix[:used, 0, :, 0] = cosine
    if parts_out == 2:
        matrix[:used, 0, :, 1] = sine
    if parts == 2:
        matrix[:used, 1, :, 0] = -sine
        if parts_out == 2:
            matrix[:used, 1, :, 1] = cosine
    return matrix


def _stft(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    """Convert to a convolution whose filters are the transform's rows, times the window."""
    signal = node.operand(0)
    onesided = bool(node.integer("onesided", 1))
    window = node.operand(2) if node.has(2) else None
    if signal.rank != 3 or signal.shape[2] not in (1, 2) or (window is not None and window.rank != 1):
        raise node.invalid(f"signal is {list(signal.shape)}, and must be [batch, length, 1 or 2]; window is a vector")
    step = _single(node, node.required("frame_step", 1), "frame_step", 0)
    usual = signal.shape[1] if window is None else window.shape[0]
    length = _single(node, node.constant(3, "frame_length"), "frame_length", usual)
    if step < 1 or not 1 <= length <= signal.shape[1]:
        raise node.invalid(f"frames of {length} elements, {step} apart, do not fit in a signal of {signal.shape[1]}")
    if window is not None and window.shape != (length,):
        raise node.invalid(f"window is {list(window.shape)}, and must be [{length}]")
    parts = signal.shape[2]
    matrix = _dft_matrix(node, length, length, parts, inverse=False, onesided=onesided)
    count = matrix.shape[2]
    filters = matrix.transpose(2, 3, 1, 0).reshape(count * 2, parts, length)
    dtype = _transform_type(signal)
    weight = builder.add_constant(np.ascontiguousarray(filters).astype(dtype.value), dtype)
    if window is not None:
        weight = builder.call("mul", [weight, builder.cast(window, dtype)])
    channels = builder.call("transpose", [builder.cast(signal, dtype)], permutation=(0, 2, 1))
    found = builder.call("conv1d", [channels, weight], stride=step)  # [batch, 2 * frequencies, frames]
    frames = builder.call("transpose", [found], permutation=(0, 2, 1))
    shaped = builder.call("reshape", [frames], shape=(signal.shape[0], found.shape[2], count, 2))
    return [Tensor(builder.cast(shaped, signal.dtype))]


def _mel_weight_matrix(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    names = ("num_mel_bins", "dft_length", "sample_rate", "lower_edge_hertz", "upper_edge_hertz")
    values = [node.scalar(position, name) for position, name in enumerate(names)]
    if any(value is None or not math.isfinite(value) for value in values):
        raise node.invalid(f"the inputs must be numbers, got {values}")
    bins, length, rate, low, high = (float(value or 0) for value in values)
    dtype = DATA_TYPES.get(node.integer("output_datatype", 1))
    if dtype is None:
        raise node.unsupported(f"output_datatype={data_type_name(node.integer('output_datatype', 1))}")
    count, rows = int(bins), int(length) // 2 + 1
    if count < 1 or rows < 1 or rate <= 0 or count * rows > MAX_GENERATED_ELEMENTS:
        raise node.invalid(f"{count} bins of {rows} frequencies at {rate} hertz")
    if min(low, high) <= -700 or max(low, high) > abs(rate):
        raise node.invalid(f"edges from {low} to {high} hertz at {rate} hertz")
    first, last = (2595 * math.log10(1 + hertz / 700) for hertz in (low, high))
    mels = np.arange(count + 2) * ((last - first) / (count + 2)) + first
    edges = ((int(length) + 1) * (700 * (10 ** (mels / 2595) - 1)) // rate).astype(np.int64)
    if edges.min() < 0 or edges.max() >= rows:
        raise node.invalid(f"edges from {low} to {high} hertz are beyond {rate / 2} hertz")
    matrix = np.zeros((rows, count))
    for i, (left, centre, right) in enumerate(zip(edges, edges[1:], edges[2:], strict=False)):
        if left == centre:
            matrix[centre, i] = 1
        else:
            matrix[left : centre + 1, i] = np.arange(centre - left + 1) / (centre - left)
        if right > centre:
            matrix[centre:right, i] = np.arange(right - centre, 0, -1) / (right - centre)
    return [Tensor(builder.cast(builder.add_constant(matrix, DType.FLOAT64), dtype))]


SIGNAL: dict[str, Expansion] = {"DFT": _dft, "MelWeightMatrix": _mel_weight_matrix, "STFT": _stft}
