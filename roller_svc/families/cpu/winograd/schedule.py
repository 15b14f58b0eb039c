"""Winograd convolution and its rProgram -> schedule tree for a CPU.

A task stages the input patch of a block of tiles, some channels at a time, with zero padding, and transforms the tiles
(V). For a group of filter panels it multiplies V by the transformed weights (U), position by position of a tile, with
the micro-kernel of GEMM. It transforms the products (M) and runs the epilogue. Vectors hold channels, then filters. U
depends on constants alone and is computed once.

Taps of a third dimension are summed as channels are: a tile of an input plane serves all output planes whose windows
cover it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from roller_svc.analysis.winograd import first_of_tile
from roller_svc.families.common.cpu.image_results import TRANSPOSED, ImageResults, has_equal_patches, image_tasks
from roller_svc.families.common.cpu.image_space import ImageWindowDim
from roller_svc.families.common.cpu.input_patch import WINDOW, InputPatch, tap_shift
from roller_svc.families.common.cpu.micro_kernel import LANE, CTile, KLoop, MicroKernel
from roller_svc.families.common.view import GemmView
from roller_svc.families.cpu.winograd.transform_nodes import VectorTransform
from roller_svc.families.cpu.winograd.transformed_weights import (
    WEIGHTS,
    TransformedWeights,
    over_groups,
    over_members,
    plane_taps,
)
from roller_svc.families.cpu.winograd.winograd_view import pixels_are_rows
from roller_svc.families.cpu.winograd.workload import WinogradSpace, WinogradTask, plan_task
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr, Load, Select
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, ceil_div, linearize, logical_and, lt, min_, mul, num, ref, sub
from roller_svc.ir.program import Combine, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    Let,
    Loop,
    LoopKind,
    Node,
    Routine,
    ScheduleTree,
    Scope,
    Storage,
    Transpose,
)
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import nest_loops

INPUTS, PRODUCTS, RESULTS, CHANNELS = ".inputs", ".products", ".results", ".channels.last"
POSITION = ".position"


def lower(group: KernelGroup, program: RProgram, workload: Workload[WinogradSpace]) -> tuple[ScheduleTree, ...]:
    """Return one tree: parallel tasks over groups, blocks of tiles and of filters."""
    image, view = workload.facts.image, GemmView.of(group, group.space)
    filters_last = pixels_are_rows(group, image)
    source, weights = (view.operands.a, view.operands.b) if filters_last else (view.operands.b, view.operands.a)
    lanes, tile = program.unit.shape[-1], workload.footprint.tile
    task = plan_task(workload, tile(program.block), tile(program.thread))
    patch = InputPatch(task.padded, _within_image(task, source), view.dtype, task.pixels, task.pixels, task.chunk, lanes)
    results = ImageResults(view, image, task.pixels, RESULTS, (num(0), num(0)), task.wide, lanes, filters_last=filters_last)
    tree = _Task(view, task, patch, TransformedWeights(task, weights), results)
    return (ScheduleTree(group.name, tree.nodes()),)


def _within_image(task: WinogradTask, source: Expr) -> Expr:
    """Return the source, 0 beyond the coordinates that output positions need: tiles there are only partly outputs."""
    inside: Expr | None = None
    for slide, padded in zip(task.space.image.window_dims, task.padded.window_dims, strict=True):
        if slide.pixel.extent < padded.pixel.extent:
            position: Expr = ref(slide.pixel.name)
            position = position if slide.tap is None else add(position, ref(slide.tap.name))
            inside = logical_and(inside, lt(position, num(slide.input_extent(slide.pixel.extent))))
    if inside is None:
        return source
    dtype = task.space.image.space.compute_dtype
    return Select(inside, Cast(source, dtype, implicit=True), identity(Combine.SUM, dtype), dtype)


@dataclass(frozen=True, slots=True)
class _Task:
    view: GemmView
    task: WinogradTask
    patch: InputPatch
    weights: TransformedWeights
    results: ImageResults

    @property
    def dtype(self) -> DType:
        return self.view.dtype

    @property
    def window_dims(self) -> tuple[tuple[ImageWindowDim, int], ...]:
        """Return each window dimension with the output positions of a block along it."""
        return tuple(zip(self.task.space.image.window_dims, self.task.pixels, strict=True))

    # the tree, from the outside in ----------------------------------------------------------------------------------
    def nodes(self) -> tuple[Node, ...]:
        nodes: tuple[Node, ...] = (*self.weights.fill(), self._transform_inputs(), self._over_groups())
        for name, shape in self._buffers():
            nodes = (Storage(name, self.dtype, shape, Scope.STACK, nodes),)
        filters, task = self.task.space.image.filters, self.task
        remaining = sub(num(ceil_div(filters.extent, task.wide)), mul(ref(".filters.task"), num(task.panels)))
        nodes = (Let(".filters.panels", min_(num(task.panels), remaining), nodes),)
        nodes = (Let(".filters.first", mul(ref(".filters.task"), num(task.block_filters)), nodes),)
        for slide, pixels in reversed(self.window_dims):
            name, at = slide.pixel.name, ref(f"{slide.pixel.name}.at")
            remaining = min_(num(pixels), sub(num(slide.pixel.extent), at))
            count = num(min(pixels, slide.pixel.extent)) if has_equal_patches(slide, pixels) else remaining
            nodes = (Let(f"{name}.count", count, nodes),)
            nodes = (Let(f"{name}.at", mul(ref(f"{name}.task"), num(pixels)), nodes),)
        return image_tasks(self.view, task.space.image, task.pixels, task.block_filters, nodes)

    def _buffers(self) -> tuple[tuple[str, tuple[int, ...]], ...]:
        task, lanes = self.task, self.task.lanes
        positions = task.space.positions
        pixels = math.prod(task.pixels)
        buffers = [
            (INPUTS, (positions, task.inputs_pitch)),
            (PRODUCTS, (task.group_panels, positions, task.products_pitch)),
            (RESULTS, (1, 1, pixels + lanes - 1, task.wide)),  # transposed blocks may extend beyond the last position
            (WINDOW, (self.patch.elements,)),
            (WEIGHTS, self.weights.shape),
        ]
        if not self.patch.image.channels_last:
            buffers.append((CHANNELS, (self.patch.channel_pitch + lanes, lanes)))
        if self.results.transposes:
            buffers.append((TRANSPOSED, (lanes, lanes)))
        return tuple(buffers)

    # inputs ---------------------------------------------------------------------------------------------------------
    def _transform_inputs(self) -> Node:
        """Stage and transform the patch, a chunk of channels at a time."""
        depth, chunk = self.task.space.image.depth, self.task.chunk
        nodes: tuple[Node, ...] = (Routine("stage", self.patch.stage()),)
        if not self.patch.image.channels_last:
            nodes += (Routine("transpose", (self._transpose_patch(),)),)
        nodes += (Routine("transform", self._over_tiles(self._input_tile(), self.task.input_counts)),)
        remaining = sub(num(depth), mul(ref(".step"), num(chunk)))
        nodes = (Let(".channels", min_(num(chunk), remaining) if depth % chunk else num(chunk), nodes),)
        return Loop(".step", self.task.steps, LoopKind.SERIAL, nodes)

    def _transpose_patch(self) -> Node:
        """Copy the patch with channels innermost, in blocks of positions; the last may overlap the one before."""
        lanes, pitch = self.task.lanes, self.patch.channel_pitch
        first: Expr = mul(ref(".block"), num(lanes))
        if pitch > lanes and pitch % lanes:
            first = min_(first, num(pitch - lanes))
        source = Load(WINDOW, (ref(".pixel"),), self.dtype)
        node: Node = Transpose(CHANNELS, (ref(".pixel"), num(0)), lanes, source, pitch)
        return Loop(".block", ceil_div(pitch, lanes), LoopKind.SERIAL, (Let(".pixel", first, (node,)),))

    def _input_tile(self) -> tuple[Node, ...]:
        """Transform one input tile for the chunk's channels: V = B^T d, or B^T d B."""
        space = self.task.space
        channel = add(mul(ref(".step"), num(self.task.chunk)), ref(LANE))

        def store(at: tuple[int, ...], value: Expr) -> Compute:
            return Compute(INPUTS, self._input(num(space.position(at)), ref(".tile"), channel), value)

        transform = VectorTransform(self.task.lanes, self.dtype)
        return transform.along(len(space.tiled), space.transforms.inputs, self._patch_element, store)

    def _patch_element(self, inside: tuple[int, ...]) -> Expr:
        """Return the patch's element at a place of the tile, for each channel of the chunk."""
        coordinates = self._coordinates(inside)
        if self.patch.image.channels_last:
            return Load(WINDOW, (self.patch.offset(ref(LANE), coordinates),), self.dtype)
        return Load(CHANNELS, (self.patch.offset(num(0), coordinates), ref(LANE)), self.dtype)

    def _coordinates(self, inside: tuple[int, ...]) -> tuple[Expr, ...]:
        """Return the coordinates in a block of a place of the tile."""
        space, places = self.task.space, iter(inside)
        coordinates: list[Expr] = []
        for slide in space.image.window_dims:
            tile: Expr = ref(f"{slide.pixel.name}.tile")
            if slide in space.tiled:
                tile = add(first_of_tile(tile, space.m, slide.dilation), num(next(places) * slide.dilation))
            coordinates.append(tile)
        return tuple(coordinates)

    def _over_tiles(self, nodes: tuple[Node, ...], counts: tuple[int, ...]) -> tuple[Node, ...]:
        """Loop over tiles, `counts` along each window dimension; `.tile` is a tile's number."""
        names = [f"{slide.pixel.name}.tile" for slide in self.task.space.image.window_dims]
        number = linearize(zip(map(ref, names), counts, strict=True))
        return nest_loops(LoopKind.SERIAL, zip(names, counts, strict=True), (Let(".tile", number, nodes),))

    # products -------------------------------------------------------------------------------------------------------
    def _over_groups(self) -> Node:
        """Multiply and store the panels, a group at a time: a position's inputs serve all panels of the group."""
        position = over_members(self.task, self._multiply())
        products = Loop(POSITION, self.task.space.positions, LoopKind.SERIAL, (position,))
        return over_groups(self.task, (products, over_members(self.task, self._store_panel())))

    def _multiply(self) -> tuple[Node, ...]:
        """Multiply the inputs of one position by one panel of weights, in register tiles of tiles x filters."""
        task = self.task
        rows, first = task.rows, mul(ref(".call"), num(task.rows))
        if task.tiles % rows:
            first = min_(first, num(task.tiles - rows))
        kernel = MicroKernel(
            rows=rows,
            columns=task.wide,
            lanes=task.lanes,
            dtype=self.dtype,
            k_loops=(
                *(KLoop(tap.name, tap.extent) for tap in plane_taps(task.space)),
                KLoop(".channel", task.space.image.depth),
            ),
            a=self._input_of_row,
            b=lambda column: self.weights.element(ref(POSITION), ref(".channel"), column),
            registers=task.registers,
        )
        tile = CTile(PRODUCTS, lambda row, column: self._product(ref(POSITION), add(ref(".first"), row), column))
        nodes = kernel.nodes(tile)
        prefetches = self.weights.prefetches(ref(POSITION), ref(".channel"))
        if prefetches:
            nodes = replace(kernel, prefetches=prefetches).nodes(tile)
            if task.calls > self.weights.lines:  # the first calls have prefetched the panel
                nodes = (Branch(lt(ref(".call"), num(self.weights.lines)), nodes, kernel.nodes(tile)),)
        nodes = (Let(".first", first, nodes),)
        return (Loop(".call", task.calls, LoopKind.SERIAL, nodes),)

    def _input_of_row(self, row: Expr) -> Expr:
        """Return the element of a tile of the register tile, in the plane under the tap."""
        tile = add(ref(".first"), row)
        if (planes := self.task.space.planes) is not None:
            tile = add(tile, mul(tap_shift(planes), num(self.task.tiles_of_plane)))
        return Load(INPUTS, self._input(ref(POSITION), tile, ref(".channel")), self.dtype)

    def _input(self, position: Expr, tile: Expr, channel: Expr) -> tuple[Expr, ...]:
        return position, add(mul(tile, num(self.task.channel_pitch)), channel)

    def _product(self, position: Expr, tile: Expr, filter_: Expr) -> tuple[Expr, ...]:
        return ref(".filters.member"), position, add(mul(tile, num(self.task.wide)), filter_)

    # results --------------------------------------------------------------------------------------------------------
    def _store_panel(self) -> tuple[Node, ...]:
        """Transform the products of one panel, Y = A^T M, or A^T M A, and run the epilogue."""
        place = add(ref(".filters.first"), mul(ref(".filters.panel"), num(self.task.wide)))
        transform = Routine("finish", self._over_tiles(self._output_tile(), self.task.counts))
        return (transform, Let(".filters.place", place, (Routine("store", self.results.nodes()),)))

    def _output_tile(self) -> tuple[Node, ...]:
        space, lanes = self.task.space, self.task.lanes
        filter_ = add(mul(ref(".vector"), num(lanes)), ref(LANE))

        def load(at: tuple[int, ...]) -> Expr:
            return Load(PRODUCTS, self._product(num(space.position(at)), ref(".tile"), filter_), self.dtype)

        def store(at: tuple[int, ...], value: Expr) -> Compute:
            return Compute(RESULTS, (num(0), num(0), self.results.pixel_number(self._coordinates(at)), filter_), value)

        nodes = VectorTransform(lanes, self.dtype).along(len(space.tiled), space.transforms.outputs, load, store)
        return (Loop(".vector", self.task.vectors, LoopKind.SERIAL, nodes),)
