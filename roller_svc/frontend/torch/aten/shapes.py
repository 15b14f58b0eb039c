"""ATen operators that arrange elements: views, permutations, parts, concatenation, padding, resampling."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial

import numpy as np

from roller_svc.frontend.graph_builder import Array
from roller_svc.frontend.ops.operator import Operand
from roller_svc.frontend.resampling import add_interpolation, add_selection
from roller_svc.frontend.torch.call import AtenCall, Converter
from roller_svc.frontend.torch.tensors import Empty
from roller_svc.ir.dtype import DType


def _permute(call: AtenCall) -> Operand:
    x = call.x
    return _transpose(call, x, [call.dimension(d, x.rank) for d in call.integers("dims")])


def _transpose(call: AtenCall, x: Operand, order: Sequence[int]) -> Operand:
    return x if list(order) == list(range(x.rank)) else call.run("transpose", x, permutation=tuple(order))


def _transpose_two(call: AtenCall) -> Operand:
    x = call.x
    order = list(range(x.rank))
    if order:
        first, second = (call.axis(name, x.rank) for name in ("dim0", "dim1"))
        order[first], order[second] = second, first
    return _transpose(call, x, order)


def _squeeze(call: AtenCall) -> Operand:
    """Remove dimensions of extent 1. Named dimensions of another extent stay."""
    x = call.x
    named = call.integers("dim") if "dim" in call.arguments else tuple(range(x.rank))
    axes = tuple(sorted({call.dimension(d, x.rank) for d in named if x.rank and x.shape[d] == 1}))
    return call.run("squeeze", x, axis=axes) if axes else x


def _unsqueeze(call: AtenCall) -> Operand:
    x = call.x
    return call.run("unsqueeze", x, axis=(call.integer("dim") % (x.rank + 1),))


def _bounds(start: object, end: object, extent: int) -> tuple[int, int]:
    """Return the first element and the end of a slice, as Python counts them."""
    chosen = slice(start, end).indices(extent)
    return chosen[0], chosen[1]


def _slice(call: AtenCall) -> Operand:
    x = call.x
    axis = call.axis("dim", x.rank)
    start, stop = _bounds(call.value("start"), call.value("end"), x.shape[axis])
    return call.slice(x, axis, start, stop, call.integer("step"))


def _select(call: AtenCall) -> Operand:
    x = call.x
    axis, index = call.axis("dim", x.rank), call.integer("index")
    return select(call, x, axis, index % x.shape[axis])


def select(call: AtenCall, x: Operand, axis: int, index: int) -> Operand:
    """Return one slice, without its dimension."""
    return call.run("squeeze", call.slice(x, axis, index, index + 1), axis=(axis,))


def _pieces(call: AtenCall, x: Operand, axis: int, sizes: Sequence[int]) -> list[Operand | Empty]:
    pieces: list[Operand | Empty] = []
    start = 0
    for size in sizes:
        if size:
            pieces.append(call.slice(x, axis, start, start + size))
        else:
            pieces.append(Empty((*x.shape[:axis], 0, *x.shape[axis + 1 :])))
        start += size
    return pieces


def _split(call: AtenCall) -> list[Operand | Empty]:
    x = call.x
    axis, size = call.axis("dim", x.rank), call.integer("split_size")
    extent = x.shape[axis]
    return _pieces(call, x, axis, [min(size, extent - start) for start in range(0, extent, size)])


def _split_with_sizes(call: AtenCall) -> list[Operand | Empty]:
    x = call.x
    return _pieces(call, x, call.axis("dim", x.rank), call.integers("split_sizes"))


def _unbind(call: AtenCall) -> list[Operand]:
    x = call.x
    axis = call.axis("dim", x.rank)
    return [select(call, x, axis, i) for i in range(x.shape[axis])]


def concat(call: AtenCall, operands: Sequence[Operand], axis: int) -> Operand:
    """Return the concatenation; a single operand is itself."""
    return call.builder.join("concat", operands, axis=axis)


def _cat(call: AtenCall) -> Operand:
    """Concatenate. Tensors without elements add nothing."""
    operands = [call.cast(value) for value in call.value("tensors") if isinstance(value, Operand)]
    if not operands:
        raise call.unsupported("a result without elements")
    return concat(call, operands, call.axis("dim", operands[0].rank))


def _stack(call: AtenCall) -> Operand:
    operands = call.operands("tensors")
    axis = call.integer("dim") % (operands[0].rank + 1)
    return concat(call, [call.run("unsqueeze", call.cast(x), axis=(axis,)) for x in operands], axis)


def _flip(call: AtenCall) -> Operand:
    x, dims = call.x, call.integers("dims")
    return call.run("flip", x, axis=tuple(call.dimension(d, x.rank) for d in dims)) if dims else x


def _roll(call: AtenCall) -> Operand:
    x, shifts, dims = call.x, call.integers("shifts"), call.integers("dims")
    if not dims:
        flat = _roll_one(call, call.reshape(x, (x.type.elements,)), 0, shifts[0])
        return call.reshape(flat, x.shape)
    y = x
    for shift, dim in zip(shifts, dims, strict=True):
        y = _roll_one(call, y, call.dimension(dim, x.rank), shift)
    return y


def _roll_one(call: AtenCall, x: Operand, axis: int, shift: int) -> Operand:
    extent = x.shape[axis]
    cut = -shift % extent
    if cut == 0:
        return x
    return concat(call, [call.slice(x, axis, cut, extent), call.slice(x, axis, 0, cut)], axis)


def _repeat(call: AtenCall) -> Operand:
    x, repeats = call.x, call.integers("repeats")
    x = call.reshape(x, (*(1,) * (len(repeats) - x.rank), *x.shape))
    return x if set(repeats) <= {1} else call.run("tile", x, repeats=repeats)


def _pads(call: AtenCall, rank: int, name: str) -> tuple[int, ...]:
    """Return pads before each dimension, then after each. torch lists pairs from the last dimension on."""
    given = call.integers(name)
    before, after = [0] * rank, [0] * rank
    for i in range(len(given) // 2):
        before[rank - 1 - i], after[rank - 1 - i] = given[2 * i], given[2 * i + 1]
    return (*before, *after)


def _constant_pad(call: AtenCall) -> Operand:
    x, value = call.x, call.number("value")
    if math.isnan(value):
        raise call.unsupported(f"a pad of {value}")
    pads = _pads(call, x.rank, "pad")
    return call.run("pad", x, pads=pads, value=float(value)) if any(pads) else x


def _mode_pad(call: AtenCall, mode: str) -> Operand:
    x = call.x
    return call.run("pad", x, pads=_pads(call, x.rank, "padding" if "padding" in call.arguments else "pad"), mode=mode)


def _slice_scatter(call: AtenCall) -> Operand:
    """Replace a part of a dimension."""
    x, part = call.operand("self"), call.cast(call.operand("src"))
    axis = call.axis("dim", x.rank)
    start, stop = _bounds(call.value("start"), call.value("end"), x.shape[axis])
    if call.integer("step") != 1:
        raise call.unsupported(f"step={call.integer('step')}")
    return _replaced(call, x, part, axis, start, max(start, stop))


def _select_scatter(call: AtenCall) -> Operand:
    x, part = call.operand("self"), call.cast(call.operand("src"))
    axis = call.axis("dim", x.rank)
    index = call.integer("index") % x.shape[axis]
    return _replaced(call, x, call.run("unsqueeze", part, axis=(axis,)), axis, index, index + 1)


def _replaced(call: AtenCall, x: Operand, part: Operand, axis: int, start: int, stop: int) -> Operand:
    parts = [call.expand(part, (*x.shape[:axis], stop - start, *x.shape[axis + 1 :]))]
    if start > 0:
        parts.insert(0, call.slice(x, axis, 0, start))
    if stop < x.shape[axis]:
        parts.append(call.slice(x, axis, stop, x.shape[axis]))
    return concat(call, parts, axis)


def _pixel_shuffle(call: AtenCall) -> Operand:
    x, r = call.x, call.integer("upscale_factor")
    *lead, c, h, w = x.shape
    n = len(lead)
    y = call.reshape(x, (*lead, c // (r * r), r, r, h, w))
    y = _transpose(call, y, [*range(n), n, n + 3, n + 1, n + 4, n + 2])
    return call.reshape(y, call.shape)


def _pixel_unshuffle(call: AtenCall) -> Operand:
    x, r = call.x, call.integer("downscale_factor")
    *lead, c, h, w = x.shape
    n = len(lead)
    y = call.reshape(x, (*lead, c, h // r, r, w // r, r))
    y = _transpose(call, y, [*range(n), n, n + 2, n + 4, n + 1, n + 3])
    return call.reshape(y, call.shape)


def _diagonal(call: AtenCall) -> Operand:
    """Take a diagonal of two dimensions, as one gather of the two as a single dimension."""
    x, offset = call.x, call.integer("offset")
    first, second = (call.axis(name, x.rank) for name in ("dim1", "dim2"))
    order = [*(d for d in range(x.rank) if d not in (first, second)), first, second]
    rows, columns = x.shape[first], x.shape[second]
    count = call.shape[-1]
    start = offset if offset >= 0 else -offset * columns
    flat = call.reshape(_transpose(call, x, order), (*(x.shape[d] for d in order[:-2]), rows * columns))
    return call.slice(flat, flat.rank - 1, start, start + (count - 1) * (columns + 1) + 1, columns + 1)


def _unfold(call: AtenCall) -> Operand:
    """Take every window along a dimension; its elements become the last dimension."""
    x = call.x
    axis, size, step = call.axis("dimension", x.rank), call.integer("size"), call.integer("step")
    count = call.shape[axis]
    places = np.arange(count)[:, None] * step + np.arange(size)
    y = call.run("gather", x, call.constant(places, DType.INT64), axis=axis)
    return _transpose(call, y, [*(d for d in range(y.rank) if d != axis + 1), axis + 1])


# (call, extent, extent of the result, distance of positions) → first neighbours, weights of [elements, neighbours]
Taps = Callable[[AtenCall, int, int, float], tuple[Array, Array]]


def _scales(call: AtenCall, spatial: int) -> list[float | None]:
    """Return the factors that the caller states; None where the extents decide."""
    if "scale_factors" in call.arguments:
        given = call.value("scale_factors")
        return [None] * spatial if given is None else [float(factor) for factor in given]
    names = ("scales_d", "scales_h", "scales_w")[-spatial:] if spatial > 1 else ("scales",)
    return [None if call.value(name) is None else float(call.value(name)) for name in names]


def _changes(call: AtenCall, x: Operand, spatial: int) -> list[tuple[int, int, int, float]]:
    """Return dimension, extents before and after, and distance of positions, of each dimension that changes."""
    found = []
    for axis, factor in enumerate(_scales(call, spatial), 2):
        size, out = x.shape[axis], call.shape[axis]
        if size != out or factor not in (None, 1.0):
            found.append((axis, size, out, 1 / factor if factor else size / out))
    return found


def _nearest(call: AtenCall, spatial: int, *, exact: bool) -> Operand:
    x = call.x
    indices = {}
    for axis, size, out, step in _changes(call, x, spatial):
        # torch computes positions in float32.
        at = (np.arange(out, dtype=np.float32) + np.float32(0.5 if exact else 0)) * np.float32(step)
        indices[axis] = (np.minimum(np.floor(at).astype(np.int64), size - 1), 1 / step)
    return add_selection(call.builder, x, indices) if indices else x


def _interpolate(call: AtenCall, spatial: int, taps: Taps) -> Operand:
    """Resample each spatial dimension by itself."""
    x = call.x
    call.value("align_corners")
    for axis, size, out, step in _changes(call, x, spatial):
        starts, weights = taps(call, size, out, step)
        x = call.cast(add_interpolation(call.builder, x, axis, starts, weights, 1 / step))
    return x


def _centres(call: AtenCall, size: int, out: int, step: float) -> Array:
    """Return the positions in the operand of the result's elements."""
    if call.flag("align_corners"):
        return np.arange(out) * ((size - 1) / (out - 1) if out > 1 else 0.0)
    return (np.arange(out) + 0.5) * step - 0.5


def _linear(call: AtenCall, size: int, out: int, step: float) -> tuple[Array, Array]:
    at = np.maximum(_centres(call, size, out, step), 0)
    low = np.minimum(np.floor(at), size - 1)
    return low.astype(np.int64), np.stack([1 - (at - low), at - low], 1)


def _cubic(call: AtenCall, size: int, out: int, step: float) -> tuple[Array, Array]:
    """Interpolate by Keys' cubic convolution with a = -0.75."""
    a, at = -0.75, _centres(call, size, out, step)
    low = np.floor(at)
    d = np.abs((at - low)[:, None] - np.arange(-1, 3))
    inner = ((a + 2) * d - (a + 3)) * d * d + 1
    outer = ((d - 5) * d + 8) * d * a - 4 * a
    return low.astype(np.int64) - 1, np.where(d <= 1, inner, outer)


def _upsamplers() -> dict[str, Converter]:
    table: dict[str, Converter] = {}
    for form in ("default", "vec"):
        for spatial in (1, 2, 3):
            for name, exact in (("upsample_nearest", False), ("_upsample_nearest_exact", True)):
                table[f"aten.{name}{spatial}d.{form}"] = partial(_nearest, spatial=spatial, exact=exact)
        for name, spatial in (("linear1d", 1), ("bilinear2d", 2), ("trilinear3d", 3)):
            table[f"aten.upsample_{name}.{form}"] = partial(_interpolate, spatial=spatial, taps=_linear)
        table[f"aten.upsample_bicubic2d.{form}"] = partial(_interpolate, spatial=2, taps=_cubic)
    return table


TABLE: dict[str, Converter] = {
    **{f"aten.{name}.default": lambda call: call.reshape(call.x, call.shape) for name in ("view", "reshape", "_unsafe_view")},
    "aten.permute.default": _permute,
    "aten.transpose.int": _transpose_two,
    "aten.t.default": lambda call: _transpose(call, call.x, list(reversed(range(call.x.rank)))),
    "aten.expand.default": lambda call: call.expand(call.x, call.shape),
    **{f"aten.squeeze.{form}": _squeeze for form in ("default", "dim", "dims")},
    "aten.unsqueeze.default": _unsqueeze,
    "aten.slice.Tensor": _slice,
    "aten.select.int": _select,
    "aten.split.Tensor": _split,
    "aten.split_with_sizes.default": _split_with_sizes,
    "aten.unbind.int": _unbind,
    "aten.cat.default": _cat,
    "aten.stack.default": _stack,
    "aten.flip.default": _flip,
    "aten.roll.default": _roll,
    "aten.repeat.default": _repeat,
    "aten.constant_pad_nd.default": _constant_pad,
    **{f"aten.reflection_pad{d}d.default": partial(_mode_pad, mode="reflect") for d in (1, 2, 3)},
    **{f"aten.replication_pad{d}d.default": partial(_mode_pad, mode="edge") for d in (1, 2, 3)},
    "aten._pad_circular.default": partial(_mode_pad, mode="wrap"),
    "aten.slice_scatter.default": _slice_scatter,
    "aten.select_scatter.default": _select_scatter,
    "aten.pixel_shuffle.default": _pixel_shuffle,
    "aten.pixel_unshuffle.default": _pixel_unshuffle,
    "aten.diagonal.default": _diagonal,
    "aten.unfold.default": _unfold,
    **_upsamplers(),
}
