"""Outer points that read the same rows: queries over one cache, or rows of a product with one matrix.

Points in flight along such an axis load each row of the largest tensor once.
"""

from __future__ import annotations

import math
from functools import cache

from roller_svc.ir.group import AxisRole, TileSpace
from roller_svc.ir.rprogram import RTile

SHARED_STEPS = (1, 2, 3, 4)
REGISTER_FRACTION = 0.5  # of the vector registers, for accumulators of points in flight; the rest is for operands


@cache
def shared_axis(space: TileSpace) -> int | None:
    """Return the innermost outer axis that the largest tensor of rows does not have; None if there is none."""
    inner = {m.name for a in space.axes if a.role is AxisRole.INNER for m in a.members}
    rows = [x for x in space.accesses if not x.is_output and any(not inner.isdisjoint(dict(dim.coeffs)) for dim in x.dims)]
    if not rows or any(not dim.is_affine for x in rows for dim in x.dims):
        return None
    streamed = max(rows, key=lambda x: x.tensor_bytes)
    moved = {name for dim in streamed.dims for name, _ in dim.coeffs}
    free = [
        i
        for i, a in enumerate(space.axes)
        if a.role is AxisRole.OUTER and a.extent > 1 and moved.isdisjoint(m.name for m in a.members) and a.name != space.vector_axis
    ]
    return free[-1] if free else None


def in_flight(space: TileSpace, thread: RTile) -> str | None:
    """Return the name of the axis along which a thread has several points that read the same rows; None without one."""
    place = shared_axis(space)
    name = None if place is None else space.axes[place].name
    return name if name is not None and thread[name] > 1 else None


def most_accumulators(registers: int) -> int:
    """Return the vectors of accumulators that leave registers for operands."""
    return math.floor(REGISTER_FRACTION * registers)


def fits_registers(vectors: int, registers: int) -> bool:
    """Return whether accumulators of a number of vectors leave registers for operands."""
    return vectors <= most_accumulators(registers)
