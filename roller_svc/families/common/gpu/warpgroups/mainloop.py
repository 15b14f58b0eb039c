"""Ring of staged tiles → its two roles: one warpgroup that fills slots, and those that multiply what is in them.

The k-th step that a block takes, over all its tiles, has slot k % stages. `full` of a slot ends a phase when all of its
data is there, `empty` when all that multiply it have done so; both phases of a step have number k / stages.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.families.common.gpu.matrix.multistage_pipeline import ACC, LANE, SHARED_A, SHARED_B
from roller_svc.families.common.gpu.matrix.staging import THREAD
from roller_svc.families.common.gpu.warpgroups.producer import EMPTY, FULL, SLOT, BulkFeed, RingStaging, matrix, room
from roller_svc.families.common.gpu.warpgroups.tile import ROWS, WARPS, WgmmaTile
from roller_svc.families.common.gpu.warpgroups.tile_scheduler import RANK, Visits, over_steps
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind
from roller_svc.ir.index import add, div, eq, le, lt, mod, mul, num, ref, sub
from roller_svc.ir.program import Combine
from roller_svc.ir.rprogram import WARPGROUP_THREADS
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    CpAsyncCommitGroup,
    CpAsyncWaitGroup,
    Let,
    Loop,
    LoopKind,
    Node,
    Scope,
    Storage,
)
from roller_svc.ir.schedule_hopper import (
    WARP_THREADS,
    FenceMbarrierInit,
    FenceProxyAsync,
    MbarrierArrive,
    MbarrierInit,
    MbarrierWait,
    SetMaxNReg,
    WarpgroupMma,
    WgmmaCommitGroup,
    WgmmaFence,
    WgmmaWaitGroup,
)

GROUP, WARP = ".group", ".warp"  # of the block; of the group
STEP, TURN = "k.step", ".turn"  # of k in a visit; of the block in all
STEP_SUMS = ".step_sums"  # of a step's products, where these are added up apart

Feeds = tuple[RingStaging | BulkFeed, ...]  # in the order in which they are asked for; some share a room


@dataclass(frozen=True, slots=True)
class Ring:
    """`readers`: what the cluster's blocks are whose slots this block's bulk copies fill, itself one of them; none
    where it only fills its own."""

    dtype: DType
    tile: WgmmaTile
    feeds: Feeds
    readers: tuple[Expr, ...] = ()

    @property
    def bulk(self) -> tuple[BulkFeed, ...]:
        return tuple(feed for feed in self.feeds if isinstance(feed, BulkFeed))

    @property
    def staged(self) -> tuple[RingStaging, ...]:
        return tuple(feed for feed in self.feeds if isinstance(feed, RingStaging))

    def rooms(self, body: tuple[Node, ...]) -> tuple[Node, ...]:
        """The slots and their barriers around the nodes that use them."""
        tile = self.tile
        for name in (EMPTY, FULL):
            body = (Storage(name, DType.UINT64, (tile.stages,), Scope.SHARED, body),)
        body = (room(SHARED_B, tile.b, tile.stages, body),)
        return (room(SHARED_A, tile.a, tile.stages, body),)

    def initialised(self) -> Node:
        """One thread says how many arrivals barriers wait for."""
        filling = (1 if self.bulk else 0) + (WARPGROUP_THREADS if self.staged else 0)
        emptying = WARPS * self.tile.consumers * max(1, len(self.readers))
        index = (ref(".stage"),)
        barriers = (MbarrierInit(FULL, index, filling), MbarrierInit(EMPTY, index, emptying))
        loop = Loop(".stage", self.tile.stages, LoopKind.UNROLL, barriers)
        first = Op(OpKind.LAND, (eq(ref(GROUP), num(0)), eq(ref(THREAD), num(0))), DType.INT8)
        return Branch(first, (loop, FenceMbarrierInit()))

    # producer -------------------------------------------------------------------------------------------------------
    def filled(self, visits: Visits) -> tuple[Node, ...]:
        """The producer's role."""
        nodes = visits.around((over_steps(visits.steps, self._turned(visits, self._fill(visits))),))
        nodes += self._last_arrivals(visits.all_steps)
        if not self.staged:
            nodes = (Branch(eq(ref(THREAD), num(0)), nodes),)
        return (*self._registers(self.tile.producer_registers, increase=False), *nodes)

    @property
    def _ahead(self) -> int:
        """Steps whose copies threads have begun when they await those of one: the slot that is next was left when the
        step behind the oldest of these began."""
        return max(0, self.tile.stages - 2) if any(feed.is_async for feed in self.staged) else 0

    def _fill(self, visits: Visits) -> tuple[Node, ...]:
        """One step: what goes through registers is loaded before the slot is free."""
        step, slot = add(visits.steps.first, ref(STEP)), ref(SLOT)
        nodes: tuple[Node, ...] = ()
        for feed in self.staged:
            nodes += feed.fetches(step) if feed.is_prefetched else ()
        nodes += (MbarrierWait(EMPTY, (slot,), sub(num(1), self._parity)),)
        nodes += self._bulk_loads(step)
        for feed in self.staged:
            if feed.is_async:
                nodes += feed.copies(step, slot)
            else:
                nodes += feed.stores(slot) if feed.is_prefetched else feed.moves(step, slot)
        for feed in self.staged:
            nodes = feed.registers(nodes)
        return (*nodes, *self._arrivals())

    def _bulk_loads(self, step: Expr) -> tuple[Node, ...]:
        """One thread's: the bytes of all copies that fill the slot, and its own copies."""
        if not self.bulk:
            return ()
        operands = {SHARED_A: self.tile.a, SHARED_B: self.tile.b}
        size = sum(operands[room].bytes for room in {feed.room for feed in self.bulk})
        nodes: tuple[Node, ...] = (MbarrierArrive(FULL, (ref(SLOT),), expect_tx_bytes=size),)
        for feed in self.bulk:
            nodes += feed.loads(step, ref(SLOT))
        return (Branch(eq(ref(THREAD), num(0)), nodes),) if self.staged else nodes

    def _arrivals(self) -> tuple[Node, ...]:
        """Every thread says that its part of a slot is there: of this step, or of an earlier one."""
        if not self.staged:
            return ()
        ahead = self._ahead
        commit: tuple[Node, ...] = ()
        if any(feed.is_async for feed in self.staged):
            commit = (CpAsyncCommitGroup(),)
        arrival = self._arrival(ref(TURN), ahead, ahead)
        return (*commit, Branch(le(num(ahead), ref(TURN)), arrival)) if ahead else (*commit, *arrival)

    def _last_arrivals(self, steps: Expr) -> tuple[Node, ...]:
        """Of the steps that were begun and not awaited when there are no more."""
        nodes: tuple[Node, ...] = ()
        for pending in reversed(range(self._ahead)):
            nodes += (Branch(lt(num(pending), steps), self._arrival(steps, pending + 1, pending)),)
        return nodes

    def _arrival(self, turn: Expr, before: int, pending: int) -> tuple[Node, ...]:
        """At the step that many `before` the turn."""
        wait: tuple[Node, ...] = (CpAsyncWaitGroup(pending),) if any(feed.is_async for feed in self.staged) else ()
        slot = mod(add(turn, num(-before % self.tile.stages)), self.tile.stages)
        return (*wait, FenceProxyAsync(), MbarrierArrive(FULL, (slot,)))

    # consumers ------------------------------------------------------------------------------------------------------
    def multiplied(self, visits: Visits, epilogue: tuple[Node, ...], last: tuple[Node, ...]) -> tuple[Node, ...]:
        """The consumers' role: the epilogue with the sums of each visit, and what comes after the last."""
        sums = self._added_up(visits) if self.tile.promotes_accumulators else self._sums(visits)
        nodes = (*sums, *epilogue)
        nodes = (Storage(ACC, self.dtype, self._sums_shape, Scope.REGISTER, nodes),)
        return (*self._registers(self.tile.consumer_registers, increase=True), *visits.around(nodes), *last)

    def _sums(self, visits: Visits) -> tuple[Node, ...]:
        """Products of one step are under way while the next is awaited; a slot is left when the step behind began."""
        behind = 1 if self.tile.stages > 1 else 0
        step: tuple[Node, ...] = (
            MbarrierWait(FULL, (ref(SLOT),), self._parity),
            WgmmaFence(),
            *self._products(ACC, lt(num(0), ref(STEP))),
            WgmmaCommitGroup(),
            WgmmaWaitGroup(behind, None if behind else ACC),
        )
        if not behind:
            return (over_steps(visits.steps, (*self._turned(visits, (*step, *self._left(ref(TURN)))),)),)
        before = add(ref(TURN), num(self.tile.stages - 1))  # its slot is that of the step before
        left = Branch(lt(num(0), ref(STEP)), self._left(before))
        last = sub(add(visits.before, visits.steps.count), num(1))
        steps = over_steps(visits.steps, self._turned(visits, (*step, left)))
        return (steps, WgmmaWaitGroup(0, ACC), *self._left(last))

    def _added_up(self, visits: Visits) -> tuple[Node, ...]:
        """Every step's sums start from nothing and are added up in float32, as CUTLASS does it (GmmaFP8Accumulation):
        other consumers' products run meanwhile."""
        index = (ref("m.fragment"), ref(".word"))
        zero = Compute(ACC, index, Const(0.0, self.dtype))
        total = Compute(ACC, index, Load(STEP_SUMS, index, self.dtype), Combine.SUM)
        step: tuple[Node, ...] = (
            MbarrierWait(FULL, (ref(SLOT),), self._parity),
            WgmmaFence(),
            *self._products(STEP_SUMS, num(0)),
            WgmmaCommitGroup(),
            WgmmaWaitGroup(0, STEP_SUMS),
            *self._left(ref(TURN)),
            self._over_sums(total),
        )
        step = (Storage(STEP_SUMS, self.dtype, self._sums_shape, Scope.REGISTER, step),)
        return (self._over_sums(zero), over_steps(visits.steps, self._turned(visits, step)))

    @property
    def _sums_shape(self) -> tuple[int, int]:
        """Of a thread."""
        return self.tile.fragments, self.tile.group_n // 2

    def _over_sums(self, node: Node) -> Node:
        fragments, words = self._sums_shape
        return Loop("m.fragment", fragments, LoopKind.UNROLL, (Loop(".word", words, LoopKind.UNROLL, (node,)),))

    def _products(self, sums: str, begun: Expr) -> tuple[Node, ...]:
        """Instructions of one step; the first along k adds to what is there where something has `begun`."""
        tile = self.tile
        columns = tile.groups[1]
        row = mul(div(ref(GROUP), columns), num(tile.group_m))
        column = mul(mod(ref(GROUP), columns), num(tile.group_n))
        nodes: tuple[Node, ...] = ()
        for k_step in range(tile.k_steps):
            accumulate = num(1) if k_step else begun
            for fragment in range(tile.fragments):
                a = matrix(SHARED_A, tile.a, row, fragment * ROWS, k_step)
                b = matrix(SHARED_B, tile.b, column, 0, k_step)
                nodes += (WarpgroupMma(sums, (num(fragment), num(0)), tile.group_n, a, b, accumulate),)
        return nodes

    def _left(self, turn: Expr) -> tuple[Node, ...]:
        """A lane of each warp says that the slot of that step may be filled again, to all blocks that fill it."""
        index = (mod(turn, self.tile.stages),)
        if len(self.readers) < 2:
            return (Branch(eq(ref(LANE), num(0)), (MbarrierArrive(EMPTY, index),)),)
        return tuple(
            Branch(eq(ref(LANE), num(lane)), (MbarrierArrive(EMPTY, index, rank=rank),))
            for lane, rank in enumerate(self.readers)
        )

    # both -----------------------------------------------------------------------------------------------------------
    def _turned(self, visits: Visits, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        nodes = (Let(SLOT, mod(ref(TURN), self.tile.stages), nodes),)
        return (Let(TURN, add(visits.before, ref(STEP)), nodes),)

    @property
    def _parity(self) -> Expr:
        return mod(div(ref(TURN), self.tile.stages), 2)

    def _registers(self, count: int, *, increase: bool) -> tuple[Node, ...]:
        """One consumer has what it needs from the start."""
        return (SetMaxNReg(count, increase),) if self.tile.consumers > 1 else ()


def threads(consumers: int, body: tuple[Node, ...]) -> tuple[Node, ...]:
    """The warpgroups, warps and lanes of a block: so many consumers and the producer."""
    body = (Let(THREAD, add(mul(ref(WARP), num(WARP_THREADS)), ref(LANE)), body),)
    for var, extent in ((LANE, WARP_THREADS), (WARP, WARPS), (GROUP, consumers + 1)):
        body = (Loop(var, extent, LoopKind.THREAD, body),)
    return body


def peers(cluster: tuple[int, int], feeds: Feeds) -> tuple[Expr, ...]:
    """Numbers of the cluster's blocks that fill each other's slots with this one, itself among them."""
    rows, columns = cluster
    shared = {feed.room for feed in feeds if isinstance(feed, BulkFeed) and feed.mask is not None}
    row, column = div(ref(RANK), columns), mod(ref(RANK), columns)
    found: list[Expr] = [ref(RANK)]
    if SHARED_A in shared:
        found += [add(mul(row, num(columns)), mod(add(column, num(i)), columns)) for i in range(1, columns)]
    if SHARED_B in shared:
        found += [add(mul(mod(add(row, num(i)), rows), num(columns)), column) for i in range(1, rows)]
    return tuple(found) if len(found) > 1 else ()
