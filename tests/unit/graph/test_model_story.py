"""Stories of models: replayed plans take the seconds of their schedules, and memory is one buffer's at a time."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from roller_svc.analysis.happens_before import check_plan
from roller_svc.errors import ArgumentError, InvariantError
from roller_svc.graph import model_story
from roller_svc.graph.plan import PlannedModel, PlannedStep
from roller_svc.graph.rammer.replay import edit_schedule, replay, replay_launch
from roller_svc.graph.rammer.schedules import OVERHEADS, POLICIES, StepTimes, find_segments, make_schedule
from roller_svc.ir.canonical import from_json
from roller_svc.ir.model_plan import ModelPlan
from roller_svc.ir.model_schedule import ModelSchedule, ScheduledOperator
from roller_svc.ir.model_story import StoryInstruction
from roller_svc.ir.vdevice import Barrier, Execute, VDevicePlan, WaitEvent
from roller_svc.model import Model, compile_model, load_model
from roller_svc.settings import read_settings, use

RNG = np.random.default_rng(0)
US = 1e-6
ROPERATOR = ScheduledOperator("n", 0, 0, (0, 0), 1, US, US, ())
EMPTY = ModelPlan("m", "local", (), (), (), (), (), (), 0, 0, 0, 0, 0, 3)


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    use(read_settings(cache=folder))
    yield folder
    use(read_settings())


def random_steps(rng: random.Random) -> tuple[list[PlannedStep], StepTimes]:
    """Return steps that depend on earlier ones, with phases, loops and copies, and their times."""
    steps, alone, launch = [], [], []
    for number in range(rng.randrange(1, 14)):
        before = tuple(sorted(rng.sample(range(number), min(number, rng.randrange(3)))))
        kind = rng.randrange(6)
        tasks = tuple(rng.randrange(1, 40) for _ in range(rng.choice((1, 1, 2)))) if kind > 1 else ()
        loop = (rng.randrange(1, 5), ()) if kind == 0 else None
        steps.append(PlannedStep(f"n{number}", before, None if kind < 2 else 0, 0, tasks, loop))
        launch.append(rng.uniform(1, 80) * US)
        alone.append(launch[-1] * rng.uniform(0.9, 4))
    return steps, StepTimes(tuple(alone), tuple(launch), is_measured=False)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("veus", [2, 3, 8])
def test_a_replayed_schedule_takes_its_seconds(policy: str, veus: int) -> None:
    rng = random.Random(veus)
    for _ in range(40):
        steps, times = random_steps(rng)
        launches = tuple(make_schedule(policy, times, veus)(steps))
        instructions, seconds = replay(model_story._schedule(PlannedModel(EMPTY, tuple(steps), launches, ()), times, veus))
        segments = find_segments(policy, steps, times, veus)
        assert seconds == pytest.approx(sum(each.seconds for each in segments), rel=1e-12)
        assert max(each.end_s for each in instructions) == seconds
        check_waits([shown(each) for each in instructions])


def shown(instruction: StoryInstruction) -> dict[str, Any]:
    return {"veu": instruction.veu, "order": instruction.order, "end_s": instruction.end_s, "for": instruction.waits}


def check_waits(instructions: list[dict[str, Any]]) -> None:
    """Every wait is for instructions of vEUs that end before it does."""
    ends = {(each["veu"], each["order"]): each["end_s"] for each in instructions if each.get("veu") is not None}
    for each in instructions:
        assert all(ends[tuple(position)] <= each["end_s"] for position in each.get("for", ()))


def test_vEUs_that_wait_for_each_other_have_no_story() -> None:
    waits = VDevicePlan((1,), ((Barrier(((1, 0),)),), (Barrier(((0, 0),)), Execute(0, 0, 1))))
    with pytest.raises(InvariantError, match="wait for each other"):
        replay_launch(waits, [ROPERATOR])
    events = VDevicePlan((1,), ((Execute(0, 0, 1), WaitEvent(0)),), (1,))
    with pytest.raises(InvariantError, match="events"):
        replay_launch(events, [ROPERATOR])


class Counted(tuple[tuple[int, int], ...]):
    """The waits of a barrier, which count how often one of them is read."""

    __slots__ = ()
    reads = 0

    def __getitem__(self, place: Any) -> Any:
        Counted.reads += 1
        return super().__getitem__(place)

    def __iter__(self) -> Iterator[tuple[int, int]]:
        for each in super().__iter__():
            Counted.reads += 1
            yield each


def test_each_wait_is_read_a_few_times() -> None:
    """A vEU with many waits waits for others, which wake it, or wait for each other, again and again."""
    steps, waits = 400, 1000
    turns: list[list[Barrier | Execute]] = [[Execute(0, 0, 1)], [Barrier(((0, 0),))]]
    for number in range(steps):
        turns[0].append(Barrier(((1, number),)))
        turns[1].append(Barrier(((0, number + 1),)))
    listed = Counted([(1, 0)] * waits + [(0, number) for number in range(steps)] + [(1, steps)])
    plan = VDevicePlan((1,), (*map(tuple, turns), (Barrier(listed),)))
    Counted.reads = 0
    check_plan(plan)
    assert 0 < Counted.reads < 5 * len(listed)
    Counted.reads = 0
    spans = replay_launch(plan, [ROPERATOR])
    assert 0 < Counted.reads < 5 * len(listed)
    assert spans[2][0][1] == pytest.approx(spans[1][-1][1] + OVERHEADS.wait_s)
    rng = random.Random(1)
    for _ in range(30):
        check_replay(random_programs(rng))


def random_programs(rng: random.Random) -> VDevicePlan:
    """Return programs whose instructions wait for some of those that were drawn before them."""
    programs: list[list[Barrier | Execute]] = [[], [], []]
    for number in range(rng.randrange(1, 30)):
        drawn = [(veu, order) for veu, program in enumerate(programs) for order in range(len(program))]
        if drawn and rng.random() < 0.6:
            rng.choice(programs).append(Barrier(tuple(rng.choices(drawn, k=rng.randrange(1, 6)))))
        rng.choice(programs).append(Execute(0, number, 1))
    return VDevicePlan((30,), tuple(map(tuple, programs)))


def check_replay(plan: VDevicePlan) -> None:
    """Each instruction starts behind the one before it, and ends behind all that it waits for."""
    spans = replay_launch(plan, [replace(ROPERATOR, tasks=30)])
    for veu, program in enumerate(plan.programs):
        for order, instruction in enumerate(program):
            start_s, end_s = spans[veu][order]
            assert start_s == (spans[veu][order - 1][1] if order else OVERHEADS.launch_s)
            if isinstance(instruction, Execute):
                assert end_s == start_s + ROPERATOR.task_s
            else:
                ends = [spans[other][at][1] + OVERHEADS.wait_s * (other != veu) for other, at in instruction.waits]
                assert end_s == max(start_s, *ends)


def constant(*shape: int) -> dict[str, Any]:
    return {"dtype": "float32", "shape": list(shape), "values": (RNG.standard_normal(shape) / shape[-1]).tolist()}


def node(name: str, expression: str, inputs: dict[str, str]) -> dict[str, Any]:
    return {"name": name, "expression": expression, "inputs": inputs, "outputs": {"C": name}}


PRODUCT = "C[i, j] +=! A[i, k] * B[k, j]"
TOWERS = {
    "format": "roller-graph/1",
    "name": "towers",
    "inputs": {"x": {"dtype": "float32", "shape": [64, 256]}},
    "constants": {name: constant(256, 256) for name in "abcd"},
    "nodes": [
        *(node(f"{name}0", PRODUCT, {"A": "x", "B": name}) for name in "abcd"),
        *(node(f"{name}1", "C[i] +=! exp(A[i, j])", {"A": f"{name}0"}) for name in "abcd"),
        {"name": "flat", "operator": "reshape", "inputs": ["a0"], "outputs": ["flat"], "parameters": {"shape": [16384]}},
        node("sum", "C[i] = A[i] + B[i] + D[i] + E[i] + F[i * 256]", {"A": "a1", "B": "b1", "D": "c1", "E": "d1", "F": "flat"}),
    ],
    "outputs": {"y": "sum"},
}


def compiled(plan: Any, model: dict[str, Any] = TOWERS, **options: Any) -> Model:
    given = {"select": "model", "top_k": 1, "threads": 2, "plan": plan} | options
    return compile_model(copy.deepcopy(model), **given)


def check_story(story: dict[str, Any]) -> None:
    instructions, steps, buffers = story["instructions"], story["steps"], story["buffers"]
    assert max(each["end_s"] for each in instructions) == story["seconds"]
    assert {each["step"] for each in instructions if "step" in each} == set(range(len(steps)))
    check_waits(instructions)
    for first, second in combinations(buffers, 2):
        overlap = first["offset_bytes"] < second["offset_bytes"] + second["bytes"] and (
            second["offset_bytes"] < first["offset_bytes"] + first["bytes"]
        )
        assert not overlap or first["end_s"] <= second["start_s"] or second["end_s"] <= first["start_s"]
    assert all(each["offset_bytes"] + each["bytes"] <= story["arena_bytes"] for each in buffers)
    assert all(each["written_by"] for each in buffers)
    assert all(each["from"] < each["to"] for each in story["edges"])
    assert sum(each["seconds"] for each in story["nodes"]) == pytest.approx(
        sum(each["seconds"] for each in steps if "node" in each)
    )


@pytest.mark.slow
def test_the_story_of_a_model_is_that_of_its_plan(tmp_path: Path) -> None:
    model = compiled("serial")
    check_story(model.story)
    named = copy.deepcopy(TOWERS)
    named["nodes"][8]["name"] = "flat+view"
    eager = compiled("eager", model=named)
    check_story(eager.story)
    nodes = {each["name"]: each for each in eager.story["nodes"]}
    assert len(nodes) == len(TOWERS["nodes"])
    assert nodes["flat+view"]["view"]
    assert nodes["flat+view"]["members"] == ["flat+view"]
    assert "kernel" not in nodes["flat+view"]
    assert eager.story["kernels"][nodes["a0"]["kernel"]]["digest"] == eager.kernels[nodes["a0"]["kernel"]].digest
    assert model.story["seconds"] == pytest.approx(sum(each["seconds"] for each in model.story["steps"]))
    for plan in ("parallel", "rammer"):
        model = compiled(plan)
        story = model.story
        check_story(story)
        assert story["seconds"] == model.report["plan_seconds"][plan]
        assert (story["plan"], story["veus"]) == (plan, 2)
        assert {each["kind"] for each in story["instructions"]} >= {"execute"}
    by_hand = compiled(model.plan).story
    assert by_hand | {"plan": "rammer"} == story
    shown = model._repr_html_()
    assert shown.count("<rect") >= 2
    assert f"{len(story['instructions'])} instructions on 2 cores" in shown
    with pytest.raises(ArgumentError) as refusal:
        _ = load_model(model.save(tmp_path / "saved")).story
    assert refusal.value.code == "no-story"


def edit(rng: random.Random, programs: list[list[dict[str, Any]]]) -> None:
    """Move, swap or remove an instruction, or a part of a wait, so that programs may be illegal."""
    program = rng.choice([each for each in programs if len(each) > 1])
    at = rng.randrange(len(program) - 1)
    waits = [each for each in program if "wait" in each]
    match rng.randrange(4):
        case 0:
            program[at], program[at + 1] = program[at + 1], program[at]
        case 1:
            other = rng.choice(programs)
            instruction = program.pop(at)
            other.insert(rng.randrange(len(other) + 1), instruction)
        case 2 if waits:
            program.remove(rng.choice(waits))
        case _:
            for each in waits:
                each["wait"] = [[veu, max(0, order - rng.randrange(2))] for veu, order in each["wait"]]


def answer_of(run: Callable[[], float]) -> float | str:
    """Return the seconds, or why a plan is not legal."""
    try:
        return run()
    except ArgumentError as refusal:
        return f"{refusal.code}: {refusal.message.split(': ')[-1]}"


@pytest.mark.slow
def test_edited_programs_are_legal_where_the_plan_compiles() -> None:
    model = compiled("rammer")
    schedule = from_json(ModelSchedule, json.loads(json.dumps(model.schedule))["buckets"][0])
    assert replay(schedule)[1] == model.story["seconds"]
    rng, answers = random.Random(5), []
    for _ in range(12):
        plan = copy.deepcopy(model.plan)
        programs = [step["vdevice"]["programs"] for step in plan["steps"] if "vdevice" in step]
        edit(rng, rng.choice(programs))
        answers.append(answer_of(lambda programs=programs: replay(edit_schedule(schedule, programs))[1]))
        assert answers[-1] == answer_of(lambda plan=plan: compiled(plan).story["seconds"])
    assert len([each for each in answers if isinstance(each, str)]) in range(2, 11)
    with pytest.raises(ArgumentError, match="launches, expected"):
        edit_schedule(schedule, [])
    assert compiled("serial").schedule is None


CONCATS = {
    "format": "roller-graph/1",
    "name": "concats",
    "inputs": {name: {"dtype": "float32", "shape": [8, 8]} for name in ("x", "w0", "w1", "w2")},
    "nodes": [
        node("n1", "C[i, j] = A[j, i] + B[i, j]", {"A": "w0", "B": "x"}),
        {"name": "c2", "operator": "concat", "inputs": ["n1", "w1"], "outputs": ["c2"], "parameters": {"axis": 0}},
        node("k2", "C[i, j] = A[i, j] * 1.0 where i in 8, j in 8", {"A": "c2"}),
        {"name": "c5", "operator": "concat", "inputs": ["n1", "w1", "x"], "outputs": ["c5"], "parameters": {"axis": 0}},
        node("k5", "C[i, j] = A[i + 7, j] * 1.0 where i in 8, j in 8", {"A": "c5"}),
    ],
    "outputs": {"y": "k2", "z": "k5"},
}


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["rammer", "parallel"])
def test_a_plan_with_copies_is_the_plan_of_its_story(plan: str) -> None:
    model = compiled(plan, model=CONCATS)
    check_story(model.story)
    inner = [each for step in model.plan["steps"] for each in step.get("steps", [step])]
    copies = [(each["node"], each.get("number", 0)) for each in inner if "copy" in each]
    assert sorted(copies) == [("c2", 0), ("c2", 1), ("c5", 0), ("c5", 1)]
    schedule = from_json(ModelSchedule, model.schedule["buckets"][0])
    programs = [step["vdevice"]["programs"] for step in model.plan["steps"] if "vdevice" in step]
    assert replay(edit_schedule(schedule, programs))[1] == model.story["seconds"]
    by_hand = compiled(model.plan, model=CONCATS)
    assert by_hand.story["seconds"] == model.story["seconds"]


LOOP = {
    "format": "roller-graph/1",
    "name": "loop",
    "inputs": {"x": {"dtype": "float32", "shape": [5, 1, 64]}, "h": {"dtype": "float32", "shape": [1, 64]}},
    "constants": {"w": constant(64, 64)},
    "nodes": [
        {
            "name": "rnn",
            "loop": {
                "steps": 5,
                "carried": 1,
                "scanned": [False],
                "stacked": [False],
                "body": {
                    "format": "roller-graph/1",
                    "name": "body",
                    "inputs": {"h": {"dtype": "float32", "shape": [1, 64]}, "x": {"dtype": "float32", "shape": [1, 64]}},
                    "constants": {"w": constant(64, 64)},
                    "nodes": [
                        node("p", PRODUCT, {"A": "h", "B": "w"}),
                        node("s", "C[i, j] = tanh(A[i, j] + B[i, j])", {"A": "p", "B": "x"}),
                    ],
                    "outputs": {"next": "s", "all": "s"},
                },
            },
            "inputs": ["h", "x"],
            "outputs": ["last", "all"],
        },
        node("sum", "C[i, j] = A[i, j] * 2", {"A": "last"}),
    ],
    "outputs": {"y": "sum"},
}


@pytest.mark.slow
def test_a_loop_takes_the_seconds_of_its_steps() -> None:
    model = compile_model(copy.deepcopy(LOOP), select="model", top_k=1, threads=2, plan="rammer")
    story = model.story
    check_story(story)
    loop = next(each for each in story["steps"] if each["kind"] == "loop")
    body = [each["seconds"] for each in story["kernels"]][:-1]
    assert loop["seconds"] == pytest.approx(5 * sum(body))


@pytest.mark.slow
def test_the_story_of_a_gpu_has_the_seconds_of_its_lowering() -> None:
    for source, plan in ((TOWERS, "launches"), (TOWERS, "graph"), (TOWERS, "persistent"), (LOOP, "graph")):
        model = compile_model(copy.deepcopy(source), "nvidia-h200-sxm", select="model", top_k=1, plan=plan)
        story = model.story
        assert story["seconds"] == model.report["lowerings"][plan]["seconds"]
        assert story["seconds"] == pytest.approx(max(each["end_s"] for each in story["instructions"]))
        assert story["plan"] == plan
        ends = [each["offset_bytes"] + each["bytes"] for each in story["buffers"]]
        assert story["arena_bytes"] == model.plan["arena"]["bytes"] >= max(ends)
        assert (story["arena_bytes"] >= max(ends) + 64) == (plan == "persistent")  # events of its kernel
        assert {each["kind"] for each in story["instructions"]} <= {"launch", "synchronize"}
        assert sum(each["seconds"] for each in story["steps"]) <= story["seconds"]
        assert all(0 < each["floor_seconds"] <= each["seconds"] for each in story["kernels"])
    assert model.report["lowerings"]["graph"]["overlap"]["nodes"] > 0  # of the loop: they come sooner
