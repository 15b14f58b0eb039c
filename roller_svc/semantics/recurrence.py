"""Evaluate linear recurrences step by step, with a bound that holds for steps that are composed in any order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from roller_svc.analysis.scans import gate_product_dtype
from roller_svc.analysis.wide_values import Array, max_finite, min_normal, unit_roundoff, wide_dtype, wrap
from roller_svc.ir.dtype import DType
from roller_svc.semantics.evaluator import Term

STEP_UNITS = 4.0  # of roundoff: a product and a sum, and the products of gates


@dataclass(frozen=True, slots=True)
class LinearSteps:
    """`state = gate * state + value` at each point along the dimension `along`.

    `initial`, the state before the first step, does not vary along it. Where `may_reset`, a gate of zero forgets the
    state, even if that is infinite or NaN.
    """

    gate: Term
    initial: Term
    value: Term
    along: int
    dtype: DType  # of the state
    is_reversed: bool
    may_reset: bool

    def run(self, shape: tuple[int, ...], *, track: bool) -> Term:
        """Return the states, with their bounds if `track`: then those that may be anything are infinite."""
        gates, values = self._steps(self.gate.value, shape), self._steps(self.value.value, shape)
        state = self._steps(self.initial.value, shape)[0]
        result = np.empty(values.shape, dtype=wide_dtype(self.dtype))
        for t, (gate, value) in enumerate(zip(gates, values, strict=True)):
            after = gate * state + value
            after = np.where(gate == 0, value, after) if self.may_reset else after
            state = after if self.dtype.is_float else wrap(after, self.dtype)
            result[t] = state
        found = self._bound(gates, values, result, shape) if track else None
        if found is None:
            return Term(self._restored(result))
        error, is_free = found
        if is_free.any():  # never of integers
            result = np.where(is_free & np.isfinite(result), np.copysign(np.inf, result), result)
        return Term(self._restored(result), self._restored(error))

    def _steps(self, array: Array, shape: tuple[int, ...]) -> Array:
        """Return the array with the steps first, in their order."""
        moved = np.moveaxis(np.broadcast_to(array, shape), self.along, 0)
        return moved[::-1] if self.is_reversed else moved

    def _restored(self, array: Array) -> Array:
        return np.moveaxis(array[::-1] if self.is_reversed else array, 0, self.along)

    def _bound(self, gates: Array, values: Array, result: Array, shape: tuple[int, ...]) -> tuple[Array, Array] | None:
        """Return the bound on each state, and whether it may be anything.

        Bounds are roundoff in proportion to the sum of the magnitudes of a state's terms.

        Sums of magnitudes that leave the type's range make later states unsure, as products of consecutive gates do that
        leave the range of their type after a state that is not zero: a kernel that composes steps forms them. So does an
        infinite state, which a product that underflows may make NaN. Where that sum leaves the range for the first time,
        the state may be anything only if its terms cancel: parts of it may be infinities of both signs.
        """
        found = [None if part.error is None else self._steps(part.error, shape) for part in (self.gate, self.initial, self.value)]
        if not self.dtype.is_float:
            unknown = np.full(result.shape, np.inf)
            return None if found == [None] * 3 else (unknown, np.zeros(result.shape, dtype=bool))
        gate_errors, initial_errors, value_errors = (np.zeros(result.shape) if error is None else error for error in found)
        compute = self.dtype.compute
        unit, tiny, largest = STEP_UNITS * unit_roundoff(compute), min_normal(compute), max_finite(compute)
        largest_product = max_finite(gate_product_dtype(compute))
        previous, error = self._steps(self.initial.value, shape)[0], initial_errors[0]
        magnitude = greatest = np.abs(previous)
        product, unsure = np.zeros(previous.shape), np.zeros(previous.shape, dtype=bool)
        bounds, free = np.empty(result.shape), np.empty(result.shape, dtype=bool)
        for t, (gate, value) in enumerate(zip(gates, values, strict=True)):
            factor = np.abs(gate)
            is_reset = (gate == 0) & self.may_reset
            carried = (factor + gate_errors[t]) * error + gate_errors[t] * magnitude
            magnitude = np.where(is_reset, 0.0, factor * magnitude) + np.abs(value)
            product = np.where(is_reset, 0.0, factor * np.maximum(product, previous != 0))
            unsure = ~is_reset & (unsure | np.isinf(previous))
            unsure |= (product > largest_product) & np.isfinite(factor)
            free[t] = unsure | (magnitude - np.abs(result[t]) > largest)
            unsure |= (magnitude > largest) & np.isfinite(value)
            greatest = np.where(is_reset, np.abs(value), np.maximum(greatest, magnitude))
            underflow = np.where(magnitude > 0, tiny * (1.0 + greatest), 0.0)
            error = np.where(is_reset, 0.0, carried) + unit * magnitude + underflow + value_errors[t]
            is_special = np.isnan(result[t]) | np.isinf(value)
            bound = np.where(is_special, 0.0, np.where(np.isfinite(result[t]) & np.isfinite(error), error, np.inf))
            bounds[t] = np.where(unsure, np.inf, bound)
            previous = result[t]
        return bounds, free
