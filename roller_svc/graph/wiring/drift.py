"""Watch a committed model for calls that have become slower than those of its trials."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Mapping
from typing import Any

from roller_svc.fork_lock import ForkLock
from roller_svc.ir.model_plan import ModelPlan
from roller_svc.runtime.binding import Array
from roller_svc.runtime.graphs.cpu import CpuModel, Moment

TIMED_EVERY = 4096  # calls
WINDOW = 16  # timed calls, of which the least seconds count
WINDOWS = 2  # slower ones in a row
SLOWER_RATIO = 1.15  # to the seconds of the trials


class WatchedModel:
    """A model, some of whose calls are timed. Calls may overlap."""

    def __init__(
        self,
        model: CpuModel,
        expected_s: float | None,
        on_drift: Callable[[], None],
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """Take the model.

        Args:
            model: runs the calls.
            expected_s: the least seconds of its calls in trials; None for those of the first window.
            on_drift: is called after a call that ends the last of several windows of slower calls.
            clock: returns seconds.
        """
        self.model = model
        self._expected_s = expected_s
        self._on_drift = on_drift
        self._clock = clock
        self._calls = itertools.count(1)
        self._lock = ForkLock()
        self._least_s = math.inf
        self._timed = self._slower = 0

    @property
    def plan(self) -> ModelPlan:
        """The model's plan."""
        return self.model.plan

    @property
    def weights(self) -> Array:
        """The model's weights."""
        return self.model.weights

    @property
    def packed(self) -> Array:
        """The model's packed weights."""
        return self.model.packed

    def profile(self, arrays: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> list[Moment]:
        """Run the model and return the moments of its steps."""
        return self.model.profile(arrays, out)

    def run(self, arrays: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> dict[str, Array]:
        """Return the outputs by name, as CpuModel.run does."""
        results = self.run_plain(arrays, out)
        return self.model.run(arrays, out) if results is None else results

    def run_plain(self, arrays: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> dict[str, Array] | None:
        """Run the model on arrays as they are, as CpuModel.run_plain does. Calls of other arrays are not timed."""
        if next(self._calls) % TIMED_EVERY:
            return self.model.run_plain(arrays, out)
        start_s = self._clock()
        results = self.model.run_plain(arrays, out)
        if results is not None and self._has_drifted(self._clock() - start_s):
            self._on_drift()
        return results

    def _has_drifted(self, seconds: float) -> bool:
        """Add a timed call; return whether it ends the last of the windows."""
        with self._lock:
            self._least_s = min(self._least_s, seconds)
            self._timed += 1
            if self._timed < WINDOW:
                return False
            least_s, self._least_s, self._timed = self._least_s, math.inf, 0
            self._expected_s = least_s if self._expected_s is None else self._expected_s
            self._slower = self._slower + 1 if least_s > SLOWER_RATIO * self._expected_s else 0
            return self._slower > 0 and self._slower % WINDOWS == 0
