"""Match convolutions and pooling, with torch's parameters."""

from __future__ import annotations

from dataclasses import dataclass

from roller_bench.baselines.translate.nest import Nest, affine_index, bare
from roller_bench.baselines.translate.products import parts
from roller_svc.ir.affine import Affine
from roller_svc.ir.expr import Const, Expr, Load, Select, axes_of
from roller_svc.ir.program import Combine


@dataclass(frozen=True, slots=True)
class Window:
    """One sliding-window dimension: index = stride * out + dilation * tap - pad."""

    out: str
    tap: str | None
    outs: int
    taps: int
    stride: int
    dilation: int
    pad: int
    size: int

    @property
    def missing(self) -> int:
        """Return the number of elements read beyond the end."""
        return self.stride * (self.outs - 1) + self.dilation * (self.taps - 1) - self.pad - self.size + 1

    @property
    def is_symmetric(self) -> bool:
        """Return whether symmetric padding gives exactly these outputs."""
        span = self.size + 2 * self.pad - self.dilation * (self.taps - 1) - 1
        return self.pad >= 0 and span >= 0 and span // self.stride + 1 == self.outs


@dataclass(frozen=True, slots=True)
class Convolution:
    """Axes of the data's dimensions, outermost first: batch, group, channel, windows.

    `order` permutes the data's dimensions into this order. Groups and filters are the weight's axes
    that the result has.
    """

    data: Load
    weight: Load
    order: tuple[int, ...]
    batch: tuple[str, ...]
    group: str | None
    channel: str | None
    filters: tuple[str, ...]
    windows: tuple[Window, ...]
    scales: tuple[Expr, ...]
    divisors: tuple[Expr, ...]


@dataclass(frozen=True, slots=True)
class Pooling:
    """Sum or max pooling over the last dimensions."""

    data: Load
    combine: Combine
    windows: tuple[Window, ...]
    divisor: float


def convolution_of(nest: Nest, shapes: dict[str, tuple[int, ...]]) -> Convolution | None:
    """Return a nest as a convolution, or None."""
    if nest.combine is not Combine.SUM:
        return None
    over, under = parts(nest.body)
    summed = {a.name for a in nest.reduced}
    varying = [f for f in over if axes_of(f) & summed]
    if len(varying) != 2 or any(axes_of(f) & summed for f in under):
        return None
    loads = [_guarded(f) for f in varying]
    for data, weight in (loads, loads[::-1]):
        if data is None or weight is None or (kinds := _kinds(nest, data, weight, shapes)) is None:
            continue
        scales = tuple(f for f in over if not axes_of(f) & summed)
        return Convolution(data, weight, *kinds, scales, tuple(under))
    return None


def pooling_of(nest: Nest, shapes: dict[str, tuple[int, ...]]) -> Pooling | None:
    """Return a nest as pooling over its last dimensions, or None."""
    if nest.combine not in (Combine.SUM, Combine.MAX) or not nest.reduced or not nest.dtype.is_float:
        return None
    over, under = parts(nest.body)
    loads = [load for f in over if (load := _guarded(f)) is not None]
    numbers = [f for f in under if isinstance(f, Const)]
    if len(over) != 1 or len(loads) != 1 or len(numbers) != len(under) or len(under) > 1:
        return None
    index = affine_index(loads[0])
    if index is None or (under and nest.combine is Combine.MAX):
        return None
    windows: list[Window] = []
    plain: list[str] = []
    for one, size in zip(index, shapes[loads[0].tensor], strict=True):
        name = _bare_axis(nest, one, size)
        if name is not None and not windows:
            plain.append(name)
        elif (window := _window(nest, one, size)) is not None:
            windows.append(window)
        else:
            return None
    order = [*plain, *(w.out for w in windows)]
    taps = {w.tap for w in windows} - {None}
    if order != [a.name for a in nest.spatial] or taps != {a.name for a in nest.reduced} or not 1 <= len(windows) <= 3:
        return None
    divisor = numbers[0].value if numbers else 1.0
    return Pooling(loads[0], nest.combine, tuple(windows), float(divisor))


def _guarded(expr: Expr) -> Load | None:
    """Return the load of a guarded or plain load expression."""
    expr = bare(expr)
    if isinstance(expr, Select) and isinstance(bare(expr.otherwise), Const):
        expr = bare(expr.then)
    return expr if isinstance(expr, Load) else None


Kinds = tuple[tuple[int, ...], tuple[str, ...], str | None, str | None, tuple[str, ...], tuple[Window, ...]]


def _kinds(nest: Nest, data: Load, weight: Load, shapes: dict[str, tuple[int, ...]]) -> Kinds | None:
    """Classify the dimensions of data and weight, or return None if one does not fit a convolution."""
    index, taps = affine_index(data), affine_index(weight)
    if index is None or taps is None or any(c < 0 for one in (*index, *taps) for _, c in one.coeffs):
        return None
    of_weight = {name for one in taps for name, _ in one.coeffs}
    spatial, summed = {a.name for a in nest.spatial}, {a.name for a in nest.reduced}
    batch: list[tuple[int, str]] = []
    inner: list[tuple[int, str | None, str | None]] = []  # dimension, group, channel
    windows: list[tuple[int, Window]] = []
    for dim, (one, size) in enumerate(zip(index, shapes[data.tensor], strict=True)):
        name = _bare_axis(nest, one, size)
        grouped = _group_and_channel(nest, one, spatial & of_weight, summed & of_weight)
        if name is not None and name in spatial & of_weight:
            inner.append((dim, name, None))
        elif name is not None and name in summed & of_weight:
            inner.append((dim, None, name))
        elif name is not None and name in spatial and not inner and not batch and not windows:
            batch.append((dim, name))
        elif grouped is not None:
            inner.append((dim, *grouped))
        elif (window := _window(nest, one, size)) is not None:
            windows.append((dim, window))
        else:
            return None
    used = {n for _, n in batch} | {w.out for _, w in windows} | {g for _, g, _ in inner if g}
    filters = tuple(a.name for a in nest.spatial if a.name in of_weight and a.name not in used)
    reduced = {w.tap for _, w in windows if w.tap} | {c for _, _, c in inner if c}
    if len(inner) != 1 or not 1 <= len(windows) <= 3 or used | set(filters) != spatial or reduced != summed:
        return None
    order = (*(d for d, _ in batch), inner[0][0], *(d for d, _ in windows))
    return order, tuple(n for _, n in batch), inner[0][1], inner[0][2], filters, tuple(w for _, w in windows)


def _bare_axis(nest: Nest, one: Affine, size: int) -> str | None:
    """Return the axis that covers a whole dimension."""
    if len(one.coeffs) == 1 and one.coeffs[0][1] == 1 and not one.offset and nest.extents[one.coeffs[0][0]] == size:
        return one.coeffs[0][0]
    return None


def _group_and_channel(nest: Nest, one: Affine, groups: set[str], channels: set[str]) -> tuple[str, str] | None:
    names = [name for name, _ in one.coeffs]
    if len(names) != 2 or one.offset:
        return None
    for group, channel in (names, names[::-1]):
        if group in groups and channel in channels and one.coeff(channel) == 1:
            return (group, channel) if one.coeff(group) == nest.extents[channel] else None
    return None


def _window(nest: Nest, one: Affine, size: int) -> Window | None:
    summed = {a.name: a.extent for a in nest.reduced}
    outs = [name for name, _ in one.coeffs if name not in summed]
    found = [name for name, _ in one.coeffs if name in summed]
    if len(outs) != 1 or len(found) > 1:
        return None
    tap = found[0] if found else None
    return Window(
        outs[0], tap, nest.extents[outs[0]], summed[tap] if tap else 1, one.coeff(outs[0]),
        one.coeff(tap) if tap else 1, -one.offset, size,
    )  # fmt: skip
