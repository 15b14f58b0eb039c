"""Choose the tiles of a matrix unit that are worth an estimate, by a cheap cost model.

Scale-up lets more tiles through than the performance model can price in milliseconds.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from heapq import nsmallest
from typing import Any

from roller_svc.construct.rules import Prefiltered, Shape, ThreadTile, subsample
from roller_svc.construct.scale_out import split_k_choices
from roller_svc.families.common.gpu.matrix.wave_quantization import has_wave_quantization, leaves_cores_idle, wave_balanced_tiles
from roller_svc.ir.search import TileMetrics
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

WAVE_BALANCED = 6  # tiles whose extents are changed to fill whole waves
FASTEST_FRACTION = 2 / 3  # of the priced tiles; the others are there in case the cheap model is wrong


class TilePrefilter(Prefiltered):
    """Rules with approximate cycles for each tile."""

    __slots__ = ()

    workload: Workload[Any]

    @abstractmethod
    def approx_cycles(self, block: Tile, base: ThreadTile, split_k: int) -> float:
        """Estimate roughly the cycles of the core with the most blocks."""

    @abstractmethod
    def granules(self) -> tuple[int, int]:
        """Return the steps of a warp's or warpgroup's tile along m and n."""

    def split_waves(self) -> Sequence[int]:
        """Return the tiles of a wave where several blocks share each of them, for every number of such blocks."""
        return ()

    @abstractmethod
    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics: ...

    def prefilter(self, shapes: Sequence[Shape], count: int) -> list[Shape]:
        p, granules = self.workload, self.granules()

        def cycles(shape: Shape) -> float:
            return self.approx_cycles(shape.block, shape.base, shape.split_k)

        priced = {shape: cycles(shape) for shape in shapes}
        few = [s for s in shapes if s.split_k == 1 and (has_wave_quantization(p, s.block) or leaves_cores_idle(p, s.block))]
        balanced = [
            t
            for s in nsmallest(WAVE_BALANCED, few, key=priced.__getitem__)
            for t in wave_balanced_tiles(p, s.block, s.base, granules, self.split_waves())
        ]
        splits = any(s.split_k > 1 for s in shapes)
        for block, base in balanced:
            look = self.evaluate(block, base)
            if Shape(block, base) not in priced and not look.too_large and not look.misaligned:
                for split_k in (1, *(split_k_choices(p, block) if splits else ())):
                    shape = Shape(block, base, split_k)
                    priced[shape] = cycles(shape)
        order = sorted(priced, key=priced.__getitem__)
        first = round(FASTEST_FRACTION * count)
        return [*order[:first], *subsample(order[first:], count - first)]
