"""Cost of a direct convolution on a CPU: input patches, packed weights, micro-kernel and outputs, all summed."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from roller_svc.families.common.cpu.image_space import ImageSpace
from roller_svc.families.common.cpu.memory import (
    L1_PANEL_FRACTION,
    private_bandwidth,
    seconds_per_byte,
    transfer_s,
)
from roller_svc.families.common.cpu.micro_kernel_cost import gather_cycles, kernel_cycles, source_bandwidth
from roller_svc.families.common.cpu.task_costs import count_tasks_of_core, sum_task_costs
from roller_svc.families.cpu.convolution.workload import plan_task
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.machine import LOAD_PORTS
from roller_svc.perf.workload import Workload

L2_PANELS_FRACTION = 0.6  # of L2 that all panels may fill to be retained


@dataclass(frozen=True, slots=True)
class _Sizes:
    """Sizes of a task."""

    rows: int
    vectors: int
    calls: int  # of the micro-kernel, per patch and panel
    windows: int
    panels: int
    channels: int
    steps: int
    window: tuple[int, ...]  # output positions of a patch
    tile: int  # output positions of a register tile along the last dimension


def cpu_convolution(p: Workload[ImageSpace], launch: Launch) -> Costs:
    """Return the cycles of the core with the most tasks, summed over what a task does."""
    mach, costs, image = p.machine, p.machine.costs.convolution, p.facts
    sizes = _sizes(p, image, launch)
    kernel = _kernel(p, image, sizes)
    staging = sizes.windows * sizes.steps * _staging(p, image, sizes)
    packing = sizes.steps * _packing(p, image, sizes)
    results = sizes.windows * sizes.panels * _results(p, image, sizes)
    update = _update(p, image, sizes)
    parts = {"compute": kernel, "update": update, "packing": staging + packing, "task": results + mach.costs.task_cycles}
    moved = sum(t.transferred_bytes(p.extents) for t in p.footprint.reads)
    memory = moved * seconds_per_byte(mach, p.compulsory_bytes, launch.grid)
    memory += sum(transfer_s(p, t, launch.block, launch.grid) for t in p.footprint.writes)
    return sum_task_costs(p, launch, parts, count_tasks_of_core(p, launch), memory, costs.memory_exposed_fraction)


def _sizes(p: Workload[ImageSpace], image: ImageSpace, launch: Launch) -> _Sizes:
    """Return the sizes of a task, as far as it is inside of the outputs."""
    lanes, plan = p.machine.unit.shape[-1], plan_task(p, launch.block, launch.thread)
    places = {axis.name: i for i, axis in enumerate(p.space.axes)}
    positions = [places[slide.pixel.name] for slide in image.window_dims]
    extents = [min(n, p.extents[i]) for i, n in zip(positions, plan.pixels, strict=True)]
    tasks = [min(launch.block[i], p.extents[i]) for i in positions]
    pixels, filters = math.prod(plan.tile), plan.wide
    return _Sizes(
        rows=pixels if image.along_filters else filters,
        vectors=(filters if image.along_filters else pixels) // lanes,
        calls=math.prod(-(-e // n) for n, e in zip(plan.tile, extents, strict=True)),
        windows=math.prod(-(-t // w) for t, w in zip(tasks, plan.pixels, strict=True)),
        panels=min(plan.panels, -(-image.filters.extent // filters)),
        channels=plan.channels,
        steps=plan.steps,
        window=tuple(extents),
        tile=plan.tile[-1],
    )


def _kernel(p: Workload[Any], image: ImageSpace, s: _Sizes) -> float:
    """Return the cycles of all micro-kernel calls."""
    mach, costs = p.machine, p.machine.costs.convolution
    depth = image.depth * image.taps
    near, far = _streamed_bytes(p, image, s)
    l2, l3 = (cache.bytes_per_s / mach.cores / mach.clock_hz for cache in (mach.caches[-2], mach.caches[0]))
    arriving = near / l2 + far / l3
    # arriving lines compete for the load ports
    row = max(kernel_cycles(mach, s.rows, s.vectors), (s.rows + s.vectors) / LOAD_PORTS + costs.port_contention * arriving)
    if not image.along_filters and image.window_dims[-1].taps > 1:
        row += costs.split_load_cycles * s.vectors
    inner = image.window_dims[-1].taps
    row += costs.tap_loop_cycles / inner if inner > 1 else 0.0
    row = max(row + costs.l2_exposed_fraction * arriving, near / (costs.l2_bandwidth_under_compute * l2) + far / l3)
    return s.windows * s.panels * s.calls * (s.steps * costs.call_cycles + depth * row)


def _streamed_bytes(p: Workload[Any], image: ImageSpace, s: _Sizes) -> tuple[int, int]:
    """Return the bytes that each k reads from (L2, beyond L2).

    These are rows of a panel that L1 does not hold, and disjoint tiles, which are streamed once per panel.
    """
    caches, lanes = p.machine.caches, p.machine.unit.shape[-1]
    filters, pixels = (s.vectors * lanes, s.rows) if image.along_filters else (s.rows, s.vectors * lanes)
    row, tile = filters * p.elem_bytes, pixels * p.elem_bytes if image.tiles_are_disjoint else 0
    panel = s.channels * image.taps * row
    if panel <= L1_PANEL_FRACTION * caches[-1].bytes_per_core:
        return tile, 0
    return (tile + row, 0) if panel * s.panels <= L2_PANELS_FRACTION * caches[-2].bytes_per_core else (tile, row)


def _update(p: Workload[Any], image: ImageSpace, s: _Sizes) -> float:
    """Return cycles of accumulators to and from their scratch buffer, once per channel block."""
    mach, lanes = p.machine, p.machine.unit.shape[-1]
    vectors = s.windows * s.panels * s.calls * s.rows * s.vectors
    transfer = mach.costs.convolution.accumulator_cycles * vectors
    if s.steps == 1:
        return transfer
    size = vectors * lanes * p.elem_bytes
    return s.steps * (2.0 * transfer + 2 * size / (private_bandwidth(mach, size) / mach.clock_hz))


def _staging(p: Workload[Any], image: ImageSpace, s: _Sizes) -> float:
    costs = p.machine.costs.convolution
    last, pixels = image.window_dims[-1], s.window[-1]
    rows = math.prod(slide.input_extent(n) for slide, n in zip(image.window_dims[:-1], s.window[:-1], strict=True))
    if image.channels_last:
        rows *= last.input_extent(pixels)
        return rows * (costs.row_cycles + _run_cycles(p, s.channels, costs.copy_cycles))
    length = last.input_extent(pixels)
    source = source_bandwidth(p.machine, max(p.a.total_bytes, p.b.total_bytes)) / p.machine.cores / p.machine.clock_hz
    moved = length * max(1, image.pixel_stride) * p.elem_bytes / source
    return rows * s.channels * (costs.row_cycles + _row_cycles(p, image, s, length) + moved)


def _row_cycles(p: Workload[Any], image: ImageSpace, s: _Sizes, length: int) -> float:
    """Return cycles of one row of the image into the patch.

    Disjoint tiles are copied tile by tile; the last vector of a tile overlaps the one before it.
    """
    costs = p.machine.costs.convolution
    apart = image.pixel_stride * image.phases(image.window_dims[-1])
    if apart not in (1, 2):
        return (costs.gather_cycles + costs.division_cycles * _divided_dims(p, image)) * length
    each = costs.copy_cycles if apart == 1 else costs.deinterleave_cycles
    if not image.tiles_are_disjoint:
        return _run_cycles(p, length, each)
    vectors, rest = divmod(s.tile, p.machine.unit.shape[-1])
    return length / s.tile * (costs.tile_cycles + each * (vectors + 2 * (rest > 0)))


def _divided_dims(p: Workload[Any], image: ImageSpace) -> int:
    """Return the image dimensions whose index divides the output position.

    Rows are staged channel by channel, and each element's division is repeated; packing divides once per panel.
    """
    pixel = image.window_dims[-1].pixel.name
    dims = [dim.dim for operand in (p.a, p.b) for tensor in operand.tensors for dim in tensor.dims]
    return sum(not dim.is_affine and pixel in dict(dim.coeffs) for dim in dims)


def _run_cycles(p: Workload[Any], length: int, each: float) -> float:
    lanes = p.machine.unit.shape[-1]
    return each * (length // lanes) + p.machine.costs.convolution.element_cycles * min(length % lanes, 6)


def _packing(p: Workload[Any], image: ImageSpace, s: _Sizes) -> float:
    lanes, costs = p.machine.unit.shape[-1], p.machine.costs.convolution
    filters = s.vectors * lanes if image.along_filters else s.rows
    each = costs.gather_cycles
    if image.weights_contiguous:
        each = 2.0 / lanes
    elif image.weights_along_k and image.along_filters and not image.channels_last:
        each = costs.transpose_cycles / lanes
    count = s.panels * filters * s.channels * image.taps
    source = source_bandwidth(p.machine, p.compulsory_bytes) / p.machine.cores / p.machine.clock_hz
    if any(operand.is_constant and p.space.axes.index(image.filters) in operand.axes for operand in (p.a, p.b)):
        return count * costs.weights_exposed_fraction * p.elem_bytes / source
    return count * (each + p.elem_bytes / source)


def _results(p: Workload[Any], image: ImageSpace, s: _Sizes) -> float:
    """Return cycles of one patch and panel's outputs, transposed where vectors are of filters and outputs are not."""
    lanes, costs = p.machine.unit.shape[-1], p.machine.costs.convolution
    statements = max(1, len(p.epilogue.tensors))
    filters = min(s.vectors * lanes if image.along_filters else s.rows, image.filters.extent)
    pixels = math.prod(s.window)
    along = (image.filters if image.filters_last else image.window_dims[-1].pixel).name
    position = next(i for i, axis in enumerate(p.space.axes) if axis.name == along)
    gathers = pixels * filters * gather_cycles(p, position)
    if image.filters_last:
        return gathers + pixels * (costs.row_cycles + _run_cycles(p, filters, costs.store_cycles * statements))
    rows = pixels // s.window[-1] * filters
    cycles = gathers + rows * _run_cycles(p, s.window[-1], costs.store_cycles * statements)
    if not image.along_filters:
        return cycles + rows * costs.row_cycles
    blocks = pixels // s.window[-1] * -(-s.window[-1] // lanes) * s.vectors
    return cycles + blocks * lanes * costs.transpose_cycles + rows * 2.0
