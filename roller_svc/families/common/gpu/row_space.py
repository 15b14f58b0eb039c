"""Tile space of a reduction on a GPU → how threads iterate over its rows, and the registers that takes.

Both construction and the model read it. Axes are positions in the space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from roller_svc.families.common.gpu.packed_rows import PackedRows
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import TileAccess, TileSpace
from roller_svc.ir.hardware import HardwareSpec, Limits
from roller_svc.ir.schedule import Scope, Storage
from roller_svc.perf.footprint import AccessFootprint, SpaceFootprint, Tile
from roller_svc.perf.machine import register_words
from roller_svc.perf.occupancy import block_registers, overhead_registers

WORD_BYTES = 4
MIN_VECTOR_BYTES = 8  # of aligned vectors; rows that allow only narrower ones are peeled
MIN_PEELED_LANES = 16  # that have a vector of a row; single elements of shorter rows take as long
MIN_PEELED_VECTORS = 2  # of a lane of a warp; edges may take as long as the vectors of shorter rows
MAX_ROW_REGISTERS = 96  # of a thread; longer parts of a row stay in shared memory
STAGED_CHUNKS = 4  # chunks in flight that a compiler loads before the first use


@dataclass(frozen=True, slots=True)
class RowAccess:
    """One tensor of the rows."""

    footprint: AccessFootprint
    varies_along_row: bool  # indexed by the reduced axis
    num_passes: int
    bytes: int  # of an element
    density: float  # elements per point, below 1 where an index is divided
    contiguous_axis: int | None  # the axis that adjacent threads follow
    stride: int | None  # elements between adjacent threads; None where it varies
    is_divided: bool  # several adjacent points along that axis share an element
    is_aligned: bool = True  # whether its vectors are aligned where rows are peeled
    is_merged: bool = False  # registers hold a value of it and of another operand
    # Outer axes of its index, if blocks may copy its row to shared memory, where it is aligned like a peeled row.
    staged_axes: Tile | None = None
    is_looked_up: bool = False  # whether fields of bits choose each element, in a table

    def elements(self, tile: Tile) -> int:
        """Return the elements that a tile accesses; divided ones at their mean density."""
        count = self.footprint.elements(tile)
        if self.density == 1.0:
            return count
        extents = [t.extent for t in self.footprint.tables]
        points = math.prod([min(tile[i], n) for i, n in zip(self.footprint.axes, extents, strict=True)])
        return max(1, min(count, math.ceil(points * self.density)))

    def transferred_bytes(self, tile: Tile) -> float:
        return self.footprint.transferred_bytes(tile) if self.density == 1.0 else float(self.elements(tile) * self.bytes)

    def requested_bytes(self, tile: Tile) -> float:
        return self.footprint.requested_bytes(tile) if self.density == 1.0 else float(self.elements(tile) * self.bytes)


class RowIteration(NamedTuple):
    """How a thread iterates over its part of a row, in chunks of `vector_elems`."""

    vector_elems: int  # inner points of one vector access
    chunks_in_flight: int
    iterations: int
    points: int  # outer points of a thread
    edge_iterations: int = 0  # of single elements outside of a peeled row's vectors
    serial_rows: int = 1  # peeled rows of a thread, one after the other

    @property
    def is_single_pass(self) -> bool:
        """Whether the whole row is in flight, so that one pass serves all statements."""
        return self.chunks_in_flight >= self.iterations

    @property
    def steps(self) -> int:
        return -(-self.iterations // self.chunks_in_flight)


def exceeds_registers(row_elements: int, vector_elems: int, threads: int, words: int, limits: Limits) -> bool:
    """Return whether a thread's part of a row is stored in shared memory, because it exceeds its registers.

    Both the model and the schedule decide by this. `words` are the registers of an element.
    """
    row_registers = row_elements * words
    needed = overhead_registers(limits) + row_registers + vector_elems * words
    return row_registers > MAX_ROW_REGISTERS or block_registers(threads, needed, limits) > limits.registers_per_core


@dataclass(frozen=True)
class RowSpace:
    """Rows of a reduction."""

    accesses: tuple[RowAccess, ...]
    read: tuple[RowAccess, ...]  # inputs along a row
    inner: int
    points: int  # of a row
    spatial: Tile
    contiguous_along_reduction: bool  # the threads of a row are adjacent
    contiguous_axis: int
    num_reductions: int  # of the group
    vector_elems: int
    peeled_elems: int  # of a vector of peeled rows (a head of elements, aligned vectors, a tail); 0: not peeled
    vector_rows: int  # adjacent rows that a thread takes together
    reuse_axes: Tile  # outer axes whose points share an operand
    words: int  # registers of an accumulator
    periods: Tile = ()  # of peeled rows, by axis: steps after which their alignment repeats
    packed: PackedRows | None = None
    # Instructions at an element of a sum of products, with the outer axes that their values depend on; None: other
    # reductions.
    products: tuple[tuple[float, Tile], ...] | None = None
    accumulators_of: tuple[tuple[str, DType], ...] = ()  # the reductions of the group: output, type of its accumulator

    def row_iteration(self, block: Tile, thread: Tile, lanes: int, split_k: int = 1) -> RowIteration:
        """Return how threads iterate over a row of which each rTask has a split."""
        run = thread[self.inner]
        is_peeled = self.is_peeled(run) and split_k == 1
        rounds = max(1, -(-(self.points // run) // lanes) if is_peeled else -(-self.points // (run * lanes * split_k)))
        points = math.prod([thread[i] for i in self.spatial])
        flight = min(rounds, max(1, -(-block[self.inner] // (lanes * run))))
        if not is_peeled:
            return RowIteration(run, flight, rounds, points)
        return RowIteration(run, flight, rounds, 1, -(-2 * (run - 1) // lanes), points)

    def row_thread(self, thread: Tile) -> Tile:
        """Return the part of a thread's tile that is computed at once: of peeled rows, a vector of one."""
        if not self.is_peeled(thread[self.inner]):
            return thread
        return tuple([run if i == self.inner else 1 for i, run in enumerate(thread)])

    def is_staged(self, access: RowAccess, block: Tile, thread: Tile) -> bool:
        """Return whether a block copies a tensor's row to shared memory, where it is aligned like its peeled rows."""
        if access.staged_axes is None or not self.is_peeled(thread[self.inner]):
            return False
        if all(thread[i] == 1 for i in self.spatial) or any(block[i] > 1 for i in access.staged_axes):
            return False
        return all(block[i] == 1 or thread[i] > 1 or self.periods[i] == 1 for i in self.spatial)

    def is_peeled(self, run: int) -> bool:
        """Return whether rows whose vectors have `run` elements are peeled."""
        return run == self.peeled_elems and self.points % run != 0

    def is_shared(self, iteration: RowIteration, threads: int, limits: Limits) -> bool:
        """Return whether rows that several statements read are stored in shared memory."""
        if not iteration.is_single_pass or not self.contiguous_along_reduction or not self.cached_inputs:
            return False
        elements = iteration.iterations * iteration.vector_elems * iteration.points
        return exceeds_registers(elements, iteration.vector_elems, threads, self.words, limits)

    @cached_property
    def cached_inputs(self) -> tuple[RowAccess, ...]:
        """Return the inputs that several statements read along a row."""
        return tuple([a for a in self.read if a.num_passes > 1])

    def registers(self, thread: Tile, iteration: RowIteration, threads: int, limits: Limits) -> int:
        """Return a thread's registers: chunks in flight, cached rows, accumulators."""
        flight = cached = 0
        whole = iteration.is_single_pass and not self.is_shared(iteration, threads, limits)
        is_serial, thread = iteration.serial_rows > 1, self.row_thread(thread)
        for access in self.read:
            count = access.elements(thread)
            is_staged = is_serial and access.staged_axes is not None
            if is_staged or (whole and access.is_merged):
                flight += -(-count * access.bytes // WORD_BYTES)
            elif whole and access.num_passes > 1:
                cached += iteration.iterations * count * register_words(access.footprint.access.dtype)
            else:
                flight += min(iteration.chunks_in_flight, STAGED_CHUNKS) * -(-count * access.bytes // WORD_BYTES)
        edges = iteration.edge_iterations * len(self.read)
        sums = self.accumulators(thread, iteration) * self.words
        return overhead_registers(limits) + flight + cached + sums + edges

    def packed_in(self, thread: Tile) -> PackedRows | None:
        """Return the packed weights if a thread's tile unpacks them in pairs."""
        return self.packed if self.packed is not None and self.packed.applies_to(thread, self.inner) else None

    def accumulators(self, thread: Tile, iteration: RowIteration) -> int:
        """Return the accumulators of a thread: for each element of a vector, or for a row and its chunk."""
        if self.packed_in(thread) is not None:
            return iteration.points * 2
        return iteration.points * (iteration.vector_elems if self.contiguous_along_reduction else 1)

    def shared_buffers(self, block: Tile, thread: Tile, iteration: RowIteration, lanes: int, limits: Limits) -> tuple[Storage, ...]:
        """Return the shared memory of a block: stored rows, staged operands, and the sums of lanes."""
        rows = math.prod([block[i] // thread[i] for i in self.spatial])
        buffers: list[Storage] = []
        if self.is_shared(iteration, rows * lanes, limits):
            chunks = min(iteration.iterations * lanes, self.points // iteration.vector_elems)
            shape = (rows, iteration.points, chunks, iteration.vector_elems)
            buffers += [_shared_buffer(a.footprint.access, shape) for a in self.cached_inputs]
        aligned = (self.points // thread[self.inner] * thread[self.inner],)
        buffers += [_shared_buffer(a.footprint.access, aligned) for a in self.accesses if self.is_staged(a, block, thread)]
        layout = lane_buffer_shape(iteration.points, rows, lanes, limits.warp_size, adjacent=self.contiguous_along_reduction)
        if layout is not None:
            buffers += [Storage(f"{output}.lanes", dtype, layout, Scope.SHARED, ()) for output, dtype in self.accumulators_of]
        return tuple(buffers)


def lane_buffer_shape(points: int, rows: int, lanes: int, warp: int, *, adjacent: bool) -> tuple[int, ...] | None:
    """Return the shape of the shared memory in which lanes of a row reduce; None if they need none.

    Args:
        points: rows that a thread computes together.
        rows: threads of a block that have the same lane.
        lanes: threads that share a row.
        warp: threads of a warp.
        adjacent: whether the lanes of a row are adjacent threads, whose warps reduce by shuffles.
    """
    if lanes == 1 or (adjacent and lanes <= warp):
        return None
    return (points, rows, lanes // warp) if adjacent else (lanes, points, rows)


def _shared_buffer(access: TileAccess, shape: Tile) -> Storage:
    return Storage(access.tensor, access.dtype, shape, Scope.SHARED, ())


def row_space(space: TileSpace, footprint: SpaceFootprint, hw: HardwareSpec) -> RowSpace:
    """Prepare a space with rows for many tiles."""
    (inner,) = (i for i, a in enumerate(space.axes) if a in space.reduced)
    spatial = tuple(i for i in range(len(space.axes)) if i != inner)
    vector = next((i for i, a in enumerate(space.axes) if a.name == space.vector_axis), inner)
    along = vector == inner
    accesses = tuple(_access(t, footprint.extents, vector) for t in footprint.accesses)
    neighbours = [a for a in accesses if a.stride == 1] or list(accesses)
    dominant = max(neighbours, key=lambda a: a.elements(footprint.extents) * a.bytes, default=None)
    widest = hw.vector_bytes // dominant.bytes if dominant is not None else 1
    packed = max((_points_per_element(a, footprint.extents, inner) for a in accesses if _is_read_row(a)), default=1)
    last = space.axes[inner].members[-1].extent
    vector_elems = _largest_dividing_power(last, max(widest, packed) if along else packed)
    start = row_start_access(space)
    peeled_elems, periods = 0, tuple([1] * len(space.axes))
    if (
        along
        and packed == 1
        and dominant is not None
        and start is not None
        and vector_elems < widest
        and vector_elems * dominant.bytes < MIN_VECTOR_BYTES
        and last >= MIN_PEELED_LANES * widest
    ):
        peeled_elems, steps = widest, row_periods(space, widest)
        periods = tuple([steps.get(axis.name, 1) for axis in space.axes])
        accesses = tuple([_peeled_access(a, space, start, widest) for a in accesses])
        rows = math.prod([footprint.extents[i] for i in spatial])
        is_long = last >= MIN_PEELED_VECTORS * widest * hw.limits.warp_size
        along_row = [a for a in accesses if a.varies_along_row]
        # where rows share an aligned operand, a thread takes several of them at once
        has_vectors = all(
            set(spatial) <= set(a.footprint.axes) if a.is_aligned else a.staged_axes is not None for a in along_row
        ) or all(a.is_aligned for a in along_row)
        if is_long and rows >= hw.num_cores and has_vectors:
            vector_elems = widest  # single elements are never faster, unless rows are split
    read = tuple(a for a in accesses if _is_read_row(a))
    most = max((a.num_passes for a in read), default=1)
    writes_rows = any(a.varies_along_row and a.footprint.access.is_output for a in accesses)
    return RowSpace(
        accesses=accesses,
        read=read,
        inner=inner,
        points=footprint.extents[inner],
        spatial=spatial,
        contiguous_along_reduction=along,
        contiguous_axis=vector,
        num_reductions=max(1, most - 1) if writes_rows else most,
        vector_elems=vector_elems,
        peeled_elems=peeled_elems,
        periods=periods,
        # with windows, vectors of rows would be strided: threads are adjacent instead
        vector_rows=_largest_dividing_power(footprint.extents[vector], widest) if not along and space.reduces_rows else 1,
        reuse_axes=tuple(i for i in spatial if any(i not in a.footprint.axes for a in read)),
        words=register_words(space.compute_dtype),
    )


def row_start_access(space: TileSpace) -> TileAccess | None:
    """Return the largest tensor whose rows are contiguous along the only inner axis; None if there is none."""
    (axis,) = space.reduced
    if len(axis.members) != 1:
        return None
    contiguous = [access for access in space.accesses if _is_contiguous(access, axis.members[0].name)]
    return max(contiguous, key=lambda access: access.tensor_bytes, default=None)


def _is_contiguous(access: TileAccess, axis: str) -> bool:
    """Return whether a tensor is contiguous along an axis."""
    return (
        bool(access.dims)
        and all(dim.is_affine for dim in access.dims)
        and dict(access.dims[-1].coeffs).get(axis) == 1
        and not any(axis in dict(dim.coeffs) for dim in access.dims[:-1])
    )


def row_periods(space: TileSpace, vector_elems: int) -> dict[str, int]:
    """Return the outer axes along which rows differ in alignment, and the steps after which it is the same again."""
    access = row_start_access(space)
    starts = {} if access is None else _row_starts(access, vector_elems)
    return {name: vector_elems // math.gcd(vector_elems, step) for name, step in starts.items()}


def _peeled_access(access: RowAccess, space: TileSpace, start: TileAccess, vector_elems: int) -> RowAccess:
    """Return an access with how it reads vectors where rows are peeled."""
    tensor = access.footprint.access
    axes = staged_axes(space, tensor, vector_elems)
    return replace(
        access,
        is_aligned=_row_starts(tensor, vector_elems) == _row_starts(start, vector_elems),
        staged_axes=None if axes is None else tuple([i for i, a in enumerate(space.axes) if a.name in axes]),
    )


def staged_axes(space: TileSpace, access: TileAccess, vector_elems: int) -> frozenset[str] | None:
    """Return the outer axes of an input that is contiguous along peeled rows, but aligned otherwise; or None.

    Both the model and the schedule decide by this which tensors blocks copy to shared memory.
    """
    start, (inner,) = row_start_access(space), space.reduced
    if start is None or access.is_output or access.is_conditional or not _is_contiguous(access, inner.members[0].name):
        return None
    if _row_starts(access, vector_elems) == _row_starts(start, vector_elems):
        return None
    return frozenset([name for dim in access.dims for name, _ in dim.coeffs]) - {inner.members[0].name}


def _row_starts(access: TileAccess, modulus: int) -> dict[str, int]:
    """Return the coefficients, modulo `modulus`, of a row's first element in memory by the other axes."""
    starts: dict[str, int] = {}
    stride = 1
    for position, dim in enumerate(reversed(access.dims)):
        if position:
            for name, c in dim.coeffs:
                starts[name] = (starts.get(name, 0) + c * stride) % modulus
        stride *= dim.size
    return {name: c for name, c in starts.items() if c}


def _is_read_row(access: RowAccess) -> bool:
    return access.varies_along_row and not access.footprint.access.is_output


def _access(footprint: AccessFootprint, extents: Tile, fast: int) -> RowAccess:
    density = 1.0
    if not footprint.is_gathered and any(not dim.is_affine for dim in footprint.access.dims):
        density = min(1.0, footprint.elements(extents) / math.prod([extents[i] for i in footprint.axes]))
    wide = [dim for dim in footprint.access.dims if dim.size > 1]
    is_divided = bool(wide) and fast in footprint.axes and wide[-1].is_divided
    return RowAccess(
        footprint,
        footprint.varies_with_reduction,
        footprint.access.num_uses,
        footprint.elem_bytes,
        density,
        fast if fast in footprint.axes else None,
        footprint.strides.get(fast),
        is_divided,
        is_looked_up=any(dim.is_looked_up for dim in footprint.access.dims),
    )


def _points_per_element(access: RowAccess, extents: Tile, inner: int) -> int:
    """Return the adjacent inner points that share an element (4-bit values in a word); 1 if none do."""
    divided = [dim for dim in access.footprint.access.dims if not dim.is_affine and dim.size > 1]
    if len(divided) != 1 or inner not in access.footprint.axes or extents[inner] % divided[0].size:
        return 1
    points = extents[inner] // divided[0].size
    return points if points <= WORD_BYTES * 2 else 1


def _largest_dividing_power(extent: int, width: int) -> int:
    """Return the largest power of two up to the width that divides the extent."""
    return math.gcd(extent, 1 << (width.bit_length() - 1))
