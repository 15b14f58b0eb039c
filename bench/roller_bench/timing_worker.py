"""Take samples of a call and detect interference by other processes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from roller_svc.runtime.interference import CLOCK_TICK_S, runqueue_wait_s, steal_s

SAMPLE_S = 0.02
# A sample is disturbed if waiting or stolen time exceeds these fractions of its wall time.
MAX_WAITED_FRACTION = 0.02
MAX_STOLEN_FRACTION = 0.05
# Idle threads of a pool are asleep if they use less CPU time than this fraction of a pause.
_PAUSE_S = 0.002
_ASLEEP_CPU_FRACTION = 0.1
_MAX_SETTLE_S = 0.2


@dataclass(frozen=True, slots=True)
class Sample:
    """One sample of calls."""

    seconds: float  # per call
    calls: int
    waited_s: float  # runnable but not running
    stolen_s: float  # taken by the hypervisor
    peak_flops_per_s: float | None = None  # FMA peak at the time of the sample, if measured
    call_seconds: tuple[float, ...] = ()  # of each call or batch of calls

    @property
    def is_disturbed(self) -> bool:
        wall_s = self.seconds * self.calls
        ticks = max(wall_s * MAX_STOLEN_FRACTION, CLOCK_TICK_S)  # steal is counted in ticks: a single tick is within its resolution
        return self.waited_s > MAX_WAITED_FRACTION * wall_s or self.stolen_s > ticks


def take_sample(call: Callable[[], object], sample_s: float = SAMPLE_S) -> Sample:
    """Warm up with one call, then time as many calls as take about `sample_s`, at least one."""
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
    """Time `calls` calls, reading the clock after every `calls_per_reading` of them (default: after all)."""
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
    """Wait until the idle threads of this process, which spin after a parallel call, are asleep."""
    end = time.perf_counter() + _MAX_SETTLE_S
    while time.perf_counter() < end:
        used = time.process_time()
        time.sleep(_PAUSE_S)
        if time.process_time() - used < _ASLEEP_CPU_FRACTION * _PAUSE_S:
            return
