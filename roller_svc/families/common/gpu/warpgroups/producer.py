"""Operands of a wgmma kernel: how the producer fills a pipeline stage, and the descriptors that wgmma reads.

A stage of an operand is [panel, row, atom]: rows of at most 128 bytes, swizzled as TMA and wgmma do it. Panels of a
K-major operand follow each other along k, others along m or n.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from roller_svc.families.common.gpu.matrix.lanes_of_items import LANE_OF_ITEM
from roller_svc.families.common.gpu.matrix.staging import THREAD, MmaOperandCopy
from roller_svc.families.common.gpu.matrix.tile import LoadKind, StagedTile
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.register_prefetch import RegisterPrefetch, SourceLoad, item_value
from roller_svc.families.common.gpu.warpgroups.tile import FULL, STEP_BYTES, WgmmaOperand
from roller_svc.families.common.gpu.warpgroups.tma_load import PATTERN_ROWS, TmaTile
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Const, Expr, Load, Op, OpKind, Select, loads_of, rewrite
from roller_svc.ir.index import add, div, logical_and, lt, mod, mul, num, ref, require_expr
from roller_svc.ir.program import Combine, identity
from roller_svc.ir.rprogram import WARPGROUP_THREADS
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, RoundFragment, Scope, Storage
from roller_svc.ir.schedule_hopper import SharedMatrix, TmaLoad

STAGE = ".slot"
SLOT_HERE = ref(STAGE)
_IN_ROW, _IN_BATCH = ".k_in_row", ".in_batch"
# Items of a thread with loads in flight together: 32 registers of wide loads or unpacked elements; 16 elements of 16
# bits for single loads, whose addresses need more registers; for cp.async as many addresses as registers hold.
BATCH = {LoadKind.ASYNC: 8, LoadKind.VECTOR: 8, LoadKind.UNPACK: 8, LoadKind.ELEMENT: 2}


@dataclass(frozen=True, slots=True)
class ProducerCopy(MmaOperandCopy):
    """Copy of an operand by the producer's threads; `atom` is the number of elements in a row of a panel."""

    k_order: KTileOrder
    atom: int

    @property
    def is_prefetched(self) -> bool:
        """Return whether registers hold the k-tile while the stage is in use."""
        return not self.is_async and self._rounds <= BATCH[self.load.kind]

    def cp_async(self, step: Expr, stage: Expr) -> tuple[Node, ...]:
        """Start asynchronous copies to the stage, some addresses at a time."""
        return self._for_batches(self._copy(step, stage))

    def copy_through_registers(self, step: Expr, stage: Expr) -> tuple[Node, ...]:
        """Copy a k-tile to the stage; the loads of a batch of items are in flight together."""
        item = ref(_IN_BATCH)
        nodes = self._for_batches(self._loads(step, item), self._into(stage, item))
        return (Storage(self.fetched, self._register_dtype, (self._batch, self._item_elements), Scope.REGISTER, nodes),)

    @property
    def _batch(self) -> int:
        """Return the number of items with loads in flight together, a divisor of the thread's items."""
        max_items = min(BATCH[self.load.kind], self._rounds)
        return next(count for count in range(max_items, 0, -1) if self._rounds % count == 0)

    def _for_batches(self, *passes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Execute each pass for the items of a batch, batch after batch."""
        batch = self._batch
        number = add(mul(ref(".batch"), num(batch)), ref(_IN_BATCH))
        loops = tuple(Loop(_IN_BATCH, batch, LoopKind.UNROLL, (Let(".round", number, self._item(nodes)),)) for nodes in passes)
        return (Loop(".batch", self._rounds // batch, LoopKind.SERIAL, loops),)

    def _smem_index(self, stage: Expr, lane: Expr) -> tuple[Expr, ...]:
        element = ref(".element")
        if self.staged.row == self.atom:
            return (stage, num(0), ref(".row"), add(element, lane))
        return (stage, div(element, self.atom), ref(".row"), add(mod(element, self.atom), lane))

    def _along_k(self, step: Expr, element: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        position = add(mul(self.k_order.outer_index(step), num(self.k_order.inner)), ref(_IN_ROW))
        return (Let(_IN_ROW, self.k_order.inner_position(step, element), (Let(".k_place", position, nodes),)),)

    def _inside(self) -> Expr | None:
        return logical_and(
            lt(ref(_IN_ROW), num(self.k_order.inner)) if self.k_order.has_tail else None,
            lt(ref(".place"), num(self.axis.extent)) if self.axis.extent % self.tile[0] else None,
        )

    def _into(self, stage: Expr, item: Expr) -> tuple[Node, ...]:
        """Store an item; float32 is rounded to TF32, since wgmma would truncate it."""
        store = MmaOperandCopy._into(self, stage, item)
        if self.staged.dtype is not DType.FLOAT32:
            return store
        return (RoundFragment(self.fetched, (item,), self._item_elements), *store)


@dataclass(frozen=True, slots=True)
class DualGemmProducerCopy(ProducerCopy):
    """Copy of one B operand of a dual GEMM into a buffer that both share.

    Groups of `columns` columns of both operands alternate; `offset` is the operand's position in a group. `tile` and
    `staged` describe this operand alone.
    """

    offset: int
    columns: int

    @property
    def fetched(self) -> str:
        """Return the name of the registers between global and shared memory."""
        return f"{self.buffer}.fetched.{self.offset}"

    @property
    def is_prefetched(self) -> bool:
        """Return False: the producer's registers suffice for one operand only."""
        return False

    def _smem_index(self, stage: Expr, lane: Expr) -> tuple[Expr, ...]:
        if self.staged.k_major:
            stage, panel, row, element = ProducerCopy._smem_index(self, stage, lane)
            return stage, panel, self._interleaved_column(row), element
        element = self._interleaved_column(ref(".element"))
        return (stage, div(element, self.atom), ref(".row"), add(mod(element, self.atom), lane))

    def _interleaved_column(self, column: Expr) -> Expr:
        if self.tile[0] == self.columns:
            return add(column, num(self.offset))
        group = mul(div(column, self.columns), num(2 * self.columns))
        return add(add(group, mod(column, self.columns)), num(self.offset))


@dataclass(frozen=True, slots=True)
class PrefetchedProducerCopy(ProducerCopy):
    """Copy of a packed operand whose words are prefetched into registers, and unpacked when the stage is free.

    Register buffers are [k-tile modulo `prefetched_k_tiles`, row of the thread, element]. Sources that all k-tiles
    share have one k-tile. Those of look-up tables are [entry].
    """

    prefetch: RegisterPrefetch

    @property
    def is_prefetched(self) -> bool:
        """Return False: registers hold words, not elements."""
        return False

    def allocate_registers(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate the registers of all words around the nodes."""
        for number, source in reversed(list(enumerate(self.prefetch.sources))):
            slots = 1 if source.is_fixed else self.prefetch.prefetched_k_tiles
            shape: tuple[int, ...] = (slots, self.prefetch.loads_of(source), source.elements)
            shape = shape[-1:] if source.is_table else shape
            body = (Storage(self._words(number), source.load.dtype, shape, Scope.REGISTER, body),)
        return body

    def load_fixed(self, step: Expr) -> tuple[Node, ...]:
        """Load the sources that all k-tiles share."""
        return self._load(step, num(0), is_fixed=True)

    def load_words(self, step: Expr, slot: Expr) -> tuple[Node, ...]:
        """Load the words of a k-tile to a slot of the registers."""
        return self._load(step, slot, is_fixed=False)

    def unpack(self, step: Expr, stage: Expr, slot: Expr) -> tuple[Node, ...]:
        """Unpack the words of a k-tile to a stage."""
        store = Compute(self.buffer, self._smem_index(stage, LANE_OF_ITEM), self._unpacked(slot))
        lanes = Loop(LANE_OF_ITEM.name, self._item_elements, LoopKind.VECTOR, (store,))
        return self._for_rows(self.prefetch.thread_rows, self._bind_axes(step, (lanes,)))

    def _load(self, step: Expr, slot: Expr, *, is_fixed: bool) -> tuple[Node, ...]:
        sources = [(i, source) for i, source in enumerate(self.prefetch.sources) if source.is_fixed is is_fixed]
        each = self._load_sources([one for one in sources if not one[1].is_shared], step, slot)
        shared = self._load_sources([one for one in sources if one[1].is_shared], step, slot)
        return (*self._for_rows(self.prefetch.thread_rows, each), *self._for_rows(1, shared))

    def _words(self, number: int) -> str:
        """Return the registers of a source."""
        return f"{self.fetched}.{number}"

    def _load_sources(self, sources: Sequence[tuple[int, SourceLoad]], step: Expr, slot: Expr) -> tuple[Node, ...]:
        """Load the numbered sources of the current row."""
        nodes: tuple[Node, ...] = ()
        for number, source in sources:
            load, dtype = source.load, source.load.dtype
            inside = None if source.is_table else logical_and(self._inside(), source.guard)
            load = replace(load, index=tuple(self._with_quotients(i, step) for i in load.index))
            value = load if inside is None else Select(inside, load, identity(Combine.SUM, dtype), dtype)
            node: Node = Compute(self._words(number), self._word_index(source, slot, LANE_OF_ITEM), value)
            if source.elements > 1:
                node = Loop(LANE_OF_ITEM.name, source.elements, LoopKind.VECTOR, (node,))
            nodes += (node,)
        return self._bind_axes(step, nodes) if nodes else ()

    def _with_quotients(self, index: Expr, step: Expr) -> Expr:
        """Return an index with quotients of k in terms of the k-tile, which takes no division at run time."""
        depth, prefetch = self.tile[1], self.prefetch
        part, size = (".chunk", self._item_elements) if self.staged.k_major else (".row_group", prefetch.thread_rows)
        names = [member.name for member in self.k.members]

        def change(node: Expr) -> Expr:
            match node:
                case Op(kind=OpKind.FLOORDIV, args=(AxisRef(name=name), Const(value=int(by)))) if [name] == names:
                    if by > 0 and by % depth == 0:
                        return div(step, by // depth)
                    if by > 0 and depth % by == by % size == 0:
                        return add(mul(step, num(depth // by)), div(ref(part), by // size))
                    return node
                case _:
                    return node

        return rewrite(index, change)

    def _word_index(self, source: SourceLoad, slot: Expr, element: Expr) -> tuple[Expr, ...]:
        if source.is_table:
            return (element,)
        row = num(0) if source.is_shared else ref(".round")
        return num(0) if source.is_fixed else slot, row, num(0) if source.elements == 1 else element

    def _unpacked(self, slot: Expr) -> Expr:
        """Return lane `.lane` of an item, from the words in registers."""
        row = self.k if self.staged.k_major else self.axis
        value = require_expr(item_value(self._value(), row, self._item_elements), "value of an item")
        words = {
            source.of_item: Load(
                self._words(number),
                self._word_index(source, slot, div(LANE_OF_ITEM, source.lanes)),
                source.load.dtype,
            )
            for number, source in enumerate(self.prefetch.sources)
            if not source.is_table
        }
        tables = {s.load.tensor: self._words(i) for i, s in enumerate(self.prefetch.sources) if s.is_table}

        def change(node: Expr) -> Expr:
            if isinstance(node, Load) and any(map(loads_of, node.index)):  # indices are rewritten already
                return replace(node, tensor=tables[node.tensor])
            return words.get(node, node) if isinstance(node, Load) else node

        return rewrite(value, change)

    def _for_rows(self, count: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Repeat nodes for rows of the thread, unrolled in the tree if positions of bits depend on the row."""
        if not nodes:
            return ()
        if self.staged.k_major and count > 1:
            return (Loop(".round", count, LoopKind.UNROLL, self._item(nodes)),)
        return tuple(Let(".round", num(row), self._item(nodes)) for row in range(count))

    def _item(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind row and element of an item; a thread has adjacent rows."""
        prefetch = self.prefetch
        group, chunk = ref(".row_group"), ref(".chunk")
        guards = logical_and(
            lt(group, num(prefetch.row_groups)) if WARPGROUP_THREADS % prefetch.chunks else None,
            lt(ref(".row"), num(prefetch.rows)) if prefetch.rows < prefetch.row_groups * prefetch.thread_rows else None,
        )
        if guards is not None:
            nodes = (Branch(guards, nodes),)
        nodes = (Let(".element", mul(chunk, num(self._item_elements)), nodes),)
        nodes = (Let(".row", add(mul(group, num(prefetch.thread_rows)), ref(".round")), nodes),)
        nodes = (Let(".chunk", mod(ref(THREAD), prefetch.chunks), nodes),)
        return (Let(".row_group", div(ref(THREAD), prefetch.chunks), nodes),)


@dataclass(frozen=True, slots=True)
class TmaOperand:
    """An operand loaded by TMA: `tile` of each stage, or this block's slice of a tile that a cluster shares."""

    buffer: str
    tensor_map: str
    tile: TmaTile
    origin: Expr  # first row of the tile along m or n
    multicast_slice: Expr  # first row of this block's slice, relative to the tile
    multicast_mask: Expr | None = None  # blocks that share the tile
    row_offset: int = 0  # first row of the tile in the buffer
    full_barrier: str = FULL  # counts the loaded bytes

    def loads(self, step: Expr, stage: Expr) -> tuple[Node, ...]:
        """Issue the TMA loads of one stage."""
        nodes: tuple[Node, ...] = ()
        position, smem_row = add(self.origin, self.multicast_slice), add(self.multicast_slice, num(self.row_offset))
        index: tuple[Expr, ...]
        for box in self.tile.boxes:
            coordinates, offsets = self.tile.coordinates(position, step, box)
            index = (stage, num(box.panel), add(smem_row, num(box.row)), num(0))
            if not self.tile.k_major:
                index = (stage, add(div(smem_row, self.tile.panel), num(box.panel)), num(box.row), num(0))
            nodes += (
                TmaLoad(
                    self.buffer,
                    index,
                    self.tensor_map,
                    coordinates,
                    offsets,
                    self.full_barrier,
                    (stage,),
                    self.multicast_mask,
                ),
            )
        return nodes


def staged_tile(operand: WgmmaOperand) -> StagedTile:
    """Return a stage as threads address it: rows across all panels."""
    row = operand.k if operand.k_major else operand.extent
    return StagedTile(operand.dtype, operand.k_major, operand.rows, row, pad=0, swizzled=True)


def smem_matrix(
    name: str, operand: WgmmaOperand, first: Expr, advance_rows: int, k_step: int, stage: Expr = SLOT_HERE
) -> SharedMatrix:
    """Return the descriptor of one wgmma operand: rows from `first` + `advance_rows`, 32 bytes of k at `k_step`."""
    atom, rows, size = operand.atom_bytes, operand.rows, operand.dtype.bytes
    panel_bytes = rows * atom
    start: tuple[Expr, Expr]
    if operand.k_major:
        panel, within = divmod(k_step * STEP_BYTES, atom)
        start = (num(0), first)
        advance = panel * panel_bytes + advance_rows * atom + within
    else:
        elements = atom // size
        start = (div(first, elements), num(0))
        advance = advance_rows // elements * panel_bytes + k_step * STEP_BYTES // size * atom
    index = (stage, *start, num(0))
    return SharedMatrix(name, index, operand.dtype, operand.k_major, atom, panel_bytes, PATTERN_ROWS * atom, advance)
