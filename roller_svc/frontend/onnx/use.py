"""An ONNX node as its converter reads it, and the operator call that it becomes."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from roller_svc.errors import ArgumentError
from roller_svc.frontend.graph_builder import Array
from roller_svc.frontend.ops.operator import Operand
from roller_svc.ir.dtype import DType, dtype_named

FLOATS, INTEGERS = "fV", "iu"  # kinds of numpy's element types; V: floats of 16 bits and less that numpy lacks
MAX_SHOWN_INPUTS = 4  # in a message
# Slices to the end stop at the largest int64; no tensor is as long as this.
_LONGEST = 1 << 40
# Operator → attributes without effect on its first result for the supported types and modes.
_WITHOUT_EFFECT = {
    "BatchNormalization": frozenset({"momentum"}),  # of running means in training
    "Cast": frozenset({"round_mode"}),  # of casts to float8e8m0
    "MaxPool": frozenset({"storage_order"}),  # of the second result, the indices
}
# A memory hint to interpreters in the first operator sets.
_LEGACY, _LEGACY_OPSETS = "consumed_inputs", range(1, 6)


def not_constant(what: str, inputs: Sequence[str]) -> ArgumentError:
    """Return the error for a value that has to be known. It names the inputs of the model that decide it."""
    if not inputs:
        return ArgumentError(
            f"{what} must be a constant, and depends on data",
            code="needs-constant",
            hint="shapes, steps and branches are static; export them as constants",
        )
    shown = inputs[:MAX_SHOWN_INPUTS]
    example = ", ".join(f'"{name}": ...' for name in shown)
    return ArgumentError(
        f"{what} must be a constant, and depends on the input{'s' if len(inputs) > 1 else ''} {', '.join(shown)}"
        + (f" and {len(inputs) - len(shown)} more" if len(inputs) > len(shown) else ""),
        code="needs-constant",
        hint=f"give its value with constants={{{example}}}",
    )


def no_inputs(_: Operand) -> Sequence[str]:
    """Return the inputs of a node that is not part of a model."""
    return ()


@dataclass(frozen=True, slots=True)
class Use:
    """An operator with its operands and unchecked parameters."""

    operator: str
    operands: tuple[Operand, ...]
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """A node of an ONNX graph. It records which attributes and operands its converter reads."""

    op_type: str
    opset: int
    attributes: Mapping[str, object]
    operands: tuple[Operand | None, ...]
    constants: tuple[object, ...]  # values of the operands, if known
    results: tuple[bool, ...] = (True,)  # for each result of the node, whether something needs it
    depends_on: Callable[[Operand], Sequence[str]] = no_inputs  # inputs of the model that decide an operand
    used: set[str] = field(default_factory=set)  # attributes read
    read: set[int] = field(default_factory=set)  # positions of operands read

    def operand(self, position: int, *, rank: int | Sequence[int] | None = None) -> Operand:
        """Return an operand that must be present, with this number of dimensions, or one of these."""
        self.read.add(position)
        operand = self.operands[position] if position < len(self.operands) else None
        if operand is None:
            value = self.constants[position] if position < len(self.constants) else None
            if getattr(value, "size", None) == 0:
                shape = list(getattr(value, "shape", ()))
                raise self.unsupported(
                    f"input {position} without elements (shape {shape})", "declare extents of 1 or more, or leave the node out"
                )
            raise self.invalid(f"input {position} is missing")
        ranks = (rank,) if isinstance(rank, int) else rank
        if ranks is not None and operand.rank not in ranks:
            expected = " or ".join(map(str, ranks))
            raise self.invalid(f"input {position} has the shape {list(operand.shape)}, expected {expected} dimensions")
        return operand

    def optional(self, position: int, *, rank: int | Sequence[int] | None = None) -> Operand | None:
        """Return an operand as `operand` does; None if it is omitted."""
        return self.operand(position, rank=rank) if self.has(position) else None

    def array(self, position: int, what: str, kinds: str, *, rank: int | None = None) -> Array:
        """Return the value of a constant operand whose element type is of these kinds of numpy."""
        operand, value = self.operand(position, rank=rank), self.constants[position]
        if not isinstance(value, np.ndarray):
            raise self._not_constant(position, what)
        if value.dtype.kind not in kinds:
            raise self.invalid(f"{what} (input {position}) has elements of type {operand.dtype.value}")
        return value

    def leading(self, count: int) -> tuple[Operand, ...]:
        """Return the first `count` operands, without omitted ones at the end."""
        operands = list(self.operands[:count])
        while len(operands) > 1 and operands[-1] is None:
            operands.pop()
        return tuple(self.operand(position) for position in range(len(operands)))

    def dtype_of(self, array: object) -> DType:
        """Return the element type of an array."""
        dtype = dtype_named(str(getattr(array, "dtype", "")))
        if dtype is None:
            raise self.unsupported(f"the element type {str(getattr(array, 'dtype', None))[:40]}")
        return dtype

    @property
    def spatial_rank(self) -> int:
        """The dimensions of the first operand behind batch and channels: one to three."""
        spatial = self.operand(0).rank - 2
        if not 1 <= spatial <= 3:
            raise self.unsupported(f"a tensor of {spatial + 2} dimensions")
        return spatial

    def all(self) -> tuple[Operand, ...]:
        return self.leading(len(self.operands))

    def has(self, position: int) -> bool:
        """Whether an operand is present, as a tensor or as a constant."""
        if position >= len(self.operands):
            return False
        return self.operands[position] is not None or self.constants[position] is not None

    def attribute(self, name: str) -> object:
        """Return an attribute's value, or None."""
        self.used.add(name)
        return self.attributes.get(name)

    def integer(self, name: str, default: int) -> int:
        value = self.attribute(name)
        if value is None:
            return default
        if not isinstance(value, int):
            raise self.invalid(f"attribute {name} must be a whole number, got {value!r:.60}")
        return int(value)

    def number(self, name: str, default: float) -> float:
        value = self.attribute(name)
        if value is None:
            return default
        if not isinstance(value, int | float):
            raise self.invalid(f"attribute {name} must be a number, got {value!r:.60}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self.attribute(name)
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.invalid(f"attribute {name} must be a string, got {value!r:.60}")
        return value

    def choice(self, name: str, default: str, allowed: Collection[str]) -> str:
        """Return a string that must be one of those allowed."""
        value = self.text(name, default)
        if value not in allowed:
            raise self.invalid(f"{name} is {value[:40]!r}, not one of {', '.join(allowed)}")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        value = self.attribute(name)
        return None if value is None else self._integers_of(name, value)

    def constant(self, position: int, what: str) -> tuple[int, ...] | None:
        """Return the integers of an operand that determines shapes; None if it is omitted."""
        self.read.add(position)
        if not self.has(position):
            return None
        value = self.constants[position]
        if value is None:
            raise self._not_constant(position, what)
        return self._integers_of(what, value)

    def scalar(self, position: int, what: str) -> float | None:
        """Return the single number of a constant operand; None if it is omitted."""
        self.read.add(position)
        if not self.has(position):
            return None
        if self.constants[position] is None:
            raise self._not_constant(position, what)
        values = list(_flat(self.constants[position]))
        if len(values) != 1 or not isinstance(values[0], int | float):
            raise self.invalid(f"{what} (input {position}) must be one number, got {len(values)}")
        return values[0]

    def setting(self, name: str, position: int) -> tuple[int, ...] | None:
        """Return integers that are an attribute in older operator sets and an input in newer ones; None if omitted."""
        value = self.integers(name)
        return self.constant(position, name) if value is None else value

    def required(self, name: str, position: int) -> tuple[int, ...]:
        """Return integers that are an attribute or an input and must be present."""
        values = self.setting(name, position)
        if values is None:
            raise self.invalid(f"{name} is missing")
        return values

    def check_default(self, name: str, default: int) -> None:
        """Reject a flag that is not the default."""
        value = self.integer(name, default)
        if value != default:
            raise self.unsupported(f"attribute {name}={value}", f"only {name}={default} is")

    def check_all_used(self) -> None:
        """Reject attributes and inputs that the converter did not read, which would be ignored silently."""
        ignored = _WITHOUT_EFFECT.get(self.op_type, frozenset())
        for name in self.attributes:
            if name not in self.used | ignored and not (name == _LEGACY and self.opset in _LEGACY_OPSETS):
                raise self.unsupported(f"attribute {name}", "leave it out where it has its default")
        for position in range(len(self.operands)):
            if position not in self.read and self.has(position):
                raise self.unsupported(f"input {position} with these attributes, in operator set {self.opset},")

    def invalid(self, message: str) -> ArgumentError:
        return ArgumentError(f"{self.op_type}: {message}", code="invalid-node")

    def unsupported(self, what: str, hint: str | None = None) -> ArgumentError:
        return ArgumentError(f"{self.op_type}: {what} is not supported", code="unsupported-attribute", hint=hint)

    def _not_constant(self, position: int, what: str) -> ArgumentError:
        operand = self.operands[position]
        return not_constant(f"{self.op_type}: {what} (input {position})", () if operand is None else self.depends_on(operand))

    def _integers_of(self, name: str, value: object) -> tuple[int, ...]:
        values = tuple(_flat(value))
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in values):
            raise self.invalid(f"{name} must be whole numbers, got {value!r:.60}")
        return tuple(max(-_LONGEST, min(int(item), _LONGEST)) for item in values)


def _flat(value: object) -> Iterable[float | int]:
    """Yield the numbers of a number, a list, or an array with `tolist`."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, Sequence) and not isinstance(plain, str | bytes):
        for item in plain:
            yield from _flat(item)
    elif isinstance(plain, int | float):
        yield plain
    else:
        raise ArgumentError(f"{value!r:.60} is neither a number nor a list of numbers", code="invalid-node")
