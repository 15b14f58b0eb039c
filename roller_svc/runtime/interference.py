"""What other processes and machines took of this process's cores, as Linux counts it."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

CLOCK_TICK_S = 1 / os.sysconf("SC_CLK_TCK")


def runqueue_wait_s(tasks: Path = Path("/proc/self/task")) -> float:
    """Seconds that this process's threads were ready to run and did not; 0 where the kernel does not count them."""
    total = 0
    for task in tasks.glob("*/schedstat"):
        with contextlib.suppress(OSError, IndexError, ValueError):  # a thread may have ended
            total += int(task.read_text(encoding="ascii").split()[1])
    return total / 1e9


def steal_s(stat: Path = Path("/proc/stat")) -> float:
    """Seconds that the hypervisor ran others on this process's cores; 0 where that is not told."""
    own_cpus = {f"cpu{cpu}" for cpu in os.sched_getaffinity(0)}
    ticks = 0
    with contextlib.suppress(OSError, IndexError, ValueError):
        for line in stat.read_text(encoding="ascii").splitlines():
            words = line.split()
            if words and words[0] in own_cpus:
                ticks += int(words[8])
    return ticks * CLOCK_TICK_S
