"""Untyped syntax trees, before names and types are resolved. Spans are character offsets."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


@dataclass(frozen=True, slots=True, kw_only=True)
class Syntax:
    """A node: its place in the text, and the number of levels below it."""

    start: int
    end: int
    depth: int = 0


@dataclass(frozen=True, slots=True)
class Num(Syntax):
    value: int | float


@dataclass(frozen=True, slots=True)
class Text(Syntax):
    """A quoted name, allowed in some arguments only."""

    value: str


@dataclass(frozen=True, slots=True)
class Ref(Syntax):
    """A bare name: an axis, or a tensor without an index."""

    name: str


@dataclass(frozen=True, slots=True)
class Get(Syntax):
    """tensor[index, ...]; the name ends at `name_end`."""

    tensor: str
    index: tuple[Node, ...]
    name_end: int


@dataclass(frozen=True, slots=True)
class Unary(Syntax):
    sign: str
    arg: Node


@dataclass(frozen=True, slots=True)
class Binary(Syntax):
    sign: str
    left: Node
    right: Node


@dataclass(frozen=True, slots=True)
class Apply(Syntax):
    """A function of the function table; `name_start` and `name_end` are the span of its name."""

    function: str
    args: tuple[Node, ...]
    type: TypeArg | None
    name_start: int
    name_end: int


@dataclass(frozen=True, slots=True)
class CastTo(Syntax):
    """A cast. `literal_form`: written const(x, t), where t must be able to hold x."""

    arg: Node
    type: TypeArg
    literal_form: bool


@dataclass(frozen=True, slots=True)
class When(Syntax):
    """`value` where the conditions hold, else `other` (None if missing)."""

    value: Node
    conditions: tuple[Node, ...]
    other: Node | None
    any_holds: bool


@dataclass(frozen=True, slots=True)
class Extent(Syntax):
    """K.val() or extent(K)."""

    axis: Ref


@dataclass(frozen=True, slots=True)
class DimSize(Syntax):
    """tensor.val(d) or tensor.size(d)."""

    tensor: Ref
    dim: int


@dataclass(frozen=True, slots=True)
class Like(Syntax):
    """x.like(c): `value` in the type of `model`, which is not read."""

    model: Node
    value: Node


@dataclass(frozen=True, slots=True)
class UpCast(Syntax):
    """x.up_cast(): Antares' widening of a narrow type."""

    arg: Node


@dataclass(frozen=True, slots=True)
class Group(Syntax):
    """(a, b) or [a, b], allowed in arguments only."""

    items: tuple[Node, ...]


@dataclass(frozen=True, slots=True)
class TypeOf(Syntax):
    """x.dtype(), of an expression or a tensor's bare name; nothing is read."""

    arg: Node


Node = Num | Text | Ref | Get | Unary | Binary | Apply | CastTo | When | Extent | DimSize | Like | UpCast | Group | TypeOf
TypeArg = Text | TypeOf


class Assign(Enum):
    """The kind of assignment, without its combining sign."""

    PLAIN = "="
    REDUCE = "=!"
    SCATTER = "=."


@dataclass(frozen=True, slots=True)
class WhereItem:
    axis: str
    extent: Node
    start: int
    end: int


@dataclass(frozen=True, slots=True)
class Statement:
    """One statement. `sign` is the combining sign: + * > < & | or empty. `start` and `end` span the left-hand side."""

    name: str
    index: tuple[Node, ...]
    type: Text | None
    assign: Assign
    sign: str
    value: Node
    where: tuple[WhereItem, ...]
    start: int
    end: int
    name_end: int


def children(node: Node) -> tuple[Node, ...]:
    """Return the operands of a node, in the order of the text."""
    match node:
        case Get(index=index):
            return index
        case Unary(arg=arg) | UpCast(arg=arg) | TypeOf(arg=arg):
            return (arg,)
        case Binary(left=left, right=right):
            return (left, right)
        case Apply(args=args, type=type_):
            return args if type_ is None else (*args, type_)
        case CastTo(arg=arg, type=type_):
            return (arg, type_)
        case When(value=value, conditions=conditions, other=other):
            return (value, *conditions) if other is None else (value, *conditions, other)
        case Like(model=model, value=value):
            return (model, value)
        case Group(items=items):
            return items
        case _:
            return ()
