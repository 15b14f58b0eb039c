"""How many tasks a launch of a CPU kernel may have."""

from __future__ import annotations

from roller_svc.perf.problem import Problem

TASK_SECONDS = 10e-6  # of one core: work that is worth a task of its own
MOST_PER_CORE = 16  # tasks: what one of them takes longer than the others is then a sixteenth of a core's time


def task_counts(p: Problem) -> tuple[int, int]:
    """The fewest and the most: some for each core, none too small to be worth it.

    Work is the floor in one core's time, far below what it takes. Where it is less than two tasks' worth, but a
    launch's overhead at least, anything from one task to one for each core is allowed, and the model decides.
    """
    cores, work_s = p.machine.cores, p.floor_s * p.machine.cores
    worth = int(work_s / TASK_SECONDS)
    if worth >= 2:
        most = max(cores, min(MOST_PER_CORE * cores, worth))
        return min(cores, p.outer_points), most
    return 1, cores if work_s >= p.machine.hw.limits.launch_overhead_s else 1
