"""Sums of a matrix contraction, in registers → outputs: through shared memory, so that memory is met in wide rows."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.build import add, both, ceil_div, div, less, mod, mul, num, ref
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.group import TileAxis
from roller_svc.ir.operand import contiguous_run
from roller_svc.ir.schedule import Barrier, Branch, Compute, Let, Loop, LoopKind, Node, Scope, Storage
from roller_svc.lower.contraction import View
from roller_svc.lower.fused_axis import decoded
from roller_svc.lower.mma_fragments import LANE
from roller_svc.lower.mma_pipeline import ACC, SHARED_A, SHARED_B
from roller_svc.lower.staging import THREAD
from roller_svc.perf.mma_tile import CHUNK_BYTES, COLUMNS, ROWS, MmaTile

SUMS = ".sums"
UNROLLED_ROUNDS = 8  # its loads are under way together


@dataclass(frozen=True, slots=True)
class Epilogue:
    view: View
    tile: MmaTile

    def nodes(self) -> tuple[Node, ...]:
        """Some rows of every warp at a time: sums to shared memory, then outputs in rows of it."""
        tile, dtype = self.tile, self.view.dtype
        together = tile.epilogue_fragments
        rounds = tile.fragments[0] // together
        nodes: tuple[Node, ...] = ()
        for number in range(rounds):
            nodes += (Barrier(),) if number else ()
            nodes += (self._to_shared(number * together, together), Barrier(), *self._to_memory(number, together))
        shape = (tile.warps[0] * together * ROWS, tile.n)
        pad = tile.epilogue_row_words - tile.n
        return (Storage(SUMS, dtype, shape, Scope.SHARED, nodes, pad, over=(SHARED_A, SHARED_B)),)

    def _to_shared(self, first: int, count: int) -> Node:
        """Some of the warp's rows into the shared tile."""
        row = add(mul(add(mul(ref("m.warp"), num(count)), ref(".i")), num(ROWS)), row_of_word())
        column = add(mul(ref("n.warp"), num(self.tile.warp_n)), mul(ref("n.fragment"), num(COLUMNS)))
        column = add(column, column_of_word())
        value = Load(ACC, (add(num(first), ref(".i")), ref("n.fragment"), word()), self.view.dtype)
        inner = over_words((Compute(SUMS, (row, column), value),))
        columns = Loop("n.fragment", self.tile.fragments[1], LoopKind.UNROLL, inner)
        return Loop(".i", count, LoopKind.UNROLL, (columns,))

    def _to_memory(self, number: int, count: int) -> tuple[Node, ...]:
        """Every thread takes `width` neighbours of a row, threads along the row."""
        tile = self.tile
        width = self.store_width()
        rows, per_row = tile.warps[0] * count * ROWS, tile.n // width
        total = Load(SUMS, (ref(".row"), add(ref(".element"), ref(".lane"))), self.view.dtype)
        nodes = self.outputs(total, width)
        of_warp = count * ROWS
        place = add(mul(ref("m.block"), num(tile.m)), mul(div(ref(".row"), of_warp), num(tile.warp_m)))
        place = add(add(place, num(number * of_warp)), mod(ref(".row"), of_warp))
        nodes = (Let("m.place", place, nodes),)
        nodes = (Let("n.place", add(mul(ref("n.block"), num(tile.n)), ref(".element")), nodes),)
        nodes = (Let(".element", mul(mod(ref(".item"), per_row), num(width)), nodes),)
        nodes = (Let(".row", div(ref(".item"), per_row), nodes),)
        items = rows * per_row
        if items % tile.threads:
            nodes = (Branch(less(ref(".item"), num(items)), nodes),)
        nodes = (Let(".item", add(mul(ref(".round"), num(tile.threads)), ref(THREAD)), nodes),)
        rounds = ceil_div(items, tile.threads)
        kind = LoopKind.UNROLL if rounds <= UNROLLED_ROUNDS else LoopKind.SERIAL
        return (Loop(".round", rounds, kind, nodes),)

    def outputs(self, total: Load, width: int) -> tuple[Node, ...]:
        """The epilogue's statements at m.place and `width` places from n.place on, where they are inside.

        `total` is the sum at the one that `.lane` counts.
        """
        view = self.view
        lead = view.n.members[-1].name
        lanes = Loop(".lane", width, LoopKind.VECTOR, ())
        nodes = view.epilogue_over(total, lanes, {lead: add(ref(lead), ref(".lane"))})
        nodes = decoded(view.m, ref("m.place"), decoded(view.n, ref("n.place"), nodes))
        inside = both(_inside(view.m, self.tile.m, "m.place"), _inside(view.n, self.tile.n, "n.place"))
        return (Branch(inside, nodes),) if inside is not None else nodes

    def store_width(self) -> int:
        """Neighbours along n that every store of the epilogue can take at once, up to 16 bytes of the widest."""
        types = dict(self.view.group.stored)
        width = CHUNK_BYTES
        for statement in self.view.group.statements:
            if statement.output in types:
                type_ = types[statement.output]
                store = Load(statement.output, statement.index, type_.dtype)
                width = min(width, contiguous_run(store, None, self.view.n, type_), CHUNK_BYTES // type_.dtype.bytes)
        while self.tile.n % width:
            width //= 2
        return width


# Lane l has the elements 2 (l % 4) and the next of row l / 4, then those of the row 8 below (PTX ISA, fragment of D).
def over_words(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """For each of the four words that a lane has of an instruction's results."""
    return (Loop(".half", 2, LoopKind.UNROLL, (Loop(".pair", 2, LoopKind.VECTOR, nodes),)),)


def word() -> Expr:
    return add(mul(ref(".half"), num(2)), ref(".pair"))


def row_of_word() -> Expr:
    return add(div(ref(LANE), 4), mul(ref(".half"), num(ROWS // 2)))


def column_of_word() -> Expr:
    return add(mul(mod(ref(LANE), 4), num(2)), ref(".pair"))


def _inside(axis: TileAxis, tile: int, place: str) -> Expr | None:
    return less(ref(place), num(axis.extent)) if axis.extent % tile else None
