"""Forward error analysis: bounds on the distance of a kernel's values from the reference's, operator by operator.

A kernel computes in its types (narrow floats in float32), the reference in float64. Each operator adds a few units of
roundoff and propagates its operands' bounds to first order. `None` marks an exact value: inputs, and integers made
from exact values. Where a value with an error decides something (a comparison, a floor, an index), the bound covers
the other decision, and is `inf` if that is unknown.

The units follow the documented accuracy of compilers and device libraries: half a unit for + - *, two for a division,
eight for a function (CUDA's float functions are within 8 ulp for ordinary arguments). Products may be contracted.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from roller_svc.analysis.scalar_ops import apply
from roller_svc.analysis.wide_values import Array, convert, max_finite, min_normal, min_subnormal, round_to, unit_roundoff
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import COMPARISONS, OpKind

Error = Array | None

_FUNCTION_UNITS = 16.0
_DIVIDE_UNITS = 4.0
_ADD_UNITS = 2.0

# These do not round: they select, clear bits or return a whole number.
_EXACT = frozenset({
    OpKind.MAX, OpKind.MIN, OpKind.FMAX, OpKind.FMIN, OpKind.CLIP, OpKind.RELU, OpKind.ABS, OpKind.NEG, OpKind.SIGN,
    OpKind.FLOOR, OpKind.CEIL, OpKind.RFLOOR, OpKind.RCEIL, OpKind.ROUND, OpKind.TRUNC, OpKind.ISNAN, OpKind.ISINF,
})  # fmt: skip
_MONOTONIC = frozenset({OpKind.MAX, OpKind.MIN, OpKind.FMAX, OpKind.FMIN, OpKind.CLIP, OpKind.RELU})
_LIPSCHITZ_ONE = frozenset({OpKind.ABS, OpKind.NEG, OpKind.SIN, OpKind.COS})
# Computed through a difference or a series around another point: the error is relative to 1, not to the result.
_ABSOLUTE = frozenset({
    OpKind.NORMCDF, OpKind.SOFTPLUS, OpKind.TANH, OpKind.SINH, OpKind.ERF, OpKind.ASINH, OpKind.ATANH, OpKind.EXPM1,
    OpKind.LOG1P, OpKind.LOG, OpKind.LOG2, OpKind.LOG10, OpKind.SIN, OpKind.COS, OpKind.TAN, OpKind.ACOSH, OpKind.ACOS,
})  # fmt: skip
_REMAINDERS = frozenset({OpKind.MOD, OpKind.FMOD, OpKind.REMAINDER})


def _or_zero(error: Error) -> Array:
    return np.zeros(()) if error is None else error


def propagate(
    kind: OpKind, operand: DType, result: DType, values: tuple[Array, ...], errors: Sequence[Error], value: Array
) -> Error:
    """Return the bound on an operator's value, from its operands and their bounds."""
    exact = all(error is None for error in errors)
    if exact and (not result.is_float or kind in _EXACT):
        return None
    if kind in COMPARISONS:
        return _comparison_error(np.abs(values[0].astype(np.float64) - values[1].astype(np.float64)), errors)
    if kind in (OpKind.LAND, OpKind.LOR, OpKind.LNOT):
        return _max_error(errors)
    bound = _rounding_error(kind, operand.compute, values, value)
    if not exact:
        bound = bound + _propagated_error(kind, operand, result, values, errors, value)
    return _bound_special_values(bound, values, errors, value, operand.compute)


def _max_error(errors: Sequence[Error]) -> Array:
    bound = np.zeros(())
    for error in errors:
        bound = np.maximum(bound, _or_zero(error))
    return bound


def _comparison_error(distance: Array, errors: Sequence[Error]) -> Array:
    """Return 1 where the operands of a comparison are close enough for the other result to be possible, else 0."""
    total = np.asarray(sum(_or_zero(error) for error in errors))
    # A NaN distance means NaN operands or equal infinities: certain unless a bound is infinite.
    undecided = (total > 0) & ~(distance > total) & (np.isfinite(distance) | np.isinf(total))
    return np.asarray(undecided, dtype=np.float64)


def _rounding_error(kind: OpKind, compute: DType, values: tuple[Array, ...], value: Array) -> Array:
    """Return the bound on the operator's own rounding error."""
    if not compute.is_float or kind in _EXACT:
        return np.zeros(())
    unit = unit_roundoff(compute)
    tiny = 8.0 * min_normal(compute)
    if kind in (OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.SQUARE):
        return np.asarray(_ADD_UNITS * unit * np.abs(value) + tiny)
    if kind is OpKind.FMA:
        return np.asarray(_ADD_UNITS * unit * (np.abs(value) + np.abs(values[0] * values[1])) + tiny)
    if kind in (OpKind.DIV, OpKind.RECIPROCAL, OpKind.SQRT, OpKind.RSQRT):
        return _DIVIDE_UNITS * unit * np.abs(value) + tiny
    if kind in _REMAINDERS:
        return unit * np.abs(value) + tiny
    if kind in _ABSOLUTE:
        return _FUNCTION_UNITS * unit * (np.abs(value) + 1.0)
    if kind in (OpKind.GELU, OpKind.SILU):
        return _FUNCTION_UNITS * unit * (np.abs(value) + np.minimum(np.abs(values[0]), 1.0)) + tiny
    if kind in (OpKind.EXP, OpKind.EXP2, OpKind.POW, OpKind.SIGMOID, OpKind.COSH):
        # Argument reduction costs relative error in proportion to the exponent of the result.
        exponent = np.abs(np.log2(np.maximum(np.abs(value), 1e-300)))
        return unit * np.abs(value) * (_FUNCTION_UNITS + 2.0 * exponent) + tiny
    return _FUNCTION_UNITS * unit * np.abs(value) + tiny


def _propagated_error(
    kind: OpKind, operand: DType, result: DType, values: tuple[Array, ...], errors: Sequence[Error], value: Array
) -> Array:
    """Return the bound on the error that the operands' errors cause."""
    e = [_or_zero(error) for error in errors]
    if kind in (OpKind.ADD, OpKind.SUB):
        return e[0] + e[1]
    if kind is OpKind.MUL:
        return _product_error(values[0], e[0], values[1], e[1])
    if kind is OpKind.FMA:
        return _product_error(values[0], e[0], values[1], e[1]) + e[2]
    if kind in _LIPSCHITZ_ONE:
        return e[0]
    if kind in _MONOTONIC:
        ends = (_apply_shifted(kind, operand, values, e, sign) for sign in (-1.0, 1.0))
        return interval_radius(value.astype(np.float64), *ends)
    if kind is OpKind.DIV:
        margin = np.abs(values[1]) - e[1]
        return np.where(margin > 0, (e[0] + np.abs(value) * e[1]) / np.where(margin > 0, margin, 1.0), np.inf)
    if kind in _REMAINDERS and operand.is_float:
        return _remainder_error(values, e)
    if not operand.is_float:
        return np.where(_max_error(errors) > 0, np.inf, 0.0)
    return _function_error(kind, operand, result, values, e, value)


def _apply_shifted(kind: OpKind, operand: DType, values: tuple[Array, ...], e: list[Array], sign: float) -> Array:
    """Apply the operator to operands that are all shifted up, or all down, by their errors."""
    moved = tuple(np.asarray(v + sign * d) for v, d in zip(values, e, strict=True))
    # Integers are computed in floats too: their errors are not integers, and these operators give the same results.
    return apply(kind, operand if operand.is_float else DType.FLOAT64, DType.FLOAT64, moved)


def interval_radius(value: Array, low: Array, high: Array) -> Array:
    """Return the larger distance of the two ends from the value; 0 where they are equal, even if infinite or NaN.

    An infinite term of unknown error has NaN as an end, which may be anywhere.
    """
    distance = np.maximum(np.where(high == value, 0.0, high - value), np.where(low == value, 0.0, value - low))
    return np.where(np.isnan(value), 0.0, np.where(np.isnan(distance), np.inf, distance))


def _product_error(a: Array, error_a: Array, b: Array, error_b: Array) -> Array:
    return np.asarray(np.abs(a) * error_b + np.abs(b) * error_a + error_a * error_b)


def _remainder_error(values: tuple[Array, ...], e: list[Array]) -> Array:
    x, y = np.abs(values[0]), np.abs(values[1])
    drift = e[0] + e[1] * (x / y + 1.0)
    remainder = np.fmod(2.0 * x, y)  # also 0 half way, where the IEEE remainder jumps
    near = (drift > 0) & ((remainder <= 2.0 * drift) | (y - remainder <= 2.0 * drift))
    return np.where(near, y, drift)


def _function_error(kind: OpKind, operand: DType, result: DType, values: tuple[Array, ...], e: list[Array], value: Array) -> Array:
    """Return how far the function moves when its operands move by their errors; `inf` outside its domain."""
    bound: Array = np.zeros(())
    centre = value.astype(np.float64)
    for signs in itertools.product((-1.0, 1.0), repeat=len(values)):
        corner = tuple(np.asarray(v + s * d) for v, s, d in zip(values, signs, e, strict=True))
        moved = apply(kind, operand, result, corner).astype(np.float64)
        bound = np.maximum(bound, np.nan_to_num(np.abs(moved - centre), nan=np.inf))
    return np.asarray(bound)


def _bound_special_values(bound: Array, values: tuple[Array, ...], errors: Sequence[Error], value: Array, compute: DType) -> Array:
    """Return the bound where values are infinite or NaN.

    The result of infinite or NaN operands is as certain as they are. If this operator itself produced the infinity or
    NaN, or exceeded the range of the kernel's type, a kernel with slightly different operands may not do so.
    """
    with_range = compute if compute.is_float else DType.FLOAT64
    limit = max_finite(with_range)
    # Fast path: all values are finite (comparisons with NaN are false).
    if value.max() <= limit and value.min() >= -limit and bound.max() < np.inf:
        return bound
    out_of_range = ~(np.abs(value.astype(np.float64)) <= limit)
    worst = _max_error(errors)
    from_special = np.zeros((), dtype=bool)
    for operand_value in values:
        from_special = from_special | ~np.isfinite(operand_value.astype(np.float64))
    sure = np.where(np.isinf(worst), np.inf, 0.0)
    fresh = np.where(np.isfinite(value) & out_of_range, np.inf, np.where(worst > 0, np.inf, 0.0))
    special = np.where(from_special, sure, fresh)
    return np.where(out_of_range | (from_special & ~np.isfinite(bound)), special, np.nan_to_num(bound, nan=np.inf))


def cast_error(value: Array, error: Error, source: DType, target: DType, *, rounded: bool) -> Error:
    """Return the bound after a conversion of `value`; `rounded` where the reference rounds too."""
    if target.is_float:
        return _float_cast_error(value, error, source, target, rounded=rounded)
    if error is None:
        return None
    if not source.is_float:
        return error
    moved = [convert(np.asarray(value + s * error), source, target, rounded=True) for s in (-1.0, 1.0)]
    return np.asarray(np.abs(moved[1].astype(np.float64) - moved[0].astype(np.float64)))


def _float_cast_error(value: Array, error: Error, source: DType, target: DType, *, rounded: bool) -> Error:
    if source.is_float and unit_roundoff(source) >= unit_roundoff(target):
        if error is None or not rounded:
            return error
    elif error is None and rounded:
        return None
    size = np.abs(value.astype(np.float64))
    if not source.is_float and (size * unit_roundoff(target) < 1.0).all():
        return error  # an integer that the type holds exactly
    # Reference and kernel may round in opposite directions: one whole step of the type.
    step = (2.0 if rounded else 1.0) * unit_roundoff(target) * size + min_subnormal(target)
    bound = _or_zero(error) + np.where(np.isfinite(size), step, 0.0)
    return np.where(size > max_finite(target), np.where(_or_zero(error) > 0, np.inf, bound), bound)


def store_error(value: Array, error: Error, dtype: DType) -> Error:
    """Return the bound of a stored float, which a kernel may or may not round to the tensor's type."""
    if not dtype.is_float:
        return error
    fits = (round_to(value, dtype) == value) | np.isnan(value)
    if error is None and fits.all():
        return None
    size = np.abs(value)
    step = np.where(np.isfinite(size), unit_roundoff(dtype) * size, 0.0) + min_subnormal(dtype)
    carried = _or_zero(error)
    return np.where(fits & (carried == 0), 0.0, carried + step)


def select_error(condition: Error, then: tuple[Array, Error], otherwise: tuple[Array, Error], taken: Array) -> Error:
    """Return the bound of a Select. An uncertain condition adds the distance of the branches."""
    if condition is None and then[1] is None and otherwise[1] is None:
        return None
    chosen = np.where(taken, _or_zero(then[1]), _or_zero(otherwise[1]))
    if condition is None:
        return chosen
    difference = np.abs(then[0].astype(np.float64) - otherwise[0].astype(np.float64))
    either = _max_error((then[1], otherwise[1])) + np.nan_to_num(difference, nan=np.inf)
    return np.where(condition > 0, either, chosen)
