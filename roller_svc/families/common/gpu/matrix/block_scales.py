"""Scales of a contraction's sums over blocks of k: loaded for each k-tile, and applied as its sums are promoted.

A lane holds the scales of its rows and columns in registers, in the layout of accumulators (PTX ISA, "Matrix Fragments
for mma.m16n8k16"). Scales that all columns of a warp share are combined with those of rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.analysis.fused_axis import member_values
from roller_svc.analysis.sum_of_products import product_of
from roller_svc.families.common.gpu.matrix.epilogue import column_of_word, is_inside_axis, row_of_word, word
from roller_svc.families.common.gpu.matrix.mainloop import ACC, FRAGMENT, STEP_ACC, MmaMainloop
from roller_svc.families.common.gpu.matrix.multistage_pipeline import STEP, KTileRange
from roller_svc.families.common.gpu.matrix.tile import ScaleRegisters
from roller_svc.families.common.view import GemmView, bind_members
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, Op, OpKind, Select, axes_of, substitute
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import add, div, eq, mod, mul, num, ref
from roller_svc.ir.program import Combine
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, Scope, Storage

ROW_SCALES, COLUMN_SCALES = ".row_scales", ".column_scales"


@dataclass(frozen=True, slots=True)
class BlockScales:
    """The scales of one warp's tile.

    `first_row` is the warp's row of fragment `m.fragment`, `first_column` its first column. `size` has the rows and
    columns of a block's tile, for guards.
    """

    view: GemmView
    registers: ScaleRegisters
    first_row: Expr
    first_column: Expr
    size: tuple[int, int]
    sum_dtype: DType  # of the sums that are scaled

    def allocate(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate the registers around the nodes."""
        shapes = (
            (ROW_SCALES, (self.registers.fragments, self.registers.rows_of_lane)),
            (COLUMN_SCALES, (self.registers.num_columns,)),
        )
        for name, shape in shapes:
            if math.prod(shape):
                nodes = (Storage(name, DType.FLOAT32, shape, Scope.REGISTER, nodes),)
        return nodes

    def load(self, k_position: Expr) -> tuple[Node, ...]:
        """Load the scales of the k-tile that begins at a position along k."""
        columns = {axis.name for axis in self.view.n.members}
        of_columns = [scale for scale in self.view.operands.scales if not axes_of(scale).isdisjoint(columns)]
        of_rows = [scale for scale in self.view.operands.scales if scale not in of_columns]
        if not self.registers.num_columns:
            of_rows, of_columns = [*of_rows, *of_columns], []
        row = add(self.first_row, row_of_word(self.registers.fragment))
        nodes = self._load(ROW_SCALES, self._row_register, of_rows, (row, self.first_column), k_position)
        if self.registers.fragment.is_square:
            nodes = (Loop(".pair", 2, LoopKind.UNROLL, nodes),)
        nodes = (Loop("m.fragment", self.registers.fragments, LoopKind.UNROLL, (Loop(".half", 2, LoopKind.UNROLL, nodes),)),)
        if not of_columns:
            return nodes
        return (*nodes, *self._load_columns(of_columns, k_position))

    def scaled(self, value: Expr) -> Expr:
        """Return the scaled sum of word (`.half`, `.pair`) of fragment (`m.fragment`, `n.fragment`)."""
        value = value if value.dtype is DType.FLOAT32 else Cast(value, DType.FLOAT32)
        scale: Expr = Load(ROW_SCALES, self._row_register, DType.FLOAT32)
        if self.registers.num_columns:
            of_column = Load(COLUMN_SCALES, (self._column_register,), DType.FLOAT32)
            scale = Op(OpKind.MUL, (scale, of_column), DType.FLOAT32)
        return Op(OpKind.MUL, (value, scale), DType.FLOAT32)

    def _load(
        self, tensor: str, index: tuple[Expr, ...], scales: Sequence[Expr], place: tuple[Expr | None, Expr], k_position: Expr
    ) -> tuple[Node, ...]:
        """Load the product of scales at a row and a column; 0 outside of the result."""
        one = Const(1.0, DType.FLOAT32)
        value = product_of([s if s.dtype is DType.FLOAT32 else Cast(s, DType.FLOAT32, implicit=True) for s in scales] or [one])
        value = substitute(value, member_values(self.view.k, k_position))
        nodes: tuple[Node, ...] = ()
        axes: list[tuple[TileAxis, Expr]] = []
        for axis, size, position in zip((self.view.m, self.view.n), self.size, place, strict=True):
            if position is None or axes_of(value).isdisjoint(member.name for member in axis.members):
                continue
            axes.append((axis, position))
            if (inside := is_inside_axis(axis, size, f"{axis.role.value}.place")) is not None:
                value = Select(inside, value, Const(0.0, DType.FLOAT32), DType.FLOAT32)
        nodes = (Compute(tensor, index, value),)
        for axis, position in axes:
            name = f"{axis.role.value}.place"
            nodes = (Let(name, position, bind_members(axis, ref(name), nodes)),)
        return nodes

    @property
    def _row_register(self) -> tuple[Expr, ...]:
        return ref("m.fragment"), word() if self.registers.fragment.is_square else ref(".half")

    @property
    def _column_register(self) -> Expr:
        run, each = self.registers.column_run, self.registers.columns_of_lane
        if run > 1:
            return div(ref("n.fragment"), run // self.registers.fragment.columns)
        return ref("n.fragment") if each == 1 else add(mul(ref("n.fragment"), num(each)), ref(".pair"))

    def _load_columns(self, scales: Sequence[Expr], k_position: Expr) -> tuple[Node, ...]:
        """Load the scales of columns: of runs of fragments, or of each column of the lane."""
        registers = self.registers
        if registers.column_run > 1:
            column = add(self.first_column, mul(ref(".scale"), num(registers.column_run)))
            nodes = self._load(COLUMN_SCALES, (ref(".scale"),), scales, (None, column), k_position)
            return (Loop(".scale", registers.num_columns, LoopKind.UNROLL, nodes),)
        column = add(self.first_column, mul(ref("n.fragment"), num(registers.fragment.columns)))
        column = add(column, column_of_word(registers.fragment))
        nodes = self._load(COLUMN_SCALES, (self._column_register,), scales, (None, column), k_position)
        if registers.columns_of_lane > 1:
            nodes = (Loop(".pair", registers.columns_of_lane, LoopKind.UNROLL, nodes),)
        return (Loop("n.fragment", registers.columns // registers.fragment.columns, LoopKind.UNROLL, nodes),)


@dataclass(frozen=True, slots=True)
class ScaledMmaMainloop(MmaMainloop):
    """MMAs of a warp whose sums over each block of k begin at zero, and are scaled and added to the accumulators."""

    scales: BlockScales

    def accumulators(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate a warp's accumulators, sums of a block and scales around the nodes that use them."""
        body = (Storage(STEP_ACC, self.scales.sum_dtype, (*self.tile.fragments, 4), Scope.REGISTER, body),)
        return MmaMainloop.accumulators(self, self.scales.allocate(body))

    def multiply_tile(self, steps: KTileRange) -> tuple[Node, ...]:
        """Return the work on the current k-tile. Scales are loaded before the MMAs of a block."""
        index, dtype = (*FRAGMENT, word()), self.scales.sum_dtype
        total = Compute(ACC, index, self.scales.scaled(Load(STEP_ACC, index, dtype)), Combine.SUM)
        first, last = block_ends(steps, self.tile.promoted_k_tiles)
        begin = (*self.scales.load(mul(steps.number, num(self.tile.k))), self.clear(STEP_ACC, dtype))
        end = for_each_word_of_tile(self.tile.fragments, total)
        return (*guarded(first, begin), *self.multiply(STEP_ACC), *guarded(last, (end,)))


def block_ends(steps: KTileRange, count: int) -> tuple[Expr | None, Expr | None]:
    """Return whether the current k-tile is the first, or the last, of a block of `count` or of a pass; None: always."""
    if count == 1:
        return None, None
    place = mod(steps.number, count)
    first = Op(OpKind.LOR, (eq(place, num(0)), eq(STEP, num(0))), DType.INT8)
    last = Op(OpKind.LOR, (eq(place, num(count - 1)), eq(add(STEP, num(1)), steps.count)), DType.INT8)
    return first, last


def guarded(condition: Expr | None, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return the nodes under a condition; None: always."""
    return nodes if condition is None else (Branch(condition, nodes),)


def for_each_word_of_tile(fragments: tuple[int, int], node: Node) -> Node:
    """Loop over the accumulators of a lane: `m.fragment`, `n.fragment`, `.half`, `.pair`."""
    for var, extent in ((".pair", 2), (".half", 2), ("n.fragment", fragments[1]), ("m.fragment", fragments[0])):
        node = Loop(var, extent, LoopKind.UNROLL, (node,))
    return node
