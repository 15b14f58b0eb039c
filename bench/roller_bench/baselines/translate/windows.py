"""Match convolutions and pooling, with torch's parameters."""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_bench.baselines.translate.nest import Nest, affine_index, bare
from roller_bench.baselines.translate.products import factors_of, parts
from roller_svc.ir.affine import Affine
from roller_svc.ir.expr import Const, Expr, Load, Select
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
    scales: tuple[Expr, ...] = ()
    divisors: tuple[Expr, ...] = ()


@dataclass(frozen=True, slots=True)
class Pooling:
    """Sum or max pooling over the last dimensions."""

    data: Load
    combine: Combine
    windows: tuple[Window, ...]
    divisor: float


def convolution_of(nest: Nest, shapes: dict[str, tuple[int, ...]]) -> Convolution | None:
    """Return a nest as a convolution, or None."""
    factors = factors_of(nest)
    if factors is None or len(factors.varying) != 2:
        return None
    loads = [_guarded(f) for f in factors.varying]
    for data, weight in (loads, loads[::-1]):
        found = None if data is None or weight is None else _convolution(nest, data, weight, shapes)
        if found is not None:
            return replace(found, scales=factors.scales, divisors=factors.divisors)
    return None


def pooling_of(nest: Nest, shapes: dict[str, tuple[int, ...]]) -> Pooling | None:
    """Return a nest as pooling over its last dimensions, or None."""
    if nest.combine not in (Combine.SUM, Combine.MAX) or not nest.reduced or not nest.dtype.is_float:
        return None
    (factor, *others), under = parts(nest.body)
    data = None if others else _guarded(factor)
    index = None if data is None else affine_index(data)
    numbers = [f.value for f in under if isinstance(f, Const)]
    if data is None or index is None or len(numbers) != len(under):
        return None
    if len(under) > 1 or (under and nest.combine is Combine.MAX):
        return None
    windows: list[Window] = []
    plain: list[str] = []
    for one, size in zip(index, shapes[data.tensor], strict=True):
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
    return Pooling(data, nest.combine, tuple(windows), float(numbers[0]) if numbers else 1.0)


def _guarded(expr: Expr) -> Load | None:
    """Return the load of a guarded or plain load expression."""
    expr = bare(expr)
    if isinstance(expr, Select) and isinstance(bare(expr.otherwise), Const):
        expr = bare(expr.then)
    return expr if isinstance(expr, Load) else None


def _convolution(nest: Nest, data: Load, weight: Load, shapes: dict[str, tuple[int, ...]]) -> Convolution | None:
    """Classify the dimensions of data and weight, or return None if one does not fit a convolution."""
    index, taps = affine_index(data), affine_index(weight)
    if index is None or taps is None or any(c < 0 for one in (*index, *taps) for _, c in one.coeffs):
        return None
    of_weight = {name for one in taps for name, _ in one.coeffs}
    spatial, summed = {a.name for a in nest.spatial}, {a.name for a in nest.reduced}
    batch: list[str] = []
    inner: list[tuple[int, str | None, str | None]] = []  # dimension, group, channel
    windows: list[tuple[int, Window]] = []
    for dim, (one, size) in enumerate(zip(index, shapes[data.tensor], strict=True)):
        name = _bare_axis(nest, one, size)
        if (found := _group_and_channel(nest, one, name, spatial & of_weight, summed & of_weight)) is not None:
            inner.append((dim, *found))
        elif name is not None and name in spatial and dim == 0:
            batch.append(name)
        elif (window := _window(nest, one, size)) is not None:
            windows.append((dim, window))
        else:
            return None
    if len(inner) != 1 or not 1 <= len(windows) <= 3:
        return None
    ((at, group, channel),) = inner
    used = {*batch, group, *(w.out for _, w in windows)}
    filters = tuple(a.name for a in nest.spatial if a.name in of_weight - used)
    if {*used, *filters} - {None} != spatial or {channel, *(w.tap for _, w in windows)} - {None} != summed:
        return None
    order = (*range(len(batch)), at, *(d for d, _ in windows))
    return Convolution(data, weight, order, tuple(batch), group, channel, filters, tuple(w for _, w in windows))


def _bare_axis(nest: Nest, one: Affine, size: int) -> str | None:
    """Return the axis that covers a whole dimension."""
    if len(one.coeffs) == 1 and one.coeffs[0][1] == 1 and not one.offset and nest.extents[one.coeffs[0][0]] == size:
        return one.coeffs[0][0]
    return None


def _group_and_channel(
    nest: Nest, one: Affine, name: str | None, groups: set[str], channels: set[str]
) -> tuple[str | None, str | None] | None:
    """Return the group and the channel of a dimension that is one of them, `name`, or both; else None."""
    if name in groups:
        return name, None
    if name in channels:
        return None, name
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
        outs[0],
        tap,
        nest.extents[outs[0]],
        summed[tap] if tap else 1,
        one.coeff(outs[0]),
        one.coeff(tap) if tap else 1,
        -one.offset,
        size,
    )
