"""TMA copies in numpy: what arrives in shared memory, from the driver API's and PTX ISA's words on tensor maps."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from roller_svc.ir.expr import AxisRef, Cast, Const, Expr, Op, OpKind, Select
from roller_svc.ir.tensor_map import MapMode, TensorMap

_OPS = {
    OpKind.ADD: np.add, OpKind.SUB: np.subtract, OpKind.MUL: np.multiply, OpKind.FLOORDIV: np.floor_divide,
    OpKind.MOD: np.mod, OpKind.LT: np.less, OpKind.LE: np.less_equal, OpKind.GT: np.greater,
    OpKind.GE: np.greater_equal, OpKind.LAND: np.logical_and, OpKind.EQ: np.equal,
}  # fmt: skip


def value(expr: Expr, at: Mapping[str, np.ndarray | int]) -> np.ndarray:
    """An index or a guard, at all values of its axes at once."""
    match expr:
        case Const(value=number):
            return np.asarray(number)
        case AxisRef(name=name):
            return np.asarray(at[name])
        case Cast(arg=arg):
            return value(arg, at)
        case Select(cond=cond, then=then, otherwise=otherwise):
            return np.where(value(cond, at), value(then, at), value(otherwise, at))
        case Op(kind=kind, args=args):
            return _OPS[kind](*(value(arg, at) for arg in args))
    raise AssertionError(expr)


def arrived(view: TensorMap, memory: np.ndarray, coordinates: tuple[int, ...], offsets: tuple[int, ...]) -> np.ndarray:
    """[rows, neighbours] that one copy brings, unswizzled; `memory`: the buffer, flat."""
    inside, address = reached(view, coordinates, offsets)
    found = memory[np.where(inside, address, 0)]
    return np.where(inside, found, np.zeros_like(found)).reshape(-1, view.box_elements[0])


def reached(view: TensorMap, coordinates: tuple[int, ...], offsets: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
    """Of each element of a box, in the order of shared memory: whether it lies in the tensor, and where, in elements
    of the buffer."""
    places = _tiled(view, coordinates) if view.mode is MapMode.TILED else _pixels(view, coordinates, offsets)
    inside = np.ones(places[0].shape, bool)
    address = np.full(places[0].shape, view.offset_bytes // view.dtype.bytes)
    assert all(s % view.dtype.bytes == 0 for s in view.strides_bytes)
    strides = (1, *(s // view.dtype.bytes for s in view.strides_bytes))
    for place, extent, stride in zip(places, view.extents, strides, strict=True):
        inside &= (place >= 0) & (place < extent)
        address += place * stride
    return inside, address


def _tiled(view: TensorMap, coordinates: tuple[int, ...]) -> list[np.ndarray]:
    lengths = view.box_elements[::-1]
    grid = np.indices(lengths)[::-1]
    return [c + g * s for c, g, s in zip(coordinates, grid, view.element_strides, strict=True)]


def _pixels(view: TensorMap, coordinates: tuple[int, ...], offsets: tuple[int, ...]) -> list[np.ndarray]:
    """Pixels one after another: w in steps up to its upper corner, then h, ..., then the next image."""
    channels, count = view.box
    spatial, at = view.rank - 2, list(coordinates[1:])
    for c, low, extent, up in zip(at, view.lower, view.extents[1:-1], view.upper, strict=False):
        assert low <= c < extent + up, "the first pixel lies between the corners"
    pixels = []
    for _ in range(count):
        pixels.append(tuple(at))
        for d in range(spatial):
            at[d] += view.element_strides[1 + d]
            if at[d] < view.extents[1 + d] + view.upper[d]:
                break
            at[d] = view.lower[d]
        else:
            at[spatial] += 1
    moved = [np.array([p[d] for p in pixels]) + offsets[d] for d in range(spatial)]
    moved.append(np.array([p[spatial] for p in pixels]))
    c = coordinates[0] + np.arange(channels)
    return [np.broadcast_to(c, (count, channels)), *(np.repeat(m[:, None], channels, 1) for m in moved)]
