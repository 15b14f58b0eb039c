"""Powers of integers, as the language defines them, on numpy arrays."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]


def raise_integers(x: Array, y: Array) -> Array:
    """Return the truncated real power modulo 2^64. A negative power is 0 unless the base is 1 or -1."""
    x, y = np.broadcast_arrays(x, y)
    result, base, exponent = np.ones_like(x), x.copy(), np.where(y < 0, np.zeros_like(y), y)
    while exponent.any():
        result = np.where(exponent & exponent.dtype.type(1), result * base, result)
        base = base * base
        exponent = exponent >> exponent.dtype.type(1)
    if y.dtype == np.uint64:
        return result
    of_minus_one = np.where(y & 1, -1, 1)
    return np.where(y < 0, np.where(x == 1, 1, np.where(x == -1, of_minus_one, 0)), result)
