"""ROLLER's rules for windowed reductions on a GPU: adjacent outputs per thread, warps along the row."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.construct.align import powers_of_two, tile_multiples
from roller_svc.construct.rules import ThreadTile, check_grid, replaced
from roller_svc.construct.scale_up import ScaleUpResult
from roller_svc.families.common.gpu.loop_rules import LoopRules
from roller_svc.families.gpu.window.cost import window_registers
from roller_svc.families.gpu.window.workload import UNROLLED_STATEMENTS, WindowSpace
from roller_svc.ir.search import BrokenRule, TileMetrics, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS
from roller_svc.perf.occupancy import block_registers

MAX_ALONG, MAX_OUTPUTS = 8, 32  # of a thread along one window, and in total: more save few inputs and take registers
MAX_THREADS = 256
MAX_BASES = 4
MAX_WASTE_OF = 8  # one of this many lanes may be idle
FREE_PADDING = 1 / 16  # padding that costs memory-bound threads less than narrow tiles would


@dataclass(frozen=True, slots=True)
class WindowRules(LoopRules):
    windows: WindowSpace

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        """Return the tiles with the fewest reads per output, rows before columns; and the smallest."""
        spatial, windows = self.workload.spatial, self.windows

        def reads(thread: Tile) -> tuple[float, int]:
            return windows.inputs(thread) / math.prod([thread[i] for i in spatial]), -thread[windows.row]

        large = sorted(grown.saturated, key=reads)
        return list(dict.fromkeys([*large[: MAX_BASES - 1], min(large, key=math.prod)]))

    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics:
        p, limits = self.workload, self.workload.machine.hw.limits
        threads = self._threads(block, base)
        too_large = check_limit("threads per block", threads, min(MAX_THREADS, limits.max_threads_per_block))
        if too_large is None:
            registers = block_registers(threads, window_registers(self.windows, base.tile, limits), limits)
            too_large = check_limit("registers per core", registers, limits.registers_per_core)
        if too_large is not None:
            return self._measured(block, too_large)
        idle = -threads % limits.warp_size
        return self._measured(block, None, check_limit("execution unit", idle * MAX_WASTE_OF, threads) or check_grid(p, block))

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return one output per thread, a warp along the row."""
        p = self.workload
        one = tuple([p.extents[i] if i in p.reduced else 1 for i in range(len(p.extents))])
        thread = tuple([1] * len(p.extents))
        return [
            (replaced(one, self.windows.row, p.machine.hw.limits.warp_size), ThreadTile(thread)),
            (one, ThreadTile(thread)),
        ]

    def _thread_steps(self, axis: int) -> Tile:
        p, windows = self.workload, self.windows
        if any(w.axis == axis for w in windows.windows):
            return powers_of_two(min(MAX_ALONG, p.extents[axis]))
        if axis == windows.row:
            return powers_of_two(math.gcd(windows.map.vector_width, p.extents[axis]))
        return (1,)

    def _block_steps(self, axis: int, base: ThreadTile, epsilon: float) -> Tile:
        p, row = self.workload, self.windows.row
        if axis not in p.spatial:
            return (p.extents[axis],)
        along = self._row_steps(base, epsilon)
        if axis == row:
            return along
        most = max(1, MAX_THREADS * base.tile[row] // along[0])
        unit = base.tile[axis]
        if all(w.axis != axis for w in self.windows.windows):
            return powers_of_two(min(most, p.extents[axis]))  # nothing is reused along it: it only fills blocks
        return tuple([unit * c for c in tile_multiples(p.extents[axis], unit, max(epsilon, FREE_PADDING), most)]) or (unit,)

    def _row_steps(self, base: ThreadTile, epsilon: float) -> Tile:
        """Return extents along the row: adjacent outputs for half a warp, or the whole axis (second alignment)."""
        p, unit = self.workload, base.tile[self.windows.row]
        allowed = tile_multiples(p.extents[self.windows.row], unit, max(epsilon, FREE_PADDING), MAX_THREADS)
        fitting = tuple([unit * c for c in allowed]) or (unit,)
        warp = p.machine.hw.limits.warp_size
        return tuple([s for s in fitting if s >= warp * unit // 2]) or fitting[-1:]

    def _thread_rule(self, thread: Tile) -> BrokenRule | None:
        p, limits, windows = self.workload, self.workload.machine.hw.limits, self.windows
        outputs = math.prod([thread[i] for i in p.spatial])
        least, broken = p.machine.cores * limits.warp_size * SCHEDULERS, None
        if outputs > 1:
            broken = check_limit("parallelism", outputs * least, p.outer_points)
        if broken is None and windows.register_windows(thread):
            broken = check_limit("statements per thread", windows.unrolled_statements(thread), UNROLLED_STATEMENTS)
        broken = broken or check_limit("outputs per thread", outputs, MAX_OUTPUTS * windows.lanes(thread))
        if broken is not None or outputs == 1:
            return broken
        return check_limit("registers per thread", window_registers(windows, thread, limits), limits.max_registers_per_thread)

    @property
    def _first_axes(self) -> tuple[int | None, ...]:
        """The row."""
        return (self.windows.row,)
