"""A warp's scores and results in registers: the rows and keys of a lane's elements.

Every lane holds elements of two rows of each fragment of `mma.sync` and `wgmma`, of one row of MFMA's. Four lanes share
rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.families.common.gpu.attention.tile import StagedBuffer, TiledAttention
from roller_svc.families.common.gpu.matrix.epilogue import column_of_word, row_of_word, word
from roller_svc.families.common.gpu.matrix.mainloop import ACC
from roller_svc.families.common.view import bind_members
from roller_svc.ir.attention import Attention
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Expr, Load
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import add, mul, num, ref
from roller_svc.ir.schedule import Compute, Let, Loop, LoopKind, Node

KEY_STEP = ".key_step"  # number of the KV tile
SCORES = ".scores"
ROW = (AxisRef("m.fragment"), AxisRef(".half"))
_F32 = DType.FLOAT32


@dataclass(frozen=True, slots=True)
class ScoreRows:
    """Scores and results of one attention kernel; `result` is the register index of a fragment's word in O."""

    attention: Attention
    tile: TiledAttention[StagedBuffer]
    rows: TileAxis
    keys: TileAxis
    columns: TileAxis
    result: tuple[Expr, ...]

    def for_each_row(self, nodes: tuple[Node, ...]) -> Node:
        """Loop over the rows that a lane has of each fragment."""
        halves = Loop(".half", self.tile.fragment.halves, LoopKind.UNROLL, nodes)
        return Loop("m.fragment", self.tile.row_fragments, LoopKind.UNROLL, (halves,))

    def bind_row(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind the axes of the row."""
        return (Let("m.place", self.row, bind_members(self.rows, ref("m.place"), nodes)),)

    @property
    def row(self) -> Expr:
        """Return the position of a lane's row."""
        fragment = self.tile.fragment
        row = add(mul(ref("m.fragment"), num(fragment.rows)), row_of_word(fragment))
        row = add(mul(ref("m.warp"), num(self.tile.warp_m)), row)
        return add(mul(ref("m.block"), num(self.tile.m)), row)

    def for_each_key(self, nodes: tuple[Node, ...]) -> Node:
        """Loop over the keys that a lane has of a row."""
        pairs = Loop(".pair", self.tile.fragment.half_sums, LoopKind.UNROLL, nodes)
        return Loop("key.fragment", self.tile.kv_fragments, LoopKind.UNROLL, (pairs,))

    @property
    def score(self) -> tuple[Expr, ...]:
        """Return the register index of a score."""
        return (ref("m.fragment"), ref("key.fragment"), word(self.tile.fragment))

    def bind_key(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind the axes of the key of a score."""
        first = add(mul(ref(KEY_STEP), num(self.tile.kv)), mul(ref("k.warp"), num(self.tile.warp_kv)))
        fragment = self.tile.fragment
        position = add(first, add(mul(ref("key.fragment"), num(fragment.columns)), column_of_word(fragment)))
        return (Let("key.place", position, bind_members(self.keys, ref("key.place"), nodes)),)

    def for_each_output(self, update: Callable[[Load], Expr]) -> Node:
        """Update every element of O in a lane."""
        change = Compute(ACC, self.result, update(Load(ACC, self.result, _F32)))
        pairs = Loop(".pair", self.tile.fragment.half_sums, LoopKind.UNROLL, (change,))
        return self.for_each_row((Loop("n.fragment", self.tile.fragments, LoopKind.UNROLL, (pairs,)),))
