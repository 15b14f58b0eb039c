"""Tiles of scans on a CPU: tasks of whole rows, or of columns whose carries stay in L1; rows in pieces."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from roller_svc.analysis.scans import gate_product_dtype
from roller_svc.construct.align import round_up
from roller_svc.construct.rules import Enumerated, Shape, ThreadTile, replaced, spatial_grid, subsample
from roller_svc.construct.scale_up import SearchTrace
from roller_svc.families.common.cpu.rules import equal_parts
from roller_svc.families.common.cpu.tasks import task_range
from roller_svc.families.cpu.scan.workload import ScanSpace
from roller_svc.ir.search import BrokenRule, SearchKind, TileMetrics, Visit, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

MAX_CARRY_BYTES = 16 << 10  # of the columns of one task: half of L1
TASKS_PER_CORE = (1, 2, 4, 8, 16)
MIN_PIECE = 1 << 12  # elements of a piece of a row


class CpuScanRules(Enumerated):
    """Equal cuts of the outer axes, and of rows where those leave cores idle."""

    def __init__(self, workload: Workload[ScanSpace]) -> None:
        self.workload = workload

    def shapes(self, log: SearchTrace, budget: int, limit: int) -> Sequence[Shape]:
        """Return tasks that are neither too few nor too small, or all if there are none."""
        p, column = self.workload, self.workload.facts.column
        base = ThreadTile(replaced(tuple([1] * len(p.extents)), column, self._width))
        tiles = list(itertools.product(*(self._steps(i) for i in range(len(p.extents)))))
        log.tiles_visited += len(tiles)
        fewest, most = task_range(p)
        tasks = {tile: spatial_grid(p, tile) for tile in tiles}
        broken = {tile: self._task_rule(tile, tasks[tile], fewest, most) for tile in tiles}
        fitting = [tile for tile in tiles if broken[tile] is None] or tiles
        for rule in broken.values():
            if rule is not None:
                log.reject(rule)
        visits = [Visit(tile, None, self._measure(tile, broken[tile]), base.tile) for tile in tiles]
        log.record_blocks(SearchKind.ENUMERATION, p.outer_points * p.inner_points, visits)
        pieces = [Shape(fitting[0], base, n) for n in self._pieces(max(tasks.values()), most)]
        return [*subsample([Shape(tile, base) for tile in fitting], limit - len(pieces)), *pieces]

    def _task_rule(self, tile: Tile, tasks: int, fewest: int, most: int) -> BrokenRule | None:
        """Return the broken rule of tasks that are too few or too small."""
        broken = check_limit("parallelism", fewest, tasks)
        return broken or (None if self._has_most_columns(tile) else check_limit("task size", tasks, most))

    def _measure(self, tile: Tile, broken: BrokenRule | None) -> TileMetrics:
        """Return the bytes of a task, and those that it moves per point."""
        p = self.workload
        points = math.prod([min(size, extent) for size, extent in zip(tile, p.extents, strict=True)])
        return TileMetrics(p.footprint.bytes(tile), p.footprint.transferred_bytes(tile) / points, broken)

    def _steps(self, axis: int) -> Tile:
        """Return about equal cuts for the cores, and the whole axis if carries fit."""
        p, facts = self.workload, self.workload.facts
        extent, is_column = p.extents[axis], axis == facts.column
        unit = self._width if is_column else 1
        whole = round_up(extent, unit)
        if axis == facts.along:
            return (extent,)
        cuts = (2, *(n * p.machine.cores for n in TASKS_PER_CORE))
        sizes = {whole} | equal_parts(extent, unit, cuts)
        if is_column:
            sizes = {size for size in {*sizes, self._most_columns} if size <= min(whole, self._most_columns)}
        return tuple(sorted(sizes))

    def _pieces(self, tasks: int, most: int) -> Sequence[int]:
        """Return numbers of equal pieces of a row that give every core a task, where rows and columns do not."""
        p, facts = self.workload, self.workload.facts
        extent, cores = p.extents[facts.along], p.machine.cores
        if tasks >= cores or most <= tasks or not facts.may_split:
            return ()
        wanted = range(-(-cores // tasks), min(most, extent // MIN_PIECE) + 1)
        return subsample([n for n in wanted if extent % n == 0], len(TASKS_PER_CORE))

    def _has_most_columns(self, tile: Tile) -> bool:
        column = self.workload.facts.column
        return column is not None and tile[column] == self._most_columns

    @property
    def _width(self) -> int:
        return self.workload.machine.unit.shape[-1]

    @property
    def _most_columns(self) -> int:
        p = self.workload
        carry_bytes = p.elem_bytes if p.facts.totals is None else p.elem_bytes + gate_product_dtype(p.space.compute_dtype).bytes
        return MAX_CARRY_BYTES // carry_bytes // self._width * self._width
