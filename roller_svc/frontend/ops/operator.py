"""What an operator is, and one call of it: operands, checked parameters, free names, statements."""

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
        """A load of one element."""
        return f"{self.name}[{', '.join(index)}]"


@dataclass(slots=True)
class Names:
    """Gives names that no tensor has. It grows while a call is written."""

    taken: set[str]
    given: dict[str, str] = field(default_factory=dict)

    def free(self, wanted: str) -> str:
        """The name wanted, or one near to it; the same again when it is asked for again."""
        if wanted not in self.given:
            name = wanted
            while name in self.taken:
                name += "_"
            self.taken.add(name)
            self.given[wanted] = name
        return self.given[wanted]


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
        """An operand that may be left out."""
        return self.operands[position] if position < len(self.operands) else None

    def axis(self, wanted: str) -> str:
        """An axis of that name, or one near to it."""
        return self.names.free(wanted)

    def axes(self, rank: int) -> tuple[str, ...]:
        """Axes of a tensor whose dimensions have no meaning of their own."""
        plain = ("i", "j", "k", "l") if rank <= 4 else tuple(f"i{d}" for d in range(rank))
        return tuple(self.axis(name) for name in plain[:rank])

    def between(self, role: str) -> str:
        """The name of an intermediate result."""
        return self.names.free(f"{self.output}_{role}")

    def has(self, parameter: str) -> bool:
        """Whether it was given, or has a default."""
        return self.parameters.get(parameter) is not None

    def integer(self, parameter: str) -> int:
        value = self.parameters[parameter]
        if not isinstance(value, int):
            raise InvariantError(f"{parameter} of {self.operator} is no integer")
        return value

    def number(self, parameter: str) -> float | int:
        value = self.parameters[parameter]
        if not isinstance(value, int | float):
            raise InvariantError(f"{parameter} of {self.operator} is no number")
        return value

    def flag(self, parameter: str) -> bool:
        return bool(self.parameters[parameter])

    def text(self, parameter: str) -> str:
        value = self.parameters[parameter]
        if not isinstance(value, str):
            raise InvariantError(f"{parameter} of {self.operator} is no text")
        return value

    def integers(self, parameter: str) -> tuple[int, ...]:
        """A list, also of a single number."""
        value = self.parameters[parameter]
        if isinstance(value, int):
            return (value,)
        if not isinstance(value, tuple):
            raise InvariantError(f"{parameter} of {self.operator} is no list")
        return value

    def dtype(self) -> DType | None:
        """The parameter `dtype`: the result's type where the caller states it."""
        value = self.parameters.get("dtype")
        return DType(value) if isinstance(value, str) else None

    def one_axis(self, rank: int, parameter: str = "axis") -> int:
        """A dimension's number, which may count from the last."""
        return self.dimension(self.integer(parameter), rank, parameter)

    def dimension(self, value: int, rank: int, parameter: str) -> int:
        if not -rank <= value < rank:
            raise ShapeError(
                f"{self.operator}: {parameter} is {value}, the tensor has {rank} dimensions", code="operand-shape"
            )
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
    """A named operator: `write` gives the statements, the last one of which writes the call's output.

    `operands` names what it reads, of which `needed` must be given; `more` allows any number after the last.
    """

    name: str
    about: str
    operands: tuple[str, ...]
    write: Callable[[Call], str]
    parameters: tuple[Parameter, ...] = ()
    needed: int = -1
    more: bool = False

    @property
    def least(self) -> int:
        return len(self.operands) if self.needed < 0 else self.needed

    def parameter(self, name: str) -> Parameter:
        """The parameter of that name; an error that offers the nearest one where there is none."""
        for parameter in self.parameters:
            if parameter.name == name:
                return parameter
        known = [parameter.name for parameter in self.parameters]
        hint = did_you_mean(name, known) or (f"it has {', '.join(known)}" if known else "it has none")
        raise ArgumentError(f"{self.name} has no parameter `{name[:40]}`", code="unknown-parameter", hint=hint)

    def text(self, operands: Sequence[Operand], output: str, given: Mapping[str, Value], taken: Iterable[str]) -> str:
        """The statements of one call, whose parameters are checked."""
        if len(operands) < self.least or (len(operands) > len(self.operands) and not self.more):
            count = arguments(self.least, 99 if self.more else len(self.operands))
            shown = ", ".join(self.operands)
            message = f"{self.name} takes {count} ({shown}), not {len(operands)}"
            raise ArgumentError(message, code="wrong-arguments")
        for parameter in self.parameters:
            if parameter.required and parameter.name not in given:
                raise ArgumentError(f"{self.name} needs {parameter.name}", code="missing-parameter")
        parameters = {parameter.name: parameter.default for parameter in self.parameters} | dict(given)
        names = Names({*taken, output, *(operand.name for operand in operands)})
        return self.write(Call(self.name, tuple(operands), output, parameters, names))
