"""Contraction group and its rProgram → schedule trees for matrix units that a warpgroup drives (`wgmma`).

A block's last warpgroup, the producer, keeps a ring of staged tiles full: by bulk copies (TMA) that one thread asks
for, or by all of its threads. The others multiply from shared memory, asynchronously, and write their own results.
CUTLASS calls this warp-specialised; its persistent form has the next tile loaded while results are written.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from roller_svc.errors import InvariantError
from roller_svc.ir.build import add, div, equal, mod, mul, num, ref
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load, Op, OpKind
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import Arch
from roller_svc.ir.hopper_nodes import ClusterBarrier
from roller_svc.ir.operand import Operand, operands
from roller_svc.ir.rprogram import WARPGROUP, RProgram
from roller_svc.ir.schedule import Barrier, Branch, Compute, Loop, LoopKind, Node, ScheduleTree
from roller_svc.ir.tensor_map import Swizzle, TensorMap
from roller_svc.lower.contraction import View
from roller_svc.lower.mma_epilogue import column_of_word, over_words, row_of_word, word
from roller_svc.lower.mma_fragments import SHARED_A, SHARED_B
from roller_svc.lower.mma_pipeline import ACC
from roller_svc.lower.outputs import Outputs
from roller_svc.lower.stream_k import joined
from roller_svc.lower.wgmma_epilogue import FRAGMENT_WORDS, WarpgroupEpilogue
from roller_svc.lower.wgmma_pipeline import GROUP, WARP, Feeds, Ring, peers, threads
from roller_svc.lower.wgmma_ring import BulkFeed, RingStaging, staged
from roller_svc.lower.wgmma_store import BulkResults
from roller_svc.lower.wgmma_visits import BLOCK, RANK, StreamedSteps, Visits, WholeTiles
from roller_svc.perf.mma_tile import COLUMNS
from roller_svc.perf.stream_k import Stream, partial_tiles, stream
from roller_svc.perf.tma_feed import TmaTile
from roller_svc.perf.wgmma_tile import (
    EPILOGUE_ROWS,
    ROWS,
    WgmmaFeed,
    WgmmaFeeds,
    WgmmaOperand,
    WgmmaTile,
    wgmma_feeds,
)

MAPS = {SHARED_A: ".a_map", SHARED_B: ".b_map"}


def lower_contraction_wgmma(group: KernelGroup, program: RProgram, arch: Arch) -> tuple[ScheduleTree, ...]:
    """A block computes block.m x block.n of the output, a warpgroup thread.m x thread.n of that. One tree, or two where
    the steps of all tiles are streamed."""
    found = _Contraction.of(group, program, arch)
    if program.stream_k:
        work = replace(stream(program), steps=found.tile.walk.steps)  # some of which may be padded
        partial, _ = partial_tiles(group.name, program)
        visits: Visits = StreamedSteps(found.view, work)
        join = joined(partial, work, found.results.outputs)
        return found.tree(visits, found.whole_or_left(partial, work)), ScheduleTree(f"{group.name}_join", join)
    tile, view = found.tile, found.view
    grid = (-(-view.m.extent // tile.m), -(-view.n.extent // tile.n))
    clusters = program.blocks // program.cluster_size
    visits = WholeTiles(view, grid, tile.walk.steps, clusters, program.cluster, program.raster)
    return (found.tree(visits, found.results.nodes()),)


@dataclass(frozen=True, slots=True)
class _Contraction:
    name: str
    view: View
    tile: WgmmaTile
    feeds: Feeds
    maps: tuple[TensorMap, ...]
    results: BulkResults | WarpgroupEpilogue

    @classmethod
    def of(cls, group: KernelGroup, program: RProgram, arch: Arch) -> _Contraction:
        view, factors = View.of(group, program), operands(group)
        found = wgmma_feeds(program.space, program.unit, factors, arch)
        (m, n, k), block, part = (a.name for a in (view.m, view.n, view.k)), program.block, program.thread
        tile = found.tile((block[m], block[n], block[k]), (part[m], part[n]), program.stages, program.cluster)
        sides = _Sides(view, tile, factors, found)
        feeds = (sides.feed(0), sides.feed(1))
        maps = tuple(sides.map_of(feed) for feed in feeds if isinstance(feed, BulkFeed))
        outputs = Outputs(view, tile.m * tile.cluster[0], tile.n * tile.cluster[1])
        stored = BulkResults.of(tile, outputs)
        maps = maps if stored is None else (*maps, stored.map)
        return cls(group.name, view, tile, feeds, maps, stored or WarpgroupEpilogue(tile, outputs))

    def tree(self, visits: Visits, epilogue: tuple[Node, ...]) -> ScheduleTree:
        """One launch; `epilogue`: what consumers do with the sums of a visit."""
        tile = self.tile
        ring = Ring(self.view.dtype, tile, self.feeds, peers(tile.cluster, self.feeds))
        meet: Node = ClusterBarrier() if ring.readers else Barrier()
        is_producer = equal(ref(GROUP), num(tile.consumers))
        nodes: tuple[Node, ...] = (
            ring.initialised(), meet,
            Branch(is_producer, ring.filled(visits), ring.multiplied(visits, epilogue, self.results.last)),
        )  # fmt: skip
        if ring.readers:
            nodes += (meet,)  # no block ends while others still arrive at its barriers
        nodes = visits.in_block(ring.rooms(self.results.rooms(nodes)))
        nodes = (Loop(BLOCK, visits.blocks, LoopKind.BLOCK, threads(tile, nodes)),)
        return ScheduleTree(self.name, nodes, maps=self.maps, cluster=math.prod(tile.cluster))

    def whole_or_left(self, partial: str, work: Stream) -> tuple[Node, ...]:
        """Results of a tile of which the block has all steps; else its sums into memory: the tile that the block began
        with is its first, any other its last."""
        whole = Op(
            OpKind.LAND, (equal(ref(".first"), num(0)), equal(ref(".last"), num(work.steps))), DType.INT8
        )  # fmt: skip
        return (Branch(whole, self.results.nodes(), (self._leave(partial),)),)

    def _leave(self, partial: str) -> Node:
        tile = self.tile
        row = add(mul(div(ref(GROUP), tile.groups[1]), num(tile.group_m)), mul(ref("m.fragment"), num(ROWS)))
        row = add(add(row, mul(ref(WARP), num(EPILOGUE_ROWS))), row_of_word())
        column = add(mul(mod(ref(GROUP), tile.groups[1]), num(tile.group_n)), mul(ref("n.fragment"), num(COLUMNS)))
        register = add(mul(ref("n.fragment"), num(FRAGMENT_WORDS)), word())
        value = Load(ACC, (ref("m.fragment"), register), self.view.dtype)
        part = equal(ref(".first"), num(0))
        nodes = over_words((Compute(partial, (ref(BLOCK), part, row, add(column, column_of_word())), value),))
        columns = Loop("n.fragment", tile.group_n // COLUMNS, LoopKind.UNROLL, nodes)
        return Loop("m.fragment", tile.fragments, LoopKind.UNROLL, (columns,))


@dataclass(frozen=True, slots=True)
class _Sides:
    """What is known of both operands, a (side 0) and b (1)."""

    view: View
    tile: WgmmaTile
    factors: tuple[Operand, Operand]
    found: WgmmaFeeds

    def feed(self, side: int) -> RingStaging | BulkFeed:
        """How the producer brings an operand."""
        operand, tile, view = (self.tile.a, self.tile.b)[side], self.tile, self.view
        axis, extent = ((view.m, tile.m), (view.n, tile.n))[side]
        name, boxes = (SHARED_A, SHARED_B)[side], operand.feed
        if isinstance(boxes, TmaTile):
            first = mul(ref(f"{axis.role.value}.block"), num(extent))
            return self._bulk(side, BulkFeed(name, MAPS[name], boxes, first, num(0)), operand)
        atom = operand.atom_bytes // operand.dtype.bytes
        return RingStaging(name, self.factors[side], staged(operand), boxes, axis, view.k, (extent, tile.k),
                           WARPGROUP, tile.walk, atom)  # fmt: skip

    def map_of(self, feed: BulkFeed) -> TensorMap:
        """The tensor map of its copies."""
        side = (SHARED_A, SHARED_B).index(feed.room)
        source, operand = self.factors[side].source, (self.tile.a, self.tile.b)[side]
        assert source is not None, "what bulk copies bring has a source"
        return feed.tile.tensor_map(feed.map, source.tensor, Swizzle(operand.atom_bytes))

    def _bulk(self, side: int, feed: BulkFeed, operand: WgmmaOperand) -> BulkFeed:
        """Blocks that share the tile each bring a part of it to all of them."""
        rows, columns = self.tile.cluster
        blocks = (columns, rows)[side]
        if blocks == 1 or not self.found.shares(side, operand, blocks):
            return feed
        row, column = div(ref(RANK), columns), mod(ref(RANK), columns)
        if side == 0:
            number, mask = column, _shifted((1 << columns) - 1, mul(row, num(columns)))
        else:
            number, mask = row, _shifted(sum(1 << (i * columns) for i in range(rows)), column)
        part = operand.extent // blocks
        return BulkFeed(feed.room, feed.map, _part(self._known(side), part, self.tile, operand), feed.first,
                        mul(number, num(part)), mask)  # fmt: skip

    def _known(self, side: int) -> WgmmaFeed:
        return (self.found.a, self.found.b)[side]


def _part(feed: WgmmaFeed, extent: int, tile: WgmmaTile, operand: WgmmaOperand) -> TmaTile:
    """Boxes of so much of the tile along m or n."""
    boxes = "it has no source" if feed.tma is None else (
        feed.tma.tile(extent, tile.walk, operand.atom_bytes // operand.dtype.bytes)
    )  # fmt: skip
    if isinstance(boxes, str):
        raise InvariantError(f"a part of {extent} of a shared tile is no box: {boxes}")
    return boxes


def _shifted(bits: int, by: Expr) -> Expr:
    return num(bits << int(by.value)) if isinstance(by, Const) else Op(OpKind.SHL, (num(bits), by), DType.INT32)
