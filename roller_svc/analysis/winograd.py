"""Winograd's minimal filtering: exact transforms from interpolation points, and their rounding errors.

F(m, 3) is y = A^T [(G g) * (B^T d)] for a tile d of m + 2 inputs and a filter g of 3 taps. F(m x m, 3 x 3) has the
transforms along both dimensions: Y = A^T [(G g G^T) * (B^T d B)] A (Winograd, 1980; Lavin and Gray, arXiv:1509.09308).
Under taps that are apart, the outputs of a tile are as far apart: those between belong to other tiles. The transforms
follow from m + 1 finite points and the point at infinity by the construction of Toom and Cook.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from fractions import Fraction
from functools import cache

from roller_svc.ir.expr import Expr
from roller_svc.ir.index import add, div, mod, mul, num

Row = tuple[Fraction, ...]
Matrix = tuple[Row, ...]

TAPS = 3
# Points by output tile. Those of F(4 x 4) have the smallest mean error of all pairs +-p, +-q of eighths.
POINTS: dict[int, tuple[Fraction, ...]] = {
    2: (Fraction(0), Fraction(1), Fraction(-1)),
    4: (Fraction(0), Fraction(5, 8), Fraction(-5, 8), Fraction(3, 2), Fraction(-3, 2)),
}
UNIT_ROUNDOFF = 2.0**-24  # of float32
# Standard deviations that an error bound covers, by the dimensions that are transformed. A rounding error is relative to
# a partial sum, so errors are mixtures of normal ones; an output along one dimension has few products to average them.
DEVIATIONS = {1: 8.0, 2: 5.0}
MAX_RELATIVE_ERROR = 5e-5  # of an output's scale: half of what whole models promise (docs/models.md)


@dataclass(frozen=True, slots=True)
class Transforms:
    """Matrices of F(m, 3). All entries of `inputs` and `outputs` are exact in float32."""

    m: int
    outputs: Matrix  # A^T: m rows
    filters: Matrix  # G: m + 2 rows of 3
    inputs: Matrix  # B^T: m + 2 rows

    @property
    def size(self) -> int:
        """Return the extent of an input tile."""
        return self.m + TAPS - 1


@cache
def transforms(m: int) -> Transforms:
    """Return the transforms for output tiles of m along a dimension."""
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


def error_amplification(m: int, dims: int = 2) -> float:
    """Return how much larger relative rounding errors of the products are in the worst output of a tile.

    `dims`: dimensions that are transformed. Errors are compared by their standard deviations, for independent inputs and
    taps of mean 0. Direct convolution has 1.
    """
    matrices = transforms(m)
    energy = [
        _sum_of_squares(taps) * _sum_of_squares(inputs) for taps, inputs in zip(matrices.filters, matrices.inputs, strict=True)
    ]
    rows = (sum(a * a * e for a, e in zip(row, energy, strict=True)) for row in matrices.outputs)
    return math.pow(float(max(rows)) / TAPS, dims / 2)  # the square root of the product over dimensions


def relative_error_bound(m: int, channels: int, dims: int = 2) -> float:
    """Return a bound on the errors of F(m, 3) along some dimensions, relative to the standard deviation of the outputs.

    A sum of C products rounds its partial sums, whose variances grow linearly: sqrt(C / 2) roundings of the whole sum.
    Each transform rounds `size` times in each dimension, and the transformed filter once. Roundings are independent
    (Higham and Mary, SIAM J. Sci. Comput. 41, 2019), and the bound covers 5 standard deviations, 8 of one dimension.
    """
    roundings = channels / 2 + 2 * dims * transforms(m).size + 1
    return DEVIATIONS[dims] * UNIT_ROUNDOFF / math.sqrt(3) * error_amplification(m, dims) * math.sqrt(roundings)


def is_accurate(m: int, channels: int, dims: int = 2) -> bool:
    """Return whether F(m, 3) with that number of channels is accurate enough without the caller's consent."""
    return m == 2 or relative_error_bound(m, channels, dims) <= MAX_RELATIVE_ERROR


# places of tiles ----------------------------------------------------------------------------------------------------
def first_of_tile(tile: Expr, m: int, dilation: int) -> Expr:
    """Return the first output of a tile along a dimension, whose outputs are `dilation` apart."""
    return add(mul(div(tile, dilation), num(m * dilation)), mod(tile, dilation))


def tile_of(output: Expr, m: int, dilation: int) -> Expr:
    """Return the tile of an output along a dimension."""
    return add(mul(div(output, m * dilation), num(dilation)), mod(output, dilation))


def place_in_tile(output: Expr, m: int, dilation: int) -> Expr:
    """Return the number of an output in its tile."""
    return mod(div(output, dilation), m)


def _sum_of_squares(row: Row) -> Fraction:
    return sum((x * x for x in row), start=Fraction(0))
