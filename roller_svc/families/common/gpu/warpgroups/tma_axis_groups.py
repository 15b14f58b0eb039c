"""Index of a tensor → address stride of each axis: the basis of a tensor map's dimensions.

A bounded dimension of the tensor is one whose bounds matter: elements outside count as zeros. All other dimensions form
one address, a sum over axes. Adjacent axes whose strides compose are one axis group.
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
    """A dimension of stride `stride` elements; values from `low` to `high` - 1 exist."""

    index: Affine
    stride: int
    low: int
    high: int
    guarded: bool


@dataclass(frozen=True, slots=True)
class AxisGroup:
    """Axes that move as one: `extent` values, `stride` elements apart, or an axis of a bounded dimension."""

    name: str
    extent: int
    stride: int
    is_bounded: bool


def bounded_dims(
    source: Load, guard: Expr | None, shape: tuple[int, ...], extents: Mapping[str, int]
) -> tuple[BoundedDim, ...] | str:
    """Return all dimensions of the load with the guard's bounds, or why the guard cannot be bounds."""
    windows = []
    for d, index in enumerate(source.index):
        known = affine(index)
        if known is None:
            return f"dimension {d} is not an affine index"
        windows.append(BoundedDim(_without_unit_axes(known, extents), math.prod(shape[d + 1 :]), 0, shape[d], guarded=False))
    for condition in conjuncts(guard):
        margin = slack(condition)
        if margin is None:
            return "its guard is not an affine bound"
        margin = _without_unit_axes(margin, extents)
        if _min_value(margin, extents) >= 0:
            continue
        bounded = [d for d, w in enumerate(windows) if _bound_side(margin, w.index) is not None]
        if not bounded:
            return "its guard does not bound a dimension"
        windows[bounded[0]] = _with_bound(windows[bounded[0]], margin)
    if any(_max_value(w.index, extents) < w.low or _min_value(w.index, extents) >= w.high for w in windows):
        return "its guard never holds"
    return tuple(windows)


def _without_unit_axes(known: Affine, extents: Mapping[str, int]) -> Affine:
    """Drop the axes of extent 1."""
    return replace(known, coeffs=tuple((name, c) for name, c in known.coeffs if extents[name] > 1))


def _min_value(known: Affine, extents: Mapping[str, int]) -> int:
    return known.offset + sum(min(0, c * (extents[name] - 1)) for name, c in known.coeffs)


def _max_value(known: Affine, extents: Mapping[str, int]) -> int:
    return known.offset + sum(max(0, c * (extents[name] - 1)) for name, c in known.coeffs)


def _bound_side(margin: Affine, index: Affine) -> int | None:
    """Return 1 for a lower bound of the index, -1 for an upper one, None for neither."""
    if not index.coeffs:
        return None
    if margin.coeffs == index.coeffs:
        return 1
    return -1 if margin.coeffs == tuple((name, -c) for name, c in index.coeffs) else None


def _with_bound(window: BoundedDim, margin: Affine) -> BoundedDim:
    if _bound_side(margin, window.index) == 1:  # index - low >= 0
        return replace(window, low=max(window.low, window.index.offset - margin.offset), guarded=True)
    return replace(window, high=min(window.high, window.index.offset + margin.offset + 1), guarded=True)


@dataclass(frozen=True, slots=True)
class Address:
    """Bounded dimensions, and the element stride of each axis over the remaining ones, from `offset` on."""

    bounded: tuple[BoundedDim, ...]
    strides: Mapping[str, int]
    offset: int
    extents: Mapping[str, int]
    bounded_of_axis: Mapping[str, tuple[BoundedDim, ...]]  # bounded dimensions that each axis indexes

    @classmethod
    def of(cls, dimensions: tuple[BoundedDim, ...], bounded_indices: Collection[int], extents: Mapping[str, int]) -> Address:
        """Build the address; `bounded_indices`: dimensions that stay bounded."""
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
        """Return whether the group moves the address or one bounded dimension, and nothing else."""
        return not unit.is_bounded or (len(self.bounded_of_axis[unit.name]) == 1 and unit.stride == 0)

    def axis_groups(self, axes: tuple[Axis, ...]) -> tuple[AxisGroup, ...]:
        """Return the axis groups, outermost first."""
        units: list[AxisGroup] = []
        for axis in axes:
            if axis.extent == 1:
                continue
            made = AxisGroup(axis.name, axis.extent, self.strides[axis.name], is_bounded=bool(self.bounded_of_axis[axis.name]))
            last = units[-1] if units else None
            if last and not (last.is_bounded or made.is_bounded) and last.stride == made.stride * made.extent:
                units[-1] = AxisGroup(f"{last.name} {made.name}", last.extent * made.extent, made.stride, is_bounded=False)
            else:
                units.append(made)
        return tuple(units)

    def span(self, index: Affine, without: str = "") -> tuple[int, int]:
        """Return minimum and maximum of the index, its offset included, one axis left out."""
        rest = Affine(tuple((n, c) for n, c in index.coeffs if n != without), index.offset)
        return _min_value(rest, self.extents), _max_value(rest, self.extents)


def axis_group_values(units: tuple[AxisGroup, ...], position: Expr, *, wraps: bool = False) -> dict[str, Expr]:
    """Return the values of the axis groups at a fused position.

    Beyond the end the outermost continues to count, unless it `wraps`.
    """
    values: dict[str, Expr] = {}
    stride = 1
    for unit in reversed(units):
        value = div(position, stride)
        stride *= unit.extent
        values[unit.name] = mod(value, unit.extent) if wraps or unit is not units[0] else value
    return values
