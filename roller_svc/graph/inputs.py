"""Random inputs of models."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from roller_svc.graph.weights import Array
from roller_svc.ir.dtype import DType
from roller_svc.runtime.binding import numpy_dtype

MAX_INTEGER = 4  # integers are below it: they may be indices


def random_arrays(inputs: Iterable[tuple[str, str, tuple[int, ...]]], seed: int = 0) -> dict[str, Array]:
    """Return an array for each (name, dtype, shape): normal numbers, small integers, or truth values."""
    rng = np.random.default_rng(seed)
    arrays: dict[str, Array] = {}
    for name, dtype_name, shape in inputs:
        dtype = DType(dtype_name)
        if dtype.is_float:
            arrays[name] = rng.standard_normal(shape).astype(numpy_dtype(dtype))
        else:
            arrays[name] = rng.integers(0, 2 if dtype is DType.BOOL else MAX_INTEGER, shape).astype(numpy_dtype(dtype))
    return arrays
