"""A plan as `Model.plan` gives it, perhaps edited → launches of the same model."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from roller_svc.errors import ArgumentError, InputError, InvariantError
from roller_svc.graph.plan import Launch, PlannedStep, Schedule
from roller_svc.ir.canonical import from_json
from roller_svc.ir.model_plan import ROperator
from roller_svc.ir.vdevice import VDevicePlan

_Key = tuple[str, int | None, int]  # node, launch (None: a copy or a loop), how many steps before have the same


def schedule_by_hand(document: Mapping[str, Any]) -> Schedule:
    """Return the schedule of a plan with `steps`.

    `node`, `launch`, `rkernel`, `operators` and `vdevice` are read. Without `rkernel` a step uses its fastest rKernel.

    The schedule raises ArgumentError for a plan that does not execute each step of the model once, in an order that
    respects their dependencies.
    """

    def schedule(steps: Sequence[PlannedStep]) -> list[Launch]:
        numbers = {key: number for number, key in enumerate(_keys([(each.node, _launch(each)) for each in steps]))}
        try:
            launches = _launches(document["steps"], numbers)
        except (KeyError, TypeError, ValueError, IndexError, RecursionError, InputError, InvariantError) as error:
            raise ArgumentError(f"the plan cannot be read: {error}", code="invalid-plan") from error
        _check_order(launches, steps)
        for launch in launches:
            _check_launch(launch, steps)
        return launches

    return schedule


def _launch(step: PlannedStep) -> int | None:
    return None if step.kernel is None else step.launch


def _keys(named: Sequence[tuple[str, int | None]]) -> list[_Key]:
    seen: Counter[tuple[str, int | None]] = Counter()
    keys: list[_Key] = []
    for name in named:
        keys.append((*name, seen[name]))
        seen[name] += 1
    return keys


def _launches(listed: Sequence[Any], numbers: Mapping[_Key, int]) -> list[Launch]:
    flat = [(i, inner) for i, each in enumerate(listed) for inner in (each["steps"] if "vdevice" in each else [each])]
    keys = _keys([(inner["node"], inner.get("launch")) for _, inner in flat])
    for key in keys:
        if key not in numbers:
            raise ArgumentError(f"the plan has a step {key[0]!r} that the model does not have", code="invalid-plan")
    by_launch: list[list[int]] = [[] for _ in listed]
    rkernels: list[list[int]] = [[] for _ in listed]
    for (i, inner), key in zip(flat, keys, strict=True):
        by_launch[i].append(numbers[key])
        rkernel = inner.get("rkernel", 0)
        if type(rkernel) is not int or rkernel not in (0, 1):
            raise ArgumentError(f"step {key[0]!r} has the rKernel {rkernel!r}, expected 0 or 1", code="invalid-plan")
        rkernels[i].append(rkernel)
    launches: list[Launch] = []
    for each, steps, chosen in zip(listed, by_launch, rkernels, strict=True):
        if "vdevice" not in each:
            launches.append(Launch(tuple(steps), rkernels=tuple(chosen)))
            continue
        operators = tuple(from_json(ROperator, list(operator)) for operator in each["operators"])
        plan = from_json(VDevicePlan, each["vdevice"])
        launches.append(Launch(tuple(steps), operators, plan, tuple(chosen)))
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
