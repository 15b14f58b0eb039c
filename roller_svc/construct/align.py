"""Tile extents that ROLLER's alignment rules allow on an axis."""

from __future__ import annotations

EPSILONS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # bounds on padding, tried in order (ROLLER §3.1: from 0, grown when needed)


def round_up(extent: int, tile: int) -> int:
    """Round the extent up to whole tiles."""
    return -(-extent // tile) * tile


def within_padding(extent: int, tile: int, epsilon: float, granule: int) -> bool:
    """Return whether whole tiles exceed the tensor's shape by at most `epsilon` (fourth alignment).

    `granule` is the smallest tile of the execution unit: no shape is too small for it.
    """
    return tile <= granule or round_up(extent, tile) <= extent * (1 + epsilon)


def tile_multiples(extent: int, unit: int, epsilon: float, limit: int) -> tuple[int, ...]:
    """Return how many units of `unit` a tile may have: powers of two, divisors, and the whole axis."""
    whole = -(-extent // unit)
    tried = {1 << i for i in range(min(limit, whole).bit_length() + 1)}
    tried |= {c for c in (3, 5, 6, 7, 12, 14, 24, 28) if extent % (unit * c) == 0}
    tried.add(whole)
    return tuple(c for c in sorted(tried) if c <= limit and within_padding(extent, unit * c, epsilon, unit))


def powers_of_two(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to the first that is at least `limit`."""
    return tuple(1 << i for i in range(max(0, limit - 1).bit_length() + 1))
