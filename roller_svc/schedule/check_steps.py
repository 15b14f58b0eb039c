"""Steps of a schedule → the problems that they have, each with its rule, its place and a step that would do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.errors import ScheduleError
from roller_svc.schedule.schedule import Schedule
from roller_svc.schedule.step_text import format_step
from roller_svc.schedule.steps import Step, apply_step
from roller_svc.schedule.suggest_step import suggest_step

RULE_PREFIX = "schedule-"


@dataclass(frozen=True, slots=True)
class Problem:
    """A step that breaks a rule. `step` counts from 0, `line` and `column` from 1; None without a text."""

    step: int | None
    rule: str
    message: str
    hint: str | None
    line: int | None = None
    column: int | None = None

    @classmethod
    def from_error(cls, error: ScheduleError) -> Problem:
        return cls(error.step, error.code.removeprefix(RULE_PREFIX), error.message, error.hint, error.line, error.column)


def apply_steps(schedule: Schedule, steps: Sequence[Step], lines: Sequence[int] = (), text: str | None = None) -> Schedule:
    """Return the schedule after all steps.

    Args:
        schedule: the schedule before them.
        steps: the steps.
        lines: the line of each in `text`, from 1.
        text: what the steps were parsed from.

    Raises ScheduleError with the first step that breaks a rule. Its hint is a step that is legal instead, if one is
    found.
    """
    for number, step in enumerate(steps):
        try:
            schedule = apply_step(schedule, step)
        except ScheduleError as error:
            placed = _placed(error, schedule, number, step)
            if lines and text is not None:
                line = text.split("\n")[lines[number] - 1]
                placed.text, placed.line, placed.column = text, lines[number], len(line) - len(line.lstrip()) + 1
                placed.end_column = len(line.partition("#")[0].rstrip()) + 1
            raise placed from error
    return schedule


def _placed(error: ScheduleError, before: Schedule, number: int, step: Step) -> ScheduleError:
    """Return the error with the step and its number, and with a step that would do as its hint."""
    instead = suggest_step(before, step, error.code)
    hint = error.hint if instead is None else format_step(instead)
    placed = ScheduleError(f"{format_step(step)}: {error.message}", code=error.code, hint=hint)
    placed.step = number
    return placed
