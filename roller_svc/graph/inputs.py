"""Random inputs of models, and the arrays of timed calls."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from roller_svc.graph.weights import Array
from roller_svc.ir.dtype import DType
from roller_svc.ir.model_plan import ModelPlan
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


@dataclass(frozen=True, slots=True)
class Sample:
    """The arrays of timed calls, each of which finds the states as the first one does."""

    inputs: Mapping[str, Any]
    states: Mapping[str, Any]  # the arrays that calls update
    initial: Mapping[str, Array]  # the values of the states before a call
    copy_into: Callable[[Any, Array], None] = np.copyto

    def restore(self) -> Mapping[str, Any]:
        """Give the states their values before a call, and return them. Callers time the call without it."""
        for name, array in self.states.items():
            self.copy_into(array, self.initial[name])
        return self.states


def draw_sample(plan: ModelPlan, seed: int = 0) -> Sample:
    """Return random arrays for a plan."""
    inputs, states = (
        random_arrays(((name, t.dtype.value, t.shape) for name, t in each), seed) for each in (plan.inputs, plan.states)
    )
    return Sample(inputs, {name: array.copy() for name, array in states.items()}, states)
