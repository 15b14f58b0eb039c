"""ROLLER's rules for attention on warpgroups: KV tiles, warpgroups of a block, pipeline stages.

A warpgroup has 64 rows with up to 256 of their outputs and all products of a KV tile. A block's tile grows by
warpgroups along rows and columns, which share the staged keys and values.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.construct.align import round_up
from roller_svc.construct.rules import (
    MIN_MATRIX_STAGES,
    Enumerated,
    Shape,
    ThreadTile,
    axis_steps,
    extent_on,
    spatial_grid,
    subsample,
)
from roller_svc.construct.scale_up import ScaleUpLevel, SearchTrace, scale_up
from roller_svc.families.common.gpu.attention.mask import KeyBounds
from roller_svc.families.common.gpu.attention.shapes import (
    INSTRUCTION_GRANULE,
    MAX_COLUMNS,
    MAX_STAGES,
    round_up_to_instruction,
    sizes_up_to,
)
from roller_svc.families.common.gpu.matrix.tile import STEP_BYTES, WORD_BYTES
from roller_svc.families.common.gpu.warpgroups.tile import MAX_CONSUMERS, ROWS, THREAD_REGISTERS
from roller_svc.families.gpu.wgmma_attention.cost import attention_block, block_resources, consumer_registers
from roller_svc.families.gpu.wgmma_attention.workload import (
    WgmmaAttentionFacts,
    WgmmaAttentionTile,
    operands_through_registers,
)
from roller_svc.ir.group import AxisRole
from roller_svc.ir.rprogram import WARPGROUP_THREADS, PipelineOptions
from roller_svc.ir.search import BrokenRule, TileMetrics, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.occupancy import blocks_per_core
from roller_svc.perf.workload import Workload

KEYS = tuple(range(INSTRUCTION_GRANULE, MAX_COLUMNS + 1, INSTRUCTION_GRANULE))  # of a KV tile


@dataclass(frozen=True, slots=True)
class WgmmaAttentionRules(Enumerated):
    workload: Workload[WgmmaAttentionFacts]

    @property
    def _points(self) -> int:
        """Points to which the traffic of a tile refers: rows and keys."""
        p = self.workload
        return p.outer_points // p.extent(p.n) * p.extent(p.k)

    def shapes(self, log: SearchTrace, budget: int, limit: int) -> tuple[Shape, ...]:
        """Scale up warpgroups, then blocks, then choose stages; at most `limit`, evenly by data reuse."""
        grown = scale_up(self._group_stage(), log, budget, reduce_threads=WARPGROUP_THREADS)
        shapes: list[Shape] = []
        for group in (*grown.saturated, *grown.border):
            base = ThreadTile(group, WARPGROUP_THREADS)
            found = scale_up(self._block_stage(base), log, budget, base.tile, reduce_threads=WARPGROUP_THREADS)
            shapes += [self._shape(block, base) for block in (*found.saturated, *found.border)]
        shapes.sort(key=lambda s: self.evaluate(s.block, s.base).traffic)
        return tuple(subsample(shapes, limit))

    # register level -------------------------------------------------------------------------------------------------
    def _group_stage(self) -> ScaleUpLevel:
        p = self.workload
        steps = self._steps({p.m: (ROWS,), p.k: sizes_up_to(KEYS, p.extent(p.k))})
        return ScaleUpLevel(
            level=p.machine.hw.thread_level.name,
            points=self._points,
            steps=steps,
            axis_rank=tuple(range(len(steps))),
            evaluate=self._evaluate_warpgroup,
            is_saturated=lambda _: True,
            capacity_bytes=THREAD_REGISTERS * WARPGROUP_THREADS * WORD_BYTES,
        )

    def _evaluate_warpgroup(self, group: Tile) -> TileMetrics:
        """Return register bytes, and bytes read from shared memory per multiply-add."""
        tile, size = attention_block(self.workload, group, MIN_MATRIX_STAGES), self.workload.machine.unit.in_dtype.bytes
        rule = check_limit("registers per thread", consumer_registers(tile, self.workload.facts), THREAD_REGISTERS)
        return TileMetrics(tile.live_registers * WARPGROUP_THREADS * WORD_BYTES, size / ROWS + size / tile.kv, rule)

    # block level ----------------------------------------------------------------------------------------------------
    def _block_stage(self, base: ThreadTile) -> ScaleUpLevel:
        p = self.workload
        most = {p.m: -(-p.extent(p.m) // ROWS), p.n: -(-p.extent(p.n) // extent_on(base.tile, p.n))}
        steps = tuple(
            tuple(extent * c for c in range(1, min(MAX_CONSUMERS, most.get(axis, 1)) + 1)) for axis, extent in enumerate(base.tile)
        )
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
        tile = attention_block(p, block, MIN_MATRIX_STAGES)
        traffic = (p.a.requested_bytes(block) / max(1, p.extent(p.k)) + p.b.requested_bytes(block) / tile.kv) / tile.m
        return TileMetrics(tile.shared_bytes, traffic, self._too_large(tile, base))

    def _too_large(self, tile: WgmmaAttentionTile, base: ThreadTile) -> BrokenRule | None:
        if tile.group_n != extent_on(base.tile, self.workload.n):
            return BrokenRule("columns of a warpgroup", tile.group_n, extent_on(base.tile, self.workload.n))
        if through := tuple(operands_through_registers(tile)):
            return BrokenRule(f"{' and '.join(through)} through registers", len(through), 0)
        limits, rows = self.workload.machine.hw.limits, self.workload.extent(self.workload.m)
        registers = consumer_registers(tile, self.workload.facts)
        return (
            check_limit("columns of a warpgroup", tile.consumers, MAX_CONSUMERS)
            # A dimension of extent 1 is always at coordinate 0, so all warps would store to its one row.
            or check_limit("one row, which the warps would all write", 2, rows)
            or check_limit("registers per thread", registers, tile.consumer_registers)
            or check_limit("shared memory", tile.shared_bytes, limits.shared_bytes_per_block)
        )

    def _shape(self, block: Tile, base: ThreadTile) -> Shape:
        """Choose as many stages as cost no resident block; persistent blocks for several waves of equal tiles."""
        p = self.workload
        steps = -(-p.extent(p.k) // extent_on(block, p.k))
        resident = self._resident(block, MIN_MATRIX_STAGES)
        most = max(MIN_MATRIX_STAGES, min(MAX_STAGES, steps))
        deep = [s for s in range(MIN_MATRIX_STAGES, most + 1) if self._resident(block, s) == resident]
        at_once = resident * p.machine.cores
        stays = spatial_grid(p, block) > at_once and self.workload.facts.operands.bounds == KeyBounds()
        return Shape(block, base, 1, PipelineOptions(deep[-1], persistent_blocks=at_once if stays else 0))

    def _resident(self, block: Tile, stages: int) -> int:
        """Return the resident blocks of a core; 0 if none fits."""
        hw, tile = self.workload.machine.hw, attention_block(self.workload, block, stages)
        fits = tile.shared_bytes <= hw.limits.shared_bytes_per_block
        return blocks_per_core(block_resources(tile, self.workload.facts), hw) if fits else 0

    # parts ----------------------------------------------------------------------------------------------------------
    def _steps(self, chosen: dict[int | None, Tile]) -> tuple[Tile, ...]:
        p = self.workload
        features = next(i for i, axis in enumerate(p.space.axes) if axis.role is AxisRole.INNER)
        columns = round_up_to_instruction(-(-p.extent(p.n) // -(-p.extent(p.n) // MAX_COLUMNS)))
        granule = max(INSTRUCTION_GRANULE, STEP_BYTES // p.machine.unit.in_dtype.bytes)
        return axis_steps(p, chosen | {p.n: (columns,), features: (round_up(p.extents[features], granule),)})
