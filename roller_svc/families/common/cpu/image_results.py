"""Results of a convolution's patch: a scratch buffer of output positions and filters, stored through the epilogue."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.analysis.fused_axis import member_values
from roller_svc.families.common.cpu.image_space import ImageSpace, ImageWindowDim
from roller_svc.families.common.cpu.input_patch import dispatch_length, pixel_at, remaining_pixels
from roller_svc.families.common.cpu.micro_kernel import LANE
from roller_svc.families.common.cpu.parallel_loops import whole_or_tail
from roller_svc.families.common.view import GemmView, bind_members
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.index import add, ceil_div, linearize, mul, num, ref, sub
from roller_svc.ir.schedule import Let, Loop, LoopKind, Node, Transpose
from roller_svc.schedule.nest_statements import nest_loops

TRANSPOSED = ".transposed"


@dataclass(frozen=True, slots=True)
class ImageResults:
    """Stores `wide` filters of a patch from `tensor`[panel..., position, filter], or [panel..., filter, position].

    The filters' first is `.filters.place`. Filters are last where vectors are along filters.
    """

    view: GemmView
    image: ImageSpace
    pixels: tuple[int, ...]  # output positions of a patch along each window dimension
    tensor: str
    panel: tuple[Expr, ...]
    wide: int
    lanes: int
    filters_last: bool  # whether filters are contiguous in the output

    @property
    def window_dims(self) -> tuple[tuple[ImageWindowDim, int], ...]:
        """Return each window dimension with the output positions of a patch along it."""
        return tuple(zip(self.image.window_dims, self.pixels, strict=True))

    @property
    def transposes(self) -> bool:
        """Return whether blocks go through a buffer `TRANSPOSED` of lanes x lanes elements."""
        return self.image.along_filters and not self.filters_last

    def pixel_number(self, at: tuple[Expr, ...]) -> Expr:
        """Return the number of a position of the patch."""
        return linearize(zip(at, self.pixels, strict=True))

    def nodes(self) -> tuple[Node, ...]:
        """Store the accumulators of a panel through the epilogue."""
        if self.filters_last:
            return self._over_pixels(self._store_filters(), self.window_dims)
        if not self.image.along_filters:
            nodes = self._over_pixels(self._store_pixels(), self.window_dims[:-1])
            row = ref(".filter")
            nodes = bind_members(self.image.filters, add(ref(".filters.place"), row), nodes)
            return (Loop(".filter", self.wide, LoopKind.SERIAL, nodes, self._remaining_filters(num(0))),)
        slide, pixels = self.window_dims[-1]
        return self._over_pixels(dispatch_length(slide, pixels, self._store_transposed), self.window_dims[:-1])

    def _remaining_filters(self, beyond: Expr) -> Expr | None:
        extent = self.image.filters.extent
        if extent % self.wide == 0:
            return None
        return sub(num(extent), add(ref(".filters.place"), beyond))

    def _over_pixels(self, nodes: tuple[Node, ...], window_dims: tuple[tuple[ImageWindowDim, int], ...]) -> tuple[Node, ...]:
        for slide, pixels in reversed(window_dims):
            name = slide.pixel.name
            limit = None if has_equal_patches(slide, pixels) else remaining_pixels(slide)
            nodes = (Let(name, add(pixel_at(slide, pixels), ref(f"{name}.done")), nodes),)
            nodes = (Loop(f"{name}.done", min(pixels, slide.pixel.extent), LoopKind.SERIAL, nodes, limit),)
        return nodes

    def _stored_pixel(self, last: Expr) -> Expr:
        """Return the number of the output position that is stored."""
        names = [f"{slide.pixel.name}.done" for slide, _ in self.window_dims[:-1]]
        return self.pixel_number((*(ref(n) for n in names), last))

    def _store(self, tensor: str, index: tuple[Expr, ...], lanes: int, at: dict[str, Expr]) -> tuple[Node, ...]:
        return self.view.vector_epilogue(Load(tensor, index, self.view.dtype), Loop(LANE, lanes, LoopKind.VECTOR, ()), at)

    def _store_filters(self) -> tuple[Node, ...]:
        """Store adjacent filters of one output position."""
        filters = self.image.filters
        number = self._stored_pixel(ref(f"{self.image.window_dims[-1].pixel.name}.done"))

        def stores(count: int) -> tuple[Node, ...]:
            at = member_values(filters, add(ref(".filters.place"), ref(LANE)))
            return self._store(self.tensor, (*self.panel, number, ref(LANE)), count, at)

        return whole_or_tail(ref(".filters.place"), self.wide, filters.extent, stores)

    def _store_pixels(self) -> tuple[Node, ...]:
        """Store a row of adjacent output positions of one filter."""
        slide, pixels = self.window_dims[-1]

        def stores(count: int) -> tuple[Node, ...]:
            def vector(first: int, lanes: int) -> tuple[Node, ...]:
                position = add(num(first), ref(LANE))
                at = {slide.pixel.name: add(pixel_at(slide, pixels), position)}
                return self._store(self.tensor, (*self.panel, ref(".filter"), self._stored_pixel(position)), lanes, at)

            vectorised = count - count % self.lanes
            return (
                *(vector(0, vectorised) if vectorised else ()),
                *(vector(vectorised, count - vectorised) if count > vectorised else ()),
            )

        return dispatch_length(slide, pixels, stores)

    def _store_transposed(self, count: int) -> tuple[Node, ...]:
        """Store a row of adjacent output positions from accumulators transposed in blocks."""
        slide, pixels = self.window_dims[-1]
        lanes, wide = self.lanes, self.wide

        def block(first: Expr, max_pixels: int) -> tuple[Node, ...]:
            beyond = mul(ref(".vector"), num(lanes))
            source = Load(self.tensor, (*self.panel, self._stored_pixel(first), beyond), self.view.dtype)
            at: dict[str, Expr] = {slide.pixel.name: add(add(pixel_at(slide, pixels), first), ref(LANE))}
            stores = self._store(TRANSPOSED, (ref(".filter"), ref(LANE)), max_pixels, at)
            position = add(add(ref(".filters.place"), beyond), ref(".filter"))
            stores = bind_members(self.image.filters, position, stores)
            transpose = Transpose(TRANSPOSED, (num(0), num(0)), lanes, source, wide)
            filters_loop = Loop(".filter", lanes, LoopKind.SERIAL, stores, self._remaining_filters(beyond))
            return (Loop(".vector", wide // lanes, LoopKind.SERIAL, (transpose, filters_loop)),)

        full, tail = divmod(count, lanes)
        nodes: tuple[Node, ...] = ()
        if full:
            nodes = (Loop(".part", full, LoopKind.SERIAL, block(mul(ref(".part"), num(lanes)), lanes)),)
        return (*nodes, *block(num(full * lanes), tail)) if tail else nodes


def image_tasks(
    view: GemmView, image: ImageSpace, pixels: tuple[int, ...], filters: int, nodes: tuple[Node, ...]
) -> tuple[Node, ...]:
    """Return parallel loops over tasks, each of `pixels` output positions along the window dimensions and of filters."""
    tasks = [(batch.name, batch.extent) for batch in view.batch]
    for slide, size in zip(image.window_dims, pixels, strict=True):
        tasks.append((f"{slide.pixel.name}.task", ceil_div(slide.pixel.extent, size)))
    return nest_loops(LoopKind.PARALLEL, [*tasks, (".filters.task", ceil_div(image.filters.extent, filters))], nodes)


def has_equal_patches(dim: ImageWindowDim, pixels: int) -> bool:
    """Return whether all patches along the dimension have equal sizes."""
    return pixels >= dim.pixel.extent or dim.pixel.extent % pixels == 0
