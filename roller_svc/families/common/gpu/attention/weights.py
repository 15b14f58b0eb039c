"""Weights of chained products in registers: an elementwise value of scores, without maximum and sum."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.families.common.gpu.attention.score_rows import ROW, SCORES, ScoreRows
from roller_svc.families.common.gpu.attention.weight_vectors import WeightVectors, approximate_exponentials
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Select, loads_of, rewrite
from roller_svc.ir.index import logical_and, lt, num, ref
from roller_svc.ir.schedule import Compute, Node, Storage
from roller_svc.schedule.nest_statements import register

SECOND_SCORES = ".second_scores"
KEY = (AxisRef("key.fragment"), AxisRef(".pair"))


@dataclass(frozen=True, slots=True)
class ChainWeights(ScoreRows):
    """Weights of one kernel of chained products. Elements of vectors are loaded once for each row or key."""

    vectors: WeightVectors

    @property
    def row_storages(self) -> list[Storage]:
        """Return the registers of what belongs to a lane's rows."""
        shape = self.tile.row_fragments, self.tile.fragment.halves
        return [register(_of_row(i), load.dtype, *shape) for i, load in enumerate(self.vectors.rows)]

    @property
    def key_storages(self) -> list[Storage]:
        """Return the registers of what belongs to a lane's keys of a KV tile."""
        shape = self.tile.kv_fragments, self.tile.fragment.half_sums
        return [register(_of_key(i), load.dtype, *shape) for i, load in enumerate(self.vectors.keys)]

    def init(self) -> tuple[Node, ...]:
        """Initialise O with 0, and load what belongs to rows."""
        clear = self.for_each_output(lambda _: Const(0.0, DType.FLOAT32))
        loads = tuple(Compute(_of_row(i), ROW, _where(self._row_exists, load)) for i, load in enumerate(self.vectors.rows))
        return (clear, self.for_each_row(self.bind_row(loads))) if loads else (clear,)

    def compute(self) -> tuple[Node, ...]:
        """Turn scores into weights; they are 0 beyond the last key."""
        attention, vectors = self.attention, self.vectors
        loads = tuple(Compute(_of_key(i), KEY, _where(self._key_exists, load)) for i, load in enumerate(vectors.keys))
        products = zip(attention.products, (SCORES, SECOND_SCORES), strict=False)
        registers = {load.tensor: Load(name, self.score, load.dtype) for load, name in products}
        own = {load: Load(_of_row(i), ROW, load.dtype) for i, load in enumerate(vectors.rows)}
        own |= {load: Load(_of_key(i), KEY, load.dtype) for i, load in enumerate(vectors.keys)}
        found = {*vectors.rows, *vectors.keys}
        others = [x for x in loads_of(attention.score) if x.tensor not in registers and x not in found]

        def change(node: Expr) -> Expr:
            return own.get(node, registers.get(node.tensor, node)) if isinstance(node, Load) else node

        value = rewrite(approximate_exponentials(attention.score, attention.dtype), change)
        inside = logical_and(self._row_exists if others else None, self._key_exists)
        weight = Compute(SCORES, self.score, _where(inside, value))
        weigh = self.for_each_row(self.bind_row((self.for_each_key(self.bind_key((weight,))),)))
        return (self.for_each_key(self.bind_key(loads)), weigh) if loads else (weigh,)

    @property
    def _row_exists(self) -> Expr | None:
        return lt(ref("m.place"), num(self.rows.extent)) if self.rows.extent % self.tile.m else None

    @property
    def _key_exists(self) -> Expr | None:
        return lt(ref("key.place"), num(self.keys.extent)) if self.keys.extent % self.tile.kv else None


def _of_row(number: int) -> str:
    return f".row_element{number}"


def _of_key(number: int) -> str:
    return f".key_element{number}"


def _where(inside: Expr | None, value: Expr) -> Expr:
    """Return the value, or 0 where it does not exist."""
    if inside is None:
        return value
    return Select(inside, value, Const(0.0 if value.dtype.is_float else 0, value.dtype), value.dtype)
