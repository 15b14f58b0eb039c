"""TileSpace → functions from a tile to the bytes and contiguous segments of each tensor, fast enough to search with.

A tile is a tuple of extents in the order of the space's axes. Results are cached by the extents of the axes that index
the tensor, so that growing one axis recomputes only the tensors that depend on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from operator import itemgetter

from roller_svc.ir.affine import Dim
from roller_svc.ir.group import TileAccess, TileAxis, TileSpace, accessed_extent, contiguous_values
from roller_svc.ir.program import AxisKind
from roller_svc.ir.rprogram import RTile

Tile = tuple[int, ...]
ADDRESS_OPS = 2  # one multiply-add and one pointer add for a load
DIVISION_OPS = 8  # division by a constant: multiply-high, shift, multiply-subtract, and operand moves
Lines = tuple[int, int]  # transaction bytes of memory, and of its cache
Measured = tuple[int, int, float, float]  # elements, contiguous elements, transferred bytes, requested bytes
# Lines that hardware prefetchers skip and still follow a stream: the pair that a line is fetched with, and the next
# (Intel 64 and IA-32 Architectures Optimization Reference Manual, "Data Prefetching").
SKIPPED_LINES = 2


@dataclass(slots=True)
class ExtentTable:
    """Points of a tile of one axis, and its extents along each of the members, cached by the tile's extent."""

    axis: TileAxis
    extent: int
    members: tuple[str, ...]
    _seen: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def __getitem__(self, tile: int) -> tuple[int, tuple[int, ...]]:
        known = self._seen.get(tile)
        if known is None:
            points = min(tile, self.extent)
            extents = self.axis.member_extents(points)
            known = self._seen[tile] = points, tuple([extents[name] for name in self.members])
        return known


@dataclass(slots=True)
class DimFootprint:
    """One dimension of a tensor."""

    dim: Dim
    # picks the terms' extents from those of all members; None where a term is an axis that the space leaves out
    select_terms: Callable[[Tile], Tile] | None
    single_term: int | None  # member of the only term, of an index that is one axis plus an offset
    _seen: dict[Tile, tuple[int, int, int]] = field(default_factory=dict)

    def measure(self, extents: Tile) -> tuple[int, int, int]:
        """Return the index values, how many are contiguous, and the extent from first to last.

        Args:
            extents: Extents along the members of all axes that index the tensor.
        """
        if self.single_term is not None:
            count = min(self.dim.size, extents[self.single_term])
            return count, count, count
        if self.select_terms is None:
            return self.dim.size, self.dim.size, self.dim.size
        key = self.select_terms(extents)
        known = self._seen.get(key)
        if known is None:
            by_name = {name: r for (name, _), r in zip(self.dim.coeffs, key, strict=True)}
            span = 1 + sum([abs(c) * (r - 1) for (_, c), r in zip(self.dim.coeffs, key, strict=True)])
            span += self.dim.offsets[-1] - self.dim.offsets[0]
            values = accessed_extent(self.dim, by_name)
            reached = min(self.dim.size, span)
            if not self.dim.is_affine:
                reached = values if self.dim.is_divided else self.dim.size
            known = self._seen[key] = (values, contiguous_values(self.dim, by_name), reached)
        return known


@dataclass(slots=True)
class AccessFootprint:
    """One tensor of the space."""

    access: TileAccess
    tables: tuple[ExtentTable, ...]
    dims: tuple[DimFootprint, ...]
    axes: tuple[int, ...]  # positions of the tile axes that index it
    elem_bytes: int
    address_ops: int  # integer operations to address one element
    strides: dict[int, int]  # elements between neighbours along a tile axis, where they are in the innermost dimension
    has_all_axes: bool  # whether the space has every axis of the index
    varies_with_reduction: bool  # whether a reduced axis, or one that the space leaves out, indexes it
    lines: Lines
    select_axes: Callable[[Tile], Tile] = field(compare=False)  # a tile's extents on `axes`
    _seen: dict[Tile, Measured] = field(default_factory=dict)
    _streams: dict[Tile, int] = field(default_factory=dict)

    def measure(self, tile: Tile) -> Measured:
        """Return (elements, contiguous elements, transferred bytes, requested bytes) of a tile.

        Transferred bytes are those of memory, requested bytes those of its cache, both in whole transactions.
        """
        key = self.select_axes(tile)
        known = self._seen.get(key)
        if known is None:
            known = self._seen[key] = self._compute(key)
        return known

    def _compute(self, key: Tile) -> Measured:
        points = 1
        extents: Tile = ()
        for extent, table in zip(key, self.tables, strict=True):
            covered, members = table[extent]
            points *= covered
            extents += members
        # row: elements up to the innermost dimension that is not accessed whole; span: their extent
        elements = run = row = span = 1
        size, unbroken = self.elem_bytes, True
        for dim in self.dims:
            values, follow, reached = dim.measure(extents)
            elements *= values
            if unbroken:
                row, span, run = run * values, run * reached, run * follow
                unbroken = follow == dim.dim.size
        # a box around an unaligned segment of a fused axis holds more points than the segment
        inside = min(points * self.access.num_loads, elements) if self.has_all_axes else elements
        rows = inside / row
        line, cache_line = self.lines
        moved = requested = rows * line * min(row / run * -(-run * size // line), -(-span * size // line))
        if cache_line != line:
            requested = rows * cache_line * min(row / run * -(-run * size // cache_line), -(-span * size // cache_line))
        return inside, run, moved, requested

    def elements(self, tile: Tile) -> int:
        """Return the distinct elements of this tensor that a tile accesses."""
        return self.measure(tile)[0]

    def contiguous_elements(self, tile: Tile) -> int:
        """Return the length of the contiguous segments that they form."""
        return self.measure(tile)[1]

    def stream_bytes(self, tile: Tile) -> int:
        """Return the bytes from end to end of an access with no gap of more than SKIPPED_LINES; cached."""
        key = self.select_axes(tile)
        known = self._streams.get(key)
        if known is None:
            known = self._streams[key] = self._compute_stream_bytes(key)
        return known

    def _compute_stream_bytes(self, key: Tile) -> int:
        extents = tuple([n for extent, table in zip(key, self.tables, strict=True) for n in table[extent][1]])
        inner = stretch = self.elem_bytes
        longest_gap = SKIPPED_LINES * self.lines[0]
        for dim in self.dims:
            values, follow, reached = dim.measure(extents)
            is_near = (reached / values - 1) * inner <= longest_gap
            stretch = inner * (reached if is_near else follow)
            if not is_near or (dim.dim.size - reached) * inner > longest_gap:
                break
            inner *= dim.dim.size
        return stretch

    def bytes(self, tile: Tile) -> int:
        return self.measure(tile)[0] * self.elem_bytes

    @property
    def is_gathered(self) -> bool:
        """Whether data chooses the rows."""
        return any(dim.gathered_by for dim in self.access.dims)

    @property
    def times_gathered(self) -> float:
        """Return how often data chooses each row in the mean."""
        extents = {m.name: m.extent for table in self.tables for m in table.axis.members}
        times = 1.0
        for dim in self.access.dims:
            if dim.gathered_by:
                times *= max(1.0, math.prod(extents.get(name, 1) for name, _ in dim.coeffs) / dim.repeat / dim.size)
        return times

    @property
    def row_bytes(self) -> int:
        """Bytes of the whole innermost dimension."""
        return self.dims[0].dim.size * self.elem_bytes if self.dims else self.elem_bytes

    def transferred_bytes(self, tile: Tile) -> float:
        """Return the bytes that memory moves in whole transactions (ROLLER's second alignment)."""
        return self.measure(tile)[2]

    def requested_bytes(self, tile: Tile) -> float:
        """Return the bytes that the tile requests from memory's cache, in its transactions."""
        return self.measure(tile)[3]


@dataclass(frozen=True, slots=True)
class SpaceFootprint:
    """Every tensor of a space, and the space's extents."""

    space: TileSpace
    names: tuple[str, ...]  # of its axes
    extents: Tile
    accesses: tuple[AccessFootprint, ...]  # reads, then writes
    reads: tuple[AccessFootprint, ...]
    writes: tuple[AccessFootprint, ...]

    def tile(self, rtile: RTile) -> Tile:
        """Return an rTile as a tuple in the order of the space's axes."""
        values = rtile.as_dict()
        return tuple([values[name] for name in self.names])

    def rtile(self, tile: Tile) -> RTile:
        return RTile(tuple(zip(self.names, tile, strict=True)))

    def bytes(self, tile: Tile) -> int:
        """Return ROLLER's footprint: bytes of all tensors that a tile accesses."""
        return self.measure(tile)[0]

    def transferred_bytes(self, tile: Tile) -> float:
        return self.measure(tile)[1]

    def requested_bytes(self, tile: Tile) -> float:
        """Return the bytes that the tile requests from memory's cache, in its transactions."""
        return sum([access.measure(tile)[3] for access in self.accesses])

    def measure(self, tile: Tile) -> tuple[int, float]:
        """Return the bytes that a tile accesses, and those that memory moves for it."""
        accessed, moved = 0, 0.0
        for access in self.accesses:
            elements, _, transactions, _ = access.measure(tile)
            accessed += elements * access.elem_bytes
            moved += transactions
        return accessed, moved


Footprints = dict[tuple[TileSpace, Lines], SpaceFootprint]  # cache of prepared spaces


def footprint(space: TileSpace, lines: Lines) -> SpaceFootprint:
    """Prepare a space for a device with these transaction sizes."""
    tables = tuple(ExtentTable(a, a.extent, tuple(m.name for m in a.members)) for a in space.axes)
    compiled = [_compile(access, tables, lines) for access in space.accesses]
    reads = tuple(c for c in compiled if not c.access.is_output)
    writes = tuple(c for c in compiled if c.access.is_output)
    return SpaceFootprint(space, tuple(a.name for a in space.axes), tuple(t.extent for t in tables), reads + writes, reads, writes)


def extent_selector(axes: Tile) -> Callable[[Tile], Tile]:
    """Return a function that picks a tile's extents on those axes."""
    if len(axes) > 1:
        return itemgetter(*axes)
    if not axes:
        return lambda tile: ()
    (axis,) = axes
    return lambda tile: (tile[axis],)


def _compile(access: TileAccess, tables: tuple[ExtentTable, ...], lines: Lines) -> AccessFootprint:
    names = {name for dim in access.dims for name, _ in dim.coeffs}
    axes = tuple(i for i, t in enumerate(tables) if not names.isdisjoint(t.members))
    used = tuple(tables[i] for i in axes)
    term_of = {name: position for position, name in enumerate(name for t in used for name in t.members)}
    return AccessFootprint(
        access=access,
        tables=used,
        dims=tuple(_dim_footprint(dim, term_of) for dim in reversed(access.dims)),
        has_all_axes=names <= term_of.keys(),
        varies_with_reduction=any(t.axis.kind is AxisKind.REDUCE for t in used) or not names <= term_of.keys(),
        axes=axes,
        elem_bytes=access.dtype.bytes,
        address_ops=_address_ops(access, used),
        lines=lines,
        select_axes=extent_selector(axes),
        strides=_strides(access, axes, used),
    )


def _dim_footprint(dim: Dim, term_of: Mapping[str, int]) -> DimFootprint:
    if any(name not in term_of for name, _ in dim.coeffs):
        return DimFootprint(dim, None, None)
    terms = tuple(term_of[name] for name, _ in dim.coeffs)
    is_plain = len(terms) == 1 and abs(dim.coeffs[0][1]) == 1 and dim.is_affine and len(dim.offsets) == 1
    return DimFootprint(dim, extent_selector(terms), terms[0] if is_plain else None)


def _address_ops(access: TileAccess, tables: tuple[ExtentTable, ...]) -> int:
    """Return the integer operations to address one element: fused axes are split by constant divisions."""
    members = sum([len([m for m in table.axis.members if m.extent > 1]) for table in tables])
    return ADDRESS_OPS * max(1, len(access.dims)) + DIVISION_OPS * max(0, members - len(tables))


def _strides(access: TileAccess, axes: Tile, tables: tuple[ExtentTable, ...]) -> dict[int, int]:
    wide = [dim for dim in access.dims if dim.size > 1]
    if not wide or not wide[-1].is_affine:
        return {}
    steps = {name: abs(coeff) for name, coeff in wide[-1].coeffs}
    found = {}
    for position, table in zip(axes, tables, strict=True):
        inner = next((m for m in reversed(table.axis.members) if m.extent > 1), None)
        if inner is not None and inner.name in steps:
            found[position] = steps[inner.name]
    return found
