"""Wide values: every element type represented in float64, int64 or uint64, and the conversions between types.

A float stays a float64 until it is rounded by `round_to` or `narrow`. An integer is always within its type's range.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from roller_svc.analysis.narrowing import FLOAT8_MAX, NARROW_FLOATS, round_to_narrow
from roller_svc.ir.dtype import DType

Array = NDArray[Any]

_STORAGE: dict[DType, np.dtype[Any]] = {d: NARROW_FLOATS.get(d) or np.dtype(d.value) for d in DType}

# Bits of the significand behind the leading one.
_FRACTION_BITS = {
    DType.FLOAT64: 52, DType.FLOAT32: 23, DType.BFLOAT16: 7, DType.FLOAT16: 10,
    DType.FLOAT8_E4M3FN: 3, DType.FLOAT8_E5M2: 2,
}  # fmt: skip
_MIN_NORMAL = {
    DType.FLOAT64: 2.0**-1022, DType.FLOAT32: 2.0**-126, DType.BFLOAT16: 2.0**-126, DType.FLOAT16: 2.0**-14,
    DType.FLOAT8_E4M3FN: 2.0**-6, DType.FLOAT8_E5M2: 2.0**-14,
}  # fmt: skip
_MAX_FINITE = {
    DType.FLOAT64: float(np.finfo(np.float64).max), DType.FLOAT32: float(np.finfo(np.float32).max),
    DType.BFLOAT16: 2.0**128 - 2.0**120, DType.FLOAT16: 65504.0,
} | FLOAT8_MAX  # fmt: skip


def storage_dtype(dtype: DType) -> np.dtype[Any]:
    """Return the numpy or ml_dtypes type of the caller's arrays."""
    return _STORAGE[dtype]


def wide_dtype(dtype: DType) -> np.dtype[Any]:
    """Return float64, int64 or, for uint64 only, uint64."""
    if dtype.is_float:
        return np.dtype(np.float64)
    return np.dtype(np.uint64 if dtype is DType.UINT64 else np.int64)


def unit_roundoff(dtype: DType) -> float:
    """Return the largest relative error of rounding to nearest: 2^-24 for float32, 0 for integers."""
    return 2.0 ** -(_FRACTION_BITS[dtype] + 1) if dtype.is_float else 0.0


def min_normal(dtype: DType) -> float:
    """Return the smallest normal number, the bound on what flushing subnormal numbers loses."""
    return _MIN_NORMAL[dtype]


def min_subnormal(dtype: DType) -> float:
    return _MIN_NORMAL[dtype] * 2.0 ** -_FRACTION_BITS[dtype]


def max_finite(dtype: DType) -> float:
    """Return the largest finite number of a floating type."""
    return _MAX_FINITE[dtype]


def widen(array: Array, dtype: DType) -> Array:
    """Convert an array of the type's storage to wide values."""
    return array.astype(wide_dtype(dtype))


def narrow(values: Array, dtype: DType) -> Array:
    """Round wide values to the type, in its storage. Floats round to nearest even; float8 saturates."""
    if dtype.is_narrow_float:
        return round_to_narrow(values, dtype)
    with np.errstate(over="ignore", invalid="ignore"):
        return values.astype(_STORAGE[dtype])


def round_to(values: Array, dtype: DType) -> Array:
    """Round wide values to a floating type. The result is wide."""
    rounded = values if dtype is DType.FLOAT64 else narrow(values, dtype)
    return rounded.astype(np.float64, copy=False)


def wrap(values: Array, dtype: DType) -> Array:
    """Reduce wide integers modulo 2^bits to an integer type; bool is "not 0"."""
    if dtype is DType.BOOL:
        return np.asarray(values != 0).astype(np.int64)
    return values.astype(_STORAGE[dtype]).astype(wide_dtype(dtype))


def truncate(values: Array, dtype: DType) -> Array:
    """Convert wide floats to an integer type: towards zero, saturating, NaN to 0; bool is "not 0", NaN included."""
    if dtype is DType.BOOL:
        return np.asarray(values != 0).astype(np.int64)
    low, high = dtype.integer_range
    # float(high) of 64-bit types is 2^63 or 2^64: values at or above it saturate, below it the conversion is exact.
    inside = (values > float(low) - 1.0) & (values < float(high))
    whole = np.where(inside, np.trunc(np.where(inside, values, 0.0)), 0.0).astype(wide_dtype(dtype))
    top = np.asarray(high, dtype=wide_dtype(dtype))
    bottom = np.asarray(low, dtype=wide_dtype(dtype))
    saturated = np.where(values >= float(high), top, np.where(values <= float(low) - 1.0, bottom, whole))
    return np.asarray(saturated)


def convert(values: Array, source: DType, target: DType, *, rounded: bool) -> Array:
    """Convert wide values of one type to another. Floats are rounded to the target only if `rounded`."""
    if target.is_float:
        return round_to(values, target if rounded else DType.FLOAT64)
    if source.is_float:
        return truncate(values, target)
    return values if source is target else wrap(values, target)
