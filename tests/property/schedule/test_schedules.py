"""Any legal schedule gives the reference's result; an illegal transform is refused, never a crash."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from schedule_support import PROGRAMS, compiled, inputs_of, interpreted, judged

from roller_svc.errors import ScheduleError
from roller_svc.schedule import transforms
from roller_svc.schedule.default import default_schedule
from roller_svc.schedule.schedule import At, Schedule

FACTORS = (1, 2, 3, 4, 5, 8, 0, -2, 100)
Step = tuple[int, int, int, int]
steps: st.SearchStrategy[list[Step]] = st.lists(
    st.tuples(st.integers(0, 15), st.integers(0, 30), st.integers(0, 30), st.integers(0, 30)), min_size=1, max_size=12
)
names = st.sampled_from(sorted(PROGRAMS))


def transformed(schedule: Schedule, step: Step) -> Schedule:
    """One transform, chosen by numbers: often one that fits, sometimes one that cannot."""
    what, a, b, c = step
    stages = [s for f in schedule.functions for s in f.stages]
    stage = stages[a % len(stages)]
    loops = [loop.name for loop in stage.loops] or ["none"]
    loop, other = loops[b % len(loops)], loops[c % len(loops)]
    producer = schedule.functions[c % len(schedule.functions)].name
    factor = FACTORS[c % len(FACTORS)]
    match what:
        case 0 | 1:
            return transforms.split(schedule, stage.name, loop, factor)
        case 2:
            return transforms.reorder(schedule, stage.name, loop, other)
        case 3:
            return transforms.reorder(schedule, stage.name, *loops[b % len(loops) :], *loops[: b % len(loops)])
        case 4:
            return transforms.fuse(schedule, stage.name, loop, loops[(b + 1) % len(loops)])
        case 5:
            return transforms.tile(schedule, stage.name, (loop, factor), (other, 2))
        case 6:
            return transforms.vectorise(schedule, stage.name, loops[-1] if c % 3 else loop)
        case 7:
            return transforms.unroll(schedule, stage.name, loop)
        case 8:
            return transforms.parallel(schedule, stage.name, loop)
        case 9:
            return transforms.compute_at(schedule, producer, stage.name, loop)
        case 10 | 11:
            return transforms.compute_at(schedule, producer, *reader(schedule, producer, a, b))
        case 12:
            return transforms.compute_root(schedule, producer)
        case 13:
            site = schedule.function(producer).computed
            outer = schedule.stage(site.stage).loops[0].name if isinstance(site, At) else loop
            return transforms.store_at(schedule, producer, site.stage if isinstance(site, At) else stage.name, outer)
        case 14:
            return transforms.store_root(schedule, producer)
        case _:
            return transforms.inline(schedule, producer)


def reader(schedule: Schedule, producer: str, a: int, b: int) -> tuple[str, str]:
    """A stage and loop of a statement that reads the producer, if one does."""
    stages = [f.stages[-1] for f in schedule.functions if producer in f.statement.reads_tensors]
    stage = (stages or [schedule.functions[-1].stages[-1]])[a % max(1, len(stages))]
    loops = [loop.name for loop in stage.loops] or ["none"]
    return stage.name, loops[b % len(loops)]


def scheduled(name: str, chosen: list[Step]) -> Schedule:
    """The default schedule after all steps that are legal."""
    schedule = default_schedule(PROGRAMS[name])
    refusals = []
    for step in chosen:
        try:
            schedule = transformed(schedule, step)
        except ScheduleError as refused:
            refusals.append(refused)
    assert all(r.code.startswith("schedule-") and r.code != ScheduleError.default_code for r in refusals)
    return schedule


@settings(derandomize=True, deadline=None, max_examples=examples(150))
@given(name=names, chosen=steps)
def test_every_legal_schedule_gives_the_reference(name: str, chosen: list[Step]) -> None:
    schedule = scheduled(name, chosen)
    inputs = inputs_of(schedule.program)
    verdict = judged(schedule.program, inputs, interpreted(schedule, inputs))
    assert verdict.ok, verdict.detail


def compiled_schedules_agree(name: str, recipes: list[list[Step]]) -> None:
    schedules = [scheduled(name, chosen) for chosen in recipes]
    inputs = inputs_of(PROGRAMS[name])
    for module in compiled(schedules):
        verdict = judged(PROGRAMS[name], inputs, module.run(inputs))
        assert verdict.ok, f"{verdict.detail}\n{module.source.text}"


@settings(derandomize=True, deadline=None, max_examples=6)
@given(name=names, recipes=st.lists(steps, min_size=4, max_size=4))
def test_compiled_schedules_give_the_reference(name: str, recipes: list[list[Step]]) -> None:
    compiled_schedules_agree(name, recipes)


@pytest.mark.slow
@settings(derandomize=True, deadline=None, max_examples=examples(50))
@given(name=names, recipes=st.lists(steps, min_size=4, max_size=4))
def test_many_compiled_schedules_give_the_reference(name: str, recipes: list[list[Step]]) -> None:
    compiled_schedules_agree(name, recipes)
