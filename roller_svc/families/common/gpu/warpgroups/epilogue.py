"""Epilogues of wgmma kernels, without synchronisation between warps.

`WarpgroupEpilogue` moves a warp's accumulators chunk by chunk through a shared buffer of its own, for wide row
accesses. `TmaStoreEpilogue` rounds 16-bit outputs in registers, writes them by stmatrix and stores them by TMA. Its
chunks of 16 rows alternate between two buffers of the warp, one written while TMA reads the other. TMA leaves out what
is outside the tensor. The producer loads the next tile meanwhile.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from roller_svc.families.common.gpu.matrix.epilogue import (
    UNROLLED_OPERATIONS,
    EpilogueStore,
    column_of_word,
    for_each_word,
    is_inside_axis,
    row_of_word,
    word,
)
from roller_svc.families.common.gpu.matrix.mainloop import ACC, LANE
from roller_svc.families.common.gpu.matrix.tile import COLUMNS
from roller_svc.families.common.gpu.warpgroups.mainloop import GROUP, WARP, group_in_tile, on_one_lane
from roller_svc.families.common.gpu.warpgroups.result_store import EPILOGUE_ROWS, RESULTS_MAP, TmaStoreBoxes
from roller_svc.families.common.gpu.warpgroups.tile import ACC_TILE, RESULT_BUFFERS, RESULTS, ROWS, WARPS, WgmmaTile
from roller_svc.families.common.view import bind_members
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.index import add, ceil_div, div, eq, lt, mod, mul, num, ref
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


def for_each_accumulator(tile: WgmmaTile, store: Callable[[Expr, Expr, Load], Node], dtype: DType) -> Node:
    """Run `store` on each accumulator of a thread, with its row and column in the block's tile."""
    row = add(mul(div(ref(GROUP), tile.groups[1]), num(tile.group_m)), mul(ref("m.fragment"), num(ROWS)))
    row = add(add(row, mul(ref(WARP), num(EPILOGUE_ROWS))), row_of_word())
    column = add(mul(mod(ref(GROUP), tile.groups[1]), num(tile.group_n)), mul(ref("n.fragment"), num(COLUMNS)))
    register = add(mul(ref("n.fragment"), num(FRAGMENT_WORDS)), word())
    value = Load(ACC, (ref("m.fragment"), register), dtype)
    nodes = for_each_word((store(row, add(column, column_of_word()), value),))
    columns = Loop("n.fragment", tile.group_n // COLUMNS, LoopKind.UNROLL, nodes)
    return Loop("m.fragment", tile.fragments, LoopKind.UNROLL, (columns,))


FRAGMENT_WORDS = 4  # of a lane in 16 x 8 results (PTX ISA, "Register Fragments and Shared Memory Matrix Layouts")
CHUNK = ".piece"


@dataclass(frozen=True, slots=True)
class WarpgroupEpilogue:
    """Epilogue by rows through a shared buffer of each warp."""

    tile: WgmmaTile
    outputs: EpilogueStore

    @property
    def finish(self) -> tuple[Node, ...]:
        """Return nothing: no work is left after the last tile."""
        return ()

    def nodes(self) -> tuple[Node, ...]:
        """Process chunks of 16 rows and some columns.

        Registers are numbered, so each chunk has its own code to store them.
        """
        chunks = [(f, c) for f in range(self.tile.fragments) for c in range(self._chunks)]
        written = tuple(
            Branch(eq(ref(CHUNK), num(number)), self._to_shared(fragment, chunk)) for number, (fragment, chunk) in enumerate(chunks)
        )
        body = (*written, WarpBarrier(), *self._to_memory(), WarpBarrier())
        return (Loop(CHUNK, len(chunks), LoopKind.SERIAL, body),)

    @property
    def _chunks(self) -> int:
        return ceil_div(self.tile.group_columns, self._columns)

    @property
    def _columns(self) -> int:
        """Return the output columns of a chunk."""
        return self.tile.epilogue_columns // self.tile.num_accumulators

    def _to_shared(self, fragment: int, chunk: int) -> tuple[Node, ...]:
        """Store a chunk of the warp's registers to its buffer, with those of a dual GEMM in adjacent columns."""
        first = chunk * self._columns
        count = min(self._columns, self.tile.group_columns - first) // COLUMNS
        nodes: tuple[Node, ...] = ()
        for accumulator in range(self.tile.num_accumulators):
            column = add(num(accumulator * self._columns), add(mul(ref(".i"), num(COLUMNS)), column_of_word()))
            of_sum = (first + accumulator * self.tile.group_columns) // COLUMNS
            register = add(mul(add(num(of_sum), ref(".i")), num(FRAGMENT_WORDS)), word())
            value = Load(ACC, (num(fragment), register), self.outputs.view.dtype)
            inner = for_each_word((Compute(ACC_TILE, (_warp_in_consumers(), row_of_word(), column), value),))
            nodes += (Loop(".i", count, LoopKind.UNROLL, inner),)
        return nodes

    def _accumulator(self, offset: int) -> Load:
        """Return the accumulator `offset` columns from the one at `.lane`."""
        place = add(add(ref(".element"), num(offset)), ref(".lane"))
        return Load(ACC_TILE, (_warp_in_consumers(), ref(".row"), place), self.outputs.view.dtype)

    def _to_memory(self) -> tuple[Node, ...]:
        """Process `width` adjacent outputs of a row by each lane; lanes follow the row."""
        tile, columns = self.tile, self._columns
        outputs = replace(self.outputs, view=self.outputs.view.with_second_result(self._accumulator(columns)))
        width = outputs.vector_width(columns)
        nodes = outputs.nodes(self._accumulator(0), width)
        nodes = (Let("m.place", self._row_index(), nodes),)
        nodes = (Let("n.place", add(self._first_column(), ref(".in_group")), nodes),)
        if tile.group_columns % columns:
            nodes = (Branch(lt(ref(".in_group"), num(tile.group_columns)), nodes),)
        chunk = mod(ref(CHUNK), self._chunks)
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

    def _row_index(self) -> Expr:
        """Return the index along m of row `.row` of the warp's chunk."""
        tile = self.tile
        row = add(mul(ref("m.block"), num(tile.m)), mul(group_in_tile(tile)[0], num(tile.group_m)))
        row = add(row, mul(div(ref(CHUNK), self._chunks), num(ROWS)))
        return add(add(row, mul(ref(WARP), num(EPILOGUE_ROWS))), ref(".row"))

    def _first_column(self) -> Expr:
        """Return the first column of the warpgroup along n."""
        tile = self.tile
        own = mul(group_in_tile(tile)[1], num(tile.group_columns))
        return add(mul(ref("n.block"), num(tile.columns)), own)


PACKED = ".packed"
BLOCK_COLUMNS = 16  # columns of one stmatrix of four matrices, 16 rows high
WORDS = 8  # elements of a lane in this block


@dataclass(frozen=True, slots=True)
class TmaStoreEpilogue:
    """Epilogue that stores one tensor by TMA, in boxes of 16 rows by some columns."""

    tile: WgmmaTile
    outputs: EpilogueStore
    store: TmaStoreBoxes

    def nodes(self) -> tuple[Node, ...]:
        """Store all chunks of a warp."""
        chunks = [(f, c) for f in range(self.tile.fragments) for c in range(self.tile.group_columns // self.store.columns)]
        nodes: tuple[Node, ...] = ()
        for number, (fragment, chunk) in enumerate(chunks):
            reuses_buffer = number == 0 and len(chunks) % RESULT_BUFFERS  # the previous tile may have ended in the same buffer
            wait = TmaStoreWaitGroup(0 if reuses_buffer else RESULT_BUFFERS - 1, read=True)
            nodes += (
                on_one_lane((wait,)),
                WarpBarrier(),
                *self._store_chunk(num(number % RESULT_BUFFERS), fragment, chunk),
            )
        return nodes

    @property
    def finish(self) -> tuple[Node, ...]:
        """Wait after the last tile until TMA has read shared memory."""
        return (on_one_lane((TmaStoreWaitGroup(0, read=True),)),)

    def _store_chunk(self, stage: Expr, fragment: int, chunk: int) -> tuple[Node, ...]:
        first = chunk * self.store.columns
        nodes: tuple[Node, ...] = ()
        for block in range(self.store.columns // BLOCK_COLUMNS):
            column = block * BLOCK_COLUMNS
            matrix, row = div(ref(LANE), COLUMNS), mod(ref(LANE), COLUMNS)
            at = (_warp_in_consumers(), stage, add(row, mul(mod(matrix, 2), num(COLUMNS))),
                  add(num(column), mul(div(matrix, 2), num(COLUMNS))))  # fmt: skip
            packed = (*self._pack_registers(fragment, first + column), StoreMatrix(RESULTS, at, 4, PACKED, (num(0),)))
            nodes += (Storage(PACKED, self.store.dtype, (WORDS,), Scope.REGISTER, packed),)
        step = add(self._first_column(self.store.columns), num(chunk))
        coordinates, _ = self.store.boxes.coordinates(self._first_row(fragment), step, self.store.boxes.boxes[0])
        store = TmaStore(RESULTS_MAP, coordinates, RESULTS, (_warp_in_consumers(), stage, num(0), num(0)))
        return (*nodes, FenceProxyAsync(), WarpBarrier(), on_one_lane((store, TmaStoreCommitGroup())))

    def _pack_registers(self, fragment: int, first: int) -> tuple[Node, ...]:
        """Compute a lane's outputs of 16 columns from `first` on, in register order."""
        register = add(mul(ref(".i"), num(WORDS // 2)), word())
        total, second = (
            Load(ACC, (num(fragment), add(num(column // COLUMNS * (WORDS // 2)), register)), self.outputs.view.dtype)
            for column in (first, first + self.tile.group_columns)
        )
        view = self.outputs.view.with_second_result(second)
        lead = view.n.members[-1].name
        pair = Loop(".pair", 2, LoopKind.VECTOR, ())
        stores = view.vector_epilogue(total, pair, {lead: add(ref(lead), ref(".pair"))})
        nodes = tuple(_redirect_stores(node, self.store.tensor, register) for node in stores)
        if self.store.depends_on_position:
            column = add(mul(ref(".i"), num(COLUMNS)), mul(mod(ref(LANE), 4), num(2)))
            nodes = bind_members(view.m, ref("m.place"), bind_members(view.n, ref("n.place"), nodes))
            for axis, size in ((view.m, self.outputs.m), (view.n, self.outputs.n)):
                inside = is_inside_axis(axis, size, f"{axis.role.value}.place")
                nodes = (Branch(inside, nodes),) if inside is not None else nodes
            nodes = (Let("m.place", add(self._first_row(fragment), row_of_word()), nodes),)
            nodes = (Let("n.place", add(add(self._first_column(1), num(first)), column), nodes),)
        nodes = (Loop(".half", 2, LoopKind.UNROLL, nodes),)
        return (Loop(".i", BLOCK_COLUMNS // COLUMNS, LoopKind.UNROLL, nodes),)

    def _first_column(self, unit: int) -> Expr:
        """Return the first column of the warpgroup along n, in units of `unit` columns."""
        tile = self.tile
        own = mul(group_in_tile(tile)[1], num(tile.group_columns // unit))
        return add(mul(ref("n.block"), num(tile.columns // unit)), own)

    def _first_row(self, fragment: int) -> Expr:
        """Return the first row of the warp along m."""
        tile = self.tile
        place = add(mul(ref("m.block"), num(tile.m)), mul(group_in_tile(tile)[0], num(tile.group_m)))
        return add(add(place, num(fragment * ROWS)), mul(ref(WARP), num(EPILOGUE_ROWS)))


def _warp_in_consumers() -> Expr:
    """Return the number of a warp among those of all consumers."""
    return add(mul(ref(GROUP), num(WARPS)), ref(WARP))


def _redirect_stores(node: Node, tensor: str, register: Expr) -> Node:
    """Redirect stores to the tensor to the packed registers."""
    match node:
        case Compute() if node.tensor == tensor:
            return replace(node, tensor=PACKED, index=(register,))
        case Loop() | Storage():
            return replace(node, body=tuple(_redirect_stores(n, tensor, register) for n in node.body))
        case _:
            return node
