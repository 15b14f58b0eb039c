"""Queries, keys and values of a block on warpgroups → their rooms and barriers, and the role that fills these.

Keys and values have a ring each: the k-th step that a block takes has slot k % stages of both. `full` of a slot ends a
phase when all of its data is there, `empty` when all consumers have read it; both phases of a step have number
k / stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from roller_svc.construct.rules import MIN_MATRIX_STAGES
from roller_svc.errors import InvariantError, require
from roller_svc.families.common.gpu.attention.softmax import KEY_STEP
from roller_svc.families.common.gpu.matrix.multistage_pipeline import LANE, Steps
from roller_svc.families.common.gpu.matrix.staging import THREAD
from roller_svc.families.common.gpu.matrix.tile import OperandLoad
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.mainloop import GROUP, TURN
from roller_svc.families.common.gpu.warpgroups.producer import SLOT, BulkFeed, RingStaging, room, staged
from roller_svc.families.common.gpu.warpgroups.tile import WARPS, WgmmaOperand
from roller_svc.families.common.gpu.warpgroups.tile_scheduler import VISIT, over_steps
from roller_svc.families.common.gpu.warpgroups.tma_load import TmaTile
from roller_svc.families.gpu.wgmma_attention.workload import WgmmaAttentionFacts, WgmmaAttentionTile
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Op, OpKind
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import add, div, eq, lt, mod, mul, num, ref, sub
from roller_svc.ir.rprogram import WARPGROUP_THREADS
from roller_svc.ir.schedule import (
    Branch,
    CpAsyncCommitGroup,
    CpAsyncWaitGroup,
    Let,
    Loop,
    LoopKind,
    Node,
    Scope,
    Storage,
)
from roller_svc.ir.schedule_hopper import FenceMbarrierInit, FenceProxyAsync, MbarrierArrive, MbarrierInit, MbarrierWait
from roller_svc.ir.tensor_map import Swizzle, TensorMap

QUERIES, KEYS, VALUES = ".q_shared", ".k_shared", ".v_shared"


@dataclass(frozen=True, slots=True)
class _KeyStaging(RingStaging):
    """Keys: steps go along their rows, not along what the product sums over."""

    def _placed(self, step: Expr, nodes: tuple[Node, ...], offset: Expr | None = None) -> tuple[Node, ...]:
        return (Let("k.block", step, RingStaging._placed(self, num(0), nodes, offset)),)


@dataclass(frozen=True, slots=True)
class Supply:
    """One factor's slots and how they are filled. `step`: what its feed is given, inside of a key step's number."""

    room: str
    operand: WgmmaOperand
    slots: int
    feed: BulkFeed | RingStaging
    step: Expr

    @property
    def full(self) -> str:
        return f"{self.room}.full"

    @property
    def empty(self) -> str:
        return f"{self.room}.empty"

    @property
    def is_bulk(self) -> bool:
        return isinstance(self.feed, BulkFeed)

    def with_slots(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Around the nodes that use them."""
        return (room(self.room, self.operand, self.slots, body),)

    def with_barriers(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """Around the nodes that use them."""
        for name in (self.empty, self.full):
            body = (Storage(name, DType.UINT64, (self.slots,), Scope.SHARED, body),)
        return body

    def filled(self, slot: Expr) -> tuple[Node, ...]:
        """Begins to fill the slot: one thread asks for boxes, or all threads copy."""
        if isinstance(self.feed, RingStaging):
            return (*self.feed.copies(self.step, slot), CpAsyncCommitGroup())
        expect = MbarrierArrive(self.full, (slot,), expect_tx_bytes=self.operand.bytes)
        return (expect, *self.feed.loads(self.step, slot))

    def arrived(self, slot: Expr, pending: int) -> tuple[Node, ...]:
        """What threads copied to the slot is there, `pending` groups of copies having begun since."""
        return (CpAsyncWaitGroup(pending), FenceProxyAsync(), MbarrierArrive(self.full, (slot,)))


@dataclass(frozen=True, slots=True)
class AttentionRing:
    tile: WgmmaAttentionTile
    q: Supply
    k: Supply
    v: Supply
    maps: tuple[TensorMap, ...]
    is_persistent: bool

    def with_slots(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """All slots around the nodes that use them."""
        for supply in (self.v, self.k, self.q):
            body = supply.with_slots(body)
        return body

    def with_barriers(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """All barriers around the nodes that use them: inside of all rooms, for these begin at larger multiples."""
        for supply in (self.v, self.k, self.q):
            body = supply.with_barriers(body)
        return body

    def initialised(self) -> Node:
        """One thread says how many arrivals barriers wait for."""
        nodes: tuple[Node, ...] = ()
        for supply in (self.q, self.k, self.v):
            index = (ref(".stage"),)
            filling = 1 if supply.is_bulk else WARPGROUP_THREADS
            emptying = WARPS * self.tile.consumers
            barriers = (MbarrierInit(supply.full, index, filling), MbarrierInit(supply.empty, index, emptying))
            nodes += (Loop(".stage", supply.slots, LoopKind.UNROLL, barriers),)
        first = Op(OpKind.LAND, (eq(ref(GROUP), num(0)), eq(ref(THREAD), num(0))), DType.INT8)
        return Branch(first, (*nodes, FenceMbarrierInit()))

    # producer -------------------------------------------------------------------------------------------------------
    def begun(self) -> tuple[Node, ...]:
        """Queries of a visit, once for all its steps."""
        nodes = (MbarrierWait(self.q.empty, (num(0),), sub(num(1), self._visit_parity)), *self.q.filled(num(0)))
        return self._by_one(nodes) if self.q.is_bulk else (*nodes, *self.q.arrived(num(0), 0))

    def filled(self, steps: Steps, before: Expr) -> tuple[Node, ...]:
        """Keys and values of a pass; what threads copy arrives when they have begun the copies that follow."""
        staged = [supply for supply in (self.k, self.v) if not supply.is_bulk]
        nodes: tuple[Node, ...] = ()
        for supply in (self.k, self.v):
            free = MbarrierWait(supply.empty, (ref(SLOT),), sub(num(1), parity(self.tile)))
            fill = (free, *supply.filled(ref(SLOT)))
            if not supply.is_bulk:
                nodes += (*fill, *self._arrivals(staged, supply))
            else:
                nodes += self._by_one(fill) if staged else fill
        work = turned(self.tile, add(before, ref("k.step")), (Let(KEY_STEP, steps.number, nodes),))
        loop: tuple[Node, ...] = (over_steps(steps, work),)
        if not staged:
            return self._by_one(loop)
        last = staged[-1].arrived(mod(sub(add(before, steps.count), num(1)), self.tile.stages), 0)
        return (*loop, Branch(lt(num(0), steps.count), last))

    def _arrivals(self, staged: list[Supply], supply: Supply) -> tuple[Node, ...]:
        """Behind copies of one of the factors that threads bring: those before it are awaited."""
        if supply is not staged[0]:
            return staged[0].arrived(ref(SLOT), 1)
        before = mod(add(ref(TURN), num(self.tile.stages - 1)), self.tile.stages)
        return (Branch(lt(num(0), ref("k.step")), staged[-1].arrived(before, 1)),)

    @staticmethod
    def _by_one(nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return (Branch(eq(ref(THREAD), num(0)), nodes),)

    # consumers ------------------------------------------------------------------------------------------------------
    @property
    def _visit_parity(self) -> Expr:
        return mod(ref(VISIT), 2) if self.is_persistent else num(0)

    def queried(self) -> Node:
        """The visit's queries are there."""
        return MbarrierWait(self.q.full, (num(0),), self._visit_parity)

    def answered(self) -> tuple[Node, ...]:
        """A lane of each warp says that queries are not read any more: where others may follow."""
        arrival = MbarrierArrive(self.q.empty, (num(0),))
        return (Branch(eq(ref(LANE), num(0)), (arrival,)),) if self.is_persistent else ()

    def awaited(self, supply: Supply) -> Node:
        """The turn's slot has been filled."""
        return MbarrierWait(supply.full, (ref(SLOT),), parity(self.tile))

    def left(self, supply: Supply) -> Node:
        """A lane of each warp says that the turn's slot may be filled again."""
        return Branch(eq(ref(LANE), num(0)), (MbarrierArrive(supply.empty, (ref(SLOT),)),))


def turned(tile: WgmmaAttentionTile, turn: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes with the number of a step among all of the block's, and its slot."""
    return (Let(TURN, turn, (Let(SLOT, mod(ref(TURN), tile.stages), nodes),)),)


def parity(tile: WgmmaAttentionTile) -> Expr:
    """Of the phases of the turn."""
    return mod(div(ref(TURN), tile.stages), 2)


def attention_ring(
    tile: WgmmaAttentionTile, known: WgmmaAttentionFacts, axes: tuple[TileAxis, TileAxis], *, is_persistent: bool
) -> AttentionRing:
    """`axes`: rows and columns of the results; a block that `is_persistent` computes several tiles.

    InvariantError for one stage: what threads copy to a slot arrives when copies to the next have begun, which wait for
    that slot to be left.
    """
    if tile.stages < MIN_MATRIX_STAGES:
        raise InvariantError(f"rings of keys and values have {MIN_MATRIX_STAGES} stages or more, not {tile.stages}")
    m, n = axes
    along = KTileOrder.linear(known.head_dim.extent, tile.head_dim)
    over_keys = KTileOrder.linear(known.kv.extent, tile.kv)
    supplies: list[Supply] = []
    maps: list[TensorMap] = []
    for side in (
        _Side(QUERIES, known.operands.q, tile.q, (m, known.head_dim), along, mul(ref("m.block"), num(tile.m)), num(0)),
        _Side(KEYS, known.operands.k, tile.k, (known.kv, known.head_dim), along, mul(ref(KEY_STEP), num(tile.kv)),
              num(0)),
        _Side(VALUES, known.operands.v, tile.v, (n, known.kv), over_keys, mul(ref("n.block"), num(tile.n)),
              ref(KEY_STEP)),
    ):  # fmt: skip
        supplies.append(side.supply(1 if side.room == QUERIES else tile.stages))
        maps += side.maps()
    q, k, v = supplies
    return AttentionRing(tile, q, k, v, tuple(maps), is_persistent)


@dataclass(frozen=True, slots=True)
class _Side:
    """What is known of a factor: `axes` of its tiles, `first`: where one begins on the first of them."""

    room: str
    factor: OperandLoad
    operand: WgmmaOperand
    axes: tuple[TileAxis, TileAxis]
    walk: KTileOrder
    first: Expr
    step: Expr

    def supply(self, slots: int) -> Supply:
        operand, (axis, along) = self.operand, self.axes
        boxes = operand.copy_plan
        if isinstance(boxes, TmaTile):
            bulk = BulkFeed(self.room, self._map, boxes, self.first, num(0), full=f"{self.room}.full")
            return Supply(self.room, operand, slots, bulk, self.step)
        kind, step = (_KeyStaging, ref(KEY_STEP)) if self.room == KEYS else (RingStaging, self.step)
        atom = operand.atom_bytes // operand.dtype.bytes
        copies = kind(self.room, self.factor.operand, staged(operand), boxes, axis, along, (operand.extent, operand.k),
                      WARPGROUP_THREADS, self.walk, atom)  # fmt: skip
        return Supply(self.room, operand, slots, copies, step)

    def maps(self) -> Iterator[TensorMap]:
        """The tensor map of its bulk copies."""
        boxes, source = self.operand.copy_plan, self.factor.operand.source
        if isinstance(boxes, TmaTile):
            tensor = require(source, "source of what bulk copies bring").tensor
            yield boxes.tensor_map(self._map, tensor, Swizzle(self.operand.atom_bytes))

    @property
    def _map(self) -> str:
        return f"{self.room}.map"
