"""Choose the plan of a model: serial, operators side by side, or RAMMER's, by measurement where the device is here."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from roller_svc.compiler.backends import backend_for
from roller_svc.compiler.kernel_cache import SERIAL, KernelCache, PlanChoice
from roller_svc.errors import ArgumentError, IndexRangeError, InvariantError
from roller_svc.graph.inputs import Sample, draw_sample
from roller_svc.graph.plan import Launch, PlannedStep, Schedule
from roller_svc.graph.rammer.by_hand import schedule_by_hand
from roller_svc.graph.rammer.check import check_step
from roller_svc.graph.rammer.schedules import POLICIES, StepTimes, find_segments, make_schedule, model_times
from roller_svc.graph.wiring.explore import Choices, explore
from roller_svc.graph.wiring.tree import Variable
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.kernel import KernelSource
from roller_svc.ir.model_plan import LoopStep, ModelPlan, Step, VDeviceStep
from roller_svc.runtime.graphs.cpu import CpuCalls, Moment
from roller_svc.runtime.graphs.switchable import SwitchableModel
from roller_svc.runtime.saved.plan_json import plan_to_json
from roller_svc.runtime.thread_pool import limit_threads

AUTO, BY_HAND = "auto", "by hand"
EAGER = "eager"  # a serial plan without fusion
PLANS = (AUTO, SERIAL, *POLICIES)
# A plan must be this much faster than a serial one, which is simpler: by measurement, and by the model.
MEASURED_MARGIN, MODELLED_MARGIN = 0.97, 0.9
PROFILES, PROFILES_S = 20, 0.3  # of the serial plan, for each number of threads
ROUNDS, ROUND_S = 6, 0.05  # for each plan
# Rounds of a machine that other work disturbs: those in which a serial call takes longer than its steps by this much.
MAX_ROUNDS, DISTURBED_RATIO = 18, 1.1

MakePlan = Callable[[Schedule | None], tuple[ModelPlan, tuple[PlannedStep, ...]]]
Link = Callable[[ModelPlan, str], bytes]  # the model's name is the second
Open = Callable[[ModelPlan, Sequence[KernelSource]], SwitchableModel]  # links a plan's program, with further kernels


@dataclass(frozen=True, slots=True)
class ChosenPlan:
    """A plan, and why it was chosen."""

    plan: ModelPlan
    choice: PlanChoice


def choose_plan(
    kind: str | Mapping[str, Any],
    make_plan: MakePlan,
    open_switchable: Open,
    hw: HardwareSpec,
    cache: KernelCache,
    *,
    measure: bool,
    generator: str,
) -> ChosenPlan:
    """Return the plan of a kind; for "auto" the fastest.

    Args:
        kind: one of PLANS, or a plan by hand.
        make_plan: makes the plan of a schedule, and lists the steps that a schedule gets.
        open_switchable: links and loads a program with kernels, of which plans are bound to measure them.
        hw: the device, with the number of threads as its cores.
        cache: keeps times and choices.
        measure: whether times may be measured; otherwise, and if this machine is not the device, they are modelled.
        generator: digest of what else determines the times.
    """
    if not isinstance(kind, str):
        try:
            plan = _checked(make_plan(schedule_by_hand(kind))[0])
        except InvariantError as error:
            raise ArgumentError(f"the plan is not legal: {error.message}", code="invalid-plan") from error
        return ChosenPlan(plan, PlanChoice(BY_HAND))
    serial, steps = make_plan(None)
    if kind == SERIAL or hw.num_cores == 1:
        return ChosenPlan(serial, PlanChoice(SERIAL))
    key = _digest(kind, serial, steps, generator, measure=measure)
    choice = cache.load_choice(key)
    if choice is not None and _fits(choice, steps):
        plan = serial if choice.kind == SERIAL else _planned(choice.kind, choice, make_plan, hw)
        return ChosenPlan(plan, choice)
    if measure and backend_for(hw).is_present(hw):
        chosen = _choose_measured(kind, serial, steps, make_plan, open_switchable, hw)
    else:
        chosen = _choose_modelled(kind, serial, steps, make_plan, hw)
    cache.save_choice(key, chosen.choice)
    return chosen


def make_modelled_plans(kind: str, make_plan: MakePlan, hw: HardwareSpec) -> dict[str, ModelPlan]:
    """Return the plans among which measurement chooses for a kind, by theirs. Their schedules are by modelled times."""
    serial, steps = make_plan(None)
    if kind == SERIAL or hw.num_cores == 1:
        return {SERIAL: serial}
    times = model_times(steps, serial.kernels, hw)
    plans = {SERIAL: serial} if kind == AUTO else {}
    for each in POLICIES if kind == AUTO else (kind,):
        plan = _planned(each, PlanChoice(each, times.alone_s, times.launch_s), make_plan, hw)
        if kind == each or any(isinstance(step, VDeviceStep) for step in plan.steps):
            plans[each] = plan
    return plans


def _choose_modelled(
    kind: str, serial: ModelPlan, steps: tuple[PlannedStep, ...], make_plan: MakePlan, hw: HardwareSpec
) -> ChosenPlan:
    times = model_times(steps, serial.kernels, hw)
    seconds = {SERIAL: sum(times.launch_s)}
    kinds = POLICIES if kind == AUTO else (kind,)
    for each in kinds:
        seconds[each] = sum(segment.seconds for segment in find_segments(each, steps, times, hw.num_cores))
    best = min(kinds, key=lambda each: seconds[each])
    if kind == AUTO and seconds[best] > MODELLED_MARGIN * seconds[SERIAL]:
        best = SERIAL
    choice = PlanChoice(best, times.alone_s, times.launch_s, seconds, efficient_s=times.efficient_s)
    plan = serial if best == SERIAL else _planned(best, choice, make_plan, hw)
    return ChosenPlan(plan, choice)


def _choose_measured(
    kind: str,
    serial: ModelPlan,
    steps: tuple[PlannedStep, ...],
    make_plan: MakePlan,
    open_switchable: Open,
    hw: HardwareSpec,
) -> ChosenPlan:
    efficient = [step.efficient.source for step in steps if step.efficient is not None]
    program = open_switchable(serial, [*(kernel.source for kernel in serial.kernels), *efficient])
    loaded = program.bind(serial)
    sample = draw_sample(serial)
    try:
        times = measure_steps(loaded, sample, hw.num_cores)
    except IndexRangeError:  # random indices do not fit: without times, steps in order are right
        return ChosenPlan(serial, PlanChoice(SERIAL))
    times = replace(times, efficient_s=_measure_efficient(steps, times, sample, make_plan, program))
    models: dict[str, tuple[ModelPlan, CpuCalls]] = {SERIAL: (serial, loaded)}
    for each in POLICIES if kind == AUTO else (kind,):
        choice = PlanChoice(each, times.alone_s, times.launch_s, efficient_s=times.efficient_s)
        plan = _planned(each, choice, make_plan, hw)
        if kind == each or any(isinstance(step, VDeviceStep) for step in plan.steps):
            models[each] = plan, program.bind(plan)
    undelayed_s = _least_serial_s(loaded, sample, times)
    loaded_models = {each: model for each, (_, model) in models.items()}
    seconds = _measure_models(loaded_models, sample, hw.num_cores, undelayed_s)
    seconds[SERIAL] = min(seconds[SERIAL], undelayed_s)
    best = min((each for each in models if kind in (AUTO, each)), key=lambda each: seconds[each])
    if kind == AUTO and seconds[best] > MEASURED_MARGIN * seconds[SERIAL]:
        best = SERIAL
    plan, _ = models[best]
    choice = PlanChoice(best, times.alone_s, times.launch_s, seconds, is_measured=True, efficient_s=times.efficient_s)
    return ChosenPlan(plan, choice)


def measure_steps(model: CpuCalls, sample: Sample, threads: int) -> StepTimes:
    """Return the least times of each step of a serial plan, in the model: on one worker and on all."""
    return StepTimes(_least_times(model, sample, 1), _least_times(model, sample, threads), is_measured=True)


def _measure_efficient(
    steps: Sequence[PlannedStep],
    times: StepTimes,
    sample: Sample,
    make_plan: MakePlan,
    program: SwitchableModel,
) -> tuple[float | None, ...]:
    """Return the least time of each step on one worker by its most efficient rKernel, in a serial plan of these.

    None for a step without another rKernel, or where its fastest one does not take longer by the margin of plans.
    """
    if all(step.efficient is None for step in steps):
        return ()
    plan, _ = make_plan(_use_efficient)
    measured = _least_times(program.bind(plan), sample, 1)
    return tuple(
        seconds if step.efficient is not None and seconds < MEASURED_MARGIN * alone_s else None
        for step, seconds, alone_s in zip(steps, measured, times.alone_s, strict=True)
    )


def _use_efficient(steps: Sequence[PlannedStep]) -> list[Launch]:
    return [Launch((number,), rkernels=(int(step.efficient is not None),)) for number, step in enumerate(steps)]


def _least_times(model: CpuCalls, sample: Sample, threads: int) -> tuple[float, ...]:
    least = [float("inf")] * len(model.plan.steps)
    with limit_threads(threads):
        model.run(sample.inputs, sample.restore())
        end = time.perf_counter() + PROFILES_S
        for number in range(PROFILES):
            if number > 1 and time.perf_counter() > end:
                break
            moments = model.profile(sample.inputs, sample.restore())
            least = [min(a, b) for a, b in zip(least, _sum_steps(model.plan.steps, moments), strict=True)]
    return tuple(least)


def _sum_steps(steps: tuple[Step, ...], moments: list[Moment]) -> list[float]:
    """Return the seconds of each step of a serial plan; of a loop, the sum over its steps."""
    seconds: list[float] = []
    position = 0
    for step in steps:
        end = position + _count(step)
        seconds.append(sum(each.end_s - each.start_s for each in moments[position:end]))
        position = end
    return seconds


def _count(step: Step) -> int:
    return step.steps * sum(map(_count, step.body)) if isinstance(step, LoopStep) else 1


def _least_serial_s(model: CpuCalls, sample: Sample, times: StepTimes) -> float:
    """Return the seconds of a serial call in which no other work delays a step.

    Where another process uses a core at times, each call has a delayed step, but few calls have the same one. Least
    times of steps are then far below those of calls. What a call does beside its steps is measured on one worker.
    """
    with limit_threads(1):
        alone_s = _least_call_s(model, sample)
    return sum(times.launch_s) + max(0.0, alone_s - sum(times.alone_s))


def _measure_models(models: Mapping[str, CpuCalls], sample: Sample, threads: int, undelayed_s: float) -> dict[str, float]:
    """Return the least time of a call of each model, by trials in interleaved rounds.

    There are more rounds while no serial call is about as short as an undelayed one.
    """
    plan = Variable("plan", "plan", tuple(models), list(models).index(SERIAL))
    least = dict.fromkeys(models, float("inf"))

    def measure(choices: Choices) -> dict[str, float]:
        name = plan.choices[choices[plan.name]]
        least[name] = min(least[name], _least_call_s(models[name], sample))
        return {plan.name: least[name]}

    with limit_threads(threads):
        for _ in range(MAX_ROUNDS // ROUNDS):
            explore(plan, measure, budget_trials=ROUNDS * len(models), rounds=ROUNDS)
            if least[SERIAL] < DISTURBED_RATIO * undelayed_s:
                break
    return least


def _least_call_s(model: CpuCalls, sample: Sample) -> float:
    """Return the least time of a call in a round."""
    least = float("inf")
    model.run(sample.inputs, sample.restore())
    end = time.perf_counter() + ROUND_S
    while True:
        states = sample.restore()
        start = time.perf_counter()
        model.run(sample.inputs, states)
        now = time.perf_counter()
        least = min(least, now - start)
        if now > end:
            return least


def _planned(kind: str, choice: PlanChoice, make_plan: MakePlan, hw: HardwareSpec) -> ModelPlan:
    """Return the plan of a policy."""
    times = StepTimes(choice.alone_s, choice.launch_s, choice.is_measured, choice.efficient_s)
    return _checked(make_plan(make_schedule(kind, times, hw.num_cores))[0])


def _checked(plan: ModelPlan) -> ModelPlan:
    for step in plan.steps:
        if isinstance(step, VDeviceStep):
            check_step(step, plan.kernels)
    return plan


def _fits(choice: PlanChoice, steps: Sequence[PlannedStep]) -> bool:
    """Return whether a choice, which may come from a damaged file, has the times of these steps."""
    return len(choice.alone_s) == len(steps) == len(choice.launch_s) and len(choice.efficient_s) in (0, len(steps))


def _digest(kind: str, serial: ModelPlan, steps: Sequence[PlannedStep], generator: str, *, measure: bool) -> str:
    keys = [kernel.source.key for kernel in serial.kernels]
    others = {id(step.efficient): step.efficient for step in steps if step.efficient is not None}
    keys += [kernel.source.key for kernel in others.values()]
    content = json.dumps([kind, measure, generator, keys, plan_to_json(serial)], sort_keys=True)
    return hashlib.sha256(content.encode()).hexdigest()
