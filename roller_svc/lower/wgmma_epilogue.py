"""Sums of warpgroups, in registers → outputs: a warp's piece at a time through a room of its own, for wide rows.

No warp waits for another: the producer fills slots for the next tile meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.ir.build import add, ceil_div, div, equal, less, mod, mul, num, ref
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.hopper_nodes import WARP_THREADS, WarpBarrier
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, Scope, Storage
from roller_svc.lower.mma_epilogue import column_of_word, over_words, row_of_word, word
from roller_svc.lower.mma_fragments import LANE
from roller_svc.lower.mma_pipeline import ACC
from roller_svc.lower.outputs import UNROLLED_OPERATIONS, Outputs
from roller_svc.lower.wgmma_pipeline import GROUP, WARP
from roller_svc.perf.mma_tile import COLUMNS
from roller_svc.perf.wgmma_tile import EPILOGUE_ROWS, ROWS, WARPS, WgmmaTile

SUMS = ".sums"
FRAGMENT_WORDS = 4  # of a lane in 16 x 8 results (PTX ISA, "Register Fragments and Shared Memory Matrix Layouts")
_PIECE = ".piece"


@dataclass(frozen=True, slots=True)
class WarpgroupEpilogue:
    tile: WgmmaTile
    outputs: Outputs

    @property
    def last(self) -> tuple[Node, ...]:
        """Behind all tiles nothing is left to do."""
        return ()

    def rooms(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """A room for each warp around the nodes that use it."""
        tile = self.tile
        shape = (tile.consumers * WARPS, EPILOGUE_ROWS, tile.epilogue_columns)
        pad = tile.epilogue_row_words - tile.epilogue_columns
        return (Storage(SUMS, self.outputs.view.dtype, shape, Scope.SHARED, body, pad),)

    def nodes(self) -> tuple[Node, ...]:
        """Pieces of 16 rows and some columns: registers have numbers, so that each piece writes them by itself."""
        pieces = [(f, c) for f in range(self.tile.fragments) for c in range(self._chunks)]
        written = tuple(
            Branch(equal(ref(_PIECE), num(number)), self._to_shared(fragment, chunk))
            for number, (fragment, chunk) in enumerate(pieces)
        )
        body = (*written, WarpBarrier(), *self._to_memory(), WarpBarrier())
        return (Loop(_PIECE, len(pieces), LoopKind.SERIAL, body),)

    @property
    def _chunks(self) -> int:
        return ceil_div(self.tile.group_columns, self._columns)

    @property
    def _columns(self) -> int:
        """Points of a row of a piece."""
        return self.tile.epilogue_columns // self.tile.sums

    @property
    def _warp(self) -> Expr:
        return add(mul(ref(GROUP), num(WARPS)), ref(WARP))

    def _to_shared(self, fragment: int, chunk: int) -> tuple[Node, ...]:
        """A piece of the warp's registers into its room: of each sum the same points, side by side."""
        first = chunk * self._columns
        count = min(self._columns, self.tile.group_columns - first) // COLUMNS
        nodes: tuple[Node, ...] = ()
        for sum_ in range(self.tile.sums):
            column = add(num(sum_ * self._columns), add(mul(ref(".i"), num(COLUMNS)), column_of_word()))
            of_sum = (first + sum_ * self.tile.group_columns) // COLUMNS
            register = add(mul(add(num(of_sum), ref(".i")), num(FRAGMENT_WORDS)), word())
            value = Load(ACC, (num(fragment), register), self.outputs.view.dtype)
            inner = over_words((Compute(SUMS, (self._warp, row_of_word(), column), value),))
            nodes += (Loop(".i", count, LoopKind.UNROLL, inner),)
        return nodes

    def _sum(self, ahead: int) -> Load:
        """The one that `.lane` counts, so many columns on."""
        place = add(add(ref(".element"), num(ahead)), ref(".lane"))
        return Load(SUMS, (self._warp, ref(".row"), place), self.outputs.view.dtype)

    def _to_memory(self) -> tuple[Node, ...]:
        """Every lane takes `width` neighbours of a row, lanes along the row."""
        tile, columns = self.tile, self._columns
        outputs = replace(self.outputs, view=self.outputs.view.with_second(self._sum(columns)))
        width = outputs.width(columns)
        nodes = outputs.nodes(self._sum(0), width)
        nodes = (Let("m.place", self._row_place(), nodes),)
        nodes = (Let("n.place", add(self._first_column(), ref(".in_group")), nodes),)
        if tile.group_columns % columns:
            nodes = (Branch(less(ref(".in_group"), num(tile.group_columns)), nodes),)
        chunk = mod(ref(_PIECE), self._chunks)
        nodes = (Let(".in_group", add(mul(chunk, num(columns)), ref(".element")), nodes),)
        per_row = columns // width
        nodes = (Let(".element", mul(mod(ref(".item"), per_row), num(width)), nodes),)
        nodes = (Let(".row", div(ref(".item"), per_row), nodes),)
        items = EPILOGUE_ROWS * per_row
        if items % WARP_THREADS:
            nodes = (Branch(less(ref(".item"), num(items)), nodes),)
        nodes = (Let(".item", add(mul(ref(".round"), num(WARP_THREADS)), ref(LANE)), nodes),)
        rounds = ceil_div(items, WARP_THREADS)
        unrolled = rounds * width * outputs.operations <= UNROLLED_OPERATIONS
        return (Loop(".round", rounds, LoopKind.UNROLL if unrolled else LoopKind.SERIAL, nodes),)

    def _row_place(self) -> Expr:
        """Where along m row `.row` of the warp's piece is."""
        tile = self.tile
        place = add(mul(ref("m.block"), num(tile.m)), mul(div(ref(GROUP), tile.groups[1]), num(tile.group_m)))
        place = add(place, mul(div(ref(_PIECE), self._chunks), num(ROWS)))
        return add(add(place, mul(ref(WARP), num(EPILOGUE_ROWS))), ref(".row"))

    def _first_column(self) -> Expr:
        """Where along n the warpgroup's columns begin."""
        tile = self.tile
        own = mul(mod(ref(GROUP), tile.groups[1]), num(tile.group_columns))
        return add(mul(ref("n.block"), num(tile.columns)), own)
