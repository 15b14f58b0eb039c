"""Contraction group and its rProgram → schedule trees for matrix units that a warpgroup drives (`wgmma`).

A block's last warpgroup, the producer, keeps a ring of staged tiles full: by bulk copies (TMA) that one thread asks
for, or by all of its threads. The others multiply from shared memory, asynchronously, and write their own results.
CUTLASS calls this warp-specialised; its persistent form has the next tile loaded while results are written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from roller_svc.analysis.operand import Operand, all_operands
from roller_svc.errors import InvariantError, require
from roller_svc.families.common.gpu.matrix.epilogue import Outputs, column_of_word, over_words, row_of_word, word
from roller_svc.families.common.gpu.matrix.multistage_pipeline import ACC, SHARED_A, SHARED_B
from roller_svc.families.common.gpu.matrix.stream_k import StreamKPartition, partial_tiles, stream_k_partition
from roller_svc.families.common.gpu.matrix.stream_k_fixup import joined
from roller_svc.families.common.gpu.matrix.tile import COLUMNS, LoadClass
from roller_svc.families.common.gpu.warpgroups.epilogue import FRAGMENT_WORDS, BulkResults, WarpgroupEpilogue
from roller_svc.families.common.gpu.warpgroups.mainloop import GROUP, WARP, Feeds, Ring, peers, threads
from roller_svc.families.common.gpu.warpgroups.producer import BulkFeed, HalfStaging, RingStaging, staged
from roller_svc.families.common.gpu.warpgroups.tile import (
    EPILOGUE_ROWS,
    ROWS,
    WgmmaOperand,
    WgmmaOperandLoads,
    WgmmaTile,
    plan_wgmma_loads,
)
from roller_svc.families.common.gpu.warpgroups.tile_scheduler import BLOCK, RANK, StreamedSteps, Visits, WholeTiles
from roller_svc.families.common.gpu.warpgroups.tma_load import TmaTile
from roller_svc.families.common.view import GemmView
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import Arch, HardwareSpec
from roller_svc.ir.index import add, div, eq, mod, mul, num, ref
from roller_svc.ir.rprogram import WARPGROUP_THREADS, RProgram
from roller_svc.ir.schedule import Barrier, Branch, Compute, Loop, LoopKind, Node, ScheduleTree
from roller_svc.ir.schedule_hopper import ClusterBarrier
from roller_svc.ir.tensor_map import Swizzle, TensorMap

_ROOMS = (SHARED_A, SHARED_B)
MAPS = ((".a_map",), (".b_map", ".b_map_2"))  # of what is staged for a, and for b of each sum


def lower(group: KernelGroup, program: RProgram, hw: HardwareSpec) -> tuple[ScheduleTree, ...]:
    """A block computes block.m x block.n of the output, a warpgroup thread.m x thread.n of that. One tree, or two where
    the steps of all tiles are streamed."""
    found = _Contraction.of(group, program, hw.arch)
    if program.stream_k_blocks:
        work = replace(stream_k_partition(program), k_tiles=found.tile.k_order.steps)  # some of which may be padded
        partial, _ = partial_tiles(group.name, program)
        visits: Visits = StreamedSteps(found.view, work)
        join = joined(partial, work, found.results.outputs)
        return found.tree(visits, found.whole_or_left(partial, work)), ScheduleTree(f"{group.name}_join", join)
    tile, view = found.tile, found.view
    grid = (-(-view.m.extent // tile.m), -(-view.n.extent // tile.columns))
    clusters = program.persistent_blocks // program.cluster_size
    visits = WholeTiles(view, grid, tile.k_order.steps, clusters, program.cluster, program.raster)
    return (found.tree(visits, found.results.nodes()),)


@dataclass(frozen=True, slots=True)
class _Contraction:
    name: str
    view: GemmView
    tile: WgmmaTile
    feeds: Feeds
    maps: tuple[TensorMap, ...]
    results: BulkResults | WarpgroupEpilogue

    @classmethod
    def of(cls, group: KernelGroup, program: RProgram, arch: Arch) -> _Contraction:
        view, factors = GemmView.of(group, program), all_operands(group)
        found = plan_wgmma_loads(program.space, program.unit, factors, arch)
        (m, n, k), block, part = (a.name for a in (view.m, view.n, view.k)), program.block, program.thread
        tile = found.tile((block[m], block[n], block[k]), (part[m], part[n]), program.stages, program.cluster)
        sides = _Sides(view, tile, factors, found)
        feeds = (*sides.feeds(0), *sides.feeds(1))
        maps = (*sides.maps(0), *sides.maps(1))
        outputs = Outputs(view, tile.m * tile.cluster[0], tile.columns * tile.cluster[1])
        stored = BulkResults.of(tile, outputs)
        maps = maps if stored is None else (*maps, stored.map)
        return cls(group.name, view, tile, feeds, maps, stored or WarpgroupEpilogue(tile, outputs))

    def tree(self, visits: Visits, epilogue: tuple[Node, ...]) -> ScheduleTree:
        """One launch; `epilogue`: what consumers do with the sums of a visit."""
        tile = self.tile
        ring = Ring(self.view.dtype, tile, self.feeds, peers(tile.cluster, self.feeds))
        meet: Node = ClusterBarrier() if ring.readers else Barrier()
        is_producer = eq(ref(GROUP), num(tile.consumers))
        nodes: tuple[Node, ...] = (
            ring.initialised(), meet,
            Branch(is_producer, ring.filled(visits), ring.multiplied(visits, epilogue, self.results.last)),
        )  # fmt: skip
        if ring.readers:
            nodes += (meet,)  # no block ends while others still arrive at its barriers
        nodes = visits.in_block(ring.rooms(self.results.rooms(nodes)))
        nodes = (Loop(BLOCK, visits.blocks, LoopKind.BLOCK, threads(tile.consumers, nodes)),)
        return ScheduleTree(self.name, nodes, tensor_maps=self.maps, cluster=math.prod(tile.cluster))

    def whole_or_left(self, partial: str, work: StreamKPartition) -> tuple[Node, ...]:
        """Results of a tile of which the block has all steps; else its sums into memory: the tile that the block began
        with is its first, any other its last."""
        whole = Op(
            OpKind.LAND, (eq(ref(".first"), num(0)), eq(ref(".last"), num(work.k_tiles))), DType.INT8
        )  # fmt: skip
        return (Branch(whole, self.results.nodes(), (self._leave(partial),)),)

    def _leave(self, partial: str) -> Node:
        tile = self.tile
        row = add(mul(div(ref(GROUP), tile.groups[1]), num(tile.group_m)), mul(ref("m.fragment"), num(ROWS)))
        row = add(add(row, mul(ref(WARP), num(EPILOGUE_ROWS))), row_of_word())
        column = add(mul(mod(ref(GROUP), tile.groups[1]), num(tile.group_n)), mul(ref("n.fragment"), num(COLUMNS)))
        register = add(mul(ref("n.fragment"), num(FRAGMENT_WORDS)), word())
        value = Load(ACC, (ref("m.fragment"), register), self.view.dtype)
        part = eq(ref(".first"), num(0))
        nodes = over_words((Compute(partial, (ref(BLOCK), part, row, add(column, column_of_word())), value),))
        columns = Loop("n.fragment", tile.group_n // COLUMNS, LoopKind.UNROLL, nodes)
        return Loop("m.fragment", tile.fragments, LoopKind.UNROLL, (columns,))


@dataclass(frozen=True, slots=True)
class _Sides:
    """What is known of the operands of a (side 0) and of b (1), one for each sum."""

    view: GemmView
    tile: WgmmaTile
    factors: tuple[Operand, ...]
    found: WgmmaOperandLoads

    def feeds(self, side: int) -> Feeds:
        """How the producer fills the room of a side."""
        operand, axis = (self.tile.a, self.tile.b)[side], (self.view.m, self.view.n)[side]
        extent = (self.tile.m, self.tile.columns)[side]
        if isinstance(operand.copy_plan, LoadClass):
            return self._staged(side, operand, operand.copy_plan, extent)
        boxes, number, mask = self._boxes(side, operand, operand.extent // operand.num_parts)
        each, sums = operand.extent // operand.num_parts, len(boxes)
        feeds: Feeds = ()
        for part in range(operand.num_parts):
            turn, sum_ = divmod(part, sums)
            first = add(mul(ref(f"{axis.role.value}.block"), num(extent)), num(turn * each))
            own = mul(number, num(boxes[sum_].extent))
            feeds += (BulkFeed(_ROOMS[side], MAPS[side][sum_], boxes[sum_], first, own, mask, part * each),)
        return feeds

    def maps(self, side: int) -> tuple[TensorMap, ...]:
        """The tensor maps of its bulk copies."""
        operand = (self.tile.a, self.tile.b)[side]
        if isinstance(operand.copy_plan, LoadClass):
            return ()
        boxes, _, _ = self._boxes(side, operand, operand.extent // operand.num_parts)
        maps: tuple[TensorMap, ...] = ()
        for name, tile, factor in zip(MAPS[side], boxes, self._factors(side), strict=False):
            tensor = require(factor.source, "source of what bulk copies bring").tensor
            maps += (tile.tensor_map(name, tensor, Swizzle(operand.atom_bytes)),)
        return maps

    def _factors(self, side: int) -> tuple[Operand, ...]:
        return self.factors[1:] if side else self.factors[:1]

    def _staged(self, side: int, operand: WgmmaOperand, load: LoadClass, extent: int) -> Feeds:
        tile, axis = self.tile, (self.view.m, self.view.n)[side]
        atom, factors = operand.atom_bytes // operand.dtype.bytes, self._factors(side)
        each = staged(replace(operand, extent=extent))
        rest = (load, axis, self.view.k, (extent, tile.k), WARPGROUP_THREADS, tile.k_order, atom)
        if len(factors) == 1:
            return (RingStaging(_ROOMS[side], factors[0], each, *rest),)
        together = tile.group_columns
        return tuple(
            HalfStaging(_ROOMS[side], factor, each, *rest, number * together, together)
            for number, factor in enumerate(factors)
        )

    def _boxes(self, side: int, operand: WgmmaOperand, extent: int) -> tuple[tuple[TmaTile, ...], Expr, Expr | None]:
        """Of `extent` points for each sum, or of the part of them that is this block's to bring to all that share the
        tile: its number, and those blocks."""
        rows, columns = self.tile.cluster
        blocks = (columns, rows)[side]
        number: Expr = num(0)
        mask: Expr | None = None
        if blocks > 1 and self.found.can_multicast(side, operand, blocks):
            row, column = div(ref(RANK), columns), mod(ref(RANK), columns)
            extent //= blocks
            if side == 0:
                number, mask = column, _shifted((1 << columns) - 1, mul(row, num(columns)))
            else:
                number, mask = row, _shifted(sum(1 << (i * columns) for i in range(rows)), column)
        found = self.found.boxes(side, extent, self.tile.k, operand.atom_bytes // operand.dtype.bytes)
        if isinstance(found, str):
            raise InvariantError(f"{extent} of a tile that comes by TMA are no box: {found}")
        return found, number, mask


def _shifted(bits: int, by: Expr) -> Expr:
    return num(bits << int(by.value)) if isinstance(by, Const) else Op(OpKind.SHL, (num(bits), by), DType.INT32)
