"""Schedules by hand: text, JSON or steps → the steps of a program, and the schedule that they make of its default."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from roller_svc.errors import ScheduleError
from roller_svc.ir.options import ScheduleText
from roller_svc.ir.program import TensorProgram
from roller_svc.schedule.check_steps import apply_steps
from roller_svc.schedule.default import default_schedule
from roller_svc.schedule.schedule import Schedule
from roller_svc.schedule.step_json import parse_document
from roller_svc.schedule.step_text import SYNTAX_CODE, check_size, format_steps, parse_steps
from roller_svc.schedule.steps import Step


@runtime_checkable
class HasSteps(Protocol):
    """Has steps, as `roller_svc.Schedule` does."""

    @property
    def steps(self) -> tuple[Step, ...]: ...


@dataclass(frozen=True, slots=True)
class WrittenSteps:
    """Steps as they were written."""

    steps: tuple[Step, ...]
    lines: tuple[int, ...] = ()  # of the text, one for each step; () for JSON
    text: str | None = None


def read_steps(source: object, program: TensorProgram | None = None) -> WrittenSteps:
    """Read a schedule: text, a JSON document or list, or what has steps.

    Raises ScheduleError with the place of what is wrong; schedule-program if it is of another program than `program`.
    """
    match source:
        case str() if source.lstrip().startswith(("{", "[")):
            return WrittenSteps(parse_document(_parse_json(source), program))
        case str():
            placed = parse_steps(source)
            return WrittenSteps(tuple(each.step for each in placed), tuple(each.line for each in placed), source)
        case HasSteps():
            return WrittenSteps(source.steps)
        case Sequence() if source and all(isinstance(each, Step) for each in source):
            return WrittenSteps(tuple(source))
        case _:
            return WrittenSteps(parse_document(source, program))


def _parse_json(text: str) -> object:
    check_size(text)
    try:
        return json.loads(text)
    except json.JSONDecodeError as error:
        raise ScheduleError(f"not JSON: {error.msg}", code=SYNTAX_CODE, line=error.lineno, column=error.colno) from error
    except (ValueError, RecursionError) as error:  # a number of too many digits, lists in lists
        raise ScheduleError("not a schedule: too deep, or a number that is too long", code=SYNTAX_CODE) from error


def schedule_text(source: object) -> ScheduleText:
    """Return the canonical text of a schedule, which is part of the key of its action. Raises as `read_steps` does."""
    steps = read_steps(source).steps
    return ScheduleText(format_steps(steps), steps if isinstance(source, HasSteps) else source)


def schedule_by_hand(program: TensorProgram, source: object) -> Schedule:
    """Return the default schedule of a program after the steps. Raises ScheduleError for the first illegal one."""
    written = read_steps(source, program)
    return apply_steps(default_schedule(program), written.steps, written.lines, written.text)
