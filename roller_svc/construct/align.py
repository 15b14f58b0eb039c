"""Axis extent → the tile extents that ROLLER's alignment rules allow on it."""

from __future__ import annotations

EPSILONS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # bounds on padding, tried in turn (ROLLER §3.1: from 0, grown when needed)


def round_up(extent: int, tile: int) -> int:
    """The extent rounded up to whole tiles."""
    return -(-extent // tile) * tile


def within_padding(extent: int, tile: int, epsilon: float, granule: int) -> bool:
    """Fourth alignment: whole tiles exceed the tensor's shape by at most `epsilon`.

    `granule` is the least tile that the execution unit can work on: no shape is too small for it.
    """
    return tile <= granule or round_up(extent, tile) <= extent * (1 + epsilon)


def tile_multiples(extent: int, unit: int, epsilon: float, limit: int) -> tuple[int, ...]:
    """How many units of `unit` a tile may hold on an axis: powers of two, and what divides the axis or covers it."""
    whole = -(-extent // unit)
    tried = {1 << i for i in range(min(limit, whole).bit_length() + 1)}
    tried |= {c for c in (3, 5, 6, 7, 12, 14, 24, 28) if extent % (unit * c) == 0}
    tried.add(whole)
    return tuple(c for c in sorted(tried) if c <= limit and within_padding(extent, unit * c, epsilon, unit))


def powers_of_two(limit: int) -> tuple[int, ...]:
    """1, 2, 4, ... up to the first that reaches `most`."""
    return tuple(1 << i for i in range(max(0, limit - 1).bit_length() + 1))
