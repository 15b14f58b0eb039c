"""Group of a row reduction → whether its weights are unpacked in pairs, and the instructions that takes."""

from __future__ import annotations

import math
from collections.abc import Collection
from dataclasses import dataclass, replace

from roller_svc.analysis.packed_operands import FLOAT8_ARCH, PAIR_SLOTS
from roller_svc.analysis.packed_sums import PackedSum, packed_sum
from roller_svc.analysis.packed_values import is_shared
from roller_svc.ir.affine import affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import axes_of, loads_of
from roller_svc.ir.group import AxisRole, KernelGroup, TileSpace
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import StatementKind
from roller_svc.perf.footprint import Tile

VECTOR_BITS = 128  # of packed weights that a thread loads together
CHUNKS = (128, 64, 32, 16, 8)
CHUNK_ACROSS_ROWS = 8  # elements of a chunk whose pairs are adjacent rows
CHAINS_AND_TOTAL = 2
CONVERSION_SLOTS = 1.0  # float16 to float32, of each weight


@dataclass(frozen=True, slots=True)
class PackedRows:
    """Packed weights of the group's sum. Axes are positions in the space."""

    vector_elems: int  # elements of a chunk
    slots: float  # instructions that unpack one weight
    weight_axes: Tile  # outer axes that a weight depends on
    factors: int  # that multiply each weight
    shared_factors: int  # that multiply the sum of a chunk
    tensors: frozenset[str]  # that the weight reads
    row_axis: tuple[int, int] | None  # axis of the rows that are pairs, and the adjacent rows of a thread

    def applies_to(self, thread: Tile, inner: int) -> bool:
        """Return whether a thread's tile has whole chunks, and the adjacent rows that are pairs."""
        has_rows = self.row_axis is None or thread[self.row_axis[0]] == self.row_axis[1]
        return thread[inner] == self.vector_elems and has_rows

    def row_statements(self, thread: Tile, points: int) -> int:
        """Return the statements of a chunk for all rows of a thread: weights and products."""
        return self._weights(thread) + points * self.vector_elems

    def chunk_statements(self, thread: Tile, points: int) -> int:
        """Return the statements of a chunk, with copies of both factors and the sums' start and end."""
        rows = self._weights(thread) // self.vector_elems
        copies = points // rows * self.vector_elems + 2 * rows
        return self.row_statements(thread, points) + copies + CHAINS_AND_TOTAL * points

    def _weights(self, thread: Tile) -> int:
        """Return the weights of a thread's chunks."""
        weights = self.vector_elems
        for i in self.weight_axes:
            weights *= thread[i]
        return weights

    def instructions(self, thread: Tile, points: int) -> float:
        """Return the instructions of a thread for one chunk of each of its points, without loads."""
        weights = self._weights(thread)
        products = points * self.vector_elems * self.factors
        finish = points * (2.0 + self.shared_factors)
        return weights * (self.slots + CONVERSION_SLOTS) + products + finish


def unpacks_pairs(group: KernelGroup, hw: HardwareSpec) -> bool:
    """Return whether code generation unpacks pairs on the device, and the group's only loop along a row is a sum."""
    names = {a.name for a in group.outer}
    along = [s for s in group.statements if any(a.name not in names for a in s.axes)]
    if hw.arch.prefix != FLOAT8_ARCH.prefix or len(along) != 1 or along[0].kind is not StatementKind.REDUCE:
        return False
    # scales of groups are converted one by one
    rows = (load for load in loads_of(along[0].body) if load.index and affine(load.index[-1]) is not None)
    return hw.arch >= FLOAT8_ARCH or all(load.dtype is not DType.FLOAT8_E4M3FN for load in rows)


def packed_rows(group: KernelGroup, hw: HardwareSpec, vector_elems: int, vector_rows: int) -> PackedRows | None:
    """Return the packed weights of a group's rows, with the largest chunk that one load fills; None if none are packed.

    Args:
        vector_elems: Elements of a chunk of other rows.
        vector_rows: Adjacent rows of a thread; 1 where the elements of a row are adjacent.
    """
    if not unpacks_pairs(group, hw):
        return None
    statement = next(s for s in group.statements if s.kind is StatementKind.REDUCE)
    space = group.space
    (inner,) = space.role(AxisRole.INNER)
    last = inner.members[-1]
    if space.vector_axis != inner.name:
        packed = packed_sum(statement, last.name, vector_elems)
        if packed is None and vector_rows > 1 and last.extent % 2 == 0:
            packed = packed_sum(statement, space.vector_axis, vector_rows)
            vector_elems = math.gcd(last.extent, CHUNK_ACROSS_ROWS)
            place = next(i for i, a in enumerate(space.axes) if a.name == space.vector_axis)
            if packed is not None:
                return replace(_rows(space, packed, last.name, vector_elems), row_axis=(place, vector_rows))
        return None if packed is None else _rows(space, packed, last.name, vector_elems)
    chunks = [n for n in CHUNKS if n > vector_elems and last.extent % n == 0]
    choices = [
        _rows(space, packed, last.name, chunk)
        for chunk in (*chunks, vector_elems)
        if (packed := packed_sum(statement, last.name, chunk)) is not None and chunk * packed.bits <= VECTOR_BITS
    ]
    return max(choices, key=lambda rows: rows.shared_factors, default=None)


def _rows(space: TileSpace, packed: PackedSum, axis: str, chunk: int) -> PackedRows:
    shared = packed.shared_factors(axis, chunk)
    is_zero_shared = packed.zero is not None and is_shared(packed.zero, axis, chunk)
    per_chunk = chunk if is_zero_shared and packed.zero_slots >= PAIR_SLOTS else 1
    return PackedRows(
        chunk,
        packed.slots + packed.zero_slots / per_chunk,
        axis_positions(space, axes_of(packed.weight)),
        len(packed.factors) - len(shared),
        len(shared),
        frozenset(load.tensor for load in loads_of(packed.weight)),
        None,
    )


def axis_positions(space: TileSpace, names: Collection[str]) -> Tile:
    """Return the outer axes of the space that have a member among the names."""
    return tuple(i for i, a in enumerate(space.axes) if a.role is not AxisRole.INNER and any(m.name in names for m in a.members))
