"""Axis groups of a tile → tensor-map dimensions in which the tile is a box, or a sequence of im2col pixels."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from roller_svc.families.common.gpu.warpgroups.tma_axis_groups import Address, AxisGroup, BoundedDim
from roller_svc.ir.expr import Expr
from roller_svc.ir.index import add, div, mul, num
from roller_svc.ir.tensor_map import (
    CORNER_BITS,
    MAX_BOX,
    MAX_COORDINATE,
    MAX_ELEMENT_STRIDE,
    MAX_PIXELS,
    MAX_RANK,
    MAX_STRIDE_BYTES,
    OFFSET_BITS,
    STRIDE_BYTES,
    MapMode,
)

Terms = tuple[tuple[str, int], ...]


@dataclass(frozen=True, slots=True)
class MapDim:
    """A tensor-map dimension: `extent` elements, `stride` elements apart; a box has `box` of them, `step` apart.

    The coordinate is the sum of `terms` over axis groups, plus `offset`. With `rows_per_count`, it counts how many
    times that many rows precede the box. For im2col: corners, the affine offset of a copy, and its maximum.
    """

    extent: int
    stride: int
    terms: Terms = ()
    offset: int = 0
    box: int = 1
    step: int = 1
    rows_per_count: int = 0
    lower: int = 0
    upper: int = 0
    shift_terms: Terms = ()
    shift_offset: int = 0
    max_shift: int = 0

    def coordinate(self, at: Mapping[str, Expr], position: Expr) -> Expr:
        """Return the coordinate. `at`: values of axis groups; `position`: of the box's first row."""
        return div(position, self.rows_per_count) if self.rows_per_count else _sum(self.terms, self.offset, at)

    def shift(self, at: Mapping[str, Expr]) -> Expr:
        return _sum(self.shift_terms, self.shift_offset, at)


@dataclass(frozen=True, slots=True)
class BoxedView:
    """A view that begins `offset` elements into the tensor. `wraps`: no row group counts beyond its extent."""

    mode: MapMode
    dims: tuple[MapDim, ...]
    offset: int
    wraps: bool = False


@dataclass(frozen=True, slots=True)
class CopyShape:
    """Shape of a tile's copy: `count` rows of `panel` contiguous elements along `inner`, at fixed `invariant` groups.

    Axis groups are listed outermost first. `exact_inner`, `exact_rows`: zeros must be read beyond the end of that side,
    not only beyond the tensor's. `open_inner`, `open_rows`: whole copies beyond that end must not access the tensor.
    """

    inner: tuple[AxisGroup, ...]
    rows: tuple[AxisGroup, ...]
    invariant: tuple[AxisGroup, ...]
    panel: int
    count: int
    element_bytes: int
    exact_inner: bool
    exact_rows: bool
    open_inner: bool = False
    open_rows: bool = False

    @property
    def open_groups(self) -> tuple[AxisGroup, ...]:
        """Groups that count beyond the end of their side, which a dimension of their own must bound."""
        sides = ((self.inner, self.open_inner), (self.rows, self.open_rows))
        return tuple(groups[0] for groups, is_open in sides if is_open and groups)

    @property
    def stride_granule(self) -> int:
        """Elements that strides must be multiples of."""
        return STRIDE_BYTES // self.element_bytes


def _sum(terms: Terms, offset: int, at: Mapping[str, Expr]) -> Expr:
    total: Expr = num(0)
    for name, c in terms:
        total = add(total, mul(at[name], num(c)))
    return add(total, num(offset))


def tiled_view(address: Address, sides: CopyShape) -> BoxedView | str:
    """Return rows as a box: every group in it whole, but for the outermost."""
    first = _innermost_dim(address, sides)
    if isinstance(first, str):
        return first
    cut = _box_extents(sides)
    if isinstance(cut, str):
        return cut
    draft = _ViewBuilder(address, sides, first)
    for unit, box in cut:
        reason = draft.add_row(unit, box)
        if reason:
            return reason
    for unit in sides.open_groups:
        reason = "" if unit.is_bounded or unit.name in draft.placed else draft.add_row(unit, 1)
        if reason:
            return reason
    for window in draft.unused_bounded:
        draft.dims.append(_box_dim(address, window, "", sides))
    return draft.finish(MapMode.TILED)


def _box_extents(sides: CopyShape) -> list[tuple[AxisGroup, int]] | str:
    """Return groups in a box of rows with their extents, innermost first."""
    boxed: list[tuple[AxisGroup, int]] = []
    rest = sides.count
    for unit in reversed(sides.rows):
        if rest == 1:
            break
        if unit is sides.rows[0] or (rest <= unit.extent and unit.extent % rest == 0):
            boxed.append((unit, rest))
            rest = 1
        elif rest % unit.extent == 0:
            boxed.append((unit, unit.extent))
            rest //= unit.extent
        else:
            return f"{sides.count} rows do not form a box over axes of {', '.join(str(u.extent) for u in sides.rows)}"
    if sides.exact_rows and sides.rows and (not boxed or boxed[-1][0] is not sides.rows[0]):
        return "the last k-tile's rows are unbounded"
    if not sides.rows:
        boxed.append((AxisGroup("", 1, sides.stride_granule, is_bounded=False), rest))
    return boxed


def im2col_view(address: Address, sides: CopyShape) -> BoxedView | str:
    """Return rows as im2col pixels, which continue from the end of one axis to the next value of the outer one."""
    first = _innermost_dim(address, sides)
    if isinstance(first, str):
        return first
    if len(sides.rows) < 2:
        return "im2col needs rows of several axes"
    if sides.count > MAX_PIXELS:
        return f"{sides.count} rows are more than {MAX_PIXELS} pixels"
    images = sides.rows[0]
    alone = not images.is_bounded and images.stride > 0 and images.stride % sides.stride_granule == 0
    draft = _ViewBuilder(address, sides, first)
    for unit in reversed(sides.rows[1:] if alone else sides.rows):
        reason = draft.add_pixels(unit)
        if reason:
            return reason
    for window in draft.unused_bounded:
        draft.dims.append(_pixel_dim(address, window, "", 1, 1))
    draft.placed.add(images.name)
    draft.add_invariant_dim()
    total = math.prod(u.extent for u in sides.rows)
    last = (
        MapDim(images.extent, images.stride, ((images.name, 1),))
        if alone
        else MapDim(1, sides.stride_granule, rows_per_count=total)
    )
    draft.dims.append(last)
    made = draft.finish(MapMode.IM2COL)
    return made if isinstance(made, str) else replace(made, wraps=not alone)


def _innermost_dim(address: Address, sides: CopyShape) -> MapDim | str:
    """Return the contiguous dimension."""
    if not sides.inner:
        return "rows have one element"
    unit = sides.inner[-1]
    if len(sides.inner) > 1 and (unit.extent % sides.panel or sides.exact_inner):
        return f"rows of {unit.extent} elements are not cut by {sides.panel}"
    window = address.bounded_dim_of(unit)
    if window is None:
        return MapDim(unit.extent, 1, ((unit.name, 1),)) if unit.stride == 1 else "its rows have gaps"
    if window.stride != 1 or window.index.coeff(unit.name) != 1 or not address.is_plain(unit):
        return "its rows have gaps"
    if sides.exact_inner and len(window.index.coeffs) > 1:
        return "the last k-tile's row is unbounded"
    return _box_dim(address, window, unit.name, sides)


def _box_dim(address: Address, window: BoundedDim, unit: str, sides: CopyShape, box: int = 1) -> MapDim:
    """Return a bounded dimension as a dimension of a box; `unit`: its axis in the box."""
    _, greatest = address.span(window.index)
    high = min(window.high, greatest + 1)
    step = window.index.coeff(unit) if unit else 1
    return MapDim(high - window.low, window.stride, window.index.coeffs, window.index.offset - window.low, box, step)


def _pixel_dim(address: Address, window: BoundedDim, unit: str, extent: int, step: int) -> MapDim:
    """Return a bounded dimension as pixels, `step` apart; all other terms form the im2col offset."""
    least, greatest = address.span(window.index, unit)
    lower, size = least - window.low, window.high - window.low
    others = tuple((name, c) for name, c in window.index.coeffs if name != unit)
    own = ((unit, step),) if unit else ()
    return MapDim(
        size,
        window.stride,
        own,
        lower,
        step=step,
        lower=lower,
        upper=lower + (extent - 1) * step + 1 - size,
        shift_terms=others,
        shift_offset=window.index.offset - least,
        max_shift=greatest - least,
    )


@dataclass(slots=True)
class _ViewBuilder:
    """Dimensions found so far; `placed`: groups that need no further dimension."""

    address: Address
    shape: CopyShape
    first: MapDim
    dims: list[MapDim] = field(default_factory=list)
    placed: set[str] = field(default_factory=set)
    used: list[BoundedDim] = field(default_factory=list)
    back: int = 0  # elements that negative strides reach before the address's offset

    def __post_init__(self) -> None:
        unit = self.shape.inner[-1]
        self.placed.add(unit.name)
        if (window := self.address.bounded_dim_of(unit)) is not None:
            self.used.append(window)

    @property
    def unused_bounded(self) -> list[BoundedDim]:
        """Bounded dimensions that have no map dimension yet."""
        return [w for w in self.address.bounded if w not in self.used]

    def add_row(self, unit: AxisGroup, box: int) -> str:
        """Add a group that is in the box; return why it cannot be, or ''."""
        self.placed.add(unit.name)
        if not unit.is_bounded:
            self.dims.append(MapDim(unit.extent, unit.stride, ((unit.name, 1),) if unit.name else (), box=box))
            return self._misaligned(unit.stride) or ("" if box <= MAX_BOX else f"a box of {box} rows is too large")
        window = self._take_bounded(unit)
        if isinstance(window, str):
            return window
        if self.shape.exact_rows and unit is self.shape.rows[0] and len(window.index.coeffs) > 1:
            return "the last k-tile's rows are unbounded"
        made = _box_dim(self.address, window, unit.name, self.shape, box)
        self.dims.append(made)
        return "" if made.box * made.step <= MAX_BOX else f"a box of {made.box * made.step} rows is too large"

    def add_pixels(self, unit: AxisGroup) -> str:
        """Add a group of pixels; return why it cannot be, or ''."""
        self.placed.add(unit.name)
        if not unit.is_bounded:
            self.dims.append(MapDim(unit.extent, unit.stride, ((unit.name, 1),)))
            return self._misaligned(unit.stride)
        window = self._take_bounded(unit)
        if isinstance(window, str):
            return window
        self.dims.append(_pixel_dim(self.address, window, unit.name, unit.extent, window.index.coeff(unit.name)))
        return ""

    def _take_bounded(self, unit: AxisGroup) -> BoundedDim | str:
        window = self.address.bounded_dim_of(unit)
        if window is None or window in self.used or not self.address.is_plain(unit):
            return "two axes of its rows index one dimension"
        self.used.append(window)
        if not 1 <= window.index.coeff(unit.name) <= MAX_ELEMENT_STRIDE:
            return f"steps of {window.index.coeff(unit.name)} are not from 1 to {MAX_ELEMENT_STRIDE}"
        return self._misaligned(window.stride) or window

    def _misaligned(self, stride: int) -> str:
        if stride <= 0:
            return "its rows repeat or run backwards"
        return "" if stride % self.shape.stride_granule == 0 else f"strides are not multiples of {STRIDE_BYTES} bytes"

    def add_invariant_dim(self) -> None:
        """Add a dimension for im2col groups that move the address but not the pixels."""
        rank = len(self.dims) + 3
        found = self._invariant_dim()
        if found is None or rank > MAX_RANK or found.extent > 1 << (CORNER_BITS[rank] - 1):
            return
        self._place(found)
        self.dims.append(
            MapDim(
                found.extent,
                found.stride,
                upper=1 - found.extent,
                shift_terms=found.terms,
                shift_offset=found.offset,
                max_shift=found.extent - 1,
            )
        )

    def _invariant_groups(self) -> list[AxisGroup]:
        units = (*self.shape.inner, *self.shape.rows, *self.shape.invariant)
        return [u for u in units if u.name not in self.placed and u.stride]

    def _invariant_dim(self) -> MapDim | None:
        """Return one dimension for all groups outside the box, where strides allow it."""
        units = [u for u in self._invariant_groups() if u.stride % self.shape.stride_granule == 0]
        if not units:
            return None
        stride = math.gcd(*(u.stride for u in units))
        terms = tuple((u.name, u.stride // stride) for u in units)
        spans = [c * (u.extent - 1) for u, (_, c) in zip(units, terms, strict=True)]
        return MapDim(1 + sum(map(abs, spans)), stride, terms, -sum(min(0, span) for span in spans))

    def _place(self, still: MapDim) -> None:
        self.placed |= {name for name, _ in still.terms}
        self.back += still.offset * still.stride

    def finish(self, mode: MapMode) -> BoxedView | str:
        if mode is MapMode.TILED and (still := self._invariant_dim()) is not None:
            self.dims.append(still)
            self._place(still)
        first = self._first()
        if isinstance(first, str):
            return first
        offset = self.address.offset + sum(w.low * w.stride for w in self.address.bounded) - self.back
        rest = offset % self.shape.stride_granule
        if rest and self.shape.inner[-1].is_bounded:
            return f"it does not begin at a multiple of {STRIDE_BYTES} bytes"
        first = replace(first, extent=first.extent + rest, offset=first.offset + rest, box=self.shape.panel)
        dims = (first, *self.dims)
        return _unsupported_reason(dims, mode, self.shape) or BoxedView(mode, dims, offset - rest)

    def _first(self) -> MapDim | str:
        """Return the innermost dimension with the terms of groups that have no dimension of their own."""
        rest = self._invariant_groups()
        if not rest:
            return self.first
        closed = self.shape.inner[-1].extent % self.shape.panel == 0 and not self.shape.exact_inner
        if not closed or self.shape.inner[-1].is_bounded or any(u.stride < 0 for u in rest):
            return f"strides are not multiples of {STRIDE_BYTES} bytes, or there are more than {MAX_RANK} dimensions"
        more = sum(u.stride * (u.extent - 1) for u in rest)
        terms = (*self.first.terms, *((u.name, u.stride) for u in rest))
        return replace(self.first, extent=self.first.extent + more, terms=terms)


def _unsupported_reason(dims: tuple[MapDim, ...], mode: MapMode, sides: CopyShape) -> str:
    """Return the driver's limits that the map exceeds (rules in ir/tensor_map.py), or ''."""
    rank = len(dims)
    if rank > MAX_RANK:
        return f"it has more than {MAX_RANK} dimensions"
    if any(d.extent > MAX_COORDINATE or d.stride * sides.element_bytes >= MAX_STRIDE_BYTES for d in dims):
        return "it is too large"
    if any(d.stride % sides.stride_granule for d in dims[1:]):
        return f"strides are not multiples of {STRIDE_BYTES} bytes"
    if mode is MapMode.TILED:
        return ""
    limit = 1 << (CORNER_BITS[rank] - 1)
    if not all(-limit <= c < limit for d in dims[1:-1] for c in (d.lower, d.upper)):
        return f"corners of pixels are not from {-limit} to {limit - 1}"
    if any(d.max_shift >= 1 << OFFSET_BITS[rank] for d in dims[1:-1]):
        return f"offsets of pixels are not below {1 << OFFSET_BITS[rank]}"
    return ""
