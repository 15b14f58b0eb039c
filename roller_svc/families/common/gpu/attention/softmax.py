"""Online softmax of a warp's scores in registers (Milakov & Gimelshein, 2018).

Every lane holds elements of two rows of each fragment of `mma.sync` and `wgmma`, of one row of MFMA's. Four lanes share
rows and reduce their maxima (FlashAttention-2: Dao, arXiv:2307.08691, algorithm 1).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import reduce

from roller_svc.families.common.gpu.attention.mask import VANISHING
from roller_svc.families.common.gpu.attention.score_rows import ROW, SCORES, ScoreRows
from roller_svc.families.common.gpu.matrix.epilogue import lane_of_row
from roller_svc.families.common.gpu.matrix.mainloop import ACC
from roller_svc.families.common.gpu.matrix.tile import ROW_LANES
from roller_svc.ir.attention import state_names, unmasked
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind, Select, children, loads_of, rewrite, with_children
from roller_svc.ir.index import eq, logical_and, lt, num, ref
from roller_svc.ir.program import Combine, identity
from roller_svc.ir.schedule import Branch, Compute, Exp2, Node, WarpReduce
from roller_svc.schedule.nest_statements import convert_to_type, register, wrap_in_storages

PEAK, MAXIMUM, TOTAL, SHIFT, RESCALE = ".peak", ".maximum", ".total", ".shift", ".rescale"
# Largest shift of exponents: a multiply-add leaves 2^-12 of an exponent of 2 by the shift's rounding.
MAX_SHIFT = 4096.0
_F32 = DType.FLOAT32
_MINUS_INFINITY = identity(Combine.MAX, _F32)


@dataclass(frozen=True, slots=True)
class Softmax(ScoreRows):
    """Online softmax of one attention kernel."""

    def update_probabilities(self, is_unmasked: Expr | None = None) -> tuple[Node, ...]:
        """Turn scores into probabilities and update row_max and row_sum.

        `is_unmasked` is the condition that no row masks a key of the tile.
        """
        return (*self._mask_scores(is_unmasked), *self._reduce_row_max(), *self._exp())

    def rescale_o(self) -> Node:
        """Rescale O to the new row_max."""
        return self.for_each_output(lambda result: _times(result, Load(RESCALE, ROW, _F32)))

    def normalize(self) -> tuple[Node, ...]:
        """Divide O by row_sum, which must have been reduced over the lanes, or compute what else the results are."""
        if self.attention.rows.result is not None:
            return self._compute_results(self.attention.rows.result)
        reciprocal = Op(OpKind.DIV, (Const(1.0, _F32), Load(TOTAL, ROW, _F32)), _F32)
        inverse = self.for_each_row((Compute(TOTAL, ROW, reciprocal),))
        return (inverse, self.for_each_output(lambda result: _times(result, Load(TOTAL, ROW, _F32))))

    def _compute_results(self, result: Expr) -> tuple[Node, ...]:
        """Compute each result from O. What depends on the row alone is computed once."""
        names: dict[Expr, str] = {}

        def of_row(part: Expr) -> Expr:
            return Load(names.setdefault(part, f".row_value{len(names)}"), ROW, part.dtype)

        value = _of_element(result, state_names(self.attention.row_sum)[2], Load(ACC, self.result, _F32), of_row)
        rows = self.bind_row(tuple(Compute(name, ROW, self.row_value(part)) for part, name in names.items()))
        nodes = (self.for_each_row(rows), self.for_each_output(lambda _: value))
        storages = [register(name, part.dtype, self.tile.row_fragments, self.tile.fragment.halves) for part, name in names.items()]
        return wrap_in_storages(storages, nodes)

    def store_rows(self) -> tuple[Node, ...]:
        """Store values of rows, which one lane of a quad in the first block of columns does."""
        if not self.attention.rows.stored:
            return ()
        stores = tuple(Compute(s.output, s.index, convert_to_type(self.row_value(s.body), s)) for s in self.attention.rows.stored)
        return (self.for_each_row(self.bind_row((Branch(self.is_first_in_row, stores),))),)

    @property
    def is_first_in_row(self) -> Expr:
        """Return the condition of the lane that stores a value of its row."""
        columns = eq(ref("n.block"), num(0)) if self.columns.extent > self.tile.n else None
        first = logical_and(eq(lane_of_row(self.tile.fragment), num(0)), columns)
        inside = lt(ref("m.place"), num(self.rows.extent)) if self.rows.extent % self.tile.m else None
        return logical_and(first, inside)

    def row_value(self, value: Expr) -> Expr:
        """Return a value of a row in terms of row_max and row_sum in registers; 0 beyond the last row."""
        high, total, _ = state_names(self.attention.row_sum)
        registers = {high: MAXIMUM, total: TOTAL}

        def change(node: Expr) -> Expr:
            name = registers.get(node.tensor) if isinstance(node, Load) else None
            return node if name is None else Load(name, ROW, node.dtype)

        found = rewrite(value, change)
        reads = any(load.tensor not in registers.values() for load in loads_of(found))
        if not reads or self.rows.extent % self.tile.m == 0:
            return found
        zero = Const(0.0 if found.dtype.is_float else 0, found.dtype)
        return Select(lt(ref("m.place"), num(self.rows.extent)), found, zero, found.dtype)

    def reduce_row_sum(self) -> Node:
        """Reduce row_sum over the lanes that share a row."""
        return self.for_each_row((self._reduce(TOTAL, Combine.SUM),))

    def needs_fully_masked_pass(self, fill: float) -> Expr:
        """Return whether scores of value `fill` do not vanish below the row_max of some row of this thread."""

        halves = self.tile.fragment.halves

        def of_row(row: int) -> Op:
            maximum = Load(MAXIMUM, (num(row // halves), num(row % halves)), _F32)
            above = Op(OpKind.SUB, (maximum, Const(fill, _F32)), _F32)
            vanish = Op(OpKind.GT, (above, Const(VANISHING / self.attention.scale, _F32)), DType.INT8)
            return Op(OpKind.LNOT, (vanish,), DType.INT8)

        rows = map(of_row, range(halves * self.tile.row_fragments))
        return reduce(lambda lhs, rhs: Op(OpKind.LOR, (lhs, rhs), DType.INT8), rows)

    def _reduce(self, tensor: str, combine: Combine) -> Node:
        fragment = self.tile.fragment
        return WarpReduce(tensor, ROW, combine, ROW_LANES, fragment.rows if fragment.is_transposed else 1)

    # steps ----------------------------------------------------------------------------------------------------------
    def _mask_scores(self, is_unmasked: Expr | None) -> tuple[Node, ...]:
        """Turn products into scores and update row_max."""
        start = Compute(PEAK, ROW, Load(MAXIMUM, ROW, _F32))
        masked = self.for_each_row(self.bind_row((start, self._update_row_max(self._value(self.attention.score)))))
        if is_unmasked is None:
            return (masked,)
        unmasked_scores = self._of_rows(self._score_in_registers(unmasked(self.attention)), None)
        return (
            Branch(
                is_unmasked,
                (self.for_each_row(self.bind_row((start, self._update_row_max(unmasked_scores)))),),
                (masked,),
            ),
        )

    def _update_row_max(self, value: Expr) -> Node:
        """Store the scores `value` of a row and update its maximum."""
        score = Compute(SCORES, self.score, value)
        stored = Load(SCORES, self.score, _F32)
        maximum = Compute(PEAK, ROW, Op(OpKind.FMAX, (Load(PEAK, ROW, _F32), stored), _F32))
        is_product = isinstance(value, Load) and value.tensor == SCORES  # in its register already
        nodes = (maximum,) if is_product else (score, maximum)
        return self.for_each_key(self.bind_key(nodes))

    def _score_in_registers(self, score: Expr) -> Expr:
        """Replace the product in the score by its register."""
        product = self.attention.scores_load.tensor

        def change(node: Expr) -> Expr:
            is_product = isinstance(node, Load) and node.tensor == product
            return Load(SCORES, self.score, node.dtype) if is_product else node

        return rewrite(score, change)

    def _value(self, score: Expr) -> Expr:
        """Return the score, or minus infinity beyond the last key; rows beyond the end read nothing."""
        value = self._score_in_registers(score)
        inside = lt(ref("key.place"), num(self.keys.extent)) if self.keys.extent % self.tile.kv else None
        return self._of_rows(value, inside)

    def _of_rows(self, value: Expr, inside: Expr | None) -> Expr:
        reads = any(load.tensor != SCORES for load in loads_of(value))
        if reads and self.rows.extent % self.tile.m:
            inside = logical_and(lt(ref("m.place"), num(self.rows.extent)), inside)
        return value if inside is None else Select(inside, value, identity(Combine.MAX, value.dtype), value.dtype)

    def _reduce_row_max(self) -> tuple[Node, ...]:
        """Reduce row_max over lanes and compute the exponents' shift and the rescaling of O, in powers of two.

        The shift of a row with only minus infinity is 0, so that its probabilities are 0 and not NaN.
        """
        peak, old, shift = Load(PEAK, ROW, _F32), Load(MAXIMUM, ROW, _F32), Load(SHIFT, ROW, _F32)
        unit = Const(self.attention.scale / math.log(2.0), _F32)
        empty = Op(OpKind.EQ, (peak, _MINUS_INFINITY), DType.INT8)
        total = Load(TOTAL, ROW, _F32)
        return (
            self.for_each_row(
                (
                    self._reduce(PEAK, Combine.MAX),
                    Compute(SHIFT, ROW, Select(empty, Const(0.0, _F32), peak, _F32)),
                    Compute(RESCALE, ROW, _times(Op(OpKind.SUB, (old, shift), _F32), unit)),
                    Exp2(RESCALE, ROW),
                    Compute(SHIFT, ROW, _times(shift, unit)),
                    self._subtract_large_maximum(),
                    Compute(MAXIMUM, ROW, peak),
                    Compute(TOTAL, ROW, _times(total, Load(RESCALE, ROW, _F32))),
                )
            ),
        )

    def _subtract_large_maximum(self) -> Node:
        """Subtract a maximum from the scores where its product with the unit is too inexact, or overflows.

        Rows with only masked keys so far have such maxima.
        """
        shift, score = Load(SHIFT, ROW, _F32), Load(SCORES, self.score, _F32)
        size = Op(OpKind.ABS, (shift,), _F32)
        is_large = Op(OpKind.GT, (size, Const(MAX_SHIFT, _F32)), DType.INT8)
        difference = Op(OpKind.SUB, (score, Load(PEAK, ROW, _F32)), _F32)
        subtract = self.for_each_key((Compute(SCORES, self.score, difference),))
        return Branch(is_large, (subtract, Compute(SHIFT, ROW, Const(0.0, _F32))))

    def _exp(self) -> tuple[Node, ...]:
        """Turn scores into probabilities and add them to each lane's row_sum."""
        unit = Const(self.attention.scale / math.log(2.0), _F32)
        score = Load(SCORES, self.score, _F32)
        exponent = Op(OpKind.SUB, (_times(score, unit), Load(SHIFT, ROW, _F32)), _F32)
        each = self.for_each_key(
            (
                Compute(SCORES, self.score, exponent),
                Exp2(SCORES, self.score),
                Compute(TOTAL, ROW, score, Combine.SUM),
            )
        )
        return (self.for_each_row((each,)),)


def _of_element(expr: Expr, undivided: str, element: Load, of_row: Callable[[Expr], Expr]) -> Expr:
    """Replace loads of undivided results by an element, and the largest parts without one by what `of_row` returns."""
    match expr:
        case Load(tensor=tensor) if tensor == undivided:
            return element
        case Const():
            return expr
        case _ if all(load.tensor != undivided for load in loads_of(expr)):
            return of_row(expr)
        case _:
            return with_children(expr, tuple(_of_element(child, undivided, element, of_row) for child in children(expr)))


def _times(a: Expr, b: Expr) -> Expr:
    return Op(OpKind.MUL, (a, b), _F32)


def init_softmax(softmax: Softmax) -> tuple[Node, ...]:
    """Initialise O and row_sum with 0 and row_max with minus infinity."""
    zero = Const(0.0, _F32)
    rows = softmax.for_each_row((Compute(MAXIMUM, ROW, _MINUS_INFINITY), Compute(TOTAL, ROW, zero)))
    return (softmax.for_each_output(lambda _: zero), rows)
