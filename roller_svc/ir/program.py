"""Tensor programs: tensors, statements, programs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import Annotated

from roller_svc.errors import InvariantError
from roller_svc.ir.canonical import OMIT_DEFAULT
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind, children, loads_of, rewrite


class AxisKind(Enum):
    SPATIAL = "spatial"
    REDUCE = "reduce"


@dataclass(frozen=True, slots=True)
class Axis:
    name: str
    extent: int
    kind: AxisKind

    def __post_init__(self) -> None:
        if self.extent < 1:
            raise InvariantError(f"axis {self.name} has extent {self.extent}")


@dataclass(frozen=True, slots=True)
class TensorType:
    dtype: DType
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        return math.prod(self.shape)

    @property
    def bytes(self) -> int:
        return self.elements * self.dtype.bytes


class StatementKind(Enum):
    MAP = "map"
    REDUCE = "reduce"
    SCATTER = "scatter"


class Combine(Enum):
    """The operator of a reduction or a reducing scatter. The value is the language's sign.

    A recurrence composes linear steps in the order of a scan: `h = gate * h + value`. Its body is
    `fma(gate, initial, value)` of each step, where the initial state is that before the first one.
    """

    SUM = "+"
    PROD = "*"
    MAX = ">"
    MIN = "<"
    ALL = "&"
    ANY = "|"
    RECURRENCE = "~"  # of programs only as `h[t] = a[t] * h[t - 1] + b[t]`


# Operators in schedule trees, where any and all have become max and min of truth values.
COMBINE_OPS = {Combine.SUM: OpKind.ADD, Combine.PROD: OpKind.MUL, Combine.MAX: OpKind.MAX, Combine.MIN: OpKind.MIN}


def identity(combine: Combine, dtype: DType) -> Const:
    """Return the identity element of a reduction in that type."""
    if combine in (Combine.SUM, Combine.ANY, Combine.RECURRENCE):
        return Const(0.0 if dtype.is_float else 0, dtype)
    if combine in (Combine.PROD, Combine.ALL):
        return Const(1.0 if dtype.is_float else 1, dtype)
    if dtype.is_float:
        return Const(-math.inf if combine is Combine.MAX else math.inf, dtype)
    lowest, highest = dtype.integer_range
    return Const(lowest if combine is Combine.MAX else highest, dtype)


@dataclass(frozen=True, slots=True)
class TensorExpr:
    """One statement. The body's value is converted to `type.dtype` when stored."""

    output: str  # id of the written tensor, unique in the program
    name: str  # its name in the source; another one than `output` where a scatter makes a new version of its `target`
    kind: StatementKind
    type: TensorType
    axes: tuple[Axis, ...]  # spatial ones in the order of the left side, then reduced ones; a scatter's are all spatial
    index: tuple[Expr, ...]  # left side: axes or the constant 0; in a scatter any expressions
    body: Expr
    combine: Combine | None = None
    target: str | None = None  # of a scatter; None: elements that nothing is written to are the reduction's identity
    predicate: Expr | None = None  # of a scatter: where it is 0, nothing is written and the index is not evaluated
    bounds_checked: tuple[bool, ...] = ()  # of a scatter: dimensions of `index` that are checked at run time
    in_place: bool = False  # of a scatter: the result has its target's memory, or all of it is written; nothing is copied
    writes_once: bool = False  # of a scatter: no element is written twice, so that the order does not matter

    @property
    def spatial(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.kind is AxisKind.SPATIAL)

    @property
    def reduced(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.kind is AxisKind.REDUCE)

    @property
    def points(self) -> int:
        """Return the size of the iteration domain."""
        return math.prod(a.extent for a in self.axes)

    @property
    def extents(self) -> dict[str, int]:
        return {a.name: a.extent for a in self.axes}

    @property
    def reads(self) -> tuple[Load, ...]:
        """Return every load of the statement: body, left index, predicate."""
        parts = (self.body, *self.index, *(() if self.predicate is None else (self.predicate,)))
        return tuple(load for part in parts for load in loads_of(part))

    @property
    def reads_tensors(self) -> tuple[str, ...]:
        """Return the names of the tensors it reads, each once, with a scatter's target."""
        names = dict.fromkeys(load.tensor for load in self.reads)
        if self.target is not None:
            names[self.target] = None
        return tuple(names)

    @property
    def accumulator(self) -> DType:
        """Return the type in which the value is computed.

        It is float32 for narrow floats. A reduction's has at least 32 bits, and at least those of the stated type.
        Integers are added and multiplied as floats if that is a float; of two, they are compared exactly.
        """
        body, stated = self.body.dtype.compute, self.type.dtype.compute
        if self.kind is not StatementKind.REDUCE:
            return body
        if body.is_float:
            return DType.FLOAT64 if stated is DType.FLOAT64 else body
        if stated.is_float and self.combine in (Combine.SUM, Combine.PROD):
            return stated
        if stated.is_float or max(body.bits, stated.bits) == 64:
            return DType.INT64 if body.is_signed else DType.UINT64
        return DType.INT32 if body.is_signed else DType.UINT32

    @property
    def flops(self) -> int:
        """Return the operations: one for each operator of the body at each point, and one for the reduction.

        Comparisons and arithmetic on axes alone (indices, guards) do not count.
        """
        return self.points * (operators(self.body) + (1 if self.combine else 0))


def operators(expr: Expr) -> int:
    """Count the operators on values from tensors, without comparisons."""
    return _operators(expr)[0]


def _operators(expr: Expr) -> tuple[int, bool]:
    """Return the operators on values from tensors, and whether the expression is a value from tensors."""
    count, of_tensors = 0, isinstance(expr, Load)
    for child in children(expr):  # of a load: its index, whose operators count if it is data
        below, is_value = _operators(child)
        count += below
        of_tensors |= is_value
    return count + (isinstance(expr, Op) and of_tensors and expr.dtype is not DType.INT8), of_tensors


@dataclass(frozen=True, slots=True)
class Output:
    """A result of the program."""

    name: str  # in the caller's result
    tensor: str  # id of the tensor


class _Hashed:
    """Keep the hash of a value that never changes: tables of programs ask often."""

    __slots__ = ("hashed",)
    hashed: int


@dataclass(frozen=True, slots=True)
class TensorProgram(_Hashed):
    """A checked program. Each statement reads only inputs and the results of earlier statements."""

    inputs: tuple[tuple[str, TensorType], ...]
    statements: tuple[TensorExpr, ...]
    outputs: tuple[Output, ...]
    constants: tuple[str, ...] = ()  # inputs that are the same in every call, such as weights
    donated: tuple[str, ...] = ()  # inputs that scatters update in place
    name: str = ""  # begins the names of the kernel's symbols; "" for one made of its digest
    # launches may be nodes of a CUDA graph that start before those before them end: they wait for these themselves
    programmatic: Annotated[bool, OMIT_DEFAULT] = False

    def __hash__(self) -> int:
        try:
            return self.hashed
        except AttributeError:
            fields = (self.inputs, self.statements, self.outputs, self.constants, self.donated, self.name, self.programmatic)
            object.__setattr__(self, "hashed", hash(fields))
            return self.hashed

    @property
    def types(self) -> Mapping[str, TensorType]:
        """Return the type of every tensor."""
        return dict(self.inputs) | {s.output: s.type for s in self.statements}

    @property
    def flops(self) -> int:
        return sum(s.flops for s in self.statements)

    @property
    def has_runtime_checks(self) -> bool:
        """Return whether an index comes from data, so that a call may raise IndexRangeError."""
        return any(any(load.bounds_checked) for s in self.statements for load in s.reads) or any(
            any(s.bounds_checked) for s in self.statements
        )


Forms = tuple[TensorProgram, ...]  # of the same inputs and results; the first one says what a program means


def rename_tensors(statement: TensorExpr, names: Mapping[str, str]) -> TensorExpr:
    """Return the statement with other ids of tensors that it writes and reads."""

    def change(node: Expr) -> Expr:
        return replace(node, tensor=names[node.tensor]) if isinstance(node, Load) and node.tensor in names else node

    return replace(
        statement,
        output=names.get(statement.output, statement.output),
        index=tuple(rewrite(index, change) for index in statement.index),
        body=rewrite(statement.body, change),
        target=None if statement.target is None else names.get(statement.target, statement.target),
        predicate=None if statement.predicate is None else rewrite(statement.predicate, change),
    )


def live_statements(program: TensorProgram, tensors: Collection[str]) -> tuple[TensorExpr, ...]:
    """Return the statements that `tensors` depend on, in program order."""
    needed = set(tensors)
    live: list[TensorExpr] = []
    for statement in reversed(program.statements):
        if statement.output in needed:
            live.append(statement)
            needed.update(statement.reads_tensors)
    return tuple(reversed(live))
