"""Operations of each statement of a loop nest at one point, counted by their vector cost on a CPU."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Set
from dataclasses import dataclass, replace
from typing import TypeVar

from roller_svc.analysis.lookup_tables import BYTE_PERMUTATIONS, LookupTables, find_byte_index, is_float_product
from roller_svc.analysis.online_reduction import OnlineReductionKind, online_reductions, strip_casts
from roller_svc.families.common.cpu.column_reduction import (
    is_column_reduction,
    vector_members,
)
from roller_svc.families.common.cpu.guard_counts import count_guard_operations
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, children, loads_of
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.program import Combine, StatementKind, TensorExpr, operators
from roller_svc.perf.cpu_costs import LoopCosts
from roller_svc.perf.machine import Machine
from roller_svc.perf.workload import Workload

F = TypeVar("F")
_FREE = frozenset({OpKind.LNOT, OpKind.NEG, OpKind.ABS})  # folded into another operation, or its operand's sign bit
_MINMAX_OPS = frozenset({OpKind.MAX, OpKind.MIN, OpKind.RELU})  # propagate NaN: a comparison and a select
_DIVISIONS = frozenset({OpKind.DIV, OpKind.SQRT, OpKind.RSQRT, OpKind.RECIPROCAL})  # units that are not fully pipelined
_EXPONENTIALS = frozenset({OpKind.EXP, OpKind.EXP2, OpKind.SIGMOID, OpKind.SILU, OpKind.TANH, OpKind.EXPM1})
_ALU_OPS = frozenset({
    OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.SQUARE, OpKind.FMA, OpKind.FMAX, OpKind.FMIN, OpKind.CLIP, OpKind.SHL,
    OpKind.SHR, OpKind.LT, OpKind.LE, OpKind.GT, OpKind.GE, OpKind.EQ, OpKind.NE, OpKind.LAND, OpKind.LOR,
    OpKind.BITAND, OpKind.BITOR, OpKind.BITXOR, OpKind.BITNOT, OpKind.FLOOR, OpKind.CEIL, OpKind.RFLOOR, OpKind.RCEIL,
    OpKind.ROUND, OpKind.TRUNC, OpKind.SIGN, OpKind.ISNAN, OpKind.ISINF,
})  # fmt: skip


@dataclass(frozen=True, slots=True)
class OpCounts:
    """Operations at one point, on values that vary within a vector or a loop's step."""

    alu: int = 0
    lut: int = 0  # in-register lookup tables
    minmax: int = 0
    div: int = 0  # divisions and roots
    exp: int = 0
    functions: int = 0  # other polynomials, and integer divisions

    @property
    def is_expensive(self) -> bool:
        """Whether caching the value is cheaper than recomputing it."""
        return bool(self.div or self.exp or self.functions)

    def __add__(self, other: OpCounts) -> OpCounts:
        return OpCounts(
            self.alu + other.alu,
            self.lut + other.lut,
            self.minmax + other.minmax,
            self.div + other.div,
            self.exp + other.exp,
            self.functions + other.functions,
        )


# functions of e^x that divide, as `codegen/c/vector/elementary.py` emits them
_EXPONENTIAL_WORK = {
    OpKind.SIGMOID: OpCounts(exp=1, div=1, alu=1),
    OpKind.SILU: OpCounts(exp=1, div=1, alu=2),
    OpKind.TANH: OpCounts(exp=1, div=1, alu=6),
}


@dataclass(frozen=True, slots=True)
class StatementWork:
    """Work of one statement over all its points."""

    points: int
    counts: OpCounts
    combine: Combine | None  # combiner of a reduction, each value after the one before it
    tensors: frozenset[str]  # read and written
    invariants: tuple[tuple[int, OpCounts], ...] = ()  # (times, operations) of values that all lanes of a row share
    guard_operations: float = 0.0  # of a vector's guards on indices, the mean of all vectors
    gathers: tuple[tuple[str, int], ...] = ()  # (tensor, its loads at a point whose places along a vector are data)
    adds_product: bool = False  # a sum of products of floats: one instruction multiplies and adds


def count_statement_work(group: KernelGroup, lanes: int) -> tuple[StatementWork, ...]:
    """Count the work of a nest's statements; the second of an arg reduction belongs to the first.

    `lanes`: 32-bit elements of a vector.
    """
    along = vector_members(group.space)
    outer = {a.name for a in group.outer}
    tables = _tables(group, lanes)
    with_first = {j.second.output for j in online_reductions(group.statements) if j.kind is OnlineReductionKind.ARG}
    known: set[Expr] = set()
    found = []
    for statement in group.statements:
        if statement.output in with_first:
            continue
        inner = {a.name for a in statement.axes if a.name not in outer and a.extent > 1}
        body, shared = tables.group_invariant_factors(statement.body), known.copy()
        work = _varying_ops(body, along | inner, known, tables)
        counts = sum((OpCounts(lut=1) if is_known else _count_op(e, along, inner) for e, is_known in work), OpCounts())
        joins = statement.combine if statement.kind is StatementKind.REDUCE else None
        tensors = frozenset((statement.output, *statement.reads_tensors))
        invariants = tuple(
            (_iterations(statement, axes_of(e)), _count_op(e, set(), set())) for e in _invariant_ops(body, along | inner, shared)
        )
        guards = count_guard_operations(statement, along, lanes)
        gathers, adds_product = _count_gathers(body, along), joins is Combine.SUM and is_float_product(strip_casts(body))
        found.append(StatementWork(statement.points, counts, joins, tensors, invariants, guards, gathers, adds_product))
    return tuple(found)


def _count_gathers(body: Expr, along: Set[str]) -> tuple[tuple[str, int], ...]:
    """Count the distinct loads of each tensor whose places along a vector are data."""
    loads = dict.fromkeys(loads_of(body))

    def is_gathered(load: Load) -> bool:
        return any(not along.isdisjoint(axes_of(inner)) for index in load.index for inner in loads_of(index))

    return tuple(Counter(load.tensor for load in loads if is_gathered(load)).items())


def _iterations(statement: TensorExpr, axes: Set[str]) -> int:
    """Return the iterations of the loops down to the innermost one of these axes."""
    last = max((i for i, a in enumerate(statement.axes) if a.name in axes), default=-1)
    return math.prod(a.extent for a in statement.axes[: last + 1])


def folded_flops(group: KernelGroup, lanes: int) -> int:
    """Return the operations, as `TensorExpr.flops` counts them, that lookup tables replace."""
    tables = _tables(group, lanes)
    return sum(s.points * _folded_ops(tables.group_invariant_factors(s.body), tables) for s in group.statements)


def subtract_folded_flops(group: KernelGroup, p: Workload[F]) -> Workload[F]:
    """Return the workload without the operations that lookup tables replace."""
    return replace(p, operations=p.operations - folded_flops(group, p.machine.unit.shape[-1]))


def _tables(group: KernelGroup, lanes: int) -> LookupTables:
    """Prepare lookup tables; in column reductions, values that all columns share are computed once per row."""
    return LookupTables(lanes, vector_members(group.space) if is_column_reduction(group.space) else frozenset())


def _folded_ops(expr: Expr, tables: LookupTables, *, is_factor: bool = False) -> int:
    if (few := tables.find_index(expr, is_factor=is_factor)) is not None:
        return operators(expr) - operators(few.source) - 1
    parts = expr.index if isinstance(expr, Load) else children(expr)
    return sum(_folded_ops(part, tables, is_factor=is_float_product(expr)) for part in parts)


def count_ops(expr: Expr, moving: set[str]) -> OpCounts:
    """Count the operations of a value per point along the `moving` axes."""
    return sum((_count_op(e, moving, moving) for e, _ in _varying_ops(expr, moving, set(), LookupTables(0))), OpCounts())


def _varying_ops(
    expr: Expr, moving: Set[str], known: set[Expr], tables: LookupTables, *, is_factor: bool = False
) -> Iterator[tuple[Expr, bool]]:
    """Yield the operations whose operands vary along `moving` axes, and whether a lookup table replaces them.

    Index expressions are left out. Expensive values are computed once; `known` grows.
    """
    if not _has_loads(expr) or moving.isdisjoint(axes_of(expr)) or expr in known:
        return
    if isinstance(expr, Load):  # data may look it up, in registers or in memory
        few = tables.find_index(expr)
        if few is not None or find_byte_index(expr) is not None:
            yield expr, few is not None
        for child in (few.source,) if few is not None else expr.index:
            yield from _varying_ops(child, moving, known, tables)
        return
    if isinstance(expr, Op) and expr.kind in _EXPONENTIALS:
        known.add(expr)
    few = tables.find_index(expr, is_factor=is_factor)
    yield expr, few is not None
    for child in (few.source,) if few is not None else children(expr):
        yield from _varying_ops(child, moving, known, tables, is_factor=is_float_product(expr))


def _invariant_ops(expr: Expr, moving: Set[str], known: set[Expr]) -> Iterator[Expr]:
    """Yield the operations on loaded values that do not vary along `moving` axes; `known` grows.

    Index expressions are left out.
    """
    if isinstance(expr, Load) or not _has_loads(expr) or expr in known:
        return
    if moving.isdisjoint(axes_of(expr)):
        known.add(expr)
        yield expr
    for child in children(expr):
        yield from _invariant_ops(child, moving, known)


def _has_loads(expr: Expr) -> bool:
    return isinstance(expr, Load) or any(_has_loads(child) for child in children(expr))


def _count_op(expr: Expr, along: Set[str], inner: Set[str]) -> OpCounts:
    match expr:
        case Op(kind=kind) if kind in _FREE:
            return OpCounts()
        case Op(kind=OpKind.DIV, args=(_, Const(value=value))) if math.frexp(value)[0] == 0.5:
            return OpCounts(alu=1)  # compilers multiply by an exact reciprocal
        case Op(kind=OpKind.DIV, args=(what, Const())) if inner and along.isdisjoint(axes_of(what)):
            return OpCounts(alu=1)  # one for all lanes
        case Op(kind=OpKind.DIV, args=(_, by)) if inner and inner.isdisjoint(axes_of(by)) and loads_of(by):
            return OpCounts(alu=1)  # the divisor is per row: multiply by its reciprocal
        case Op(kind=kind) if kind in _DIVISIONS:
            return OpCounts(div=2 if kind is OpKind.RSQRT else 1)
        case Op(kind=kind) if kind in _MINMAX_OPS:
            return OpCounts(minmax=1)
        case Op(kind=kind) if kind in _EXPONENTIALS:
            return _EXPONENTIAL_WORK.get(kind, OpCounts(exp=1))
        case Op(kind=kind):
            return OpCounts(alu=1) if kind in _ALU_OPS else OpCounts(functions=1)
        case Load(dtype=dtype):
            return OpCounts(lut=BYTE_PERMUTATIONS if dtype.bits == DType.UINT8.bits else 0)
        case Select() | Cast(implicit=False):
            return OpCounts(alu=1)
        case Cast(arg=arg):
            return OpCounts(alu=int(arg.dtype.compute is not expr.dtype.compute))
        case _:
            return OpCounts()


def work_cycles(mach: Machine, counts: OpCounts) -> float:
    """Return cycles of one vector's operations; the divider overlaps with all other units."""
    return max(alu_cycles(mach.costs.loops, counts), mach.division_cycles * counts.div)


def alu_cycles(costs: LoopCosts, counts: OpCounts) -> float:
    return (
        costs.operation_cycles * counts.alu
        + costs.lookup_cycles * counts.lut
        + costs.minmax_cycles * counts.minmax
        + costs.exponential_cycles * counts.exp
        + costs.function_cycles * counts.functions
    )
