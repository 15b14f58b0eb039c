"""Blocks of a launch → the tiles that each of them computes, one after the other, and the steps of k that it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from roller_svc.families.common.gpu.matrix.multistage_pipeline import Steps
from roller_svc.families.common.gpu.matrix.stream_k import StreamKPartition
from roller_svc.families.common.gpu.matrix.stream_k_fixup import tile_axes
from roller_svc.families.common.view import GemmView
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Op, OpKind
from roller_svc.ir.index import add, ceil_div, div, max_, min_, mod, mul, num, ref, sub
from roller_svc.ir.schedule import Let, Loop, LoopKind, Node

BLOCK, RANK, VISIT, TILE = ".block", ".rank", ".visit", ".tile"
M_TILE, N_TILE = "m.block", "n.block"


class Visits(Protocol):
    """What one block does. `steps` and `before` hold inside of `around`."""

    @property
    def blocks(self) -> int:
        """How many there are."""

    @property
    def steps(self) -> Steps:
        """Of k, of a visit."""

    @property
    def before(self) -> Expr:
        """Steps that the block has taken in earlier visits."""

    @property
    def all_steps(self) -> Expr:
        """Steps that it takes in all visits."""

    def in_block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes with what is the same in all visits."""

    def around(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """The nodes for each visit, with batch axes and tile numbers along m and n."""


@dataclass(frozen=True, slots=True)
class WholeTiles:
    """A cluster computes one tile for each of its blocks, or several one after the other: it is persistent.

    `grid`: tiles along m and n. `clusters`: of them in the launch, 0 for as many as there are tiles for.
    """

    view: GemmView
    grid: tuple[int, int]
    k_steps: int
    clusters: int
    cluster: tuple[int, int]
    raster: int

    @property
    def blocks(self) -> int:
        launched = self.clusters if self._is_persistent else self._tiles
        return launched * math.prod(self.cluster)

    @property
    def steps(self) -> Steps:
        return Steps(num(0), num(self.k_steps), self.k_steps)

    @property
    def before(self) -> Expr:
        return mul(ref(VISIT), num(self.k_steps)) if self._is_persistent else num(0)

    @property
    def all_steps(self) -> Expr:
        return mul(self._visits, num(self.k_steps)) if self._is_persistent else num(self.k_steps)

    def in_block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        size = math.prod(self.cluster)
        return (Let(RANK, mod(ref(BLOCK), size), nodes),) if size > 1 else nodes

    def around(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        (rows, columns), size = self._cluster_grid, math.prod(self.cluster)
        across = self.cluster[1]
        if size > 1:
            nodes = (Let(N_TILE, add(mul(ref(".n_cluster"), num(across)), mod(ref(RANK), across)), nodes),)
            nodes = (Let(M_TILE, add(mul(ref(".m_cluster"), num(self.cluster[0])), div(ref(RANK), across)), nodes),)
        names = (".m_cluster", ".n_cluster") if size > 1 else (M_TILE, N_TILE)
        nodes = self._rastered(names, nodes)
        stride = rows * columns
        nodes = (Let(".place_in_batch", mod(ref(TILE), stride) if self.view.batch else ref(TILE), nodes),)
        for axis in reversed(self.view.batch):
            value = div(ref(TILE), stride)
            stride *= axis.extent
            nodes = (Let(axis.name, value if stride == self._tiles else mod(value, axis.extent), nodes),)
        own = div(ref(BLOCK), size)
        if not self._is_persistent:
            return (Let(TILE, own, nodes),)
        nodes = (Let(TILE, add(mul(ref(VISIT), num(self.clusters)), own), nodes),)
        return (Loop(VISIT, ceil_div(self._tiles, self.clusters), LoopKind.SERIAL, nodes, stop=self._visits),)

    @property
    def _cluster_grid(self) -> tuple[int, int]:
        return ceil_div(self.grid[0], self.cluster[0]), ceil_div(self.grid[1], self.cluster[1])

    @property
    def _tiles(self) -> int:
        """Of clusters."""
        return math.prod(self._cluster_grid) * math.prod(axis.extent for axis in self.view.batch)

    @property
    def _is_persistent(self) -> bool:
        return 0 < self.clusters < self._tiles

    @property
    def _visits(self) -> Expr:
        """Of this block's cluster."""
        own = div(ref(BLOCK), math.prod(self.cluster))
        return div(sub(num(self._tiles - 1 + self.clusters), own), self.clusters)

    def _rastered(self, names: tuple[str, str], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Tile numbers along m and n: `raster` rows of tiles at a time, down each column first."""
        row, column = names
        rows, columns = self._cluster_grid
        together = min(rows, ceil_div(self.raster, self.cluster[0]))
        place = ref(".place_in_batch")
        if together == 1:
            return (Let(row, div(place, columns), (Let(column, mod(place, columns), nodes),)),)
        band = mod(place, together * columns)
        first = mul(div(place, together * columns), num(together))
        if rows % together == 0:
            return (Let(row, add(first, mod(band, together)), (Let(column, div(band, together), nodes),)),)
        high = ref(".band_rows")
        nodes = (Let(column, Op(OpKind.FLOORDIV, (ref(".in_band"), high), DType.INT32), nodes),)
        nodes = (Let(row, add(ref(".band"), Op(OpKind.MOD, (ref(".in_band"), high), DType.INT32)), nodes),)
        nodes = (Let(".band_rows", min_(sub(num(rows), ref(".band")), num(together)), nodes),)
        return (Let(".band", first, (Let(".in_band", band, nodes),)),)


@dataclass(frozen=True, slots=True)
class StreamedSteps:
    """A block's even share of all tiles' steps (stream-K)."""

    view: GemmView
    work: StreamKPartition

    @property
    def blocks(self) -> int:
        return self.work.blocks

    @property
    def steps(self) -> Steps:
        return Steps(ref(".first"), sub(ref(".last"), ref(".first")), self.work.k_tiles)

    @property
    def before(self) -> Expr:
        return sub(add(mul(ref(TILE), num(self.work.k_tiles)), ref(".first")), ref(".begin"))

    @property
    def all_steps(self) -> Expr:
        return sub(ref(".end"), ref(".begin"))

    def in_block(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        work = self.work
        end = min_(add(ref(".begin"), num(work.k_tiles_per_block)), num(work.tiles * work.k_tiles))
        return (Let(".begin", mul(ref(BLOCK), num(work.k_tiles_per_block)), (Let(".end", end, nodes),)),)

    def around(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        work = self.work
        start = mul(ref(TILE), num(work.k_tiles))
        nodes = (Let(".last", min_(sub(ref(".end"), start), num(work.k_tiles)), nodes),)
        nodes = (Let(".first", max_(sub(ref(".begin"), start), num(0)), nodes),)
        nodes = tile_axes(self.view, work, nodes)
        nodes = (Let(TILE, add(div(ref(".begin"), work.k_tiles), ref(VISIT)), nodes),)
        last = div(sub(ref(".end"), num(1)), work.k_tiles)
        tiles = sub(add(last, num(1)), div(ref(".begin"), work.k_tiles))
        return (Loop(VISIT, work.max_tiles_per_block, LoopKind.SERIAL, nodes, stop=tiles),)


def over_steps(steps: Steps, nodes: tuple[Node, ...]) -> Node:
    """The nodes for each of them, `k.step` counted from the first."""
    limit = None if isinstance(steps.count, Const) else steps.count
    return Loop("k.step", steps.most, LoopKind.SERIAL, nodes, limit)
