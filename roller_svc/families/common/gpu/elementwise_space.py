"""Tile space of an elementwise kernel → how threads access its tensors: vectors, elements, or through shared memory.

Both the model and the schedule read it. Axes are positions in the space.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache

from roller_svc.ir.affine import Dim
from roller_svc.ir.group import TileAccess, TileSpace
from roller_svc.perf.banks import conflict_cycles

Tile = tuple[int, ...]

MAX_ACCESS_BYTES = 16  # of one thread's access (LD.128)
SECTOR_BYTES = 32
REQUEST_THREADS = 32  # of one memory request; a wave of 64 makes two, which `request_cycles` counts
LANES_ALONG = 8  # lanes of a warp that share a 128-byte line with 16-byte accesses; more with narrow ones


def is_map(space: TileSpace) -> bool:
    """Return whether every point is computed once, from its inputs. A scatter also copies its target."""
    return bool(space.axes) and not space.reduced and not space.copied_bytes


@dataclass(frozen=True, slots=True)
class MapAccess:
    """A tensor of an elementwise kernel. Index offsets are unknown here and assumed to be aligned."""

    access: TileAccess
    contiguous_axis: int | None  # the axis whose next point is the next element
    vector_width: int  # elements along it, a power of two, that one access moves
    index: Tile | None  # axes that index it whole, one per dimension larger than 1; None for any other index
    steps: Tile  # elements between neighbours along each axis
    is_opaque: bool
    is_divided: bool  # by divisions, rather than by bits of data
    repeat: int = 1  # adjacent points along the row with the same element: 8 of packed words

    @property
    def bytes(self) -> int:
        return self.access.dtype.bytes

    @property
    def columns(self) -> int:
        """Return the consecutive elements that each point reads: columns of a short row, 1 for a window."""
        if not self.access.dims:
            return 1
        row = self.access.dims[-1]
        count = row.offsets[-1] - row.offsets[0] + 1
        return count if all(abs(c) >= count for _, c in row.coeffs) else 1

    def column_width(self, row: int, points: int) -> int:
        """Return the elements that one access moves of the columns of adjacent points along the row."""
        step = self.steps[row]
        run = self.columns * (points if self.columns == step else 1)
        return math.gcd(run, step, *self.steps, MAX_ACCESS_BYTES // self.bytes)

    def tile_axes(self, row: int) -> Tile:
        """Return the axes of its tile in shared memory: the output's last but one, its own last."""
        others = tuple(i for i in self.index or () if i not in (row, self.contiguous_axis))
        return (*others, row, *(() if self.contiguous_axis is None else (self.contiguous_axis,)))

    def sectors(self, elements: int, lanes: Iterable[tuple[int, int]]) -> int:
        """Return the sectors of one warp access of `elements` by each lane.

        `lanes`: the lanes along each axis, from the inside out, and the elements between neighbours.
        """
        left, count, run = REQUEST_THREADS, 1, elements * self.bytes
        for threads, stride in lanes:
            along, step = min(left, threads), stride * self.bytes
            if along < 2:
                continue
            if 0 < step <= max(run, SECTOR_BYTES // 2):
                run += step * (along - 1)
            elif step:
                count *= along
            left //= along
        return count * -(-run // SECTOR_BYTES)


@dataclass(frozen=True, slots=True)
class MapSpace:
    """Tile space of an elementwise kernel."""

    space: TileSpace
    extents: Tile
    row: int  # axis along which the output is contiguous; lanes follow it
    accesses: tuple[MapAccess, ...]
    transposed: tuple[MapAccess, ...]  # inputs contiguous along another axis that can go through shared memory

    @property
    def vector_width(self) -> int:
        return max((a.vector_width for a in self.accesses if a.contiguous_axis == self.row), default=1)

    def thread_vector_width(self, thread: Tile) -> int:
        """Return the elements along the row that a thread accesses together."""
        return math.gcd(thread[self.row], self.vector_width)

    def staged_accesses(self, block: Tile) -> tuple[MapAccess, ...]:
        """Return the inputs that a block stages to read along one axis and write along another.

        A tile of less than a sector along an input's own axis is read directly.
        """
        if block[self.row] == 1:
            return ()
        return tuple(
            [a for a in self.transposed if a.contiguous_axis is not None and block[a.contiguous_axis] * a.bytes >= SECTOR_BYTES]
        )

    def thread_order(self, block: Tile) -> Tile:
        """Return the axes in thread order, the fastest last: the row, preceded by axes of staged inputs."""
        own = {a.contiguous_axis for a in self.staged_accesses(block)}
        return tuple(sorted(range(len(self.extents)), key=lambda i: (i == self.row, i in own)))

    def padded_layout(self, staged: MapAccess, block: Tile, thread: Tile) -> PaddedLayout:
        """Return the layout of a staged tile in shared memory."""
        axis, row = staged.tile_axes(self.row)[-1], self.row
        lanes = (block[row] // thread[row], self.thread_vector_width(thread), block[axis] // thread[axis])
        return choose_padding(block[axis], math.gcd(staged.vector_width, block[axis]), staged.bytes, lanes)


def map_space(space: TileSpace) -> MapSpace:
    """Prepare a space for many tiles."""
    place = {a.name: i for i, a in enumerate(space.axes)}
    extents = tuple(a.extent for a in space.axes)
    accesses = tuple(_access(access, place, extents) for access in space.accesses)
    written = next((a.contiguous_axis for a in accesses if a.access.is_output and a.contiguous_axis is not None), None)
    row = place[space.vector_axis] if written is None else written
    accesses = tuple(replace(a, repeat=_repeat(a.access, space.axes[row].name)) for a in accesses)
    crossing = tuple(
        a for a in accesses
        if not a.access.is_output and a.contiguous_axis not in (None, row) and a.index is not None and row in a.index
    )  # fmt: skip
    return MapSpace(space, extents, row, accesses, crossing)


def _access(access: TileAccess, place: dict[str, int], extents: Tile) -> MapAccess:
    wide = [d for d, dim in enumerate(access.dims) if dim.size > 1]
    contiguous_axis: int | None = None
    width = 1
    if wide:
        last = access.dims[wide[-1]]
        name, between = _contiguous_member(last, place, access.dtype.bytes)
        if name in place:
            contiguous_axis = place[name]
            if any(dim.coeffs for dim in access.dims[: wide[-1]]):
                between.append(last.size)
            width = math.gcd(max(1, MAX_ACCESS_BYTES // access.dtype.bytes), *between)
    steps = [0] * len(extents)
    stride = 1
    for dim in reversed(access.dims):
        for name, c in dim.coeffs:
            if name in place:
                steps[place[name]] += abs(c) * stride
        stride *= dim.size
    is_opaque = any(not dim.is_affine for dim in access.dims)
    is_divided = any(not dim.is_affine and not dim.is_looked_up for dim in access.dims)
    return MapAccess(access, contiguous_axis, width, _index(access, place, extents), tuple(steps), is_opaque, is_divided)


def _contiguous_member(last: Dim, place: Mapping[str, int], element_bytes: int) -> tuple[str, list[int]]:
    """Return the axis whose next point has the next element, and the numbers that its vectors divide; "" for none.

    A run of less than a sector counts as no run: the sectors of a warp would not be those of adjacent elements.
    """
    if last.is_affine:
        name = next((name for name, c in last.coeffs if c == 1 and name in place), "")
        return name, [c for other, c in last.coeffs if other != name]
    if last.run is None or last.run[1] * element_bytes < SECTOR_BYTES:
        return "", []
    return last.run[0], [last.run[1]]


def _repeat(access: TileAccess, row: str) -> int:
    """Return the adjacent points of the row that read one element, by division of the row's index only."""
    divided = [dim for dim in access.dims if not dim.is_affine]
    others = [name for dim in access.dims if dim.is_affine for name, _ in dim.coeffs]
    if len(divided) != 1 or [name for name, _ in divided[0].coeffs] != [row] or row in others:
        return 1
    return divided[0].repeat


def _index(access: TileAccess, place: dict[str, int], extents: Tile) -> Tile | None:
    axes: list[int] = []
    for dim in access.dims:
        if dim.size == 1:
            continue
        if not dim.is_affine or len(dim.coeffs) != 1:
            return None
        name, c = dim.coeffs[0]
        if c != 1 or name not in place or extents[place[name]] != dim.size or place[name] in axes:
            return None
        axes.append(place[name])
    return tuple(axes)


def lanes_along(vectors: int, vector_bytes: int) -> int:
    """Return the lanes of a warp that load adjacent vectors of a staged line: they read whole sectors."""
    return math.gcd(vectors, max(LANES_ALONG, SECTOR_BYTES // vector_bytes))


@dataclass(frozen=True, slots=True)
class PaddedLayout:
    """Rows of a staged tile in shared memory."""

    pad: int  # elements added to each row
    write_cycles: int  # of a warp's requests that store one loaded vector per lane
    read_cycles: int  # of a warp's request that loads one element per lane


@lru_cache(maxsize=4096)
def choose_padding(row: int, width: int, element_bytes: int, lanes: tuple[int, int, int]) -> PaddedLayout:
    """Return the row padding that avoids bank conflicts of both writes and reads.

    Each lane writes `width` elements of a row of `row` elements; `lanes_along` lanes write along one row. Reads go down
    the columns. `lanes` has the threads along the output's axis, the elements of each, and the threads along the row.
    """
    pads = [0, *(1 << i for i in range((MAX_ACCESS_BYTES // element_bytes).bit_length()))]
    found = [_padded(row, pad, (width, element_bytes), lanes) for pad in pads]
    return min(found, key=lambda r: (r.write_cycles + width * r.read_cycles, r.pad))


def _padded(row: int, pad: int, written: tuple[int, int], lanes: tuple[int, int, int]) -> PaddedLayout:
    width, size = written
    down, neighbours, across = lanes
    step = row + pad
    along = lanes_along(row // width, width * size)
    together = math.gcd(width, step)
    writes = [(lane // along * step + lane % along * width) * size for lane in range(REQUEST_THREADS)]
    reads = [(lane % down * neighbours * step + lane // down % across) * size for lane in range(REQUEST_THREADS)]
    requests = width // together
    return PaddedLayout(pad, requests * conflict_cycles(writes, together * size), conflict_cycles(reads, size))
