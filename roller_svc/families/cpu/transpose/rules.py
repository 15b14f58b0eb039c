"""ROLLER's rules for maps that a CPU turns: tiles of whole lines on both sides that stay in L1."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roller_svc.construct.rules import Base, Pipeline, axis_names, replaced
from roller_svc.construct.scale_up import Grown, Stage
from roller_svc.families.common.cpu.tasks import TaskRules, task_counts
from roller_svc.families.cpu.transpose.workload import LayoutSpace, Turn
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

TILE_BYTES = (64, 128, 256, 512, 1024)  # of one side of a tile
ROOM_BYTES = 20 << 10  # of a tile between its two sides: about half of L1, what it becomes takes the rest
# Of a tile of short rows, along the other side: rows of three were dealt in 128 to 448 bytes of each a sixth faster
# than in 1024 to 2048 on Zen 4.
SHORT_ROWS_BYTES = (128, 256, 448, 1024, 2048)
CUTS = (1, 4, 16, 64)  # few: candidates are to differ in their tiles
MAX_BASES = 14
# Of one side of any tile, good or bad.
ANY_BYTES = tuple(sorted({*TILE_BYTES, *SHORT_ROWS_BYTES, 192, 320, 768, 1536, 3072, 4096, 6144, 8192, 12288}))


@dataclass(frozen=True, slots=True)
class CpuLayout(TaskRules):
    layout: LayoutSpace

    def lane_choices(self) -> tuple[int, ...]:
        return (1,)

    def thread_stage(self, lanes: int) -> Stage:
        """The tile that is turned at once."""
        return self._stage(TILE_BYTES if self.layout.turn is Turn.SQUARE else SHORT_ROWS_BYTES)

    def any_tiles(self) -> list[Tile]:
        """Those with sides of other lengths too."""
        stage = self._stage(ANY_BYTES)
        return [tile for tile in itertools.product(*stage.steps) if not self._thread_rule(tile)]

    def _stage(self, side_bytes: Sequence[int]) -> Stage:
        p, layout = self.workload, self.layout
        steps: list[Tile] = [(1,)] * len(p.extents)
        inner = math.prod(p.extents[c] for c in layout.columns[1:])
        for column in layout.columns:
            steps[column] = (p.extents[column],)
        steps[layout.row] = (p.extents[layout.row],)
        if layout.turn is not Turn.WOVEN:
            steps[layout.row] = self._sides(p.extents[layout.row], 1, side_bytes)
        if layout.turn is not Turn.DEALT:
            steps[layout.column] = self._sides(p.extents[layout.column], inner, side_bytes)
        return Stage(
            level=p.machine.hw.thread_level.name,
            names=axis_names(self.workload),
            steps=tuple(steps),
            rank=tuple(range(len(p.extents))),
            look=lambda t: self._measured(t, self._thread_rule(t)),
            saturates=lambda _tile: True,
        )

    def preferred(self, grown: Grown, lanes: int) -> Sequence[Tile]:
        """Those with the longest runs in memory first."""
        return sorted(grown.large, key=lambda t: -math.prod(t))[:MAX_BASES]

    def pipelines(self, block: Tile, base: Base, split_k: int) -> Sequence[Pipeline]:
        """Past the caches too, where they would not hold what is written."""
        last = self.workload.machine.last_cache
        held = last is not None and self.workload.compulsory_bytes <= last.total_bytes // 2
        if self.layout.turn is Turn.WOVEN or held:
            return (Pipeline(),)
        return (Pipeline(), Pipeline(streamed=True))

    def fallback(self) -> Sequence[tuple[Tile, Base]]:
        """The whole of every axis of a tile, in one task."""
        p = self.workload
        one = tuple([1] * len(p.extents))
        for i in (self.layout.row, *self.layout.columns):
            one = replaced(one, i, p.extents[i])
        return [(p.extents, Base(one))]

    def _sides(self, extent: int, each: int, side_bytes: Sequence[int]) -> Tile:
        """Extents of a tile's side, with `each` elements for one of them: about so many bytes in whole vectors, with at
        least a vector left at the end."""
        lanes, size, found = self.layout.lanes, self.layout.turned[0].dtype.bytes, set[int]()
        unit = lanes // math.gcd(lanes, each)
        for wanted in side_bytes:
            tile = max(unit, wanted // (size * each) // unit * unit)
            while tile < extent and 0 < extent % tile * each < lanes:
                tile += unit
            found.add(tile if tile < extent else extent)
        return tuple(sorted(found))

    def _thread_rule(self, tile: Tile) -> str:
        layout = self.layout
        points = math.prod(tile)
        least = min(layout.lanes**2, points)
        room = points * sum(load.dtype.bytes for load in layout.turned)
        return "room" if room > ROOM_BYTES and points > 4 * least else ""

    def _block_steps(self, axis: int, base: Base) -> Tile:
        extent, unit = self.workload.extents[axis], base.thread[axis]
        tiles = -(-extent // unit)
        cores = self.workload.machine.cores
        if self.most_tasks == 1:
            return (tiles * unit,)
        cuts = {cut for c in CUTS for cut in (c, c * cores)}
        return tuple(sorted({-(-tiles // cut) * unit for cut in cuts if cut <= tiles}))


def cpu_layout(p: Workload[Any], layout: LayoutSpace) -> CpuLayout:
    """The rules of one group. One core has one task: cuts gain it nothing."""
    fewest, most = (1, 1) if p.machine.cores == 1 else task_counts(p)
    return CpuLayout(p, fewest, most, layout)
