"""Expansions of Resize and Upsample: one resampling along each dimension, with constant weights."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from roller_svc.frontend.graph_builder import Array, GraphBuilder
from roller_svc.frontend.onnx.expansions.expansion import Expansion
from roller_svc.frontend.onnx.tensors import Tensor
from roller_svc.frontend.onnx.use import Node
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.resampling import add_interpolation, add_selection
from roller_svc.ir.dtype import DType

_TRANSFORMATIONS = ("half_pixel", "half_pixel_symmetric", "pytorch_half_pixel", "align_corners", "asymmetric",
                    "tf_half_pixel_for_nn", "tf_crop_and_resize")  # fmt: skip
_ROUNDINGS = ("round_prefer_floor", "round_prefer_ceil", "floor", "ceil")
_POLICIES = ("stretch", "not_larger", "not_smaller")
# Larger extents are refused: they are a model's mistake, or an attack.
MAX_EXTENT = 1 << 20


@dataclass(frozen=True, slots=True)
class _Dimension:
    """How one dimension is resized."""

    axis: int
    size: int
    out: int
    scale: float
    region: tuple[float, float]  # of tf_crop_and_resize


@dataclass(frozen=True, slots=True)
class _Options:
    mode: str
    transformation: str
    rounding: str
    cubic: float
    antialias: bool
    exclude_outside: bool


def _resize(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    x = node.operand(0)
    mode = node.choice("mode", "nearest", ("nearest", "linear", "cubic"))
    if node.opset < 11:
        options = _Options(mode, "asymmetric", "floor", -0.75, antialias=False, exclude_outside=False)
        sizes, scales, region = None, _floats(node, 1, "scales"), None
        policy, axes = "stretch", list(range(x.rank))
    else:
        rounding = node.choice("nearest_mode", "round_prefer_floor", _ROUNDINGS)
        options = _Options(
            mode,
            node.choice("coordinate_transformation_mode", "half_pixel", _TRANSFORMATIONS),
            rounding,
            node.number("cubic_coeff_a", -0.75),
            bool(node.integer("antialias", 0)),
            bool(node.integer("exclude_outside", 0)),
        )
        policy = node.choice("keep_aspect_ratio_policy", "stretch", _POLICIES)
        region, scales, sizes = _floats(node, 1, "roi"), _floats(node, 2, "scales"), node.constant(3, "sizes")
        axes = [_checked_axis(node, axis, x.rank) for axis in node.integers("axes") or range(x.rank)]
    extrapolated = node.number("extrapolation_value", 0.0)
    if options.antialias and mode == "nearest":
        raise node.invalid("antialias is for linear and cubic interpolation, mode is nearest")
    if options.transformation == "tf_crop_and_resize" and region is None:
        raise node.invalid("tf_crop_and_resize needs roi")
    dimensions = _dimensions(node, x, axes, scales, sizes or None, region, policy)
    return [Tensor(_resample(builder, x, dimensions, options, extrapolated))]


def _upsample(node: Node, builder: GraphBuilder) -> Sequence[Tensor]:
    x = node.operand(0)
    mode = node.text("mode", "nearest")
    if mode not in ("nearest", "linear"):
        raise node.invalid(f"mode is {mode[:40]!r}, not nearest or linear")
    if node.opset < 9:
        listed = node.attribute("scales")
        if not isinstance(listed, list) or not all(isinstance(scale, int | float) for scale in listed):
            raise node.unsupported("attributes height_scale and width_scale (operator set 1)")
        scales: tuple[float, ...] | None = tuple(float(scale) for scale in listed)
    else:
        scales = _floats(node, 1, "scales")
    options = _Options(mode, "asymmetric", "floor", -0.75, antialias=False, exclude_outside=False)
    dimensions = _dimensions(node, x, list(range(x.rank)), scales, None, None, "stretch")
    return [Tensor(_resample(builder, x, dimensions, options, 0.0))]


def _floats(node: Node, position: int, what: str) -> tuple[float, ...] | None:
    """Return the numbers of a constant input; None if it is omitted or empty."""
    node.read.add(position)
    if not node.has(position):
        return None
    value = node.constants[position]
    if not isinstance(value, np.ndarray):
        raise node.invalid(f"{what} (input {position}) must be a constant, as shapes are static")
    return tuple(float(number) for number in value.reshape(-1)) or None


def _checked_axis(node: Node, axis: int, rank: int) -> int:
    if not -rank <= axis < rank:
        raise node.invalid(f"axes has {axis}, the tensor has {rank} dimensions")
    return axis % rank


def _dimensions(
    node: Node,
    x: Operand,
    axes: Sequence[int],
    scales: Sequence[float] | None,
    sizes: Sequence[int] | None,
    region: Sequence[float] | None,
    policy: str,
) -> list[_Dimension]:
    """Return the resized dimensions. Either scales or sizes are given."""
    if (scales is None) == (sizes is None):
        raise node.invalid("one of scales and sizes must be given")
    given: Sequence[float] = scales if scales is not None else sizes or ()
    count = len(axes)
    if len(given) != count or (region is not None and len(region) != 2 * count):
        raise node.invalid(f"scales or sizes must have {count} numbers, got {len(given)}; roi twice as many")
    if any(not math.isfinite(number) or number <= 0 for number in given):
        raise node.invalid(f"scales and sizes must be positive, got {list(given)}")
    if region is not None and not all(math.isfinite(number) for number in region):
        raise node.invalid(f"roi must be finite numbers, got {list(region)}")
    extents = [x.shape[axis] for axis in axes]
    outs, factors = _scaled(extents, given) if sizes is None else _fitted(extents, sizes, policy)
    if min(outs) < 1:
        raise node.invalid(f"nothing is left of extents {extents} with scales {factors}")
    if max(outs) > MAX_EXTENT or max(extents) > MAX_EXTENT:
        raise node.invalid(f"extents {extents} become {outs}; they must not exceed {MAX_EXTENT}")
    regions = [(0.0, 1.0)] * count if region is None else [(region[i], region[i + count]) for i in range(count)]
    return [_Dimension(*values) for values in zip(axes, extents, outs, factors, regions, strict=True)]


def _scaled(extents: Sequence[int], scales: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return the extents after scales, in float32 as onnxruntime (0.7 times 10 is 7), and the scales."""
    limited = [min(scale, float(MAX_EXTENT + 1)) for scale in scales]
    outs = [math.floor(np.float32(scale) * np.float32(size)) for scale, size in zip(limited, extents, strict=True)]
    return outs, list(scales)


def _fitted(extents: Sequence[int], sizes: Sequence[int], policy: str) -> tuple[list[int], list[float]]:
    """Return the extents of a result of these sizes, after the policy on their ratio, and the scales."""
    factors = [size / extent for size, extent in zip(sizes, extents, strict=True)]
    if policy == "stretch":
        return list(sizes), factors
    factor = min(factors) if policy == "not_larger" else max(factors)
    return [math.floor(factor * extent + 0.5) for extent in extents], [factor] * len(extents)


def _positions(d: _Dimension, options: _Options) -> Array:
    """Return the position in the input of each element of the result."""
    i, out = np.arange(d.out, dtype=np.float64), d.scale * d.size
    match options.transformation:
        case "align_corners":
            return i * 0 if out == 1 else i * (d.size - 1) / (out - 1)
        case "asymmetric":
            return i / d.scale
        case "tf_half_pixel_for_nn":
            return (i + 0.5) / d.scale
        case "tf_crop_and_resize":
            start, end = d.region
            if out == 1:
                return i * 0 + (start + end) * (d.size - 1) / 2
            return i * ((end - start) * (d.size - 1) / (out - 1)) + start * (d.size - 1)
        case "pytorch_half_pixel" if out == 1:
            return i * 0 - 0.5
        case "half_pixel_symmetric":
            return d.size / 2 * (1 - d.out / out) + (i + 0.5) / d.scale - 0.5
    return (i + 0.5) / d.scale - 0.5


def _is_same(d: _Dimension, options: _Options) -> bool:
    """Return whether the dimension stays as it is."""
    unscaled = math.isclose(d.scale, 1.0) and d.out == d.size
    return unscaled and options.transformation != "tf_half_pixel_for_nn" and d.region == (0.0, 1.0)


def _resample(
    builder: GraphBuilder, x: Operand, dimensions: Sequence[_Dimension], options: _Options, extrapolated: float
) -> Operand:
    """Resample each dimension that changes; the smallest results first."""
    changed = sorted((d for d in dimensions if not _is_same(d, options)), key=lambda d: d.out / d.size)
    result = _nearest(builder, x, changed, options) if options.mode == "nearest" else x
    if options.mode != "nearest":
        for d in changed:
            result = _interpolated(builder, result, d, options)
        if changed and not x.dtype.is_float:
            result = builder.call("round", [result])
        result = builder.cast(result, x.dtype)
    if options.transformation != "tf_crop_and_resize":
        return result
    for d in changed:
        positions = _positions(d, options)
        inside = (positions >= 0) & (positions <= d.size - 1)
        if not inside.all():
            shape = [d.out if axis == d.axis else 1 for axis in range(x.rank)]
            mask = builder.add_constant(inside.reshape(shape), DType.BOOL)
            result = builder.call("where", [mask, result, builder.fill(extrapolated, x.dtype)])
    return result


def _nearest(builder: GraphBuilder, x: Operand, dimensions: Sequence[_Dimension], options: _Options) -> Operand:
    indices = {d.axis: (np.clip(_rounded(_positions(d, options), options.rounding), 0, d.size - 1), d.scale) for d in dimensions}
    return add_selection(builder, x, indices)


def _rounded(positions: Array, rounding: str) -> Array:
    low: Array = np.floor(positions)
    fraction = positions - low
    up = {
        "round_prefer_floor": fraction > 0.5,
        "round_prefer_ceil": fraction >= 0.5,
        "floor": np.zeros(len(positions), np.bool_),
        "ceil": fraction > 0,
    }[rounding]
    return np.asarray(low + up, np.int64)


def _interpolated(builder: GraphBuilder, x: Operand, d: _Dimension, options: _Options) -> Operand:
    starts, weights = _taps(d, options)
    return add_interpolation(builder, x, d.axis, starts, weights, d.scale)


def _taps(d: _Dimension, options: _Options) -> tuple[Array, Array]:
    """Return for each element of the result its first neighbour, and the weights of all, [elements, neighbours]."""
    positions = _positions(d, options)
    radius = 1 if options.mode == "linear" else 2
    scale = min(d.scale, 1.0) if options.antialias else 1.0
    # A position that is an integer is the right one of its two neighbours.
    low = np.ceil(positions).astype(np.int64) - 1
    first = math.floor(-radius / scale) + 1
    offsets = np.arange(first, 2 - first)
    distances = np.abs(low[:, None] + offsets - positions[:, None]) * scale
    weights = np.maximum(1 - distances, 0) if options.mode == "linear" else _cubic(distances, options.cubic)
    if options.antialias:
        weights /= weights.sum(axis=1, keepdims=True)
    starts = low + first
    if options.exclude_outside:
        places = low[:, None] + offsets
        weights = np.where((places < 0) | (places >= d.size), 0.0, weights)
        total = weights.sum(axis=1, keepdims=True)
        weights = weights / np.where(total == 0, 1.0, total)
    return starts, weights


def _cubic(distance: Array, a: float) -> Array:
    """Return the weights of cubic convolution (Keys, 1981)."""
    near: Array = ((a + 2) * distance - (a + 3)) * distance**2 + 1
    far: Array = ((a * distance - 5 * a) * distance + 8 * a) * distance - 4 * a
    return np.asarray(np.where(distance <= 1, near, np.where(distance < 2, far, 0.0)))


RESIZE: dict[str, Expansion] = {"Resize": _resize, "Upsample": _upsample}
