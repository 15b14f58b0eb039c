"""Generate the input sets of a program: random values, cancelling sums, tiny numbers, infinities and NaN."""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from roller_bench.gpu.cases.check import Check
from roller_svc.analysis.wide_values import min_normal, narrow
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram
from roller_svc.runtime.binding import Array
from roller_svc.semantics.inputs import random_inputs


class Values(Enum):
    """The kind of floating-point values in a set. All but PLAIN leave integers and inputs with hints unchanged."""

    PLAIN = "plain"
    CANCELLING = "cancelling"  # neighbours nearly cancel in a sum; they are 1000 times its value
    TINY = "tiny"  # at most the smallest normal number of the type, and zeros of both signs
    SPECIAL = "special"  # a few infinities and NaN: padded, masked or skipped elements must not use them


_SET_ORDER = (Values.PLAIN, Values.SPECIAL, Values.CANCELLING, Values.TINY, Values.PLAIN)
# Placed at the first, the last and the middle element, near the bounds of loops and masks.
_SPECIALS = (np.inf, np.nan, -np.inf)
_CANCELLING = 8.0  # upper bound: products of two are finite in float8, sums of many in float16


def values_of(number: int) -> Values:
    """Return the kind of a set by its number. Each of the three special kinds is a fifth of the sets."""
    return _SET_ORDER[number % len(_SET_ORDER)]


def inputs(program: TensorProgram, number: int, check: Check) -> dict[str, Array]:
    """Return the arrays of one set, deterministically."""
    values, arrays = values_of(number), dict(random_inputs(program, number, check.hints))
    if values is Values.PLAIN:
        return arrays
    rng, unchanged = (
        np.random.default_rng((number, 1)),
        {*check.hints, *(check.finite if values is Values.SPECIAL else ())},
    )
    for name, kind in program.inputs:
        if kind.dtype.is_float and name not in unchanged and arrays[name].size:
            wide = arrays[name].astype(np.float64).reshape(-1)
            changed = _replace_values(values, wide, kind.dtype, rng)
            arrays[name] = narrow(changed, kind.dtype).reshape(kind.shape)
    return arrays


def _replace_values(values: Values, flat: NDArray[np.float64], dtype: DType, rng: np.random.Generator) -> NDArray[np.float64]:
    match values:
        case Values.CANCELLING if flat.min() < 0:  # else positive, because a function's domain is
            large = np.repeat(rng.uniform(1.0, _CANCELLING, -(-flat.size // 2)), 2)[: flat.size]
            return large * np.where(np.arange(flat.size) % 2, 1.0, -1.0) + flat / 1024
        case Values.TINY:
            return flat * min_normal(dtype) * (rng.random(flat.size) < 0.75)
        case Values.SPECIAL:
            positions = (0, flat.size // 2, flat.size - 1)
            for position, special in zip(positions, _SPECIALS, strict=True):
                flat[position] = special
    return flat
