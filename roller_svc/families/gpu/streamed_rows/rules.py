"""Tiles of streamed products: warps along n and k, pages of some KB, as many stages as shared memory has room for."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from roller_svc.construct.rules import Enumerated, Shape, ThreadTile, replaced, subsample
from roller_svc.construct.scale_up import SearchTrace
from roller_svc.families.gpu.streamed_rows.cost import ring_resources
from roller_svc.families.gpu.streamed_rows.product import COPY_BYTES
from roller_svc.families.gpu.streamed_rows.workload import FRAGMENT_ROWS, RingTile, StreamedRows, ring_tile
from roller_svc.ir.rprogram import PipelineOptions
from roller_svc.ir.search import BrokenRule, SearchKind, TileMetrics, Visit, check_limit
from roller_svc.perf.occupancy import blocks_per_core, broken_limits
from roller_svc.perf.workload import Workload

WARPS = ((1, 8), (2, 4), (1, 4), (4, 2), (2, 8), (1, 16))  # of a block along n and k
PAGE_BYTES = (16384, 8192, 32768)  # at most
RESIDENT = (1, 2, 3)  # blocks of a core
STAGES = range(8, 1, -1)


class StreamedRowsRules(Enumerated):
    """Blocks that stay on their core, with the deepest ring that as many of them leave room for."""

    def __init__(self, workload: Workload[StreamedRows]) -> None:
        self.workload = workload

    def shapes(self, log: SearchTrace, budget: int, limit: int) -> Sequence[Shape]:
        tried = [self._deepest(*ring) for ring in itertools.product(RESIDENT, PAGE_BYTES, WARPS)]
        log.tiles_visited += len(tried)
        visits = [(shape.base.reduce_threads, self._visit(shape, broken)) for shape, broken in tried]
        log.record_each(SearchKind.ENUMERATION, self._points, visits)
        for _, broken in tried:
            if broken is not None:
                log.reject(broken)
        return subsample([shape for shape, broken in tried if broken is None], limit)

    @property
    def _points(self) -> int:
        """Points to which the traffic of a tile refers: multiply-adds."""
        return self.workload.outer_points * self.workload.inner_points

    def _deepest(self, resident: int, page_bytes: int, warps: tuple[int, int]) -> tuple[Shape, BrokenRule | None]:
        """Return the shape with the most stages with which a core has that many blocks, and the rule that forbids all."""
        p, facts, (warps_n, warps_k) = self.workload, self.workload.facts, warps
        product, rows, hw = facts.product, warps_n * FRAGMENT_ROWS, p.machine.hw
        results = rows // len(product.all)
        row_bytes = product.chunk_bytes * warps_k * 4
        steps = min(page_bytes // (rows * row_bytes), -(-product.k.extent // (warps_k * product.step)))
        fewest = max(1, COPY_BYTES * len(product.all) // 2 // product.chunk_bytes)  # whole copies of each thread and matrix
        steps -= steps % fewest
        whole = tuple(p.extents)
        block = replaced(replaced(whole, facts.n, results), facts.k, max(1, steps) * warps_k * product.step)
        of_warp = replaced(replaced(whole, facts.n, results // warps_n), facts.k, product.step)
        base = ThreadTile(of_warp, warps_k * facts.warp)
        if steps < 1:
            broken = check_limit("page", fewest * rows * row_bytes, page_bytes)
            return Shape(block, base), broken or BrokenRule("k", fewest * warps_k * product.step, product.k.extent)
        blocks = min(-(-product.n.extent // results), resident * p.machine.cores)
        for stages in STAGES:
            tile = ring_tile(facts, block, warps_k * facts.warp, stages, blocks)
            needs = ring_resources(p, tile)
            if not broken_limits(needs, hw) and blocks_per_core(needs, hw) >= resident and self._is_used(tile):
                return Shape(block, base, pipeline=PipelineOptions(stages=stages, persistent_blocks=blocks)), None
        needs = ring_resources(p, ring_tile(facts, block, warps_k * facts.warp, STAGES[-1], blocks))
        exceeded = broken_limits(needs, hw)
        return Shape(block, base), exceeded[0] if exceeded else BrokenRule("blocks per core", resident, blocks_per_core(needs, hw))

    def _visit(self, shape: Shape, broken: BrokenRule | None) -> Visit:
        p = self.workload
        points = math.prod([min(size, extent) for size, extent in zip(shape.block, p.extents, strict=True)])
        moved = p.footprint.transferred_bytes(shape.block) / points
        return Visit(shape.block, None, TileMetrics(p.footprint.bytes(shape.block), moved, broken), shape.base.tile)

    def _is_used(self, tile: RingTile) -> bool:
        """Return whether a block has pages for all stages but the last, which is filled again."""
        return tile.stages <= max(2, tile.rounds * tile.pages)
