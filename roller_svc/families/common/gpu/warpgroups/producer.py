"""Operands of a warpgroup contraction → nodes by which the producer fills a slot of the ring, and what products read.

A slot of an operand is [panel, row, atom]: rows of at most 128 bytes, their chunks permuted as bulk copies and products
do it. Where rows lie along k, panels follow each other along k, else along m or n.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.families.common.gpu.matrix.staging import MmaOperandCopy
from roller_svc.families.common.gpu.matrix.tile import LoadKind, StagedTile
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.tile import BUFFER_ALIGNMENT_BYTES, STEP_BYTES, WgmmaOperand
from roller_svc.families.common.gpu.warpgroups.tma_load import PATTERN_ROWS, TmaTile
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr
from roller_svc.ir.index import add, div, logical_and, lt, mod, mul, num, ref
from roller_svc.ir.schedule import Let, Loop, LoopKind, Node, RoundFragment, Scope, Storage
from roller_svc.ir.schedule_hopper import SharedMatrix, TmaLoad

STAGE = ".slot"
SLOT_HERE = ref(STAGE)
FULL, EMPTY = ".full", ".empty"  # barriers of each slot
_IN_ROW, _IN_BATCH = ".k_in_row", ".in_batch"
# Items of a thread whose loads are under way together: 32 registers of wide loads; of single ones, whose addresses take
# more, 16 elements of 16 bits; of copies, whose data takes none, as many addresses as a producer's registers hold.
BATCH = {LoadKind.ASYNC: 8, LoadKind.VECTOR: 8, LoadKind.ELEMENT: 2}


@dataclass(frozen=True, slots=True)
class ProducerCopy(MmaOperandCopy):
    """An operand that the producer's threads bring. `atom`: elements of a row of a panel."""

    k_order: KTileOrder
    atom: int

    @property
    def is_prefetched(self) -> bool:
        """Held in registers while the slot is awaited: as many as an operand's share of the producer's are for."""
        return self.load.kind is LoadKind.VECTOR and self._rounds <= BATCH[LoadKind.VECTOR]

    def cp_async(self, step: Expr, stage: Expr) -> tuple[Node, ...]:
        """Begins to fill the slot; addresses of some copies at a time."""
        return self._for_batches(self._copy(step, stage))

    def copy_through_registers(self, step: Expr, stage: Expr) -> tuple[Node, ...]:
        """From memory into the slot: the loads of some items are under way together."""
        item_ = ref(_IN_BATCH)
        nodes = self._for_batches(self._loads(step, item_), self._into(stage, item_))
        return (Storage(self.fetched, self._register_dtype, (self._batch, self._item_elements), Scope.REGISTER, nodes),)

    @property
    def _batch(self) -> int:
        """Items whose loads are begun together: a divisor of all of the thread's."""
        max_items = min(BATCH[self.load.kind], self._rounds)
        return next(count for count in range(max_items, 0, -1) if self._rounds % count == 0)

    def _for_batches(self, *passes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Each part for the items of a batch, batch after batch."""
        batch = self._batch
        number = add(mul(ref(".batch"), num(batch)), ref(_IN_BATCH))
        loops = tuple(
            Loop(_IN_BATCH, batch, LoopKind.UNROLL, (Let(".round", number, self._item(nodes)),)) for nodes in passes
        )
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

    def _into(self, stage: Expr, item_: Expr) -> tuple[Node, ...]:
        """Products of float32 cut operands off to tf32: they are rounded before."""
        store = MmaOperandCopy._into(self, stage, item_)
        if self.staged.dtype is not DType.FLOAT32:
            return store
        return (RoundFragment(self.fetched, (item_,), self._item_elements), *store)


@dataclass(frozen=True, slots=True)
class DualGemmProducerCopy(ProducerCopy):
    """The same of one of two operands that share a room: its columns take turns with the other's, `together` of them
    at a time, `begins` columns into each turn. `tile`: of it alone; `staged`: how that would lie."""

    offset: int
    columns: int

    @property
    def fetched(self) -> str:
        """Registers between memory and the room."""
        return f"{self.buffer}.fetched.{self.offset}"

    @property
    def is_prefetched(self) -> bool:
        """Registers are one operand's share for both."""
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
class TmaOperand:
    """An operand that bulk copies bring: `tile` of each slot, or of the part of it that is this block's to bring for
    all blocks of the cluster that share it. `first`: where its tile begins along m or n, and its part within that.
    `begins`: where along m or n in the room the tile does. `full`: the barriers on which its bytes count."""

    buffer: str
    tensor_map: str
    tile: TmaTile
    origin: Expr
    multicast_slice: Expr
    multicast_mask: Expr | None = None
    row_offset: int = 0
    full_barrier: str = FULL

    def loads(self, step: Expr, stage: Expr) -> tuple[Node, ...]:
        """The copies of one slot."""
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


def operand_storage(name: str, operand: WgmmaOperand, stages: int, body: tuple[Node, ...]) -> Storage:
    """The operand's slots."""
    atom = operand.atom_bytes // operand.dtype.bytes
    shape = (stages, operand.panels, operand.rows, atom)
    return Storage(
        name, operand.dtype, shape, Scope.SHARED, body, swizzled=True, alignment_bytes=BUFFER_ALIGNMENT_BYTES
    )


def staged_tile(operand: WgmmaOperand) -> StagedTile:
    """A slot as threads see it: rows across all panels."""
    row = operand.k if operand.k_major else operand.extent
    return StagedTile(operand.dtype, operand.k_major, operand.rows, row, pad=0, swizzled=True)


def smem_matrix(
    name: str, operand: WgmmaOperand, first: Expr, advance_rows: int, k_step: int, stage: Expr = SLOT_HERE
) -> SharedMatrix:  # fmt: skip
    """What one product reads: from `first` + `ahead` on along m or n, the 32 bytes of k with that number."""
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
