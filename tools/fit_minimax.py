"""Fit minimax polynomials to functions of one argument (Lawson's iteration on Chebyshev points).

`python tools/fit_minimax.py` prints every table of `roller_svc/codegen/c/vector/elementary.py` and
`roller_svc/codegen/helpers.py` with its largest weighted error. Arithmetic is decimal, 60 digits. Coefficients are
rounded one by one, the lowest power first, and the remaining ones are refitted after each rounding.
"""

from __future__ import annotations

import math
import struct
import sys
from collections.abc import Callable
from dataclasses import dataclass
from decimal import Decimal, getcontext

getcontext().prec = 60
GRID = 122  # even: no point at the midpoint, where some functions are 0 / 0
ROUNDS = 16
ONE, TWO = Decimal(1), Decimal(2)
PI = Decimal("3.14159265358979323846264338327950288419716939937510582097494459")
Function = Callable[[Decimal], Decimal]


@dataclass(frozen=True, slots=True)
class Fit:
    """Approximate `value(x)` by sum(c[i] * basis(x)**i) on [low, high], with errors weighted by `weight(x)`."""

    name: str
    value: Function
    low: str
    high: str
    count: int
    weight: Function
    basis: Function = lambda x: x
    double: bool = False

    def grid(self) -> list[Decimal]:
        low, high = Decimal(self.low), Decimal(self.high)
        nodes = [Decimal(math.cos(math.pi * i / (GRID - 1))) for i in range(GRID)]
        return sorted({(low + high) / 2 + (high - low) / 2 * t for t in nodes})


def solve(rows: list[list[Decimal]]) -> list[Decimal]:
    """Solve a square system of augmented rows."""
    n = len(rows)
    for i in range(n):
        pivot = max(range(i, n), key=lambda r: abs(rows[r][i]))
        rows[i], rows[pivot] = rows[pivot], rows[i]
        for r in range(i + 1, n):
            by = rows[r][i] / rows[i][i]
            rows[r] = [a - by * b for a, b in zip(rows[r], rows[i], strict=True)]
    found = [Decimal(0)] * n
    for i in reversed(range(n)):
        known = sum((rows[i][j] * found[j] for j in range(i + 1, n)), Decimal(0))
        found[i] = (rows[i][n] - known) / rows[i][i]
    return found


def nearest(powers: list[list[Decimal]], values: list[Decimal], weights: list[Decimal]) -> list[Decimal]:
    """Return coefficients of the columns of `powers` that nearly minimise the largest weighted error.

    Lawson's iteration (1961): weighted least squares, with weights that grow with the error of a point.
    """
    count, counts = len(powers[0]), [w * w for w in weights]
    best, least = [Decimal(0)] * count, Decimal("Infinity")
    for _ in range(ROUNDS):
        rows = [
            [_weighted(counts, powers, [row[j] for row in powers], i) for j in range(count)]
            + [_weighted(counts, powers, values, i)]
            for i in range(count)
        ]
        coefficients = solve(rows)
        errors = [
            abs(v - sum((c * p for c, p in zip(coefficients, row, strict=True)), Decimal(0))) * w
            for row, v, w in zip(powers, values, weights, strict=True)
        ]
        if max(errors) < least:
            best, least = coefficients, max(errors)
        total = sum((c * e for c, e in zip(counts, errors, strict=True)), Decimal(0))
        counts = [c * e / total for c, e in zip(counts, errors, strict=True)]
    return best


def _weighted(counts: list[Decimal], powers: list[list[Decimal]], other: list[Decimal], i: int) -> Decimal:
    return sum((c * row[i] * v for c, row, v in zip(counts, powers, other, strict=True)), Decimal(0))


def rounded(value: Decimal, *, double: bool) -> float:
    return float(value) if double else float(struct.unpack("f", struct.pack("f", float(value)))[0])


def fitted(fit: Fit) -> tuple[list[float], float]:
    """Return the rounded coefficients, lowest power first, and their largest weighted error."""
    grid = fit.grid()
    values, weights = [fit.value(x) for x in grid], [fit.weight(x) for x in grid]
    powers = [[fit.basis(x) ** i for i in range(fit.count)] for x in grid]
    kept: list[float] = []
    rest = list(values)
    for done in range(fit.count):
        following = nearest([row[done:] for row in powers], rest, weights)[0]
        kept.append(rounded(following, double=fit.double))
        rest = [r - Decimal(kept[-1]) * row[done] for r, row in zip(rest, powers, strict=True)]
    return kept, float(max(abs(r * w) for r, w in zip(rest, weights, strict=True)))


def series(x: Decimal, term: Decimal, ratio: Callable[[int], Decimal]) -> Decimal:
    """term + term r(1) + term r(1) r(2) + ... in which the terms fall away."""
    total, n = term, 0
    while abs(term) > Decimal("1e-58"):
        n += 1
        term *= ratio(n)
        total += term
    return total


def erf(x: Decimal) -> Decimal:
    """Abramowitz and Stegun 7.1.6: all terms are positive."""
    return TWO / PI.sqrt() * (-x * x).exp() * series(x, x, lambda n: TWO * x * x / (2 * n + 1))


def sine(x: Decimal) -> Decimal:
    return series(x, x, lambda n: -x * x / (2 * n * (2 * n + 1)))


def cosine(x: Decimal) -> Decimal:
    return series(x, ONE, lambda n: -x * x / (2 * n * (2 * n - 1)))


def mills(t: Decimal) -> Decimal:
    """Return (1 - Phi(x)) exp(x^2 / 2) at t = 1 / (1 + 0.36 x)."""
    x = (ONE / t - 1) / Decimal("0.36")
    return (1 - erf(x / TWO.sqrt())) / 2 * (x * x / 2).exp()


def tangent(x: Decimal) -> Decimal:
    """Return the hyperbolic tangent."""
    return 1 - TWO / ((2 * x).exp() + 1)


LN2 = TWO.ln()
HALF = Decimal("0.5")
# half of ln 2 and a little, for the reduced argument is rounded
NEAR = "0.3467"
FITS = (
    Fit("exp f32: (e^r - 1 - r) / r^2", lambda r: (r.exp() - 1 - r) / (r * r), f"-{NEAR}", NEAR, 5, lambda r: r * r),
    Fit("exp2 f32: (2^r - 1) / r", lambda r: ((r * LN2).exp() - 1) / r, "-0.5001", "0.5001", 6, abs),
    Fit(
        "log f32: (log(1 + f) - f + f^2 / 2) / f^3", lambda f: ((1 + f).ln() - f + f * f / 2) / f**3,
        "-0.292894", "0.414214", 9, lambda f: abs(f**3 / (1 + f).ln()),
    ),
    Fit(
        "erf f32: erf(x) / x - 1", lambda x: erf(x) / x - 1, "0.001", "0.93", 7, lambda x: x / erf(x), lambda x: x * x
    ),
    Fit("erfc f32: -log(erfc(x))", lambda x: -(1 - erf(x)).ln(), "0.92", "4.0", 9, lambda x: (1 - erf(x)) / erf(x)),
    Fit("upper tail: (1 - Phi(x)) exp(x^2 / 2) / t of t = 1 / (1 + 0.36 x)", lambda t: mills(t) / t, "0.1655", "1", 7,
        lambda t: t / mills(t)),
    Fit("tanh near 0: (tanh(x) - x) / x^3", lambda x: (tangent(x) - x) / x**3, "0.001", "0.41", 3,
        lambda x: x**3 / tangent(x), lambda x: x * x),
    Fit("sin f32: (sin(r) - r) / r^3", lambda r: (sine(r) - r) / r**3, "0.001", "0.7855", 3,
        lambda r: r**3 / sine(r), lambda r: r * r),
    Fit("cos f32: (cos(r) - 1 + r^2 / 2) / r^4", lambda r: (cosine(r) - 1 + r * r / 2) / r**4, "0.001", "0.7855", 3,
        lambda r: r**4 / cosine(r), lambda r: r * r),
    Fit("exp f64: (e^r - 1 - r) / r^2", lambda r: (r.exp() - 1 - r) / (r * r), f"-{NEAR}", NEAR, 10, lambda r: r * r,
        double=True),
    Fit("log f64: (log((1 + s) / (1 - s)) - 2 s) / s^3", lambda s: (((1 + s) / (1 - s)).ln() - 2 * s) / s**3,
        "0.001", "0.17158", 7, lambda s: s * s / 2, lambda s: s * s, double=True),
)  # fmt: skip


# erf(x) in segments of x: x + x q(x) in the first ones, then erf(c) + (x - c) q(x - c) with a centre c
SEGMENTS, NEAR_SEGMENTS, SEGMENT_WIDTH, SEGMENT_COUNT = 32, 4, "0.125", 5
CENTRES = 300
SEGMENTS_END = 3.9374  # beyond it erf is its value there, which rounds to 1


def centre_of_segment(number: int) -> tuple[float, float]:
    """Return a float near the middle of a segment for which erf is nearly a float, and erf there.

    Such tables have no error of their own (Gal, 1986). The centre is not above the middle, so that differences from it
    are exact in all of the segment.
    """
    middle = number * Decimal(SEGMENT_WIDTH)
    spacing = Decimal(2) ** (math.floor(math.log2(middle)) - 23)
    best = None
    for step in range(CENTRES):
        centre = middle - step * spacing
        value = erf(centre)
        error = abs(Decimal(rounded(value, double=False)) - value)
        if best is None or error < best[0]:
            best = error, float(centre), rounded(value, double=False)
    return best[1:]


def erf_segments() -> list[list[float]]:
    """Return the table of centres, that of erf of them, then those of the coefficients of q, the lowest first."""
    half, rows = Decimal(SEGMENT_WIDTH) / 2, []
    for number in range(SEGMENTS):
        middle = number * Decimal(SEGMENT_WIDTH)
        if number < NEAR_SEGMENTS:
            near = Fit(
                "",
                lambda r: erf(r) / r - 1,
                str(max(middle - half, Decimal("0.0001"))),
                str(middle + half),
                SEGMENT_COUNT,
                lambda r: r / erf(r),
            )
            rows.append([0.0, 0.0, *fitted(near)[0]])
            continue
        is_last = number == SEGMENTS - 1
        centre, value = (rounded(Decimal(SEGMENTS_END), double=False), 1.0) if is_last else centre_of_segment(number)
        at = Decimal(centre)
        low, high = middle - half - at, Decimal("-0.0001") if is_last else middle + half - at
        fit = Fit(
            "", lambda r, at=at: (erf(at + r) - erf(at)) / r, str(low), str(high), SEGMENT_COUNT, lambda r, at=at: r / erf(at + r)
        )
        rows.append([centre, value, *fitted(fit)[0]])
    return [list(column) for column in zip(*rows, strict=True)]


def main() -> None:
    wanted = sys.argv[1:]
    for fit in FITS:
        if wanted and not any(fit.name.startswith(w) for w in wanted):
            continue
        coefficients, error = fitted(fit)
        print(f"{fit.name}: error 2^{math.log2(error):.1f}")
        print("    " + ", ".join(repr(c) for c in coefficients))
    if not wanted or any("erf in segments".startswith(w) for w in wanted):
        print("erf in segments: centres, erf of them, coefficients")
        for column in erf_segments():
            print("    " + ", ".join(f"{value:.9g}" for value in column))


if __name__ == "__main__":
    main()
