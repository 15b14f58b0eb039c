"""TileSpace → functions from a tile to the elements and runs each tensor contributes, fast enough to search with.

A tile is a tuple of extents in the order of the space's axes. Results are remembered by the extents of those axes that
the tensor walks, so growing one axis recomputes only the tensors that depend on it.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from roller_svc.ir.group import TileAccess, TileAxis, TileSpace
from roller_svc.ir.rprogram import RTile

Tile = tuple[int, ...]


@dataclass(slots=True)
class AccessFootprint:
    """One tensor of the space. `axes` are the positions of the tile axes that it walks."""

    access: TileAccess
    tile_axes: tuple[TileAxis, ...]
    axes: tuple[int, ...]
    elem_bytes: int
    _seen: dict[Tile, tuple[int, int]] = field(default_factory=dict)

    def _measure(self, tile: Tile) -> tuple[int, int]:
        key = tuple([tile[i] for i in self.axes])
        known = self._seen.get(key)
        if known is None:
            known = self._seen[key] = self._compute(key)
        return known

    def _compute(self, key: Tile) -> tuple[int, int]:
        reach: dict[str, int] = {}
        points = 1
        for axis, extent in zip(self.tile_axes, key, strict=True):
            whole = axis.extent
            extent = min(extent, whole)
            points *= extent
            reach |= axis.member_extents(extent)
        # a box around an unaligned run of a fused axis holds more points than the run
        return min(points, self.access.tile_elements(reach)), self.access.contiguous_elements(reach)

    def elements(self, tile: Tile) -> int:
        """Distinct elements of this tensor that a tile touches."""
        return self._measure(tile)[0]

    def run(self, tile: Tile) -> int:
        """Elements of the runs of neighbours that they form."""
        return max(1, self._measure(tile)[1])

    def bytes(self, tile: Tile) -> int:
        return self._measure(tile)[0] * self.elem_bytes

    def moved_bytes(self, tile: Tile, transaction_bytes: int) -> float:
        """Bytes that memory moves for the tile when it moves whole transactions (ROLLER's second alignment)."""
        elements, run = self._measure(tile)
        run_bytes = max(1, run) * self.elem_bytes
        return elements * self.elem_bytes * (-(-run_bytes // transaction_bytes) * transaction_bytes / run_bytes)

    def unit_stride_axis(self) -> int | None:
        """Position of the tile axis whose neighbours are neighbours in this tensor; None where there is none."""
        if not self.access.dims or self.access.dims[-1].opaque:
            return None
        steps = {name for name, coeff in self.access.dims[-1].coeffs if abs(coeff) == 1}
        for position, axis in zip(self.axes, self.tile_axes, strict=True):
            inner = next((m for m in reversed(axis.members) if m.extent > 1), None)
            if inner is not None and inner.name in steps:
                return position
        return None


@dataclass(frozen=True, slots=True)
class SpaceFootprint:
    """Every tensor of a space, and the space's extents."""

    space: TileSpace
    extents: Tile
    reads: tuple[AccessFootprint, ...]
    writes: tuple[AccessFootprint, ...]

    @property
    def accesses(self) -> tuple[AccessFootprint, ...]:
        return self.reads + self.writes

    def tile(self, rtile: RTile) -> Tile:
        """An rTile as a tuple in the order of the space's axes."""
        values = rtile.as_dict()
        return tuple([values[a.name] for a in self.space.axes])

    def rtile(self, tile: Tile) -> RTile:
        return RTile(tuple(zip([a.name for a in self.space.axes], tile, strict=True)))

    def bytes(self, tile: Tile) -> int:
        """ROLLER's footprint: bytes of all tensors that a tile touches."""
        return sum([a.bytes(tile) for a in self.reads]) + sum([a.bytes(tile) for a in self.writes])

    def moved_bytes(self, tile: Tile, transaction_bytes: int) -> float:
        return sum([a.moved_bytes(tile, transaction_bytes) for a in self.accesses])


def footprint(space: TileSpace) -> SpaceFootprint:
    """Prepare a space for searching."""
    compiled = [_compile(space, access) for access in space.accesses]
    return SpaceFootprint(
        space,
        tuple(a.extent for a in space.axes),
        tuple(c for c in compiled if not c.access.is_output),
        tuple(c for c in compiled if c.access.is_output),
    )


def _compile(space: TileSpace, access: TileAccess) -> AccessFootprint:
    walked = {name for dim in access.dims for name, _ in dim.coeffs}
    axes = tuple(i for i, a in enumerate(space.axes) if any(m.name in walked for m in a.members))
    return AccessFootprint(access, tuple(space.axes[i] for i in axes), axes, access.dtype.bytes)


def distinct_bytes(space: SpaceFootprint) -> int:
    """Compulsory traffic: every touched element of every tensor once."""
    return space.bytes(space.extents)

