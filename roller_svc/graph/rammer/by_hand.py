"""A plan as `Model.plan` gives it, perhaps edited → launches of the same model."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from roller_svc.errors import ArgumentError, InputError, InvariantError
from roller_svc.graph.plan import Launch, PlannedStep, Schedule
from roller_svc.ir.canonical import from_json
from roller_svc.ir.model_plan import ROperator
from roller_svc.ir.vdevice import VDevicePlan

_Key = tuple[str, int | None]  # node, launch (None: a copy or a loop); several copies of a node have the same


def schedule_by_hand(document: Mapping[str, Any]) -> Schedule:
    """Return the schedule of a plan with `steps`.

    `node`, `launch`, `rkernel`, `operators` and `vdevice` are read. Without `rkernel` a step uses its fastest rKernel.

    The schedule raises ArgumentError for a plan that does not execute each step of the model once, in an order that
    respects their dependencies.
    """

    def schedule(steps: Sequence[PlannedStep]) -> list[Launch]:
        try:
            launches = _launches(document["steps"], steps)
        except (KeyError, TypeError, ValueError, IndexError, RecursionError, InputError, InvariantError) as error:
            raise ArgumentError(f"the plan cannot be read: {error}", code="invalid-plan") from error
        _check_order(launches, steps)
        for launch in launches:
            _check_launch(launch, steps)
        return launches

    return schedule


def _launch(step: PlannedStep) -> int | None:
    return None if step.kernel is None else step.launch


def _number_steps(keys: Sequence[_Key], steps: Sequence[PlannedStep]) -> list[int]:
    """Return the steps of a model that a plan names in order: of copies with the same name the first that may run.

    Raises ArgumentError for a step that the model does not have.
    """
    remaining: defaultdict[_Key, list[int]] = defaultdict(list)
    for number, step in enumerate(steps):
        remaining[step.node, _launch(step)].append(number)
    done: set[int] = set()
    order: list[int] = []
    for key in keys:
        if not (numbers := remaining[key]):
            raise ArgumentError(f"the plan has a step {key[0]!r} that the model does not have", code="invalid-plan")
        ready = (number for number in numbers if done.issuperset(steps[number].predecessors))
        number = next(ready, numbers[0])
        numbers.remove(number)
        done.add(number)
        order.append(number)
    return order


def _launches(listed: Sequence[Any], steps: Sequence[PlannedStep]) -> list[Launch]:
    flat = [(i, inner) for i, each in enumerate(listed) for inner in (each["steps"] if "vdevice" in each else [each])]
    numbers = _number_steps([(inner["node"], inner.get("launch")) for _, inner in flat], steps)
    by_launch: list[list[int]] = [[] for _ in listed]
    rkernels: list[list[int]] = [[] for _ in listed]
    for (i, inner), number in zip(flat, numbers, strict=True):
        by_launch[i].append(number)
        rkernel = inner.get("rkernel", 0)
        if type(rkernel) is not int or rkernel not in (0, 1):
            raise ArgumentError(f"step {inner['node']!r} has the rKernel {rkernel!r}, expected 0 or 1", code="invalid-plan")
        rkernels[i].append(rkernel)
    launches: list[Launch] = []
    for each, own, chosen in zip(listed, by_launch, rkernels, strict=True):
        if "vdevice" not in each:
            launches.append(Launch(tuple(own), rkernels=tuple(chosen)))
            continue
        operators = tuple(from_json(ROperator, list(operator)) for operator in each["operators"])
        plan = from_json(VDevicePlan, each["vdevice"])
        launches.append(Launch(tuple(own), operators, plan, tuple(chosen)))
    return launches


def _check_order(launches: Sequence[Launch], steps: Sequence[PlannedStep]) -> None:
    done: set[int] = set()
    for number in (number for launch in launches for number in launch.steps):
        missing = [each for each in steps[number].predecessors if each not in done]
        if number in done or missing:
            why = "twice" if number in done else f"before {steps[missing[0]].node!r}, which it depends on"
            raise ArgumentError(f"the plan executes {steps[number].node!r} {why}", code="invalid-plan")
        done.add(number)
    if len(done) < len(steps):
        name = next(step.node for number, step in enumerate(steps) if number not in done)
        raise ArgumentError(f"the plan does not execute {name!r}", code="invalid-plan")


def _check_launch(launch: Launch, steps: Sequence[PlannedStep]) -> None:
    for number, rkernel in zip(launch.steps, launch.rkernels, strict=True):
        if rkernel and steps[number].efficient is None:
            raise ArgumentError(f"{steps[number].node!r} has no rKernel {rkernel}", code="invalid-plan")
    if launch.plan is not None and launch.plan.has_events:
        raise ArgumentError("a plan for CPUs orders rTasks by barriers, got events", code="invalid-plan")
    if any(not 0 <= each.step < len(launch.steps) for each in launch.operators):
        raise ArgumentError("an rOperator of the plan is part of no step of its launch", code="invalid-plan")
    for each in launch.operators:
        step = steps[launch.steps[each.step]]
        if each.phase is not None and each.phase not in range(len(step.phases(launch.rkernels[each.step]))):
            raise ArgumentError(f"{step.node!r} has no phase {each.phase!r}", code="invalid-plan")
    if launch.plan is not None and len(launch.plan.num_tasks) != len(launch.operators):
        raise ArgumentError(
            f"a launch lists {len(launch.operators)} rOperators, and its plan has the rTasks of {len(launch.plan.num_tasks)}",
            code="invalid-plan",
        )
