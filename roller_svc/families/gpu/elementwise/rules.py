"""ROLLER's rules for elementwise kernels on a GPU: whole vectors per thread, warps along the row, staged transposes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from roller_svc.construct.align import EPSILONS, powers_of_two, tile_multiples
from roller_svc.construct.rules import ThreadTile, check_grid, replaced
from roller_svc.construct.scale_up import ScaleUpResult
from roller_svc.families.common.gpu.elementwise_space import MapSpace
from roller_svc.families.common.gpu.loop_rules import LoopRules
from roller_svc.families.gpu.elementwise.cost import MapTile, map_registers
from roller_svc.ir.search import BrokenRule, TileMetrics, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS
from roller_svc.perf.occupancy import block_registers

BYTES_IN_FLIGHT = 64  # of one tensor and thread: four of the widest accesses
MAX_VECTORS = 16
MAX_NARROW_BYTES = 32  # of the elements of a thread without vectors
MAX_WASTE_OF = 8  # one of this many lanes, or vectors of a row, may be idle
LINE_BYTES = 128  # granularity of a warp's access
MAX_THREADS = 512
MAX_BASES = 6
FREE_PADDING = 1 / 16  # padding that costs memory-bound threads less than narrow tiles would


@dataclass(frozen=True, slots=True)
class ElementwiseRules(LoopRules):
    map: MapSpace

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        """Return the tiles from one vector to several, of which a block has enough."""
        fitting = [t for t in grown.saturated if self._fewest_threads(t) <= MAX_THREADS]
        return sorted(fitting or grown.saturated, key=math.prod)[:MAX_BASES]

    def _fewest_threads(self, thread: Tile) -> int:
        """Return the threads of the smallest block, whose tile has whole memory lines."""
        base = ThreadTile(thread)
        smallest = [self._block_steps(axis, base, EPSILONS[-1])[0] for axis in range(len(thread))]
        return self._threads(tuple(smallest), base)

    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics:
        p, limits = self.workload, self.workload.machine.hw.limits
        threads = self._threads(block, base)
        too_large = check_limit("threads per block", threads, min(MAX_THREADS, limits.max_threads_per_block))
        if too_large is None:
            tile = MapTile.of(p, block, base.tile)
            too_large = check_limit("shared memory", tile.shared_bytes, limits.shared_bytes_per_block)
        if too_large is None:
            registers = block_registers(threads, map_registers(p, tile, limits), limits)
            too_large = check_limit("registers per core", registers, limits.registers_per_core)
        if too_large is not None:
            return self._measured(block, too_large)
        idle = -threads % limits.warp_size
        return self._measured(block, None, check_limit("execution unit", idle * MAX_WASTE_OF, threads) or check_grid(p, block))

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return one point per thread, a warp along the row."""
        one = tuple([1] * len(self.workload.extents))
        return [
            (replaced(one, self.map.row, self.workload.machine.hw.limits.warp_size), ThreadTile(one)),
            (one, ThreadTile(one)),
        ]

    def _thread_steps(self, axis: int) -> Tile:
        """Return whole vectors along the row if all cores have points; a few rows of a transposed tile."""
        p, m = self.workload, self.map
        if axis == m.row:
            least = math.gcd(m.vector_width, 1 << (self._fair.bit_length() - 1))
            narrowest = min([a.bytes for a in m.accesses])
            most = max(1, BYTES_IN_FLIGHT // narrowest)
            extent = p.extents[axis]
            even = [s for s in powers_of_two(min(most, extent)) if extent % s == 0 or s * MAX_WASTE_OF <= extent]
            return tuple([s for s in even if s >= least]) or (even[-1],)
        is_transposed = any(a.contiguous_axis == axis for a in m.transposed)
        return powers_of_two(min(4, p.extents[axis])) if is_transposed else (1,)

    @property
    def _fair(self) -> int:
        """Points of each thread when every scheduler of the device has one warp."""
        machine = self.workload.machine
        return max(1, self.workload.outer_points // (machine.cores * machine.hw.limits.warp_size * SCHEDULERS))

    def _block_steps(self, axis: int, base: ThreadTile, epsilon: float) -> Tile:
        row, epsilon = self.map.row, max(epsilon, FREE_PADDING)
        along = self._line_steps(row, base.tile[row], epsilon)
        if axis == row:
            return along
        most = max(1, MAX_THREADS * base.tile[row] // along[0])
        steps = self._line_steps(axis, base.tile[axis], epsilon)
        return tuple([s for s in steps if s <= most * base.tile[axis]]) or steps[:1]

    def _line_steps(self, axis: int, unit: int, epsilon: float) -> Tile:
        """Return extents of whole memory lines where tensors are contiguous along the axis (second alignment)."""
        extent = self.workload.extents[axis]
        fitting = tuple([unit * c for c in tile_multiples(extent, unit, epsilon, MAX_THREADS)]) or (unit,)
        lying = self.map.accesses if axis == self.map.row else self.map.transposed
        along = [a.bytes for a in lying if a.contiguous_axis == axis]
        if not along:
            return fitting
        warp = self.workload.machine.hw.limits.warp_size
        line = LINE_BYTES // min(along) if self.map.transposed else warp * unit
        return tuple([s for s in fitting if s >= min(line, extent)]) or fitting[-1:]

    def _thread_rule(self, thread: Tile) -> BrokenRule | None:
        p, limits = self.workload, self.workload.machine.hw.limits
        points = math.prod(thread)
        most = max(self._fair, math.gcd(thread[self.map.row], self.map.vector_width))
        if (broken := check_limit("parallelism", points, most)) is not None:
            return broken
        narrowest = min([a.bytes for a in self.map.accesses])
        vectors, most = points // self.map.thread_vector_width(thread), max(MAX_VECTORS, MAX_NARROW_BYTES // narrowest)
        if (broken := check_limit("vectors per thread", vectors, most)) is not None or points == 1:
            return broken
        registers = map_registers(p, MapTile.of(p, thread, thread), limits)
        return check_limit("registers per thread", registers, limits.max_registers_per_thread)

    @property
    def _first_axes(self) -> tuple[int | None, ...]:
        """The row: there is no reuse."""
        return (self.map.row,)
