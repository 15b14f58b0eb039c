"""Where the numbers and the parts of a kernel's text come from.

A `Derived` is an integer that knows what it was computed from. Code generators print numbers by `shown`: under
`marking` it puts marks around those that know, and `read_marks` takes the marks out of the text again. Otherwise a
`Derived` is an integer like any other, and no text has marks.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any, Self

MAX_FORMULA = 100  # characters; a longer formula is only the names in it
# Characters that no generator prints.
_NUMBER, _DIGITS, _END, _PART, _PART_END = "\x01", "\x02", "\x03", "\x04", "\x05"
_MARKED = re.compile(f"{_NUMBER}(\\d+){_DIGITS}(\\d+){_END}")


class Derived(int):
    """An integer with the formula that it was computed by, and the names in the formula."""

    formula: str  # "" for one that is too long
    sources: tuple[str, ...]
    symbol: str  # of the formula's last operator; "" for a name
    negative: str  # formula of the negative, where it is known

    def __new__(cls, value: int, formula: str, sources: tuple[str, ...], symbol: str = "", negative: str = "") -> Self:
        number = super().__new__(cls, value)
        number.formula, number.sources, number.symbol, number.negative = formula, sources, symbol, negative
        return number

    def __neg__(self) -> Derived:
        if self.negative:
            return Derived(int.__neg__(self), self.negative, self.sources)
        formula = f"-{_operand(self, _BINDING['*'])}" if self.formula else ""
        return Derived(int.__neg__(self), formula, self.sources, "-", negative=self.formula)


def named(value: int, name: str) -> int:
    """Return an integer that has that name in formulas, unless it knows where it comes from or nothing is marked."""
    return value if isinstance(value, Derived) or current_marks() is None else Derived(value, name, (name,))


_BINDING = {"<<": 0, "+": 1, "-": 1, "*": 2, "/": 2, "%": 2, "": 3}  # of operators, the strongest last


def _operand(value: int, least: int) -> str:
    """Return a number as an operand, in parentheses if its last operator binds less."""
    if not isinstance(value, Derived):
        return str(value)
    return value.formula if _BINDING[value.symbol] >= least else f"({value.formula})"


def _combined(left: int, symbol: str, right: int, value: int) -> int:
    """Return the result of an operator as a number that knows its operands."""
    sides = [side for side in (left, right) if isinstance(side, Derived)]
    sources = tuple(dict.fromkeys(name for side in sides for name in side.sources))
    least = _BINDING[symbol]
    is_associative = symbol in "+*" and isinstance(right, Derived) and right.symbol == symbol
    formula = f"{_operand(left, least)} {symbol} {_operand(right, least if is_associative else least + 1)}"
    if not all(side.formula for side in sides) or len(formula) > MAX_FORMULA:
        return Derived(value, "", sources, symbol)
    negative = ""
    if symbol == "/" and isinstance(left, Derived) and left.negative:
        negative = f"⌈{left.negative} / {_operand(right, least + 1)}⌉"  # -(-a // b) rounds up
    return Derived(value, formula, sources, symbol, negative)


def _method(symbol: str, compute: Callable[[int, int], int], neutral: int | None, *, reflected: bool) -> Callable[[int, Any], Any]:
    """Return the method of an operator; `neutral` is a right operand that changes nothing."""

    def method(self: int, other: object) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        left, right = (other, self) if reflected else (self, other)
        if symbol == "*" and other == 0:
            return 0
        if right == neutral and isinstance(left, Derived):
            return left
        if symbol in "+*" and left == neutral and isinstance(right, Derived):
            return right
        return _combined(left, symbol, right, compute(int(left), int(right)))

    return method


for _name, _symbol, _compute, _neutral in (
    ("add", "+", operator.add, 0), ("sub", "-", operator.sub, 0), ("mul", "*", operator.mul, 1),
    ("floordiv", "/", operator.floordiv, 1), ("mod", "%", operator.mod, None), ("lshift", "<<", operator.lshift, 0),
):  # fmt: skip
    setattr(Derived, f"__{_name}__", _method(_symbol, _compute, _neutral, reflected=False))
    setattr(Derived, f"__r{_name}__", _method(_symbol, _compute, _neutral, reflected=True))


@dataclass(slots=True)
class Marks:
    """Meanings of the marks of a text, by their numbers."""

    numbers: dict[tuple[str, tuple[str, ...]], int] = field(default_factory=dict)
    parts: dict[str, int] = field(default_factory=dict)

    __hash__ = object.__hash__  # a key of caches of texts


_MARKS: ContextVar[Marks | None] = ContextVar("marks", default=None)


@contextmanager
def marking() -> Iterator[Marks]:
    """Have generators print marks."""
    marks = Marks()
    token = _MARKS.set(marks)
    try:
        yield marks
    finally:
        _MARKS.reset(token)


def current_marks() -> Marks | None:
    """Return the marks that generators print into; None if they print none."""
    return _MARKS.get()


def shown(value: int | float) -> str:
    """Return a number as text, between marks if it knows where it comes from.

    Numbers below 2 have none: generators compare their texts.
    """
    if not isinstance(value, Derived):
        return str(value)
    digits, marks = f"{value:d}", current_marks()
    if marks is None or value < 2:
        return digits
    number = marks.numbers.setdefault((value.formula, value.sources), len(marks.numbers))
    return f"{_NUMBER}{number}{_DIGITS}{digits}{_END}"


def begin_part(name: str) -> list[str]:
    """Return the lines that mark the first line of a part: none without marks."""
    marks = current_marks()
    return [] if marks is None else [f"{_PART}{marks.parts.setdefault(name, len(marks.parts))}"]


def end_part() -> list[str]:
    """Return the lines that mark the end of the innermost part: none without marks."""
    return [] if current_marks() is None else [_PART_END]


@dataclass(frozen=True, slots=True)
class Number:
    """A number of a text, in a line from 1 and from a column from 0."""

    line: int
    column: int
    length: int
    formula: str  # "" where it is long
    sources: tuple[str, ...]  # names in the formula


@dataclass(frozen=True, slots=True)
class TextPart:
    """The lines of a part of a text, from 1."""

    name: str
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class MarkedText:
    """A text without its marks, and what they said."""

    text: str
    numbers: tuple[Number, ...]
    parts: tuple[TextPart, ...]


def read_marks(text: str, marks: Marks) -> MarkedText:
    """Take the marks out of a text."""
    formulas, names = list(marks.numbers), list(marks.parts)
    lines: list[str] = []
    numbers: list[Number] = []
    parts: list[TextPart] = []
    opened: list[tuple[str, int]] = []
    for line in text.split("\n"):
        if line.startswith(_PART):
            opened.append((names[int(line[1:])], len(lines) + 1))
        elif line.startswith(_PART_END):
            name, first = opened.pop()
            if len(lines) >= first:
                parts.append(TextPart(name, first, len(lines)))
        else:
            plain, at = "", 0
            for match in _MARKED.finditer(line):
                plain += line[at : match.start()]
                numbers.append(Number(len(lines) + 1, len(plain), len(match[2]), *formulas[int(match[1])]))
                plain, at = plain + match[2], match.end()
            lines.append(plain + line[at:])
    return MarkedText("\n".join(lines), tuple(numbers), tuple(sorted(parts, key=lambda part: (part.first, -part.last))))
