"""Tile extents that ROLLER's alignment rules allow on an axis."""

from __future__ import annotations

EPSILONS = (0.0, 0.2, 0.4, 0.6, 0.8, 1.0)  # bounds on padding, tried in order (ROLLER §3.1: from 0, grown when needed)


def round_up(extent: int, tile: int) -> int:
    """Round the extent up to whole tiles."""
    return -(-extent // tile) * tile


def within_padding(extent: int, tile: int, epsilon: float, granule: int) -> bool:
    """Return whether whole tiles exceed what whole granules cover by at most `epsilon` (fourth alignment).

    `granule` is the smallest tile of the execution unit: its padding is there with all tiles. Larger tiles exceed the
    tensor's shape by the last bound at most.
    """
    padded = round_up(extent, tile)
    bound = min(round_up(extent, granule) * (1 + epsilon), extent * (1 + EPSILONS[-1]))
    return tile <= granule or padded <= bound


def tile_multiples(extent: int, unit: int, epsilon: float, limit: int) -> tuple[int, ...]:
    """Return how many units of `unit` a tile may have: powers of two, the whole axis, and others that pad little.

    Others pad nothing, or no more than the power of two below and less than the one above.
    """
    whole = -(-extent // unit)
    tried = {1 << i for i in range(min(limit, whole).bit_length() + 1)}
    tried |= {c for c in (3, 5, 6, 7, 12, 14, 24, 28) if c < whole and _pads_little(whole, c, limit)}
    tried.add(whole)
    return tuple(c for c in sorted(tried) if c <= limit and within_padding(extent, unit * c, epsilon, unit))


def _pads_little(whole: int, count: int, limit: int) -> bool:
    """Return whether `count` units are worth a try beside powers of two up to `limit`, on an axis of `whole` units."""
    padded, below = round_up(whole, count), 1 << (count.bit_length() - 1)
    is_largest = 2 * below > limit
    return padded == whole or (round_up(whole, below) >= padded and (is_largest or padded < round_up(whole, 2 * below)))


def powers_of_two(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to the first that is at least `limit`."""
    return tuple(1 << i for i in range(max(0, limit - 1).bit_length() + 1))
