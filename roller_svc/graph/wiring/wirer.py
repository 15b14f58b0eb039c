"""Measure models in the calls of users: each answers its call, and one explores at a time (ASTRA's custom-wirer)."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from threading import Condition
from typing import Any

import numpy as np

from roller_svc.errors import IndexRangeError, LaunchError
from roller_svc.runtime.binding import Array
from roller_svc.runtime.graphs.cpu import CpuCalls, CpuModel, Moment

Results = dict[str, Array]


class ExploringEndedError(Exception):
    """Nothing more is to be measured."""


@dataclass(frozen=True, slots=True)
class TimedCall:
    """A call that measured a model."""

    seconds: float
    moments: Sequence[Moment] = ()
    failure: str = ""  # why another model has answered; then nothing was measured


@dataclass(slots=True)
class _Offer:
    """A model that the next call is to measure."""

    model: CpuCalls
    is_profiled: bool
    is_taken: bool = False
    timed: TimedCall | None = None


class Wirer:
    """A model whose calls measure others that compute the same. Calls may overlap.

    A model that fails in a call, or gives a NaN that the model itself does not give, does not answer it. A call with arrays
    of others than numpy in `out`, or beside it, measures nothing: what they share is not known.
    """

    def __init__(self, load: Callable[[], CpuModel], share: float = 0.5, clock: Callable[[], float] = time.perf_counter) -> None:
        """Take the model.

        Args:
            load: loads the model.
            share: the greatest fraction of calls that measure.
            clock: returns seconds.
        """
        self._load = load
        self._share = share
        self._clock = clock
        self._condition = Condition()
        self._model: CpuModel | None = None
        self._offer: _Offer | None = None
        self._is_ended = False
        self._calls = self._measured = self._running = 0
        self._ended_s = clock()  # when the last call ended
        self.on_first_call: Callable[[], None] | None = None  # is called once, when the first call has its results

    @property
    def model(self) -> CpuModel:
        """The model that answers all calls that measure nothing: at first as it was compiled."""
        with self._condition:
            if self._model is None:
                self._model = self._load()
            return self._model

    def use(self, model: CpuModel) -> None:
        """Let another model answer the calls that measure nothing."""
        with self._condition:
            self._model = model

    @property
    def weights(self) -> Array:
        """The model's weights."""
        return self.model.weights

    @property
    def packed(self) -> Array:
        """The model's packed weights."""
        return self.model.packed

    def profile(self, arrays: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> list[Moment]:
        """Run the model as it was compiled, and return the moments of its steps."""
        return self.model.profile(arrays, out)

    def run(self, arrays: Mapping[str, Any], out: Mapping[str, Any] | None = None) -> Results:
        """Return the outputs by name, as CpuModel.run does."""
        offer = self._take(
            may_measure=out is None or all(isinstance(each, np.ndarray) for each in (*arrays.values(), *out.values()))
        )
        try:
            if offer is not None:
                return self._measure(offer, arrays, out)
            results = self.model.run(arrays, out)
        finally:
            with self._condition:
                self._running -= 1
                self._ended_s = self._clock()
        started, self.on_first_call = self.on_first_call, None
        if started is not None:
            started()
        return results

    def time_call(self, model: CpuCalls, *, is_profiled: bool = False, patience_s: float = math.inf) -> TimedCall | None:
        """Wait until a call has measured a model. Raises ExploringEndedError.

        Returns None once there was no call for the seconds of `patience_s`.
        """
        offer = _Offer(model, is_profiled)
        with self._condition:
            self._offer = offer
            try:
                while offer.timed is None:
                    if self._is_ended and not offer.is_taken:
                        raise ExploringEndedError
                    left_s = patience_s if self._running else patience_s - (self._clock() - self._ended_s)
                    if left_s <= 0:
                        return None
                    self._condition.wait(None if left_s == math.inf else left_s)
                return offer.timed
            finally:
                self._offer = None

    def end(self) -> None:
        """Measure nothing more: whoever waits for a call gets ExploringEndedError."""
        with self._condition:
            self._is_ended = True
            self._condition.notify_all()

    def resume(self) -> None:
        """Measure again after an end."""
        with self._condition:
            self._is_ended = False

    def renew_in_fork(self) -> None:
        """Forget the calls of threads that a fork does not have, and the lock that one may hold."""
        self._condition, self._offer, self._running = Condition(), None, 0

    def _take(self, *, may_measure: bool) -> _Offer | None:
        """Return what a call measures: the offer, unless another call does, or too many calls have measured."""
        with self._condition:
            self._calls += 1
            self._running += 1
            offer = self._offer
            if (
                not may_measure
                or offer is None
                or offer.is_taken
                or self._is_ended
                or self._measured + 1 > self._share * self._calls
            ):
                return None
            offer.is_taken = True
            self._measured += 1
            return offer

    def _measure(self, offer: _Offer, arrays: Mapping[str, Any], out: Mapping[str, Any] | None) -> Results:
        timed: TimedCall | None = None
        try:
            results, timed = self._answer(offer, arrays, out)
            return results
        finally:
            with self._condition:
                offer.timed = timed
                offer.is_taken = timed is not None  # otherwise the next call measures: this one's arrays were refused
                self._condition.notify_all()

    def _answer(self, offer: _Offer, arrays: Mapping[str, Any], out: Mapping[str, Any] | None) -> tuple[Results, TimedCall]:
        names = [name for name, _ in self.model.plan.states]
        inputs = arrays if out is None else _keep_inputs(arrays, out)
        before = {name: np.array(out[name]) for name in names if out is not None and name in out}

        def answer_by_model(reason: str) -> tuple[Results, TimedCall]:
            for name, array in before.items():
                np.copyto((out or {})[name], array)
            return self.model.run(inputs, out), TimedCall(0.0, failure=reason)

        start = self._clock()
        try:
            results, moments = offer.model.run_timed(arrays, out) if offer.is_profiled else (offer.model.run(arrays, out), [])
        except (IndexRangeError, LaunchError) as error:
            return answer_by_model(error.message)
        seconds = self._clock() - start
        if not any(map(_has_nan, results.values())):
            return results, TimedCall(seconds, moments)
        measured = {name: array.copy() for name, array in results.items()}
        results, failed = answer_by_model("a result is NaN")
        if all(np.array_equal(np.isnan(measured[name]), np.isnan(array)) for name, array in results.items()):
            return results, TimedCall(seconds, moments)
        return results, failed


def _keep_inputs(arrays: Mapping[str, Any], out: Mapping[str, Any]) -> dict[str, Any]:
    """Return the inputs, with copies of those that a call may write to."""
    return {
        name: array.copy() if any(np.may_share_memory(array, written) for written in out.values()) else array
        for name, array in arrays.items()
    }


def _has_nan(array: Array) -> bool:
    return array.dtype.kind not in "biu" and bool(np.isnan(array).any())
