"""Time that other processes and virtual machines took from this process's cores, from Linux's counters."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def runqueue_wait_s(tasks: Path = Path("/proc/self/task")) -> float:
    """Return the seconds that this process's threads waited in run queues; 0 if the kernel does not count them."""
    total = 0
    for task in tasks.glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # a thread may have ended
            total += int(task.read_text(encoding="ascii").split()[1])
    return total / 1e9


def steal_s(stat: Path = Path("/proc/stat")) -> float:
    """Return the steal time of this process's cores in seconds; 0 if it is not reported."""
    own_cpus = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    ticks = 0
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in stat.read_text(encoding="ascii").splitlines():
            words = line.split()
            if words and words[0] in own_cpus:
                ticks += int(words[8])
    return ticks * CLOCK_TICK_S
