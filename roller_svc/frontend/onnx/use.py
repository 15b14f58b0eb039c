"""A node of an ONNX graph as its converter reads it, and the use of an operator that it becomes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from roller_svc.errors import ArgumentError
from roller_svc.frontend.ops.operator import Operand

# Slices end at the greatest int64 where they go to the end; no tensor is as long as this.
_LONGEST = 1 << 40
# Operator → attributes that change nothing of its first result, as types and modes are that are known here.
_WITHOUT_EFFECT = {
    "BatchNormalization": frozenset({"momentum"}),  # of the running means that training gives
    "Cast": frozenset({"round_mode"}),  # of casts to float8e8m0
    "MaxPool": frozenset({"storage_order"}),  # of the second result, the indices
}
# A hint to an interpreter about memory, in the first operator sets.
_LEGACY, _LEGACY_OPSETS = "consumed_inputs", range(1, 6)


@dataclass(frozen=True, slots=True)
class Use:
    """An operator, its operands, and parameters that are not checked yet."""

    operator: str
    operands: tuple[Operand, ...]
    parameters: Mapping[str, object] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Node:
    """`constants` has for each operand its value, where that is known.

    `used`, names of attributes, and `read`, positions of operands, grow while a converter looks at them.
    """

    op_type: str
    opset: int
    attributes: Mapping[str, object]
    operands: tuple[Operand | None, ...]
    constants: tuple[object, ...]
    used: set[str] = field(default_factory=set)
    read: set[int] = field(default_factory=set)

    def operand(self, position: int) -> Operand:
        """An operand that must be there."""
        self.read.add(position)
        found = self.operands[position] if position < len(self.operands) else None
        if found is None:
            raise self.wrong(f"input {position} is missing")
        return found

    def leading(self, count: int) -> tuple[Operand, ...]:
        """The first operands, up to so many; those at the end may be left out."""
        given = list(self.operands[:count])
        while len(given) > 1 and given[-1] is None:
            given.pop()
        return tuple(self.operand(position) for position in range(len(given)))

    def all(self) -> tuple[Operand, ...]:
        return self.leading(len(self.operands))

    def has(self, position: int) -> bool:
        """Whether an operand is there, as a tensor or as a constant."""
        if position >= len(self.operands):
            return False
        return self.operands[position] is not None or self.constants[position] is not None

    def attribute(self, name: str) -> object:
        """Its value, None where it is not given."""
        self.used.add(name)
        return self.attributes.get(name)

    def integer(self, name: str, default: int) -> int:
        value = self.attribute(name)
        if value is None:
            return default
        if not isinstance(value, int):
            raise self.wrong(f"attribute {name} must be a whole number, not {value!r:.60}")
        return int(value)

    def number(self, name: str, default: float) -> float:
        value = self.attribute(name)
        if value is None:
            return default
        if not isinstance(value, int | float):
            raise self.wrong(f"attribute {name} must be a number, not {value!r:.60}")
        return float(value)

    def text(self, name: str, default: str) -> str:
        value = self.attribute(name)
        if isinstance(value, bytes):
            return value.decode("utf-8", "replace")
        if value is None:
            return default
        if not isinstance(value, str):
            raise self.wrong(f"attribute {name} must be a text, not {value!r:.60}")
        return value

    def integers(self, name: str) -> tuple[int, ...] | None:
        value = self.attribute(name)
        return None if value is None else self._whole(name, value)

    def constant(self, position: int, what: str) -> tuple[int, ...] | None:
        """The whole numbers of an operand that decides shapes; None where it is left out."""
        self.read.add(position)
        if not self.has(position):
            return None
        value = self.constants[position]
        if value is None:
            raise self.wrong(f"{what} (input {position}) must be a constant, whose value is given")
        return self._whole(what, value)

    def scalar(self, position: int, what: str) -> float | None:
        """The same for one number, which need not be whole."""
        self.read.add(position)
        if not self.has(position):
            return None
        found = list(_flat(self.constants[position])) if self.constants[position] is not None else []
        if len(found) != 1 or not isinstance(found[0], int | float):
            raise self.wrong(f"{what} (input {position}) must be a constant number, whose value is given")
        return found[0]

    def setting(self, name: str, position: int) -> tuple[int, ...] | None:
        """Whole numbers that are an attribute in older operator sets, an input in newer ones."""
        value = self.integers(name)
        return self.constant(position, name) if value is None else value

    def needed(self, name: str, position: int) -> tuple[int, ...]:
        """The same where it must be given."""
        found = self.setting(name, position)
        if found is None:
            raise self.wrong(f"{name} is missing")
        return found

    def check_default(self, name: str, default: int) -> None:
        """Refuse a flag that is given and is not the default."""
        found = self.integer(name, default)
        if found != default:
            raise self.unsupported(f"attribute {name}={found}", f"only {name}={default} is")

    def check_all_used(self) -> None:
        """An attribute or an input that nothing looked at would be ignored, and the result wrong."""
        ignored = _WITHOUT_EFFECT.get(self.op_type, frozenset())
        for name in self.attributes:
            if name not in self.used | ignored and not (name == _LEGACY and self.opset in _LEGACY_OPSETS):
                raise self.unsupported(f"attribute {name}", "leave it out where it has its default")
        for position in range(len(self.operands)):
            if position not in self.read and self.has(position):
                raise self.unsupported(f"input {position} with these attributes, in operator set {self.opset},")

    def wrong(self, message: str) -> ArgumentError:
        return ArgumentError(f"{self.op_type}: {message}", code="invalid-node")

    def unsupported(self, what: str, hint: str | None = None) -> ArgumentError:
        return ArgumentError(f"{self.op_type}: {what} is not supported", code="unsupported-attribute", hint=hint)

    def _whole(self, name: str, value: object) -> tuple[int, ...]:
        found = tuple(_flat(value))
        if not all(isinstance(item, int) and not isinstance(item, bool) for item in found):
            raise self.wrong(f"{name} must be whole numbers, not {value!r:.60}")
        return tuple(max(-_LONGEST, min(int(item), _LONGEST)) for item in found)


def _flat(value: object) -> Iterable[float | int]:
    """The numbers of a number, a list, or an array of any library that has tolist."""
    plain = value.tolist() if hasattr(value, "tolist") else value
    if isinstance(plain, Sequence) and not isinstance(plain, str | bytes):
        for item in plain:
            yield from _flat(item)
    elif isinstance(plain, int | float):
        yield plain
    else:
        raise ArgumentError(f"{value!r:.60} is no number and no list of them", code="invalid-node")
