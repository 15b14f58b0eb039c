"""Evaluate linear recurrences step by step, with a bound that holds for steps that are composed in any order."""

from __future__ import annotations

import numpy as np

from roller_svc.analysis.wide_values import Array, max_finite, min_normal, unit_roundoff, wide_dtype, wrap
from roller_svc.ir.dtype import DType
from roller_svc.semantics.evaluator import Term

STEP_UNITS = 4.0  # of roundoff: a product and a sum, and the products of gates


def run_recurrence(
    gate: Term, initial: Term, value: Term, along: int, dtype: DType, is_reversed: bool, may_reset: bool, *, track: bool
) -> Term:
    """Return `state = gate * state + value` at each point along a dimension.

    Args:
        gate: factors of the state.
        initial: the state before the first step, which does not vary along the dimension.
        value: what each step adds.
        along: the dimension.
        dtype: the type of the state.
        is_reversed: whether the last element comes first.
        may_reset: whether a gate of zero forgets the state, even if that is infinite or NaN.
        track: whether the result has a bound.
    """

    def steps(array: Array) -> Array:
        moved = np.moveaxis(np.broadcast_to(array, value.value.shape), along, 0)
        return moved[::-1] if is_reversed else moved

    gates, values = steps(gate.value), steps(value.value)
    state = steps(initial.value)[0]
    result = np.empty(values.shape, dtype=wide_dtype(dtype))
    for t, (factor, added) in enumerate(zip(gates, values, strict=True)):
        after = factor * state + added
        after = np.where(factor == 0, added, after) if may_reset else after
        state = after if dtype.is_float else wrap(after, dtype)
        result[t] = state
    error = None
    if track and dtype.is_float:
        errors = [None if term.error is None else steps(term.error) for term in (gate, initial, value)]
        error = _bound(gates, steps(initial.value)[0], values, result, errors, dtype, may_reset)
    elif track and any(term.error is not None for term in (gate, initial, value)):
        error = np.full(result.shape, np.inf)

    def restored(array: Array) -> Array:
        return np.moveaxis(array[::-1] if is_reversed else array, 0, along)

    return Term(restored(result), None if error is None else restored(error))


def _bound(
    gates: Array, initial: Array, values: Array, result: Array, errors: list[Array | None], dtype: DType, may_reset: bool
) -> Array:
    """Return the bound on each state: roundoff in proportion to the sum of the magnitudes of its terms.

    Products of consecutive gates after a state that is not zero, and sums of magnitudes, that leave the type's range
    make later states unsure: a kernel that composes steps forms them. So does an infinite state, which a product that underflows may make NaN, or
    forget where a gate may reset.
    """
    gate_error, initial_error, value_error = errors
    unit, tiny, largest = STEP_UNITS * unit_roundoff(dtype.compute), min_normal(dtype.compute), max_finite(dtype.compute)
    magnitude = np.abs(initial)
    error = np.zeros(initial.shape) if initial_error is None else initial_error[0].copy()
    product, greatest = np.zeros(initial.shape), magnitude.copy()
    unsure = np.zeros(initial.shape, dtype=bool)
    previous = initial
    bounds = np.empty(result.shape)
    for t, (gate, value) in enumerate(zip(gates, values, strict=True)):
        factor = np.abs(gate)
        is_reset = (gate == 0) & may_reset
        kept = np.where(is_reset, 0.0, factor)
        wide = factor if gate_error is None else factor + gate_error[t]
        carried = wide * error + (0.0 if gate_error is None else gate_error[t] * magnitude)
        before = np.where(is_reset, 0.0, magnitude)
        magnitude = kept * before + np.abs(value)
        product = np.where(is_reset, 0.0, factor * np.maximum(product, previous != 0))
        is_lost = np.isinf(previous) | (may_reset & np.isnan(previous) & (gate != 1))
        unsure = np.where(is_reset, False, unsure | is_lost)
        unsure |= (product > largest) & np.isfinite(factor) | (magnitude > largest) & np.isfinite(value)
        greatest = np.where(is_reset, np.abs(value), np.maximum(greatest, magnitude))
        error = np.where(is_reset, 0.0, carried) + unit * magnitude + np.where(magnitude > 0, tiny * (1.0 + greatest), 0.0)
        if value_error is not None:
            error = error + value_error[t]
        is_special = np.isnan(result[t]) | np.isinf(value)
        bound = np.where(is_special, 0.0, np.where(np.isfinite(result[t]) & np.isfinite(error), error, np.inf))
        bounds[t] = np.where(unsure, np.inf, bound)
        previous = result[t]
    return bounds
