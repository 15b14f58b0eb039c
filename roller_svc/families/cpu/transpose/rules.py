"""ROLLER's rules for transposes on a CPU: tiles of whole lines on both sides that stay in L1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roller_svc.construct.rules import ThreadTile, replaced
from roller_svc.construct.scale_up import ScaleUpLevel, ScaleUpResult
from roller_svc.families.common.cpu.tasks import TaskRules, task_range
from roller_svc.families.cpu.transpose.workload import TransposeKind, TransposeSpace
from roller_svc.ir.rprogram import PipelineOptions
from roller_svc.ir.search import BrokenRule, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

TILE_BYTES = (64, 128, 256, 512, 1024)  # of one side of a tile
MAX_BUFFER_BYTES = 20 << 10  # of a tile's scratch buffer: about half of L1, the output takes the rest
# Of a tile of short rows, along the other side.
SHORT_ROWS_BYTES = (128, 256, 512, 1024, 2048)
CUTS = (1, 4, 16, 64)  # few: candidates should differ in their tiles
MAX_BASES = 14
# Of one side of any tile, for random plans.
ANY_BYTES = tuple(sorted({*TILE_BYTES, *SHORT_ROWS_BYTES, 192, 320, 768, 1536, 3072, 4096, 6144, 8192, 12288}))


@dataclass(frozen=True, slots=True)
class TransposeRules(TaskRules):
    layout: TransposeSpace

    def thread_level(self, lanes: int) -> ScaleUpLevel:
        """Scale up the tile that is transposed at once."""
        return self._stage(TILE_BYTES if self.layout.kind is TransposeKind.BLOCK else SHORT_ROWS_BYTES)

    def any_tiles(self) -> list[Tile]:
        """Return all tiles, also with sides of other lengths."""
        steps = self._stage(ANY_BYTES).steps
        return [tile for tile in itertools.product(*steps) if not self._thread_rule(tile)]

    def _stage(self, side_bytes: Sequence[int]) -> ScaleUpLevel:
        p, layout = self.workload, self.layout
        inner = math.prod(p.extents[c] for c in layout.columns[1:])
        steps: dict[int, Tile] = {axis: (p.extents[axis],) for axis in (*layout.columns, layout.row)}
        if layout.kind is not TransposeKind.INTERLEAVE:
            steps[layout.row] = self._sides(p.extents[layout.row], 1, side_bytes)
        if layout.kind is not TransposeKind.DEINTERLEAVE:
            steps[layout.column] = self._sides(p.extents[layout.column], inner, side_bytes)
        return self._thread_level(steps, lambda t: self._measured(t, self._thread_rule(t)))

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        """Return the tiles with the longest contiguous segments first."""
        return sorted(grown.saturated, key=lambda t: -math.prod(t))[:MAX_BASES]

    def pipeline_choices(self, block: Tile, base: ThreadTile, split_k: int) -> Sequence[PipelineOptions]:
        """Return cached and non-temporal stores, the latter where the LLC would not hold the output."""
        last = self.workload.machine.llc
        fits_llc = last is not None and self.workload.compulsory_bytes <= last.total_bytes // 2
        if self.layout.kind is TransposeKind.INTERLEAVE or fits_llc:
            return (PipelineOptions(),)
        return (PipelineOptions(), PipelineOptions(nontemporal=True))

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return whole axes of a tile, in one task."""
        p = self.workload
        one = tuple([1] * len(p.extents))
        for i in (self.layout.row, *self.layout.columns):
            one = replaced(one, i, p.extents[i])
        return [(p.extents, ThreadTile(one))]

    def _sides(self, extent: int, each: int, side_bytes: Sequence[int]) -> Tile:
        """Return extents of about those bytes in whole vectors, with at least a vector left at the end."""
        lanes, size, found = self.layout.lanes, self.layout.transposed[0].dtype.bytes, set[int]()
        unit = lanes // math.gcd(lanes, each)
        for wanted in side_bytes:
            tile = max(unit, wanted // (size * each) // unit * unit)
            while tile < extent and 0 < extent % tile * each < lanes:
                tile += unit
            found.add(tile if tile < extent else extent)
        return tuple(sorted(found))

    def _thread_rule(self, tile: Tile) -> BrokenRule | None:
        layout = self.layout
        points = math.prod(tile)
        least = min(layout.lanes**2, points)
        buffer_bytes = points * sum(load.dtype.bytes for load in layout.transposed)
        return check_limit("capacity", buffer_bytes, MAX_BUFFER_BYTES) if points > 4 * least else None

    def _block_steps(self, axis: int, extent: int, unit: int) -> Tile:
        tiles = -(-extent // unit)
        cores = self.workload.machine.cores
        if self.max_tasks == 1:
            return (tiles * unit,)
        cuts = {cut for c in CUTS for cut in (c, c * cores)}
        return tuple(sorted({-(-tiles // cut) * unit for cut in cuts if cut <= tiles}))


def transpose_rules(p: Workload[Any], layout: TransposeSpace) -> TransposeRules:
    """Return the rules of one group. One core has one task: cuts gain it nothing."""
    fewest, most = (1, 1) if p.machine.cores == 1 else task_range(p)
    return TransposeRules(p, fewest, most, layout)
