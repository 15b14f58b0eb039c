"""Arg-reduction (argmax, argmin) fused with its max or min in one pass over a row."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.analysis.online_reduction import OnlineReduction, OnlineReductionKind, online_reductions
from roller_svc.ir.affine import affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Cast, Expr, Load, Op, OpKind, Select
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, eq, num, require_expr
from roller_svc.ir.program import COMBINE_OPS, Axis, Combine, identity
from roller_svc.ir.schedule import Compute, HorizontalReduce, Loop, LoopKind, Node
from roller_svc.schedule.nest_statements import acc_name

Index = tuple[Expr, ...]


def arg_reductions(group: KernelGroup) -> dict[str, OnlineReduction]:
    """Return pairs of an extremum and its index, by the outputs of both."""
    pairs = [j for j in online_reductions(group.statements) if j.kind is OnlineReductionKind.ARG]
    return {s.output: j for j in pairs for s in (j.first, j.second)}


@dataclass(frozen=True, slots=True)
class ArgReduce:
    """The pass of one arg-reduction.

    Lanes hold the extremum in the accumulator of the first reduction and its index in that of the second. The index is
    an int32; a later conversion to a narrower type does not change which one is best.
    """

    reduction: OnlineReduction

    @property
    def dtype(self) -> DType:
        """Return the type of the index during the search."""
        return self.index.dtype

    @property
    def index(self) -> Expr:
        return _narrow(require_expr(self.reduction.index, "index of the reduction"))

    @property
    def neutral_index(self) -> Expr:
        neutral = _narrow(require_expr(self.reduction.neutral_index, "neutral index of the reduction"))
        return neutral if neutral.dtype is self.dtype else Cast(neutral, self.dtype, implicit=True)

    @property
    def _extremum(self) -> tuple[str, DType, Combine]:
        first = self.reduction.first
        return acc_name(first.output), first.accumulator, first.combine or Combine.MAX

    @property
    def _best_index(self) -> tuple[str, Combine]:
        return acc_name(self.reduction.second.output), self.reduction.second.combine or Combine.MIN

    def start(self, index: Index) -> tuple[Node, ...]:
        extremum, dtype, combine = self._extremum
        best, _ = self._best_index
        return (Compute(extremum, index, identity(combine, dtype)), Compute(best, index, self.neutral_index))

    def update(self, index: Index, value: Expr, position: Expr, suffix: str = "", *, in_order: bool = False) -> tuple[Node, ...]:
        """Accumulate one value and its position.

        The position replaces an earlier one if the value is better, or equal where the tie-break prefers the later
        position. `suffix` selects the accumulators of the whole row.
        """
        name, dtype, combine = self._extremum
        best, tie_break = self._best_index
        old_value = Load(name + suffix, index, dtype)
        old_index: Expr = Load(best + suffix, index, self.dtype)
        if value.dtype is not dtype:
            value = Cast(value, dtype, implicit=True)
        better = Op(OpKind.GT if combine is Combine.MAX else OpKind.LT, (value, old_value), DType.INT8)
        if not (in_order and tie_break is Combine.MIN):
            old_index = Select(
                eq(value, old_value),
                Op(COMBINE_OPS[tie_break], (old_index, position), self.dtype),
                old_index,
                self.dtype,
            )
        chosen = Select(better, position, old_index, self.dtype)
        return (Compute(best + suffix, index, chosen), Compute(name + suffix, index, value, combine))

    def reduce_lanes(self, row: Index, lane: AxisRef, lanes: int, native: int) -> list[Node]:
        """Reduce the lanes: halve down to one vector, then reduce it; the index belongs to a lane with the extremum."""
        name, dtype, combine = self._extremum
        best, tie_break = self._best_index
        nodes: list[Node] = []
        while lanes > native:
            lanes //= 2
            upper = (*row, add(lane, num(lanes)))
            body = self.update((*row, lane), Load(name, upper, dtype), Load(best, upper, self.dtype))
            nodes.append(Loop(lane.name, lanes, LoopKind.VECTOR, body))
        nodes.append(HorizontalReduce(f"{name}.total", row, Load(name, (*row, num(0)), dtype), lanes, combine))
        is_best = eq(Load(name, (*row, lane), dtype), Load(f"{name}.total", row, dtype))
        candidate = Select(is_best, Load(best, (*row, lane), self.dtype), self.neutral_index, self.dtype)
        nodes.append(Loop(lane.name, lanes, LoopKind.VECTOR, (Compute(best, (*row, lane), candidate),)))
        nodes.append(HorizontalReduce(f"{best}.total", row, Load(best, (*row, num(0)), self.dtype), lanes, tie_break))
        return nodes

    def finish(self, index: Index) -> tuple[Node, ...]:
        """Reset the index of a NaN extremum, which equals no element."""
        name, dtype, _ = self._extremum
        best = f"{self._best_index[0]}.total"
        total = Load(f"{name}.total", index, dtype)
        index_or_neutral = Select(eq(total, total), Load(best, index, self.dtype), self.neutral_index, self.dtype)
        return (Compute(best, index, index_or_neutral),) if dtype.is_float else ()

    def is_in_order(self, inner: tuple[Axis, ...]) -> bool:
        """Return whether the index grows along the row."""
        form = affine(self.index)
        wide = [a.name for a in inner if a.extent > 1]
        return form is not None and len(wide) == 1 and dict(form.coeffs).get(wide[0], 0) > 0


def _narrow(expr: Expr) -> Expr:
    """Strip conversions to wider integers."""
    while isinstance(expr, Cast) and not expr.dtype.is_float and expr.arg.dtype is not DType.BOOL:
        if expr.arg.dtype.is_float or expr.arg.dtype.bits > expr.dtype.bits:
            break
        expr = expr.arg
    return expr
