"""Copy of an MMA operand's tile from global to shared memory by all threads of a block, one k-tile at a time."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.analysis.operand import Operand
from roller_svc.errors import require
from roller_svc.families.common.gpu.matrix.lanes_of_items import share_word_loads
from roller_svc.families.common.gpu.matrix.tile import LoadClass, LoadKind, StagedTile
from roller_svc.families.common.view import bind_members
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Expr, Load, Select, substitute
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import add, ceil_div, div, logical_and, lt, mod, mul, num, ref
from roller_svc.ir.program import Combine, identity
from roller_svc.ir.schedule import Branch, Compute, CpAsync, Let, Loop, LoopKind, Node, Scope, Storage

THREAD = ".thread"
# Elements of a k-tile prefetched to a thread's registers: wide loads stay packed, single ones need an address each.
MAX_PREFETCHED = {LoadKind.ASYNC: 0, LoadKind.VECTOR: 128, LoadKind.UNPACK: 64, LoadKind.TRANSPOSE: 128, LoadKind.ELEMENT: 16}


@dataclass(frozen=True, slots=True)
class MmaOperandCopy:
    """Copy of one operand into `buffer`, a shared tensor [stage, row, element of the row].

    `axis` is m or n; its tile is number `{role}.block`. `tile` holds the extents of a block's tile along it and along
    k.
    """

    buffer: str
    operand: Operand
    staged: StagedTile
    load: LoadClass
    axis: TileAxis
    k: TileAxis
    tile: tuple[int, int]
    threads: int

    @property
    def is_async(self) -> bool:
        return self.load.kind is LoadKind.ASYNC

    @property
    def is_prefetched(self) -> bool:
        """Return whether registers hold the next k-tile during the current one's MMAs.

        Operands gathered element by element would need too many registers.
        """
        return not self.is_async and self._rounds * self._item_elements <= MAX_PREFETCHED[self.load.kind]

    @property
    def fetched(self) -> str:
        """Return the name of the registers between global and shared memory."""
        return f"{self.buffer}.fetched"

    @property
    def _item_elements(self) -> int:
        """Return the elements that a thread handles at a time: one `cp.async`, or one 16-byte shared store."""
        return self.load.elements if self.is_async else min(self.staged.chunk, self.staged.row)

    @property
    def _row_elements(self) -> int:
        """Return the elements of an item in one staged row."""
        return self._item_elements

    @property
    def _items(self) -> int:
        return self.staged.rows * self.staged.row // self._item_elements

    @property
    def _rounds(self) -> int:
        return ceil_div(self._items, self.threads)

    def allocate_registers(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate the registers of prefetched elements around the nodes that load and store them."""
        if not self.is_prefetched:
            return body
        return (Storage(self.fetched, self._register_dtype, (self._rounds, self._item_elements), Scope.REGISTER, body),)

    def cp_async(self, step: Expr, stage: Expr) -> tuple[Node, ...]:
        """Start asynchronous copies of a k-tile to a stage."""
        return self._for_each_item(self._copy(step, stage))

    def load_to_registers(self, step: Expr) -> tuple[Node, ...]:
        """Load a k-tile to registers."""
        return self._for_each_item(self._loads(step, ref(".round")))

    def store_to_shared(self, stage: Expr) -> tuple[Node, ...]:
        """Store the loaded elements to a stage."""
        return self._for_each_item(self._into(stage, ref(".round")))

    def copy_through_registers(self, step: Expr, stage: Expr) -> tuple[Node, ...]:
        """Copy a k-tile to a stage, one item after the other."""
        body = Storage(
            self.fetched,
            self._register_dtype,
            (1, self._item_elements),
            Scope.REGISTER,
            (*self._loads(step, num(0)), *self._into(stage, num(0))),
        )
        return self._for_each_item((body,), LoopKind.SERIAL)

    # items ----------------------------------------------------------------------------------------------------------
    def _loads(self, step: Expr, item: Expr) -> tuple[Node, ...]:
        """Load an item from global memory to registers; `item` is its index in the register buffer."""
        return self._vectors(step, item) if self.load.kind is LoadKind.VECTOR else self._elements(step, item)

    def _copy(self, step: Expr, stage: Expr) -> tuple[Node, ...]:
        source = require(self.operand.copied, "source of a copied operand")
        guard = logical_and(self._inside(), self.operand.guard)
        copy = CpAsync(self.buffer, self._smem_index(stage, num(0)), source, self.load.elements, guard)
        return self._bind_axes(step, (copy,))

    def _into(self, stage: Expr, item: Expr) -> tuple[Node, ...]:
        value = _implicit_cast(Load(self.fetched, (item, ref(".lane")), self._register_dtype), self.staged.dtype)
        store = Compute(self.buffer, self._smem_index(stage, ref(".lane")), value)
        return (Loop(".lane", self._item_elements, LoopKind.VECTOR, (store,)),)

    def _smem_index(self, stage: Expr, lane: Expr) -> tuple[Expr, ...]:
        """Return the shared-memory index of element `lane` of an item."""
        return (stage, ref(".row"), add(ref(".element"), lane))

    def _for_each_item(self, nodes: tuple[Node, ...], kind: LoopKind = LoopKind.UNROLL) -> tuple[Node, ...]:
        """Loop over this thread's items, one for each round."""
        return (Loop(".round", self._rounds, kind, self._item(nodes)),)

    def _item(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind row and element of an item; adjacent threads read adjacent memory."""
        row, chunk = self._item_position()
        nodes = (Let(".element", mul(chunk, num(self._row_elements)), nodes),)
        nodes = (Let(".row", row, nodes),)
        if self._items % self.threads:
            nodes = (Branch(lt(ref(".item"), num(self._items)), nodes),)
        return (Let(".item", add(mul(ref(".round"), num(self.threads)), ref(THREAD)), nodes),)

    def _item_position(self) -> tuple[Expr, Expr]:
        """Return the row of an item and its number in the row."""
        per_row = self.staged.row // self._item_elements
        if self.staged.k_major == self.operand.k_major:
            return div(ref(".item"), per_row), mod(ref(".item"), per_row)
        return mod(ref(".item"), self.staged.rows), div(ref(".item"), self.staged.rows)

    def _bind_axes(self, step: Expr, nodes: tuple[Node, ...], offset: Expr | None = None) -> tuple[Node, ...]:
        """Bind the operand's axes to their values at this item, `offset` elements further in its row."""
        element = ref(".element") if offset is None else add(ref(".element"), offset)
        along_k, along = (element, ref(".row")) if self.staged.k_major else (ref(".row"), element)
        nodes = bind_members(self.k, ref(".k_place"), bind_members(self.axis, ref(".place"), nodes))
        block = ref(f"{self.axis.role.value}.block")
        nodes = (Let(".place", add(mul(block, num(self.tile[0])), along), nodes),)
        return self._along_k(step, along_k, nodes)

    def _along_k(self, step: Expr, element: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind the position along k of an element of the k-tile."""
        return (Let(".k_place", add(mul(step, num(self.tile[1])), element), nodes),)

    def _inside(self) -> Expr | None:
        extent, depth = self.tile
        return logical_and(
            lt(ref(".k_place"), num(self.k.extent)) if self.k.extent % depth else None,
            lt(ref(".place"), num(self.axis.extent)) if self.axis.extent % extent else None,
        )

    def _elements(self, step: Expr, item: Expr) -> tuple[Node, ...]:
        """Load an item element by element.

        If no row of the innermost axis ends within an item, its axes are bound once. Adjacent elements are then loaded
        together, and packed ones unpacked together.
        """
        lead = (self.k if self.staged.k_major else self.axis).members[-1]
        value = self._value()
        is_uniform = lead.extent % self._item_elements == 0
        if is_uniform:
            value = share_word_loads(substitute(value, {lead.name: add(ref(lead.name), ref(".lane"))}), self._item_elements)
        nodes: tuple[Node, ...] = (Compute(self.fetched, (item, ref(".lane")), value),)
        if is_uniform:
            return self._bind_axes(step, (Loop(".lane", self._item_elements, LoopKind.VECTOR, nodes),))
        return (Loop(".lane", self._item_elements, LoopKind.UNROLL, self._bind_axes(step, nodes, ref(".lane"))),)

    def _vectors(self, step: Expr, item: Expr) -> tuple[Node, ...]:
        """Load an item by vectors; within one the innermost axis increases by one and guards are uniform."""
        width = self.load.elements
        lead = (self.k if self.operand.k_major else self.axis).members[-1].name
        value = substitute(self._value(), {lead: add(ref(lead), ref(".lane"))})
        index = (item, add(mul(ref(".vector"), num(width)), ref(".lane")))
        nodes: tuple[Node, ...] = (Loop(".lane", width, LoopKind.VECTOR, (Compute(self.fetched, index, value),)),)
        nodes = self._bind_axes(step, nodes, mul(ref(".vector"), num(width)))
        return (Loop(".vector", self._item_elements // width, LoopKind.UNROLL, nodes),)

    @property
    def _register_dtype(self) -> DType:
        """Return the type in registers: the memory type unless it is wider than the staged one."""
        stored, staged = self.operand.memory_dtype, self.staged.dtype
        return stored if self.operand.copied is not None and stored.bytes <= staged.bytes else staged

    def _value(self) -> Expr:
        """Return the operand inside its tensor and 0 outside, in the register type."""
        inside, source = self._inside(), self.operand.copied
        value = _implicit_cast(self.operand.expr, self._register_dtype)
        if source is not None and self._register_dtype is self.operand.memory_dtype:
            inside, value = logical_and(inside, self.operand.guard), source
        return value if inside is None else Select(inside, value, identity(Combine.SUM, self._register_dtype), self._register_dtype)


@dataclass(frozen=True, slots=True)
class TransposedCopy(MmaOperandCopy):
    """Copy that transposes squares in registers: rows of the operand along m or n become staged rows along k.

    An item is 16 bytes along k of as many staged rows as one load has elements.
    """

    @property
    def _item_elements(self) -> int:
        return self._row_elements * self.load.elements

    @property
    def _row_elements(self) -> int:
        return self.staged.chunk

    def _item_position(self) -> tuple[Expr, Expr]:
        """Return the first staged row of an item and its number along k; adjacent threads store adjacent chunks."""
        chunks = self.staged.row // self.staged.chunk
        return mul(div(ref(".item"), chunks), num(self.load.elements)), mod(ref(".item"), chunks)

    def _loads(self, step: Expr, item: Expr) -> tuple[Node, ...]:
        width = self.load.elements
        value = substitute(self._value(), {(lead := self.axis.members[-1].name): add(ref(lead), ref(".lane"))})
        index = (item, add(mul(ref(".vector"), num(width)), ref(".lane")))
        nodes: tuple[Node, ...] = (Loop(".lane", width, LoopKind.VECTOR, (Compute(self.fetched, index, value),)),)
        return (Loop(".vector", self.staged.chunk, LoopKind.UNROLL, self._bind_axes(step, nodes, ref(".vector"))),)

    def _into(self, stage: Expr, item: Expr) -> tuple[Node, ...]:
        element = add(mul(ref(".vector"), num(self.load.elements)), ref(".lane"))
        value = _implicit_cast(Load(self.fetched, (item, element), self._register_dtype), self.staged.dtype)
        index = (stage, add(ref(".row"), ref(".lane")), add(ref(".element"), ref(".vector")))
        nodes = (Loop(".vector", self.staged.chunk, LoopKind.VECTOR, (Compute(self.buffer, index, value),)),)
        return (Loop(".lane", self.load.elements, LoopKind.UNROLL, nodes),)


def _implicit_cast(value: Expr, dtype: DType) -> Expr:
    return value if value.dtype is dtype else Cast(value, dtype, implicit=True)
