"""Attention and its rProgram → schedule tree for tensor cores driven by a warpgroup (`wgmma`).

FlashAttention-3 (Shah et al., arXiv:2407.08608, algorithm 2): a block's last warpgroup fills stages of K and V; each
other warpgroup has 64 rows of Q. QK^T of the next KV tile is issued before PV of the current one, and softmax overlaps
with PV. P stays in registers, where it has the layout of an A operand.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.errors import InvariantError
from roller_svc.families.common.gpu.attention.kv_loop import KvTileLoop
from roller_svc.families.common.gpu.attention.mask import KeyBounds, exact_bounds, key_bounds
from roller_svc.families.common.gpu.attention.score_rows import KEY_STEP, SCORES
from roller_svc.families.common.gpu.attention.softmax import (
    MAXIMUM,
    PEAK,
    RESCALE,
    SHIFT,
    TOTAL,
    Softmax,
    init_softmax,
)
from roller_svc.families.common.gpu.matrix.epilogue import EpilogueStore, word
from roller_svc.families.common.gpu.matrix.mainloop import ACC
from roller_svc.families.common.gpu.matrix.multistage_pipeline import EPILOGUE, MAIN_LOOP, KTileRange
from roller_svc.families.common.gpu.warpgroups.epilogue import FRAGMENT_WORDS, TmaStoreEpilogue, WarpgroupEpilogue
from roller_svc.families.common.gpu.warpgroups.mainloop import (
    CONSUMER,
    GROUP,
    PRODUCER,
    WARP,
    group_in_tile,
    set_max_registers,
    warpgroup_threads,
)
from roller_svc.families.common.gpu.warpgroups.producer import smem_matrix
from roller_svc.families.common.gpu.warpgroups.tile import ROWS, WARPS
from roller_svc.families.common.gpu.warpgroups.tile_scheduler import BLOCK, VISIT
from roller_svc.families.common.view import GemmView
from roller_svc.families.gpu.wgmma_attention.producer import AttentionPipeline, attention_pipeline, with_stage_index
from roller_svc.families.gpu.wgmma_attention.workload import (
    WgmmaAttentionFacts,
    WgmmaAttentionTile,
    wgmma_attention_tile,
)
from roller_svc.ir.attention import Attention
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, eq, lt, mul, num, ref, sub
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Barrier, Branch, Let, Loop, LoopKind, Node, PackFragment, ScheduleTree
from roller_svc.ir.schedule_hopper import (
    RegisterMatrix,
    WarpgroupMma,
    WgmmaCommitGroup,
    WgmmaFence,
    WgmmaWaitGroup,
)
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import register, wrap_in_storages

PROBABILITIES = ".weights"  # P of a KV tile, as operand A of PV
WORDS = 4  # registers of a thread's operand A in one instruction
_F32 = DType.FLOAT32
RESULT = (ref("m.fragment"), add(mul(ref("n.fragment"), num(FRAGMENT_WORDS)), word()))


def lower(group: KernelGroup, program: RProgram, workload: Workload[WgmmaAttentionFacts]) -> tuple[ScheduleTree, ...]:
    """Return one tree: a block computes block.m rows and block.n columns of O, a warpgroup 64 of the rows.

    Persistent blocks compute several tiles, which needs equal KV loops, so they exclude masks.
    """
    if group.attention is None:
        raise InvariantError(f"expected attention, got {group.name}")
    if program.pipeline.persistent_blocks and key_bounds(group) != KeyBounds():
        raise InvariantError(f"persistent blocks do not support masks, got {group.name}")
    return (_Kernel.of(group, group.attention, program, workload.facts).tree(),)


@dataclass(frozen=True, slots=True)
class _Kernel:
    view: GemmView
    tile: WgmmaAttentionTile
    kv_loop: KvTileLoop
    softmax: Softmax
    pipeline: AttentionPipeline
    results: TmaStoreEpilogue | WarpgroupEpilogue
    exact: KeyBounds | None
    blocks: int  # persistent blocks; 0: one block for each tile

    @classmethod
    def of(cls, group: KernelGroup, attention: Attention, program: RProgram, facts: WgmmaAttentionFacts) -> _Kernel:
        tile, view = wgmma_attention_tile(program, facts), GemmView.of_attention(group)
        outputs, store = EpilogueStore(view, tile.m, tile.n), tile.result.tma_store
        pipeline = attention_pipeline(tile, facts, (view.m, view.n), is_persistent=program.pipeline.persistent_blocks > 0)
        kv_loop = KvTileLoop(tile, view.m, view.k, facts.operands.bounds)
        return cls(
            view,
            tile,
            kv_loop,
            Softmax(attention, tile, view.m, view.k, view.n, RESULT),
            pipeline,
            WarpgroupEpilogue(tile.result, outputs) if store is None else TmaStoreEpilogue(tile.result, outputs, store),
            exact_bounds(group),
            program.pipeline.persistent_blocks,
        )

    def tree(self) -> ScheduleTree:
        """Return the launch."""
        tile = self.tile
        is_producer = eq(ref(GROUP), num(tile.consumers))
        nodes: tuple[Node, ...] = (
            self.pipeline.init_barriers(), Barrier(), Branch(is_producer, self._producer(), self._consumer()),
        )  # fmt: skip
        nodes = wrap_in_storages(tile.shared_buffers, nodes)
        nodes = warpgroup_threads(tile.consumers, nodes)
        if self.blocks:
            nodes = (Loop(BLOCK, self.blocks, LoopKind.BLOCK, nodes),)
        else:
            nodes = self.kv_loop.block_loops(self.view, self.kv_loop.bind_bounds(nodes))
        store = tile.result.tma_store
        maps = self.pipeline.tensor_maps if store is None else (*self.pipeline.tensor_maps, store.tensor_map)
        return ScheduleTree(self.view.group.name, nodes, tensor_maps=maps)

    # roles ----------------------------------------------------------------------------------------------------------
    def _producer(self) -> tuple[Node, ...]:
        """Return the producer's role."""
        none = Const(0, DType.INT8)  # the producer's threads have no rows
        passes = self.kv_loop.passes(none, self._fill, self.tile.threads)
        registers = set_max_registers(self.tile.consumers, self.tile.producer_registers, increase=False)
        return (PRODUCER, *registers, *self._for_each_tile((*self.pipeline.load_q(), *passes)))

    def _fill(self, k_tiles: KTileRange, before: Expr) -> tuple[Node, ...]:
        return self.pipeline.producer_loop(k_tiles, self._iteration(before))

    def _consumer(self) -> tuple[Node, ...]:
        """Return the consumers' role."""
        tile = self.tile
        storages = [
            register(ACC, _F32, 1, tile.group_n // 2), register(MAXIMUM, _F32, 1, 2), register(TOTAL, _F32, 1, 2),
            register(PROBABILITIES, DType.UINT32, tile.kv_steps, WORDS),
        ]  # fmt: skip
        counts = self.softmax.needs_fully_masked_pass(self.kv_loop.bounds.finite_fill or 0.0)
        nodes = (
            *init_softmax(self.softmax),
            MAIN_LOOP, *self.kv_loop.passes(counts, self._kv_pass, tile.threads),
            EPILOGUE, *self._wait_for_unread_q(),
            self.softmax.reduce_row_sum(), *self._store_rows(), *self.softmax.normalize(), *self.results.nodes(),
        )  # fmt: skip
        nodes = (Let("m.warp", add(mul(self._row_group, num(WARPS)), ref(WARP)), (Let("k.warp", num(0), nodes),)),)
        registers = set_max_registers(self.tile.consumers, tile.consumer_registers, increase=True)
        return (CONSUMER, *registers, *self._for_each_tile(wrap_in_storages(storages, nodes)), *self.results.finish)

    @property
    def _row_group(self) -> Expr:
        """Return the consumer's number along the rows."""
        return group_in_tile(self.tile.result)[0]

    def _store_rows(self) -> tuple[Node, ...]:
        """Store values of rows by the consumers of the first columns."""
        stores = self.softmax.store_rows()
        if self.tile.column_groups == 1 or not stores:
            return stores
        return (Branch(eq(group_in_tile(self.tile.result)[1], num(0)), stores),)

    def _wait_for_unread_q(self) -> tuple[Node, ...]:
        """Wait for Q if no KV tile was visible, before its buffer is released."""
        return () if isinstance(self.kv_loop.visible.count, Const) else (self.pipeline.q_wait(),)

    def _for_each_tile(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Loop over the tiles of a persistent block."""
        return self.kv_loop.for_each_tile(self.view, self.blocks, nodes) if self.blocks else nodes

    def _iteration(self, before: Expr) -> Expr:
        """Return the KV tiles of the block so far, `before` of them in this tile; all tiles have equally many."""
        return add(mul(ref(VISIT), num(self.kv_loop.kv_tiles)), before) if self.blocks else before

    # steps ----------------------------------------------------------------------------------------------------------
    def _kv_pass(self, k_tiles: KTileRange, before: Expr) -> tuple[Node, ...]:
        """Process the KV tiles of a pass; PV is one tile behind QK^T."""
        before = self._iteration(before)
        last = add(before, sub(k_tiles.count, num(1)))
        last_pv = (*self._pv(), WgmmaWaitGroup(0, ACC), self.pipeline.consumer_release(self.pipeline.v))
        nodes = (
            *self._first_kv_tile(k_tiles, before), *self._later_kv_tiles(k_tiles, before),
            *self.pipeline.q_release(), *self._at_iteration(last, last_pv),
        )  # fmt: skip
        return nodes if isinstance(k_tiles.count, Const) else (Branch(lt(num(0), k_tiles.count), nodes),)

    def _first_kv_tile(self, k_tiles: KTileRange, before: Expr) -> tuple[Node, ...]:
        """Compute P of the first KV tile."""
        products = (*self._qk(), WgmmaWaitGroup(0, SCORES), *self.pipeline.release_keys())
        weighed = (self._exp(k_tiles.first), self.softmax.rescale_o(), *self._pack_p())
        return self._with_registers((self.pipeline.q_wait(), *self._at_iteration(before, products), *weighed))

    def _later_kv_tiles(self, k_tiles: KTileRange, before: Expr) -> tuple[Node, ...]:
        """Loop over the other KV tiles: QK^T of each, PV of the one before, then softmax."""
        if k_tiles.max_count == 1:
            return ()
        iteration = add(before, ref("k.step"))
        number = add(k_tiles.first, add(ref("k.step"), num(1)))
        nodes = self._with_registers(
            (
                *self._at_iteration(add(iteration, num(1)), self._qk()),
                *self._at_iteration(iteration, self._pv()),
                WgmmaWaitGroup(1, SCORES),
                *self._at_iteration(add(iteration, num(1)), self.pipeline.release_keys()),
                self._exp(number),
                WgmmaWaitGroup(0, ACC),
                *self._at_iteration(iteration, (self.pipeline.consumer_release(self.pipeline.v),)),
                self.softmax.rescale_o(),
                *self._pack_p(),
            )
        )
        limit = None if isinstance(k_tiles.count, Const) else sub(k_tiles.count, num(1))
        return (Loop("k.step", k_tiles.max_count - 1, LoopKind.SERIAL, nodes, limit),)

    def _at_iteration(self, iteration: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        return with_stage_index(self.tile, iteration, nodes)

    def _with_registers(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate the registers of one KV tile around the nodes."""
        storages = [register(SCORES, _F32, 1, self.tile.kv_fragments, FRAGMENT_WORDS)]
        storages += [register(name, _F32, 1, 2) for name in (PEAK, SHIFT, RESCALE)]
        return wrap_in_storages(storages, nodes)

    # products -------------------------------------------------------------------------------------------------------
    def _qk(self) -> tuple[Node, ...]:
        """Issue QK^T of the iteration's stage."""
        tile, (q, k) = self.tile, (self.pipeline.q, self.pipeline.k)
        row = mul(self._row_group, num(ROWS))
        nodes: tuple[Node, ...] = ()
        for step in range(tile.head_dim_steps):
            a = smem_matrix(q.buffer, q.operand, row, 0, step, num(0))
            b = smem_matrix(k.buffer, k.operand, num(0), 0, step)
            nodes += (WarpgroupMma(SCORES, (num(0), num(0), num(0)), tile.kv, a, b, num(int(step > 0))),)
        return (self.pipeline.consumer_wait(k), WgmmaFence(), *nodes, WgmmaCommitGroup())

    def _pv(self) -> tuple[Node, ...]:
        """Issue PV of the iteration's stage."""
        tile, v = self.tile, self.pipeline.v
        column = mul(group_in_tile(tile.result)[1], num(tile.group_n))
        if tile.has_values_in_keys:
            column = add(mul(ref("n.block"), num(tile.n)), column)
        nodes: tuple[Node, ...] = ()
        for step in range(tile.kv_steps):
            weights = RegisterMatrix(PROBABILITIES, (num(step), num(0)), v.operand.dtype)
            values = smem_matrix(v.buffer, v.operand, column, 0, step)
            nodes += (WarpgroupMma(ACC, (num(0), num(0)), tile.group_n, weights, values, num(1)),)
        return (self.pipeline.consumer_wait(v), WgmmaFence(), *nodes, WgmmaCommitGroup())

    def _exp(self, step: Expr) -> Node:
        """Turn S of a KV tile into P; fully visible tiles skip the mask."""
        whole = None if self.exact is None else self.kv_loop.is_unmasked(ref(KEY_STEP), self.exact)
        return Let(KEY_STEP, step, self.softmax.update_probabilities(whole))

    def _pack_p(self) -> tuple[Node, ...]:
        """Pack P of 16 keys as operand A (PTX ISA, "Register Fragments for wgmma.mma_async")."""
        dtype = self.pipeline.v.operand.dtype
        return tuple(
            PackFragment(PROBABILITIES, (num(step), num(w)), _p(2 * step + w // 2, w % 2), dtype)
            for step in range(self.tile.kv_steps)
            for w in range(WORDS)
        )


def _p(fragment: int, half: int) -> Load:
    return Load(SCORES, (num(0), num(fragment), num(2 * half)), _F32)
