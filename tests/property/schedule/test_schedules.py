"""Any legal schedule gives the reference's result; an illegal transform is refused, never a crash."""

from __future__ import annotations

import json
from dataclasses import dataclass
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from schedule_support import PROGRAMS, compiled, inputs_of, interpreted, judged

from roller_svc.errors import ScheduleError
from roller_svc.ir.program import StatementKind
from roller_svc.schedule.by_hand import read_steps, schedule_by_hand
from roller_svc.schedule.default import default_schedule
from roller_svc.schedule.nest_statements import acc_name
from roller_svc.schedule.schedule import UPDATE, At, Schedule, Split
from roller_svc.schedule.step_json import format_document
from roller_svc.schedule.step_text import format_steps
from roller_svc.schedule.steps import Step, apply_step
from roller_svc.schedule.suggest_step import suggest_step

RULES = {
    f"schedule-{rule}" for rule in ("name", "scope", "vector-inner", "extent", "dependence", "fuse", "marked", "inline", "order")
}
FACTORS = (1, 2, 3, 4, 5, 8, 0, -2, 100)
Numbers = tuple[int, ...]
OPERATIONS = 22  # that `step_of` chooses from
steps: st.SearchStrategy[list[Numbers]] = st.lists(
    st.tuples(st.integers(0, OPERATIONS - 1), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12
)
names = st.sampled_from(sorted(PROGRAMS))


def step_of(schedule: Schedule, numbers: Numbers) -> Step:
    """Return a step, chosen by numbers: often one that is legal, sometimes one that cannot be."""
    what, a, b, c = numbers
    stages = [s for f in schedule.functions for s in f.stages]
    stage = stages[a % len(stages)]
    loops = [loop.name for loop in stage.loops] or ["none"]
    loop, other = loops[b % len(loops)], loops[(b + 1 + c % max(1, len(loops) - 1)) % len(loops)]
    producer = schedule.functions[c % len(schedule.functions)].name
    factor = FACTORS[c % len(FACTORS)]
    match what:
        case 0 | 1:
            more = ((), (("names", (f"o{b}", f"i{b}")),), (("tail", "exact"),))[b % 3]
            return Step("split", stage.name, (("loop", loop), ("factor", factor), *more))
        case 2:
            return Step("reorder", stage.name, (("loops", (loop, other)),))
        case 3:
            return Step("reorder", stage.name, (("loops", (*loops[b % len(loops) :], *loops[: b % len(loops)])),))
        case 4:
            return Step("fuse", stage.name, (("outer", loop), ("inner", loops[(b + 1) % len(loops)])))
        case 5:
            return Step("tile", stage.name, (("outer", (loop, factor)), ("inner", (other, 2))))
        case 6:
            return Step("vectorise", stage.name, (("loop", loops[-1] if c % 3 else loop),))
        case 7:
            return Step("unroll", stage.name, (("loop", loop),))
        case 8:
            return Step("parallel", stage.name, (("loop", loop),))
        case 9:
            return Step("compute_at", producer, (("stage", stage.name), ("loop", loop)))
        case 10 | 11:
            site, its_loop = reader(schedule, producer, a, b)
            return Step("compute_at", producer, (("stage", site), ("loop", its_loop)))
        case 12:
            return Step("compute_root", producer)
        case 13:
            at = schedule.function(producer).computed
            outer = schedule.stage(at.stage).loops[0].name if isinstance(at, At) else loop
            return Step("store_at", producer, (("stage", at.stage if isinstance(at, At) else stage.name), ("loop", outer)))
        case 14:
            return Step("store_root", producer)
        case 15:
            return Step("inline", producer)
        case 16:
            return Step("rename", stage.name, (("loop", loop), ("name", f"r{c}")))
        case 17 | 18:
            return Step("accumulate_at", (producer, stage.name)[b % 4 == 3], (("loop", loop),))
        case 19 if b % 2:
            return Step("store_in", producer, (("scope", ("registers", "stack")[c % 2]),))
        case 19:
            tensor = schedule.program.inputs[c % len(schedule.program.inputs)][0]
            return Step("cache", tensor, (("stage", stage.name), ("loop", loop), ("scope", ("registers", "stack")[c % 2])))
        case 20:
            reduced = [s for f in schedule.functions if f.statement.reduced for s in f.stages[1:]]
            stage = (reduced or stages)[a % len(reduced or stages)]
            halves = [x.inner if b % 2 else x.outer for x in stage.cuts if isinstance(x, Split)] or loops
            return Step("rfactor", stage.name, (("loop", halves[c % len(halves)]),))
        case _:
            return Step("serial", stage.name, (("loop", loop),))


def reader(schedule: Schedule, producer: str, a: int, b: int) -> tuple[str, str]:
    """A stage and loop of a statement that reads the producer, if one does."""
    stages = [f.stages[-1] for f in schedule.functions if producer in f.statement.reads_tensors]
    stage = (stages or [schedule.functions[-1].stages[-1]])[a % max(1, len(stages))]
    loops = [loop.name for loop in stage.loops] or ["none"]
    return stage.name, loops[b % len(loops)]


@dataclass(frozen=True)
class Refusal:
    """A step that is illegal after others."""

    steps: tuple[Step, ...]
    before: Schedule
    step: Step
    error: ScheduleError


def follow(name: str, chosen: list[Numbers]) -> tuple[list[Step], Schedule, list[Refusal]]:
    """Return the legal ones of the chosen steps, their schedule, and the others."""
    schedule = default_schedule(PROGRAMS[name])
    steps: list[Step] = []
    refusals: list[Refusal] = []
    for numbers in chosen:
        step = step_of(schedule, numbers)
        try:
            schedule = apply_step(schedule, step)
        except ScheduleError as error:
            refusals.append(Refusal((*steps,), schedule, step, error))
        else:
            steps.append(step)
    return steps, schedule, refusals


def scheduled(name: str, chosen: list[Numbers]) -> Schedule:
    """The default schedule after all steps that are legal."""
    return follow(name, chosen)[1]


@settings(max_examples=examples(50))
@given(name=names, chosen=steps)
def test_text_and_json_have_the_same_steps(name: str, chosen: list[Numbers]) -> None:
    legal, schedule, refusals = follow(name, chosen)
    program = PROGRAMS[name]
    for written in (format_steps(legal), format_document(legal, program), json.dumps(format_document(legal))):
        assert read_steps(written, program).steps == tuple(legal)
        assert schedule_by_hand(program, written) == schedule
    assert all(r.error.code in RULES for r in refusals)


def means_nothing(refusal: Refusal) -> bool:
    """Whether a step moves an output, accumulates a map, computes a function in itself, or lacks a second loop."""
    step, values = refusal.step, dict(refusal.step.values)
    if step.operation.subject == "producer":
        return step.subject in refusal.before.outputs or str(values.get("stage")).removesuffix(UPDATE) == step.subject
    if step.op == "accumulate_at":  # a map, or a function that is already the accumulator of one
        function = refusal.before.owner(step.subject)
        names = [f.name for f in refusal.before.functions]
        return function.statement.kind is StatementKind.MAP and acc_name(function.name) not in names
    return step.op in ("reorder", "fuse", "tile") and len(refusal.before.stage(step.subject).loops) < 2


def test_row_27_most_hints_are_legal_steps() -> None:
    """A refusal names the step and its rule; in four of five the hint is a step that is legal in its place.

    Steps for which no other one would do are left out.
    """
    numbers = Random(1)
    hints: list[Step | None] = []
    while len(hints) < 200:
        name = numbers.choice(("matmul", "blur", "softmax", "windowed"))
        chosen = [tuple(numbers.randrange(OPERATIONS if i == 0 else 31) for i in range(4)) for _ in range(6)]
        for refusal in follow(name, chosen)[2]:
            if means_nothing(refusal):
                continue
            with pytest.raises(ScheduleError) as refused:
                schedule_by_hand(PROGRAMS[name], [*refusal.steps, refusal.step])
            assert (refused.value.step, refused.value.code) == (len(refusal.steps), refusal.error.code)
            hints.append(hint := suggest_step(refusal.before, refusal.step, refusal.error.code))
            if hint is not None:
                apply_step(refusal.before, hint)
    assert sum(hint is not None for hint in hints) >= 0.8 * len(hints)


@settings(max_examples=examples(150))
@given(name=names, chosen=steps)
def test_row_25_every_legal_schedule_gives_the_reference(name: str, chosen: list[Numbers]) -> None:
    schedule = scheduled(name, chosen)
    inputs = inputs_of(schedule.program)
    verdict = judged(schedule.program, inputs, interpreted(schedule, inputs))
    assert verdict.ok, verdict.detail


def compiled_schedules_agree(name: str, recipes: list[list[Numbers]]) -> None:
    schedules = [scheduled(name, chosen) for chosen in recipes]
    inputs = inputs_of(PROGRAMS[name])
    for module in compiled(schedules):
        verdict = judged(PROGRAMS[name], inputs, module.run(inputs))
        assert verdict.ok, f"{verdict.detail}\n{module.source.text}"


@settings(max_examples=6)
@given(name=names, recipes=st.lists(steps, min_size=4, max_size=4))
def test_row_25_compiled_schedules_give_the_reference(name: str, recipes: list[list[Numbers]]) -> None:
    compiled_schedules_agree(name, recipes)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["matmul", "blur", "softmax", "windowed"])
def test_row_25_two_hundred_compiled_schedules_give_the_reference(name: str) -> None:
    numbers = Random(1)
    for _ in range(4):
        recipes = [[tuple(numbers.randrange(OPERATIONS if i == 0 else 31) for i in range(4)) for _ in range(12)] for _ in range(50)]
        compiled_schedules_agree(name, recipes)
