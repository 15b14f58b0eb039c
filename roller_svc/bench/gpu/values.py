"""A program, the number of a set → its input arrays: plain random ones, and such that find what those do not."""

from __future__ import annotations

from enum import Enum

import numpy as np
from numpy.typing import NDArray

from roller_svc.bench.gpu.cases.check import Check
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram
from roller_svc.reference.inputs import random_inputs
from roller_svc.reference.values import least_normal, narrow
from roller_svc.runtime.binding import Array


class Values(Enum):
    """What the floating inputs of a set hold. All but PLAIN leave inputs with hints, and integers, as they are."""

    PLAIN = "plain"
    CANCELLING = "cancelling"  # neighbours that nearly cancel in a sum, and are a thousand times what is left of them
    TINY = "tiny"  # at most the least normal number of their type, and zeros of both signs
    SPECIAL = "special"  # a few infinities and NaN: what is padded, masked or skipped must not meet them


_SET_ORDER = (Values.PLAIN, Values.SPECIAL, Values.CANCELLING, Values.TINY, Values.PLAIN)
# What a mask or a bound of a loop leaves out is near these: the first, the last, and one in between.
_SPECIALS = (np.inf, np.nan, -np.inf)
_CANCELLING = 8.0  # at most, so that products of two stay finite in float8 and sums of many in float16


def values_of(number: int) -> Values:
    """Of the set of that number: a fifth of all sets for each of the three, beginning with a plain one."""
    return _SET_ORDER[number % len(_SET_ORDER)]


def inputs(program: TensorProgram, number: int, check: Check) -> dict[str, Array]:
    """The arrays of one set, the same each time."""
    values, arrays = values_of(number), dict(random_inputs(program, number, check.hints))
    if values is Values.PLAIN:
        return arrays
    rng, unchanged = np.random.default_rng((number, 1)), {*check.hints, *(check.finite if values is Values.SPECIAL else ())}
    for name, kind in program.inputs:
        if kind.dtype.is_float and name not in unchanged and arrays[name].size:
            wide = arrays[name].astype(np.float64).reshape(-1)
            changed = _replace_values(values, wide, kind.dtype, rng)
            arrays[name] = narrow(changed, kind.dtype).reshape(kind.shape)
    return arrays


def _replace_values(
    values: Values, flat: NDArray[np.float64], dtype: DType, rng: np.random.Generator
) -> NDArray[np.float64]:
    match values:
        case Values.CANCELLING if flat.min() < 0:  # else positive, because a function's domain is
            large = np.repeat(rng.uniform(1.0, _CANCELLING, -(-flat.size // 2)), 2)[: flat.size]
            return large * np.where(np.arange(flat.size) % 2, 1.0, -1.0) + flat / 1024
        case Values.TINY:
            return flat * least_normal(dtype) * (rng.random(flat.size) < 0.75)
        case Values.SPECIAL:
            places = (0, flat.size // 2, flat.size - 1)
            for place, special in zip(places, _SPECIALS, strict=True):
                flat[place] = special
    return flat
