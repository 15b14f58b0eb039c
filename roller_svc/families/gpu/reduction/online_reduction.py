"""Two reductions of a row in one pass: what a lane keeps as it goes, and how the lanes' pairs are put together.

Every place of a run has a pair of its own, `T.first` and `T.second`, T the tensor of the first reduction.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.analysis.online_reduction import OnlineReduction, OnlineReductionKind
from roller_svc.families.gpu.reduction.thread_mapping import LANE, PLACE, ROUND, RowWalk, ThreadRows
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, Select
from roller_svc.ir.index import given, lt, num, ref
from roller_svc.ir.program import COMBINE_OPS, Combine, identity
from roller_svc.ir.schedule import Compute, Loop, LoopKind, Node, Storage
from roller_svc.schedule.nest_statements import acc_name, register

INVERSE, WEIGHT = ".inverse", ".weight"


@dataclass(frozen=True, slots=True)
class JointPass:
    """`value`, `centre`, `place`, `idle` as in the joint, over loop variables and registers. `places`: of a run that
    have pairs of their own."""

    joint: OnlineReduction
    rows: ThreadRows
    walk: RowWalk
    places: int
    value: Expr
    centre: Expr | None
    place: Expr | None
    idle: Expr | None

    # registers ------------------------------------------------------------------------------------------------------
    @property
    def _combine(self) -> Combine:
        return self.joint.first.combine or Combine.SUM

    @property
    def _dtype(self) -> DType:
        return self.joint.first.accumulator

    @property
    def _index(self) -> tuple[Expr, ...]:
        return (*self.rows.elements, ref(PLACE) if self.places > 1 else num(0))

    def _name(self, part: str) -> str:
        return f"{self.joint.first.output}.{part}"

    def _first(self) -> Expr:
        return Load(self._name("first"), self._index, self._dtype)

    def _second(self) -> Expr:
        return Load(self._name("second"), self._index, self.joint.second.accumulator)

    def storages(self) -> list[Storage]:
        shape = (*self.rows.shape, self.places)
        found = [
            register(self._name("first"), self._dtype, *shape),
            register(self._name("second"), self.joint.second.accumulator, *shape),
        ]
        if self.joint.kind is not OnlineReductionKind.ARG:
            found.append(register(self._name("next"), self._dtype, *shape))
        if self.joint.kind is OnlineReductionKind.VARIANCE:
            found += [register(INVERSE, self._dtype), register(WEIGHT, self._dtype)]
        return found

    # on the way -----------------------------------------------------------------------------------------------------
    def start(self) -> tuple[Node, ...]:
        empty: Expr = identity(Combine.SUM, self.joint.second.accumulator)
        if self.joint.kind is OnlineReductionKind.ARG:
            empty = given(self.idle, "idle of the joint")
        nodes: tuple[Node, ...] = (
            Compute(self._name("first"), self._index, identity(self._combine, self._dtype)),
            Compute(self._name("second"), self._index, empty),
        )
        return self.rows.each(self._each_place(nodes), vector=False)

    def before_chunk(self) -> tuple[Node, ...]:
        """What is the same for all places of a chunk: of squares, weights by how many values there were before."""
        if self.joint.kind is not OnlineReductionKind.VARIANCE:
            return ()
        count = Cast(ref(ROUND), self._dtype)
        one = self._number(1.0)
        return (
            Compute(INVERSE, (), self._op(OpKind.DIV, one, self._op(OpKind.MAX, count, one))),
            Compute(WEIGHT, (), self._op(OpKind.DIV, count, self._op(OpKind.ADD, count, one))),
        )

    def update(self) -> tuple[Node, ...]:
        """One more value of each place."""
        value = Cast(self.value, self._dtype, implicit=True)
        match self.joint.kind:
            case OnlineReductionKind.SOFTMAX:
                return self._exponentials(value)
            case OnlineReductionKind.VARIANCE:
                return self._squares(value)
            case OnlineReductionKind.ARG:
                return self._placed(value)

    def _exponentials(self, value: Expr) -> tuple[Node, ...]:
        """Where nothing but -inf has come so far, exponentials are of -inf, as they will turn out to be."""
        next_ = Load(self._name("next"), self._index, self._dtype)
        base = Select(self._equal(next_, self._number(-math.inf)), self._number(0.0), next_, self._dtype)
        term = self._op(OpKind.EXP, self._op(OpKind.SUB, value, base))
        kept = self._op(OpKind.MUL, self._second(), self._shrunk(self._first(), next_))
        return (
            Compute(self._name("next"), self._index, self._first()),
            Compute(self._name("next"), self._index, value, Combine.MAX),
            Compute(self._name("second"), self._index, self._op(OpKind.ADD, kept, term)),
            Compute(self._name("first"), self._index, next_),
        )

    def _shrunk(self, old: Expr, new: Expr) -> Expr:
        shrunk = self._op(OpKind.EXP, self._op(OpKind.SUB, old, new))
        return Select(self._equal(old, new), self._number(1.0), shrunk, self._dtype)

    def _squares(self, value: Expr) -> tuple[Node, ...]:
        away = Load(self._name("next"), self._index, self._dtype)
        mean = self._op(OpKind.MUL, self._first(), Load(INVERSE, (), self._dtype))
        square = self._op(OpKind.MUL, self._op(OpKind.MUL, away, away), Load(WEIGHT, (), self._dtype))
        return (
            Compute(self._name("next"), self._index, self._op(OpKind.SUB, value, mean)),
            Compute(self._name("second"), self._index, square, Combine.SUM),
            Compute(self._name("first"), self._index, value, Combine.SUM),
        )

    def _placed(self, value: Expr) -> tuple[Node, ...]:
        """NaN, once it has come, is the extreme, and equal to nothing."""
        second, dtype = self.joint.second, self.joint.second.accumulator
        place = Cast(given(self.place, "place of the joint"), dtype, implicit=True)
        join = COMBINE_OPS[second.combine or Combine.MIN]
        better = OpKind.GT if self._combine is Combine.MAX else OpKind.LT
        other: Expr = self._second()
        if self._dtype.is_float:
            nan = Op(OpKind.NE, (value, value), DType.INT8)
            other = Select(nan, Cast(given(self.idle, "idle of the joint"), dtype, implicit=True), other, dtype)
        same = Select(self._equal(value, self._first()), Op(join, (self._second(), place), dtype), other, dtype)
        found = Select(Op(better, (value, self._first()), DType.INT8), place, same, dtype)
        return (
            Compute(self._name("second"), self._index, found),
            Compute(self._name("first"), self._index, value, self._combine),
        )

    # afterwards -----------------------------------------------------------------------------------------------------
    def first_of_lane(self) -> tuple[Node, ...]:
        """The lane's part of the first reduction."""
        acc = acc_name(self.joint.first.output)
        return self._joined(acc, self._first(), identity(self._combine, self._dtype), self._combine)

    def second_of_lane(self) -> tuple[Node, ...]:
        """The lane's part of the second, now that the first is known for the whole row."""
        second = self.joint.second
        combine = second.combine or Combine.SUM
        whole = Load(acc_name(self.joint.first.output), self.rows.elements, self._dtype)
        match self.joint.kind:
            case OnlineReductionKind.SOFTMAX:
                part = self._op(OpKind.MUL, self._second(), self._shrunk(self._first(), whole))
            case OnlineReductionKind.VARIANCE:
                part = self._op(OpKind.ADD, self._second(), self._between(whole))
            case OnlineReductionKind.ARG:
                idle = Cast(given(self.idle, "idle of the joint"), second.accumulator, implicit=True)
                part = Select(self._equal(self._first(), whole), self._second(), idle, second.accumulator)
        return self._joined(acc_name(second.output), part, identity(combine, second.accumulator), combine)

    def correction(self) -> tuple[Node, ...]:
        """What all lanes add to the joined second value."""
        whole = Load(acc_name(self.joint.first.output), self.rows.elements, self._dtype)
        match self.joint.kind:
            case OnlineReductionKind.SOFTMAX:  # infinite maxima: their distance from themselves is no number
                extra = self._op(OpKind.SUB, whole, whole)
            case OnlineReductionKind.VARIANCE:
                points = self._number(float(self.walk.chunks * self.walk.run))
                centre = given(self.centre, "centre of the joint")
                away = self._op(OpKind.SUB, self._op(OpKind.DIV, whole, points), centre)
                extra = self._op(OpKind.MUL, points, self._op(OpKind.MUL, away, away))
            case OnlineReductionKind.ARG:
                return ()
        node = Compute(acc_name(self.joint.second.output), self.rows.elements, extra, Combine.SUM)
        return self.rows.each((node,), vector=False)

    def _between(self, whole: Expr) -> Expr:
        """Squared distance of a place's own mean from that of the row, for each of its values."""
        rounds, rest = divmod(self.walk.chunks, self.walk.lanes)
        values: Expr = num(rounds)
        if rest:
            values = Select(lt(ref(LANE), num(rest)), num(rounds + 1), num(rounds), DType.INT32)
        count = Cast(values, self._dtype)
        mean = self._op(OpKind.DIV, self._first(), self._op(OpKind.MAX, count, self._number(1.0)))
        points = self._number(float(self.walk.chunks * self.walk.run))
        away = self._op(OpKind.SUB, mean, self._op(OpKind.DIV, whole, points))
        return self._op(OpKind.MUL, count, self._op(OpKind.MUL, away, away))

    def _joined(self, acc: str, part: Expr, start: Expr, combine: Combine) -> tuple[Node, ...]:
        nodes: tuple[Node, ...] = (Compute(acc, self.rows.elements, part, combine),)
        return self.rows.each((Compute(acc, self.rows.elements, start), *self._each_place(nodes)), vector=False)

    def _each_place(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return nodes if self.places == 1 else (Loop(PLACE, self.places, LoopKind.UNROLL, nodes),)

    # expressions ----------------------------------------------------------------------------------------------------
    def _op(self, kind: OpKind, *args: Expr) -> Expr:
        return Op(kind, args, self._dtype)

    def _number(self, value: float) -> Const:
        return Const(value, self._dtype)

    @staticmethod
    def _equal(a: Expr, b: Expr) -> Expr:
        return Op(OpKind.EQ, (a, b), DType.INT8)
