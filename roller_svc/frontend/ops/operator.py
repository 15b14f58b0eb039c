"""Operators and their calls: operands, checked parameters, unique names, statements."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from roller_svc.errors import ArgumentError, InvariantError, ShapeError
from roller_svc.frontend.lang.names import arguments, did_you_mean
from roller_svc.frontend.ops.parameters import Parameter, Value
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorType

Where = Sequence[tuple[str, int]]


@dataclass(frozen=True, slots=True)
class Operand:
    """A tensor that a call reads."""

    name: str
    type: TensorType

    @property
    def shape(self) -> tuple[int, ...]:
        return self.type.shape

    @property
    def dtype(self) -> DType:
        return self.type.dtype

    @property
    def rank(self) -> int:
        return len(self.type.shape)

    def at(self, *index: str) -> str:
        """Return the load of one element."""
        return f"{self.name}[{', '.join(index)}]"


@dataclass(slots=True)
class Names:
    """Generator of names that differ from those of all tensors."""

    used: set[str]
    assigned: dict[str, str] = field(default_factory=dict)

    def unique(self, name_hint: str) -> str:
        """Return `name_hint`, with underscores if it is taken. The same hint gives the same name."""
        if name_hint not in self.assigned:
            name = name_hint
            while name in self.used:
                name += "_"
            self.used.add(name)
            self.assigned[name_hint] = name
        return self.assigned[name_hint]


@dataclass(frozen=True, slots=True)
class Call:
    """One use of an operator."""

    operator: str
    operands: tuple[Operand, ...]
    output: str
    parameters: Mapping[str, Value]
    names: Names

    @property
    def x(self) -> Operand:
        """The first operand."""
        return self.operands[0]

    def operand(self, position: int) -> Operand | None:
        """Return an optional operand."""
        return self.operands[position] if position < len(self.operands) else None

    def axis(self, name_hint: str) -> str:
        """Return an axis with a name like this."""
        return self.names.unique(name_hint)

    def axes(self, rank: int) -> tuple[str, ...]:
        """Return generic axes for a tensor."""
        plain = ("i", "j", "k", "l") if rank <= 4 else tuple(f"i{d}" for d in range(rank))
        return tuple(self.axis(name) for name in plain[:rank])

    def intermediate(self, role: str) -> str:
        """Return the name of an intermediate result."""
        return self.names.unique(f"{self.output}_{role}")

    def has(self, parameter: str) -> bool:
        """Whether the parameter is given or has a default."""
        return self.parameters.get(parameter) is not None

    def integer(self, parameter: str) -> int:
        value = self.parameters[parameter]
        if not isinstance(value, int):
            raise InvariantError(f"{parameter} of {self.operator} is not an integer")
        return value

    def number(self, parameter: str) -> float | int:
        value = self.parameters[parameter]
        if not isinstance(value, int | float):
            raise InvariantError(f"{parameter} of {self.operator} is not a number")
        return value

    def flag(self, parameter: str) -> bool:
        return bool(self.parameters[parameter])

    def text(self, parameter: str) -> str:
        value = self.parameters[parameter]
        if not isinstance(value, str):
            raise InvariantError(f"{parameter} of {self.operator} is not a string")
        return value

    def integers(self, parameter: str) -> tuple[int, ...]:
        """Return a list; a single number is a list of one."""
        value = self.parameters[parameter]
        if isinstance(value, int):
            return (value,)
        if not isinstance(value, tuple):
            raise InvariantError(f"{parameter} of {self.operator} is not a list")
        return value

    def dtype(self) -> DType | None:
        """Return the parameter `dtype`, the result's type, if given."""
        value = self.parameters.get("dtype")
        return DType(value) if isinstance(value, str) else None

    def one_axis(self, rank: int, parameter: str = "axis") -> int:
        """Return a dimension from a parameter that may count from the last."""
        return self.dimension(self.integer(parameter), rank, parameter)

    def dimension(self, value: int, rank: int, parameter: str) -> int:
        if not -rank <= value < rank:
            raise ShapeError(f"{self.operator}: {parameter} is {value}, the tensor has {rank} dimensions", code="operand-shape")
        return value % rank

    def wrong_shape(self, message: str) -> ShapeError:
        return ShapeError(f"{self.operator}: {message}", code="operand-shape")

    def wrong_parameter(self, message: str) -> ArgumentError:
        return ArgumentError(f"{self.operator}: {message}", code="invalid-parameter")

    def check_rank(self, operand: Operand, rank: int, what: str) -> None:
        if operand.rank != rank:
            raise self.wrong_shape(f"`{operand.name}` has {operand.rank} dimensions, not the {rank} of {what}")

    def check_shape(self, operand: Operand, shape: Sequence[int]) -> None:
        if operand.shape != tuple(shape):
            raise self.wrong_shape(f"`{operand.name}` is {list(operand.shape)}, and must be {list(shape)}")


@dataclass(frozen=True, slots=True)
class Operator:
    """A named operator."""

    name: str
    about: str
    operands: tuple[str, ...]  # names
    write: Callable[[Call], str]  # returns the statements, the last of which writes the call's output
    parameters: tuple[Parameter, ...] = ()
    needed: int = -1  # operands that must be given; -1: all
    more: bool = False  # allow any number of operands after the last
    write_other: Callable[[Call], str | None] | None = None  # other statements for the same result, if a call has them

    @property
    def min_operands(self) -> int:
        return len(self.operands) if self.needed < 0 else self.needed

    def parameter(self, name: str) -> Parameter:
        """Return the parameter of that name. Raises ArgumentError with the nearest name."""
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        names = [parameter.name for parameter in self.parameters]
        hint = did_you_mean(name, names) or (f"it has {', '.join(names)}" if names else "it has none")
        raise ArgumentError(f"{self.name} has no parameter `{name[:40]}`", code="unknown-parameter", hint=hint)

    def source(
        self, operands: Sequence[Operand], output: str, parameters_given: Mapping[str, Value], used_names: Iterable[str]
    ) -> str:
        """Return the statements of one call with checked parameters."""
        return self.write(self._call(operands, output, parameters_given, used_names))

    def other_source(
        self, operands: Sequence[Operand], output: str, parameters_given: Mapping[str, Value], used_names: Iterable[str]
    ) -> str | None:
        """Return other statements of the same call for the same result, between which the model chooses; None without."""
        return None if self.write_other is None else self.write_other(self._call(operands, output, parameters_given, used_names))

    def _call(
        self, operands: Sequence[Operand], output: str, parameters_given: Mapping[str, Value], used_names: Iterable[str]
    ) -> Call:
        if len(operands) < self.min_operands or (len(operands) > len(self.operands) and not self.more):
            count = arguments(self.min_operands, 99 if self.more else len(self.operands))
            shown = ", ".join(self.operands)
            message = f"{self.name} takes {count} ({shown}), got {len(operands)}"
            raise ArgumentError(message, code="wrong-arguments")
        for parameter in self.parameters:
            if parameter.required and parameter.name not in parameters_given:
                raise ArgumentError(f"{self.name} needs {parameter.name}", code="missing-parameter")
        parameters = {parameter.name: parameter.default for parameter in self.parameters} | dict(parameters_given)
        names = Names({*used_names, output, *(operand.name for operand in operands)})
        return Call(self.name, tuple(operands), output, parameters, names)
