"""Tile schedulers of wgmma kernels: the output tiles and k-tiles that each block computes."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Protocol

from roller_svc.analysis.tile_bounds import grows_along
from roller_svc.families.common.gpu.matrix.guarded_k_tiles import GuardedKTiles
from roller_svc.families.common.gpu.matrix.multistage_pipeline import KTileRange
from roller_svc.families.common.gpu.matrix.stream_k import StreamKPartition
from roller_svc.families.common.gpu.matrix.stream_k_fixup import bind_tile
from roller_svc.families.common.view import GemmView
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Op, OpKind
from roller_svc.ir.index import add, ceil_div, div, lt, max_, min_, mod, mul, num, ref, sub
from roller_svc.ir.rprogram import PipelineOptions
from roller_svc.ir.schedule import Branch, Let, Loop, LoopKind, Node

BLOCK, RANK, VISIT, TILE = ".block", ".rank", ".visit", ".tile"
LIMIT = ".limit"  # of the cluster tiles
K_RANK = ".k_rank"  # part of the k-tiles; RANK numbers the blocks of the cluster that have the same part
M_TILE, N_TILE = "m.block", "n.block"
STEP, SLOT = "k.step", ".word_slot"  # k-tile of the tile; registers of its words


class TileScheduler(Protocol):
    """Tiles of one block; `k_tiles` and `k_tiles_before` are valid inside `for_each_tile`."""

    @property
    def blocks(self) -> int:
        """Return the number of blocks."""

    @property
    def k_tiles(self) -> KTileRange:
        """Return the k-tiles of the current tile."""

    @property
    def k_tiles_before(self) -> Expr:
        """Return the k-tiles of the block's earlier tiles."""

    @property
    def total_k_tiles(self) -> Expr:
        """Return the k-tiles of all tiles of the block."""

    def bind_block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind what all tiles of a block share around the nodes."""

    def for_each_tile(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Loop over the block's tiles; bind batch axes and tile numbers along m and n."""


@dataclass(frozen=True, slots=True)
class PersistentTiles:
    """A cluster computes one tile for each of its blocks, or several sequentially (persistent kernel).

    With `cluster_k`, as many blocks share a tile, each with an even part of its k-tiles. Where data limit the batches,
    tiles of later ones, which are the last, are left out. Under a guard along k, a block computes one tile.
    """

    view: GemmView
    grid: tuple[int, int]  # tiles along m and n
    k_steps: int
    pipeline: PipelineOptions
    guarded: GuardedKTiles | None = field(default=None, kw_only=True)

    @property
    def blocks(self) -> int:
        launched = self._clusters if self._is_persistent else self._tiles
        return launched * self.pipeline.cluster_size

    @property
    def k_tiles(self) -> KTileRange:
        steps, parts = self.k_steps, self.pipeline.cluster_k
        if self.guarded is not None:
            return self.guarded.range
        if parts == 1:
            return KTileRange(num(0), num(steps), steps)
        if steps % parts == 0:
            return KTileRange(mul(ref(K_RANK), num(steps // parts)), num(steps // parts), steps // parts)
        return KTileRange(ref(".first"), sub(ref(".last"), ref(".first")), ceil_div(steps, parts))

    @property
    def k_tiles_before(self) -> Expr:
        return mul(ref(VISIT), num(self.k_steps)) if self._is_persistent else num(0)

    @property
    def total_k_tiles(self) -> Expr:
        return mul(self._tiles_of_block, num(self.k_steps)) if self._is_persistent else self.k_tiles.count

    def bind_block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        size = math.prod(self.pipeline.cluster)
        if self.guarded is not None:
            return (Let(TILE, ref(BLOCK), self.bind_tile(self.guarded.bind(nodes))),)
        if self._limit is not None:
            nodes = (Let(LIMIT, self._limit, nodes),)
        if self.k_steps % self.pipeline.cluster_k:
            nodes = (Let(".last", self._first_k_tile(add(ref(K_RANK), num(1))), nodes),)
            nodes = (Let(".first", self._first_k_tile(ref(K_RANK)), nodes),)
        if self.pipeline.cluster_k > 1:
            nodes = (Let(K_RANK, div(mod(ref(BLOCK), self.pipeline.cluster_size), size), nodes),)
        return (Let(RANK, mod(ref(BLOCK), size), nodes),) if size > 1 else nodes

    def for_each_tile(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        own = div(ref(BLOCK), self.pipeline.cluster_size)
        if self.guarded is not None:
            return nodes
        if not self._is_persistent:
            return (Let(TILE, own, self.bind_tile(nodes)),)
        nodes = (Let(TILE, add(mul(ref(VISIT), num(self._clusters)), own), self.bind_tile(nodes)),)
        return (Loop(VISIT, self._max_tiles_of_block, LoopKind.SERIAL, nodes, stop=self._tiles_of_block),)

    def bind_tile(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind batch axes and tile numbers along m and n of the current tile."""
        (rows, columns), size = self._cluster_grid, math.prod(self.pipeline.cluster)
        across = self.pipeline.cluster[1]
        if size > 1:
            nodes = (Let(N_TILE, add(mul(ref(".n_cluster"), num(across)), mod(ref(RANK), across)), nodes),)
            nodes = (Let(M_TILE, add(mul(ref(".m_cluster"), num(self.pipeline.cluster[0])), div(ref(RANK), across)), nodes),)
        names = [".m_cluster", ".n_cluster"] if size > 1 else [M_TILE, N_TILE]
        for side, (axis, tiles) in enumerate(zip((self.view.m, self.view.n), self.grid, strict=True)):
            if self.guarded is not None and grows_along(self.guarded.space, axis):  # the longest tiles first
                position = f"{names[side]}.position"
                nodes = (Let(names[side], sub(num(tiles - 1), ref(position)), nodes),)
                names[side] = position
        nodes = self._bind_raster((names[0], names[1]), nodes)
        stride = rows * columns
        nodes = (Let(".place_in_batch", mod(ref(TILE), stride) if self.view.batch else ref(TILE), nodes),)
        for axis in reversed(self.view.batch):
            value = div(ref(TILE), stride)
            stride *= axis.extent
            nodes = (Let(axis.name, value if stride == self._tiles else mod(value, axis.extent), nodes),)
        return nodes

    def _first_k_tile(self, part: Expr) -> Expr:
        """Return the first k-tile of a part; parts differ by at most one k-tile."""
        return div(mul(part, num(self.k_steps)), self.pipeline.cluster_k)

    @property
    def _clusters(self) -> int:
        """Return the clusters of the launch."""
        return self.pipeline.persistent_blocks // self.pipeline.cluster_size or self._tiles

    @property
    def _cluster_grid(self) -> tuple[int, int]:
        return ceil_div(self.grid[0], self.pipeline.cluster[0]), ceil_div(self.grid[1], self.pipeline.cluster[1])

    @property
    def _tiles(self) -> int:
        """Return the number of cluster tiles."""
        return math.prod(self._cluster_grid) * math.prod(axis.extent for axis in self.view.batch)

    @property
    def _is_persistent(self) -> bool:
        return self._clusters < self._tiles or self._limit is not None

    @property
    def _limit(self) -> Expr | None:
        """Return the number of cluster tiles that data limit, or None for all."""
        batches = self.view.group.num_batches
        return None if batches is None else mul(batches, num(self._tiles // self.view.batch[0].extent))

    @property
    def _max_tiles_of_block(self) -> int:
        return ceil_div(self._tiles, self._clusters)

    @property
    def _tiles_of_block(self) -> Expr:
        """Return the number of tiles of this block's cluster."""
        own = div(ref(BLOCK), math.prod(self.pipeline.cluster))
        if self._limit is not None:
            return div(sub(add(ref(LIMIT), num(self._clusters - 1)), own), self._clusters)
        return div(sub(num(self._tiles - 1 + self._clusters), own), self._clusters)

    def _bind_raster(self, names: tuple[str, str], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind tile numbers along m and n: groups of `raster` tile rows, column by column."""
        row, column = names
        rows, columns = self._cluster_grid
        group_rows = min(rows, ceil_div(self.pipeline.raster, self.pipeline.cluster[0]))
        position = ref(".place_in_batch")
        if group_rows == 1:
            return (Let(row, div(position, columns), (Let(column, mod(position, columns), nodes),)),)
        in_group = mod(position, group_rows * columns)
        first = mul(div(position, group_rows * columns), num(group_rows))
        if rows % group_rows == 0:
            return (Let(row, add(first, mod(in_group, group_rows)), (Let(column, div(in_group, group_rows), nodes),)),)
        rows_of_group = ref(".band_rows")
        nodes = (Let(column, Op(OpKind.FLOORDIV, (ref(".in_band"), rows_of_group), DType.INT32), nodes),)
        nodes = (Let(row, add(ref(".band"), Op(OpKind.MOD, (ref(".in_band"), rows_of_group), DType.INT32)), nodes),)
        nodes = (Let(".band_rows", min_(sub(num(rows), ref(".band")), num(group_rows)), nodes),)
        return (Let(".band", first, (Let(".in_band", in_group, nodes),)),)


@dataclass(frozen=True, slots=True)
class PingpongTiles(PersistentTiles):
    """The tiles of a persistent block that consumer `warpgroup`, one of two, computes: every second one.

    Tiles that the other consumer computes have their k-tiles in the pipeline between those of this one.
    """

    warpgroup: Expr

    def for_each_tile(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        own = div(ref(BLOCK), math.prod(self.pipeline.cluster))
        nodes = (Let(TILE, add(mul(ref(VISIT), num(self._clusters)), own), self.bind_tile(nodes)),)
        nodes = (Let(VISIT, add(mul(ref(".own_visit"), num(2)), self.warpgroup), nodes),)
        own_visits = div(sub(add(self._tiles_of_block, num(1)), self.warpgroup), 2)
        return (Loop(".own_visit", ceil_div(self._max_tiles_of_block, 2), LoopKind.SERIAL, nodes, stop=own_visits),)


@dataclass(frozen=True, slots=True)
class StreamKTiles:
    """A block's even share of the k-tiles of all tiles (stream-K)."""

    view: GemmView
    work: StreamKPartition

    @property
    def blocks(self) -> int:
        return self.work.blocks

    @property
    def k_tiles(self) -> KTileRange:
        return KTileRange(ref(".first"), sub(ref(".last"), ref(".first")), self.work.k_tiles)

    @property
    def k_tiles_before(self) -> Expr:
        return sub(add(mul(ref(TILE), num(self.work.k_tiles)), ref(".first")), ref(".begin"))

    @property
    def total_k_tiles(self) -> Expr:
        return sub(ref(".end"), ref(".begin"))

    def bind_block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        work = self.work
        end = min_(add(ref(".begin"), num(work.k_tiles_per_block)), num(work.tiles * work.k_tiles))
        return (Let(".begin", mul(ref(BLOCK), num(work.k_tiles_per_block)), (Let(".end", end, nodes),)),)

    def for_each_tile(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        work = self.work
        start = mul(ref(TILE), num(work.k_tiles))
        nodes = (Let(".last", min_(sub(ref(".end"), start), num(work.k_tiles)), nodes),)
        nodes = (Let(".first", max_(sub(ref(".begin"), start), num(0)), nodes),)
        nodes = bind_tile(self.view, work, nodes)
        nodes = (Let(TILE, add(div(ref(".begin"), work.k_tiles), ref(VISIT)), nodes),)
        last = div(sub(ref(".end"), num(1)), work.k_tiles)
        tiles = sub(add(last, num(1)), div(ref(".begin"), work.k_tiles))
        return (Loop(VISIT, work.max_tiles_per_block, LoopKind.SERIAL, nodes, stop=tiles),)


def k_tile_loop(steps: KTileRange, nodes: tuple[Node, ...], slots: int = 1) -> Node:
    """Loop over the k-tiles; `k.step` counts from the first.

    Args:
        slots: k-tiles of an iteration, unrolled; `.word_slot` is the number of the k-tile modulo `slots`.
    """
    stop = None if isinstance(steps.count, Const) else steps.count
    if slots == 1:
        return Loop(STEP, steps.max_count, LoopKind.SERIAL, nodes, stop)
    if stop is not None or steps.max_count % slots:
        nodes = (Branch(lt(ref(STEP), steps.count), nodes),)
    nodes = (Let(STEP, add(mul(ref(".k_group"), num(slots)), ref(SLOT)), nodes),)
    # register buffers need constant indices: those of loops that the compiler unrolls come too late for it
    unrolled = tuple(Let(SLOT, num(slot), nodes) for slot in range(slots))
    groups = None if stop is None else div(add(stop, num(slots - 1)), slots)
    return Loop(".k_group", ceil_div(steps.max_count, slots), LoopKind.SERIAL, unrolled, groups)
