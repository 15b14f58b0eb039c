"""Contraction group → its views as a convolution: tile spaces with output positions, filters, channels and taps."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from roller_svc.ir.affine import Affine, Dim, affine
from roller_svc.ir.expr import Expr, children, loads_of
from roller_svc.ir.group import AxisRole, GroupKind, KernelGroup, TileAxis, TileSpace
from roller_svc.ir.program import Axis


@dataclass(frozen=True, slots=True)
class _Image:
    """The operand with the output positions, and the tap that is added to each position (None: none)."""

    pixels: TileAxis
    filters: TileAxis
    tap_of: dict[str, str | None]
    steps: dict[str, tuple[int, int]]  # of each position: the coordinate's coefficients of it and of its tap

    @property
    def strided(self) -> bool:
        return any(step != 1 for step, _ in self.steps.values())

    @property
    def slides(self) -> bool:
        return any(self.tap_of.values())


# Lanes of a vector per column, above which a GEMM is also computed with vectors along its rows.
MIN_PADDED_COLUMNS_RATIO = 1.1


def convolution_spaces(group: KernelGroup, lanes: int) -> tuple[TileSpace, ...]:
    """Return the spaces with vectors along filters and along output positions; none for other groups.

    Where nothing slides, also the contraction whose batch is the images. One operand, the image, must be a function of
    group, channels and, for each spatial axis, one coordinate stride * pixel + dilation * tap. A GEMM has one spatial
    axis and no tap: a space with vectors along its rows is returned if its columns fill vectors of `lanes` badly.
    """
    if group.kind is not GroupKind.CONTRACTION or group.operands is None or group.row_reduction is not None:
        return ()
    space = group.space
    if space.scale_runs is not None:
        return ()
    (m,), (n,), (k,) = (space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    sides = ((group.operands.b, n, m), (group.operands.a, m, n))
    images = [image for side in sides if (image := _image(*side, k)) is not None]
    # weights are an image too, in which nothing slides
    for image in [image for image in images if image.slides] or images:
        if _slides_or_has_rows(image) or _wastes_lanes(image.pixels, lanes):
            found = tuple(_space(space, image, k, along_filters=way) for way in _vector_choices(group, image))
            return (*found, *_image_contractions(space, image, k))
    return ()


def _vector_choices(group: KernelGroup, image: _Image) -> tuple[bool, ...]:
    """Return vectors along filters; also along output positions where these are contiguous in the output."""
    return (True,) if image.filters.role is AxisRole.N or not _slides_or_has_rows(image) else (True, False)


def _slides_or_has_rows(image: _Image) -> bool:
    """Return whether the group is more than a GEMM: a window slides, or output positions have several axes."""
    return len(image.pixels.members) > 1 or image.slides


def _wastes_lanes(columns: TileAxis, lanes: int) -> bool:
    """Return whether the last vector of a GEMM's columns is padded by much, as that of 7 x 7 pixels is."""
    padded = -(-columns.extent // lanes) * lanes
    return columns.role is AxisRole.N and padded > MIN_PADDED_COLUMNS_RATIO * columns.extent


def _image(factor: Expr, pixels: TileAxis, filters: TileAxis, k: TileAxis) -> _Image | None:
    reduced = {a.name for a in k.members}
    tap_of: dict[str, str | None] = {a.name: None for a in pixels.members}
    steps: dict[str, tuple[int, int]] = {}
    # a window slides over what is read: a reduced axis that is only tested with a position is a channel
    for sum_ in (sum_ for load in loads_of(factor) for index in load.index for sum_ in _index_sums(index)):
        for name in tap_of:
            tap = _tap(sum_, name, set(tap_of), reduced)
            if tap is not None and tap_of[name] not in (None, tap):
                return None
            tap_of[name] = tap_of[name] or tap
    taps = [t for t in tap_of.values() if t is not None]
    if len(set(taps)) < len(taps):
        return None
    for sum_ in _index_sums(factor):
        for name, tap in tap_of.items():
            pace = sum_.coeff(name), 0 if tap is None else sum_.coeff(tap)
            if pace != (0, 0) and not _same_stride_ratio(steps.setdefault(name, pace), pace, has_tap=tap is not None):
                return None
    return _Image(pixels, filters, tap_of, steps)


def _tap(sum_: Affine, pixel: str, pixels: set[str], reduced: set[str]) -> str | None:
    """Return the reduced axis that this index adds to the output position."""
    names = {name for name, _ in sum_.coeffs}
    return next(iter(sorted(names & reduced)), None) if pixel in names and len(names & pixels) == 1 else None


def _same_stride_ratio(known: tuple[int, int], pace: tuple[int, int], *, has_tap: bool) -> bool:
    """Return whether an output position and its tap have one ratio wherever they are added.

    After the common factor is removed, the coordinate must grow by one with the position or with the tap.
    """
    if pace[0] <= 0 or known[0] <= 0 or (has_tap and min(pace[1], known[1]) <= 0):
        return False
    if pace[0] * known[1] != pace[1] * known[0]:
        return False
    return not has_tap or pace[0] % pace[1] == 0 or pace[1] % pace[0] == 0


def _index_sums(expr: Expr) -> Iterator[Affine]:
    """Yield the largest affine subexpressions."""
    known = None if expr.dtype.is_float else affine(expr)
    if known is not None:
        yield known
        return
    for child in children(expr):
        yield from _index_sums(child)


def _space(space: TileSpace, image: _Image, k: TileAxis, *, along_filters: bool) -> TileSpace:
    names = set(image.tap_of.values())
    taps = tuple(a for a in k.members if a.name in names)
    channels = tuple(a for a in k.members if a.name not in names)
    pixels = tuple(TileAxis(a.name, AxisRole.PIXEL, (a,)) for a in image.pixels.members)
    filters = TileAxis(image.filters.name, AxisRole.N, image.filters.members)
    fused = tuple(_fused(role, axes) for role, axes in ((AxisRole.K, channels), (AxisRole.TAP, taps)) if axes)
    accesses = tuple(replace(a, dims=tuple(_with_steps(dim, image) for dim in a.dims)) for a in space.accesses)
    return replace(
        space,
        axes=(*space.role(AxisRole.BATCH), *pixels, filters, *fused),
        accesses=accesses,
        vector_axis=filters.name if along_filters else pixels[-1].name,
        k_bounds=None,
    )


def _with_steps(dim: Dim, image: _Image) -> Dim:
    """Return a dimension whose index is not affine with the coefficients of the coordinate that it is a function of."""
    if dim.is_affine:
        return dim
    coeffs = dict(dim.coeffs)
    for pixel, tap in image.tap_of.items():
        if tap is not None and pixel in coeffs and tap in coeffs:
            coeffs |= zip((pixel, tap), image.steps[pixel], strict=True)
    return replace(dim, coeffs=tuple(sorted(coeffs.items())))


def _image_contractions(space: TileSpace, image: _Image, k: TileAxis) -> tuple[TileSpace, ...]:
    """Return a GEMM for each image, its columns the adjacent output positions.

    Rows of an image are panels without packing, which they are not across images.
    """
    *images, last = image.pixels.members
    if image.strided or image.slides or not images or image.pixels.role is not AxisRole.N:
        return ()
    batch = tuple(TileAxis(a.name, AxisRole.BATCH, (a,)) for a in images)
    columns = TileAxis(last.name, AxisRole.N, (last,))
    axes = (*space.role(AxisRole.BATCH), *batch, image.filters, columns, k)
    return (replace(space, axes=axes, vector_axis=last.name),)


def _fused(role: AxisRole, axes: tuple[Axis, ...]) -> TileAxis:
    return TileAxis("_".join(a.name for a in axes), role, axes)
