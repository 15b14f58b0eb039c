"""Direct convolution and its rProgram → schedule tree for a CPU: staged input patches and packed weights.

A task owns output positions and output channels (filters). For each step of input channels it packs their weights. Then
it stages the input patch of a block of output positions, with zero padding, and runs the micro-kernel over the patch.
Each staged element serves all taps and filters that use it. Vectors hold filters (output positions are broadcast) or
output positions.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from roller_svc.analysis.fused_axis import member_values
from roller_svc.families.common.cpu.dot import DotOperands, dot_operands
from roller_svc.families.common.cpu.image_results import TRANSPOSED, ImageResults, has_equal_patches, image_tasks
from roller_svc.families.common.cpu.image_space import ImageSpace, ImageWindowDim
from roller_svc.families.common.cpu.input_patch import WINDOW, InputPatch, loop_over_channels, pixel_at, remaining_pixels
from roller_svc.families.common.cpu.memory import LINE_BYTES
from roller_svc.families.common.cpu.micro_kernel import LANE, ROW, VECTOR, CTile, KLoop, MicroKernel
from roller_svc.families.common.cpu.parallel_loops import serial_loops, whole_or_tail
from roller_svc.families.common.view import GemmView, bind_members
from roller_svc.families.cpu.convolution.word_view import word_of
from roller_svc.families.cpu.convolution.workload import plan_task
from roller_svc.ir.affine import affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr, Load, substitute
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.index import add, ceil_div, div, eq, linearize, min_, mod, mul, num, ref, sub
from roller_svc.ir.program import Axis, Combine, TensorType, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    Let,
    Loop,
    LoopKind,
    Node,
    Prefetch,
    Routine,
    ScheduleTree,
    Scope,
    Storage,
    Transpose,
)
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import nest_loops, wrap_in_storages

PACKED = ".weights"


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """Weights packed to `panels` of `wide` filters, for `channels` input channels a step.

    Rows are in the order of the micro-kernel's loops.
    """

    image: ImageSpace
    source: Expr
    type: TensorType | None  # of the source in memory, if it is one load
    dtype: DType
    panels: int
    wide: int
    channels: int
    lanes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.panels, self.channels * self.image.taps, self.wide

    @property
    def row(self) -> Expr:
        """Return the row of channel `.channel` under the taps."""
        channel: Expr = num(0) if self.image.channels is None else ref(".channel")
        tap = linearize((ref(axis.name), axis.extent) for axis in self._taps)
        if self.image.channels_last:
            return add(mul(tap, num(self.channels)), channel)
        return add(mul(channel, num(self.image.taps)), tap)

    def pack(self) -> tuple[Node, ...]:
        """Pack packed[panel][row][filter] = weight, and 0 beyond the last filter."""
        filters, wide = self.image.filters, self.wide
        position = add(ref(".filters.first"), mul(ref(".filters.panel"), num(wide)))
        nodes = whole_or_tail(position, wide, filters.extent, lambda count: self._pack_panel(position, count))
        return (Loop(".filters.panel", self.panels, LoopKind.SERIAL, nodes, ref(".filters.panels")),)

    def _pack_panel(self, position: Expr, count: int) -> tuple[Node, ...]:
        """Pack a panel of `count` filters; rows of a full one that are contiguous for each are transposed in blocks."""
        load = self._contiguous_source() if count == self.wide else None
        return self._pack_rows(position, count) if load is None else self._pack_transposed(load, position)

    def _pack_transposed(self, load: Load, position: Expr) -> tuple[Node, ...]:
        """Transpose blocks of rows; the last one may overlap the one before.

        All blocks of a vector's filters come before the next filters. Otherwise filters a multiple of 1 KiB apart would
        evict lines shared by two blocks from L1.
        """
        lanes, taps = self.lanes, self.image.taps
        filters, channels = self.image.filters, self.image.channels
        rows: Expr = num(self.channels * taps)
        limit: Expr | None = None
        if channels is not None and channels.extent % self.channels:
            remaining = mul(ref(".channels"), num(taps))
            rows, limit = remaining, div(add(remaining, num(lanes - 1)), lanes)
        first = min_(mul(ref(".block"), num(lanes)), sub(rows, num(lanes)))
        at: dict[str, Expr] = {axis.name: num(0) for axis in self._taps}
        at[filters.members[0].name] = add(position, mul(ref(".vector"), num(lanes)))
        if self._taps:
            at[self._taps[-1].name] = ref(".row")
        if channels is not None:
            start = mul(ref(".step"), num(self.channels))
            at[channels.members[0].name] = start if self._taps else add(start, ref(".row"))
        source = replace(load, index=tuple(substitute(i, at) for i in load.index))
        target = (ref(".filters.panel"), ref(".row"), mul(ref(".vector"), num(lanes)))
        stride = (self._strides(load) or {}).get(filters.members[0].name, 0)
        nodes: tuple[Node, ...] = (Transpose(PACKED, target, self.wide, source, stride),)
        blocks = ceil_div(self.channels * taps, lanes)
        nodes = (Loop(".block", blocks, LoopKind.SERIAL, (Let(".row", first, nodes),), limit),)
        return (Loop(".vector", self.wide // lanes, LoopKind.SERIAL, nodes),)

    def _contiguous_source(self) -> Load | None:
        """Return the weights if a panel's rows are contiguous for each filter and fill at least one block."""
        image, load = self.image, self.source
        channels = image.channels
        if not image.along_filters or not isinstance(load, Load) or load.dtype is not self.dtype or any(load.bounds_checked):
            return None
        if len(image.filters.members) > 1 or (channels is not None and len(channels.members) > 1):
            return None
        if not self.dtype.is_float or self.dtype.bits < 32 or (self.type is None or self.type.dtype is not self.dtype):
            return None
        if image.channels_last and channels is not None and self._taps:
            return None
        shortest = image.depth % self.channels or self.channels
        if shortest * image.taps < self.lanes:
            return None
        strides = self._strides(load)
        step = 1
        for axis in reversed((*(() if channels is None else channels.members), *self._taps)):
            if strides is None or strides.get(axis.name) != step:
                return None
            step *= axis.extent
        return load

    def _strides(self, load: Load) -> dict[str, int] | None:
        """Return the memory stride of each axis in elements, or None if an index is not affine."""
        if self.type is None:
            return None
        strides: dict[str, int] = {}
        for d, index in enumerate(load.index):
            form = affine(index)
            if form is None:
                return None
            for name, c in form.coeffs:
                strides[name] = strides.get(name, 0) + c * math.prod(self.type.shape[d + 1 :])
        return strides

    def _pack_rows(self, position: Expr, count: int) -> tuple[Node, ...]:
        at = member_values(self.image.filters, add(position, ref(LANE)))
        value = substitute(Cast(self.source, self.dtype, implicit=True), at)
        target = (ref(".filters.panel"), self.row)
        nodes: tuple[Node, ...] = (Loop(LANE, count, LoopKind.VECTOR, (Compute(PACKED, (*target, ref(LANE)), value),)),)
        if count < self.wide:
            beyond = Compute(PACKED, (*target, add(num(count), ref(LANE))), identity(Combine.SUM, self.dtype))
            nodes += (Loop(LANE, self.wide - count, LoopKind.VECTOR, (beyond,)),)
        return loop_over_channels(self.image, self.channels, serial_loops(self._taps, nodes))

    @property
    def _taps(self) -> tuple[Axis, ...]:
        return tuple(s.tap for s in self.image.window_dims if s.tap is not None)


ACC = ".sums"


def lower(group: KernelGroup, program: RProgram, workload: Workload[ImageSpace]) -> tuple[ScheduleTree, ...]:
    """Return one tree: parallel tasks over groups, output positions and filters."""
    image, hw, view = workload.facts, workload.machine.hw, GemmView.of(group, group.space)
    pixels_are_m = image.window_dims[0].pixel in view.m.members
    image_operand, weights = (view.operands.a, view.operands.b) if pixels_are_m else (view.operands.b, view.operands.a)
    dot = dot_operands(program.unit, group)
    if dot is not None:
        dot = dot if pixels_are_m else replace(dot, a=dot.b, b=dot.a)  # of pixels and of weights
        (counted,) = () if image.channels is None else image.channels.members
        channel = next(axis for axis in view.k.members if axis.name == counted.name)
        image_operand, weights = (
            word_of(source, channel, dtype, dot.group) for source, dtype in ((image_operand, dot.a), (weights, dot.b))
        )
    named = workload.footprint.tile
    plan, lanes = plan_task(workload, named(program.block), named(program.thread)), program.unit.shape[-1]
    patch = InputPatch(image, image_operand, view.dtype, plan.pixels, plan.tile, plan.channels, lanes)
    type_ = dict(group.inputs).get(weights.tensor) if isinstance(weights, Load) else None
    packed = PackedWeights(image, weights, type_, view.dtype, plan.panels, plan.wide, plan.channels, lanes)
    tasks = _Tasks(view, program, image, patch, packed, filters_last=pixels_are_m, hw=hw, dot=dot)
    return (ScheduleTree(group.name, tasks.nodes()),)


@dataclass(frozen=True, slots=True)
class _Tasks:
    view: GemmView
    program: RProgram
    image: ImageSpace
    patch: InputPatch
    weights: PackedWeights
    filters_last: bool  # whether filters are contiguous in the output
    hw: HardwareSpec
    dot: DotOperands | None  # elements are words of pixels and of weights, multiplied by dot-product instructions

    # sizes ----------------------------------------------------------------------------------------------------------
    @property
    def window_dims(self) -> tuple[tuple[ImageWindowDim, int], ...]:
        """Return each window dimension with the output positions of a patch along it."""
        return tuple(zip(self.image.window_dims, self.patch.pixels, strict=True))

    @property
    def steps(self) -> int:
        return ceil_div(self.image.depth, self.patch.channels)

    @property
    def lanes(self) -> int:
        return self.patch.lanes

    @property
    def is_large(self) -> bool:
        """Return whether the group accesses more than L2 holds."""
        return self.view.group.space.compulsory_bytes > self.hw.block_level.capacity_bytes

    def _task(self, slide: ImageWindowDim) -> int:
        return self.program.block[slide.pixel.name]

    def _tile(self, slide: ImageWindowDim) -> int:
        return self.program.thread[slide.pixel.name]

    @property
    def _patch_pixels(self) -> int:
        return math.prod(self.patch.pixels)

    # the tree, from the outside in ----------------------------------------------------------------------------------
    def nodes(self) -> tuple[Node, ...]:
        depth, kc = self.image.depth, self.patch.channels
        remaining = sub(num(depth), mul(ref(".step"), num(kc)))
        nodes: tuple[Node, ...] = (*self.weights.pack(), *self._over_patches())
        nodes = (Let(".channels", min_(num(kc), remaining) if depth % kc else num(kc), nodes),)
        nodes = (Loop(".step", self.steps, LoopKind.SERIAL, nodes),)
        nodes = wrap_in_storages(reversed(self._allocate()), nodes)
        filters, panels = self.image.filters, self.weights.panels
        block = panels * self.weights.wide
        remaining = sub(num(ceil_div(filters.extent, self.weights.wide)), mul(ref(".filters.task"), num(panels)))
        nodes = (Let(".filters.panels", min_(num(panels), remaining), nodes),)
        nodes = (Let(".filters.first", mul(ref(".filters.task"), num(block)), nodes),)
        for slide, _ in reversed(self.window_dims):
            name = slide.pixel.name
            nodes = (Let(f"{name}.first", mul(ref(f"{name}.task"), num(self._task(slide))), nodes),)
        pixels = tuple(map(self._task, self.image.window_dims))
        return image_tasks(self.view, self.image, pixels, block, nodes)

    def _allocate(self) -> tuple[Storage, ...]:
        dtype, wide = self.view.dtype, self.weights.wide
        accumulators = (math.prod(self._patches_per_task), self.weights.panels) if self.steps > 1 else (1, 1)
        if self.image.along_filters:  # transposed blocks may extend beyond the last output position
            acc_shape: tuple[int, ...] = (*accumulators, self._patch_pixels + self.lanes - 1, wide)
        else:
            acc_shape = (*accumulators, wide, self._patch_pixels)
        buffers = [(ACC, acc_shape), (WINDOW, (self.patch.elements,)), (PACKED, self.weights.shape)]
        if self.results.transposes:
            buffers.append((TRANSPOSED, (self.lanes, self.lanes)))
        return tuple(Storage(name, dtype, shape, Scope.STACK, ()) for name, shape in buffers)

    @property
    def results(self) -> ImageResults:
        return ImageResults(
            self.view,
            self.image,
            self.patch.pixels,
            ACC,
            self._panel_index(),
            self.weights.wide,
            self.lanes,
            self.filters_last,
        )

    @property
    def _patches_per_task(self) -> tuple[int, ...]:
        """Return the number of patches of a task along each window dimension."""
        return tuple(self._task(slide) // pixels for slide, pixels in self.window_dims)

    def _over_patches(self) -> tuple[Node, ...]:
        nodes: tuple[Node, ...] = (Routine("stage", self.patch.stage()), self._over_panels())
        for (slide, pixels), patches in reversed([*zip(self.window_dims, self._patches_per_task, strict=True)]):
            name, first = slide.pixel.name, ref(f"{slide.pixel.name}.first")
            at = add(first, mul(ref(f"{name}.window"), num(pixels)))
            remaining = min_(num(pixels), sub(num(slide.pixel.extent), at))
            count = num(min(pixels, slide.pixel.extent)) if has_equal_patches(slide, pixels) else remaining
            limit: Expr | None = None
            if patches > 1 and slide.pixel.extent % self._task(slide):
                limit = div(add(sub(num(slide.pixel.extent), first), num(pixels - 1)), pixels)
            nodes = (Let(f"{name}.at", at, (Let(f"{name}.count", count, nodes),)),)
            nodes = (Loop(f"{name}.window", patches, LoopKind.SERIAL, nodes, limit),)
        return nodes

    def _over_panels(self) -> Node:
        """Multiply one patch by all panels of filters and run the epilogue of each after its last step."""
        nodes: tuple[Node, ...] = (*self._prefetch_results(), *self._micro_kernel())
        for slide, pixels in reversed(self.window_dims):
            name, tile = slide.pixel.name, self._tile(slide)
            limit: Expr | None = None
            if not has_equal_patches(slide, pixels):
                limit = div(add(remaining_pixels(slide), num(tile - 1)), tile)
            nodes = (Let(f"{name}.place", mul(ref(f"{name}.tile"), num(tile)), nodes),)
            nodes = (Loop(f"{name}.tile", self._tiles(slide, pixels), LoopKind.SERIAL, nodes, limit),)
        finish: tuple[Node, ...] = (Routine("store", self.results.nodes()),)
        nodes += (Branch(eq(ref(".step"), num(self.steps - 1)), finish),) if self.steps > 1 else finish
        position = add(ref(".filters.first"), mul(ref(".filters.panel"), num(self.weights.wide)))
        nodes = (Let(".filters.place", position, nodes),)
        return Loop(".filters.panel", self.weights.panels, LoopKind.SERIAL, nodes, ref(".filters.panels"))

    def _tiles(self, slide: ImageWindowDim, pixels: int) -> int:
        return ceil_div(min(pixels, slide.pixel.extent), self._tile(slide))

    def _prefetch_results(self) -> tuple[Node, ...]:
        """Prefetch for write the lines that a tile's results fill."""
        if not self.is_large or self.steps > 1 or self.filters_last:
            return ()
        last, size = self.window_dims[-1][0].pixel, self._tile(self.window_dims[-1][0])
        nodes: list[Node] = []
        for statement in self.view.group.statements:
            if statement.output in self.view.group.register_tensors:
                continue
            for first in range(0, size, LINE_BYTES // statement.type.dtype.bytes):
                at: dict[str, Expr] = {}
                for slide, pixels in self.window_dims:
                    name = slide.pixel.name
                    inside = num(first) if slide.pixel is last else ref(f"{name}.row")
                    at[name] = add(pixel_at(slide, pixels), add(ref(f"{name}.place"), inside))
                index = tuple(substitute(i, at) for i in statement.index)
                nodes.append(Prefetch(statement.output, index, 0, for_write=True))
        prefetches = bind_members(self.image.filters, add(ref(".filters.place"), ref(".filter")), tuple(nodes))
        prefetches = (Loop(".filter", self.weights.wide, LoopKind.SERIAL, prefetches),)
        rows = [(f"{slide.pixel.name}.row", self._tile(slide)) for slide in self.image.window_dims[:-1]]
        return nest_loops(LoopKind.SERIAL, rows, prefetches)

    # the micro-kernel -----------------------------------------------------------------------------------------------
    def _micro_kernel(self) -> tuple[Node, ...]:
        thread = [self._tile(slide) for slide, _ in self.window_dims]
        wide, taps = self.weights.wide, [s.tap for s, _ in self.window_dims if s.tap is not None]
        channels: tuple[KLoop, ...] = ()
        if self.image.channels is not None:
            limit = ref(".channels") if self.image.depth % self.patch.channels else None
            channels = (KLoop(".channel", self.patch.channels, limit),)
        over_taps = tuple(KLoop(tap.name, tap.extent) for tap in taps)
        pixels = math.prod(thread)
        along = self.image.along_filters
        kernel = MicroKernel(
            rows=pixels if along else wide,
            columns=wide if along else pixels,
            lanes=self.lanes,
            dtype=self.view.dtype,
            k_loops=(*over_taps, *channels) if self.image.channels_last else (*channels, *over_taps),
            a=self._pixel if along else self._weight,
            b=self._weight if along else self._pixel,
            registers=self.hw.limits.max_registers_per_thread,
            prefetches=self._prefetch_next_panel(),
            dot=self.dot if self.dot is None or along else replace(self.dot, a=self.dot.b, b=self.dot.a),
        )
        tile = CTile(ACC, self._accumulator_index)
        return kernel.nodes(tile, eq(ref(".step"), num(0)) if self.steps > 1 else None)

    def _prefetch_next_panel(self) -> tuple[Node, ...]:
        """Prefetch a part of the next panel of weights with each register tile of a patch.

        Packed weights of a model come from L3: hardware prefetchers alone do not keep up with short panels. Of more
        tiles than a row has elements each would prefetch too far, and they take long enough.
        """
        calls = math.prod(self._tiles(slide, pixels) for slide, pixels in self.window_dims)
        if self.weights.panels == 1 or calls > self.weights.wide:
            return ()
        call = linearize((ref(f"{slide.pixel.name}.tile"), self._tiles(slide, pixels)) for slide, pixels in self.window_dims)
        rows, elems_per_step = self.weights.shape[1], ceil_div(self.weights.wide, calls)
        element = mul(add(mul(call, num(rows)), self.weights.row), num(elems_per_step))
        return (Prefetch(PACKED, (add(ref(".filters.panel"), num(1)), num(0), element), 0),)

    def _weight(self, filter_: Expr) -> Expr:
        return Load(PACKED, (ref(".filters.panel"), self.weights.row, filter_), self.view.dtype)

    def _pixel(self, _: Expr) -> Expr:
        """Return the patch element that an output position of the register tile reads under the tap."""
        if self.image.tiles_are_disjoint:
            tiles = tuple(ref(f"{slide.pixel.name}.tile") for slide, _ in self.window_dims)
            inside = ref(ROW) if self.image.along_filters else add(mul(ref(VECTOR), num(self.lanes)), ref(LANE))
            return Load(WINDOW, (self.patch.offset_in_tile(ref(".channel"), tiles, inside),), self.view.dtype)
        coordinates = []
        for slide, pixel in zip(self.image.window_dims, self._pixel_in_patch(), strict=True):
            if slide is self.image.window_dims[-1]:
                coordinates.append(self.patch.phase_offset(pixel))
            else:
                coordinates.append(self.patch.coordinate(slide, pixel))
        channel = num(0) if self.image.channels is None else ref(".channel")
        return Load(WINDOW, (self.patch.offset(channel, tuple(coordinates)),), self.view.dtype)

    def _pixel_in_patch(self) -> tuple[Expr, ...]:
        """Return the position within the patch of row `ROW`, or of a lane of vector `VECTOR`."""
        number: Expr = ref(ROW)
        coordinates: list[Expr] = []
        for slide, _ in reversed(self.window_dims):
            tile: int = self._tile(slide)
            position = ref(f"{slide.pixel.name}.place")
            inside: Expr = mod(number, tile)
            if not self.image.along_filters and slide is self.image.window_dims[-1]:
                number, tile = ref(VECTOR), tile // self.lanes
                inside = add(mul(mod(number, tile), num(self.lanes)), ref(LANE))
            coordinates.append(add(position, inside))
            number = div(number, tile)
        return tuple(reversed(coordinates))

    # accumulators ---------------------------------------------------------------------------------------------------
    def _accumulator_index(self, row: Expr, column: Expr) -> tuple[Expr, ...]:
        number = self.results.pixel_number(self._pixel_in_patch())
        return (*self._panel_index(), number, column) if self.image.along_filters else (*self._panel_index(), row, number)

    def _panel_index(self) -> tuple[Expr, Expr]:
        if self.steps == 1:
            return num(0), num(0)
        windows = (ref(f"{slide.pixel.name}.window") for slide in self.image.window_dims)
        return linearize(zip(windows, self._patches_per_task, strict=True)), ref(".filters.panel")
