"""Measure a call: warm it up, repeat it until clock noise is negligible, stop early if it is slow."""

from __future__ import annotations

import platform
import statistics
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path

from roller_svc.ir.kernel import Measurement

Call = Callable[[], object]
Stopwatch = Callable[[Call, int], float]  # (call, repetitions) → seconds for all repetitions together

_MIN_SAMPLE_S = 20e-6  # a hundred times the cost of reading the clock
_MAX_INNER = 10_000
_MIN_SAMPLES = 3
_GIVE_UP_FACTOR = 1.5  # a candidate slower than the best by this factor will not win in another sample
_LONG_CALL_RATIO = 20  # a cold call of this many minimum samples is long enough when warm, too
_LONG_CALL_S = 5e-3  # cold effects are negligible in calls of at least this length
_STEADY_TOLERANCE = 0.01
_STEADY_SAMPLES = 7


def host_stopwatch(call: Call, times: int) -> float:
    """Return the wall time of calls that return when their work is done."""
    start = time.perf_counter()
    for _ in range(times):
        call()
    return time.perf_counter() - start


def measure(
    call: Call,
    budget_s: float = 0.5,
    repeats: int = 20,
    *,
    device_name: str = "",
    best_s: float | None = None,
    stopwatch: Stopwatch | None = None,
) -> Measurement:
    """Return the median and minimum time of one call, from at most `repeats` samples and about `budget_s` seconds.

    A sample has enough calls for the clock's resolution to be less than 1 % of it. Sampling ends early if the samples
    agree, or if they are all well above `best_s`, the best time of another kernel for the same work. If the first call
    takes the whole budget, it is the only sample. A call on a device has its own `stopwatch`, `min_sample_s` and
    `device_name`; other calls are timed on the host.
    """
    watch: Stopwatch = getattr(call, "stopwatch", host_stopwatch) if stopwatch is None else stopwatch
    device_name = device_name or getattr(call, "device_name", host_name)()
    min_sample_s: float = getattr(call, "min_sample_s", _MIN_SAMPLE_S)
    first_s = watch(call, 1)  # also the warm-up: page faults, thread pools, clocks
    samples = [first_s]
    spent_s = first_s
    if spent_s < min_sample_s or (spent_s < budget_s and not _cannot_win(samples, best_s)):
        inner, probed_s = _inner_repeats(lambda times: watch(call, times), first_s, min_sample_s)
        spent_s += probed_s
        samples = []
        while len(samples) < repeats and (spent_s < budget_s or len(samples) < 1):
            sample_s = watch(call, inner)
            spent_s += sample_s
            samples.append(sample_s / inner)
            if _cannot_win(samples, best_s) or _is_steady(samples):
                break
    return Measurement(statistics.median(samples), min(samples), len(samples), device_name)


@cache
def host_name() -> str:
    """Return the processor's name for reports."""
    cpuinfo = Path("/proc/cpuinfo")
    if cpuinfo.is_file():
        for line in cpuinfo.read_text(encoding="utf-8", errors="replace").splitlines():
            key, _, value = line.partition(":")
            if key.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def _inner_repeats(sample: Callable[[int], float], first_s: float, min_sample_s: float) -> tuple[int, float]:
    """Return the number of calls in a sample and the seconds spent on finding it. The first call was cold."""
    inner, spent_s = 1, 0.0
    sample_s = first_s
    if first_s >= _LONG_CALL_RATIO * min_sample_s:
        return inner, spent_s
    while inner < _MAX_INNER:
        sample_s = sample(inner)
        spent_s += sample_s
        if sample_s >= min_sample_s:
            break
        growth = min_sample_s / sample_s if sample_s > 0 else 10.0
        inner = min(_MAX_INNER, max(inner * 2, round(inner * growth * 1.2)))
    return inner, spent_s


def _cannot_win(samples: list[float], best_s: float | None) -> bool:
    """Whether this call cannot beat `best_s`. A short cold call needs a wider margin than several warm ones."""
    if best_s is None:
        return False
    is_conclusive = len(samples) >= _MIN_SAMPLES or min(samples) >= _LONG_CALL_S
    return min(samples) > (_GIVE_UP_FACTOR if is_conclusive else _GIVE_UP_FACTOR**4) * best_s


def _is_steady(samples: list[float]) -> bool:
    """Whether the faster half of enough samples agrees within 1 %."""
    if len(samples) < _STEADY_SAMPLES:
        return False
    ordered = sorted(samples)
    return ordered[len(ordered) // 2] <= ordered[0] * (1 + _STEADY_TOLERANCE)
