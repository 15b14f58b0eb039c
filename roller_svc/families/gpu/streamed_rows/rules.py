"""Tiles of streamed products: warps along n and k, pages of some KB, as many stages as shared memory has room for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from roller_svc.construct.rules import Enumerated, Shape, ThreadTile, replaced, subsample
from roller_svc.construct.scale_up import SearchTrace
from roller_svc.families.gpu.streamed_rows.cost import ring_resources
from roller_svc.families.gpu.streamed_rows.product import COPY_BYTES
from roller_svc.families.gpu.streamed_rows.workload import FRAGMENT_ROWS, RingTile, StreamedRows, ring_tile
from roller_svc.ir.rprogram import PipelineOptions
from roller_svc.perf.occupancy import blocks_per_core, exceeded_limits
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
        return subsample([shape for shape in self._candidates(log) if shape is not None], limit)

    def _candidates(self, log: SearchTrace) -> Iterator[Shape | None]:
        for resident in RESIDENT:
            for page_bytes in PAGE_BYTES:
                for warps_n, warps_k in WARPS:
                    yield self._deepest(warps_n, warps_k, page_bytes, resident, log)

    def _deepest(self, warps_n: int, warps_k: int, page_bytes: int, resident: int, log: SearchTrace) -> Shape | None:
        """Return the shape with the most stages with which a core has that many blocks; None if there is none."""
        p, facts = self.workload, self.workload.facts
        product, rows, hw = facts.product, warps_n * FRAGMENT_ROWS, p.machine.hw
        row_bytes = product.chunk_bytes * warps_k * 4
        steps = min(page_bytes // (rows * row_bytes), -(-product.k.extent // (warps_k * product.step)))
        steps -= steps % max(1, COPY_BYTES // 2 // product.chunk_bytes)  # whole copies of each thread
        log.tiles_visited += 1
        if steps < 1:
            log.rejections["page"] = log.rejections.get("page", 0) + 1
            return None
        depth = steps * warps_k * product.step
        whole = tuple(p.extents)
        block = replaced(replaced(whole, facts.n, rows), facts.k, depth)
        thread = replaced(replaced(whole, facts.n, FRAGMENT_ROWS), facts.k, product.step)
        blocks = min(-(-product.n.extent // rows), resident * p.machine.cores)
        for stages in STAGES:
            tile = ring_tile(facts, block, warps_k * facts.warp, stages, blocks)
            needs = ring_resources(p, tile)
            if not exceeded_limits(needs, hw) and blocks_per_core(needs, hw) >= resident and self._is_used(tile):
                pipeline = PipelineOptions(stages=stages, persistent_blocks=blocks)
                return Shape(block, ThreadTile(thread, warps_k * facts.warp), pipeline=pipeline)
        log.rejections["shared memory"] = log.rejections.get("shared memory", 0) + 1
        return None

    def _is_used(self, tile: RingTile) -> bool:
        """Return whether a block has pages for all stages but the last, which is filled again."""
        return tile.stages <= max(2, tile.rounds * tile.pages)
