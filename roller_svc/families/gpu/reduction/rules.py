"""ROLLER's rules for row reductions on a GPU: 16-byte vectors, threads that share a row, rows in registers."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from roller_svc.construct.align import powers_of_two, tile_multiples
from roller_svc.construct.rules import ThreadTile, replaced
from roller_svc.construct.scale_up import ScaleUpResult
from roller_svc.errors import require
from roller_svc.families.common.gpu.loop_rules import LoopRules
from roller_svc.families.common.gpu.row_space import RowAccess, RowIteration, RowSpace, exceeds_registers
from roller_svc.families.common.gpu.serial_rules import SerialRules
from roller_svc.ir.schedule import shared_bytes
from roller_svc.ir.search import BrokenRule, TileMetrics, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.occupancy import block_registers
from roller_svc.perf.workload import Workload

MAX_SHARED_POINTS = 8  # outer points of a thread along an axis that some operand lacks
MAX_ACCUMULATORS = 48  # of a thread, of 4 bytes
MAX_REGISTERS = 128  # with more than a chunk in flight: 512 threads per SM hide the remaining latency
MAX_THREADS = 256  # of a block whose rows need no more
ROWS_OF_COPY = 16  # rows of a block that share copies of operands, of which a thread has up to MAX_SHARED_POINTS
MAX_IDLE_ROWS = 0.125  # of rows that blocks with rows of one alignment lack
FIRST_TILES = 2  # of a thread that reuses an operand, by least traffic: the first may leave few threads a core
MAX_UNROLLED = 512  # statements of a packed chunk: code generation unrolls no more (codegen/cuda/function.py)
COLUMN_REDUCE_THREADS = (32, 8, 1)  # of rows that are adjacent in memory (column reductions)
PACKED_REDUCE_THREADS = (128, 64)  # more of such rows, whose packed words are few
CHUNKS_PER_THREAD = (1, 4, 16)  # chunks per thread of a row that is short enough
REGISTER_ROW_CHUNKS = (1, 2, 4, 8, 16)  # of rows that several statements read, which registers may hold
CHUNKS_IN_FLIGHT = (1, 2, 4)  # of one thread
NARROW_CHUNKS_IN_FLIGHT = (16,)  # more of single elements of columns


@dataclass(frozen=True, slots=True)
class ReductionRules(LoopRules):
    rows: RowSpace

    MIN_THREADS: ClassVar[int] = 128

    def reduce_thread_choices(self) -> tuple[int, ...]:
        """Return threads per row: from one chunk per thread to a few, and a warp; some warps for columns."""
        chunks = -(-self.rows.points // self.rows.vector_elems)
        if not self.rows.contiguous_along_reduction:
            more = PACKED_REDUCE_THREADS if self.rows.packed is not None else ()
            return tuple([n for n in (*more, *COLUMN_REDUCE_THREADS) if n <= chunks])
        choices = self._lanes_of_row(self.rows.vector_elems)
        if self.rows.peeled_elems:
            choices |= self._lanes_of_row(self.rows.peeled_elems)
        return tuple(sorted(choices, reverse=True))

    def _lanes_of_row(self, vector_elems: int) -> set[int]:
        """Return threads per row, with vectors of that many elements."""
        limits = self.workload.machine.hw.limits
        all_of_it = powers_of_two(-(-self.rows.points // vector_elems))[-1]
        most = 1 << (limits.max_threads_per_block.bit_length() - 1)
        each = REGISTER_ROW_CHUNKS if self.rows.cached_inputs else CHUNKS_PER_THREAD
        choices = {max(1, min(most, all_of_it // n)) for n in each}
        return choices | {min(all_of_it, limits.warp_size, most)}

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        """Return tiles of least traffic and of fewest instructions, the smallest, and vectors of peeled rows."""
        packed = [tile for tile in grown.saturated if self.rows.packed_in(tile) is not None]
        fewest = sorted(packed, key=self._packed_instructions)[:1]
        first = grown.saturated[: FIRST_TILES if self.rows.reuse_axes else 1]
        whole = [*first, *fewest, *sorted(grown.saturated, key=math.prod)[:1]]
        peeled = self.rows.peeled_elems
        if self.rows.is_peeled(self.rows.vector_elems):
            tiles = self._peeled_tiles(peeled, lanes)
            if len(tiles) == 1:
                tiles += whole[:1]
            if lanes == self.reduce_thread_choices()[0]:  # long rows of single elements fit into shared memory
                tiles.append((1,) * len(self.workload.extents))
            return list(dict.fromkeys(tiles))
        if not peeled:
            return list(dict.fromkeys(whole))
        tiles = []
        if lanes in self._lanes_of_row(self.rows.vector_elems):
            tiles += whole
        if lanes in self._lanes_of_row(peeled):
            tiles += self._peeled_tiles(peeled, lanes)
        return list(dict.fromkeys(tiles))

    def _peeled_tiles(self, vector_elems: int, lanes: int) -> list[Tile]:
        """Return a vector of a peeled row, and of rows in turn that share an operand which blocks copy.

        A block has as many rows as make the copies short, if there are enough rows for all cores.
        """
        p = self.workload
        one = replaced((1,) * len(p.extents), self.rows.inner, vector_elems)
        rows = math.prod([p.extents[i] for i in self.rows.spatial])
        tiles = [one]
        for i in self.rows.reuse_axes:
            if any(access.is_aligned and i not in access.footprint.axes for access in self.rows.read):
                continue  # rows that share an aligned operand are computed at once
            if not any(self._shares_row(access, i) for access in self.rows.read):
                continue
            most = min(MAX_SHARED_POINTS, max(2, ROWS_OF_COPY * lanes // MAX_THREADS))
            tiles += [
                replaced(one, i, n) for n in sorted({2, most // 2, most} - {1}) if n <= min(p.extents[i], rows // p.machine.cores)
            ]
        return tiles

    def _shares_row(self, access: RowAccess, axis: int) -> bool:
        """Return whether blocks may copy an operand for the rows along an axis."""
        return access.staged_axes is not None and axis not in access.staged_axes

    def _packed_instructions(self, thread: Tile) -> float:
        """Return the instructions for a point of a thread's tile of packed weights."""
        points = math.prod([thread[i] for i in self.rows.spatial])
        return require(self.rows.packed, "packed weights").instructions(thread, points) / points

    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics:
        threads = self._threads(block, base)
        iteration = self.rows.row_iteration(block, base.tile, base.reduce_threads)
        too_large = self._capacity_rule(block, iteration, base, threads)
        too_large = too_large or check_limit("rows of one alignment", self._idle_rows(block, base.tile), MAX_IDLE_ROWS)
        return self._measure_rows(block, iteration, too_large, None if too_large else self._alignment_rule(block, threads))

    def _idle_rows(self, block: Tile, thread: Tile) -> float:
        """Return the rows that blocks of peeled rows lack, whose rows alternate, relative to those that there are."""
        there = idle = 1
        for i in self.rows.spatial:
            if thread[i] > 1 and self.rows.is_peeled(thread[self.rows.inner]):
                extent, together = self.workload.extents[i], block[i] * self.rows.periods[i]
                there, idle = there * extent, idle * -(-extent // together) * together
        return idle / there - 1.0

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return a warp per row, or a thread per row, a chunk at a time."""
        p, rows = self.workload, self.rows
        thread = tuple([rows.vector_elems if i == rows.inner else 1 for i in range(len(p.extents))])
        warp = p.machine.hw.limits.warp_size
        found = (
            [(replaced(thread, rows.inner, rows.vector_elems * warp), ThreadTile(thread, warp))]
            if rows.contiguous_along_reduction
            else []
        )
        return [*found, (replaced(thread, p.contiguous_axis, warp), ThreadTile(thread)), (thread, ThreadTile(thread))]

    # steps ----------------------------------------------------------------------------------------------------------
    def _thread_steps(self, axis: int) -> Tile:
        """Return several points only where they are contiguous, or share an operand."""
        if axis == self.rows.inner:
            return (self.rows.vector_elems,)
        if axis == self.rows.contiguous_axis:
            return (self.rows.vector_rows,)
        return self._shared_points(axis) if axis in self.rows.reuse_axes else (1,)

    def _shared_points(self, axis: int) -> Tile:
        """Return the extents of a thread's tile along an axis that some operand lacks."""
        extent = self.workload.extents[axis]
        cuts = {-(-extent // parts) for parts in range(1, extent + 1)} if extent <= MAX_SHARED_POINTS else set()
        return tuple(sorted(cuts.union(n for n in powers_of_two(MAX_SHARED_POINTS) if n < extent)))

    def _block_steps(self, axis: int, base: ThreadTile, epsilon: float) -> Tile:
        p, unit = self.workload, base.tile[axis]
        if axis == self.rows.inner:
            chunk = unit * base.reduce_threads
            rounds = self.rows.row_iteration(base.tile, base.tile, base.reduce_threads).iterations
            is_narrow = not self.rows.contiguous_along_reduction and self.rows.vector_rows == 1
            flights = {min(n, rounds) for n in (*CHUNKS_IN_FLIGHT, *(NARROW_CHUNKS_IN_FLIGHT if is_narrow else ()))}
            if any(a.num_passes > 1 for a in self.rows.read):
                flights.add(rounds)
            return tuple([chunk * n for n in sorted(flights)])
        fitting = tuple([unit * c for c in tile_multiples(p.extents[axis], unit, epsilon, MAX_THREADS)]) or (unit,)
        if axis == self.rows.contiguous_axis:
            # second alignment: a whole transaction of contiguous elements, or the whole axis
            need = p.machine.dram.transaction_bytes // max(a.bytes for a in self.rows.accesses)
            fitting = tuple([s for s in fitting if s >= need]) or fitting[-1:]
        return fitting

    # rules ----------------------------------------------------------------------------------------------------------
    def _thread_rule(self, thread: Tile) -> BrokenRule | None:
        iteration = self.rows.row_iteration(thread, thread, 1)
        packed, broken = self.rows.packed_in(thread), None
        if packed is not None:
            broken = check_limit("unrolled statements", packed.row_statements(thread, iteration.points), MAX_UNROLLED)
        if broken is None and iteration.points > 1:
            sums = self.rows.accumulators(thread, iteration) * self.rows.words
            broken = check_limit("registers per thread", sums, MAX_ACCUMULATORS)
        return broken

    def _capacity_rule(self, block: Tile, iteration: RowIteration, base: ThreadTile, threads: int) -> BrokenRule | None:
        limits = self.workload.machine.hw.limits
        packed, broken = self.rows.packed_in(base.tile), None
        if packed is not None and iteration.chunks_in_flight > 1:
            statements = iteration.chunks_in_flight * packed.chunk_statements(base.tile, iteration.points)
            broken = check_limit("unrolled statements", statements, MAX_UNROLLED)
        most = min(limits.max_threads_per_block, limits.max_threads_per_core)
        broken = broken or check_limit("threads per block", threads, most)
        broken = broken or check_limit("occupancy", threads, max(MAX_THREADS, base.reduce_threads))
        if broken is not None:
            return broken
        registers = self.rows.registers(base.tile, iteration, threads, limits)
        if iteration.chunks_in_flight > 1:
            broken = check_limit("registers per thread", registers, MAX_REGISTERS)
        of_block = block_registers(threads, min(registers, limits.max_registers_per_thread), limits)
        broken = broken or check_limit("registers per core", of_block, limits.registers_per_core)
        if broken is not None:
            return broken
        staged = shared_bytes(self.rows.shared_buffers(block, base.tile, iteration, base.reduce_threads, limits))
        broken = check_limit("shared memory", staged, limits.shared_bytes_per_block)
        if broken is None and self.rows.is_shared(iteration, threads, limits) and self._registers_hold_a_row():
            broken = BrokenRule("rows in shared memory", staged, 0)
        return broken

    def _registers_hold_a_row(self) -> bool:
        """Return whether the most threads that share a row hold it in registers, which overlaps more blocks."""
        vector, threads = self.rows.vector_elems, self.reduce_thread_choices()[0]
        elements = -(-self.rows.points // (vector * threads)) * vector
        return not exceeds_registers(elements, vector, threads, self.rows.words, self.workload.machine.hw.limits)

    # measures -------------------------------------------------------------------------------------------------------
    def _measure_rows(
        self, tile: Tile, iteration: RowIteration, too_large: BrokenRule | None, misaligned: BrokenRule | None = None
    ) -> TileMetrics:
        """Return metrics with the traffic of whole rows: once if they stay in registers, else per pass."""
        end_to_end = replaced(tile, self.rows.inner, self.rows.points)
        whole = iteration.is_single_pass
        moved = 0.0
        for access in self.rows.accesses:
            moved += access.transferred_bytes(end_to_end) * (1 if whole else access.num_passes)
        points = 1
        for i in self.rows.spatial:
            points *= tile[i]
        return TileMetrics(self.workload.footprint.bytes(tile), moved / points, too_large, misaligned)

    def _evaluate_thread(self, thread: Tile, lanes: int) -> TileMetrics:
        return self._measure_rows(thread, self.rows.row_iteration(thread, thread, lanes), self._thread_rule(thread))

    @property
    def _first_axes(self) -> tuple[int | None, ...]:
        """Chunks in flight before rows, of these the contiguous axis."""
        return (self.rows.inner, self.workload.contiguous_axis)


def reduction_rules(workload: Workload[RowSpace | None]) -> ReductionRules | SerialRules:
    """Return rules for rows that threads share; for a single point, one thread per point."""
    return SerialRules(workload) if workload.facts is None else ReductionRules(workload, workload.facts)
