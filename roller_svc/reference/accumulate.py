"""Terms of a reduction, block by block → one value an element, with its bound."""

from __future__ import annotations

import math

import numpy as np

from roller_svc.errors import InvariantError
from roller_svc.ir.accumulation import AccumulatorPrecision
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import Combine
from roller_svc.reference import rounding
from roller_svc.reference.evaluator import Term
from roller_svc.reference.values import Array, greatest, least_normal, unit_roundoff, wide_dtype, wrap

_DEVIATIONS = 8.0


def identity(combine: Combine, dtype: DType) -> int | float:
    """What a reduction starts from."""
    match combine:
        case Combine.SUM | Combine.ANY:
            return 0
        case Combine.PROD | Combine.ALL:
            return 1
        case Combine.MAX:
            return -math.inf if dtype.is_float else dtype.integer_range[0]
        case Combine.MIN:
            return math.inf if dtype.is_float else dtype.integer_range[1]


class Accumulator:
    """Values of a map (combine None) or a reduction over a box of kept dimensions, filled block by block.

    `sums`: how a matrix unit adds the terms, where one may.
    """

    def __init__(
        self, combine: Combine | None, dtype: DType, shape: tuple[int, ...], *, track: bool,
        sums: AccumulatorPrecision | None = None,
    ) -> None:  # fmt: skip
        self.combine = combine
        self.dtype = dtype
        self.track = track
        self.sums = sums
        start = 0 if combine is None else identity(combine, dtype)
        self.value = np.full(shape, start, dtype=wide_dtype(dtype))
        # Sum of the terms' own bounds; of a map or a logical reduction the greatest.
        self.error: Array | None = None
        # Of a maximum or minimum: what it is when all terms are moved down, and up, by their bounds.
        self.ends: tuple[Array, Array] | None = None
        # Sum of |terms| for a sum; product of |term| + bound for a product.
        self.magnitude = np.full(shape, 1.0 if combine is Combine.PROD else 0.0) if self._rounds else np.zeros(())
        # Sum of the terms' squares, for long sums.
        self.squares = np.zeros(shape if self._rounds and combine is Combine.SUM else ())
        self.terms = 0

    @property
    def _rounds(self) -> bool:
        return self.track and self.dtype.is_float and self.combine in (Combine.SUM, Combine.PROD)

    def add(self, region: tuple[slice, ...], full: tuple[int, ...], term: Term) -> None:
        """Joins a block's term; `full` is the block's shape, kept dimensions first, `region` their place."""
        axes = tuple(range(len(region), len(full)))
        value = np.broadcast_to(term.value, full)
        if self.track and self.combine in (Combine.MAX, Combine.MIN):
            self._add_ends(region, axes, value, term.error)
        if self.combine is None:
            self.value[region] = value
        else:
            self.value[region] = self._joined(self.value[region], value, axes)
        if self.track and self.combine not in (Combine.MAX, Combine.MIN):
            self._add_error(region, full, axes, value, term.error)

    def _joined(self, old: Array, value: Array, axes: tuple[int, ...]) -> Array:
        match self.combine:
            case Combine.SUM:
                return np.asarray(old + value.sum(axis=axes, dtype=value.dtype))
            case Combine.PROD:
                return np.asarray(old * value.prod(axis=axes, dtype=value.dtype))
            case Combine.MAX:
                return np.asarray(np.maximum(old, value.max(axis=axes)))
            case Combine.MIN:
                return np.asarray(np.minimum(old, value.min(axis=axes)))
            case Combine.ALL:
                return np.asarray((old != 0) & (value != 0).all(axis=axes))
            case Combine.ANY:
                return np.asarray((old != 0) | (value != 0).any(axis=axes))
            case None:
                raise InvariantError("a map has nothing to join")

    def _add_ends(self, region: tuple[slice, ...], axes: tuple[int, ...], value: Array, error: Array | None) -> None:
        """Before the block itself is joined."""
        if self.ends is None:
            if error is None:
                return
            self.ends = (self.value.astype(np.float64), self.value.astype(np.float64))
        for end, sign in zip(self.ends, (-1.0, 1.0), strict=True):
            moved = np.asarray(value if error is None else value + sign * error, dtype=np.float64)
            end[region] = self._joined(end[region], np.broadcast_to(moved, value.shape), axes)

    def _add_error(self, region: tuple[slice, ...], full: tuple[int, ...], axes: tuple[int, ...], value: Array,
                   error: Array | None) -> None:  # fmt: skip
        count = math.prod(full[len(region) :])
        self.terms = max(self.terms, count) if self.combine is None else self.terms + count
        bound = None if error is None else np.broadcast_to(error, full)
        if self._rounds:
            size = np.abs(value) if bound is None or self.combine is Combine.SUM else np.abs(value) + bound
            if self.combine is Combine.SUM:
                self.magnitude[region] += size.sum(axis=axes)
                self.squares[region] += np.square(size).sum(axis=axes)
            else:
                self.magnitude[region] *= size.prod(axis=axes)
        if bound is None or self.combine is Combine.PROD:
            return
        if self.error is None:
            self.error = np.zeros(self.value.shape)
        if self.combine is Combine.SUM:
            self.error[region] += bound.sum(axis=axes)
        elif axes:
            self.error[region] = np.maximum(self.error[region], bound.max(axis=axes))
        else:
            self.error[region] = bound

    def result(self, reduced_points: int) -> Term:
        """What came of it, integers within their type, after `reduced_points` terms an element."""
        value = self.value if self.dtype.is_float else wrap(self.value, self.dtype)
        if self.ends is not None:
            return Term(value, rounding.span(value.astype(np.float64), *self.ends))
        if not self._rounds:
            return Term(value, self.error)
        unit = 2.0 * unit_roundoff(self.dtype.compute)
        if self.combine is Combine.SUM:
            own = self._of_additions(value, unit, reduced_points)
        else:
            own = self.magnitude - np.abs(value) + unit * reduced_points * self.magnitude
            own = own + least_normal(self.dtype.compute)
        bound = own + (0.0 if self.error is None else self.error)
        return Term(value, self._with_infinities(value, bound))

    def _of_additions(self, value: Array, unit: float, count: int) -> Array:
        """What adding `count` terms may err by."""
        chain = count
        if self.sums is not None:
            unit = max(unit, 2.0**-self.sums.result_bits)
            chain = min(count, self.sums.promotion_interval or count)
        # Each addition errs by a unit of the partial sum, and these errors walk at random: sqrt(K) units of the
        # greatest partial sum. That is at most the sum of magnitudes; of terms that come in no order, hardly more than
        # the whole sum or a few standard deviations of a walk of the terms. Of K/c chains of c terms each, that is so
        # for every chain.
        share = chain / count
        walk = np.abs(value) * share + _DEVIATIONS * np.sqrt(self.squares * share)
        own = unit * math.sqrt(count) * np.minimum(self.magnitude, walk) + count * least_normal(self.dtype.compute)
        if self.sums is not None:
            # What is cut off is of the sign of what it is cut off from: terms of one sign all lose, of a chain's sum
            # half of the most on average.
            own = own + 0.5 * chain * self.sums.rounding_loss * np.abs(value)
        return np.asarray(own)

    def _with_infinities(self, value: Array, bound: Array) -> Array:
        """Terms that were infinite or NaN make the sum so, whatever the order; a sum that overflowed may not have."""
        unsure = np.isnan(bound) | np.isinf(bound)
        if not unsure.any() and (np.abs(value) <= greatest(self.dtype.compute)).all():
            return bound
        carried = np.zeros(()) if self.error is None else self.error
        sure = ~np.isfinite(value) & np.isinf(self.magnitude) | np.isnan(self.magnitude)
        special = np.where(sure & np.isfinite(carried), 0.0, np.inf)
        return np.where(unsure | ~(np.abs(value) <= greatest(self.dtype.compute)), special, bound)
