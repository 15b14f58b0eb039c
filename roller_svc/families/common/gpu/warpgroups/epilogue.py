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
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.mainloop import GROUP, WARP, group_in_tile, on_one_lane
from roller_svc.families.common.gpu.warpgroups.tile import BUFFER_ALIGNMENT_BYTES, EPILOGUE_ROWS, ROWS, WARPS, WgmmaTile
from roller_svc.families.common.gpu.warpgroups.tma_load import TmaTile, plan_tma_store
from roller_svc.families.common.view import GemmView, bind_members
from roller_svc.ir.dtype import DType
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

ACC_TILE = ".sums"


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

    def allocate(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate a buffer for each warp around the nodes."""
        tile = self.tile
        shape = (tile.consumers * WARPS, EPILOGUE_ROWS, tile.epilogue_columns)
        pad = tile.epilogue_row_words - tile.epilogue_columns
        return (Storage(ACC_TILE, self.outputs.view.dtype, shape, Scope.SHARED, body, pad),)

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


RESULTS, PACKED = ".results", ".packed"
MAP = ".results_map"
BUFFERS = 2
RESULT_BYTES = 2  # element size; stmatrix moves pairs
CHUNK_COLUMNS = (
    32,
    16,
)  # two buffers of 16 rows of 64 bytes match the buffer of 32 columns of accumulators
BLOCK_COLUMNS = 16  # columns of one stmatrix of four matrices, 16 rows high
WORDS = 8  # elements of a lane in this block
# Maximal unrolled operations on all of a thread's results; more cost compile time.
MAX_OPERATIONS = 1024


@dataclass(frozen=True, slots=True)
class TmaStoreEpilogue:
    """Epilogue that stores one tensor by TMA, in boxes of 16 rows by `columns`."""

    tile: WgmmaTile
    outputs: EpilogueStore
    tensor: str
    type_: TensorType
    columns: int
    boxes: TmaTile

    @classmethod
    def of(cls, tile: WgmmaTile, outputs: EpilogueStore) -> TmaStoreEpilogue | None:
        """Return the epilogue, or None if outputs are not of one 16-bit tensor, need row access, or form no boxes."""
        # a placeholder for the second accumulator, whose register differs by chunk
        view = outputs.view.with_second_result(Load(ACC, (), outputs.view.dtype))
        group, outputs = view.group, replace(outputs, view=view)
        if len(group.stored) != 1 or not _needs_no_rows(group, view):
            return None
        ((tensor, type_),) = group.stored
        statement = next(s for s in group.statements if s.output == tensor)
        columns = next((c for c in CHUNK_COLUMNS if tile.group_columns % c == 0), None)
        large = outputs.operations * (tile.accumulator_set_registers // tile.num_accumulators) > MAX_OPERATIONS
        if type_.dtype.bytes != RESULT_BYTES or not type_.dtype.is_float or columns is None or large:
            return None
        target = Load(tensor, statement.index, type_.dtype)
        overhangs = (view.m.extent % tile.m != 0, view.n.extent % tile.columns != 0)
        plan = plan_tma_store(target, type_.dtype, (view.m, view.n), view.batch, dict(group.stored), overhangs)
        boxes = plan if isinstance(plan, str) else (plan.tile(EPILOGUE_ROWS, KTileOrder.linear(view.n.extent, columns), columns))
        if isinstance(boxes, str) or boxes.copies != 1:
            return None
        return cls(tile, outputs, tensor, type_, columns, boxes)

    @property
    def tensor_map(self) -> TensorMap:
        return self.boxes.tensor_map(MAP, self.tensor, Swizzle(self.columns * RESULT_BYTES))

    def allocate(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate two buffers for each warp around the nodes."""
        shape = (self.tile.consumers * WARPS, BUFFERS, EPILOGUE_ROWS, self.columns)
        return (
            Storage(RESULTS, self.type_.dtype, shape, Scope.SHARED, body, swizzled=True, alignment_bytes=BUFFER_ALIGNMENT_BYTES),
        )

    def nodes(self) -> tuple[Node, ...]:
        """Store all chunks of a warp."""
        chunks = [(f, c) for f in range(self.tile.fragments) for c in range(self.tile.group_columns // self.columns)]
        nodes: tuple[Node, ...] = ()
        for number, (fragment, chunk) in enumerate(chunks):
            reuses_buffer = number == 0 and len(chunks) % BUFFERS  # the previous tile may have ended in the same buffer
            wait = TmaStoreWaitGroup(0 if reuses_buffer else BUFFERS - 1, read=True)
            nodes += (
                on_one_lane((wait,)),
                WarpBarrier(),
                *self._store_chunk(num(number % BUFFERS), fragment, chunk),
            )
        return nodes

    @property
    def finish(self) -> tuple[Node, ...]:
        """Wait after the last tile until TMA has read shared memory."""
        return (on_one_lane((TmaStoreWaitGroup(0, read=True),)),)

    def _store_chunk(self, stage: Expr, fragment: int, chunk: int) -> tuple[Node, ...]:
        first = chunk * self.columns
        nodes: tuple[Node, ...] = ()
        for block in range(self.columns // BLOCK_COLUMNS):
            column = block * BLOCK_COLUMNS
            matrix, row = div(ref(LANE), COLUMNS), mod(ref(LANE), COLUMNS)
            at = (_warp_in_consumers(), stage, add(row, mul(mod(matrix, 2), num(COLUMNS))),
                  add(num(column), mul(div(matrix, 2), num(COLUMNS))))  # fmt: skip
            packed = (*self._pack_registers(fragment, first + column), StoreMatrix(RESULTS, at, 4, PACKED, (num(0),)))
            nodes += (Storage(PACKED, self.type_.dtype, (WORDS,), Scope.REGISTER, packed),)
        step = add(self._first_column(self.columns), num(chunk))
        coordinates, _ = self.boxes.coordinates(self._first_row(fragment), step, self.boxes.boxes[0])
        store = TmaStore(MAP, coordinates, RESULTS, (_warp_in_consumers(), stage, num(0), num(0)))
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
        nodes = tuple(_redirect_stores(node, self.tensor, register) for node in stores)
        if _depends_on_position(self.outputs.view):
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


def _needs_no_rows(group: KernelGroup, view: GemmView) -> bool:
    """Return whether outputs need no row access: other tensors vary along one side only, and pairs stay adjacent."""
    rows = {m.name for m in view.m.members if m.extent > 1}
    columns = {m.name for m in view.n.members if m.extent > 1}
    own = {s.output for s in group.statements}
    for statement in group.statements[1:]:
        for load in statement.reads:
            axes = {name for i in load.index for name in axes_of(i)}
            if load.tensor not in own and ((axes & rows and axes & columns) or any(load.bounds_checked)):
                return False
    return not (_depends_on_position(view) and view.n.members[-1].extent % 2)


def _depends_on_position(view: GemmView) -> bool:
    """Return whether outputs depend on their position."""
    reads = RowReads(row_tensors(view.group), (), {})
    return any(axes_of(reads.apply(s.body)) for s in view.group.statements[1:])


def _redirect_stores(node: Node, tensor: str, register: Expr) -> Node:
    """Redirect stores to the tensor to the packed registers."""
    match node:
        case Compute() if node.tensor == tensor:
            return replace(node, tensor=PACKED, index=(register,))
        case Loop() | Storage():
            return replace(node, body=tuple(_redirect_stores(n, tensor, register) for n in node.body))
        case _:
            return node
