"""ROLLER's rules for attention on warps: rows and keys of warps, rows and KV tiles of blocks, KV splits.

Tiles of warps and blocks grow along rows and keys only: the output of a row stays in registers whole, or in halves if
there are too few registers, and head_dim is reduced whole.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from roller_svc.construct.align import powers_of_two
from roller_svc.construct.rules import (
    MIN_MATRIX_STAGES,
    Enumerated,
    Shape,
    ThreadTile,
    extent_on,
    replaced,
    spatial_grid,
)
from roller_svc.construct.scale_up import ScaleUpLevel, SearchTrace, scale_up
from roller_svc.families.common.gpu.attention.shapes import (
    MAX_COLUMNS,
    MAX_STAGES,
    round_up_to_instruction,
    sizes_up_to,
)
from roller_svc.families.common.gpu.attention.tile import AttentionOperands, MmaAttentionTile, thread_registers
from roller_svc.families.common.gpu.matrix.tile import ROWS, WORD_BYTES
from roller_svc.families.gpu.mma_attention.cost import attention_block
from roller_svc.ir.group import AxisRole
from roller_svc.ir.rprogram import PipelineOptions
from roller_svc.ir.search import BrokenRule, TileMetrics, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.occupancy import block_registers
from roller_svc.perf.workload import Workload

WARP_ROWS = (ROWS, 2 * ROWS)
WARP_KEYS = (16, 32, 64, 128)
MAX_WARPS = 8
MAX_SPLITS = 64  # blocks that share the keys
MIN_KV_TILES = 2  # of each split
SPILL_SLACK = 3  # registers below the limit, by the model, from which no kernel spilled


@dataclass(frozen=True, slots=True)
class MmaAttentionRules(Enumerated):
    workload: Workload[AttentionOperands]

    @property
    def _points(self) -> int:
        """Points to which the traffic of a tile refers: rows and keys."""
        p = self.workload
        return p.outer_points // p.extent(p.n) * p.extent(p.k)

    def shapes(self, log: SearchTrace, budget: int, limit: int) -> tuple[Shape, ...]:
        """Scale up warps, then blocks, then split keys; at most `limit`, those with most data reuse first.

        Blocks compute all columns of their rows, or half of these if no tile has enough registers for them.
        """
        passes = -(-self.workload.extent(self.workload.n) // MAX_COLUMNS)
        found = self._shapes(passes, log, budget, limit)
        return found if found or not self.workload.facts.has_softmax else self._shapes(2 * passes, log, budget, limit)

    def _shapes(self, passes: int, log: SearchTrace, budget: int, limit: int) -> tuple[Shape, ...]:
        """Return the shapes whose blocks compute a part of the columns."""
        found: dict[Shape, None] = {}
        grown = scale_up(self._warp_stage(passes), log, budget)
        for warp in (*grown.saturated, *grown.border):
            for lanes in (1, 2, 4) if self.workload.facts.has_softmax else (1,):
                base = ThreadTile(warp, lanes * self.workload.machine.hw.limits.warp_size)
                blocks = scale_up(self._block_stage(base, lanes), log, budget, base.tile, reduce_threads=base.reduce_threads)
                for block in (*blocks.saturated, *blocks.border):
                    found |= dict.fromkeys(self._pipelines(block, base))
        order = sorted(found, key=lambda s: self.evaluate(s.block, s.base).traffic)
        return tuple(order[:limit])

    # register level -------------------------------------------------------------------------------------------------
    def _warp_stage(self, passes: int) -> ScaleUpLevel:
        p, limits = self.workload, self.workload.machine.hw.limits
        columns = (round_up_to_instruction(-(-p.extent(p.n) // passes)),)
        rows, keys = sizes_up_to(WARP_ROWS, p.extent(p.m)), sizes_up_to(WARP_KEYS, p.extent(p.k))
        steps = self._steps({p.m: rows, p.k: keys, p.n: columns})
        return ScaleUpLevel(
            level=p.machine.hw.thread_level.name,
            points=self._points,
            steps=steps,
            axis_rank=tuple(range(len(steps))),
            evaluate=self._evaluate_warp,
            is_saturated=lambda _: True,
            capacity_bytes=(limits.max_registers_per_thread - SPILL_SLACK) * WORD_BYTES * limits.warp_size,
        )

    def _evaluate_warp(self, warp: Tile) -> TileMetrics:
        """Return register bytes where most warps share copies, and fragment bytes per multiply-add."""
        p, limits = self.workload, self.workload.machine.hw.limits
        block = replaced(warp, p.m, extent_on(warp, p.m) * MAX_WARPS)
        tile = attention_block(p, p.facts, block, warp, (MIN_MATRIX_STAGES, 1))
        registers = thread_registers(tile, p.facts)
        rule = check_limit("registers per thread", registers, limits.max_registers_per_thread - SPILL_SLACK)
        size = p.machine.unit.in_dtype.bytes
        traffic = size / extent_on(warp, p.m) + size / extent_on(warp, p.k)
        return TileMetrics(registers * WORD_BYTES * limits.warp_size, traffic, rule)

    # block level ----------------------------------------------------------------------------------------------------
    def _block_stage(self, base: ThreadTile, key_warps: int) -> ScaleUpLevel:
        """Scale up a block; warps split keys only where one of them has all rows."""
        p = self.workload
        rows, keys = extent_on(base.tile, p.m), extent_on(base.tile, p.k)
        most = 1 if key_warps > 1 else min(MAX_WARPS, -(-p.extent(p.m) // rows))
        steps = self._steps({p.m: tuple(rows * c for c in powers_of_two(most)), p.k: (keys * key_warps,)})
        steps = tuple(extents if axis in (p.m, p.k) else (base.tile[axis],) for axis, extents in enumerate(steps))
        return ScaleUpLevel(
            level=p.machine.hw.block_level.name,
            points=self._points,
            steps=steps,
            axis_rank=tuple(range(len(steps))),
            evaluate=lambda block: self.evaluate(block, base),
            is_saturated=lambda _: True,
            capacity_bytes=p.machine.hw.limits.shared_bytes_per_block,
        )

    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics:
        """Return bytes with the fewest stages, bytes loaded per multiply-add, and broken rules."""
        p = self.workload
        tile = attention_block(p, self.workload.facts, block, base.tile, (MIN_MATRIX_STAGES, 1))
        traffic = (p.a.requested_bytes(block) / max(1, p.extent(p.k)) + p.b.requested_bytes(block) / tile.kv) / tile.m
        return TileMetrics(tile.shared_bytes, traffic, self._too_large(tile), self._misaligned(tile))

    def _too_large(self, tile: MmaAttentionTile) -> BrokenRule | None:
        p, limits = self.workload, self.workload.machine.hw.limits
        most = min(MAX_WARPS * limits.warp_size, limits.max_threads_per_block)
        broken = check_limit("threads per block", tile.threads, most)
        broken = broken or check_limit("shared memory", tile.shared_bytes, limits.shared_bytes_per_block)
        if broken is None and tile.kv_warps > 1:
            broken = check_limit("keys per warp", p.extent(p.m), tile.m)
            broken = broken or check_limit("keys per warp", (tile.kv_warps - 1) * tile.warp_kv + 1, p.extent(p.k))
        return broken

    def _misaligned(self, tile: MmaAttentionTile) -> BrokenRule | None:
        """Return the register rule; threads copy less as more warps share a KV tile."""
        limits, registers = self.workload.machine.hw.limits, thread_registers(tile, self.workload.facts)
        broken = check_limit("registers per thread", registers, limits.max_registers_per_thread - SPILL_SLACK)
        of_block = block_registers(tile.threads, registers, limits)
        return broken or check_limit("registers per core", of_block, limits.registers_per_core)

    # device level ---------------------------------------------------------------------------------------------------
    def _pipelines(self, block: Tile, base: ThreadTile) -> Iterator[Shape]:
        """Yield stages that fit, and KV splits until every core has work."""
        p, limits = self.workload, self.workload.machine.hw.limits
        steps = -(-p.extent(p.k) // extent_on(block, p.k))
        deepest = MAX_STAGES if p.facts.k.is_async or p.facts.v.is_async else MIN_MATRIX_STAGES
        for parts in self._parts(block, steps):
            most = max(MIN_MATRIX_STAGES, min(deepest, steps // parts))
            for stages in range(MIN_MATRIX_STAGES, most + 1):
                tile = attention_block(p, self.workload.facts, block, base.tile, (stages, parts))
                if tile.shared_bytes <= limits.shared_bytes_per_block:
                    yield Shape(block, base, parts, PipelineOptions(stages))

    def _parts(self, block: Tile, steps: int) -> tuple[int, ...]:
        """Return the KV splits: powers of two and whole waves, without empty splits."""
        cores, grid = self.workload.machine.cores, spatial_grid(self.workload, block)
        if grid >= cores or not self.workload.facts.has_softmax:
            return (1,)
        waves = {cores * n // grid for n in (1, 2, 4)}
        tried = sorted({1} | {n for n in (*powers_of_two(MAX_SPLITS), *waves) if n * grid <= 4 * cores and n <= MAX_SPLITS})
        sizes_up_to = [n for n in tried if n == 1 or ((n - 1) * math.ceil(steps / n) < steps and steps >= MIN_KV_TILES * n)]
        return (sizes_up_to[0], *(n for n in sizes_up_to[1:] if 2 * n * grid > cores or n == sizes_up_to[-1]))

    # parts ----------------------------------------------------------------------------------------------------------
    def _steps(self, chosen: dict[int | None, Tile]) -> tuple[Tile, ...]:
        rest = {self._features: (round_up_to_instruction(self._extent(self._features)),)}
        return tuple([(chosen | rest).get(i, (1,)) for i in range(len(self.workload.extents))])

    @property
    def _features(self) -> int:
        return next(i for i, axis in enumerate(self.workload.space.axes) if axis.role is AxisRole.INNER)

    def _extent(self, axis: int) -> int:
        return self.workload.extents[axis]
