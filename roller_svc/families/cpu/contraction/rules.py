"""ROLLER's rules for GEMM on a CPU: register tiles of a micro-kernel, packed blocks of a task."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from roller_svc.construct.rules import ThreadTile, extent_on, replaced, spatial_grid
from roller_svc.construct.scale_up import ScaleUpLevel, ScaleUpResult
from roller_svc.families.common.cpu.micro_kernel_cost import kernel_cycles
from roller_svc.families.common.cpu.rules import Steps, TileRules, equal_parts, equal_steps
from roller_svc.families.common.cpu.tasks import MIN_TASK_S
from roller_svc.families.cpu.contraction.blocking import L2_COLUMNS_FRACTION, plan_blocking
from roller_svc.families.cpu.contraction.cost import has_set_conflicts, tiles_cycles
from roller_svc.ir.search import BrokenRule, check_limit
from roller_svc.perf.footprint import Tile

M_STEPS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 14)  # 9 x 48 fills 31 of 32 registers
# A model reads the weights of a few rows from memory, although a kernel by itself finds panels of floats in the LLC.
MAX_ROWS_OF_PACKED_COLUMNS = 8
VECTOR_STEPS = (1, 2, 3, 4, 6)
K_STEPS = (256, 512)  # shorter k blocks move C too often, longer ones evict B's panels from L2
MAX_K_STEP = 1024  # a whole reduction up to here may be one k block: C is never read back
# Fractions of a cache for one packed block; the rest is for the other operand, C and the system. A panel of B in L2
# feeds the micro-kernel as fast as one in L1.
L2_PANEL_FRACTION, LLC_BLOCK_FRACTION = 0.2, 0.5
# Fraction of the LLC that retains a block on a shared server.
LLC_RETAINED_FRACTION = 0.1


class CpuContractionRules(TileRules):
    def thread_level(self, lanes: int) -> ScaleUpLevel:
        p = self.workload
        width = p.machine.unit.shape[-1]
        rows = tuple([r for r in M_STEPS if r <= p.extent(p.m)])
        if p.facts.has_packed_columns and p.extent(p.m) <= MAX_ROWS_OF_PACKED_COLUMNS:
            rows = (p.extent(p.m),)
        wide = tuple([width * v for v in VECTOR_STEPS if width * (v - 1) < p.extent(p.n)])
        return self._thread_level({p.m: rows, p.n: wide}, self._evaluate_thread, self._feeds_the_unit)

    def _task_steps(self, base: ThreadTile) -> Steps:
        p = self.workload
        depths = self._k_steps(base) if p.k is not None else (1,)
        axes: dict[int | None, Tile] = {p.k: depths}
        if p.m is not None:
            axes[p.m] = self._blocks(p.m, base, self._cuts())
        if p.n is not None:
            limit = int(self._block_of_b_bytes() / (p.packed_words(min(depths)) * p.elem_bytes))
            fewest = -(-p.extent(p.n) // max(base.tile[p.n], limit))
            near = [self._cuts_to_fit(limit, deep, base) for deep in depths for limit in self._retained_block_bytes()]
            axes[p.n] = self._blocks(p.n, base, [*(fewest * cut for cut in self._cuts()), *near])
        return axes

    def _is_large_enough(self, block: Tile) -> bool:
        return self._packing_share(block) <= 0.25 and self._shares_evenly(block)

    def _may_be_one_task(self) -> bool:
        return self.workload.lower_bound_s * self.workload.machine.cores < MIN_TASK_S

    def _footprint_bytes(self, block: Tile) -> int:
        return self._block_bytes(block, self.workload.m) + self._block_bytes(block, self.workload.n)

    def _capacity_rule(self, block: Tile, base: ThreadTile) -> BrokenRule | None:
        p, mach = self.workload, self.workload.machine
        last = mach.caches[0]
        panel_bytes = extent_on(base.tile, p.n) * p.packed_words(extent_on(block, p.k)) * p.elem_bytes
        broken = check_limit(f"{mach.hw.block_level.name} panel", panel_bytes, self._panel_bytes())
        broken = broken or check_limit(f"{last.name} block", self._block_bytes(block, p.n), self._block_of_b_bytes())
        if broken is None and extent_on(block, p.k) < p.extent(p.k):
            most = LLC_BLOCK_FRACTION * last.total_bytes / mach.cores
            broken = check_limit(f"{last.name} tile of C", self._tile_bytes(block), most)
        return broken

    def _panel_bytes(self) -> float:
        return L2_PANEL_FRACTION * self.workload.machine.hw.block_level.capacity_bytes

    def _block_of_b_bytes(self) -> float:
        mach = self.workload.machine
        return LLC_BLOCK_FRACTION * max(mach.caches[0].bytes_per_core, mach.hw.block_level.capacity_bytes)

    def _shares_evenly(self, block: Tile) -> bool:
        cores, tasks = self.workload.machine.cores, spatial_grid(self.workload, block)
        return tasks % cores == 0 or tasks >= 4 * cores

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return one row, one vector, the shortest k block."""
        p = self.workload
        one = tuple([1] * len(p.extents))
        thread, group = replaced(one, p.n, p.machine.unit.shape[-1]), p.machine.unit.k_group
        depths = [min(p.extent(p.k), depth * group) for depth in (K_STEPS[0], 8, 1)]
        return [(replaced(thread, p.k, depth), ThreadTile(thread)) for depth in depths]

    def _register_tiles(self, grown: ScaleUpResult) -> Sequence[Tile]:
        return grown.saturated or grown.border

    def _shape(self, thread: Tile) -> tuple[int, int]:
        p = self.workload
        return extent_on(thread, p.m), -(-extent_on(thread, p.n) // p.machine.unit.shape[-1])

    def _feeds_the_unit(self, thread: Tile) -> bool:
        """Return whether neither loads nor FMA latency limit the unit."""
        mach, (m, vectors) = self.workload.machine, self._shape(thread)
        return kernel_cycles(mach, m, vectors) <= m * vectors / (mach.fma_per_cycle / mach.unit.shape[-1]) * 1.01

    def _kernel_time(self, thread: Tile) -> tuple[float, float]:
        p = self.workload
        m, n = extent_on(thread, p.m), extent_on(thread, p.n)
        plan = plan_blocking(p, p.extents, thread)
        cycles = tiles_cycles(p, (p.extent(p.m), p.extent(p.n)), plan)
        collides = not plan.packs_a and has_set_conflicts(p, m)
        return cycles * (p.machine.costs.contraction.set_conflict_factor if collides else 1.0), 1 / m + 1 / n

    def _cuts(self) -> set[int]:
        """Return the numbers of blocks of an axis: for all cores, or for some of them."""
        cores = self.workload.machine.cores
        return {1, math.isqrt(cores), cores, 2 * cores} if cores > 1 else {1}

    def _retained_block_bytes(self) -> tuple[float, float]:
        """Return the bytes of a block of B that L2 retains while rows of A stream, and that the LLC retains."""
        mach = self.workload.machine
        return L2_COLUMNS_FRACTION * mach.hw.block_level.capacity_bytes, LLC_RETAINED_FRACTION * mach.caches[0].bytes_per_core

    def _cuts_to_fit(self, max_bytes: float, depth: int, base: ThreadTile) -> int:
        """Return the fewest column blocks of at most `max_bytes` each."""
        p = self.workload
        columns, unit = int(max_bytes / (p.packed_words(depth) * p.elem_bytes)), extent_on(base.tile, p.n)
        return -(-p.extent(p.n) // max(unit, columns // unit * unit))

    def _blocks(self, axis: int, base: ThreadTile, cuts: Iterable[int]) -> Tile:
        """Return the extents that divide the axis into `cuts` similar blocks of whole register tiles."""
        unit = base.tile[axis]
        return tuple(sorted(equal_parts(self.workload.extents[axis], unit, cuts, min_units=0.5) or {unit}))

    def _k_steps(self, base: ThreadTile) -> Tile:
        """Return k blocks in whole packed words, but for the last."""
        extent, group = self.workload.extent(self.workload.k), self.workload.machine.unit.k_group
        return tuple(min(extent, self._in_whole_runs(words) * group) for words in self._word_steps(base))

    def _in_whole_runs(self, words: int) -> int:
        """Return the words of a block of k that begins and ends where scales change, or that has one scale."""
        p, packed = self.workload, self.workload.facts.packed_b
        if words >= p.packed_words(p.extent(p.k)):
            return words
        if p.space.scale_runs is not None:
            run = p.space.scale_runs.k // p.machine.unit.k_group
        elif packed is not None:
            run = packed.run if packed.run < p.extent(p.k) else packed.granule
        else:
            return words
        return words // run * run or max(part for part in range(1, words + 1) if run % part == 0)

    def _word_steps(self, base: ThreadTile) -> Tile:
        p = self.workload
        depth = p.packed_words(p.extent(p.k))
        limit = int(self._panel_bytes() / (extent_on(base.tile, p.n) * p.elem_bytes))
        even = {equal_steps(depth, k) for k in K_STEPS if k < depth}
        if depth <= MAX_K_STEP:
            even.add(depth)
        longest = equal_steps(depth, MAX_K_STEP)
        if not plan_blocking(p, p.extents, base.tile).packs_a and longest <= limit:
            return (longest,)  # unpacked rows of A restart with each k block
        fitting = sorted(k for k in even if k <= limit)
        return tuple(fitting[-2:] or [max(1, min(depth, limit, K_STEPS[0]))])

    def _block_bytes(self, block: Tile, axis: int | None) -> int:
        return extent_on(block, axis) * self.workload.packed_words(extent_on(block, self.workload.k)) * self.workload.elem_bytes

    def _tile_bytes(self, block: Tile) -> int:
        return extent_on(block, self.workload.m) * extent_on(block, self.workload.n) * self.workload.elem_bytes

    def _packing_share(self, block: Tile) -> float:
        """Return elements packed per multiply-add, in units of the core's rate."""
        p, mach = self.workload, self.workload.machine
        m, n = extent_on(block, p.m), extent_on(block, p.n)
        return (1 / m + 1 / n) * mach.fma_per_cycle
