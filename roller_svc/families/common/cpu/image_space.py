"""Tile space of a convolution → how its windows slide over the image, and the input patch of a tile.

The model and the schedule agree on the patch, its layout, and the position of a register tile in it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property

from roller_svc.analysis.winograd import TAPS
from roller_svc.ir.group import AxisRole, TileAccess, TileAxis, TileSpace
from roller_svc.ir.program import Axis

# Fractions of L2: an input patch, and the accumulators of a panel over it, next to which outputs must fit.
L2_PATCH_FRACTION, L2_ACCUMULATOR_FRACTION = 0.3, 0.25


@dataclass(frozen=True, slots=True)
class ImageWindowDim:
    """One coordinate of the image: stride * pixel + dilation * tap, without their common factor."""

    pixel: Axis
    tap: Axis | None
    stride: int
    dilation: int

    @property
    def taps(self) -> int:
        return 1 if self.tap is None else self.tap.extent

    def input_extent(self, pixels: int) -> int:
        """Return the extent of coordinates that adjacent output positions need."""
        return (pixels - 1) * self.stride + (self.taps - 1) * self.dilation + 1


@dataclass(frozen=True)
class ImageSpace:
    """A convolution's tile space, taken apart.

    Vectors hold adjacent filters or adjacent output positions of the last dimension; the other are rows of the register
    tile.
    """

    space: TileSpace
    window_dims: tuple[ImageWindowDim, ...]  # of the PIXEL axes, outermost first
    filters: TileAxis
    channels: TileAxis | None
    along_filters: bool  # vectors hold adjacent filters
    channels_last: bool  # the image's innermost dimension is k
    pixel_stride: int  # elements between coordinates of the last dimension; 0 if another dimension is innermost
    weights_contiguous: bool  # filters are contiguous in the weights
    weights_along_k: bool  # taps, or channels without taps, are contiguous for each filter in the weights, one tensor
    filters_last: bool  # filters are contiguous in the output
    element_bytes: int

    @cached_property
    def taps(self) -> int:
        return math.prod(s.taps for s in self.window_dims)

    @cached_property
    def depth(self) -> int:
        """Channels."""
        return 1 if self.channels is None else self.channels.extent

    @property
    def tiles_are_disjoint(self) -> bool:
        """Whether tiles share no element of the image, because nothing slides.

        Each tile is then contiguous in the patch, channel after channel, and the micro-kernel streams through it.
        """
        return self.taps == 1 and self.channels is not None and not self.channels_last

    def phases(self, slide: ImageWindowDim) -> int:
        """Return the phases of a dimension: coordinates are sorted by remainder, for contiguous vectors.

        Vectors are not contiguous in patches with channels last.
        """
        is_sorted = slide is self.window_dims[-1] and not self.along_filters and not self.channels_last
        return slide.stride if is_sorted else 1

    def staged_extent(self, slide: ImageWindowDim, pixels: int) -> int:
        """Return the elements of the patch along a dimension."""
        phases = self.phases(slide)
        return phases * -(-slide.input_extent(pixels) // phases)

    def patch_elements(self, pixels: tuple[int, ...], channels: int) -> int:
        return channels * math.prod(self.staged_extent(s, n) for s, n in zip(self.window_dims, pixels, strict=True))

    def patch_shape(self, block: Mapping[str, int], thread: Mapping[str, int], depth: int, l2_bytes: int) -> tuple[int, ...]:
        """Return the output positions along each dimension whose input is staged at once.

        Register tiles grow from the innermost axis outwards to equal parts of the block while L2 holds `depth` channels
        of them and a panel's accumulators. Rows that a guard may cut stay whole.
        """
        pixels = [thread[s.pixel.name] for s in self.window_dims]
        for i in range(len(pixels) - 1, -1, -1):
            slide = self.window_dims[i]
            whole, unit = block[slide.pixel.name], pixels[i]
            keep = i == len(pixels) - 1 and slide.tap is not None
            sizes = [whole] if keep else _dividing_multiples(whole, unit)
            for size in sizes:
                tried = (*pixels[:i], size, *pixels[i + 1 :])
                staged, sums = self.patch_elements(tried, depth), math.prod(tried) * thread[self.filters.name]
                shares = staged / L2_PATCH_FRACTION, sums / L2_ACCUMULATOR_FRACTION
                if keep or max(shares) * self.element_bytes <= l2_bytes:
                    pixels[i] = size
                    break
            if pixels[i] < whole:
                break
        return tuple(pixels)


def _dividing_multiples(whole: int, unit: int) -> list[int]:
    """Return the multiples of the unit that divide the whole, largest first."""
    count = whole // unit
    return [whole // parts for parts in range(1, count + 1) if count % parts == 0]


def image_space(space: TileSpace) -> ImageSpace | None:
    """Return the convolution's space taken apart; None for any other space."""
    pixels = [axis.members[0] for axis in space.role(AxisRole.PIXEL)]
    if not pixels:
        return None
    (filters,) = space.role(AxisRole.N)
    channels = next(iter(space.role(AxisRole.K)), None)
    names = {p.name for p in pixels}
    images = [a for a in space.accesses if a.operand and any(n in names for d in a.dims for n, _ in d.coeffs)]
    weights = [a for a in space.accesses if a.operand and a not in images]
    taps = [m for axis in space.role(AxisRole.TAP) for m in axis.members]
    slides = tuple(_window_dim(pixel, taps, images) for pixel in pixels)
    return ImageSpace(
        space=space,
        window_dims=slides,
        filters=filters,
        channels=channels,
        along_filters=space.vector_axis == filters.name,
        channels_last=_is_contiguous_along(images, () if channels is None else channels.members),
        pixel_stride=_step_along(images, slides[-1]),
        weights_contiguous=_is_contiguous_along(weights, filters.members),
        weights_along_k=_are_rows_contiguous(weights, filters, channels, taps),
        filters_last=_is_contiguous_along([a for a in space.accesses if a.is_output], filters.members),
        element_bytes=space.compute_dtype.bytes,
    )


def tiled_dims(image: ImageSpace) -> tuple[ImageWindowDim, ...]:
    """Return the dimensions that Winograd's algorithm transforms: the last two with three taps, or the only one."""
    return tuple(slide for slide in image.window_dims if slide.taps == TAPS and slide.stride == 1)[-2:]


def _window_dim(pixel: Axis, taps: list[Axis], images: list[TileAccess]) -> ImageWindowDim:
    for image in images:
        for dim in image.dims:
            steps = {name: abs(c) for name, c in dim.coeffs}
            tap = next((t for t in taps if t.name in steps), None)
            if pixel.name in steps and tap is not None:
                common = math.gcd(steps[pixel.name], steps[tap.name])
                return ImageWindowDim(pixel, tap, steps[pixel.name] // common, steps[tap.name] // common)
    return ImageWindowDim(pixel, None, 1, 1)


def _step_along(images: list[TileAccess], slide: ImageWindowDim) -> int:
    last = [image.dims[-1] for image in images]
    steps = {0 if not dim.is_affine else abs(dict(dim.coeffs).get(slide.pixel.name, 0)) // slide.stride for dim in last}
    return steps.pop() if len(steps) == 1 else 0


def _are_rows_contiguous(weights: list[TileAccess], filters: TileAxis, channels: TileAxis | None, taps: list[Axis]) -> bool:
    """Return whether the weights of each filter are contiguous. Parts of a concatenation, or fused axes, are not."""
    members = () if channels is None else channels.members
    is_affine = len(weights) == 1 and all(dim.is_affine for dim in weights[0].dims)
    return is_affine and len(filters.members) == 1 and len(members) <= 1 and _is_contiguous_along(weights, tuple(taps) or members)


def _is_contiguous_along(tensors: list[TileAccess], axes: tuple[Axis, ...]) -> bool:
    """Return whether neighbours along the axes are contiguous in each of the tensors."""
    wide = [[d for d in tensor.dims if d.size > 1] for tensor in tensors]
    if not axes or not wide or not all(wide):
        return False
    last = [dict(dims[-1].coeffs) for dims in wide]
    return all(abs(coeffs.get(axes[-1].name, 0)) == 1 and dims[-1].is_affine for coeffs, dims in zip(last, wide, strict=True))
