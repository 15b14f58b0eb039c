"""A refused step of a schedule → a legal step that is near to what was meant: the hint of the refusal."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import islice

from roller_svc.errors import ScheduleError
from roller_svc.ir.schedule import LoopKind
from roller_svc.schedule.bounds import infer_bounds
from roller_svc.schedule.nest_statements import ACCUMULATOR
from roller_svc.schedule.schedule import At, Schedule, Stage
from roller_svc.schedule.steps import PRODUCER, STAGE, TENSOR, FieldKind, Step, Value, apply_step

MAX_TRIED = 48
COMMON_FACTORS = (64, 32, 16, 8, 4, 2, 1)


def suggest_step(schedule: Schedule, refused: Step, code: str) -> Step | None:
    """Return a step that is legal in place of a refused one, or None if none of those tried is.

    Args:
        schedule: the schedule before the step.
        refused: the step.
        code: of the rule that it breaks.
    """
    for step in islice(_candidates(schedule, refused, code), MAX_TRIED):
        try:
            changes = apply_step(schedule, step) != schedule
        except ScheduleError:
            continue
        if changes:
            return step
    return None


def _candidates(schedule: Schedule, refused: Step, code: str) -> Iterator[Step]:
    """Yield what makes room for the refused step, or another site of its function; then the same step elsewhere."""
    stages = {s.name: s for f in schedule.functions for s in f.stages}
    stage = stages.get(refused.subject)
    if refused.operation.subject == STAGE and stage is not None:
        yield from _steps_before(schedule, stage, refused, code)
    elif code != "schedule-name":
        yield from _in_readers(schedule, refused.subject)
        yield Step("compute_root", refused.subject)
    yield from _neighbours(schedule, stages, refused)


def _steps_before(schedule: Schedule, stage: Stage, refused: Step, code: str) -> Iterator[Step]:
    """Yield steps after which the refused one may be legal."""
    values = dict(refused.values)
    names = [loop.name for loop in stage.loops]
    if refused.op == "accumulate_at":
        yield from _accumulated(schedule, refused.subject)
    if refused.op == "rfactor":
        reduced = {axis.name for axis in schedule.owner(stage.name).statement.reduced}
        split = [Step("split", stage.name, (("loop", name), ("factor", 32))) for name in names if name in reduced]
        yield from (_with_factor(step, factor) for step in split for factor in COMMON_FACTORS)
    match code, values:
        case "schedule-vector-inner", {"loop": str(loop)} if loop in names:
            yield _innermost(stage, loop)
        case "schedule-dependence", {"loop": str(loop)}:
            inside = [f.name for f in schedule.functions if isinstance(f.computed, At)]
            yield from (Step("store_at", name, (("stage", stage.name), ("loop", loop))) for name in inside)
            if refused.op == "vectorise":
                yield from (_innermost(stage, other) for other in reversed(names) if other != loop)
        case "schedule-fuse", {"outer": str(outer), "inner": str(inner)} if outer != inner and {outer, inner} <= {*names}:
            rest = [n for n in names if n != inner]
            at = rest.index(outer) + 1
            yield Step("reorder", stage.name, (("loops", (*rest[:at], inner, *rest[at:])),))
        case "schedule-name", {"outer": (str() as loop, int() as factor), "inner": (str() as other, int())} if loop == other:
            yield Step("split", stage.name, (("loop", loop), ("factor", factor)))
        case "schedule-marked", _:
            marked = [x.name for x in stage.loops if x.kind is not LoopKind.SERIAL and x.name in _names_in(values)]
            yield from (Step("serial", stage.name, (("loop", name),)) for name in marked)


def _in_readers(schedule: Schedule, producer: str) -> Iterator[Step]:
    """Yield the computation of a function in the outermost loop of each stage that reads it; then that of its readers.

    A function that several others read has a site in a loop once they are computed in one another's loops.
    """
    readers = infer_bounds(schedule).readers
    names = [producer, *(schedule.owner(nest.stage.name).name for nest in readers.get(producer, ()))]
    for name in dict.fromkeys(names):
        for nest in readers.get(name, ()):
            if nest.loops:
                yield Step("compute_at", name, (("stage", nest.stage.name), ("loop", nest.loops[0].name)))


def _accumulated(schedule: Schedule, stage: str) -> Iterator[Step]:
    """Yield the accumulation of the stage's function, or of the map that writes it, in a loop of its writing stage."""
    name = schedule.owner(stage).name.removesuffix(ACCUMULATOR)
    for loop in schedule.stage(name).loops if any(f.name == name for f in schedule.functions) else ():
        yield Step("accumulate_at", name, (("loop", loop.name),))


def _innermost(stage: Stage, loop: str) -> Step:
    return Step("reorder", stage.name, (("loops", (*(x.name for x in stage.loops if x.name != loop), loop)),))


def _names_in(values: dict[str, Value]) -> set[str]:
    return {
        name for value in values.values() for name in (value if isinstance(value, tuple) else (value,)) if isinstance(name, str)
    }


def _neighbours(schedule: Schedule, stages: dict[str, Stage], refused: Step) -> Iterator[Step]:
    """Yield the step with another subject, site, loop, factor or name, the nearest first."""
    inputs = [name for name, _ in schedule.program.inputs]
    subjects = {PRODUCER: [f.name for f in schedule.functions], TENSOR: inputs}.get(refused.operation.subject, [*stages])
    if refused.subject not in subjects:
        for subject in _by_nearness(refused.subject, subjects):
            yield from _with_legal_loops(stages, replace(refused, subject=subject))
        return
    sites = [str(value) for name, value in refused.values if name == "stage"]
    for site in _by_nearness(sites[0], [*stages]) if sites else [""]:
        yield from _with_legal_loops(stages, _with_value(refused, "stage", site) if site else refused)


def _with_legal_loops(stages: dict[str, Stage], step: Step) -> Iterator[Step]:
    """Yield the step with common factors, with each loop of its stage in place of its own, and with other new names."""
    stage = stages.get(str(dict(step.values).get("stage", step.subject)))
    loops = [loop.name for loop in stage.loops] if stage is not None else []
    yield step
    if dict(step.values).get("tail") == "exact":
        yield _with_value(step, "tail", "guard")
    yield from (_with_factor(step, factor) for factor in COMMON_FACTORS)
    for field in step.operation.fields:
        value = dict(step.values).get(field.name)
        match field.kind, value:
            case FieldKind.NAME, str() if field.name != "stage":
                yield from (_with_value(step, field.name, loop) for loop in _by_nearness(value, loops) if loop != value)
            case FieldKind.NAMES, (*named,):
                yield _with_value(step, field.name, tuple(dict.fromkeys(_by_nearness(str(n), loops)[0] for n in named if loops)))
            case FieldKind.NEW_NAME, str():
                yield _with_value(step, field.name, f"{value}_new")
            case FieldKind.TWO_NAMES, (str() as outer, str() as inner):
                yield _with_value(step, field.name, (f"{outer}_outer", f"{inner}_inner"))


def _with_factor(step: Step, factor: int) -> Step:
    """Return the step with at most this factor in place of each of its factors."""

    def limited(value: Value) -> Value:
        match value:
            case int():
                return min(value, factor) if value > 0 else factor
            case (str() as loop, int() as number):
                return loop, min(number, factor) if number > 0 else factor
            case _:
                return value

    return replace(step, values=tuple((key, limited(value)) for key, value in step.values))


def _with_value(step: Step, name: str, value: Value) -> Step:
    return replace(step, values=tuple((key, value if key == name else old) for key, old in step.values))


def _by_nearness(name: str, names: Sequence[str]) -> list[str]:
    """Return the names, those of loops that `name` was cut into first, then the most alike."""
    return sorted(names, key=lambda each: (not each.startswith(f"{name}."), -difflib.SequenceMatcher(None, name, each).ratio()))
