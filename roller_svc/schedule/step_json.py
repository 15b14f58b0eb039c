"""Steps of a schedule ↔ JSON: `{"format": "roller-schedule/1", "program": DIGEST, "steps": [...]}`, or the list alone."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace

from roller_svc.errors import ScheduleError
from roller_svc.frontend.lang.input_types import short_repr
from roller_svc.frontend.lang.names import known_names
from roller_svc.ir import canonical
from roller_svc.ir.program import TensorProgram
from roller_svc.schedule.step_text import SYNTAX_CODE, check_count, check_name, check_new_name, hint_operation
from roller_svc.schedule.steps import CHOICES, OPERATIONS, Field, FieldKind, Operation, Step, Value

FORMAT = "roller-schedule/1"
_KEYS = ("format", "program", "steps")


def parse_document(document: object, program: TensorProgram | None = None) -> tuple[Step, ...]:
    """Parse a schedule. Raises ScheduleError that names the step and field.

    A document that has the digest of a program is refused (schedule-program) for another program.
    """
    steps = document
    if isinstance(document, Mapping):
        _check_keys(document, _KEYS, "a schedule")
        if document.get("format") != FORMAT:
            raise ScheduleError(f"expected the format {FORMAT!r}, got {short_repr(document.get('format'))}", code=SYNTAX_CODE)
        digest, steps = document.get("program"), document.get("steps")
        if digest is not None and program is not None and digest != program_digest(program):
            raise ScheduleError(
                f"the schedule is of another program: expected {program_digest(program)}, got {short_repr(digest)}",
                code="schedule-program",
                hint='leave out "program" to apply it all the same',
            )
    if isinstance(steps, str) or not isinstance(steps, Sequence):
        raise ScheduleError(f"expected a list of steps, got {short_repr(steps)}", code=SYNTAX_CODE)
    check_count(steps)
    return tuple(_parse_step(number, each) for number, each in enumerate(steps))


def format_document(steps: Iterable[Step], program: TensorProgram | None = None) -> dict[str, object]:
    """Return the JSON document of steps, with the digest of their program if one is given."""
    digest = {} if program is None else {"program": program_digest(program)}
    return {"format": FORMAT, **digest, "steps": [_step_json(step) for step in steps]}


def program_digest(program: TensorProgram) -> str:
    """Return the digest of a program and its types, "sha256:<hex>"."""
    return f"sha256:{canonical.digest(replace(program, constants=(), donated=(), name=''))}"


def _step_json(step: Step) -> dict[str, object]:
    values = {name: list(value) if isinstance(value, tuple) else value for name, value in step.values}
    return {step.operation.subject: step.subject, "op": step.op, **values}


def _parse_step(number: int, document: object) -> Step:
    try:
        return _read_step(document)
    except ScheduleError as error:
        error.step = number
        raise


def _read_step(document: object) -> Step:
    if not isinstance(document, Mapping):
        raise ScheduleError(f"expected a step with the field op, got {short_repr(document)}", code=SYNTAX_CODE)
    op = document.get("op")
    operation = OPERATIONS.get(op) if isinstance(op, str) else None
    if not isinstance(op, str) or operation is None:
        raise ScheduleError(f"unknown operation {short_repr(op)}", code=SYNTAX_CODE, hint=hint_operation(str(op)[:80]))
    _check_keys(document, ("op", operation.subject, *(field.name for field in operation.fields)), op)
    subject = _value(op, Field(operation.subject, FieldKind.NAME), document.get(operation.subject))
    return Step(op, str(subject), tuple(_values(op, operation, document)))


def _values(op: str, operation: Operation, document: Mapping[str, object]) -> Iterable[tuple[str, Value]]:
    for field in operation.fields:
        value = document.get(field.name)
        if value is not None or field.keyword is None:
            yield field.name, _value(op, field, value)


def _value(op: str, field: Field, value: object) -> Value:
    match field.kind, value:
        case FieldKind.NUMBER, int() if not isinstance(value, bool):
            return value
        case FieldKind.NAME, str():
            check_name(value)
            return value
        case FieldKind.NEW_NAME, str():
            check_new_name(value)
            return value
        case FieldKind.TAIL | FieldKind.SCOPE, str() if value in CHOICES[field.kind]:
            return value
        case FieldKind.NAMES, [str(), *_] if all(isinstance(each, str) for each in value):
            return _checked(value, check_name)
        case FieldKind.TWO_NAMES, [str() as outer, str() as inner]:
            return _checked((outer, inner), check_new_name)
        case FieldKind.LOOP_AND_FACTOR, [str() as loop, int() as factor] if not isinstance(factor, bool):
            check_name(loop)
            return loop, factor
    raise ScheduleError(f"{op}: expected {field.name} to be {field.kind.value}, got {short_repr(value)}", code=SYNTAX_CODE)


def _checked(names: Sequence[object], check: Callable[[str], None]) -> tuple[str, ...]:
    texts = tuple(str(name) for name in names)
    for name in texts:
        check(name)
    return texts


def _check_keys(document: Mapping[object, object], known: Sequence[str], what: str) -> None:
    for key in document:
        if key not in known:
            hint = known_names(str(key)[:80], known, "fields")
            raise ScheduleError(f"{what} has no field {short_repr(key)}", code=SYNTAX_CODE, hint=hint)
