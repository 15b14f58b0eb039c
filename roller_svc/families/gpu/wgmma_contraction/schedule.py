"""Contraction group and its rProgram → schedule trees for tensor cores driven by a warpgroup (`wgmma`).

The kernel is warp-specialised (CUTLASS). A block's last warpgroup, the producer, fills pipeline stages by TMA loads
that one thread issues, or by copies of all its threads. The consumer warpgroups multiply asynchronously from shared
memory and store their own outputs. Persistent kernels load the next tile during the epilogue.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from roller_svc.analysis.operand import Operand, all_operands
from roller_svc.errors import InvariantError, require
from roller_svc.families.common.gpu.matrix.block_scales import BlockScales
from roller_svc.families.common.gpu.matrix.epilogue import EpilogueStore
from roller_svc.families.common.gpu.matrix.guarded_k_tiles import GuardedKTiles
from roller_svc.families.common.gpu.matrix.stream_k import StreamKPartition, partial_tiles, stream_k_partition
from roller_svc.families.common.gpu.matrix.stream_k_fixup import fixup_tiles
from roller_svc.families.common.gpu.matrix.tile import SHARED_A, SHARED_B, LoadClass
from roller_svc.families.common.gpu.warpgroups.cluster_reduction import BARRIERS, ClusterReductionEpilogue
from roller_svc.families.common.gpu.warpgroups.epilogue import (
    TmaStoreEpilogue,
    WarpgroupEpilogue,
    for_each_accumulator,
)
from roller_svc.families.common.gpu.warpgroups.mainloop import (
    GROUP,
    WARP,
    OperandCopies,
    WgmmaMainloop,
    cluster_rank,
    group_in_tile,
    multicast_consumers,
    warpgroup_threads,
)
from roller_svc.families.common.gpu.warpgroups.producer import (
    DualGemmProducerCopy,
    PrefetchedProducerCopy,
    ProducerCopy,
    TmaOperand,
    staged_tile,
)
from roller_svc.families.common.gpu.warpgroups.result_store import EPILOGUE_ROWS
from roller_svc.families.common.gpu.warpgroups.tile import (
    ROWS,
    WgmmaOperand,
    WgmmaOperandLoads,
    WgmmaTile,
)
from roller_svc.families.common.gpu.warpgroups.tile_scheduler import (
    BLOCK,
    M_TILE,
    N_TILE,
    RANK,
    PersistentTiles,
    PingpongTiles,
    StreamKTiles,
    TileScheduler,
)
from roller_svc.families.common.gpu.warpgroups.tma_load import TmaTile
from roller_svc.families.common.view import GemmView
from roller_svc.families.gpu.wgmma_contraction.workload import WgmmaFacts
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Op, OpKind
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, div, eq, mod, mul, num, ref
from roller_svc.ir.rprogram import WARPGROUP_THREADS, PipelineOptions, RProgram
from roller_svc.ir.schedule import Barrier, Branch, Compute, Loop, LoopKind, Node, ScheduleTree
from roller_svc.ir.schedule_hopper import ClusterBarrier
from roller_svc.ir.tensor_map import Swizzle, TensorMap
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import wrap_in_storages

_BUFFERS = (SHARED_A, SHARED_B)
MAPS = ((".a_map",), (".b_map", ".b_map_2"))  # tensor maps of A, and of B for each accumulator


def lower(group: KernelGroup, program: RProgram, workload: Workload[WgmmaFacts]) -> tuple[ScheduleTree, ...]:
    """Return one tree, or two under stream-K.

    A block computes block.m x block.n of the output, a warpgroup thread.m x thread.n of that.
    """
    group = replace(group, space=program.space)
    contraction = _Contraction.of(group, program, workload.facts.loads)
    if program.pipeline.stream_k_blocks:
        # the kernel's k-tiles may include padded ones
        work = replace(stream_k_partition(program), k_tiles=contraction.tile.k_order.steps)
        partial, _ = partial_tiles(group.name, program)
        scheduler: TileScheduler = StreamKTiles(contraction.view, work)
        fixup = fixup_tiles(partial, work, contraction.results.outputs)
        mainloop = contraction.tree(scheduler, contraction.store_or_leave_partial(partial, work))
        return mainloop, ScheduleTree(f"{group.name}_join", fixup)
    tile, view = contraction.tile, contraction.view
    grid = (-(-view.m.extent // tile.m), -(-view.n.extent // tile.columns))
    tiles = (view, grid, tile.k_order.steps, program.pipeline)
    scheduler = PersistentTiles(*tiles)
    consumer = PingpongTiles(*tiles, ref(GROUP)) if program.pipeline.pingpong else scheduler
    if group.space.k_bounds is not None:
        if program.pipeline != PipelineOptions(program.pipeline.stages, program.pipeline.raster):
            raise InvariantError(f"persistent blocks, clusters and ping-pong do not support guards along k, got {group.name}")
        guarded = GuardedKTiles(group.space, (view.m, view.n), (tile.m, tile.columns), tile.k, tile.k_order.steps)
        scheduler = consumer = PersistentTiles(*tiles, guarded=guarded)
    return (contraction.tree(scheduler, contraction.results.nodes(), consumer),)


@dataclass(frozen=True, slots=True)
class _Contraction:
    name: str
    view: GemmView
    tile: WgmmaTile
    copies: OperandCopies
    maps: tuple[TensorMap, ...]
    results: TmaStoreEpilogue | WarpgroupEpilogue | ClusterReductionEpilogue
    scales: BlockScales | None

    @classmethod
    def of(cls, group: KernelGroup, program: RProgram, loads: WgmmaOperandLoads) -> _Contraction:
        view, operands = GemmView.of(group, program.space), all_operands(group)
        (m, n, k), block, thread = (a.name for a in (view.m, view.n, view.k)), program.block, program.thread
        tile = loads.tile((block[m], block[n], block[k]), (thread[m], thread[n]), program.pipeline)
        sides = _OperandSides(view, tile, operands, loads)
        copies = (*sides.copies(0), *sides.copies(1))
        maps = (*sides.maps(0), *sides.maps(1))
        outputs = EpilogueStore(view, tile.m * tile.pipeline.cluster[0], tile.columns * tile.pipeline.cluster[1])
        scales = _block_scales(view, tile)
        if tile.pipeline.cluster_k > 1:
            return cls(group.name, view, tile, copies, maps, ClusterReductionEpilogue(tile, outputs), scales)
        if (store := tile.tma_store) is None:
            return cls(group.name, view, tile, copies, maps, WarpgroupEpilogue(tile, outputs), scales)
        return cls(group.name, view, tile, copies, (*maps, store.tensor_map), TmaStoreEpilogue(tile, outputs, store), scales)

    def tree(self, scheduler: TileScheduler, epilogue: tuple[Node, ...], of_consumer: TileScheduler | None = None) -> ScheduleTree:
        """Return one launch; `epilogue` is what consumers do with the accumulators of a tile.

        Args:
            of_consumer: Tiles of a consumer, where it does not compute all tiles of the block.
        """
        tile = self.tile
        consumers_of_multicast = multicast_consumers(tile.pipeline, self.copies)
        mainloop = WgmmaMainloop(self.view.dtype, tile, self.copies, consumers_of_multicast, self.scales)
        synchronise: Node = ClusterBarrier() if mainloop.consumers_of_multicast else Barrier()
        is_producer = eq(ref(GROUP), num(tile.consumers))
        producer = mainloop.producer_loop(scheduler)
        if tile.pipeline.cluster_k > 1:
            producer += BARRIERS
        consumer = mainloop.consumer_loop(of_consumer or scheduler, epilogue, self.results.finish)
        nodes: tuple[Node, ...] = (
            mainloop.init_barriers(), synchronise,
            Branch(is_producer, producer, consumer),
        )  # fmt: skip
        if mainloop.consumers_of_multicast and tile.pipeline.cluster_k == 1:
            nodes += (ClusterBarrier(),)  # no block may exit while others arrive at its barriers
        nodes = scheduler.bind_block(wrap_in_storages(tile.shared_buffers, nodes))
        nodes = (Loop(BLOCK, scheduler.blocks, LoopKind.BLOCK, warpgroup_threads(tile.consumers, nodes)),)
        cluster = tile.pipeline.cluster_size
        return ScheduleTree(self.name, nodes, tensor_maps=self.maps, cluster=cluster)

    def store_or_leave_partial(self, partial: str, work: StreamKPartition) -> tuple[Node, ...]:
        """Run the epilogue of a tile if the block has all its k-tiles, else store a partial tile.

        The block's first tile is in slot 0, any later one in slot 1.
        """
        is_complete = Op(OpKind.LAND, (eq(ref(".first"), num(0)), eq(ref(".last"), num(work.k_tiles))), DType.INT8)
        return (Branch(is_complete, self.results.nodes(), (self._store_partial(partial),)),)

    def _store_partial(self, partial: str) -> Node:
        part = eq(ref(".first"), num(0))
        return for_each_accumulator(
            self.tile,
            lambda row, column, value: Compute(partial, (ref(BLOCK), part, row, column), value),
            self.view.dtype,
        )


@dataclass(frozen=True, slots=True)
class _OperandSides:
    """How A (side 0) and B (side 1, one operand for each accumulator) are copied."""

    view: GemmView
    tile: WgmmaTile
    operands: tuple[Operand, ...]
    loads: WgmmaOperandLoads

    def copies(self, side: int) -> OperandCopies:
        """Return how the producer fills the buffer of a side."""
        operand, axis = (self.tile.a, self.tile.b)[side], (self.view.m, self.view.n)[side]
        extent = (self.tile.m, self.tile.columns)[side]
        if isinstance(operand.copy_plan, LoadClass):
            return self._producer_copies(side, operand, operand.copy_plan, extent)
        boxes, number, mask = self._boxes(side, operand, operand.extent // operand.num_parts)
        part_extent, sums = operand.extent // operand.num_parts, len(boxes)
        copies: OperandCopies = ()
        for part in range(operand.num_parts):
            group, accumulator = divmod(part, sums)
            first = add(mul(ref(f"{axis.role.value}.block"), num(extent)), num(group * part_extent))
            own = mul(number, num(boxes[accumulator].extent))
            copies += (
                TmaOperand(_BUFFERS[side], MAPS[side][accumulator], boxes[accumulator], first, own, mask, part * part_extent),
            )
        return copies

    def maps(self, side: int) -> tuple[TensorMap, ...]:
        """Return the tensor maps of a side's TMA loads."""
        operand = (self.tile.a, self.tile.b)[side]
        if isinstance(operand.copy_plan, LoadClass):
            return ()
        boxes, _, _ = self._boxes(side, operand, operand.extent // operand.num_parts)
        maps: tuple[TensorMap, ...] = ()
        for name, tile, source in zip(MAPS[side], boxes, self._operands_of(side), strict=False):
            tensor = require(source.source, "source of a TMA operand").tensor
            maps += (tile.tensor_map(name, tensor, Swizzle(operand.atom_bytes)),)
        return maps

    def _operands_of(self, side: int) -> tuple[Operand, ...]:
        return self.operands[1:] if side else self.operands[:1]

    def _producer_copies(self, side: int, operand: WgmmaOperand, load: LoadClass, extent: int) -> OperandCopies:
        tile, axis = self.tile, (self.view.m, self.view.n)[side]
        atom, operands = operand.atom_bytes // operand.dtype.bytes, self._operands_of(side)
        part_extent = staged_tile(replace(operand, extent=extent))
        copy_args = (load, axis, self.view.k, (extent, tile.k), WARPGROUP_THREADS, tile.k_order, atom)
        if len(operands) == 1 and operand.prefetch is not None:
            return (PrefetchedProducerCopy(_BUFFERS[side], operands[0], part_extent, *copy_args, operand.prefetch),)
        if len(operands) == 1:
            return (ProducerCopy(_BUFFERS[side], operands[0], part_extent, *copy_args),)
        columns = tile.group_columns
        return tuple(
            DualGemmProducerCopy(_BUFFERS[side], source, part_extent, *copy_args, number * columns, columns)
            for number, source in enumerate(operands)
        )

    def _boxes(self, side: int, operand: WgmmaOperand, extent: int) -> tuple[tuple[TmaTile, ...], Expr, Expr | None]:
        """Return TMA tiles of `extent` points for each accumulator, or this block's multicast slice of them.

        The second value is the slice's number, the third the mask of the blocks that share the tile.
        """
        rows, columns = self.tile.pipeline.cluster
        blocks = (columns, rows)[side]
        number: Expr = num(0)
        mask: Expr | None = None
        if blocks > 1 and self.loads.can_multicast(side, operand, blocks):
            row, column = div(ref(RANK), columns), mod(ref(RANK), columns)
            extent //= blocks
            if side == 0:
                number, first, bits = column, mul(row, num(columns)), (1 << columns) - 1
            else:
                number, first, bits = row, column, sum(1 << (i * columns) for i in range(rows))
            mask = _shifted(bits, cluster_rank(self.tile.pipeline, first))
        loads = self.loads.boxes(side, extent, self.tile.k, operand.atom_bytes // operand.dtype.bytes)
        if isinstance(loads, str):
            raise InvariantError(f"no TMA box for {extent} rows of a tile: {loads}")
        return loads, number, mask


def _block_scales(view: GemmView, tile: WgmmaTile) -> BlockScales | None:
    """Return the scales of a warp's part of a k-tile's sums."""
    if tile.scale_runs is None or (registers := tile.scales) is None:
        return None
    group_row, group_column = group_in_tile(tile)
    row = add(mul(ref(M_TILE), num(tile.m)), mul(group_row, num(tile.group_m)))
    row = add(add(row, mul(ref("m.fragment"), num(ROWS))), mul(ref(WARP), num(EPILOGUE_ROWS)))
    column = add(mul(ref(N_TILE), num(tile.columns)), mul(group_column, num(tile.group_columns)))
    rows, columns = tile.pipeline.cluster
    return BlockScales(view, registers, row, column, (tile.m * rows, tile.columns * columns), tile.scale_runs.sum_dtype)


def _shifted(bits: int, by: Expr) -> Expr:
    return num(bits << int(by.value)) if isinstance(by, Const) else Op(OpKind.SHL, (num(bits), by), DType.INT32)
