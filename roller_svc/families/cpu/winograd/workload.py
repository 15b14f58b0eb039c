"""Facts that rules, cost and schedule of a Winograd convolution share: sizes of a task, of its buffers and panels."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from roller_svc.analysis.winograd import Transforms, transforms
from roller_svc.families.common.cpu.image_space import ImageSpace, ImageWindowDim, image_space, tiled_dims
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

# Fraction of L2 that the products of a group of panels may fill, next to the transformed inputs.
L2_PRODUCTS_FRACTION = 0.5
LINE_ELEMENTS = 16  # float32 elements of a cache line


@dataclass(frozen=True)
class WinogradSpace:
    """A convolution's tile space with the transforms of its output tiles."""

    image: ImageSpace
    transforms: Transforms

    @cached_property
    def m(self) -> int:
        return self.transforms.m

    @cached_property
    def tiled(self) -> tuple[ImageWindowDim, ...]:
        """Return the dimensions that are transformed, outermost first."""
        return tiled_dims(self.image)

    @cached_property
    def positions(self) -> int:
        """Return the products of one tile, filter and channel."""
        return int(self.transforms.size ** len(self.tiled))

    def position(self, at: Sequence[int]) -> int:
        """Return the number of a position of a tile, given its place along each dimension that is transformed."""
        number = 0
        for place in at:
            number = number * self.transforms.size + place
        return number

    @cached_property
    def places(self) -> tuple[int, ...]:
        """Return the axes of the window dimensions' outputs, and then that of filters."""
        names = [axis.name for axis in self.image.space.axes]
        wanted = [slide.pixel.name for slide in self.image.window_dims]
        return tuple(names.index(name) for name in (*wanted, self.image.filters.name))

    @cached_property
    def depth(self) -> int:
        """Return the products that are summed for one position, tile and filter."""
        return summed_products(self.image)

    @cached_property
    def plane_dims(self) -> tuple[ImageWindowDim, ...]:
        """Return the other dimensions, outermost first: images, and the planes of an image."""
        return tuple(slide for slide in self.image.window_dims if slide not in self.tiled)

    @cached_property
    def planes(self) -> ImageWindowDim | None:
        """Return the dimension with taps that is not transformed: its taps are summed as channels are."""
        return next((slide for slide in self.plane_dims if slide.tap is not None), None)

    def unit(self, slide: ImageWindowDim) -> int:
        """Return the output positions of the fewest tiles along a dimension that leave no position out."""
        return self.m * slide.dilation if slide in self.tiled else 1

    def tiles_of_unit(self, slide: ImageWindowDim) -> int:
        """Return the tiles of these positions: as many as the outputs of a tile are apart."""
        return slide.dilation if slide in self.tiled else 1

    def count(self, slide: ImageWindowDim) -> int:
        """Return the units along a dimension."""
        return -(-slide.pixel.extent // self.unit(slide))

    @cached_property
    def tiles(self) -> int:
        """Return the tiles of all outputs."""
        return math.prod(self.count(slide) * self.tiles_of_unit(slide) for slide in self.image.window_dims)

    @cached_property
    def batch(self) -> int:
        """Return the convolutions that share no channel and no filter: groups."""
        return math.prod(axis.extent for axis in self.image.space.role(AxisRole.BATCH))

    @cached_property
    def transformed_bytes(self) -> int:
        """Return the bytes of the transformed weights."""
        image = self.image
        return self.batch * self.positions * self.depth * image.filters.extent * image.element_bytes


@dataclass(frozen=True)
class WinogradTask:
    """Sizes of one task: a block of tiles and of filters."""

    space: WinogradSpace
    pixels: tuple[int, ...]  # output positions of the block along each window dimension
    block_filters: int
    wide: int  # filters of a panel
    lanes: int
    registers: int
    l2_bytes: int

    @cached_property
    def counts(self) -> tuple[int, ...]:
        """Return the tiles of the block along each window dimension."""
        space, dims = self.space, zip(self.space.image.window_dims, self.pixels, strict=True)
        return tuple([n // space.unit(slide) * space.tiles_of_unit(slide) for slide, n in dims])

    @cached_property
    def tiles(self) -> int:
        return math.prod(self.counts)

    @cached_property
    def input_counts(self) -> tuple[int, ...]:
        """Return the input tiles along each window dimension: more than output tiles where planes have taps."""
        planes = self.space.plane_dims
        dims = zip(self.space.image.window_dims, self.counts, strict=True)
        return tuple(slide.input_extent(n) if slide in planes else n for slide, n in dims)

    @cached_property
    def input_tiles(self) -> int:
        return math.prod(self.input_counts)

    @property
    def tiles_of_plane(self) -> int:
        """Return the tiles between adjacent coordinates of the planes with taps."""
        planes = self.space.planes
        if planes is None:
            return 0
        return math.prod(self.counts[self.space.image.window_dims.index(planes) + 1 :])

    @cached_property
    def padded(self) -> ImageSpace:
        """Return the image with whole blocks of output positions along each dimension."""
        image = self.space.image
        dims = tuple(
            replace(slide, pixel=replace(slide.pixel, extent=-(-slide.pixel.extent // n) * n))
            for slide, n in zip(image.window_dims, self.pixels, strict=True)
        )
        return replace(image, window_dims=dims)

    # products -------------------------------------------------------------------------------------------------------
    @cached_property
    def vectors(self) -> int:
        return self.wide // self.lanes

    @cached_property
    def panels(self) -> int:
        return self.block_filters // self.wide

    @cached_property
    def calls(self) -> int:
        """Return the micro-kernel's calls that cover the tiles."""
        return -(-self.tiles // self._max_rows)

    @property
    def rows(self) -> int:
        """Return the tiles of a register tile: calls of equal size, the last of which may overlap the one before."""
        return -(-self.tiles // self.calls)

    @property
    def _max_rows(self) -> int:
        return max(1, (self.registers - self.vectors - 1) // self.vectors)

    @cached_property
    def group_panels(self) -> int:
        """Return the panels whose products are kept until the outputs are transformed: a divisor of the panels."""
        limit = int(L2_PRODUCTS_FRACTION * self.l2_bytes) // self.products_bytes(1)
        return max(n for n in range(1, self.panels + 1) if self.panels % n == 0 and n <= max(1, limit))

    @property
    def groups(self) -> int:
        """Return the groups of panels of the block."""
        return self.panels // self.group_panels

    @cached_property
    def products_pitch(self) -> int:
        """Return the elements between positions of the products."""
        return _odd_lines(self.tiles * self.wide)

    def products_bytes(self, panels: int) -> int:
        """Return the bytes of the products of some panels."""
        return self.space.positions * panels * self.products_pitch * self.space.image.element_bytes

    # transformed inputs ---------------------------------------------------------------------------------------------
    @property
    def chunk(self) -> int:
        """Return the channels that are staged and transformed together: a vector of them."""
        return self.lanes

    @cached_property
    def steps(self) -> int:
        return -(-self.space.image.depth // self.chunk)

    @cached_property
    def channel_pitch(self) -> int:
        """Return the elements between tiles of the transformed inputs."""
        return _odd_lines(self.steps * self.chunk)

    @property
    def inputs_pitch(self) -> int:
        """Return the elements between positions of the transformed inputs."""
        return _odd_lines(self.input_tiles * self.channel_pitch)

    @cached_property
    def inputs_bytes(self) -> int:
        """Return the bytes of the transformed inputs."""
        return self.space.positions * self.inputs_pitch * self.space.image.element_bytes


def plan_task(p: Workload[WinogradSpace], block: Tile, thread: Tile) -> WinogradTask:
    """Return the task of a block's and a register tile's extents."""
    hw, (*pixels, filters) = p.machine.hw, p.facts.places
    return WinogradTask(
        p.facts,
        tuple([block[i] for i in pixels]),
        block[filters],
        thread[filters],
        p.machine.unit.shape[-1],
        hw.limits.max_registers_per_thread,
        hw.block_level.capacity_bytes,
    )


def summed_products(image: ImageSpace) -> int:
    """Return the channels, times the taps of the dimensions that are not transformed."""
    tiled = tiled_dims(image)
    return image.depth * math.prod(slide.taps for slide in image.window_dims if slide not in tiled)


def _odd_lines(elements: int) -> int:
    """Return the elements of an odd number of lines, so that rows at this distance differ in their cache sets."""
    lines = -(-elements // LINE_ELEMENTS)
    return (lines + 1 - lines % 2) * LINE_ELEMENTS


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[WinogradSpace] | None:
    """Prepare a contraction whose space is that of a Winograd convolution on a CPU; None for any other."""
    if base.machine.is_gpu or not base.space.winograd_tile:
        return None
    image = image_space(base.space)
    if image is None or image.channels is None:
        return None
    space = WinogradSpace(image, transforms(base.space.winograd_tile))
    products = space.batch * space.positions * space.tiles * space.depth * image.filters.extent
    weights = sum(o.total_bytes for o in (base.a, base.b) if o.is_constant)
    moved = base.compulsory_bytes - weights + space.transformed_bytes
    return replace(base, operations=2 * products, compulsory_bytes=moved).with_facts(space)
