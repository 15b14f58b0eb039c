"""A model for a GPU, on its device or in the emulator."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from threading import Lock
from typing import Any, Never, Protocol

import numpy as np

from roller_svc.errors import ArgumentError
from roller_svc.ir.model_plan import ModelPlan
from roller_svc.runtime.binding import Array


class Runner(Protocol):
    """A loaded model."""

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Any]: ...


class GpuModel:
    """A model with its weights in host memory. It is loaded at the first call."""

    def __init__(self, plan: ModelPlan, weights: Array, load: Callable[[], Runner]) -> None:
        self.plan = plan
        self.weights = weights
        self.packed: Array = np.empty(0, np.uint8)  # packed on the device
        self._load = load
        self._runner: Runner | None = None
        self._lock = Lock()

    @property
    def runner(self) -> Runner:
        with self._lock:
            if self._runner is None:
                self._runner = self._load()
            return self._runner

    def run(self, arrays: Mapping[str, object], out: Mapping[str, object] | None = None) -> dict[str, Any]:
        """Return the outputs by name; write them to arrays in `out` if given."""
        return self.runner.run(arrays, out)

    def profile(self, _: Mapping[str, object], __: Mapping[str, object] | None = None) -> Never:
        """Raise ArgumentError."""
        raise ArgumentError(f"{self.plan.target} is a GPU, and profiles are of CPUs", code="unsupported-target")
