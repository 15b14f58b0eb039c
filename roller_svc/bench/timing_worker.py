"""One turn of a worker: a warm-up, a sample of calls, and whether others disturbed it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from roller_svc.runtime.interference import CLOCK_TICK_S, steal_s, runqueue_wait_s

SAMPLE_S = 0.02
# Above these shares of the sample's wall time others ran where we wanted to.
MAX_WAITED_FRACTION = 0.02
MAX_STOLEN_FRACTION = 0.05
# A pool whose threads used less in a pause has gone to sleep.
_PAUSE_S = 0.002
_ASLEEP_CPU_FRACTION = 0.1
_MAX_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class Sample:
    """`seconds` a call, over `calls` calls; `each`: those of each call, or of few, where they were timed apart.
    `waited_s`: how long our threads were ready and did not run; `stolen_s`: what the hypervisor took from our cores;
    `peak_flops_per_s`: the FMA peak just then, where it was asked for."""

    seconds: float
    calls: int
    waited_s: float
    stolen_s: float
    peak_flops_per_s: float | None = None
    call_seconds: tuple[float, ...] = ()

    @property
    def is_disturbed(self) -> bool:
        wall_s = self.seconds * self.calls
        ticks = max(wall_s * MAX_STOLEN_FRACTION, CLOCK_TICK_S)  # steal is counted in ticks: one says nothing
        return self.waited_s > MAX_WAITED_FRACTION * wall_s or self.stolen_s > ticks


def take_sample(call: Callable[[], object], sample_s: float = SAMPLE_S) -> Sample:
    """One call to warm up, then as many as take about `sample_s`, at least one."""
    start = time.perf_counter()
    call()
    first_s = time.perf_counter() - start
    calls = 1
    if first_s < sample_s / 2:
        start = time.perf_counter()
        call()
        calls = max(1, round(sample_s / max(time.perf_counter() - start, 1e-7)))
    return time_calls(call, calls)


def time_calls(call: Callable[[], object], calls: int, calls_per_reading: int | None = None) -> Sample:
    """So many calls, so many `together` between two looks at the clock, all of them unless said otherwise."""
    calls_per_reading = calls_per_reading or calls
    waited_before, stolen_before = runqueue_wait_s(), steal_s()
    timestamps = [time.perf_counter()]
    for _ in range(max(1, round(calls / calls_per_reading))):
        for _ in range(calls_per_reading):
            call()
        timestamps.append(time.perf_counter())
    call_seconds = tuple((end - start) / calls_per_reading for start, end in pairwise(timestamps))
    result = Sample(
        statistics.fmean(call_seconds),
        len(call_seconds) * calls_per_reading,
        runqueue_wait_s() - waited_before,
        steal_s() - stolen_before,
        call_seconds=call_seconds,
    )
    wait_until_idle()
    return result


def wait_until_idle() -> None:
    """Wait until this process's idle threads, which spin for a while after a parallel call, are asleep."""
    end = time.perf_counter() + _MAX_SETTLE_S
    while time.perf_counter() < end:
        used = time.process_time()
        time.sleep(_PAUSE_S)
        if time.process_time() - used < _ASLEEP_CPU_FRACTION * _PAUSE_S:
            return
