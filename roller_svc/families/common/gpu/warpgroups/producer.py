"""Operands of a warpgroup contraction → nodes by which the producer fills a slot of the ring, and what products read.

A slot of an operand is [panel, row, atom]: rows of at most 128 bytes, their chunks permuted as bulk copies and products
do it. Where rows lie along k, panels follow each other along k, else along m or n.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.families.common.gpu.matrix.staging import Staging
from roller_svc.families.common.gpu.matrix.tile import LoadKind, StagedTile
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.tile import BUFFER_ALIGNMENT_BYTES, STEP_BYTES, WgmmaOperand
from roller_svc.families.common.gpu.warpgroups.tma_load import PATTERN_ROWS, TmaTile
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr
from roller_svc.ir.index import add, div, logical_and, lt, mod, mul, num, ref
from roller_svc.ir.schedule import Let, Loop, LoopKind, Node, RoundFragment, Scope, Storage
from roller_svc.ir.schedule_hopper import SharedMatrix, TmaLoad

SLOT = ".slot"
SLOT_HERE = ref(SLOT)
FULL, EMPTY = ".full", ".empty"  # barriers of each slot
_IN_ROW, _IN_BATCH = ".k_in_row", ".in_batch"
# Items of a thread whose loads are under way together: 32 registers of wide loads; of single ones, whose addresses take
# more, 16 elements of 16 bits; of copies, whose data takes none, as many addresses as a producer's registers hold.
BATCH = {LoadKind.ASYNC: 8, LoadKind.VECTOR: 8, LoadKind.ELEMENT: 2}


@dataclass(frozen=True, slots=True)
class RingStaging(Staging):
    """An operand that the producer's threads bring. `atom`: elements of a row of a panel."""

    walk: KTileOrder
    atom: int

    @property
    def is_prefetched(self) -> bool:
        """Held in registers while the slot is awaited: as many as an operand's share of the producer's are for."""
        return self.load.kind is LoadKind.VECTOR and self._rounds <= BATCH[LoadKind.VECTOR]

    def copies(self, step: Expr, slot: Expr) -> tuple[Node, ...]:
        """Begins to fill the slot; addresses of some copies at a time."""
        return self._in_batches(self._copy(step, slot))

    def moves(self, step: Expr, slot: Expr) -> tuple[Node, ...]:
        """From memory into the slot: the loads of some items are under way together."""
        held = ref(_IN_BATCH)
        nodes = self._in_batches(self._loads(step, held), self._into(slot, held))
        return (Storage(self.fetched, self._held, (self._batch, self._together), Scope.REGISTER, nodes),)

    @property
    def _batch(self) -> int:
        """Items whose loads are begun together: a divisor of all of the thread's."""
        most = min(BATCH[self.load.kind], self._rounds)
        return next(count for count in range(most, 0, -1) if self._rounds % count == 0)

    def _in_batches(self, *parts: tuple[Node, ...]) -> tuple[Node, ...]:
        """Each part for the items of a batch, batch after batch."""
        batch = self._batch
        number = add(mul(ref(".batch"), num(batch)), ref(_IN_BATCH))
        loops = tuple(
            Loop(_IN_BATCH, batch, LoopKind.UNROLL, (Let(".round", number, self._item(part)),)) for part in parts
        )
        return (Loop(".batch", self._rounds // batch, LoopKind.SERIAL, loops),)

    def _at(self, slot: Expr, lane: Expr) -> tuple[Expr, ...]:
        element = ref(".element")
        if self.staged.row == self.atom:
            return (slot, num(0), ref(".row"), add(element, lane))
        return (slot, div(element, self.atom), ref(".row"), add(mod(element, self.atom), lane))

    def _along_k(self, step: Expr, element: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        place = add(mul(self.walk.outer_index(step), num(self.walk.inner)), ref(_IN_ROW))
        return (Let(_IN_ROW, self.walk.inner_position(step, element), (Let(".k_place", place, nodes),)),)

    def _inside(self) -> Expr | None:
        return logical_and(
            lt(ref(_IN_ROW), num(self.walk.inner)) if self.walk.has_tail else None,
            lt(ref(".place"), num(self.axis.extent)) if self.axis.extent % self.tile[0] else None,
        )

    def _into(self, slot: Expr, held: Expr) -> tuple[Node, ...]:
        """Products of float32 cut operands off to tf32: they are rounded before."""
        store = Staging._into(self, slot, held)
        if self.staged.dtype is not DType.FLOAT32:
            return store
        return (RoundFragment(self.fetched, (held,), self._together), *store)


@dataclass(frozen=True, slots=True)
class HalfStaging(RingStaging):
    """The same of one of two operands that share a room: its columns take turns with the other's, `together` of them
    at a time, `begins` columns into each turn. `tile`: of it alone; `staged`: how that would lie."""

    begins: int
    together: int

    @property
    def fetched(self) -> str:
        """Registers between memory and the room."""
        return f"{self.room}.fetched.{self.begins}"

    @property
    def is_prefetched(self) -> bool:
        """Registers are one operand's share for both."""
        return False

    def _at(self, slot: Expr, lane: Expr) -> tuple[Expr, ...]:
        if self.staged.k_major:
            slot, panel, row, element = RingStaging._at(self, slot, lane)
            return slot, panel, self._in_turns(row), element
        element = self._in_turns(ref(".element"))
        return (slot, div(element, self.atom), ref(".row"), add(mod(element, self.atom), lane))

    def _in_turns(self, column: Expr) -> Expr:
        if self.tile[0] == self.together:
            return add(column, num(self.begins))
        turn = mul(div(column, self.together), num(2 * self.together))
        return add(add(turn, mod(column, self.together)), num(self.begins))


@dataclass(frozen=True, slots=True)
class BulkFeed:
    """An operand that bulk copies bring: `tile` of each slot, or of the part of it that is this block's to bring for
    all blocks of the cluster that share it. `first`: where its tile begins along m or n, and its part within that.
    `begins`: where along m or n in the room the tile does. `full`: the barriers on which its bytes count."""

    room: str
    map: str
    tile: TmaTile
    first: Expr
    part: Expr
    mask: Expr | None = None
    begins: int = 0
    full: str = FULL

    def loads(self, step: Expr, slot: Expr) -> tuple[Node, ...]:
        """The copies of one slot."""
        nodes: tuple[Node, ...] = ()
        place, own = add(self.first, self.part), add(self.part, num(self.begins))
        index: tuple[Expr, ...]
        for box in self.tile.boxes:
            coordinates, offsets = self.tile.coordinates(place, step, box)
            index = (slot, num(box.panel), add(own, num(box.row)), num(0))
            if not self.tile.k_major:
                index = (slot, add(div(own, self.tile.panel), num(box.panel)), num(box.row), num(0))
            nodes += (TmaLoad(self.room, index, self.map, coordinates, offsets, self.full, (slot,), self.mask),)
        return nodes


def room(name: str, operand: WgmmaOperand, stages: int, body: tuple[Node, ...]) -> Storage:
    """The operand's slots."""
    atom = operand.atom_bytes // operand.dtype.bytes
    shape = (stages, operand.panels, operand.rows, atom)
    return Storage(name, operand.dtype, shape, Scope.SHARED, body, swizzled=True, alignment_bytes=BUFFER_ALIGNMENT_BYTES)


def staged(operand: WgmmaOperand) -> StagedTile:
    """A slot as threads see it: rows across all panels."""
    row = operand.k if operand.k_major else operand.extent
    return StagedTile(operand.dtype, operand.k_major, operand.rows, row, pad=0, swizzled=True)


def matrix(
    name: str, operand: WgmmaOperand, first: Expr, ahead: int, k_step: int, slot: Expr = SLOT_HERE
) -> SharedMatrix:  # fmt: skip
    """What one product reads: from `first` + `ahead` on along m or n, the 32 bytes of k with that number."""
    atom, rows, size = operand.atom_bytes, operand.rows, operand.dtype.bytes
    panel_bytes = rows * atom
    place: tuple[Expr, Expr]
    if operand.k_major:
        panel, within = divmod(k_step * STEP_BYTES, atom)
        place = (num(0), first)
        advance = panel * panel_bytes + ahead * atom + within
    else:
        elements = atom // size
        place = (div(first, elements), num(0))
        advance = ahead // elements * panel_bytes + k_step * STEP_BYTES // size * atom
    index = (slot, *place, num(0))
    return SharedMatrix(name, index, operand.dtype, operand.k_major, atom, panel_bytes, PATTERN_ROWS * atom, advance)
