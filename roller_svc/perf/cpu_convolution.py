"""The cost of a convolution on a CPU: staged windows, packed weights, a micro-kernel and its results, all summed."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.ir.group import AxisRole
from roller_svc.perf.cpu_contraction import CALL_CYCLES, LOAD_PORTS, TASK_CYCLES, kernel_cycles, source_bandwidth
from roller_svc.perf.image_tile import WINDOW_OF_L2, ImageSpace
from roller_svc.perf.machine import Machine
from roller_svc.perf.problem import Problem
from roller_svc.perf.terms import Costs, Launch

# Cycles of one element, or of one vector, on Skylake-SP.
COPY_CYCLES = 1.0  # a vector from memory to the window
GATHER_CYCLES = 2.5  # an element whose neighbours do not accompany it
TURN_CYCLES = 6.0  # a vector of sums turned, from room to room
STORE_CYCLES = 2.0  # a vector of results, through the epilogue
ELEMENT_CYCLES = 1.0  # an element of a vector that is cut short
ROW_CYCLES = 6.0  # a row of the window or of results: its loop, its addresses
TAP_LOOP_CYCLES = 3.0  # one pass of the innermost loop over taps: counters that are set again
ACROSS_LINES_CYCLES = 0.4  # a vector of pixels that a tap has moved across two cache lines
BUSY_PORTS, CROWDED = 0.8, 1.2  # loads for that share of the multiply-adds' time delay some of those
L2_STREAM = 0.25  # of the time that rows of a panel take from the second cache, what the micro-kernel does not hide


@dataclass(frozen=True, slots=True)
class _Sizes:
    """What a task consists of. `calls`: of the micro-kernel, for a window and a panel; `window`: pixels of one."""

    rows: int
    vectors: int
    calls: int
    windows: int
    panels: int
    channels: int
    steps: int
    window: tuple[int, ...]


def cpu_convolution(p: Problem, image: ImageSpace, launch: Launch) -> Costs:
    """Cycles of the core with the most tasks, summed over what a task does."""
    mach = p.machine
    sizes = _sizes(p, image, launch)
    kernel = _kernel(p, image, sizes)
    staging = sizes.windows * sizes.steps * _staging(p, image, sizes)
    packing = sizes.steps * _packing(p, image, sizes)
    results = sizes.windows * sizes.panels * _results(p, image, sizes)
    update = _update(p, image, sizes)
    waves = -(-launch.grid // mach.cores)
    busy = launch.grid / mach.cores if launch.grid >= 4 * mach.cores else waves
    parts = (kernel, update, staging + packing, results + TASK_CYCLES)
    memory = p.compulsory_bytes / source_bandwidth(mach, p.compulsory_bytes)
    names = ("compute", "update", "packing", "task")
    return Costs(
        core_s=mach.seconds(sum(parts) * busy) + 0.3 * memory,
        core_stage=None,
        parts=(*((n, mach.seconds(c * busy)) for n, c in zip(names, parts, strict=True)), ("dram", memory)),
        occupancy=min(1.0, launch.grid / (waves * mach.cores)),
        waves=waves,
    )


def _window_room_bytes(mach: Machine) -> float:
    return WINDOW_OF_L2 * mach.hw.block_level.capacity_bytes


def _sizes(p: Problem, image: ImageSpace, launch: Launch) -> _Sizes:
    lanes = p.machine.unit.shape[-1]
    places = {axis.name: i for i, axis in enumerate(p.space.axes)}
    names = [axis.name for axis in p.space.role(AxisRole.PIXEL)]
    block, thread = (dict(zip(places, tile, strict=True)) for tile in (launch.block, launch.thread))
    depth = image.depth if image.channels is None else min(image.depth, block[image.channels.name])
    window = image.window(block, thread, depth, _window_room_bytes(p.machine))
    pixels = math.prod(thread[name] for name in names)
    filters = thread[image.filters.name]
    extents = [min(w, p.extents[places[name]]) for name, w in zip(names, window, strict=True)]
    tasks = [min(block[name], p.extents[places[name]]) for name in names]
    return _Sizes(
        rows=pixels if image.along_filters else filters,
        vectors=(filters if image.along_filters else pixels) // lanes,
        calls=math.prod(-(-e // thread[name]) for name, e in zip(names, extents, strict=True)),
        windows=math.prod(-(-t // w) for t, w in zip(tasks, window, strict=True)),
        panels=-(-min(block[image.filters.name], image.filters.extent) // filters),
        channels=depth,
        steps=-(-image.depth // depth),
        window=tuple(extents),
    )  # fmt: skip


def _kernel(p: Problem, image: ImageSpace, s: _Sizes) -> float:
    """All calls of the micro-kernel; a panel that L1 does not hold comes from L2 row by row."""
    mach, lanes = p.machine, p.machine.unit.shape[-1]
    depth = image.depth * image.taps
    row = kernel_cycles(mach, s.rows, s.vectors)
    if (s.rows + s.vectors) / LOAD_PORTS > BUSY_PORTS * row:
        row *= CROWDED
    if not image.along_filters and image.slides[-1].taps > 1:
        row += ACROSS_LINES_CYCLES * s.vectors
    inner = image.slides[-1].taps
    row += TAP_LOOP_CYCLES / inner if inner > 1 else 0.0
    width = (s.vectors * lanes if image.along_filters else s.rows) * p.elem_bytes
    l1, l2 = mach.caches[-1], mach.caches[-2]
    if s.channels * image.taps * width > 0.7 * l1.bytes_per_core:
        level = l2 if s.channels * image.taps * width * s.panels <= 0.6 * l2.bytes_per_core else mach.caches[0]
        row += L2_STREAM * width / (level.bytes_per_s / mach.cores / mach.clock_hz)
    return s.windows * s.panels * s.calls * (s.steps * CALL_CYCLES + depth * row)


def _update(p: Problem, image: ImageSpace, s: _Sizes) -> float:
    """Sums to and from their room, once a step."""
    mach, lanes = p.machine, p.machine.unit.shape[-1]
    vectors = s.windows * s.panels * s.calls * s.rows * s.vectors
    if s.steps == 1:
        return vectors * 1.0
    held = vectors * lanes * p.elem_bytes
    return s.steps * (2.0 * vectors + 2 * held / (_held_at(mach, held) / mach.clock_hz))


def _staging(p: Problem, image: ImageSpace, s: _Sizes) -> float:
    lanes = p.machine.unit.shape[-1]
    last, pixels = image.slides[-1], s.window[-1]
    rows = math.prod(slide.reach(n) for slide, n in zip(image.slides[:-1], s.window[:-1], strict=True))
    if image.channels_last:
        rows *= last.reach(pixels)
        return rows * (ROW_CYCLES + _run_cycles(s.channels, lanes, COPY_CYCLES))
    length = last.reach(pixels)
    contiguous = image.phases(last) == 1 and image.is_contiguous
    run = _run_cycles(length, lanes, COPY_CYCLES) if contiguous else GATHER_CYCLES * length
    source = source_bandwidth(p.machine, _image_bytes(p)) / p.machine.cores / p.machine.clock_hz
    return rows * s.channels * (ROW_CYCLES + run + length * p.elem_bytes / source)


def _run_cycles(length: int, lanes: int, each: float) -> float:
    return each * (length // lanes) + ELEMENT_CYCLES * min(length % lanes, 6)


def _image_bytes(p: Problem) -> int:
    return max(p.a.total_bytes, p.b.total_bytes)


def _packing(p: Problem, image: ImageSpace, s: _Sizes) -> float:
    lanes = p.machine.unit.shape[-1]
    filters = s.vectors * lanes if image.along_filters else s.rows
    each = GATHER_CYCLES
    if image.weights_contiguous:
        each = 2.0 / lanes
    elif image.weights_along_k and image.along_filters and not image.channels_last:
        each = TURN_CYCLES / lanes
    count = s.panels * filters * s.channels * image.taps
    source = source_bandwidth(p.machine, p.compulsory_bytes) / p.machine.cores / p.machine.clock_hz
    return count * (each + p.elem_bytes / source)


def _results(p: Problem, image: ImageSpace, s: _Sizes) -> float:
    """One window and panel: rows of neighbouring results, turned where vectors are of filters and results are not."""
    lanes = p.machine.unit.shape[-1]
    statements = max(1, len(p.rest.tensors))
    filters = min(s.vectors * lanes if image.along_filters else s.rows, image.filters.extent)
    pixels = math.prod(s.window)
    if image.filters_last:
        return pixels * (ROW_CYCLES + _run_cycles(filters, lanes, STORE_CYCLES * statements))
    rows = pixels // s.window[-1] * filters
    cycles = rows * _run_cycles(s.window[-1], lanes, STORE_CYCLES * statements)
    if not image.along_filters:
        return cycles + rows * ROW_CYCLES
    blocks = pixels // s.window[-1] * -(-s.window[-1] // lanes) * s.vectors
    return cycles + blocks * lanes * TURN_CYCLES + rows * 2.0


def _held_at(mach: Machine, task_bytes: int) -> float:
    for cache in reversed(mach.caches):
        if task_bytes <= cache.bytes_per_core // 2:
            return cache.bytes_per_s / mach.cores
    return mach.dram.bandwidth_bytes_per_s / mach.cores
