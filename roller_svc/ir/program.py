"""What is computed: tensors, statements, programs."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from roller_svc.errors import InvariantError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind, children, loads_of


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
    """How a reduction, or a reducing scatter, joins two values. The value is the language's sign."""

    SUM = "+"
    PROD = "*"
    MAX = ">"
    MIN = "<"
    ALL = "&"
    ANY = "|"


# The operator that joins two values; any and all are max and min of truth values by the time there is a tree.
COMBINE_OPS = {Combine.SUM: OpKind.ADD, Combine.PROD: OpKind.MUL, Combine.MAX: OpKind.MAX, Combine.MIN: OpKind.MIN}


def identity(combine: Combine, dtype: DType) -> Const:
    """What a reduction starts from: it joins with any value of the type to that value."""
    if combine in (Combine.SUM, Combine.ANY):
        return Const(0.0 if dtype.is_float else 0, dtype)
    if combine in (Combine.PROD, Combine.ALL):
        return Const(1.0 if dtype.is_float else 1, dtype)
    if dtype.is_float:
        return Const(-math.inf if combine is Combine.MAX else math.inf, dtype)
    least, greatest = dtype.integer_range
    return Const(least if combine is Combine.MAX else greatest, dtype)


@dataclass(frozen=True, slots=True)
class TensorExpr:
    """One statement.

    `output` is the id of the tensor it makes, unique in the program; `name` is what the text calls it (they differ
    only where a scatter makes a new version of its `target`). `axes` are the spatial ones in the order of the left
    side, then the reduced ones; a scatter's are all spatial. `index` is the left side: bare axes or the constant 0
    for a map or a reduction, anything for a scatter. The body's value is converted to `type.dtype` when stored.
    `predicate` (scatter only): nothing is written where it is 0, and the index is not evaluated there.
    `checked[d]` (scatter only): dimension d of the left index is checked at run time.
    """

    output: str
    name: str
    kind: StatementKind
    type: TensorType
    axes: tuple[Axis, ...]
    index: tuple[Expr, ...]
    body: Expr
    combine: Combine | None = None
    target: str | None = None
    predicate: Expr | None = None
    bounds_checked: tuple[bool, ...] = ()

    @property
    def spatial(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.kind is AxisKind.SPATIAL)

    @property
    def reduced(self) -> tuple[Axis, ...]:
        return tuple(a for a in self.axes if a.kind is AxisKind.REDUCE)

    @property
    def points(self) -> int:
        """Size of the iteration domain."""
        return math.prod(a.extent for a in self.axes)

    @property
    def extents(self) -> dict[str, int]:
        return {a.name: a.extent for a in self.axes}

    @property
    def reads(self) -> tuple[Load, ...]:
        """Every load of the statement: body, left index, predicate."""
        parts = (self.body, *self.index, *(() if self.predicate is None else (self.predicate,)))
        return tuple(load for part in parts for load in loads_of(part))

    @property
    def reads_tensors(self) -> tuple[str, ...]:
        """Names of the tensors it depends on, each once, a scatter's target too."""
        names = dict.fromkeys(load.tensor for load in self.reads)
        if self.target is not None:
            names[self.target] = None
        return tuple(names)

    @property
    def accumulator(self) -> DType:
        """The type in which its value is formed: a narrow float's is float32; a reduction's is at least 32 bits wide,
        and as wide as the type it is stated to have."""
        body, stated = self.body.dtype.compute, self.type.dtype.compute
        if self.kind is not StatementKind.REDUCE:
            return body
        if body.is_float:
            return DType.FLOAT64 if stated is DType.FLOAT64 else body
        if stated.is_float or max(body.bits, stated.bits) == 64:
            return DType.INT64 if body.is_signed else DType.UINT64
        return DType.INT32 if body.is_signed else DType.UINT32

    @property
    def flops(self) -> int:
        """Operations: one for each operator of the body at each point, and one for combining.

        Arithmetic on axes alone (indices, the sides of a guard) and comparisons are not counted.
        """
        return self.points * (operators(self.body) + (1 if self.combine else 0))


def operators(expr: Expr) -> int:
    """Operators on values that come from tensors; comparisons are none."""
    return _operators(expr)[0]


def _operators(expr: Expr) -> tuple[int, bool]:
    """Operators on values that come from tensors, and whether this expression is such a value."""
    if isinstance(expr, Load):
        return 0, True
    count, of_tensors = 0, False
    for child in children(expr):
        below, is_value = _operators(child)
        count += below
        of_tensors |= is_value
    return count + (isinstance(expr, Op) and of_tensors and expr.dtype is not DType.INT8), of_tensors


@dataclass(frozen=True, slots=True)
class Output:
    """What the caller gets: `name` in the result, `tensor` the id that holds it."""

    name: str
    tensor: str


@dataclass(frozen=True, slots=True)
class TensorProgram:
    """What a client posts, checked. Statements are in order: each reads only inputs and earlier ones.

    `constants`: inputs that stay the same from call to call, weights for instance.
    """

    inputs: tuple[tuple[str, TensorType], ...]
    statements: tuple[TensorExpr, ...]
    outputs: tuple[Output, ...]
    constants: tuple[str, ...] = ()

    @property
    def types(self) -> Mapping[str, TensorType]:
        """Type of every tensor, inputs and written ones."""
        return dict(self.inputs) | {s.output: s.type for s in self.statements}

    @property
    def flops(self) -> int:
        return sum(s.flops for s in self.statements)

    @property
    def has_runtime_checks(self) -> bool:
        """Whether any index comes from data, so that a call may raise IndexRangeError."""
        return any(any(load.bounds_checked) for s in self.statements for load in s.reads) or any(
            any(s.bounds_checked) for s in self.statements
        )


def live_statements(program: TensorProgram, tensors: Collection[str]) -> tuple[TensorExpr, ...]:
    """The statements that `wanted` tensors depend on, in their order."""
    needed = set(tensors)
    live: list[TensorExpr] = []
    for statement in reversed(program.statements):
        if statement.output in needed:
            live.append(statement)
            needed.update(statement.reads_tensors)
    return tuple(reversed(live))
