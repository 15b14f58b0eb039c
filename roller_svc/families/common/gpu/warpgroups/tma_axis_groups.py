"""Index of a tensor → how each axis moves through memory: what a tensor map's dimensions are made of.

A *window* is a dimension of the tensor whose bounds matter: elements outside of it count as zeros. All other dimensions
together are one address, a sum over axes. Neighbouring axes that walk the address as one axis would are one *unit*.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from roller_svc.ir.affine import Affine, affine, slack
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.index import conjuncts, div, mod
from roller_svc.ir.program import Axis


@dataclass(frozen=True, slots=True)
class BoundedDim:
    """A dimension, `stride` elements from one value to the next: values from `low` to `high` - 1 exist."""

    index: Affine
    stride: int
    low: int
    high: int
    guarded: bool


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """Axes that move as one: `extent` values, `stride` elements apart in the address, or an axis of a window."""

    name: str
    extent: int
    stride: int
    is_bounded: bool


def bounded_dims(
    source: Load, guard: Expr | None, shape: tuple[int, ...], extents: Mapping[str, int]
) -> tuple[BoundedDim, ...] | str:
    """All dimensions of the load, those marked that the guard bounds; or why the guard is no such bounds."""
    windows = []
    for d, index in enumerate(source.index):
        known = affine(index)
        if known is None:
            return f"dimension {d} is walked by no sum of axes"
        windows.append(
            BoundedDim(_without_unit_axes(known, extents), math.prod(shape[d + 1 :]), 0, shape[d], guarded=False)
        )
    for condition in conjuncts(guard):
        room = slack(condition)
        if room is None:
            return "its guard is no bound of a sum"
        room = _without_unit_axes(room, extents)
        if _min_value(room, extents) >= 0:
            continue
        bounded = [d for d, w in enumerate(windows) if _bound_side(room, w.index) is not None]
        if not bounded:
            return "its guard is not that of a dimension's ends"
        windows[bounded[0]] = _with_bound(windows[bounded[0]], room)
    if any(_max_value(w.index, extents) < w.low or _min_value(w.index, extents) >= w.high for w in windows):
        return "its guard never holds"
    return tuple(windows)


def _without_unit_axes(known: Affine, extents: Mapping[str, int]) -> Affine:
    """Without the axes that stand at 0."""
    return replace(known, coeffs=tuple((name, c) for name, c in known.coeffs if extents[name] > 1))


def _min_value(known: Affine, extents: Mapping[str, int]) -> int:
    return known.offset + sum(min(0, c * (extents[name] - 1)) for name, c in known.coeffs)


def _max_value(known: Affine, extents: Mapping[str, int]) -> int:
    return known.offset + sum(max(0, c * (extents[name] - 1)) for name, c in known.coeffs)


def _bound_side(room: Affine, index: Affine) -> int | None:
    """1 where it says that the index is large enough, -1: small enough, None: neither."""
    if not index.coeffs:
        return None
    if room.coeffs == index.coeffs:
        return 1
    return -1 if room.coeffs == tuple((name, -c) for name, c in index.coeffs) else None


def _with_bound(window: BoundedDim, room: Affine) -> BoundedDim:
    if _bound_side(room, window.index) == 1:  # index - low >= 0
        return replace(window, low=max(window.low, window.index.offset - room.offset), guarded=True)
    return replace(window, high=min(window.high, window.index.offset + room.offset + 1), guarded=True)


@dataclass(frozen=True, slots=True)
class Address:
    """The windows, and the elements by which each axis moves the rest, from `offset` on. `moved`: the windows that an
    axis moves."""

    bounded: tuple[BoundedDim, ...]
    strides: Mapping[str, int]
    offset: int
    extents: Mapping[str, int]
    bounded_of_axis: Mapping[str, tuple[BoundedDim, ...]]

    @classmethod
    def of(
        cls, dimensions: tuple[BoundedDim, ...], bounded_indices: Collection[int], extents: Mapping[str, int]
    ) -> Address:
        """`kept`: which dimensions are windows, as far as an axis moves them."""
        windows, strides, offset = [], dict.fromkeys(extents, 0), 0
        moved: dict[str, tuple[BoundedDim, ...]] = dict.fromkeys(extents, ())
        for d, dimension in enumerate(dimensions):
            if d in bounded_indices:
                windows.append(dimension)
                for name, _ in dimension.index.coeffs:
                    moved[name] = (*moved[name], dimension)
                continue
            offset += dimension.index.offset * dimension.stride
            for name, c in dimension.index.coeffs:
                strides[name] += c * dimension.stride
        return cls(tuple(windows), strides, offset, extents, moved)

    def bounded_dim_of(self, unit: AxisGroup) -> BoundedDim | None:
        return self.bounded_of_axis[unit.name][0] if unit.is_bounded else None

    def is_plain(self, unit: AxisGroup) -> bool:
        """Whether the unit moves the address or one window and nothing else."""
        return not unit.is_bounded or (len(self.bounded_of_axis[unit.name]) == 1 and unit.stride == 0)

    def axis_groups(self, axes: tuple[Axis, ...]) -> tuple[AxisGroup, ...]:
        """Outermost first."""
        units: list[AxisGroup] = []
        for axis in axes:
            if axis.extent == 1:
                continue
            made = AxisGroup(
                axis.name, axis.extent, self.strides[axis.name], is_bounded=bool(self.bounded_of_axis[axis.name])
            )
            last = units[-1] if units else None
            if last and not (last.is_bounded or made.is_bounded) and last.stride == made.stride * made.extent:
                units[-1] = AxisGroup(
                    f"{last.name} {made.name}", last.extent * made.extent, made.stride, is_bounded=False
                )
            else:
                units.append(made)
        return tuple(units)

    def span(self, index: Affine, without: str = "") -> tuple[int, int]:
        """Least and greatest value of the index, its offset included, one axis left out."""
        rest = Affine(tuple((n, c) for n, c in index.coeffs if n != without), index.offset)
        return _min_value(rest, self.extents), _max_value(rest, self.extents)


def axis_group_values(units: tuple[AxisGroup, ...], position: Expr, *, wraps: bool = False) -> dict[str, Expr]:
    """Values of the units at a position on the axis that they make up; beyond its end the outermost goes on counting,
    unless it `wraps`."""
    values: dict[str, Expr] = {}
    stride = 1
    for unit in reversed(units):
        value = div(position, stride)
        stride *= unit.extent
        values[unit.name] = mod(value, unit.extent) if wraps or unit is not units[0] else value
    return values
