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

_Key = tuple[str, int | str]  # node, and its launch, "copy" or "loop"; several copies of a node have the same


def schedule_by_hand(document: Mapping[str, Any]) -> Schedule:
    """Return the schedule of a plan with `steps`.

    `node`, `launch`, `number`, `rkernel`, `operators` and `vdevice` are read. Without `rkernel` a step uses its fastest
    rKernel.

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


def _key(step: PlannedStep) -> _Key:
    return step.node, "loop" if step.is_loop else "copy" if step.kernel is None else step.launch


def _listed_key(listed: Mapping[str, Any]) -> _Key:
    return listed["node"], "loop" if "body" in listed else listed.get("launch", "copy")


def _number_steps(listed: Sequence[Mapping[str, Any]], steps: Sequence[PlannedStep]) -> list[int]:
    """Return the steps of a model that a plan lists in order.

    A copy has a number among those of its node. A plan in which no copy of a node has one is older than these numbers:
    it means the first copy that may run.

    Raises ArgumentError for a step that the model does not have.
    """
    by_key: defaultdict[_Key, list[int]] = defaultdict(list)
    for number, step in enumerate(steps):
        by_key[_key(step)].append(number)
    numbered = {_listed_key(each) for each in listed if "number" in each}
    done: set[int] = set()
    order: list[int] = []
    for each in listed:
        key = _listed_key(each)
        place = each.get("number", 0) if key in numbered else None
        order.append(_find_step(key, place, by_key[key], done, steps))
        done.add(order[-1])
    return order


def _find_step(key: _Key, place: object, numbers: Sequence[int], done: set[int], steps: Sequence[PlannedStep]) -> int:
    """Return the step of a key: the one at a place, or without a place the first of the others that may run."""
    if place is not None:
        if type(place) is not int or not 0 <= place < len(numbers):
            raise ArgumentError(f"{key[0]!r} has {len(numbers)} copies, and none is number {place!r}", code="invalid-plan")
        return numbers[place]
    remaining = [number for number in numbers if number not in done]
    if not remaining:
        raise ArgumentError(f"the plan has a step {key[0]!r} that the model does not have", code="invalid-plan")
    return next((number for number in remaining if done.issuperset(steps[number].predecessors)), remaining[0])


def _launches(listed: Sequence[Any], steps: Sequence[PlannedStep]) -> list[Launch]:
    flat = [(i, inner) for i, each in enumerate(listed) for inner in (each["steps"] if "vdevice" in each else [each])]
    numbers = _number_steps([inner for _, inner in flat], steps)
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
