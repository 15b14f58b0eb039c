"""Operand of a contraction → TMA copies of its tiles: tensor maps, boxes, coordinates."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from roller_svc.analysis.operand import Operand
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.tma_axis_groups import (
    Address,
    AxisGroup,
    BoundedDim,
    axis_group_values,
    bounded_dims,
)
from roller_svc.families.common.gpu.warpgroups.tma_boxes import BoxedView, CopyShape, im2col_view, tiled_view
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import add, num, ref
from roller_svc.ir.program import Axis, TensorType
from roller_svc.ir.tensor_map import STRIDE_BYTES, MapMode, Swizzle, TensorMap

PATTERN_ROWS = 8  # of a swizzle pattern: boxes, tiles and their parts begin with a whole one
MAX_BOXES = 8  # of a panel: one thread issues more copies slower than data arrives


@dataclass(frozen=True, slots=True)
class Box:
    """One copy of a tile, to buffer[stage, panel, row, 0]."""

    panel: int
    row: int


@dataclass(frozen=True, slots=True)
class TmaTile:
    """A tile of `extent` elements along m or n and one k-tile, in boxes of `rows` rows of `panel` elements."""

    dtype: DType
    tf32: bool
    k_major: bool  # rows of a tile are along k, as in memory
    extent: int
    k_order: KTileOrder
    panel: int
    rows: int
    view: BoxedView
    axis_groups: tuple[AxisGroup, ...]
    outer_k_groups: tuple[AxisGroup, ...]  # one value at a time
    inner_k_groups: tuple[AxisGroup, ...]
    batch: tuple[str, ...]

    @property
    def mode(self) -> MapMode:
        return self.view.mode

    @property
    def boxes(self) -> tuple[Box, ...]:
        rows, row = (self.extent, self.k_order.depth) if self.k_major else (self.k_order.depth, self.extent)
        return tuple(Box(p, r) for p in range(row // self.panel) for r in range(0, rows, self.rows))

    @property
    def copies(self) -> int:
        """Number of boxes."""
        rows, row = (self.extent, self.k_order.depth) if self.k_major else (self.k_order.depth, self.extent)
        return row // self.panel * -(-rows // self.rows)

    def tensor_map(self, symbol: str, buffer: str, swizzle: Swizzle) -> TensorMap:
        """Return the tensor map `symbol` over the tensor `buffer`."""
        dims, size = self.view.dims, self.dtype.bytes
        box: tuple[int, ...] = tuple(d.box * d.step for d in dims)
        lower: tuple[int, ...] = ()
        upper: tuple[int, ...] = ()
        if self.mode is MapMode.IM2COL:
            box = (self.panel, self.rows)
            lower, upper = tuple(d.lower for d in dims[1:-1]), tuple(d.upper for d in dims[1:-1])
        return TensorMap(
            symbol,
            buffer,
            self.dtype,
            self.mode,
            tuple(d.extent for d in dims),
            tuple(d.stride * size for d in dims[1:]),
            box,
            tuple(d.step for d in dims),
            lower,
            upper,
            swizzle,
            self.view.offset * size,
            self.tf32,
        )

    def coordinates(self, place: Expr, step: Expr, box: Box) -> tuple[tuple[Expr, ...], tuple[Expr, ...]]:
        """Return a box's coordinates and im2col offsets, innermost dimension first.

        `place`: the tile's first position along m or n; batch axes are AxisRefs.
        """
        column = num(box.panel * self.panel)
        along, across = (num(box.row), column) if self.k_major else (column, num(box.row))
        rows, inner = add(place, along), self.k_order.inner_position(step, across)
        at: dict[str, Expr] = {name: ref(name) for name in self.batch}
        at |= axis_group_values(self.outer_k_groups, self.k_order.outer_index(step))
        at |= axis_group_values(self.axis_groups, rows, wraps=self.view.wraps and self.k_major)
        at |= axis_group_values(self.inner_k_groups, inner, wraps=self.view.wraps and not self.k_major)
        coordinates = tuple(d.coordinate(at, rows if self.k_major else inner) for d in self.view.dims)
        if self.mode is MapMode.TILED:
            return coordinates, ()
        return coordinates, tuple(d.shift(at) for d in self.view.dims[1:-1])


@dataclass(frozen=True, slots=True)
class _AddressView:
    """The address with some dimensions bounded, and the axis groups of m or n, of k, and of batches."""

    address: Address
    axis: tuple[AxisGroup, ...]
    outer: tuple[AxisGroup, ...]
    k: tuple[AxisGroup, ...]
    batch: tuple[AxisGroup, ...]


@dataclass(frozen=True, slots=True)
class TmaLoadPlan:
    """An operand that TMA can load."""

    dtype: DType
    tf32: bool
    k_major: bool
    axis: TileAxis
    k: TileAxis
    batch: tuple[Axis, ...]
    dimensions: tuple[BoundedDim, ...]
    extents: Mapping[str, int] = field(compare=False)
    exact: bool = False  # nothing beyond the axes' ends may be accessed; else rows of m or n beyond them are arbitrary
    overhangs: tuple[bool, bool] = (False, False)  # with `exact`: whether tiles begin beyond the ends of axis, of k
    _tiles: dict[tuple[int, KTileOrder, int], TmaTile | str] = field(default_factory=dict, compare=False, repr=False)
    _views: dict[tuple[bool, int], _AddressView] = field(default_factory=dict, compare=False, repr=False)

    def supports(self, order: KTileOrder) -> bool:
        """Return whether some tile can be loaded in that order, rows along k as long as a swizzle allows."""
        row_bytes = order.depth * self.dtype.bytes if self.k_major else STRIDE_BYTES
        panel = math.gcd(row_bytes, Swizzle.B128.value) // self.dtype.bytes
        return panel > 0 and not isinstance(self.tile(max(PATTERN_ROWS, panel), order, panel), str)

    def tile(self, extent: int, order: KTileOrder, panel: int) -> TmaTile | str:
        """Return a tile of `extent` elements in rows of `panel`, or why it cannot be loaded by TMA."""
        known = self._tiles.get((extent, order, panel))
        if known is None:
            known = self._tiles[extent, order, panel] = self._tile(extent, order, panel)
        return known

    def _tile(self, extent: int, order: KTileOrder, panel: int) -> TmaTile | str:
        rows, row = (extent, order.depth) if self.k_major else (order.depth, extent)
        if row % panel:
            return f"{row} elements are not whole rows of {panel}"
        if panel * self.dtype.bytes % STRIDE_BYTES:
            return f"rows of {panel * self.dtype.bytes} bytes are not multiples of {STRIDE_BYTES}"
        found = self._plan((extent, order, panel), rows, pixels=False)
        if not isinstance(found, str):
            return found
        pixels = found if self.exact else self._plan((extent, order, panel), rows, pixels=True)
        if not isinstance(pixels, str):
            return pixels
        for parts in range(2, MAX_BOXES + 1):
            if rows % (parts * PATTERN_ROWS) == 0:
                smaller = self._plan((extent, order, panel), rows // parts, pixels=False)
                if not isinstance(smaller, str):
                    return smaller
        return found

    def _plan(self, tile: tuple[int, KTileOrder, int], rows: int, *, pixels: bool) -> TmaTile | str:
        extent, order, panel = tile
        view = self._view(len(order.outer), pixels=pixels)
        inner, across = (view.k, view.axis) if self.k_major else (view.axis, view.k)
        ragged = self.exact and self.axis.extent % extent != 0
        ends = (order.has_tail, ragged) if self.k_major else (ragged, order.has_tail)
        begins = self.overhangs[::-1] if self.k_major else self.overhangs
        sides = CopyShape(inner, across, (*view.outer, *view.batch), panel, rows, self.dtype.bytes, *ends, *begins)
        boxed = im2col_view(view.address, sides) if pixels else tiled_view(view.address, sides)
        if isinstance(boxed, str):
            return boxed
        return TmaTile(
            self.dtype,
            self.tf32,
            self.k_major,
            extent,
            order,
            panel,
            rows,
            boxed,
            view.axis,
            view.outer,
            view.k,
            tuple(unit.name for unit in view.batch),
        )

    def _view(self, outer: int, *, pixels: bool) -> _AddressView:
        """Return the view with `outer` members of k iterated one value at a time."""
        known = self._views.get((pixels, outer))
        if known is None:
            bounded = [d for d, w in enumerate(self.dimensions) if w.guarded or (pixels and self._is_sliding(w))]
            address = Address.of(self.dimensions, bounded, self.extents)
            known = self._views[pixels, outer] = _AddressView(
                address,
                address.axis_groups(self.axis.members),
                address.axis_groups(self.k.members[:outer]),
                address.axis_groups(self.k.members[outer:]),
                tuple(unit for member in self.batch for unit in address.axis_groups((member,))),
            )
        return known

    def _is_sliding(self, dimension: BoundedDim) -> bool:
        """Return whether rows and another axis index the dimension."""
        members = self.axis.members if self.k_major else self.k.members
        names = {name for name, _ in dimension.index.coeffs}
        return not names.isdisjoint(m.name for m in members) and len(names) > 1


def plan_tma_load(
    operand: Operand,
    dtype: DType,
    axes: tuple[TileAxis, TileAxis],
    batch: tuple[TileAxis, ...],
    types: Mapping[str, TensorType],
) -> TmaLoadPlan | str:
    """Return how TMA loads the operand, staged as `dtype`, or why it cannot. `axes`: m or n, and k."""
    source, (axis, k) = operand.source, axes
    if source is None:
        return "it is computed"
    if operand.memory_dtype is not dtype and (operand.memory_dtype, dtype) != (DType.BOOL, DType.UINT8):
        return f"it is {operand.memory_dtype.value} in memory and {dtype.value} when multiplied"
    members = tuple(m for b in batch for m in b.members)
    extents = {m.name: m.extent for m in (*members, *axis.members, *k.members)}
    dimensions = bounded_dims(source, operand.guard, types[source.tensor].shape, extents)
    if isinstance(dimensions, str):
        return dimensions
    return TmaLoadPlan(dtype, dtype is DType.FLOAT32, operand.k_major, axis, k, members, dimensions, extents)


def plan_tma_store(
    target: Load,
    dtype: DType,
    axes: tuple[TileAxis, TileAxis],
    batch: tuple[TileAxis, ...],
    types: Mapping[str, TensorType],
    overhangs: tuple[bool, bool],
) -> TmaLoadPlan | str:
    """Return how TMA stores outputs, contiguous along n, or why it cannot.

    `target`: index of an output; `axes`: m and n. Tiles have m's extent and k-tile order along n. `overhangs`: whether
    tiles of blocks reach beyond the ends of m and n.
    """
    (m, n) = axes
    operand = Operand(target, dtype, target, None, types[target.tensor].dtype, k_major=True, vector_width=1)
    found = plan_tma_load(operand, dtype, (m, n), batch, types)
    return found if isinstance(found, str) else replace(found, exact=True, tf32=False, overhangs=overhangs)
