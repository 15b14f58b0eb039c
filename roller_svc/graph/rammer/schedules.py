"""Steps of a model with their times → launches, by a policy."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from roller_svc.graph.plan import Launch, PlannedStep, Schedule
from roller_svc.graph.rammer.wavefront import (
    Operator,
    Overheads,
    RKernel,
    Segment,
    schedule_by_waves,
    schedule_side_by_side,
)
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.model_plan import ModelKernel, ROperator

WAIT_S = 0.2e-6  # a cache line from the L2 of one core to that of another, twice
LAUNCH_S = 1e-6  # of a plan, whose vEUs do not sleep

Policy = Callable[[Sequence[Operator], int, Overheads], Sequence[Segment]]
POLICIES: dict[str, Policy] = {"rammer": schedule_by_waves, "parallel": schedule_side_by_side}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of each step in the order of the graph: RAMMER's profile, measured or modelled."""

    alone_s: tuple[float, ...]  # on one worker
    launch_s: tuple[float, ...]  # on all workers
    is_measured: bool


def find_segments(policy: str, steps: Sequence[PlannedStep], times: StepTimes, num_veus: int) -> Sequence[Segment]:
    """Return the segments of a policy for steps with these times."""
    operators = [_operator(step, times, number, num_veus) for number, step in enumerate(steps)]
    return POLICIES[policy](operators, num_veus, Overheads(WAIT_S, LAUNCH_S))


def make_schedule(policy: str, times: StepTimes, num_veus: int) -> Schedule:
    """Return the schedule of a policy for steps with these times."""

    def schedule(steps: Sequence[PlannedStep]) -> list[Launch]:
        segments = find_segments(policy, steps, times, num_veus)
        return [launch for segment in segments for launch in _launches(segment, steps)]

    return schedule


def model_times(steps: Sequence[PlannedStep], kernels: Sequence[ModelKernel], hw: HardwareSpec) -> StepTimes:
    """Return times by the performance model: a kernel's estimate, divided among its launches."""
    alone: list[float] = []
    launch: list[float] = []
    for step in steps:
        if step.kernel is None:
            alone.append(LAUNCH_S)
            launch.append(LAUNCH_S)
            continue
        kernel = kernels[step.kernel]
        seconds = kernel.estimate_s / sum(not each.is_prepack for each in kernel.source.launches)
        launch.append(seconds)
        workers = min(hw.num_cores, max(step.num_tasks, default=1))
        alone.append(max(0.0, seconds - hw.limits.launch_overhead_s) * workers if workers > 1 else seconds)
    return StepTimes(tuple(alone), tuple(launch), is_measured=False)


def _operator(step: PlannedStep, times: StepTimes, number: int, num_veus: int) -> Operator:
    alone_s, launch_s = times.alone_s[number], times.launch_s[number]
    phases = step.num_tasks or (1,)
    rkernels = tuple((_rkernel(tasks, alone_s / len(phases), launch_s / len(phases), num_veus),) for tasks in phases)
    return Operator(rkernels, step.predecessors, launch_s, has_rtasks=not step.is_loop)


def _rkernel(tasks: int, alone_s: float, launch_s: float, num_veus: int) -> RKernel:
    """Return the rKernel of a phase. Phases are not timed apart.

    An rTask takes longer beside others than alone: inputs are in the caches of other cores, and memory is shared.
    """
    rounds = -(-tasks // num_veus)
    return RKernel(tasks, max(alone_s / tasks, (launch_s - LAUNCH_S) / rounds), alone_s)


def _launches(segment: Segment, steps: Sequence[PlannedStep]) -> list[Launch]:
    if segment.plan is None:
        return [Launch((number,)) for number in segment.operators]
    position = {number: i for i, number in enumerate(segment.operators)}
    operators = tuple(
        ROperator(position[number], phase if steps[number].num_tasks else None) for number, phase in segment.roperators
    )
    return [Launch(segment.operators, operators, segment.plan)]
