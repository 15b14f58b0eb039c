"""Sample micro-benchmarks in interleaved rounds, and summarise each: minimum, median, maximum.

Another process on the same physical core or memory slows everything for seconds. Rounds spread the samples of each
micro-benchmark over the whole time, so that a disturbance does not hit one of them alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roller_svc.errors import LaunchError
from roller_svc.ir.hardware import Measured
from roller_svc.runtime.interference import runqueue_wait_s

MIN_SAMPLES = 3
MAX_EXTENSION = 3.0  # limit on the duration, as a multiple of the requested seconds
# Fraction of a sample's time that our threads, together, may have waited: usually, and for the least disturbed samples.
MAX_WAIT_FRACTION, MAX_BEST_WAIT_FRACTION = 0.02, 0.1


@dataclass(frozen=True, slots=True)
class Probe:
    """One micro-benchmark."""

    name: str
    unit: str  # "s" or the unit of a rate
    cores: int
    how: str  # what is measured, in a few words
    sample: Callable[[], float]  # take one sample, in `unit`


@dataclass(slots=True)
class _Series:
    probe: Probe
    samples: list[tuple[float, float]] = field(default_factory=list)  # (fraction of its time spent waiting, value)

    def valid_values(self) -> list[float]:
        """Return the undisturbed values, or the three least disturbed ones; empty if these are too disturbed."""
        undisturbed = [value for share, value in self.samples if share <= MAX_WAIT_FRACTION]
        if len(undisturbed) >= MIN_SAMPLES:
            return undisturbed
        least_disturbed = sorted(self.samples)[:MIN_SAMPLES]
        return (
            [value for _, value in least_disturbed]
            if len(least_disturbed) == MIN_SAMPLES and least_disturbed[-1][0] <= MAX_BEST_WAIT_FRACTION
            else []
        )


def run_probes(probes: Sequence[Probe], seconds: float, max_extension: float = MAX_EXTENSION) -> tuple[Measured, ...]:
    """Sample all probes in at least three rounds for about `seconds`; up to `max_extension` times under disturbance.

    Samples during which our threads waited for cores are dropped if there are others.

    Raises:
        LaunchError: a probe has too few undisturbed samples (machine-busy).
    """
    warm_up_start, series = time.perf_counter(), [_Series(probe) for probe in probes]
    for one in series:
        one.probe.sample()  # determines the number of repetitions
    start = time.perf_counter()
    seconds -= start - warm_up_start
    rounds, spent_s = 0, 0.0
    disturbed: list[str] = []
    while rounds < MIN_SAMPLES or spent_s * (rounds + 1) / rounds < seconds * (max_extension if disturbed else 1):
        for one in series:
            _take_sample(one)
        rounds, spent_s = rounds + 1, time.perf_counter() - start
        disturbed = [one.probe.name for one in series if not one.valid_values()]
    if disturbed:
        raise LaunchError(
            f"other processes use this machine's cores: {len(disturbed)} of {len(series)} micro-benchmarks were "
            f"disturbed in nearly all of {rounds} rounds, for instance {disturbed[0]}",
            code="machine-busy",
        )
    return tuple(_summarize(one) for one in series)


def _take_sample(series: _Series) -> None:
    waited, start = runqueue_wait_s(), time.perf_counter()
    value = series.probe.sample()
    wall_s = time.perf_counter() - start
    series.samples.append(((runqueue_wait_s() - waited) / wall_s, value))


def _summarize(series: _Series) -> Measured:
    probe, values = series.probe, series.valid_values()
    return Measured(
        name=probe.name,
        unit=probe.unit,
        cores=probe.cores,
        min=round_value(min(values)),
        median=round_value(statistics.median(values)),
        max=round_value(max(values)),
        quiet=round_value(_faster_half_median(values, is_time=probe.unit == "s")),
        samples=len(values),
        how=probe.how,
    )


def _faster_half_median(values: Sequence[float], *, is_time: bool) -> float:
    """Return the median of the faster half: interference only slows, and the fastest sample may be a turbo peak."""
    ranked = sorted(values, reverse=not is_time)
    return statistics.median(ranked[: (len(ranked) + 1) // 2])


def round_value(value: float) -> float:
    """Round to four digits, more than the samples agree in."""
    return float(f"{value:.4g}")
