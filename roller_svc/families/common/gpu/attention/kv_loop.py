"""Loop over the KV tiles of an attention block under a mask and split KV, as index expressions."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.analysis.tile_bounds import IndexSpan, max_bound_index, min_bound_index
from roller_svc.families.common.gpu.attention.mask import KeyBounds
from roller_svc.families.common.gpu.attention.tile import StagedBuffer, TiledAttention
from roller_svc.families.common.gpu.matrix.multistage_pipeline import KTileRange
from roller_svc.families.common.gpu.matrix.staging import MmaOperandCopy
from roller_svc.families.common.gpu.warpgroups.tile_scheduler import BLOCK, TILE, VISIT
from roller_svc.families.common.view import GemmView
from roller_svc.ir.affine import Affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Select
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import (
    add,
    ceil_div,
    div,
    eq,
    le,
    logical_and,
    lt,
    max_,
    min_,
    mod,
    mul,
    num,
    ref,
    sub,
)
from roller_svc.ir.schedule import AnyThread, Let, Loop, LoopKind, Node

SPLIT = "k.part"
PASS, NEEDS_MASKED = ".pass", ".again"
FIRST, VISIBLE, LAST = ".first_step", ".seen_steps", ".last_step"


class KvTileCopy(MmaOperandCopy):
    """Mixin for copies of K: tiles follow each other along the keys, not along the contracted axis."""

    __slots__ = ()

    def _bind_axes(self, step: Expr, nodes: tuple[Node, ...], offset: Expr | None = None) -> tuple[Node, ...]:
        return (Let("k.block", step, super()._bind_axes(num(0), nodes, offset)),)


@dataclass(frozen=True, slots=True)
class KvTileLoop:
    """A block's KV tiles: those visible to its rows, and masked ones, which count if a row's maximum is low enough."""

    tile: TiledAttention[StagedBuffer]
    rows: TileAxis
    keys: TileAxis
    bounds: KeyBounds

    @property
    def kv_tiles(self) -> int:
        return ceil_div(self.keys.extent, self.tile.kv)

    @property
    def periods(self) -> int:
        """Return how often the bounds of visible keys hold."""
        return 1 if self.bounds.period is None else self.keys.extent // self.bounds.period

    @property
    def tiles_per_split(self) -> int:
        """Return the number of KV tiles of a block under split KV."""
        return ceil_div(self.kv_tiles, self.tile.kv_splits)

    def bind_bounds(self, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Bind the first tile, the first masked tile after the visible ones, and the end of the block's tiles."""
        begin: Expr = mul(ref(SPLIT), num(self.tiles_per_split)) if self.tile.kv_splits > 1 else num(0)
        end: Expr = num(self.kv_tiles // self.periods)
        if self.tile.kv_splits > 1:
            end = min_(add(begin, num(self.tiles_per_split)), num(self.kv_tiles))
        first = begin
        for lower in self.bounds.lowers:
            first = max_(first, div(max_(self._min_bound(lower), num(0)), self.tile.kv))
        visible: Expr = ref(LAST)
        for upper in self.bounds.uppers:
            count = div(add(self._max_bound(upper), num(self.tile.kv)), self.tile.kv)
            visible = min_(visible, max_(count, ref(FIRST)))
        for length in self.bounds.lengths:
            keys = min_(max_(length, num(0)), num(self.keys.extent))
            count = div(add(keys, num(self.tile.kv - 1)), self.tile.kv)
            visible = min_(visible, max_(count, ref(FIRST)))
        return (Let(LAST, end, (Let(FIRST, first, (Let(VISIBLE, visible, nodes),)),)),)

    @property
    def visible(self) -> KTileRange:
        return self._range(ref(FIRST), ref(VISIBLE))

    @property
    def masked(self) -> KTileRange:
        return self._range(ref(VISIBLE), ref(LAST))

    def is_unmasked(self, step: Expr, exact: KeyBounds) -> Expr | None:
        """Return the condition that every row of the block sees all keys of the tile; None if it always holds.

        `exact` holds the bounds of the visible keys.
        """
        keys = self.tile.kv
        end = mul(add(step, num(1)), num(keys))
        condition: Expr | None = None
        if self.keys.extent % keys:
            condition = le(end, num(self.keys.extent))
        for upper in exact.uppers:
            condition = logical_and(lt(sub(end, num(1)), add(self._min_bound(upper), num(1))), condition)
        for lower in exact.lowers:
            condition = logical_and(le(self._max_bound(lower), mul(step, num(keys))), condition)
        return condition

    def passes(
        self, needs_masked_tiles: Expr, work: Callable[[KTileRange, Expr], tuple[Node, ...]], threads: int | None = None
    ) -> tuple[Node, ...]:
        """Process the visible tiles, then the masked ones if any thread reports `needs_masked_tiles`.

        Masked tiles count if the scores of some row are too small to make the masked ones vanish. `work` gets the tiles
        of a pass and the number of tiles in earlier passes. `threads` is passed on to `AnyThread`.
        """
        visible, masked = self.visible, self.masked
        if not self.bounds.may_need_masked_tiles:
            return work(visible, num(0))
        first = eq(ref(PASS), num(0))
        begin = Select(first, visible.first, masked.first, DType.INT32)
        count = Select(first, visible.count, mul(ref(NEEDS_MASKED), masked.count), DType.INT32)
        before = Select(first, num(0), visible.count, DType.INT32)
        nodes = work(KTileRange(ref(".begin"), ref(".count"), self.tiles_per_split), ref(".before"))
        nodes = (Let(".begin", begin, (Let(".count", count, (Let(".before", before, nodes),)),)),)
        nodes = (AnyThread(NEEDS_MASKED, needs_masked_tiles, nodes, threads),)
        return (Loop(PASS, 2, LoopKind.SERIAL, nodes),)

    def block_loops(self, view: GemmView, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Loop over blocks: those that share K and V are adjacent, and under a mask those with most keys come first."""
        tile = self.tile
        count = ceil_div(view.m.extent, tile.m)
        if self.bounds.uppers:
            nodes = (Let("m.block", sub(num(count - 1), ref("m.position")), nodes),)
            nodes = (Loop("m.position", count, LoopKind.BLOCK, nodes),)
        else:
            nodes = (Loop("m.block", count, LoopKind.BLOCK, nodes),)
        nodes = (Loop("n.block", ceil_div(view.n.extent, tile.n), LoopKind.BLOCK, nodes),)
        if tile.kv_splits > 1:
            nodes = (Loop(SPLIT, tile.kv_splits, LoopKind.BLOCK, nodes),)
        for batch in reversed(view.batch):
            nodes = (Loop(batch.name, batch.extent, LoopKind.BLOCK, nodes),)
        return nodes

    def for_each_tile(self, view: GemmView, block_loops: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
        """Loop over the tiles of a persistent block: tiles i, i + blocks, ... of block i, ordered as `block_loops`."""
        rows, columns = ceil_div(view.m.extent, self.tile.m), ceil_div(view.n.extent, self.tile.n)
        loops = [(axis.name, axis.extent) for axis in view.batch] + [("n.block", columns), ("m.block", rows)]
        tiles = stride = math.prod(extent for _, extent in loops)
        for name, extent in loops:
            stride //= extent
            index = div(ref(TILE), stride)
            nodes = (Let(name, index if stride * extent == tiles else mod(index, extent), nodes),)
        nodes = (Let(TILE, add(mul(ref(VISIT), num(block_loops)), ref(BLOCK)), nodes),)
        limit = div(sub(num(tiles - 1 + block_loops), ref(BLOCK)), block_loops)
        return (Loop(VISIT, ceil_div(tiles, block_loops), LoopKind.SERIAL, nodes, stop=limit),)

    def _range(self, first: Expr, last: Expr) -> KTileRange:
        bounds = self.bounds
        if self.tile.kv_splits == 1 and not bounds.uppers and not bounds.lowers and not bounds.lengths:
            return KTileRange(num(0), num(self.kv_tiles), self.kv_tiles)
        count = sub(last, first)
        if self.periods == 1:
            return KTileRange(first, count, self.tiles_per_split)
        period = (count, self.kv_tiles // self.periods)
        return KTileRange(first, mul(count, num(self.periods)), self.tiles_per_split, period)

    def _min_bound(self, bound: Affine) -> Expr:
        return min_bound_index(bound, (self._rows,))

    def _max_bound(self, bound: Affine) -> Expr:
        """Return the maximum of the bound over the block's rows."""
        return max_bound_index(bound, (self._rows,))

    @property
    def _rows(self) -> IndexSpan:
        return IndexSpan.of_tile(self.rows, self.tile.m, ref("m.block"))
