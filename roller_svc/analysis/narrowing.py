"""Numbers → elements of narrow floating types, rounded once.

ml_dtypes converts float64 and integers by way of float32, which rounds twice. Rounding to odd (Boldo and Melquiond,
"Emulation of FMA and correctly rounded sums", 2008) makes the second rounding that of the number itself.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from roller_svc.ir.dtype import DType

Array = NDArray[Any]

NARROW_FLOATS: dict[DType, np.dtype[Any]] = {
    DType.FLOAT16: np.dtype(np.float16),
    DType.BFLOAT16: np.dtype(ml_dtypes.bfloat16),
    DType.FLOAT8_E4M3FN: np.dtype(ml_dtypes.float8_e4m3fn),
    DType.FLOAT8_E5M2: np.dtype(ml_dtypes.float8_e5m2),
}
FLOAT8_MAX = {DType.FLOAT8_E4M3FN: 448.0, DType.FLOAT8_E5M2: 57344.0}

_FLOAT64_BITS = 53  # of the significand
_UNIT = 1 << (64 - _FLOAT64_BITS)  # float64 has every multiple of it among integers of 64 bits


def round_to_narrow(values: Array, dtype: DType) -> Array:
    """Round numbers to the elements of a narrow floating type: to nearest even, once. float8 saturates."""
    if dtype in FLOAT8_MAX:
        values = np.clip(values, -FLOAT8_MAX[dtype], FLOAT8_MAX[dtype])
    with np.errstate(over="ignore", invalid="ignore"):
        return _round_to_odd(values).astype(NARROW_FLOATS[dtype])


def _round_to_odd(values: Array) -> Array:
    """Round numbers to float32: those that it does not represent to the neighbour whose last bit is one."""
    if values.dtype.kind in "iu":
        values = _round_integers_to_odd(values)
    near = values.astype(np.float32)
    back = near.astype(np.float64)
    inexact = (back != values) & (values == values)
    if not inexact.any():
        return near
    bits = near.view(np.uint32)
    odd = (bits - (np.abs(back) > np.abs(values))) | 1
    return np.where(inexact, odd, bits).astype(np.uint32).view(np.float32)


def _round_integers_to_odd(values: Array) -> Array:
    """Round integers to float64. In those beyond 2^53, the bits below the significand's last one set that bit."""
    above = values >> _FLOAT64_BITS
    is_large = (above != 0) & (above != -1 if values.dtype.kind == "i" else True)
    step = values.dtype.type(_UNIT)
    rest = values % (2 * step)
    odd = values - rest + np.where(rest != 0, step, values.dtype.type(0))
    return np.where(is_large, odd, values).astype(np.float64)
