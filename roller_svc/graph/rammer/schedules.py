"""Steps of a model with their times → launches, by a policy."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace

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
from roller_svc.ir.model_plan import CopyStep, KernelStep, LoopStep, ModelKernel, ROperator, Step, VDeviceStep

WAIT_S = 0.2e-6  # a cache line from the L2 of one core to that of another, twice
LAUNCH_S = 1e-6  # of a plan, whose vEUs do not sleep

OVERHEADS = Overheads(WAIT_S, LAUNCH_S)

Policy = Callable[[Sequence[Operator], int, Overheads], Sequence[Segment]]
POLICIES: dict[str, Policy] = {"rammer": schedule_by_waves, "parallel": schedule_side_by_side}


@dataclass(frozen=True, slots=True)
class StepTimes:
    """Seconds of each step in the order of the graph: RAMMER's profile, measured or modelled."""

    alone_s: tuple[float, ...]  # on one worker
    launch_s: tuple[float, ...]  # on all workers
    is_measured: bool
    efficient_s: tuple[float | None, ...] = ()  # on one worker by the most efficient rKernel; None: it is the fastest


def find_segments(policy: str, steps: Sequence[PlannedStep], times: StepTimes, num_veus: int) -> Sequence[Segment]:
    """Return the segments of a policy for steps with these times.

    A policy that chooses rKernels wave by wave may end later than with the fastest ones alone. The better of the two
    is returned.
    """
    operators = [operator_of(step, times, number, num_veus) for number, step in enumerate(steps)]
    segments = POLICIES[policy](operators, num_veus, OVERHEADS)
    if all(len(rkernels) == 1 for each in operators for rkernels in each.roperators):
        return segments
    fastest = [replace(each, roperators=tuple(rkernels[:1] for rkernels in each.roperators)) for each in operators]
    return min(POLICIES[policy](fastest, num_veus, OVERHEADS), segments, key=_seconds)


def _seconds(segments: Sequence[Segment]) -> float:
    return sum(segment.seconds for segment in segments)


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
    efficient: list[float | None] = []
    for step in steps:
        other = step.efficient
        efficient.append(None if other is None else _modelled_alone_s(other.estimate_s, step.efficient_tasks, hw))
        if step.kernel is None:
            seconds = LAUNCH_S if step.loop is None else step.loop[0] * body_seconds(step.loop[1], kernels)
            alone.append(seconds)
            launch.append(seconds)
            continue
        kernel = kernels[step.kernel]
        seconds = launch_seconds(kernel)
        launch.append(seconds)
        alone.append(_modelled_alone_s(seconds, max(step.num_tasks, default=1), hw))
    return StepTimes(tuple(alone), tuple(launch), is_measured=False, efficient_s=tuple(efficient))


def launch_seconds(kernel: ModelKernel) -> float:
    """Return the seconds of a launch of a kernel, whose estimate its launches share."""
    return kernel.estimate_s / sum(not each.is_prepack for each in kernel.source.launches)


def body_seconds(steps: Iterable[Step], kernels: Sequence[ModelKernel]) -> float:
    """Return the seconds of a step of a loop, by the performance model."""
    seconds = 0.0
    for step in steps:
        match step:
            case KernelStep():
                seconds += launch_seconds(kernels[step.kernel])
            case LoopStep():
                seconds += step.steps * body_seconds(step.body, kernels)
            case VDeviceStep():
                seconds += body_seconds(step.steps, kernels)
            case CopyStep():
                seconds += LAUNCH_S
    return seconds


def _modelled_alone_s(seconds: float, tasks: int, hw: HardwareSpec) -> float:
    """Return the seconds on one worker of a launch that takes `seconds` on all."""
    workers = min(hw.num_cores, tasks)
    return max(0.0, seconds - hw.limits.launch_overhead_s) * workers if workers > 1 else seconds


def operator_of(step: PlannedStep, times: StepTimes, number: int, num_veus: int) -> Operator:
    """Return a step with its times, for a policy."""
    alone_s, launch_s = times.alone_s[number], times.launch_s[number]
    phases = step.num_tasks or (1,)
    rkernels: tuple[tuple[RKernel, ...], ...] = tuple(
        (_rkernel(tasks, alone_s / len(phases), launch_s / len(phases), num_veus),) for tasks in phases
    )
    efficient_s = times.efficient_s[number] if times.efficient_s else None
    if step.efficient is not None and efficient_s is not None:
        ((fastest,),) = rkernels
        rkernels = ((fastest, _efficient_rkernel(fastest, step.efficient_tasks, efficient_s)),)
    return Operator(rkernels, step.predecessors, launch_s, has_rtasks=not step.is_loop)


def _rkernel(tasks: int, alone_s: float, launch_s: float, num_veus: int) -> RKernel:
    """Return the rKernel of a phase. Phases are not timed apart.

    An rTask takes longer beside others than alone: inputs are in the caches of other cores, and memory is shared.
    """
    rounds = -(-tasks // num_veus)
    return RKernel(tasks, max(alone_s / tasks, (launch_s - LAUNCH_S) / rounds), alone_s)


def _efficient_rkernel(fastest: RKernel, tasks: int, alone_s: float) -> RKernel:
    """Return the most efficient rKernel of a step. Beside others its rTasks are slowed down as those of the fastest."""
    slowdown = fastest.tasks * fastest.task_s / fastest.alone_s if fastest.alone_s else 1.0
    return RKernel(tasks, slowdown * alone_s / tasks, alone_s)


def _launches(segment: Segment, steps: Sequence[PlannedStep]) -> list[Launch]:
    if segment.plan is None:
        return [Launch((number,)) for number in segment.operators]
    position = {number: i for i, number in enumerate(segment.operators)}
    operators = tuple(
        ROperator(position[number], phase if steps[number].phases(rkernel) else None)
        for (number, phase), rkernel in zip(segment.roperators, segment.rkernels, strict=True)
    )
    rkernel_of = {number: rkernel for (number, _), rkernel in zip(segment.roperators, segment.rkernels, strict=True)}
    return [Launch(segment.operators, operators, segment.plan, tuple(rkernel_of[each] for each in segment.operators))]
