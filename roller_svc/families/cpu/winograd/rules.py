"""ROLLER's rules for Winograd convolution on a CPU: blocks of tiles whose transforms stay in caches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from roller_svc.construct.rules import Enumerated, Shape, ThreadTile, check_waves, spatial_grid, subsample
from roller_svc.construct.scale_up import SearchTrace
from roller_svc.families.common.cpu.image_space import ImageWindowDim
from roller_svc.families.cpu.winograd.workload import WinogradSpace, plan_task
from roller_svc.ir.search import BrokenRule, SearchKind, TileMetrics, Visit, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

VECTORS = (1, 2, 3, 4)
# Bytes of transformed inputs, as a fraction of L2: beyond it every panel reads them from the last-level cache.
MAX_INPUTS_FRACTION = 2.0
FILTER_TASKS_PER_CORE = (1, 2)


@dataclass(frozen=True, slots=True)
class CpuWinogradRules(Enumerated):
    workload: Workload[WinogradSpace]

    def shapes(self, log: SearchTrace, budget: int, limit: int) -> Sequence[Shape]:
        """Return blocks of tiles, blocks of filters and panels that fit; the smallest blocks last."""
        found: list[Shape] = []
        visits: list[Visit] = []
        for pixels, filters in itertools.product(self._pixel_blocks(), self._filter_blocks()):
            if log.tiles_visited >= log.budget:
                break
            shape = self._shape(pixels, *filters)
            visits.append(self._visit(shape))
            log.tiles_visited += 1
            if (broken := visits[-1].limit) is not None:
                log.reject(broken)
            else:
                found.append(shape)
        log.record_blocks(SearchKind.ENUMERATION, self._points, visits)
        if not found:
            found = [self._smallest()]
            log.record_blocks(SearchKind.FALLBACK, self._points, [self._visit(found[0])])
        return subsample(found, limit)

    # blocks ---------------------------------------------------------------------------------------------------------
    def _pixel_blocks(self) -> Iterator[tuple[int, ...]]:
        """Yield output positions of a block along each window dimension.

        A block is rows of tiles of one image, or whole images. Rows are cut only where one is too large. Where planes
        have taps, a block is rows of tiles of adjacent planes of one image.
        """
        space = self.workload.facts
        *outer, columns = space.image.window_dims
        images, rows = outer[:-1], outer[-1:]
        one, whole = [1] * len(images), self._sizes(columns)[0]
        is_accepted = self._is_accepted((*one, *map(space.unit, rows), whole))
        for width in self._sizes(columns):
            if width == whole or not is_accepted:
                yield from ((*one, *height, width) for height in itertools.product(*map(self._sizes, rows)))
        highest = [self._sizes(slide)[0] for slide in rows]
        if space.planes is None:
            several = itertools.product(*(self._sizes(slide) for slide in images))
            yield from ((*block, *highest, whole) for block in several if list(block) != one)
        if space.planes not in images:
            return
        first = images.index(space.planes)
        inner = (self._sizes(slide) for slide in images[first + 1 :])
        for planes, height, *block in itertools.product(self._sizes(space.planes), self._sizes(rows[0]), *inner):
            if planes > 1 or any(n > 1 for n in block):
                yield (*one[:first], planes, *block, height, whole)

    def _sizes(self, slide: ImageWindowDim) -> list[int]:
        """Return the extents of equal parts of a dimension in whole units of tiles, largest first."""
        space = self.workload.facts
        count = space.count(slide)
        return [n * space.unit(slide) for n in sorted({-(-count // parts) for parts in range(1, count + 1)})[::-1]]

    def _is_accepted(self, pixels: tuple[int, ...]) -> bool:
        filters, wide = self._filter_blocks()[0]
        return self._capacity_rule(self._shape(pixels, filters, wide)) is None

    def _filter_blocks(self) -> list[tuple[int, int]]:
        """Return (filters of a block, filters of a panel)."""
        p, image = self.workload, self.workload.facts.image
        lanes, cores = p.machine.unit.shape[-1], p.machine.cores
        found: dict[tuple[int, int], None] = {}
        for vectors in VECTORS:
            if lanes * (vectors - 1) >= image.filters.extent:
                continue
            wide = lanes * vectors
            panels = -(-image.filters.extent // wide)
            for parts in (1, *(n * cores for n in FILTER_TASKS_PER_CORE if cores > 1)):
                if parts <= panels:
                    found[-(-panels // parts) * wide, wide] = None
        return list(found)

    def _shape(self, pixels: Sequence[int], filters: int, wide: int) -> Shape:
        space = self.workload.facts
        dims = space.image.window_dims
        name = space.image.filters.name
        block = {slide.pixel.name: n for slide, n in zip(dims, pixels, strict=True)} | {name: filters}
        thread = {slide.pixel.name: space.unit(slide) for slide in dims} | {name: wide}
        return Shape(self._tile(block, whole=True), ThreadTile(self._tile(thread, whole=False)))

    def _tile(self, extents: Mapping[str, int], *, whole: bool) -> Tile:
        """Return a tile of the extents by axis; of other axes, those of groups are single, reduced ones maybe whole."""
        p = self.workload
        return tuple(extents.get(axis.name, axis.extent if whole and i in p.reduced else 1) for i, axis in enumerate(p.space.axes))

    def _smallest(self) -> Shape:
        """Return one tile and one vector of filters."""
        space = self.workload.facts
        lanes = self.workload.machine.unit.shape[-1]
        return self._shape([space.unit(slide) for slide in space.image.window_dims], lanes, lanes)

    # rules ----------------------------------------------------------------------------------------------------------
    @property
    def _points(self) -> int:
        """Points to which the traffic of a tile refers: results."""
        return self.workload.outer_points

    def _visit(self, shape: Shape) -> Visit:
        """Return a block with the bytes of its transformed inputs, the bytes that it moves per result, and broken rules."""
        p = self.workload
        inputs_bytes = plan_task(p, shape.block, shape.base.tile).inputs_bytes
        results = math.prod([min(shape.block[i], p.extents[i]) for i in p.spatial])
        too_large = self._capacity_rule(shape)
        misaligned = None if too_large else check_waves(spatial_grid(p, shape.block), p.machine.cores)
        metrics = TileMetrics(inputs_bytes, p.footprint.transferred_bytes(shape.block) / results, too_large, misaligned)
        return Visit(shape.block, None, metrics, shape.base.tile)

    def _capacity_rule(self, shape: Shape) -> BrokenRule | None:
        level = self.workload.machine.hw.block_level
        inputs_bytes = plan_task(self.workload, shape.block, shape.base.tile).inputs_bytes
        return check_limit(f"{level.name} inputs", inputs_bytes, MAX_INPUTS_FRACTION * level.capacity_bytes)
