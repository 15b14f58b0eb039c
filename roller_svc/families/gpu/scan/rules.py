"""Tiles of scans on a GPU: threads along a row or adjacent each other, and elements of each."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from roller_svc.construct.align import powers_of_two
from roller_svc.construct.rules import Enumerated, Shape, ThreadTile, check_grid, replaced, subsample
from roller_svc.construct.scale_up import SearchTrace
from roller_svc.families.gpu.scan.cost import scan_resources
from roller_svc.families.gpu.scan.workload import ScanSpace, scan_threads
from roller_svc.ir.search import SearchKind, TileMetrics, Visit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.occupancy import broken_limits
from roller_svc.perf.workload import Workload

ELEMENTS = (1, 2, 4, 8, 16, 32)  # of one thread
MAX_BYTES = 64  # of one thread's elements: its loads in flight
THREADS = (64, 128, 256, 512, 1024)  # of one block
MIN_COLUMNS = 4
MIN_PIECE = 256  # elements of a piece of a row
MAX_BLOCKS_PER_CORE = 16
MAX_SPLITS = 4  # numbers of pieces


class ScanRules(Enumerated):
    """Blocks whose tile along the scan is at most twice the row, so that few threads are idle."""

    def __init__(self, workload: Workload[ScanSpace]) -> None:
        self.workload = workload

    def shapes(self, log: SearchTrace, budget: int, limit: int) -> Sequence[Shape]:
        fitting: list[Shape] = []
        visits: list[tuple[int, Visit]] = []
        for shape in self._candidates():
            visits.append((shape.base.reduce_threads, self._visit(shape)))
            log.tiles_visited += 1
            if (broken := visits[-1][1].limit) is None:
                fitting.append(shape)
            else:
                log.reject(broken)
        if not fitting:
            visits.append((1, self._visit(self._smallest())))
        log.record_each(SearchKind.ENUMERATION, self.workload.outer_points * self.workload.inner_points, visits)
        split = [shape for shape in fitting if shape.split_k > 1]
        whole = subsample([shape for shape in fitting if shape.split_k == 1], limit - limit // 2 if split else limit)
        return [*whole, *subsample(split, limit - len(whole))] or [self._smallest()]

    def _candidates(self) -> Iterator[Shape]:
        """Yield the shapes of whole vectors, or of the fewest elements, of every size of a block."""
        p, facts = self.workload, self.workload.facts
        for pieces in self._splits():
            yield from self._blocks(p.extents[facts.along] // pieces, pieces)

    def _splits(self) -> Sequence[int]:
        """Return numbers of pieces of equal length that give every core some, where rows do not."""
        p, facts = self.workload, self.workload.facts
        extent, cores = p.extents[facts.along], p.machine.cores
        rows = p.outer_points // (1 if facts.column is None else min(MIN_COLUMNS, p.extents[facts.column]))
        most = min(extent // MIN_PIECE, -(-MAX_BLOCKS_PER_CORE * cores // rows))
        if not facts.may_split or rows >= cores or most < 2:
            return (1,)
        dividing = [n for n in range(2, most + 1) if extent % n == 0]
        return (1, *subsample(dividing[::-1], MAX_SPLITS))

    def _blocks(self, extent: int, pieces: int) -> Iterator[Shape]:
        p, facts = self.workload, self.workload.facts
        shared = 1 if facts.shared_axis is None else p.extents[facts.shared_axis]
        one = tuple([1] * len(p.extents))
        most = max(1, MAX_BYTES // p.elem_bytes)
        for elements in ELEMENTS:
            if elements > most or (elements % facts.width and elements < extent) or elements >= 2 * extent:
                continue
            for threads in THREADS:
                for lanes in powers_of_two(threads):
                    adjacent = threads // lanes
                    is_wide = lanes > (1 if shared > 1 else THREADS[0]) and lanes // 2 * elements >= extent
                    is_idle = adjacent > 1 and adjacent // 2 >= shared
                    if is_wide or is_idle or (facts.column is not None and adjacent < min(MIN_COLUMNS, shared)):
                        continue
                    block = replaced(replaced(one, facts.shared_axis, adjacent), facts.along, lanes * elements)
                    yield Shape(block, ThreadTile(replaced(one, facts.along, elements), lanes), pieces)

    def _smallest(self) -> Shape:
        """Return a thread for each row, for scans of fewer elements than a block has threads."""
        facts = self.workload.facts
        thread = replaced(tuple([1] * len(self.workload.extents)), facts.along, facts.width)
        return Shape(replaced(thread, facts.shared_axis, THREADS[0]), ThreadTile(thread))

    def _visit(self, shape: Shape) -> Visit:
        """Return a block with its bytes, those that it moves per point, and the limit of the device that it exceeds."""
        p, base = self.workload, shape.base
        threads = scan_threads(p, shape.block, base.tile, base.reduce_threads, shape.split_k)
        exceeded = broken_limits(scan_resources(p, threads), p.machine.hw)
        too_large = exceeded[0] if exceeded else check_grid(p, self._spatial(shape.block))
        points = math.prod([min(b, e) for b, e in zip(shape.block, p.extents, strict=True)])
        moved = p.footprint.transferred_bytes(shape.block) / points
        return Visit(shape.block, None, TileMetrics(p.footprint.bytes(shape.block), moved, too_large), base.tile)

    def _spatial(self, block: Tile) -> Tile:
        return replaced(block, self.workload.facts.along, 1)
