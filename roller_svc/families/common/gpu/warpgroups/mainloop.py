"""Warp-specialised mainloop of wgmma kernels: a producer warpgroup fills stages, consumer warpgroups multiply.

This is CUTLASS's PipelineTmaAsync. Counting over all tiles of a block, k-tile i uses stage i % stages. Barrier `full`
of a stage completes a phase when all data has arrived, `empty` when all consumers have read it. Both phases of k-tile i
have number i / stages.

Under ping-pong, two consumers take output tiles in turn: one runs its epilogue during the other's mainloop (CUTLASS's
KernelTmaWarpSpecializedPingpong). They share the pipeline, in the order of tiles.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.families.common.gpu.matrix.block_scales import BlockScales, block_ends, for_each_word_of_tile, guarded
from roller_svc.families.common.gpu.matrix.epilogue import word
from roller_svc.families.common.gpu.matrix.mainloop import ACC, LANE, STEP_ACC
from roller_svc.families.common.gpu.matrix.multistage_pipeline import EPILOGUE, MAIN_LOOP
from roller_svc.families.common.gpu.matrix.staging import THREAD
from roller_svc.families.common.gpu.matrix.tile import COLUMNS, LANE_SUMS, SHARED_A, SHARED_B
from roller_svc.families.common.gpu.warpgroups.producer import (
    STAGE,
    PrefetchedProducerCopy,
    ProducerCopy,
    TmaOperand,
    smem_matrix,
)
from roller_svc.families.common.gpu.warpgroups.tile import EMPTY, FULL, ORDER, PINGPONG_CONSUMERS, ROWS, WARPS, WgmmaTile
from roller_svc.families.common.gpu.warpgroups.tile_scheduler import (
    K_RANK,
    RANK,
    SLOT,
    VISIT,
    TileScheduler,
    k_tile_loop,
)
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind
from roller_svc.ir.index import add, div, eq, le, lt, mod, mul, num, ref, sub
from roller_svc.ir.program import Combine
from roller_svc.ir.rprogram import WARPGROUP_THREADS, PipelineOptions
from roller_svc.ir.schedule import (
    Branch,
    Compute,
    CpAsyncCommitGroup,
    CpAsyncWaitGroup,
    Let,
    Loop,
    LoopKind,
    Node,
    Part,
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

GROUP, WARP = ".group", ".warp"  # warpgroup of the block; warp of the warpgroup
STEP, ITERATION = "k.step", ".iteration"  # k-tile within the output tile; k-tile of the block over all its tiles

PRODUCER, CONSUMER = Part("producer"), Part("consumer")
OperandCopies = tuple[ProducerCopy | TmaOperand, ...]  # in issue order; B operands of a dual GEMM share a buffer


@dataclass(frozen=True, slots=True)
class WgmmaMainloop:
    """Producer and consumer loops of one wgmma kernel.

    `consumers_of_multicast` holds the ranks of the cluster's blocks whose stages this block's TMA loads fill, itself
    among them. It is empty without multicast.
    """

    dtype: DType
    tile: WgmmaTile
    copies: OperandCopies
    consumers_of_multicast: tuple[Expr, ...] = ()
    scales: BlockScales | None = None

    @property
    def tma_operands(self) -> tuple[TmaOperand, ...]:
        return tuple(copy for copy in self.copies if isinstance(copy, TmaOperand))

    @property
    def producer_copies(self) -> tuple[ProducerCopy, ...]:
        return tuple(copy for copy in self.copies if isinstance(copy, ProducerCopy))

    def init_barriers(self) -> Node:
        """Initialise the mbarriers with their arrival counts on one thread."""
        filling = (1 if self.tma_operands else 0) + (WARPGROUP_THREADS if self.producer_copies else 0)
        emptying = WARPS * self.tile.tile_consumers * max(1, len(self.consumers_of_multicast))
        index = (ref(".stage"),)
        barriers = (MbarrierInit(FULL, index, filling), MbarrierInit(EMPTY, index, emptying))
        loop = Loop(".stage", self.tile.pipeline.stages, LoopKind.UNROLL, barriers)
        first = Op(OpKind.LAND, (eq(ref(GROUP), num(0)), eq(ref(THREAD), num(0))), DType.INT8)
        consumers = range(PINGPONG_CONSUMERS if self.tile.pipeline.pingpong else 0)
        order = tuple(MbarrierInit(ORDER, (num(consumer),), WARPS) for consumer in consumers)
        return Branch(first, (loop, *order, FenceMbarrierInit()))

    # producer -------------------------------------------------------------------------------------------------------
    def producer_loop(self, scheduler: TileScheduler) -> tuple[Node, ...]:
        """Return the producer's role."""
        fill = self._with_stage_index(scheduler, self._fill_stage(scheduler))
        nodes: tuple[Node, ...] = (*self._first_words(scheduler), k_tile_loop(scheduler.k_tiles, fill, self._slots))
        for copy in self._prefetched_copies:
            nodes = copy.allocate_registers(nodes)
        nodes = scheduler.for_each_tile(nodes)
        nodes += self._producer_tail(scheduler.total_k_tiles)
        if not self.producer_copies:
            nodes = (on_one_thread(nodes),)
        return (PRODUCER, *set_max_registers(self.tile.consumers, self.tile.producer_registers, increase=False), *nodes)

    @property
    def _prefetched_copies(self) -> tuple[PrefetchedProducerCopy, ...]:
        return tuple(copy for copy in self.copies if isinstance(copy, PrefetchedProducerCopy))

    @property
    def _slots(self) -> int:
        """Return the k-tiles whose words registers hold; 1 without words."""
        return next((copy.prefetch.prefetched_k_tiles for copy in self._prefetched_copies), 1)

    def _first_words(self, scheduler: TileScheduler) -> tuple[Node, ...]:
        """Load the words of the first k-tiles of a tile, and what all k-tiles share."""
        fixed: tuple[Node, ...] = ()
        words: tuple[Node, ...] = ()
        for copy in self._prefetched_copies:
            fixed += copy.load_fixed(scheduler.k_tiles.first)
            words += copy.load_words(add(scheduler.k_tiles.first, ref(SLOT)), ref(SLOT))
        if not words:
            return ()
        words = (Branch(lt(ref(SLOT), scheduler.k_tiles.count), words),)
        return (*fixed, *(Let(SLOT, num(slot), words) for slot in range(self._slots)))

    def _later_words(self, scheduler: TileScheduler) -> tuple[Node, ...]:
        """Load the words of a later k-tile to the registers of the current one, whose words are unpacked."""
        later = add(ref(STEP), num(self._slots))
        nodes: tuple[Node, ...] = ()
        for copy in self._prefetched_copies:
            nodes += copy.load_words(add(scheduler.k_tiles.first, later), self._slot)
        return (Branch(lt(later, scheduler.k_tiles.count), nodes),) if nodes else ()

    @property
    def _slot(self) -> Expr:
        return ref(SLOT) if self._slots > 1 else num(0)

    @property
    def _stages_in_flight(self) -> int:
        """Return the number of k-tiles in flight while threads wait for the copies of one.

        The next stage was released when the k-tile after the oldest of these began.
        """
        return max(0, self.tile.pipeline.stages - 2) if any(copy.is_async for copy in self.producer_copies) else 0

    def _fill_stage(self, scheduler: TileScheduler) -> tuple[Node, ...]:
        """Fill one stage; copies through registers load before the stage is free."""
        step, stage = add(scheduler.k_tiles.first, ref(STEP)), ref(STAGE)
        nodes: tuple[Node, ...] = ()
        for copy in self.producer_copies:
            nodes += copy.load_to_registers(step) if copy.is_prefetched else ()
        nodes += (MbarrierWait(EMPTY, (stage,), sub(num(1), self._parity)),)
        nodes += self._tma_loads(step)
        for copy in self.producer_copies:
            if copy.is_async:
                nodes += copy.cp_async(step, stage)
            elif isinstance(copy, PrefetchedProducerCopy):
                nodes += copy.unpack(step, stage, self._slot)
            else:
                nodes += copy.store_to_shared(stage) if copy.is_prefetched else copy.copy_through_registers(step, stage)
        for copy in self.producer_copies:
            if not isinstance(copy, PrefetchedProducerCopy):
                nodes = copy.allocate_registers(nodes)
        return (*nodes, *self._later_words(scheduler), *self._producer_commit())

    def _tma_loads(self, step: Expr) -> tuple[Node, ...]:
        """Expect the bytes of all TMA loads of the stage and issue this block's loads, on one thread."""
        if not self.tma_operands:
            return ()
        operands = {SHARED_A: self.tile.a, SHARED_B: self.tile.b}
        size = sum(operands[buffer].bytes for buffer in dict.fromkeys(copy.buffer for copy in self.tma_operands))
        nodes: tuple[Node, ...] = (MbarrierArrive(FULL, (ref(STAGE),), expect_tx_bytes=size),)
        for copy in self.tma_operands:
            nodes += copy.loads(step, ref(STAGE))
        return (on_one_thread(nodes),) if self.producer_copies else nodes

    def _producer_commit(self) -> tuple[Node, ...]:
        """Signal that each thread's part of the stage has arrived, for this k-tile or an earlier one."""
        if not self.producer_copies:
            return ()
        in_flight = self._stages_in_flight
        commit: tuple[Node, ...] = ()
        if any(copy.is_async for copy in self.producer_copies):
            commit = (CpAsyncCommitGroup(),)
        arrival = self._commit_stage(ref(ITERATION), in_flight, in_flight)
        return (*commit, Branch(le(num(in_flight), ref(ITERATION)), arrival)) if in_flight else (*commit, *arrival)

    def _producer_tail(self, steps: Expr) -> tuple[Node, ...]:
        """Commit the k-tiles still in flight after the last one."""
        nodes: tuple[Node, ...] = ()
        for pending in reversed(range(self._stages_in_flight)):
            nodes += (Branch(lt(num(pending), steps), self._commit_stage(steps, pending + 1, pending)),)
        return nodes

    def _commit_stage(self, iteration: Expr, before: int, pending: int) -> tuple[Node, ...]:
        """Wait for the copies and commit the k-tile `before` iterations earlier."""
        wait: tuple[Node, ...] = (CpAsyncWaitGroup(pending),) if any(copy.is_async for copy in self.producer_copies) else ()
        stage = mod(add(iteration, num(-before % self.tile.pipeline.stages)), self.tile.pipeline.stages)
        return (*wait, FenceProxyAsync(), MbarrierArrive(FULL, (stage,)))

    # consumers ------------------------------------------------------------------------------------------------------
    def consumer_loop(self, scheduler: TileScheduler, epilogue: tuple[Node, ...], last: tuple[Node, ...]) -> tuple[Node, ...]:
        """Return the consumers' role: accumulate and run the epilogue for each tile, then `last`."""
        mainloop = self._accumulate_promoted(scheduler) if self.tile.promotes_accumulators else self._accumulate(scheduler)
        nodes = (MAIN_LOOP, *mainloop, EPILOGUE, *epilogue)
        nodes = (Storage(ACC, self.dtype, self._accumulator_shape, Scope.REGISTER, nodes),)
        return (
            CONSUMER,
            *set_max_registers(self.tile.consumers, self.tile.consumer_registers, increase=True),
            *scheduler.for_each_tile(nodes),
            *last,
        )

    def _accumulate(self, scheduler: TileScheduler) -> tuple[Node, ...]:
        """Accumulate with the wgmma of one k-tile in flight during the wait for the next.

        A stage is released when the wgmma after it has been issued.
        """
        behind = 1 if self.tile.pipeline.stages > 1 else 0
        step: tuple[Node, ...] = (
            MbarrierWait(FULL, (ref(STAGE),), self._parity),
            WgmmaFence(),
            *self._wgmma(ACC, lt(num(0), ref(STEP))),
            WgmmaCommitGroup(),
            WgmmaWaitGroup(behind, None if behind else ACC),
        )
        if not behind:
            released = (*step, *self._consumer_release(ref(ITERATION)))
            return self._in_order(k_tile_loop(scheduler.k_tiles, self._with_stage_index(scheduler, released)))
        before = add(ref(ITERATION), num(self.tile.pipeline.stages - 1))  # has the stage of the previous k-tile
        release = Branch(lt(num(0), ref(STEP)), self._consumer_release(before))
        last = sub(add(scheduler.k_tiles_before, scheduler.k_tiles.count), num(1))
        steps = k_tile_loop(scheduler.k_tiles, self._with_stage_index(scheduler, (*step, release)))
        return (*self._in_order(steps), WgmmaWaitGroup(0, ACC), *self._consumer_release(last))

    def _accumulate_promoted(self, scheduler: TileScheduler) -> tuple[Node, ...]:
        """Accumulate each k-tile from zero and promote it to float32 (CUTLASS GmmaFP8Accumulation).

        Other consumers' wgmma overlap with the promotion. Scales of a block of k-tiles are loaded before its wgmma, and
        applied as its sums are promoted.
        """
        index = (ref("m.fragment"), ref(".word"))
        zero = Compute(ACC, index, Const(0.0, self.dtype))
        first, last = block_ends(scheduler.k_tiles, self.tile.promoted_k_tiles)
        step: tuple[Node, ...] = (
            MbarrierWait(FULL, (ref(STAGE),), self._parity),
            WgmmaFence(),
            *self._wgmma(STEP_ACC, num(0) if first is None else eq(first, num(0))),
            WgmmaCommitGroup(),
            WgmmaWaitGroup(0, STEP_ACC),
            *self._consumer_release(ref(ITERATION)),
            *guarded(last, (self._promote(),)),
        )
        if self.scales is not None:
            k_position = self.tile.k_order.k_position(scheduler.k_tiles.number, num(0))
            step = (*guarded(first, self.scales.load(k_position)), *step)
        if first is None:
            step = self._step_sums(step)
        nodes = (
            self._for_each_accumulator(zero),
            *self._in_order(k_tile_loop(scheduler.k_tiles, self._with_stage_index(scheduler, step))),
        )
        return nodes if first is None else self._step_sums(nodes)

    def _step_sums(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Allocate the sums that are promoted, and their scales, around the nodes."""
        sums = self.dtype if self.scales is None else self.scales.sum_dtype
        nodes = nodes if self.scales is None else self.scales.allocate(nodes)
        return (Storage(STEP_ACC, sums, self._accumulator_shape, Scope.REGISTER, nodes),)

    def _promote(self) -> Node:
        """Add the sums of k-tiles to the others."""
        if self.scales is None:
            register: tuple[Expr, Expr] = (ref("m.fragment"), ref(".word"))
            return self._for_each_accumulator(Compute(ACC, register, Load(STEP_ACC, register, self.dtype), Combine.SUM))
        register = ref("m.fragment"), add(mul(ref("n.fragment"), num(LANE_SUMS)), word())
        value = self.scales.scaled(Load(STEP_ACC, register, self.scales.sum_dtype))
        fragments = self.tile.fragments, self.tile.group_n // COLUMNS
        return for_each_word_of_tile(fragments, Compute(ACC, register, value, Combine.SUM))

    def _in_order(self, mainloop: Node) -> tuple[Node, ...]:
        """Run the mainloop of a tile after that of the previous tile (CUTLASS: OrderedSequenceBarrier).

        Its wgmma must be issued, not complete. The other consumer runs its epilogue meanwhile. Each consumer waits for
        a barrier of its own: a warp could pass a common one again before the other warps have arrived.
        """
        if not self.tile.pipeline.pingpong:
            return (mainloop,)
        own, parity = mod(ref(VISIT), 2), mod(div(add(ref(VISIT), num(1)), 2), 2)
        previous = MbarrierWait(ORDER, (own,), sub(num(1), parity))
        cue = MbarrierArrive(ORDER, (sub(num(1), own),))
        return (previous, mainloop, Branch(eq(ref(LANE), num(0)), (cue,)))

    @property
    def _accumulator_shape(self) -> tuple[int, int]:
        """Return the accumulator registers of a thread."""
        return self.tile.fragments, self.tile.group_n // 2

    def _for_each_accumulator(self, node: Node) -> Node:
        fragments, words = self._accumulator_shape
        return Loop("m.fragment", fragments, LoopKind.UNROLL, (Loop(".word", words, LoopKind.UNROLL, (node,)),))

    def _wgmma(self, accumulators: str, accumulate_first: Expr) -> tuple[Node, ...]:
        """Return the wgmma of one k-tile; the first k-step accumulates if `accumulate_first` holds."""
        tile = self.tile
        row, column = (mul(at, num(size)) for at, size in zip(group_in_tile(tile), (tile.group_m, tile.group_n), strict=True))
        nodes: tuple[Node, ...] = ()
        for k_step in range(tile.k_steps):
            accumulate = num(1) if k_step else accumulate_first
            for fragment in range(tile.fragments):
                a = smem_matrix(SHARED_A, tile.a, row, fragment * ROWS, k_step)
                b = smem_matrix(SHARED_B, tile.b, column, 0, k_step)
                nodes += (WarpgroupMma(accumulators, (num(fragment), num(0)), tile.group_n, a, b, accumulate),)
        return nodes

    def _consumer_release(self, iteration: Expr) -> tuple[Node, ...]:
        """Release the stage of an iteration to all blocks that fill it, by one lane of each warp."""
        index = (mod(iteration, self.tile.pipeline.stages),)
        if len(self.consumers_of_multicast) < 2:
            return (Branch(eq(ref(LANE), num(0)), (MbarrierArrive(EMPTY, index),)),)
        return tuple(
            Branch(eq(ref(LANE), num(lane)), (MbarrierArrive(EMPTY, index, rank=rank),))
            for lane, rank in enumerate(self.consumers_of_multicast)
        )

    # stages ---------------------------------------------------------------------------------------------------------
    def _with_stage_index(self, scheduler: TileScheduler, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        nodes = (Let(STAGE, mod(ref(ITERATION), self.tile.pipeline.stages), nodes),)
        return (Let(ITERATION, add(scheduler.k_tiles_before, ref(STEP)), nodes),)

    @property
    def _parity(self) -> Expr:
        return mod(div(ref(ITERATION), self.tile.pipeline.stages), 2)


def set_max_registers(consumers: int, count: int, *, increase: bool) -> tuple[Node, ...]:
    """Set the registers of a warpgroup's threads (`setmaxnreg`); with one consumer the initial number suffices."""
    return (SetMaxNReg(count, increase),) if consumers > 1 else ()


def group_in_tile(tile: WgmmaTile) -> tuple[Expr, Expr]:
    """Return the position of a consumer along m and n of a tile, in tiles of warpgroups."""
    if tile.pipeline.pingpong:
        return num(0), num(0)
    return div(ref(GROUP), tile.groups[1]), mod(ref(GROUP), tile.groups[1])


def on_one_lane(nodes: tuple[Node, ...]) -> Node:
    """Run nodes that issue TMA on one lane of a warp, always the same."""
    return Branch(eq(ref(LANE), num(0)), nodes, elect=True)


def on_one_thread(nodes: tuple[Node, ...]) -> Node:
    """Run nodes that issue TMA on one thread of the warpgroup's first warp."""
    return Branch(eq(ref(WARP), num(0)), (on_one_lane(nodes),))


def warpgroup_threads(consumers: int, body: tuple[Node, ...]) -> tuple[Node, ...]:
    """Loop over the warpgroups (`consumers` and the producer), warps and lanes of a block."""
    body = (Let(THREAD, add(mul(ref(WARP), num(WARP_THREADS)), ref(LANE)), body),)
    for var, extent in ((LANE, WARP_THREADS), (WARP, WARPS), (GROUP, consumers + 1)):
        body = (Loop(var, extent, LoopKind.THREAD, body),)
    return body


def cluster_rank(pipeline: PipelineOptions, rank: Expr) -> Expr:
    """Return the number in the cluster of the block that has this block's k-tiles and that rank among those."""
    return rank if pipeline.cluster_k == 1 else add(mul(ref(K_RANK), num(math.prod(pipeline.cluster))), rank)


def multicast_consumers(pipeline: PipelineOptions, copies: OperandCopies) -> tuple[Expr, ...]:
    """Return the ranks of the cluster's blocks that fill each other's stages with this one, itself among them."""
    rows, columns = pipeline.cluster
    shared = {copy.buffer for copy in copies if isinstance(copy, TmaOperand) and copy.multicast_mask is not None}
    row, column = div(ref(RANK), columns), mod(ref(RANK), columns)
    blocks: list[Expr] = [ref(RANK)]
    if SHARED_A in shared:
        blocks += [add(mul(row, num(columns)), mod(add(column, num(i)), columns)) for i in range(1, columns)]
    if SHARED_B in shared:
        blocks += [add(mul(mod(add(row, num(i)), rows), num(columns)), column) for i in range(1, rows)]
    return tuple(cluster_rank(pipeline, block) for block in blocks) if len(blocks) > 1 else ()
