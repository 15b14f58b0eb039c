"""Steps of a schedule ↔ text: one step a line, `STAGE: OPERATION FIELDS`, comments after `#`."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from roller_svc.errors import ScheduleError
from roller_svc.frontend.lang.names import did_you_mean
from roller_svc.schedule.steps import CHOICES, MAX_STEPS, OPERATIONS, Field, FieldKind, Step, Value

MAX_TEXT_BYTES = 64 << 10
MAX_NAME_CHARACTERS = 256
SYNTAX_CODE = "schedule-syntax"
_WORD = re.compile(r"[^\s:#]+|:")
_NUMBER = re.compile(r"[0-9]{1,18}")
_NEW_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")


@dataclass(frozen=True, slots=True)
class PlacedStep:
    """A step and the line of the text that it stands in, from 1."""

    step: Step
    line: int


def parse_steps(text: str) -> tuple[PlacedStep, ...]:
    """Parse a schedule. Raises ScheduleError (schedule-syntax) with line, column and hint."""
    check_size(text)
    steps: list[PlacedStep] = []
    for number, line in enumerate(text.split("\n"), 1):
        words = [_Word(m.group(), m.start() + 1) for m in _WORD.finditer(line.partition("#")[0])]
        if not words:
            continue
        try:
            steps.append(PlacedStep(_Line(words).parse(), number))
        except ScheduleError as error:
            error.line, error.step, error.text = number, len(steps), text
            raise
    check_count(steps)
    return tuple(steps)


def check_size(text: str) -> None:
    """Raise ScheduleError for a text that is too long."""
    if len(text.encode(errors="replace")) > MAX_TEXT_BYTES:
        raise ScheduleError(f"the schedule is too long: expected at most {MAX_TEXT_BYTES} bytes", code=SYNTAX_CODE)


def check_count(steps: Sequence[object]) -> None:
    """Raise ScheduleError for too many steps."""
    if len(steps) > MAX_STEPS:
        raise ScheduleError(f"the schedule has too many steps: expected at most {MAX_STEPS}, got {len(steps)}", code=SYNTAX_CODE)


def format_steps(steps: Iterable[Step]) -> str:
    """Return the text of steps, a line each. `parse_steps` gives the same steps."""
    return "".join(f"{format_step(step)}\n" for step in steps)


def format_step(step: Step) -> str:
    """Return the line of a step."""
    keywords = {field.name: field.keyword for field in step.operation.fields}
    words = [f"{step.subject}:", step.op]
    for name, value in step.values:
        words += [keyword] if (keyword := keywords[name]) else []
        words += [str(each) for each in value] if isinstance(value, tuple) else [str(value)]
    return " ".join(words)


@dataclass(frozen=True, slots=True)
class _Word:
    text: str
    column: int

    @property
    def end_column(self) -> int:
        return self.column + len(self.text)


class _Line:
    """The words of a line, which are read one after the other."""

    def __init__(self, words: Sequence[_Word]) -> None:
        self.words = words
        self.at = 0

    def parse(self) -> Step:
        subject = self.take("a stage or function")
        check_name(subject.text, subject)
        colon = self.take("`:`")
        if colon.text != ":":
            raise _error(f"expected `:` after {subject.text}, got {colon.text}", colon, "a step is STAGE: OPERATION FIELDS")
        name = self.take("an operation")
        operation = OPERATIONS.get(name.text)
        if operation is None:
            raise _error(f"unknown operation {name.text}", name, hint_operation(name.text))
        values: list[tuple[str, Value]] = []
        for field in operation.fields:
            if field.keyword is None:
                values.append((field.name, self.value(field, name)))
            elif self.at < len(self.words) and self.words[self.at].text == field.keyword:
                self.at += 1
                values.append((field.name, self.value(field, name)))
        if self.at < len(self.words):
            extra = self.words[self.at]
            raise _error(f"unexpected {extra.text} after the fields of {name.text}", extra, describe_operation(name.text))
        return Step(name.text, subject.text, tuple(values))

    def take(self, what: str, operation: str = "") -> _Word:
        if self.at == len(self.words):
            last = self.words[-1]
            after = _Word(" ", last.end_column)
            hint = describe_operation(operation) if operation else "a step is STAGE: OPERATION FIELDS"
            raise _error(f"expected {what} at the end of the line", after, hint)
        self.at += 1
        return self.words[self.at - 1]

    def value(self, field: Field, operation: _Word) -> Value:
        what = f"{field.name}, {field.kind.value},"
        match field.kind:
            case FieldKind.NUMBER:
                return self.number(what, operation)
            case FieldKind.NAMES:
                return tuple(self.names(what, operation))
            case FieldKind.TWO_NAMES:
                words = (self.take(what, operation.text), self.take(what, operation.text))
                for word in words:
                    check_new_name(word.text, word)
                return words[0].text, words[1].text
            case FieldKind.LOOP_AND_FACTOR:
                loop = self.name(what, operation)
                return loop, self.number(what, operation)
            case FieldKind.TAIL | FieldKind.SCOPE:
                word = self.take(what, operation.text)
                if word.text not in CHOICES[field.kind]:
                    raise _error(f"expected {field.kind.value}, got {word.text}", word, describe_operation(operation.text))
                return word.text
            case FieldKind.NEW_NAME:
                word = self.take(what, operation.text)
                check_new_name(word.text, word)
                return word.text
            case FieldKind.NAME:
                return self.name(what, operation)

    def name(self, what: str, operation: _Word) -> str:
        word = self.take(what, operation.text)
        check_name(word.text, word)
        return word.text

    def names(self, what: str, operation: _Word) -> Iterator[str]:
        yield self.name(what, operation)
        while self.at < len(self.words):
            yield self.name(what, operation)

    def number(self, what: str, operation: _Word) -> int:
        word = self.take(what, operation.text)
        if not _NUMBER.fullmatch(word.text):
            raise _error(f"expected {what} got {word.text}", word, describe_operation(operation.text))
        return int(word.text)


def check_name(name: str, word: _Word | None = None) -> None:
    """Raise ScheduleError for what cannot be the name of a stage or loop."""
    if not name or len(name) > MAX_NAME_CHARACTERS or re.search(r"[\s:#]", name) or not name.isprintable():
        raise _error(f"invalid name {name[:80]!r}: expected the name of a stage, function or loop", word, None)


def check_new_name(name: str, word: _Word | None = None) -> None:
    """Raise ScheduleError for what cannot be the name of a new loop."""
    if not _NEW_NAME.fullmatch(name):
        raise _error(f"invalid name {name[:80]!r}: expected letters, digits and underscores, at most 64", word, None)


def hint_operation(name: str) -> str:
    """Return the nearest operation, or all."""
    return did_you_mean(name, OPERATIONS) or f"operations: {', '.join(OPERATIONS)}"


def describe_operation(name: str) -> str:
    """Return the form of an operation in text."""
    operation = OPERATIONS[name]
    forms = {FieldKind.LOOP_AND_FACTOR: "LOOP FACTOR", FieldKind.TWO_NAMES: "OUTER INNER", FieldKind.NAMES: "LOOP ..."}
    words = [f"{operation.subject.upper()}:", name]
    for field in operation.fields:
        form = forms.get(field.kind, field.name.upper())
        words.append(f"[{field.keyword} {form}]" if field.keyword else form)
    return " ".join(words)


def _error(message: str, word: _Word | None, hint: str | None) -> ScheduleError:
    place = {} if word is None else {"column": word.column, "end_column": word.end_column}
    return ScheduleError(message, code=SYNTAX_CODE, hint=hint, **place)
