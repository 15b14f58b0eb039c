"""Costs of CPU kernels from those of their tasks, which cores execute in waves."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from roller_svc.families.common.cpu.memory import dominant_level
from roller_svc.perf.common import Costs, Launch
from roller_svc.perf.workload import Workload

MANY_TASKS_PER_CORE = 4  # from here on, cores end at about the same time


def count_waves(p: Workload[Any], launch: Launch) -> int:
    return -(-launch.grid // p.machine.cores)


def count_tasks_of_core(p: Workload[Any], launch: Launch) -> float:
    """Return the tasks of the core with the most: whole waves, or the mean of many tasks."""
    cores = p.machine.cores
    return launch.grid / cores if launch.grid >= MANY_TASKS_PER_CORE * cores else count_waves(p, launch)


def make_costs(
    p: Workload[Any],
    launch: Launch,
    core_s: float,
    stages: Mapping[str, float],
    memory: tuple[str, float],
    moved_bytes: float | None = None,
) -> Costs:
    """Return the costs of a kernel whose busiest core takes `core_s`.

    Args:
        stages: seconds of the core by what it does, which `core_s` contains.
        memory: the level that serves most traffic, and its seconds.
        moved_bytes: that memory moves in this time; None: each tensor once, in whole lines.
    """
    moved = p.footprint.transferred_bytes(p.extents) if moved_bytes is None else moved_bytes
    waves = count_waves(p, launch)
    return Costs(
        core_s=core_s,
        core_stage=None,
        stage_seconds=(*stages.items(), memory),
        occupancy=min(1.0, launch.grid / (waves * p.machine.cores)),
        waves=waves,
        moved_bytes=((memory[0], moved),),
    )


def sum_task_costs(
    p: Workload[Any],
    launch: Launch,
    cycles: Mapping[str, float],
    tasks: float,
    memory_s: float,
    exposed_fraction: float,
    level: str = "",
    moved_bytes: float | None = None,
) -> Costs:
    """Return the costs of tasks whose parts are summed, and of the fraction of memory time that nothing hides.

    Args:
        cycles: of one task by what it does.
        tasks: of the busiest core.
        level: the level that serves most traffic; '': the dominant one.
        moved_bytes: that memory moves; None: each tensor once, in whole lines.
    """
    seconds = p.machine.seconds
    core_s = seconds(sum(cycles.values()) * tasks) + exposed_fraction * memory_s
    stages = {name: seconds(part * tasks) for name, part in cycles.items()}
    memory = (level or dominant_level(p, launch), memory_s)
    return make_costs(p, launch, core_s, stages, memory, moved_bytes)._replace(added_fraction=exposed_fraction)
