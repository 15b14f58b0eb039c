"""Space of a map → how threads reach its tensors: wide, element by element, or through shared memory.

What the model prices and what lowering builds: both ask here. Axes are positions in the space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from roller_svc.ir.group import TileAccess, TileSpace
from roller_svc.perf.banks import conflict_cycles

Tile = tuple[int, ...]

MAX_ACCESS_BYTES = 16  # of one access of a thread (LD.128)
SECTOR_BYTES = 32
REQUEST_THREADS = 32  # of one request to memory; a wave of 64 makes two, which `request_cycles` counts
LANES_ALONG = 8  # lanes of a warp that share a line of 128 bytes with 16-byte accesses; the others take other lines


def is_map(space: TileSpace) -> bool:
    """Whether every point is computed once, from what it reads. A scatter also copies its target."""
    return bool(space.axes) and not space.reduced and not space.copied_bytes


@dataclass(frozen=True, slots=True)
class MapAccess:
    """A tensor of a map. Offsets of indices are not known here: they are taken to be aligned.

    `run`: the axis whose next point is the next element, None where there is none; `width`: neighbours along it, a
    power of two, that one access moves. `index`: the axes that index it from end to end, one a dimension, dimensions
    of one element left out; None where an index is anything else. `steps[i]`: elements between neighbours along axis i.
    """

    access: TileAccess
    contiguous_axis: int | None
    vector_width: int
    index: Tile | None
    steps: Tile
    is_opaque: bool

    @property
    def bytes(self) -> int:
        return self.access.dtype.bytes

    def tile_axes(self, row: int) -> Tile:
        """The axes of its tile in shared memory: the result's last but one, its own last."""
        others = tuple(i for i in self.index or () if i not in (row, self.contiguous_axis))
        return (*others, row, *(() if self.contiguous_axis is None else (self.contiguous_axis,)))


@dataclass(frozen=True, slots=True)
class MapSpace:
    """`row`: the axis along which the result lies; lanes stand along it, and each takes `width` neighbours at most.
    `crossing`: the tensors that lie along another one and can go through shared memory."""

    space: TileSpace
    extents: Tile
    row: int
    accesses: tuple[MapAccess, ...]
    transposed: tuple[MapAccess, ...]

    @property
    def vector_width(self) -> int:
        return max((a.vector_width for a in self.accesses if a.contiguous_axis == self.row), default=1)

    def thread_vector_width(self, thread: Tile) -> int:
        """Neighbours along the row that a thread takes together."""
        return math.gcd(thread[self.row], self.vector_width)

    def staged_accesses(self, block: Tile) -> tuple[MapAccess, ...]:
        """The tensors that a block stages, so that memory is read along one axis and written along the other.

        A tile of less than a sector along a tensor's own axis is read as it is.
        """
        if block[self.row] == 1:
            return ()
        return tuple(
            [
                a
                for a in self.transposed
                if a.contiguous_axis is not None and block[a.contiguous_axis] * a.bytes >= SECTOR_BYTES
            ]
        )

    def thread_order(self, block: Tile) -> Tile:
        """The axes as threads stand along them, the fastest last: the row, before it that of what crosses it."""
        own = {a.contiguous_axis for a in self.staged_accesses(block)}
        return tuple(sorted(range(len(self.extents)), key=lambda i: (i == self.row, i in own)))

    def padded_layout(self, staged: MapAccess, block: Tile, thread: Tile) -> PaddedLayout:
        """How a staged tile lies in shared memory."""
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
    crossing = tuple(
        a for a in accesses
        if not a.access.is_output and a.contiguous_axis not in (None, row) and a.index is not None and row in a.index
    )  # fmt: skip
    return MapSpace(space, extents, row, accesses, crossing)


def _access(access: TileAccess, place: dict[str, int], extents: Tile) -> MapAccess:
    wide = [d for d, dim in enumerate(access.dims) if dim.size > 1]
    run: int | None = None
    width = 1
    if wide and access.dims[wide[-1]].is_affine:
        last = access.dims[wide[-1]]
        name = next((name for name, c in last.coeffs if c == 1 and name in place), None)
        if name is not None:
            run = place[name]
            between = [c for other, c in last.coeffs if other != name]
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
    return MapAccess(access, run, width, _index(access, place, extents), tuple(steps), is_opaque)


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


@dataclass(frozen=True, slots=True)
class PaddedLayout:
    """A staged tile's rows in shared memory. `pad`: elements added to each; `write_cycles`: of a warp's requests that
    store one loaded vector a lane; `read_cycles`: of one that loads an element a lane."""

    pad: int
    write_cycles: int
    read_cycles: int


@lru_cache(maxsize=4096)
def choose_padding(row: int, width: int, element_bytes: int, lanes: tuple[int, int, int]) -> PaddedLayout:
    """The padding of rows of `row` elements that keeps banks apart, both ways.

    Written along a row, `width` neighbours a lane, LANES_ALONG lanes along it. Read down its columns: `lanes` are the
    threads along the result's axis, the neighbours that each of them takes, and the threads along the row.
    """
    pads = [0, *(1 << i for i in range((MAX_ACCESS_BYTES // element_bytes).bit_length()))]
    found = [_padded(row, pad, (width, element_bytes), lanes) for pad in pads]
    return min(found, key=lambda r: (r.write_cycles + width * r.read_cycles, r.pad))


def _padded(row: int, pad: int, written: tuple[int, int], lanes: tuple[int, int, int]) -> PaddedLayout:
    width, size = written
    down, neighbours, across = lanes
    step = row + pad
    along = math.gcd(row // width, LANES_ALONG)
    together = math.gcd(width, step)
    writes = [(lane // along * step + lane % along * width) * size for lane in range(REQUEST_THREADS)]
    reads = [(lane % down * neighbours * step + lane // down % across) * size for lane in range(REQUEST_THREADS)]
    requests = width // together
    return PaddedLayout(pad, requests * conflict_cycles(writes, together * size), conflict_cycles(reads, size))
