"""Parameters of operators: kinds, defaults, and checks of given values."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum

from roller_svc.errors import ArgumentError
from roller_svc.frontend.lang.input_types import short_repr, whole_number
from roller_svc.frontend.lang.names import INFINITIES
from roller_svc.ir.dtype import dtype_named

Value = None | bool | int | float | str | tuple[int, ...]

MAX_INTEGER = 1 << 48  # no extent is larger, so no stride, axis or padding is
MAX_INTEGERS = 48


class Kind(Enum):
    """The kind of a parameter; the enum's value describes it in errors."""

    INTEGER = "a whole number"
    NUMBER = "a finite number"
    UNBOUNDED = "a number, which may be infinite"
    FLAG = "true or false"
    CHOICE = "one of its names"
    DTYPE = "an element type's name"
    INTEGERS = "a whole number or a list of them"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of an operator."""

    name: str
    kind: Kind
    default: Value
    about: str
    minimum: int | None = None
    names: tuple[str, ...] = ()
    optional: bool = False
    required: bool = False

    def check(self, value: object) -> Value:
        """Return the value in the parameter's type. Raises ArgumentError if it does not fit."""
        if value is None and self.optional:
            return None
        checked = _READERS[self.kind](self, value)
        if checked is None:
            raise ArgumentError(f"{self.name} must be {self.expected}, got {short_repr(value)}", code="invalid-parameter")
        return checked

    @property
    def expected(self) -> str:
        """The allowed values in words."""
        words = self.kind.value
        if self.kind is Kind.CHOICE:
            words = "one of " + ", ".join(map(repr, self.names))
        elif self.names:
            words += " or " + ", ".join(map(repr, self.names))
        return words if self.minimum is None else f"{words}, {self.minimum} or more"


def integer(name: str, default: int | None, about: str, *, minimum: int | None = None) -> Parameter:
    return Parameter(name, Kind.INTEGER, default, about, minimum, optional=default is None)


def number(name: str, default: float | None, about: str) -> Parameter:
    return Parameter(name, Kind.NUMBER, default, about, optional=default is None)


def unbounded(name: str, default: float | None, about: str) -> Parameter:
    """Return a number that may be infinite."""
    return Parameter(name, Kind.UNBOUNDED, default, about, optional=default is None)


def flag(name: str, about: str, *, default: bool = False) -> Parameter:
    return Parameter(name, Kind.FLAG, default, about)


def choice(name: str, default: str, names: Sequence[str], about: str) -> Parameter:
    return Parameter(name, Kind.CHOICE, default, about, names=tuple(names))


def dtype(name: str, default: str | None, about: str) -> Parameter:
    return Parameter(name, Kind.DTYPE, default, about, optional=default is None)


def integers(name: str, default: Value, about: str, *, minimum: int | None = None, names: Sequence[str] = ()) -> Parameter:
    return Parameter(name, Kind.INTEGERS, default, about, minimum, tuple(names), optional=default is None)


def required(parameter: Parameter) -> Parameter:
    """Return the parameter as one without a default."""
    return Parameter(parameter.name, parameter.kind, None, parameter.about, parameter.minimum, parameter.names, required=True)


def _integer(parameter: Parameter, value: object) -> int | None:
    number = whole_number(value)
    low = -MAX_INTEGER if parameter.minimum is None else parameter.minimum
    return number if number is not None and low <= number <= MAX_INTEGER else None


def _number(_: Parameter, value: object) -> float | int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value if abs(value) <= MAX_INTEGER else None
    try:
        number_value = float(value)  # type: ignore[arg-type]  # not a number is what the except is for
    except (TypeError, ValueError):
        return None
    return number_value if not isinstance(value, str) and math.isfinite(number_value) else None


def _unbounded(parameter: Parameter, value: object) -> float | int | None:
    if isinstance(value, str):
        return INFINITIES.get(value)
    return value if isinstance(value, float) and math.isinf(value) else _number(parameter, value)


def _flag(_: Parameter, value: object) -> bool | None:
    return bool(value) if isinstance(value, bool) or value in (0, 1) else None


def _choice(parameter: Parameter, value: object) -> str | None:
    return value if isinstance(value, str) and value in parameter.names else None


def _dtype(_: Parameter, value: object) -> str | None:
    dtype_found = dtype_named(value) if isinstance(value, str) else None
    return None if dtype_found is None else dtype_found.value


def _integers(parameter: Parameter, value: object) -> Value:
    if isinstance(value, str):
        return _choice(parameter, value)
    if not isinstance(value, Sequence):
        return _integer(parameter, value)
    items = [_integer(parameter, item) for item in value[: MAX_INTEGERS + 1]]
    good = tuple(item for item in items if item is not None)
    return good if len(good) == len(value) else None


_READERS = {
    Kind.INTEGER: _integer,
    Kind.NUMBER: _number,
    Kind.UNBOUNDED: _unbounded,
    Kind.FLAG: _flag,
    Kind.CHOICE: _choice,
    Kind.DTYPE: _dtype,
    Kind.INTEGERS: _integers,
}
