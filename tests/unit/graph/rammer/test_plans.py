"""Plans of a virtual device: Append, Wait, the wavefront policy and the checker."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from roller_svc.analysis.happens_before import HappensBefore, check_plan
from roller_svc.errors import ArgumentError, InvariantError
from roller_svc.graph.plan import PlannedStep
from roller_svc.graph.rammer.by_hand import schedule_by_hand
from roller_svc.graph.rammer.vdevice import VDevice
from roller_svc.graph.rammer.wavefront import (
    Operator,
    Overheads,
    RKernel,
    Segment,
    find_waves,
    schedule_by_waves,
    schedule_side_by_side,
)
from roller_svc.ir.canonical import from_json, to_json
from roller_svc.ir.vdevice import Barrier, Execute, VDevicePlan

CHEAP = Overheads(wait_s=1e-7, launch_s=1e-6)


def test_row_17_a_plan_has_a_json_form():
    device = VDevice([2, 1], 2)
    device.append((0, 0), 0)
    device.append((0, 1), 1)
    device.wait((1, 0), [(0, 0), (0, 1)])
    device.append((1, 0), 0)
    plan = device.finish()
    assert to_json(plan) == {
        "num_tasks": [2, 1],
        "programs": [[{"execute": [0, 0, 1]}, {"wait": [[1, 0]]}, {"execute": [1, 0, 1]}], [{"execute": [0, 1, 1]}]],
    }
    assert from_json(VDevicePlan, to_json(plan)) == plan


def test_row_18_wait_keeps_the_last_rtask_of_each_veu():
    device = VDevice([4, 1, 1], 2)
    for task, veu in enumerate((0, 1, 1, 1)):
        device.append((0, task), veu)
    device.wait((1, 0), [(0, task) for task in range(4)])
    device.append((1, 0), 0)
    device.wait((2, 0), [(0, 2)])  # vEU 0 has waited for a later one
    device.append((2, 0), 0)
    assert device.finish().programs[0] == (Execute(0, 0, 1), Barrier(((1, 2),)), Execute(1, 0, 1), Execute(2, 0, 1))


@pytest.mark.parametrize(
    "misuse",
    [
        lambda d: d.append((0, 0), 2),
        lambda d: d.append((0, 5), 0),
        lambda d: d.append((3, 0), 0),
        lambda d: d.wait((0, 0), [(1, 0)]),
        lambda d: (d.append((0, 0), 0), d.append((0, 0), 1)),
        lambda d: (d.append((0, 0), 0), d.append((1, 0), 1), d.wait((0, 0), [(1, 0)])),
        lambda d: d.finish(),
    ],
)
def test_what_is_no_plan_is_refused(misuse):
    with pytest.raises(ArgumentError):
        misuse(VDevice([1, 1], 2))


def test_vEUs_that_wait_for_each_other_are_found():
    cyclic = VDevicePlan((1, 1), ((Barrier(((1, 1),)), Execute(0, 0, 1)), (Barrier(((0, 1),)), Execute(1, 0, 1))))
    with pytest.raises(InvariantError, match="deadlock"):
        check_plan(cyclic)


@pytest.mark.parametrize(
    "program",
    [
        (Execute(0, 0, 1),),
        (Execute(0, 0, 2), Execute(0, 1, 1)),
        (Execute(0, 0, 3),),
        (Execute(1, 0, 1),),
        (Execute(0, 0, 2), Barrier(((1, 0),))),
        (Execute(0, 0, 2), Barrier(((0, 7),))),
    ],
)
def test_rtasks_that_are_not_executed_once_are_found(program):
    with pytest.raises(InvariantError):
        check_plan(VDevicePlan((2,), (program,)))


def random_operators(rng: random.Random) -> list[Operator]:
    """Return a random DAG of operators with one or two rOperators each, some of them launches of their own."""
    operators: list[Operator] = []
    for number in range(rng.randint(1, 25)):
        before = rng.sample(range(number), min(number, rng.choice([0, 1, 1, 2, 3])))
        roperators = tuple(
            (RKernel(tasks := rng.choice([1, 2, 5, 16, 64]), rng.uniform(1e-7, 2e-5)),
             *([RKernel(max(1, tasks // 4), rng.uniform(1e-7, 2e-5))] if rng.random() < 0.5 else []))
            for _ in range(rng.choice([1, 1, 2]))
        )  # fmt: skip
        launch_s = rng.uniform(1e-6, 1e-4)
        operators.append(Operator(roperators, tuple(sorted(before)), launch_s, has_rtasks=rng.random() > 0.05))
    return operators


def check_segments(operators: list[Operator], segments: tuple[Segment, ...]) -> None:
    """Check that the segments execute every operator once, after what it depends on."""
    launch: dict[int, int] = {}
    for at, segment in enumerate(segments):
        for operator in segment.operators:
            assert operator not in launch
            assert all(launch[each] <= at for each in operators[operator].predecessors)
            launch[operator] = at
        if segment.plan is None:
            continue
        check_plan(segment.plan)
        order = HappensBefore(segment.plan)
        number = {each: i for i, each in enumerate(segment.roperators)}
        for operator, stage in segment.roperators:
            count = len(operators[operator].roperators)
            before = (
                [(operator, stage - 1)]
                if stage
                else [
                    (each, len(operators[each].roperators) - 1) for each in operators[operator].predecessors if launch[each] == at
                ]
            )
            assert all((operator, each) in number for each in range(count))
            assert all(order.before(number[each], number[operator, stage]) for each in before)
    assert len(launch) == len(operators)


@pytest.mark.slow
@pytest.mark.parametrize("policy", [schedule_by_waves, schedule_side_by_side])
def test_row_18_random_graphs_pass_the_checker_and_a_deleted_wait_does_not(policy):
    rng = random.Random(1)
    deleted = 0
    for _ in range(1000):
        operators = random_operators(rng)
        segments = policy(operators, rng.randint(1, 8), CHEAP)
        check_segments(operators, segments)
        for at, segment in enumerate(segments):
            waits = [] if segment.plan is None else _waits(segment.plan)
            if waits:
                broken = replace(segment, plan=_without_wait(segment.plan, *rng.choice(waits)))
                with pytest.raises(AssertionError):
                    check_segments(operators, (*segments[:at], broken, *segments[at + 1 :]))
                deleted += 1
    assert deleted > 300


def _waits(plan: VDevicePlan) -> list[tuple[int, int, int]]:
    return [
        (veu, order, i)
        for veu, program in enumerate(plan.programs)
        for order, instruction in enumerate(program)
        if isinstance(instruction, Barrier)
        for i in range(len(instruction.waits))
    ]


def _without_wait(plan: VDevicePlan, veu: int, order: int, number: int) -> VDevicePlan:
    barrier = plan.programs[veu][order]
    assert isinstance(barrier, Barrier)
    shorter = Barrier((*barrier.waits[:number], *barrier.waits[number + 1 :]))
    program = (*plan.programs[veu][:order], shorter, *plan.programs[veu][order + 1 :])
    return replace(plan, programs=(*plan.programs[:veu], program, *plan.programs[veu + 1 :]))


def test_waves_are_levels():
    assert find_waves([(), (), (0,), (0, 1), (2,), ()]) == [[0, 1, 5], [2, 3], [4]]


def test_row_20_many_small_operators_take_the_efficient_rkernel_and_one_alone_the_fastest():
    """As in the paper's LSTM with batch 4: 1024 rTasks in 4.28 us, or 16 in 7.46 us, on 320 vEUs."""
    fastest, efficient = RKernel(1024, 4.28e-6 / 4), RKernel(16, 7.46e-6)
    matmul = Operator(((fastest, efficient),), (), launch_s=1.0)
    (alone,) = schedule_by_waves([matmul], 320, CHEAP)
    assert alone.rkernels == (0,)
    (wave,) = schedule_by_waves([matmul] * 8, 320, CHEAP)
    assert wave.rkernels == (1,) * 8


def test_row_20_a_wave_that_leaves_veus_idle_keeps_the_fastest_rkernels():
    operator = Operator(((RKernel(4, 2e-6), RKernel(2, 1e-6)),), (), launch_s=1.0)
    (segment,) = schedule_by_waves([operator], 8, CHEAP)
    assert segment.rkernels == (0,)


def test_row_22_a_graph_is_cut_where_a_plan_is_slower_than_two():
    """Chains that run side by side, then one operator whose rTasks wait for all of them."""
    chains = [Operator(((RKernel(1, 1e-6),),), (), 1.0) for _ in range(4)]
    graph = [*chains, *(Operator(((RKernel(8, 1e-6),),), tuple(range(4)), 1.0) for _ in range(4))]
    assert len(schedule_by_waves(graph, 4, Overheads(1e-7, 1e-6))) == 1
    assert len(schedule_by_waves(graph, 4, Overheads(5e-6, 1e-6))) == 2


def test_an_operator_that_uses_all_workers_well_is_a_launch_of_its_own():
    large = Operator(((RKernel(64, 1e-5),),), (), launch_s=64 / 4 * 1e-5)
    (segment,) = schedule_by_waves([large], 4, CHEAP)
    assert segment.plan is None
    small = Operator(((RKernel(1, 1e-5),),), (), launch_s=1e-5)
    (pair,) = schedule_by_waves([small, small], 4, CHEAP)
    assert pair.plan is not None
    assert pair.seconds == pytest.approx(1.1e-5)


def test_rtasks_go_to_the_veus_that_are_free_first():
    operators = [Operator(((RKernel(1, 8e-6),),), (), 1.0), Operator(((RKernel(10, 1e-6),),), (), 1.0)]
    (segment,) = schedule_by_waves(operators, 2, CHEAP)
    assert segment.plan.programs == ((Execute(0, 0, 1), Execute(1, 0, 1)), (Execute(1, 1, 9),))


def test_side_by_side_each_operator_has_one_veu():
    operators = [Operator(((RKernel(16, 1e-6),),), (), 1e-6) for _ in range(3)]
    (segment,) = schedule_side_by_side(operators, 2, CHEAP)
    assert sorted(len(program) for program in segment.plan.programs) == [1, 2]
    assert segment.plan.num_tasks == (16, 16, 16)


def test_row_20_side_by_side_each_operator_takes_its_most_efficient_rkernel():
    operator = Operator(((RKernel(16, 2e-6), RKernel(4, 5e-6)),), (), 1e-6)
    (segment,) = schedule_side_by_side([operator] * 2, 2, CHEAP)
    assert segment.rkernels == (1, 1)
    assert segment.plan.num_tasks == (4, 4)
    assert segment.seconds == pytest.approx(21e-6)


def test_copies_of_one_node_are_told_apart_by_when_they_may_run():
    """A schedule may execute the second copy of a node first, once what it reads is there."""
    steps = (
        PlannedStep("a", (), 0),
        PlannedStep("b", (), 0),
        PlannedStep("both", (0,)),  # copies of its two inputs
        PlannedStep("both", (1,)),
        PlannedStep("sum", (2, 3), 0),
    )
    names = ("b", "both", "a", "both", "sum")
    listed = [{"node": name} | ({} if name == "both" else {"launch": 0}) for name in names]
    launches = schedule_by_hand({"steps": listed})(steps)
    assert [launch.steps for launch in launches] == [(1,), (3,), (0,), (2,), (4,)]
    with pytest.raises(ArgumentError, match="'both' before 'a', which it depends on"):
        schedule_by_hand({"steps": [listed[i] for i in (0, 1, 3, 2, 4)]})(steps)


def test_copies_of_one_node_are_told_apart_by_their_numbers():
    """Two copies of one node may both run: the plan says which of them it means."""
    rng = random.Random(3)
    for _ in range(200):
        steps: list[PlannedStep] = []
        for number in range(rng.randrange(2, 12)):
            before = tuple(sorted(rng.sample(range(number), min(number, rng.randrange(3)))))
            kind = rng.choice(("kernel", "loop", "copy", "copy"))
            name = rng.choice("ab") if kind == "copy" else f"n{number}" if number else "a"  # copies and a loop share "a"
            steps.append(PlannedStep(name, before, 0 if kind == "kernel" else None, loop=(2, ()) if kind == "loop" else None))
        order: list[int] = []
        while len(order) < len(steps):
            order.append(rng.choice([i for i in range(len(steps)) if i not in order and set(steps[i].predecessors) <= {*order}]))
        listed = [listed_step(steps, number) for number in order]
        assert [launch.steps for launch in schedule_by_hand({"steps": listed})(steps)] == [(number,) for number in order]
    with pytest.raises(ArgumentError, match="'both' has 2 copies, and none is number 2"):
        schedule_by_hand({"steps": [{"node": "both"}, {"node": "both", "number": 2}]})([PlannedStep("both", ())] * 2)
    with pytest.raises(ArgumentError, match="executes 'both' twice"):
        schedule_by_hand({"steps": [{"node": "both", "number": 1}] * 2})([PlannedStep("both", ())] * 2)
    with pytest.raises(ArgumentError, match="none is number '0'"):
        schedule_by_hand({"steps": [{"node": "both", "number": "0"}]})([PlannedStep("both", ())])


def listed_step(steps: list[PlannedStep], number: int) -> dict[str, object]:
    """Return a step as the JSON of a plan has it: the number 0 is left out."""
    step = steps[number]
    if step.is_loop:
        return {"node": step.node, "body": []}
    if step.kernel is not None:
        return {"node": step.node, "launch": step.launch}
    place = sum(each.node == step.node and each.kernel is None and not each.is_loop for each in steps[:number])
    return {"node": step.node} | ({"number": place} if place else {})
