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


def matrix_tile_multiples(extent: int, unit: int, epsilon: float, limit: int) -> tuple[int, ...]:
    """Return the same for granules of a matrix unit, which are large: padding within them is there with all tiles.

    Counts besides powers of two may pad a little. Tiles exceed the tensor's shape by the last bound at most.
    """
    whole = -(-extent // unit)
    tried = {1 << i for i in range(min(limit, whole).bit_length() + 1)}
    tried |= {c for c in (3, 5, 6, 7, 12, 14, 24, 28) if c < whole and _pads_little(whole, c, limit)}
    tried.add(whole)
    bound = min(round_up(extent, unit) * (1 + epsilon), extent * (1 + EPSILONS[-1]))
    return tuple(c for c in sorted(tried) if c <= limit and (c == 1 or round_up(extent, unit * c) <= bound))


def _pads_little(whole: int, count: int, limit: int) -> bool:
    """Return whether `count` units pad nothing, or no more than the power of two below and less than the one above."""
    padded, below = round_up(whole, count), 1 << (count.bit_length() - 1)
    is_largest = 2 * below > limit
    return padded == whole or (round_up(whole, below) >= padded and (is_largest or padded < round_up(whole, 2 * below)))


def powers_of_two(limit: int) -> tuple[int, ...]:
    """Return 1, 2, 4, ... up to the first that is at least `limit`."""
    return tuple(1 << i for i in range(max(0, limit - 1).bit_length() + 1))
