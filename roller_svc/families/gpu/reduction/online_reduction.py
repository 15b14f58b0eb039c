"""Online reductions of a row in one pass: online softmax (Milakov & Gimelshein, 2018), variance (Welford), argmax.

Every element of a vector accumulates a pair of its own, `T.first` and `T.second`, where T is the tensor of the first
reduction. The pairs of a lane, then those of all lanes, are merged.

Online softmax has one maximum for all elements of a vector (FlashAttention: Dao, 2022). The maximum of a vector is
computed first, so that the sums are rescaled once for each vector.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.analysis.online_reduction import OnlineReduction, OnlineReductionKind
from roller_svc.families.gpu.reduction.thread_mapping import ROUND, VECTOR_ELEMENT, RowPart, RowTiling, ThreadRows
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, Select
from roller_svc.ir.index import eq, num, ref, require_expr
from roller_svc.ir.program import COMBINE_OPS, Combine, identity
from roller_svc.ir.schedule import Compute, HorizontalReduce, Loop, LoopKind, Node, Storage
from roller_svc.schedule.nest_statements import acc_name, register

INVERSE, WEIGHT = ".inverse", ".weight"
VALUES, BASE, RESCALE = ".values", ".base", ".rescale"


@dataclass(frozen=True, slots=True)
class OnlinePass:
    """The pass of one online reduction.

    `value`, `mean`, `index` and `neutral` are those of the reduction over loop variables and registers. `accumulators`
    is the number of pairs of a lane.
    """

    reduction: OnlineReduction
    rows: ThreadRows
    tiling: RowTiling
    accumulators: int
    value: Expr
    mean: Expr | None
    index: Expr | None
    neutral: Expr | None

    # registers ------------------------------------------------------------------------------------------------------
    @property
    def _combine(self) -> Combine:
        return self.reduction.first.combine or Combine.SUM

    @property
    def _dtype(self) -> DType:
        return self.reduction.first.accumulator

    @property
    def _index(self) -> tuple[Expr, ...]:
        return (*self.rows.elements, ref(VECTOR_ELEMENT) if self.accumulators > 1 else num(0))

    def _name(self, suffix: str) -> str:
        edge = "edge_" if self.tiling.part is RowPart.EDGES else ""
        return f"{self.reduction.first.output}.{edge}{suffix}"

    @property
    def is_blockwise(self) -> bool:
        """Whether all elements of a vector share one maximum."""
        return self.reduction.kind is OnlineReductionKind.SOFTMAX and self.accumulators > 1

    @property
    def _first_index(self) -> tuple[Expr, ...]:
        return (*self.rows.elements, num(0)) if self.is_blockwise else self._index

    def _first(self) -> Expr:
        return Load(self._name("first"), self._first_index, self._dtype)

    def _second(self) -> Expr:
        return Load(self._name("second"), self._index, self.reduction.second.accumulator)

    def storages(self) -> list[Storage]:
        shape = (*self.rows.shape, self.accumulators)
        first_shape = (*self.rows.shape, 1) if self.is_blockwise else shape
        storages = [
            register(self._name("first"), self._dtype, *first_shape),
            register(self._name("second"), self.reduction.second.accumulator, *shape),
        ]
        if self.reduction.kind is not OnlineReductionKind.ARG:
            storages.append(register(self._name("next"), self._dtype, *first_shape))
        if self.is_blockwise:
            storages += [register(VALUES, self._dtype, self.accumulators), register(BASE, self._dtype)]
            storages.append(register(RESCALE, self._dtype))
        if self.reduction.kind is OnlineReductionKind.VARIANCE and self.tiling.part is not RowPart.EDGES:
            storages += [register(INVERSE, self._dtype), register(WEIGHT, self._dtype)]
        return storages

    # update ---------------------------------------------------------------------------------------------------------
    def start(self) -> tuple[Node, ...]:
        empty: Expr = identity(Combine.SUM, self.reduction.second.accumulator)
        if self.reduction.kind is OnlineReductionKind.ARG:
            empty = require_expr(self.neutral, "neutral index of the online reduction")
        first = Compute(self._name("first"), self._first_index, identity(self._combine, self._dtype))
        second = Compute(self._name("second"), self._index, empty)
        nodes = (
            (first, *self._for_each_accumulator((second,))) if self.is_blockwise else self._for_each_accumulator((first, second))
        )
        return self.rows.for_each_row(nodes, vector=False)

    def begin_chunk(self) -> tuple[Node, ...]:
        """Compute what all elements of a chunk share: for variance, weights by the number of earlier values."""
        if self.reduction.kind is not OnlineReductionKind.VARIANCE:
            return ()
        count = Cast(ref(ROUND), self._dtype)
        one = self._number(1.0)
        return (
            Compute(INVERSE, (), self._op(OpKind.DIV, one, self._op(OpKind.MAX, count, one))),
            Compute(WEIGHT, (), self._op(OpKind.DIV, count, self._op(OpKind.ADD, count, one))),
        )

    def update(self) -> tuple[Node, ...]:
        """Accumulate one value of each accumulator."""
        value = Cast(self.value, self._dtype, implicit=True)
        match self.reduction.kind:
            case OnlineReductionKind.SOFTMAX:
                return self._update_softmax(value)
            case OnlineReductionKind.VARIANCE:
                return self._update_variance(value)
            case OnlineReductionKind.ARG:
                return self._update_arg(value)

    def update_vector(self) -> tuple[Node, ...]:
        """Accumulate the values of a vector, relative to the maximum of its elements and of all earlier ones."""
        width, next_name = self.accumulators, self._name("next")
        value = Cast(self.value, self._dtype, implicit=True)
        values, index = Load(VALUES, (ref(VECTOR_ELEMENT),), self._dtype), self._first_index
        next_ = Load(next_name, index, self._dtype)
        base = Select(eq(next_, self._number(-math.inf)), self._number(0.0), next_, self._dtype)
        term = self._exp(self._op(OpKind.SUB, values, Load(BASE, (), self._dtype)))
        rescaled = self._op(OpKind.MUL, self._second(), Load(RESCALE, (), self._dtype))
        nodes: tuple[Node, ...] = (
            Loop(VECTOR_ELEMENT, width, LoopKind.VECTOR, (Compute(VALUES, values.index, value),)),
            HorizontalReduce(next_name, index, Load(VALUES, (num(0),), self._dtype), width, self._combine),
            Compute(next_name, index, self._first(), self._combine),
            Compute(BASE, (), base),
            Compute(RESCALE, (), self._rescale_factor(self._first(), next_)),
            *self._for_each_accumulator((Compute(self._name("second"), self._index, self._op(OpKind.ADD, rescaled, term)),)),
            Compute(self._name("first"), index, next_),
        )
        return self.rows.for_each_row(nodes, vector=False)

    def _update_softmax(self, value: Expr) -> tuple[Node, ...]:
        """Accumulate an exponential; the maximum may still be -inf, which needs base 0."""
        next_ = Load(self._name("next"), self._index, self._dtype)
        base = Select(eq(next_, self._number(-math.inf)), self._number(0.0), next_, self._dtype)
        term = self._exp(self._op(OpKind.SUB, value, base))
        rescaled = self._op(OpKind.MUL, self._second(), self._rescale_factor(self._first(), next_))
        return (
            Compute(self._name("next"), self._index, self._first()),
            Compute(self._name("next"), self._index, value, Combine.MAX),
            Compute(self._name("second"), self._index, self._op(OpKind.ADD, rescaled, term)),
            Compute(self._name("first"), self._index, next_),
        )

    def _rescale_factor(self, old: Expr, new: Expr) -> Expr:
        factor = self._exp(self._op(OpKind.SUB, old, new))
        return Select(eq(old, new), self._number(1.0), factor, self._dtype)

    def _exp(self, power: Expr) -> Expr:
        """Return the exponential in the type of the row's values: of 16-bit values, the approximate one."""
        own = self.value.dtype
        return Op(OpKind.EXP, (power,), own if own.compute is self._dtype else self._dtype)

    def _update_variance(self, value: Expr) -> tuple[Node, ...]:
        away = Load(self._name("next"), self._index, self._dtype)
        mean = self._op(OpKind.MUL, self._first(), Load(INVERSE, (), self._dtype))
        square = self._op(OpKind.MUL, self._op(OpKind.MUL, away, away), Load(WEIGHT, (), self._dtype))
        return (
            Compute(self._name("next"), self._index, self._op(OpKind.SUB, value, mean)),
            Compute(self._name("second"), self._index, square, Combine.SUM),
            Compute(self._name("first"), self._index, value, Combine.SUM),
        )

    def _update_arg(self, value: Expr) -> tuple[Node, ...]:
        """Accumulate a value and its index; a NaN stays the extremum and equals nothing."""
        second, dtype = self.reduction.second, self.reduction.second.accumulator
        index = Cast(require_expr(self.index, "index of the online reduction"), dtype, implicit=True)
        tie_break = COMBINE_OPS[second.combine or Combine.MIN]
        better = OpKind.GT if self._combine is Combine.MAX else OpKind.LT
        otherwise: Expr = self._second()
        if self._dtype.is_float:
            nan = Op(OpKind.NE, (value, value), DType.INT8)
            otherwise = Select(
                nan,
                Cast(require_expr(self.neutral, "neutral index of the online reduction"), dtype, implicit=True),
                otherwise,
                dtype,
            )
        same = Select(eq(value, self._first()), Op(tie_break, (self._second(), index), dtype), otherwise, dtype)
        best = Select(Op(better, (value, self._first()), DType.INT8), index, same, dtype)
        return (
            Compute(self._name("second"), self._index, best),
            Compute(self._name("first"), self._index, value, self._combine),
        )

    # merge ----------------------------------------------------------------------------------------------------------
    def start_primary(self) -> tuple[Node, ...]:
        return self._start(acc_name(self.reduction.first.output), identity(self._combine, self._dtype))

    def lane_primary(self) -> tuple[Node, ...]:
        """Reduce the lane's accumulators of the first reduction."""
        acc, first = acc_name(self.reduction.first.output), self._first()
        if self.is_blockwise:
            return self.rows.for_each_row((Compute(acc, self.rows.elements, first, self._combine),), vector=False)
        return self._combine_accumulators(acc, first, self._combine)

    def start_secondary(self) -> tuple[Node, ...]:
        second = self.reduction.second
        return self._start(acc_name(second.output), identity(second.combine or Combine.SUM, second.accumulator))

    def lane_secondary(self) -> tuple[Node, ...]:
        """Reduce the lane's accumulators of the second reduction, once the row's first result is known."""
        second = self.reduction.second
        combine = second.combine or Combine.SUM
        total = Load(acc_name(self.reduction.first.output), self.rows.elements, self._dtype)
        match self.reduction.kind:
            case OnlineReductionKind.SOFTMAX:
                partial = self._op(OpKind.MUL, self._second(), self._rescale_factor(self._first(), total))
            case OnlineReductionKind.VARIANCE:
                partial = self._op(OpKind.ADD, self._second(), self._mean_shift(total))
            case OnlineReductionKind.ARG:
                neutral = Cast(
                    require_expr(self.neutral, "neutral index of the online reduction"),
                    second.accumulator,
                    implicit=True,
                )
                partial = Select(eq(self._first(), total), self._second(), neutral, second.accumulator)
        return self._combine_accumulators(acc_name(second.output), partial, combine)

    def merge_correction(self) -> tuple[Node, ...]:
        """Add to the merged second result what all lanes share."""
        total = Load(acc_name(self.reduction.first.output), self.rows.elements, self._dtype)
        match self.reduction.kind:
            case OnlineReductionKind.SOFTMAX:  # makes the result NaN for infinite maxima
                extra = self._op(OpKind.SUB, total, total)
            case OnlineReductionKind.VARIANCE:
                points = self._number(float(self.tiling.points))
                mean = require_expr(self.mean, "mean of the online reduction")
                away = self._op(OpKind.SUB, self._op(OpKind.DIV, total, points), mean)
                extra = self._op(OpKind.MUL, points, self._op(OpKind.MUL, away, away))
            case OnlineReductionKind.ARG:
                return ()
        node = Compute(acc_name(self.reduction.second.output), self.rows.elements, extra, Combine.SUM)
        return self.rows.for_each_row((node,), vector=False)

    def _mean_shift(self, total: Expr) -> Expr:
        """Return the squared distance of an accumulator's mean from the row's, times its count (Chan's merge)."""
        count = Cast(self.tiling.chunks_of_lane, self._dtype)
        mean = self._op(OpKind.DIV, self._first(), self._op(OpKind.MAX, count, self._number(1.0)))
        points = self._number(float(self.tiling.points))
        away = self._op(OpKind.SUB, mean, self._op(OpKind.DIV, total, points))
        return self._op(OpKind.MUL, count, self._op(OpKind.MUL, away, away))

    def _start(self, acc: str, identity_value: Expr) -> tuple[Node, ...]:
        return self.rows.for_each_row((Compute(acc, self.rows.elements, identity_value),), vector=False)

    def _combine_accumulators(self, acc: str, partial: Expr, combine: Combine) -> tuple[Node, ...]:
        nodes: tuple[Node, ...] = (Compute(acc, self.rows.elements, partial, combine),)
        return self.rows.for_each_row(self._for_each_accumulator(nodes), vector=False)

    def _for_each_accumulator(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return nodes if self.accumulators == 1 else (Loop(VECTOR_ELEMENT, self.accumulators, LoopKind.UNROLL, nodes),)

    # expressions ----------------------------------------------------------------------------------------------------
    def _op(self, kind: OpKind, *args: Expr) -> Expr:
        return Op(kind, args, self._dtype)

    def _number(self, value: float) -> Const:
        return Const(value, self._dtype)
