"""One turn of a worker: a warm-up, a sample of calls, and whether others disturbed it."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

from roller_svc.runtime.interference import CLOCK_TICK_S, stolen_s, waiting_s

SAMPLE_S = 0.02
# Above these shares of the sample's wall time others ran where we wanted to.
MOST_WAITED = 0.02
MOST_STOLEN = 0.05
# A pool whose threads used less in a pause has gone to sleep.
_PAUSE_S = 0.002
_ASLEEP_SHARE = 0.1
_LONGEST_WAIT_S = 0.2


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
    each: tuple[float, ...] = ()

    @property
    def is_disturbed(self) -> bool:
        wall_s = self.seconds * self.calls
        ticks = max(wall_s * MOST_STOLEN, CLOCK_TICK_S)  # steal is counted in ticks: one says nothing
        return self.waited_s > MOST_WAITED * wall_s or self.stolen_s > ticks


def sampled(call: Callable[[], object], sample_s: float = SAMPLE_S) -> Sample:
    """One call to warm up, then as many as take about `sample_s`, at least one."""
    start = time.perf_counter()
    call()
    first_s = time.perf_counter() - start
    calls = 1
    if first_s < sample_s / 2:
        start = time.perf_counter()
        call()
        calls = max(1, round(sample_s / max(time.perf_counter() - start, 1e-7)))
    return timed(call, calls)


def timed(call: Callable[[], object], calls: int, together: int | None = None) -> Sample:
    """So many calls, so many `together` between two looks at the clock, all of them unless said otherwise."""
    together = together or calls
    waited, stolen = waiting_s(), stolen_s()
    looks = [time.perf_counter()]
    for _ in range(max(1, round(calls / together))):
        for _ in range(together):
            call()
        looks.append(time.perf_counter())
    each = tuple((end - start) / together for start, end in pairwise(looks))
    result = Sample(statistics.fmean(each), len(each) * together, waiting_s() - waited, stolen_s() - stolen, each=each)
    settle()
    return result


def settle() -> None:
    """Wait until this process's idle threads, which spin for a while after a parallel call, are asleep."""
    end = time.perf_counter() + _LONGEST_WAIT_S
    while time.perf_counter() < end:
        used = time.process_time()
        time.sleep(_PAUSE_S)
        if time.process_time() - used < _ASLEEP_SHARE * _PAUSE_S:
            return
