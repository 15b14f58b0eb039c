"""Sums of warpgroups, in registers → outputs of 16 bits: rounded there, turned into rows by stmatrix, stored by TMA.

A warp's pieces of 16 rows take turns in two rooms of its own: one is written while a bulk store reads the other. What
lies outside of the tensor, the store leaves out.

Sums of warpgroups, in registers → outputs: a warp's piece at a time through a room of its own, for wide rows.

No warp waits for another: the producer fills slots for the next tile meanwhile.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.families.common.gpu.matrix.epilogue import (
    UNROLLED_OPERATIONS,
    Outputs,
    column_of_word,
    inside_axis,
    over_words,
    row_of_word,
    word,
)
from roller_svc.families.common.gpu.matrix.multistage_pipeline import ACC, LANE
from roller_svc.families.common.gpu.matrix.tile import COLUMNS
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.mainloop import GROUP, WARP
from roller_svc.families.common.gpu.warpgroups.tile import BUFFER_ALIGNMENT_BYTES, EPILOGUE_ROWS, ROWS, WARPS, WgmmaTile
from roller_svc.families.common.gpu.warpgroups.tma_load import TmaTile, plan_tma_store
from roller_svc.families.common.view import GemmView, bind_members
from roller_svc.ir.expr import Expr, Load, axes_of
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, ceil_div, div, eq, lt, mod, mul, num, ref
from roller_svc.ir.program import TensorType
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, Scope, Storage
from roller_svc.ir.schedule_hopper import (
    WARP_THREADS,
    FenceProxyAsync,
    StoreMatrix,
    TmaStore,
    TmaStoreCommitGroup,
    TmaStoreWaitGroup,
    WarpBarrier,
)
from roller_svc.ir.tensor_map import Swizzle, TensorMap
from roller_svc.schedule.nest_statements import RowReads, row_tensors

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
            Branch(eq(ref(_PIECE), num(number)), self._to_shared(fragment, chunk))
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
        return self.tile.epilogue_columns // self.tile.num_accumulators

    @property
    def _warp(self) -> Expr:
        return add(mul(ref(GROUP), num(WARPS)), ref(WARP))

    def _to_shared(self, fragment: int, chunk: int) -> tuple[Node, ...]:
        """A piece of the warp's registers into its room: of each sum the same points, side by side."""
        first = chunk * self._columns
        count = min(self._columns, self.tile.group_columns - first) // COLUMNS
        nodes: tuple[Node, ...] = ()
        for sum_ in range(self.tile.num_accumulators):
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
        outputs = replace(self.outputs, view=self.outputs.view.with_second_result(self._sum(columns)))
        width = outputs.width(columns)
        nodes = outputs.nodes(self._sum(0), width)
        nodes = (Let("m.place", self._row_place(), nodes),)
        nodes = (Let("n.place", add(self._first_column(), ref(".in_group")), nodes),)
        if tile.group_columns % columns:
            nodes = (Branch(lt(ref(".in_group"), num(tile.group_columns)), nodes),)
        chunk = mod(ref(_PIECE), self._chunks)
        nodes = (Let(".in_group", add(mul(chunk, num(columns)), ref(".element")), nodes),)
        per_row = columns // width
        nodes = (Let(".element", mul(mod(ref(".item"), per_row), num(width)), nodes),)
        nodes = (Let(".row", div(ref(".item"), per_row), nodes),)
        items = EPILOGUE_ROWS * per_row
        if items % WARP_THREADS:
            nodes = (Branch(lt(ref(".item"), num(items)), nodes),)
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


RESULTS, PACKED = ".results", ".packed"
MAP = ".results_map"
SLOTS = 2
RESULT_BYTES = 2  # of an element: stmatrix moves pairs of them
PIECES = (32, 16)  # columns: two rooms of 16 rows of 64 bytes are what a warp's room for 32 columns of sums would take
BLOCK_COLUMNS = 16  # of one stmatrix of four matrices, 16 rows high
WORDS = 8  # of a lane in such a block
# Operations on all of a thread's results that are written out one after the other: compilers take time over them.
MOST_OPERATIONS = 1024


@dataclass(frozen=True, slots=True)
class BulkResults:
    """The one tensor that is stored, in boxes of 16 rows of `columns`."""

    tile: WgmmaTile
    outputs: Outputs
    tensor: str
    type_: TensorType
    columns: int
    boxes: TmaTile

    @classmethod
    def of(cls, tile: WgmmaTile, outputs: Outputs) -> BulkResults | None:
        """None where results are not of 16 bits, more than one tensor's, no boxes, or come of what has to be read
        in rows."""
        # what stands for a second sum is in a register, whose number each piece says anew
        view = outputs.view.with_second_result(Load(ACC, (), outputs.view.dtype))
        group, outputs = view.group, replace(outputs, view=view)
        if len(group.stored) != 1 or not _is_simple(group, view):
            return None
        ((tensor, type_),) = group.stored
        statement = next(s for s in group.statements if s.output == tensor)
        columns = next((c for c in PIECES if tile.group_columns % c == 0), None)
        large = outputs.operations * (tile.accumulator_set_registers // tile.num_accumulators) > MOST_OPERATIONS
        if type_.dtype.bytes != RESULT_BYTES or not type_.dtype.is_float or columns is None or large:
            return None
        target = Load(tensor, statement.index, type_.dtype)
        found = plan_tma_store(target, type_.dtype, (view.m, view.n), view.batch, dict(group.stored))
        boxes = found if isinstance(found, str) else (
            found.tile(EPILOGUE_ROWS, KTileOrder.linear(view.n.extent, columns), columns)
        )  # fmt: skip
        if isinstance(boxes, str) or boxes.copies != 1:
            return None
        return cls(tile, outputs, tensor, type_, columns, boxes)

    @property
    def map(self) -> TensorMap:
        return self.boxes.tensor_map(MAP, self.tensor, Swizzle(self.columns * RESULT_BYTES))

    def rooms(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Two rooms for each warp around the nodes that use them."""
        shape = (self.tile.consumers * WARPS, SLOTS, EPILOGUE_ROWS, self.columns)
        return (Storage(RESULTS, self.type_.dtype, shape, Scope.SHARED, body, swizzled=True,
                        alignment_bytes=BUFFER_ALIGNMENT_BYTES),)  # fmt: skip

    def nodes(self) -> tuple[Node, ...]:
        """All pieces of a warp."""
        pieces = [(f, c) for f in range(self.tile.fragments) for c in range(self.tile.group_columns // self.columns)]
        nodes: tuple[Node, ...] = ()
        for number, (fragment, chunk) in enumerate(pieces):
            again = number == 0 and len(pieces) % SLOTS  # the tile before may have ended in the same room
            free = TmaStoreWaitGroup(0 if again else SLOTS - 1, read=True)
            nodes += (self._by_one((free,)), WarpBarrier(), *self._piece(num(number % SLOTS), fragment, chunk))
        return nodes

    @property
    def last(self) -> tuple[Node, ...]:
        """Behind all tiles: shared memory stays until it has been read."""
        return (self._by_one((TmaStoreWaitGroup(0, read=True),)),)

    def _piece(self, slot: Expr, fragment: int, chunk: int) -> tuple[Node, ...]:
        first = chunk * self.columns
        nodes: tuple[Node, ...] = ()
        for block in range(self.columns // BLOCK_COLUMNS):
            column = block * BLOCK_COLUMNS
            matrix, row = div(ref(LANE), COLUMNS), mod(ref(LANE), COLUMNS)
            at = (self._warp, slot, add(row, mul(mod(matrix, 2), num(COLUMNS))),
                  add(num(column), mul(div(matrix, 2), num(COLUMNS))))  # fmt: skip
            packed = (*self._packed(fragment, first + column), StoreMatrix(RESULTS, at, 4, PACKED, (num(0),)))
            nodes += (Storage(PACKED, self.type_.dtype, (WORDS,), Scope.REGISTER, packed),)
        step = add(self._first_column(self.columns), num(chunk))
        coordinates, _ = self.boxes.coordinates(self._first_row(fragment), step, self.boxes.boxes[0])
        store = TmaStore(MAP, coordinates, RESULTS, (self._warp, slot, num(0), num(0)))
        return (*nodes, FenceProxyAsync(), WarpBarrier(), self._by_one((store, TmaStoreCommitGroup())))

    def _packed(self, fragment: int, first: int) -> tuple[Node, ...]:
        """A lane's results of 16 columns from `first` on, in the order of its registers."""
        place = add(mul(ref(".i"), num(WORDS // 2)), word())
        total, second = (
            Load(ACC, (num(fragment), add(num(column // COLUMNS * (WORDS // 2)), place)), self.outputs.view.dtype)
            for column in (first, first + self.tile.group_columns)
        )
        view = self.outputs.view.with_second_result(second)
        lead = view.n.members[-1].name
        pair = Loop(".pair", 2, LoopKind.VECTOR, ())
        found = view.vector_epilogue(total, pair, {lead: add(ref(lead), ref(".pair"))})
        nodes = tuple(_redirected(node, self.tensor, place) for node in found)
        if _reads_places(self.outputs.view):
            column = add(mul(ref(".i"), num(COLUMNS)), mul(mod(ref(LANE), 4), num(2)))
            nodes = bind_members(view.m, ref("m.place"), bind_members(view.n, ref("n.place"), nodes))
            for axis, size in ((view.m, self.outputs.m), (view.n, self.outputs.n)):
                inside = inside_axis(axis, size, f"{axis.role.value}.place")
                nodes = (Branch(inside, nodes),) if inside is not None else nodes
            nodes = (Let("m.place", add(self._first_row(fragment), row_of_word()), nodes),)
            nodes = (Let("n.place", add(add(self._first_column(1), num(first)), column), nodes),)
        nodes = (Loop(".half", 2, LoopKind.UNROLL, nodes),)
        return (Loop(".i", BLOCK_COLUMNS // COLUMNS, LoopKind.UNROLL, nodes),)

    def _first_column(self, each: int) -> Expr:
        """Where along n the warpgroup's columns begin, counted in so many of them."""
        tile = self.tile
        own = mul(mod(ref(GROUP), tile.groups[1]), num(tile.group_columns // each))
        return add(mul(ref("n.block"), num(tile.columns // each)), own)

    def _first_row(self, fragment: int) -> Expr:
        """Where along m the warp's rows begin."""
        tile = self.tile
        place = add(mul(ref("m.block"), num(tile.m)), mul(div(ref(GROUP), tile.groups[1]), num(tile.group_m)))
        return add(add(place, num(fragment * ROWS)), mul(ref(WARP), num(EPILOGUE_ROWS)))

    @property
    def _warp(self) -> Expr:
        return add(mul(ref(GROUP), num(WARPS)), ref(WARP))

    @staticmethod
    def _by_one(nodes: tuple[Node, ...]) -> Node:
        return Branch(eq(ref(LANE), num(0)), nodes)


def _is_simple(group: KernelGroup, view: GemmView) -> bool:
    """Whether nothing is read that a lane's few neighbours along n would not be read well at: tensors along one side
    of the results only, and pairs of neighbours that never lie apart."""
    rows = {m.name for m in view.m.members if m.extent > 1}
    columns = {m.name for m in view.n.members if m.extent > 1}
    own = {s.output for s in group.statements}
    for statement in group.statements[1:]:
        for load in statement.reads:
            axes = {name for i in load.index for name in axes_of(i)}
            if load.tensor not in own and ((axes & rows and axes & columns) or any(load.bounds_checked)):
                return False
    return not (_reads_places(view) and view.n.members[-1].extent % 2)


def _reads_places(view: GemmView) -> bool:
    """Whether results depend on where they are."""
    reads = RowReads(row_tensors(view.group), (), {})
    return any(axes_of(reads.apply(s.body)) for s in view.group.statements[1:])


def _redirected(node: Node, tensor: str, place: Expr) -> Node:
    """What is stored to the tensor goes to packed registers instead."""
    match node:
        case Compute() if node.tensor == tensor:
            return replace(node, tensor=PACKED, index=(place,))
        case Loop() | Storage():
            return replace(node, body=tuple(_redirected(n, tensor, place) for n in node.body))
        case _:
            return node
