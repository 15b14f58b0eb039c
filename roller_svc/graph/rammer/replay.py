"""When each instruction of a plan starts and ends, by the times of the scheduler; checks of plans that were edited."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from roller_svc.analysis.happens_before import Access, HappensBefore, check_plan, execution_order, unordered_accesses
from roller_svc.errors import ArgumentError, InputError, InvariantError
from roller_svc.graph.rammer.schedules import OVERHEADS
from roller_svc.ir.canonical import from_json
from roller_svc.ir.model_schedule import ModelSchedule, ScheduledLaunch, ScheduledOperator
from roller_svc.ir.model_story import EXECUTE, LAUNCH, WAIT, StoryInstruction
from roller_svc.ir.vdevice import Barrier, Execute, VDevicePlan


def replay(schedule: ModelSchedule) -> tuple[list[StoryInstruction], float]:
    """Return the instructions of a plan with their times, and the end of the last one."""
    instructions: list[StoryInstruction] = []
    orders: dict[int, int] = {}  # of each vEU: its instructions so far
    now = 0.0
    for launch in schedule.launches:
        if launch.plan is None:
            for step, seconds in launch.steps:
                instructions.append(StoryInstruction(LAUNCH, now, now + seconds, step))
                now += seconds
            continue
        ends_s = replay_launch(launch.plan, launch.operators)
        for veu, (program, program_ends) in enumerate(zip(launch.plan.programs, ends_s, strict=True)):
            for order, (instruction, (start_s, end_s)) in enumerate(zip(program, program_ends, strict=True), orders.get(veu, 0)):
                at = now + start_s, now + end_s
                if isinstance(instruction, Execute):
                    operator = launch.operators[instruction.operator]
                    tasks = instruction.first, instruction.count
                    instructions.append(StoryInstruction(EXECUTE, *at, operator.step, veu, order, operator.phase, tasks))
                elif isinstance(instruction, Barrier):
                    waits = tuple((other, orders.get(other, 0) + number) for other, number in instruction.waits)
                    instructions.append(StoryInstruction(WAIT, *at, None, veu, order, waits=waits))
        for veu, program in enumerate(launch.plan.programs):
            orders[veu] = orders.get(veu, 0) + len(program)
        now += max(end for program_ends in ends_s for _, end in program_ends[-1:])
    return instructions, now


def replay_launch(plan: VDevicePlan, operators: Sequence[ScheduledOperator]) -> list[list[tuple[float, float]]]:
    """Return when each instruction of each vEU starts and ends, since the start of the launch.

    Raises InvariantError if vEUs wait for each other.
    """
    if plan.has_events:
        raise InvariantError("a plan with events is of a GPU")
    spans: list[list[tuple[float, float]]] = [[] for _ in plan.programs]
    for veu, _, instruction in execution_order(plan):
        start_s = end_s = spans[veu][-1][1] if spans[veu] else OVERHEADS.launch_s
        if isinstance(instruction, Execute):
            operator = operators[instruction.operator]
            is_whole = instruction.count == operator.tasks
            end_s += operator.alone_s if is_whole else instruction.count * operator.task_s
        elif isinstance(instruction, Barrier):
            ends = (spans[other][order][1] + OVERHEADS.wait_s * (other != veu) for other, order in instruction.waits)
            end_s = max(start_s, *ends)
        spans[veu].append((start_s, end_s))
    return spans


def edit_schedule(schedule: ModelSchedule, programs: Sequence[Any]) -> ModelSchedule:
    """Return the schedule with other programs: `[vEU][order]` for each launch that has a plan, as plans have them in JSON.

    Raises ArgumentError (invalid-plan), which names the launch, for programs that do not compute what the launch does.
    """
    numbers = [number for number, launch in enumerate(schedule.launches) if launch.plan is not None]
    if len(programs) != len(numbers):
        raise _illegal(f"it has programs of {len(programs)} launches, expected {len(numbers)}")
    launches = list(schedule.launches)
    for place, (number, given) in enumerate(zip(numbers, programs, strict=True)):
        launch = launches[number]
        try:
            launches[number] = replace(launch, plan=_edit_plan(launch, given))
        except (InvariantError, InputError) as error:
            raise _illegal(f"launch {place}: {error.message}") from error
    return ModelSchedule(tuple(launches))


def _edit_plan(launch: ScheduledLaunch, given: object) -> VDevicePlan:
    """Return the plan of a launch with other programs. Raises InvariantError for an illegal one, as `check_step` does."""
    if launch.plan is None:
        raise InvariantError("the launch has no plan of a virtual device")
    plan = from_json(VDevicePlan, {"num_tasks": list(launch.plan.num_tasks), "programs": given})
    if plan.num_veus != launch.plan.num_veus:
        raise InvariantError(f"it has {plan.num_veus} vEUs, expected {launch.plan.num_veus}")
    if plan.has_events:
        raise InvariantError("plans for CPUs order rTasks by barriers, got events")
    order = HappensBefore(plan, check_plan(plan))
    operators = launch.operators
    accesses = [Access(number, *access) for number, each in enumerate(operators) for access in each.accesses]
    for first, second in unordered_accesses(accesses, order, lambda number: operators[number].place):
        both = f"{_described(operators[first])} and {_described(operators[second])}"
        raise InvariantError(f"{both} use the same memory, and nothing orders them")
    return plan


def _described(operator: ScheduledOperator) -> str:
    return operator.node if operator.phase is None else f"{operator.node}, phase {operator.phase},"


def _illegal(reason: str) -> ArgumentError:
    return ArgumentError(f"the plan is not legal: {reason}", code="invalid-plan")
