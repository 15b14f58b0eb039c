"""Several works → times of each by one rule: as many samples of all, taken in turns, with the clocks beside them."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from roller_svc.bench.gpu.clocks import Nvml, Watch
from roller_svc.errors import InvariantError
from roller_svc.runtime.cuda.module import CudaCall, Replay

Json = dict[str, Any]
SAMPLE_S = 1e-3  # of device time in one sample, as many calls as that takes: events tell times to half a microsecond
MAX_CALLS = 1000
MAX_ROUNDS, MIN_ROUNDS = 10, 5
BLOCK_S = 1.0  # of one block of samples; long works get fewer rounds, all of them alike
SCREENING_SAMPLES = 3  # samples that choose among candidates; those that are reported are taken anew


class TimedWork(Protocol):
    """What is timed. `sample`: seconds of one call, of enough calls for the clock, recorded as a graph that has just
    run before."""

    def sample(self) -> float: ...


class RollerWork:
    """A kernel of ours, on one set of arrays, or on several in turns."""

    def __init__(self, cupy: Any, calls: Sequence[CudaCall]) -> None:
        sets = len(calls)
        once_s = Replay(cupy, calls, sets).seconds() / sets
        self._replay = Replay(cupy, calls, sets * calls_for(once_s * sets))

    def sample(self) -> float:
        return self._replay.seconds() / self._replay.times


def calls_for(seconds: float) -> int:
    """Calls that make a sample."""
    return max(1, min(MAX_CALLS, math.ceil(SAMPLE_S / max(seconds, 1e-7))))


def screening_median(work: TimedWork) -> float:
    """The median of a few samples."""
    return statistics.median(work.sample() for _ in range(SCREENING_SAMPLES))


def time_interleaved(works: Mapping[str, TimedWork], device: Nvml | None) -> tuple[dict[str, Json], Json]:
    """Least and median of equally many samples of each work, one of each in every round; and the clocks meanwhile."""
    if not works:
        raise InvariantError("there is nothing to time")
    round_s = 2 * sum(max(SAMPLE_S, work.sample()) for work in works.values())  # each sample runs twice
    rounds = max(MIN_ROUNDS, min(MAX_ROUNDS, int(BLOCK_S / round_s)))
    series: dict[str, list[float]] = {name: [] for name in works}
    watch = Watch()
    for _ in range(rounds):
        if device is not None:
            watch.samples.append(device.sample())
        for name, work in works.items():
            series[name].append(work.sample())
    if device is not None:
        watch.samples.append(device.sample())
    return {name: sample_statistics(samples) for name, samples in series.items()}, watch.summary()


def sample_statistics(samples: Sequence[float]) -> Json:
    return {"min_s": min(samples), "median_s": statistics.median(samples), "max_s": max(samples),
            "samples": len(samples)}  # fmt: skip
