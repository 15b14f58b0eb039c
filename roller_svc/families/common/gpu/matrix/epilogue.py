"""Epilogue of matrix contractions: accumulators go through shared memory, so that global accesses are wide rows.

`EpilogueStore` computes and stores adjacent outputs; `MmaEpilogue` moves a block's accumulators to it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.analysis.operand import aligned_vector_width
from roller_svc.families.common.gpu.matrix.mainloop import ACC, LANE
from roller_svc.families.common.gpu.matrix.staging import THREAD
from roller_svc.families.common.gpu.matrix.tile import (
    CHUNK_BYTES,
    LANE_SUMS,
    MMA_SYNC,
    ROW_LANES,
    SHARED_A,
    SHARED_B,
    Fragment,
    MmaTile,
    count_operations,
)
from roller_svc.families.common.view import GemmView, bind_members
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr, Load, Op, OpKind, axes_of
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import add, ceil_div, div, eq, logical_and, lt, mod, mul, num, ref
from roller_svc.ir.program import Combine, TensorExpr, identity
from roller_svc.ir.schedule import Barrier, Branch, Compute, Let, Loop, LoopKind, Node, Scope, Storage, WarpReduce
from roller_svc.schedule.nest_statements import RowReads, convert_to_type, row_tensors, wrap_in_storages

# Maximal operations in unrolled rounds: unrolling overlaps their loads but costs compile time.
UNROLLED_OPERATIONS = 256


@dataclass(frozen=True, slots=True)
class EpilogueStore:
    """Epilogue and stores of adjacent outputs.

    Positions cover whole multiples of `m` and `n`, beyond the axes' ends too.
    """

    view: GemmView
    m: int
    n: int

    def nodes(self, accumulator: Load, width: int) -> tuple[Node, ...]:
        """Execute the epilogue at m.place and `width` positions from n.place on, where these are inside.

        `accumulator` is the one at `.lane`.
        """
        view = self.view
        lead = view.n.members[-1].name
        lanes = Loop(".lane", width, LoopKind.VECTOR, ())
        nodes = view.vector_epilogue(accumulator, lanes, {lead: add(ref(lead), ref(".lane"))})
        nodes = bind_members(view.m, ref("m.place"), bind_members(view.n, ref("n.place"), nodes))
        inside = logical_and(is_inside_axis(view.m, self.m, "m.place"), is_inside_axis(view.n, self.n, "n.place"))
        return (Branch(inside, nodes),) if inside is not None else nodes

    def vector_width(self, columns: int) -> int:
        """Return the widest vector along n, a divisor of `columns` of at most 16 bytes, for all stores of the epilogue.

        Stores are affine beyond the innermost axis; other values that depend on the position may not be, be it on the
        innermost axis or on another, such as a bias of rows.
        """
        group, lead = self.view.group, self.view.n.members[-1]
        types = dict(group.stored)
        vector_width = CHUNK_BYTES
        for statement in group.statements:
            if statement.output in types and statement is not group.row_reduction:
                type_ = types[statement.output]
                store = Load(statement.output, statement.index, type_.dtype)
                vector_width = min(
                    vector_width,
                    aligned_vector_width(store, None, self.view.n, type_),
                    CHUNK_BYTES // type_.dtype.bytes,
                )
        reads, along_n = RowReads(row_tensors(group), (), {}), {a.name for a in self.view.n.members}
        varies = any(axes_of(reads.apply(statement.body)) & along_n for statement in group.statements[1:])
        while columns % vector_width or (varies and lead.extent % vector_width):
            vector_width //= 2
        return vector_width

    @property
    def operations(self) -> int:
        """Return the number of operations of one output point, with its store."""
        return count_operations(self.view.group.statements[1:])


def is_inside_axis(axis: TileAxis, tile: int, position: str) -> Expr | None:
    """Return the condition that a position is on the axis, or None if tiles divide it."""
    return lt(ref(position), num(axis.extent)) if axis.extent % tile else None


ACC_TILE, PARTIAL = ".sums", ".part"


@dataclass(frozen=True, slots=True)
class MmaEpilogue:
    """Epilogue of a block's accumulators in MMA fragments."""

    view: GemmView
    tile: MmaTile

    def nodes(self) -> tuple[Node, ...]:
        """Store some rows of every warp at a time to shared memory, then process them by rows."""
        tile, dtype = self.tile, self.view.dtype
        fragments = tile.epilogue_fragments
        rounds = tile.fragments[0] // fragments
        stored = dict(self.view.group.stored)
        reduction = self.view.group.row_reduction
        nodes: tuple[Node, ...] = ()
        for number in range(rounds):
            nodes += (Barrier(),) if number else ()
            nodes += (self._to_shared(number * fragments, fragments), Barrier())
            if any(s.output in stored for s in self.view.group.statements if s is not reduction):
                nodes += self._to_memory(number, fragments)
            if reduction is not None:
                nodes += self._row_reduction(reduction, number, fragments)
        shape = (tile.warps[0] * fragments * tile.fragment.rows, tile.n)
        pad = tile.epilogue_row - tile.n
        return (Storage(ACC_TILE, dtype, shape, Scope.SHARED, nodes, pad, aliases=(SHARED_A, SHARED_B)),)

    def _to_shared(self, first: int, count: int) -> Node:
        """Store some of the warp's rows to the shared tile."""
        fragment = self.tile.fragment
        row = add(mul(add(mul(ref("m.warp"), num(count)), ref(".i")), num(fragment.rows)), row_of_word(fragment))
        column = add(mul(ref("n.warp"), num(self.tile.warp_n)), mul(ref("n.fragment"), num(fragment.columns)))
        column = add(column, column_of_word(fragment))
        value = Load(ACC, (add(num(first), ref(".i")), ref("n.fragment"), word(fragment)), self.view.dtype)
        inner = for_each_word((Compute(ACC_TILE, (row, column), value),), fragment)
        columns = Loop("n.fragment", self.tile.fragments[1], LoopKind.UNROLL, inner)
        return Loop(".i", count, LoopKind.UNROLL, (columns,))

    def _to_memory(self, number: int, count: int) -> tuple[Node, ...]:
        """Process `width` adjacent outputs of a row by each thread; threads follow the row."""
        tile = self.tile
        width = self.outputs.vector_width(self.columns)
        rows, per_row = tile.warps[0] * count * tile.fragment.rows, self.columns // width
        total = Load(ACC_TILE, (ref(".row"), add(ref(".element"), ref(".lane"))), self.view.dtype)
        nodes = self.outputs.nodes(total, width)
        nodes = (Let("m.place", self._row_index(number, count), nodes),)
        nodes = (Let("n.place", add(mul(ref("n.block"), num(self.columns)), ref(".element")), nodes),)
        nodes = (Let(".element", mul(mod(ref(".item"), per_row), num(width)), nodes),)
        nodes = (Let(".row", div(ref(".item"), per_row), nodes),)
        items = rows * per_row
        if items % tile.threads:
            nodes = (Branch(lt(ref(".item"), num(items)), nodes),)
        nodes = (Let(".item", add(mul(ref(".round"), num(tile.threads)), ref(THREAD)), nodes),)
        rounds = ceil_div(items, tile.threads)
        unrolled = rounds * width * self.outputs.operations <= UNROLLED_OPERATIONS
        kind = LoopKind.UNROLL if unrolled else LoopKind.SERIAL
        return (Loop(".round", rounds, kind, nodes),)

    def _row_index(self, number: int, count: int) -> Expr:
        """Return the index along m of row `.row` of the shared tile in a round; a warp's rows are contiguous."""
        rows_of_warp = count * self.tile.fragment.rows
        row = add(mul(ref("m.block"), num(self.tile.m)), mul(div(ref(".row"), rows_of_warp), num(self.tile.warp_m)))
        return add(add(row, num(number * rows_of_warp)), mod(ref(".row"), rows_of_warp))

    def _row_reduction(self, reduction: TensorExpr, number: int, count: int) -> tuple[Node, ...]:
        """Reduce a row by each warp: lanes reduce their columns, then a warp reduction combines them."""
        tile, view = self.tile, self.view
        rows, lanes, warps = tile.warps[0] * count * tile.fragment.rows, tile.fragment.lanes, math.prod(tile.warps)
        combine = reduction.combine or Combine.SUM
        row_exists = lt(ref(".row"), num(rows)) if rows % warps else None
        inside_row = logical_and(row_exists, is_inside_axis(view.m, tile.m, "m.place"))
        column = add(mul(ref(".column"), num(lanes)), ref(LANE))
        inside = logical_and(
            lt(ref(".element"), num(tile.n)) if tile.n % lanes else None,
            logical_and(inside_row, is_inside_axis(view.n, tile.n, "n.place")),
        )
        storages, nodes = view.epilogue_values(Load(ACC_TILE, (ref(".row"), ref(".element")), view.dtype))
        value = RowReads(row_tensors(view.group), (), {}).apply(reduction.body)
        nodes += (Compute(PARTIAL, (), Cast(value, reduction.accumulator, implicit=True), combine),)
        nodes = bind_members(view.m, ref("m.place"), bind_members(view.n, ref("n.place"), wrap_in_storages(storages, nodes)))
        nodes = (Branch(inside, nodes),) if inside is not None else nodes
        nodes = (Let("n.place", add(mul(ref("n.block"), num(tile.n)), ref(".element")), nodes),)
        nodes = (Let(".element", column, nodes),)
        result = Load(PARTIAL, (), reduction.accumulator)
        store: tuple[Node, ...] = (Compute(reduction.output, reduction.index, convert_to_type(result, reduction)),)
        store = bind_members(view.m, ref("m.place"), store)
        first: Expr = eq(ref(LANE), num(0))
        first = first if inside_row is None else Op(OpKind.LAND, (first, inside_row), DType.INT8)
        nodes = (
            Compute(PARTIAL, (), identity(combine, reduction.accumulator)),
            Loop(".column", ceil_div(tile.n, lanes), LoopKind.SERIAL, nodes),
            WarpReduce(PARTIAL, (), combine, lanes),
            Branch(first, store),
        )
        nodes = (Storage(PARTIAL, reduction.accumulator, (), Scope.REGISTER, nodes),)
        nodes = (Let("m.place", self._row_index(number, count), nodes),)
        row = add(mul(ref(".round"), num(warps)), div(ref(THREAD), lanes))
        return (Loop(".round", ceil_div(rows, warps), LoopKind.SERIAL, (Let(".row", row, nodes),)),)

    @property
    def columns(self) -> int:
        """Return the output columns of the tile."""
        return self.tile.n // self.view.group.space.num_accumulators

    @property
    def outputs(self) -> EpilogueStore:
        """Return the store of outputs; a dual GEMM's second accumulator is half a row further."""
        second = add(add(ref(".element"), num(self.columns)), ref(".lane"))
        view = self.view.with_second_result(Load(ACC_TILE, (ref(".row"), second), self.view.dtype))
        return EpilogueStore(view, self.tile.m, self.columns)


# Lane l of mma.sync holds elements 2 (l % 4) and 2 (l % 4) + 1 of row l / 4, then those of the row 8 below (PTX ISA,
# fragment of D). Lane l of MFMA holds four rows from 4 (l / 16) in column l % 16 (AMD Instinct MI200 ISA).
def for_each_word(nodes: tuple[Node, ...], fragment: Fragment = MMA_SYNC) -> tuple[Node, ...]:
    """Loop over the four words that a lane holds of an instruction's result."""
    return (Loop(".half", fragment.halves, LoopKind.UNROLL, (Loop(".pair", fragment.half_sums, LoopKind.VECTOR, nodes),)),)


def word(fragment: Fragment = MMA_SYNC) -> Expr:
    return add(mul(ref(".half"), num(fragment.half_sums)), ref(".pair"))


def row_of_word(fragment: Fragment = MMA_SYNC) -> Expr:
    if fragment.is_transposed:
        return mod(ref(LANE), fragment.rows)
    if fragment.interleaves_rows:
        return add(div(ref(LANE), fragment.columns), mul(word(), num(LANE_SUMS)))
    if fragment.is_square:
        return add(mul(div(ref(LANE), fragment.columns), num(LANE_SUMS)), word())
    return add(div(ref(LANE), 4), mul(ref(".half"), num(fragment.rows // 2)))


def column_of_word(fragment: Fragment = MMA_SYNC) -> Expr:
    if fragment.is_square and not fragment.is_transposed:
        return mod(ref(LANE), fragment.columns)
    return add(mul(lane_of_row(fragment), num(fragment.half_sums)), ref(".pair"))


def lane_of_row(fragment: Fragment = MMA_SYNC) -> Expr:
    """Return the number of a lane among the ROW_LANES that share its rows."""
    return div(ref(LANE), fragment.rows) if fragment.is_transposed else mod(ref(LANE), ROW_LANES)
