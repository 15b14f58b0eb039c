"""Plans whose rTasks are ordered by events: JSON, the checker against brute force, and the policy for GPUs."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from types import FrameType
from typing import Any

import pytest

from roller_svc.analysis.happens_before import HappensBefore, check_plan
from roller_svc.errors import ArgumentError, InvariantError
from roller_svc.graph.rammer.ranges import schedule_by_ranges
from roller_svc.ir.canonical import from_json, to_json
from roller_svc.ir.vdevice import Barrier, Execute, Instruction, VDevicePlan, WaitEvent

Predecessors = list[tuple[int, ...]]
PAIR = VDevicePlan((2, 1), ((Execute(0, 0, 1, 0),), (Execute(0, 1, 1, 0), WaitEvent(0), Execute(1, 0, 1))), (2,))


def test_row_17_a_plan_with_events_has_a_json_form():
    assert to_json(PAIR) == {
        "num_tasks": [2, 1],
        "programs": [
            [{"execute": [0, 0, 1], "arrives": 0}],
            [{"execute": [0, 1, 1], "arrives": 0}, {"wait_event": 0}, {"execute": [1, 0, 1]}],
        ],
        "events": [2],
    }
    assert from_json(VDevicePlan, to_json(PAIR)) == PAIR


@pytest.mark.parametrize(
    ("damaged", "message"),
    [
        (replace(PAIR, events=(3,)), "event 0 has 2 arrivals, expected 3"),
        (replace(PAIR, events=(1,)), "event 0 has 2 arrivals, expected 1"),
        (replace(PAIR, events=()), "uses event 0: there is none"),
        (replace(PAIR, events=(2, 0)), "event 1 has 0 arrivals, expected 0"),
        (
            VDevicePlan((1, 1), ((WaitEvent(1), Execute(0, 0, 1, 0)), (WaitEvent(0), Execute(1, 0, 1, 1))), (1, 1)),
            "deadlock: .* Instruction 0 of vEU 0 waits for event 1",
        ),
    ],
)
def test_an_event_without_its_arrivals_is_refused(damaged: VDevicePlan, message: str):
    with pytest.raises(InvariantError, match=message):
        check_plan(damaged)


def test_an_event_orders_what_a_barrier_of_each_veu_orders():
    barriers = VDevicePlan((2, 1), ((Execute(0, 0, 1),), (Execute(0, 1, 1), Barrier(((0, 0),)), Execute(1, 0, 1))))
    for plan in (PAIR, barriers):
        order = HappensBefore(plan)
        assert (order.before(0, 1), order.before(1, 0)) == (True, False)


# the checker against brute force --------------------------------------------------------------------------------------


def accepts(plan: VDevicePlan, predecessors: Sequence[tuple[int, ...]]) -> bool:
    """Return whether the checker finds each rTask executed once, no deadlock, and every dependence in order."""
    try:
        check_plan(plan)
    except InvariantError:
        return False
    order = HappensBefore(plan)
    return all(order.before(each, operator) for operator, before in enumerate(predecessors) for each in before)


def is_right(plan: VDevicePlan, predecessors: Sequence[tuple[int, ...]]) -> bool:
    """Return the same by executing the instructions in every possible order. Events count, as on a device."""
    executed = [
        (each.operator, task)
        for program in plan.programs
        for each in program
        if isinstance(each, Execute)
        for task in range(each.first, each.first + each.count)
    ]
    if sorted(executed) != [(operator, task) for operator, tasks in enumerate(plan.num_tasks) for task in range(tasks)]:
        return False
    if any(isinstance(each, Execute) and each.count < 1 for program in plan.programs for each in program):
        return False
    start = (0,) * plan.num_veus
    end = tuple(map(len, plan.programs))
    seen, states = {start}, [start]
    while states:
        state = states.pop()
        done = [(each, order < state[veu]) for veu, p in enumerate(plan.programs) for order, each in enumerate(p)]
        counts = [
            sum(each.count for each, is_done in done if is_done and isinstance(each, Execute) and each.arrives == event)
            for event in range(len(plan.events))
        ]
        pending = {each.operator for each, is_done in done if not is_done and isinstance(each, Execute)}
        moves = [veu for veu in range(plan.num_veus) if state[veu] < end[veu] and _can_run(plan, state, veu, counts)]
        if not moves and (state != end or counts != list(plan.events)):  # counts of the next run would be wrong
            return False
        for veu in moves:
            instruction = plan.programs[veu][state[veu]]
            if isinstance(instruction, Execute) and pending.intersection(predecessors[instruction.operator]):
                return False
            after = (*state[:veu], state[veu] + 1, *state[veu + 1 :])
            if after not in seen:
                seen.add(after)
                states.append(after)
    return True


def _can_run(plan: VDevicePlan, state: tuple[int, ...], veu: int, counts: list[int]) -> bool:
    instruction = plan.programs[veu][state[veu]]
    if isinstance(instruction, WaitEvent):
        return instruction.event < len(counts) and counts[instruction.event] >= plan.events[instruction.event]
    if isinstance(instruction, Barrier):
        return all(state[other] > order for other, order in instruction.waits)
    return True


def small_graph(rng: random.Random) -> tuple[list[int], Predecessors]:
    count = rng.randint(2, 4)
    predecessors = [tuple(sorted(rng.sample(range(i), min(i, rng.choice([0, 1, 1, 2]))))) for i in range(count)]
    return [rng.choice([1, 1, 2, 3]) for _ in range(count)], predecessors


def damage(plan: VDevicePlan, rng: random.Random) -> VDevicePlan:
    """Return the plan with one instruction, or one event, that is different."""
    programs = [list(program) for program in plan.programs]
    veu = rng.choice([veu for veu, program in enumerate(programs) if program])
    program = programs[veu]
    at = rng.randrange(len(program))
    kind = rng.randrange(6)
    if kind == 0:
        del program[at]
    elif kind == 1:
        program.insert(rng.randrange(len(program)), program.pop(at))
    elif kind == 2:
        rng.choice(programs).append(program.pop(at))
    elif kind == 3 and plan.events:
        events = list(plan.events)
        events[rng.randrange(len(events))] += rng.choice([-1, 1])
        return replace(plan, events=tuple(events))
    elif kind == 4:
        program.insert(at, program[at])
    else:
        program[at] = _changed(program[at], plan, rng)
    return replace(plan, programs=tuple(map(tuple, programs)))


def _changed(instruction: Instruction, plan: VDevicePlan, rng: random.Random) -> Instruction:
    if isinstance(instruction, WaitEvent):
        return WaitEvent(rng.randrange(len(plan.events) + 1))
    assert isinstance(instruction, Execute)
    field = rng.choice(["operator", "first", "count", "arrives", "arrives"])
    if field == "arrives":
        return replace(instruction, arrives=rng.choice([None, *range(len(plan.events))]))
    return replace(instruction, **{field: max(0, getattr(instruction, field) + rng.choice([-1, 1]))})


def test_damaged_plans_are_accepted_only_where_every_order_of_execution_is_right():
    rng = random.Random(3)
    equivalent = 0
    for _ in range(5000):
        num_tasks, predecessors = small_graph(rng)
        plan = schedule_by_ranges(num_tasks, predecessors, rng.randint(1, 3))
        assert accepts(plan, predecessors)
        damaged = damage(plan, rng)
        accepted = accepts(damaged, predecessors)
        assert accepted == is_right(damaged, predecessors), damaged
        equivalent += accepted
    assert 0 < equivalent < 2000


# the policy -----------------------------------------------------------------------------------------------------------


def random_graph(rng: random.Random) -> tuple[list[int], Predecessors]:
    count = rng.randint(1, 25)
    predecessors = [tuple(sorted(rng.sample(range(i), min(i, rng.choice([0, 1, 1, 2, 3]))))) for i in range(count)]
    return [rng.choice([1, 2, 5, 16, 64, 300]) for _ in range(count)], predecessors


def waits_of(plan: VDevicePlan) -> Iterator[tuple[int, int]]:
    for veu, program in enumerate(plan.programs):
        yield from ((veu, order) for order, each in enumerate(program) if isinstance(each, WaitEvent))


@pytest.mark.slow
def test_random_graphs_are_accepted_and_every_removed_wait_is_found():
    rng = random.Random(4)
    removed = 0
    for _ in range(1000):
        num_tasks, predecessors = random_graph(rng)
        times = [rng.choice([0.0, 1e-6, 3e-6]) for _ in num_tasks] if rng.random() < 0.3 else ()
        plan = schedule_by_ranges(num_tasks, predecessors, rng.randint(1, 12), times)
        assert accepts(plan, predecessors)
        waits = list(waits_of(plan))
        for veu, order in rng.sample(waits, min(3, len(waits))):
            program = plan.programs[veu]
            program = (*program[:order], *program[order + 1 :])
            shorter = replace(plan, programs=(*plan.programs[:veu], program, *plan.programs[veu + 1 :]))
            assert not accepts(shorter, predecessors)
            removed += 1
    assert removed > 1500


def test_a_wave_is_divided_evenly_in_contiguous_ranges():
    plan = schedule_by_ranges([6, 6], [(), ()], 4)
    assert plan.programs == (
        (Execute(0, 0, 3),),
        (Execute(0, 3, 3),),
        (Execute(1, 0, 3),),
        (Execute(1, 3, 3),),
    )
    plan = schedule_by_ranges([2, 8], [(), ()], 4, [4e-6, 1e-6])
    assert plan.programs == ((Execute(0, 0, 1),), (Execute(0, 1, 1),), (Execute(1, 0, 4),), (Execute(1, 4, 4),))


def test_a_wait_that_an_earlier_one_implies_is_left_out():
    plan = schedule_by_ranges([2, 2, 2], [(), (0,), (0, 1)], 2)
    for program in plan.programs:
        assert [each.event for each in program if isinstance(each, WaitEvent)] == [0, 1]
    assert schedule_by_ranges([1, 1], [(), (0,)], 3).events == ()  # one vEU executes both


@pytest.mark.parametrize(
    "misuse",
    [lambda: schedule_by_ranges([1], [()], 0), lambda: schedule_by_ranges([0], [()], 1),
     lambda: schedule_by_ranges([1, 1], [(1,), ()], 1)],
)  # fmt: skip
def test_a_graph_that_has_no_plan_is_refused(misuse):
    with pytest.raises(ArgumentError):
        misuse()


def plan_layers(layers: int) -> int:
    """Plan layers on 132 vEUs and check the plan. Return the number of its instructions."""
    operators = 9
    num_tasks = [1 if i % operators == 0 else 528 for i in range(layers * operators)]
    predecessors: Predecessors = [(i - 1,) if i else () for i in range(layers * operators)]
    plan = schedule_by_ranges(num_tasks, predecessors, 132)
    assert accepts(plan, predecessors)
    return sum(map(len, plan.programs))


def count_lines(work: Callable[[], object]) -> int:
    """Return how many lines of Python run."""
    lines, before = 0, sys.gettrace()

    def trace(_: FrameType, event: str, __: object) -> Any:
        nonlocal lines
        lines += event == "line"
        return trace

    sys.settrace(trace)
    try:
        work()
    finally:
        sys.settrace(before)
    return lines


def test_plans_are_made_and_checked_in_time_that_grows_as_the_model_does():
    assert plan_layers(32) > 40_000
    one, four = (count_lines(lambda layers=layers: plan_layers(layers)) for layers in (1, 4))
    assert four < 5 * one
