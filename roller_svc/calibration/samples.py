"""Micro-benchmarks → samples of each, taken in rounds over all of them, → least, median and most.

A neighbour on the same physical core, or on the same memory, slows everything for seconds. Rounds spread the samples
of one micro-benchmark over all the time there is, so that such seconds do not fall on one of them alone.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from roller_svc.errors import LaunchError
from roller_svc.ir.hardware import Measured
from roller_svc.runtime.interference import runqueue_wait_s

SAMPLES_LEAST = 3
PATIENCE = 3.0  # times the seconds asked for
# Shares of a sample's time that our threads may have waited, all of them together: of any, and of the least disturbed.
MOST_WAITED, LEAST_WAITED = 0.02, 0.1


@dataclass(frozen=True, slots=True)
class Probe:
    """One micro-benchmark. `sample` gives its value once, in `unit`: seconds ("s") or a rate; `how` says in a few words
    what is measured."""

    name: str
    unit: str
    cores: int
    how: str
    sample: Callable[[], float]


@dataclass(slots=True)
class _Series:
    probe: Probe
    taken: list[tuple[float, float]] = field(default_factory=list)  # share of its time that it waited, value

    def counting(self) -> list[float]:
        """The values that count: what was not disturbed, or the three least disturbed; empty where even those are."""
        quiet = [value for share, value in self.taken if share <= MOST_WAITED]
        if len(quiet) >= SAMPLES_LEAST:
            return quiet
        least = sorted(self.taken)[:SAMPLES_LEAST]
        return [value for _, value in least] if len(least) == SAMPLES_LEAST and least[-1][0] <= LEAST_WAITED else []


def sampled(probes: Sequence[Probe], seconds: float) -> tuple[Measured, ...]:
    """Rounds over all probes for about so many seconds, three at least; up to three times as long where other processes
    disturb. A sample during which our threads had to wait for the cores does not count where there are others.

    Raises LaunchError (machine-busy) where a probe has hardly any but such.
    """
    begun, series = time.perf_counter(), [_Series(probe) for probe in probes]
    for one in series:
        one.probe.sample()  # finds out how often to repeat
    start = time.perf_counter()
    seconds -= start - begun
    rounds, spent_s = 0, 0.0
    few: list[str] = []
    while rounds < SAMPLES_LEAST or spent_s * (rounds + 1) / rounds < seconds * (PATIENCE if few else 1):
        for one in series:
            _take(one)
        rounds, spent_s = rounds + 1, time.perf_counter() - start
        few = [one.probe.name for one in series if not one.counting()]
    if few:
        raise LaunchError(
            f"other processes use this machine's cores: {len(few)} of {len(series)} micro-benchmarks were disturbed in"
            f" nearly all of {rounds} rounds, {few[0]} among them",
            code="machine-busy",
        )
    return tuple(_measured(one) for one in series)


def _take(series: _Series) -> None:
    waited, start = runqueue_wait_s(), time.perf_counter()
    value = series.probe.sample()
    wall_s = time.perf_counter() - start
    series.taken.append(((runqueue_wait_s() - waited) / wall_s, value))


def _measured(series: _Series) -> Measured:
    probe, values = series.probe, series.counting()
    return Measured(
        name=probe.name,
        unit=probe.unit,
        cores=probe.cores,
        min=rounded(min(values)),
        median=rounded(statistics.median(values)),
        max=rounded(max(values)),
        quiet=rounded(_quiet(values, is_time=probe.unit == "s")),
        samples=len(values),
        how=probe.how,
    )


def _quiet(values: Sequence[float], *, is_time: bool) -> float:
    """The median of the faster half. Others make a machine slower, never faster; the very fastest sample may be one of
    a clock that is raised for moments."""
    ranked = sorted(values, reverse=not is_time)
    return statistics.median(ranked[: (len(ranked) + 1) // 2])


def rounded(value: float) -> float:
    """To four digits: more than samples agree in."""
    return float(f"{value:.4g}")
