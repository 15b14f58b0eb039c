"""Accumulate the terms of a reduction block by block, with an error bound for each element."""

from __future__ import annotations

import math

import numpy as np

from roller_svc.analysis.wide_values import Array, max_finite, min_normal, unit_roundoff, wide_dtype, wrap
from roller_svc.errors import InvariantError
from roller_svc.ir.accumulation import AccumulatorPrecision
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import Combine, identity
from roller_svc.semantics import rounding
from roller_svc.semantics.evaluator import Term

_DEVIATIONS = 8.0
_ACCUMULATE = {
    Combine.SUM: np.add.accumulate,
    Combine.PROD: np.multiply.accumulate,
    Combine.MAX: np.maximum.accumulate,
    Combine.MIN: np.minimum.accumulate,
}


class Accumulator:
    """Values of a map (`combine` None) or a reduction over a box of spatial dimensions, filled block by block."""

    def __init__(
        self,
        combine: Combine | None,
        dtype: DType,
        shape: tuple[int, ...],
        *,
        track: bool,
        accumulation: AccumulatorPrecision | None = None,
    ) -> None:
        self.combine = combine
        self.dtype = dtype
        self.track = track
        self.accumulation = accumulation  # how a matrix unit adds the terms, if one may
        start = 0 if combine is None else identity(combine, dtype).value
        self.value = np.full(shape, start, dtype=wide_dtype(dtype))
        # Sum of the terms' own bounds; for a map or a logical reduction their maximum.
        self.error: Array | None = None
        # Maximum and minimum only: the result with all terms moved down, and up, by their bounds.
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
        """Add a block's term. `full`: the block's shape, spatial dimensions first; `region`: their slices."""
        axes = tuple(range(len(region), len(full)))
        value = np.broadcast_to(term.value, full)
        if self.track and self.combine in (Combine.MAX, Combine.MIN):
            self._add_ends(region, axes, value, term.error)
        if self.combine is None:
            self.value[region] = value
        else:
            self.value[region] = self._combine(self.value[region], value, axes)
        if self.track and self.combine not in (Combine.MAX, Combine.MIN):
            self._add_error(region, full, axes, value, term.error)

    def scan(self, term: Term, dim: int, *, is_reversed: bool, is_exclusive: bool) -> None:
        """Set each element to the reduction of the terms up to it along a dimension; of those from it on if reversed."""
        shape = self.value.shape

        def running(terms: Array, start: Array, combine: Combine) -> Array:
            terms = np.flip(terms, dim) if is_reversed else terms
            result = np.asarray(_ACCUMULATE[combine](terms, axis=dim, dtype=terms.dtype))
            if is_exclusive:
                first = np.take(start, [0], axis=dim)
                result = np.concatenate([first, np.take(result, range(shape[dim] - 1), axis=dim)], axis=dim)
            return np.flip(result, dim) if is_reversed else result

        if self.combine is None:
            raise InvariantError("a map has no terms to combine")
        value = np.broadcast_to(term.value, shape)
        bound = None if term.error is None else np.broadcast_to(term.error, shape)
        is_extremum = self.combine in (Combine.MAX, Combine.MIN)
        if self.track and is_extremum and bound is not None:
            low, high = (np.asarray(value + sign * bound, dtype=np.float64) for sign in (-1.0, 1.0))
            start = self.value.astype(np.float64)
            self.ends = (running(low, start, self.combine), running(high, start, self.combine))
        if self._rounds:
            size = np.abs(value) if bound is None or self.combine is Combine.SUM else np.abs(value) + bound
            if self.combine is Combine.SUM:
                self.squares = running(np.square(size), self.squares, Combine.SUM)
            self.magnitude = running(size, self.magnitude, self.combine)
        if bound is not None and self.combine is Combine.SUM:
            self.error = running(bound, np.zeros(shape), Combine.SUM)
        self.value = running(value, self.value, self.combine)

    def _combine(self, old: Array, value: Array, axes: tuple[int, ...]) -> Array:
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
            case Combine.RECURRENCE | None:
                raise InvariantError("a map, or a recurrence, has no terms to combine in any order")

    def _add_ends(self, region: tuple[slice, ...], axes: tuple[int, ...], value: Array, error: Array | None) -> None:
        """Update `ends` before the block itself is added."""
        if self.ends is None:
            if error is None:
                return
            self.ends = (self.value.astype(np.float64), self.value.astype(np.float64))
        for end, sign in zip(self.ends, (-1.0, 1.0), strict=True):
            moved = np.asarray(value if error is None else value + sign * error, dtype=np.float64)
            end[region] = self._combine(end[region], np.broadcast_to(moved, value.shape), axes)

    def _add_error(
        self, region: tuple[slice, ...], full: tuple[int, ...], axes: tuple[int, ...], value: Array, error: Array | None
    ) -> None:
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
        """Return the reduced values after `reduced_points` terms an element, with integers wrapped to their type."""
        value = self.value if self.dtype.is_float else wrap(self.value, self.dtype)
        if self.ends is not None:
            return Term(value, rounding.interval_radius(value.astype(np.float64), *self.ends))
        if not self._rounds:
            return Term(value, self.error)
        unit = 2.0 * unit_roundoff(self.dtype.compute)
        if self.combine is Combine.SUM:
            own = self._addition_error(value, unit, reduced_points)
        else:
            own = self.magnitude - np.abs(value) + unit * reduced_points * self.magnitude
            own = own + min_normal(self.dtype.compute)
        bound = own + (0.0 if self.error is None else self.error)
        return Term(value, self._bound_special_values(value, bound))

    def _addition_error(self, value: Array, unit: float, count: int) -> Array:
        """Return the error that adding `count` terms may cause."""
        chain = count
        if self.accumulation is not None:
            unit = max(unit, 2.0**-self.accumulation.result_bits)
            chain = min(count, self.accumulation.promotion_interval or count)
        # Each addition errs by a unit of the partial sum, and the errors are a random walk: sqrt(K) units of the
        # largest partial sum. That is at most the sum of magnitudes. For terms in random order it is hardly more than
        # the whole sum or a few standard deviations of the terms' random walk. With K/c chains of c terms each, this
        # holds for every chain.
        fraction = chain / count
        typical = np.abs(value) * fraction + _DEVIATIONS * np.sqrt(self.squares * fraction)
        own = unit * math.sqrt(count) * np.minimum(self.magnitude, typical) + count * min_normal(self.dtype.compute)
        if self.accumulation is not None:
            # Truncation errs towards zero: if all terms have one sign, every addition loses magnitude, on average half
            # of the maximum loss of a chain.
            own = own + 0.5 * chain * self.accumulation.rounding_loss * np.abs(value)
        return np.asarray(own)

    def _bound_special_values(self, value: Array, bound: Array) -> Array:
        """Return the bound where sums are infinite or NaN.

        An infinite or NaN term makes the sum infinite or NaN in any order. An overflow depends on the order.
        """
        unsure = np.isnan(bound) | np.isinf(bound)
        if not unsure.any() and (np.abs(value) <= max_finite(self.dtype.compute)).all():
            return bound
        carried = np.zeros(()) if self.error is None else self.error
        sure = ~np.isfinite(value) & np.isinf(self.magnitude) | np.isnan(self.magnitude)
        special = np.where(sure & np.isfinite(carried), 0.0, np.inf)
        return np.where(unsure | ~(np.abs(value) <= max_finite(self.dtype.compute)), special, bound)
