"""Pipelines of Q, K and V of a wgmma attention block: stages, mbarriers and the producer's role.

K and V have a pipeline each. Counting over all tiles of a block, KV tile i uses stage i % stages of both. Barrier
`full` of a stage completes a phase when all data has arrived, `empty` when all consumers have read it. Both phases of
KV tile i have number i / stages.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from roller_svc.construct.rules import MIN_MATRIX_STAGES
from roller_svc.errors import InvariantError, require
from roller_svc.families.common.gpu.attention.kv_loop import KvTileCopy
from roller_svc.families.common.gpu.attention.score_rows import KEY_STEP
from roller_svc.families.common.gpu.matrix.mainloop import LANE
from roller_svc.families.common.gpu.matrix.multistage_pipeline import KTileRange
from roller_svc.families.common.gpu.matrix.staging import THREAD
from roller_svc.families.common.gpu.matrix.tile import OperandLoad
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.mainloop import GROUP, ITERATION, on_one_thread
from roller_svc.families.common.gpu.warpgroups.producer import (
    STAGE,
    ProducerCopy,
    TmaOperand,
    staged_tile,
)
from roller_svc.families.common.gpu.warpgroups.tile import EMPTY, FULL, WARPS, WgmmaOperand
from roller_svc.families.common.gpu.warpgroups.tile_scheduler import VISIT, k_tile_loop
from roller_svc.families.common.gpu.warpgroups.tma_load import TmaTile
from roller_svc.families.gpu.wgmma_attention.workload import (
    KEYS,
    QUERIES,
    VALUES,
    WgmmaAttentionFacts,
    WgmmaAttentionTile,
)
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
)
from roller_svc.ir.schedule_hopper import FenceMbarrierInit, FenceProxyAsync, MbarrierArrive, MbarrierInit, MbarrierWait
from roller_svc.ir.tensor_map import Swizzle, TensorMap


@dataclass(frozen=True, slots=True)
class _KvCopy(KvTileCopy, ProducerCopy):
    """Copy of K by the producer's threads."""


@dataclass(frozen=True, slots=True)
class OperandPipeline:
    """The stages of one operand and how they are filled; `step` is the k-tile that its copy gets within a KV tile."""

    buffer: str
    operand: WgmmaOperand
    stages: int
    copy: TmaOperand | ProducerCopy
    step: Expr

    @property
    def full(self) -> str:
        return self.buffer + FULL

    @property
    def empty(self) -> str:
        return self.buffer + EMPTY

    @property
    def uses_tma(self) -> bool:
        return isinstance(self.copy, TmaOperand)

    def issue(self, stage: Expr) -> tuple[Node, ...]:
        """Start to fill the stage: one thread issues TMA loads, or all threads copy."""
        if isinstance(self.copy, ProducerCopy):
            return (*self.copy.cp_async(self.step, stage), CpAsyncCommitGroup())
        expect = MbarrierArrive(self.full, (stage,), expect_tx_bytes=self.operand.bytes)
        return (expect, *self.copy.loads(self.step, stage))

    def commit(self, stage: Expr, pending: int) -> tuple[Node, ...]:
        """Signal that the threads' copies to the stage have arrived, with `pending` later groups in flight."""
        return (CpAsyncWaitGroup(pending), FenceProxyAsync(), MbarrierArrive(self.full, (stage,)))


@dataclass(frozen=True, slots=True)
class AttentionPipeline:
    """The pipelines of Q, K and V."""

    tile: WgmmaAttentionTile
    q: OperandPipeline
    k: OperandPipeline
    v: OperandPipeline
    tensor_maps: tuple[TensorMap, ...]
    is_persistent: bool

    @property
    def _of_keys(self) -> tuple[OperandPipeline, ...]:
        """Return the pipelines of KV tiles."""
        return (self.k,) if self.tile.has_values_in_keys else (self.k, self.v)

    def init_barriers(self) -> Node:
        """Initialise the mbarriers with their arrival counts on one thread."""
        nodes: tuple[Node, ...] = ()
        for operand in (self.q, *self._of_keys):
            index = (ref(".stage"),)
            filling = 1 if operand.uses_tma else WARPGROUP_THREADS
            emptying = WARPS * self.tile.consumers
            barriers = (MbarrierInit(operand.full, index, filling), MbarrierInit(operand.empty, index, emptying))
            nodes += (Loop(".stage", operand.stages, LoopKind.UNROLL, barriers),)
        first = Op(OpKind.LAND, (eq(ref(GROUP), num(0)), eq(ref(THREAD), num(0))), DType.INT8)
        return Branch(first, (*nodes, FenceMbarrierInit()))

    # producer -------------------------------------------------------------------------------------------------------
    def load_q(self) -> tuple[Node, ...]:
        """Load Q of a tile, once for all KV tiles."""
        nodes = (MbarrierWait(self.q.empty, (num(0),), sub(num(1), self._tile_parity)), *self.q.issue(num(0)))
        return (on_one_thread(nodes),) if self.q.uses_tma else (*nodes, *self.q.commit(num(0), 0))

    def producer_loop(self, k_tiles: KTileRange, before: Expr) -> tuple[Node, ...]:
        """Load K and V of a pass; copies by threads are committed after the copies that follow have started."""
        copied = [operand for operand in self._of_keys if not operand.uses_tma]
        nodes: tuple[Node, ...] = ()
        for operand in self._of_keys:
            free = MbarrierWait(operand.empty, (ref(STAGE),), sub(num(1), parity(self.tile)))
            fill = (free, *operand.issue(ref(STAGE)))
            if not operand.uses_tma:
                nodes += (*fill, *self._producer_commit(copied, operand))
            else:
                nodes += (on_one_thread(fill),) if copied else fill
        work = with_stage_index(self.tile, add(before, ref("k.step")), (Let(KEY_STEP, k_tiles.number, nodes),))
        loop: tuple[Node, ...] = (k_tile_loop(k_tiles, work),)
        if not copied:
            return (on_one_thread(loop),)
        last = copied[-1].commit(mod(sub(add(before, k_tiles.count), num(1)), self.tile.stages), 0)
        return (*loop, Branch(lt(num(0), k_tiles.count), last))

    def _producer_commit(self, copied: list[OperandPipeline], operand: OperandPipeline) -> tuple[Node, ...]:
        """Commit the previous copies by threads after those of one operand have started."""
        if operand is not copied[0]:
            return copied[0].commit(ref(STAGE), 1)
        before = mod(add(ref(ITERATION), num(self.tile.stages - 1)), self.tile.stages)
        return (Branch(lt(num(0), ref("k.step")), copied[-1].commit(before, 1)),)

    # consumers ------------------------------------------------------------------------------------------------------
    @property
    def _tile_parity(self) -> Expr:
        return mod(ref(VISIT), 2) if self.is_persistent else num(0)

    def q_wait(self) -> Node:
        """Wait for Q of the tile."""
        return MbarrierWait(self.q.full, (num(0),), self._tile_parity)

    def q_release(self) -> tuple[Node, ...]:
        """Release Q in persistent kernels, by one lane of each warp."""
        arrival = MbarrierArrive(self.q.empty, (num(0),))
        return (Branch(eq(ref(LANE), num(0)), (arrival,)),) if self.is_persistent else ()

    def consumer_wait(self, operand: OperandPipeline) -> Node:
        """Wait for the iteration's stage."""
        return MbarrierWait(operand.full, (ref(STAGE),), parity(self.tile))

    def consumer_release(self, operand: OperandPipeline) -> Node:
        """Release the iteration's stage, by one lane of each warp."""
        return Branch(eq(ref(LANE), num(0)), (MbarrierArrive(operand.empty, (ref(STAGE),)),))

    def release_keys(self) -> tuple[Node, ...]:
        """Release K after QK^T, unless PV reads the same stage."""
        return () if self.tile.has_values_in_keys else (self.consumer_release(self.k),)


def with_stage_index(tile: WgmmaAttentionTile, iteration: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Bind the block's iteration and its stage around the nodes."""
    return (Let(ITERATION, iteration, (Let(STAGE, mod(ref(ITERATION), tile.stages), nodes),)),)


def parity(tile: WgmmaAttentionTile) -> Expr:
    """Return the phase parity of the iteration."""
    return mod(div(ref(ITERATION), tile.stages), 2)


def attention_pipeline(
    tile: WgmmaAttentionTile, facts: WgmmaAttentionFacts, axes: tuple[TileAxis, TileAxis], *, is_persistent: bool
) -> AttentionPipeline:
    """Return the pipelines; `axes` are rows and columns of O.

    One stage raises InvariantError: copies to a stage are committed when copies to the next have started, which wait
    for that stage to be released.
    """
    if tile.stages < MIN_MATRIX_STAGES:
        raise InvariantError(f"too few pipeline stages: expected at least {MIN_MATRIX_STAGES}, got {tile.stages}")
    m, n = axes
    head_dim_order = KTileOrder.linear(facts.head_dim.extent, tile.head_dim)
    kv_order = KTileOrder.linear(facts.kv.extent, tile.kv)
    pipelines: list[OperandPipeline] = []
    maps: list[TensorMap] = []
    row, column = mul(ref("m.block"), num(tile.m)), mul(ref("n.block"), num(tile.n))
    key = mul(ref(KEY_STEP), num(tile.kv))
    setups = (
        _OperandSetup(QUERIES, facts.operands.q, tile.q, (m, facts.head_dim), head_dim_order, row, num(0)),
        _OperandSetup(KEYS, facts.operands.k, tile.k, (facts.kv, facts.head_dim), head_dim_order, key, num(0)),
        _OperandSetup(VALUES, facts.operands.v, tile.v, (n, facts.kv), kv_order, column, ref(KEY_STEP)),
    )
    for setup in setups[: 2 if tile.has_values_in_keys else 3]:
        pipelines.append(setup.pipeline(1 if setup.buffer == QUERIES else tile.stages))
        maps += setup.maps()
    q, k, *rest = pipelines
    v = replace(k, operand=tile.v) if tile.has_values_in_keys else rest[0]
    return AttentionPipeline(tile, q, k, v, tuple(maps), is_persistent)


@dataclass(frozen=True, slots=True)
class _OperandSetup:
    """Arguments of one operand's pipeline: `axes` of its tiles, `origin` of a tile on the first axis."""

    buffer: str
    load: OperandLoad
    operand: WgmmaOperand
    axes: tuple[TileAxis, TileAxis]
    k_order: KTileOrder
    origin: Expr
    step: Expr

    def pipeline(self, stages: int) -> OperandPipeline:
        operand, (axis, along) = self.operand, self.axes
        boxes = operand.copy_plan
        if isinstance(boxes, TmaTile):
            tma = TmaOperand(self.buffer, self._map, boxes, self.origin, num(0), full_barrier=self.buffer + FULL)
            return OperandPipeline(self.buffer, operand, stages, tma, self.step)
        kind, step = (_KvCopy, ref(KEY_STEP)) if self.buffer == KEYS else (ProducerCopy, self.step)
        atom = operand.atom_bytes // operand.dtype.bytes
        copy = kind(
            self.buffer,
            self.load.operand,
            staged_tile(operand),
            boxes,
            axis,
            along,
            (operand.extent, operand.k),
            WARPGROUP_THREADS,
            self.k_order,
            atom,
        )
        return OperandPipeline(self.buffer, operand, stages, copy, step)

    def maps(self) -> Iterator[TensorMap]:
        """Yield the tensor map of the TMA loads."""
        boxes, source = self.operand.copy_plan, self.load.operand.source
        if isinstance(boxes, TmaTile):
            tensor = require(source, "source of a TMA operand").tensor
            yield boxes.tensor_map(self._map, tensor, Swizzle(self.operand.atom_bytes))

    @property
    def _map(self) -> str:
        return f"{self.buffer}.map"
