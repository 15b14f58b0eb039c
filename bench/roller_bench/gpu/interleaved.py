"""Time several kernels by one rule: equally many interleaved samples of each, with clock readings in between."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from roller_bench.gpu.clocks import Nvml, Watch
from roller_svc.errors import InvariantError
from roller_svc.runtime.cuda.module import CudaCall, Replay

Json = dict[str, Any]
SAMPLE_S = 1e-3  # device time of one sample (of one or more calls): events have a resolution of 0.5 us
MAX_CALLS = 1000
MAX_ROUNDS, MIN_ROUNDS = 10, 5
BLOCK_S = 1.0  # of one block of samples; slow kernels get fewer rounds, equally many of each
SCREENING_SAMPLES = 3  # samples that choose among candidates; reported samples are taken separately


class TimedWork(Protocol):
    """Something to time."""

    def sample(self) -> float:
        """Return the seconds of one call, averaged over a recorded CUDA graph that ran once just before."""


class RollerWork:
    """A generated kernel on one set of arrays, or cycling through several sets."""

    def __init__(self, cupy: Any, calls: Sequence[CudaCall]) -> None:
        sets = len(calls)
        once_s = Replay(cupy, calls, sets).seconds() / sets
        self._replay = Replay(cupy, calls, sets * calls_for(once_s * sets))

    def sample(self) -> float:
        return self._replay.seconds() / self._replay.times


def calls_for(seconds: float) -> int:
    """Return the number of calls in a sample."""
    return max(1, min(MAX_CALLS, math.ceil(SAMPLE_S / max(seconds, 1e-7))))


def screening_median(work: TimedWork) -> float:
    """Return the median of a few samples."""
    return statistics.median(work.sample() for _ in range(SCREENING_SAMPLES))


def time_interleaved(works: Mapping[str, TimedWork], device: Nvml | None) -> tuple[dict[str, Json], Json]:
    """Return the statistics of equally many samples of each kernel, one per round, and the clocks meanwhile."""
    if not works:
        raise InvariantError("expected at least one kernel to time")
    round_s = 2 * sum(max(SAMPLE_S, work.sample()) for work in works.values())  # each sample runs its graph twice
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
    return {"min_s": min(samples), "median_s": statistics.median(samples), "max_s": max(samples), "samples": len(samples)}
