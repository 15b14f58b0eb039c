"""Winograd's minimal filtering F(m x m, 3 x 3): exact transforms from interpolation points, and their rounding errors.

Y = A^T [(G g G^T) * (B^T d B)] A for a tile d of m + 2 by m + 2 inputs and a filter g of 3 by 3 taps (Winograd, 1980;
Lavin and Gray, arXiv:1509.09308). The transforms follow from m + 1 finite points and the point at infinity by the
construction of Toom and Cook.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

Row = tuple[Fraction, ...]
Matrix = tuple[Row, ...]

TAPS = 3
# Points by output tile. Those of F(4 x 4) have the smallest mean error of all pairs +-p, +-q of eighths.
POINTS: dict[int, tuple[Fraction, ...]] = {
    2: (Fraction(0), Fraction(1), Fraction(-1)),
    4: (Fraction(0), Fraction(5, 8), Fraction(-5, 8), Fraction(3, 2), Fraction(-3, 2)),
}
UNIT_ROUNDOFF = 2.0**-24  # of float32
DEVIATIONS = 5.0  # standard deviations that an error bound covers
MAX_RELATIVE_ERROR = 5e-5  # of an output's scale: half of what whole models promise (docs/models.md)


@dataclass(frozen=True, slots=True)
class Transforms:
    """Matrices of F(m x m, 3 x 3). All entries of `inputs` and `outputs` are exact in float32."""

    m: int
    outputs: Matrix  # A^T: m rows
    filters: Matrix  # G: m + 2 rows of 3
    inputs: Matrix  # B^T: m + 2 rows

    @property
    def size(self) -> int:
        """Return the extent of an input tile."""
        return self.m + TAPS - 1

    @property
    def positions(self) -> int:
        """Return the products of one tile, filter and channel."""
        return self.size**2


@cache
def transforms(m: int) -> Transforms:
    """Return the transforms for output tiles of m x m."""
    points = POINTS[m]
    inputs: list[Row] = []
    filters: list[Row] = []
    for i, point in enumerate(points):
        others = [p for j, p in enumerate(points) if j != i]
        scale = math.prod((point - p for p in others), start=Fraction(1))
        inputs.append((*_monic(others), Fraction(0)))
        filters.append(tuple(point**k / scale for k in range(TAPS)))
    inputs.append(_monic(points))
    filters.append((*(Fraction(0) for _ in range(TAPS - 1)), Fraction(1)))
    outputs = tuple((*(p**k for p in points), Fraction(int(k == m - 1))) for k in range(m))
    return Transforms(m, outputs, tuple(filters), tuple(inputs))


def _monic(roots: tuple[Fraction, ...] | list[Fraction]) -> Row:
    """Return the coefficients of the product of (x - root), constant first."""
    coefficients = [Fraction(1)]
    for root in roots:
        shifted = [Fraction(0), *coefficients]
        coefficients = [a - root * b for a, b in zip(shifted, [*coefficients, Fraction(0)], strict=True)]
    return tuple(coefficients)


def error_amplification(m: int) -> float:
    """Return how much larger relative rounding errors of the products are in the worst output of a tile.

    Errors are compared by their standard deviations, for independent inputs and taps of mean 0. Direct convolution
    has 1.
    """
    matrices = transforms(m)
    energy = [
        _sum_of_squares(taps) * _sum_of_squares(inputs) for taps, inputs in zip(matrices.filters, matrices.inputs, strict=True)
    ]
    rows = (sum(a * a * e for a, e in zip(row, energy, strict=True)) for row in matrices.outputs)
    return float(max(rows)) / TAPS  # the square root of its square, for two dimensions


def relative_error_bound(m: int, channels: int) -> float:
    """Return a bound on the errors of F(m x m, 3 x 3) relative to the standard deviation of the outputs.

    A sum of C products rounds its partial sums, whose variances grow linearly: sqrt(C / 2) roundings of the whole sum.
    Each transform rounds `size` times in each dimension, and the transformed filter once. Roundings are independent
    (Higham and Mary, SIAM J. Sci. Comput. 41, 2019), and the bound covers 5 standard deviations.
    """
    roundings = channels / 2 + 4 * transforms(m).size + 1
    return DEVIATIONS * UNIT_ROUNDOFF / math.sqrt(3) * error_amplification(m) * math.sqrt(roundings)


def is_accurate(m: int, channels: int) -> bool:
    """Return whether F(m x m, 3 x 3) with that number of channels is accurate enough without the caller's consent."""
    return m == 2 or relative_error_bound(m, channels) <= MAX_RELATIVE_ERROR


def _sum_of_squares(row: Row) -> Fraction:
    return sum((x * x for x in row), start=Fraction(0))
