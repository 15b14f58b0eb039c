"""ROLLER's rules for attention on a matrix unit of warpgroups: keys of a step, warpgroups of a block, stages.

A warpgroup has 64 rows, all of their results and all products of a step; a block's tile grows by warpgroups, which
share the keys that are staged.
"""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.construct.rules import (
    MIN_MATRIX_STAGES,
    Base,
    Enumerated,
    Pipeline,
    Shape,
    at,
    axis_names,
    spatial_grid,
    spread,
    steps_along,
)
from roller_svc.construct.scale_up import Log, Look, Stage, scale_up
from roller_svc.families.common.gpu.attention.mask import KeyBounds
from roller_svc.families.common.gpu.attention.shapes import GRANULE, MOST_COLUMNS, MOST_STAGES, fitting, whole
from roller_svc.families.common.gpu.matrix.tile import WORD_BYTES
from roller_svc.families.common.gpu.warpgroups.tile import MOST_CONSUMERS, ROWS, THREAD_REGISTERS
from roller_svc.families.gpu.wgmma_attention.cost import block_needs, consumer_registers, group_block
from roller_svc.families.gpu.wgmma_attention.workload import AttentionGroupTile, GroupedAttention, through_registers
from roller_svc.ir.group import AxisRole
from roller_svc.ir.rprogram import WARPGROUP_THREADS
from roller_svc.perf.footprint import Tile
from roller_svc.perf.occupancy import blocks_per_core
from roller_svc.perf.workload import Workload

KEYS = tuple(range(GRANULE, MOST_COLUMNS + 1, GRANULE))  # of a step


@dataclass(frozen=True, slots=True)
class WgmmaAttention(Enumerated):
    workload: Workload[GroupedAttention]

    def shapes(self, log: Log, budget: int, limit: int) -> tuple[Shape, ...]:
        """Scale-up of warpgroups and of blocks, then stages; at most `limit`, evenly from those with most reuse on."""
        grown = scale_up(self._group_stage(), log, budget)
        shapes: list[Shape] = []
        for group in (*grown.large, *grown.border):
            base = Base(group, WARPGROUP_THREADS)
            found = scale_up(self._block_stage(base), log, budget)
            shapes += [self._shape(block, base) for block in (*found.large, *found.border)]
        shapes.sort(key=lambda s: self.look(s.block, s.base).traffic)
        return tuple(spread(shapes, limit))

    # register level -------------------------------------------------------------------------------------------------
    def _group_stage(self) -> Stage:
        p = self.workload
        steps = self._steps({p.m: (ROWS,), p.k: fitting(KEYS, p.extent(p.k))})
        return Stage(
            level=p.machine.hw.thread_level.name, names=axis_names(p), steps=steps, rank=tuple(range(len(steps))),
            look=self._group_look, saturates=lambda _: True,
        )  # fmt: skip

    def _group_look(self, group: Tile) -> Look:
        """Bytes of registers; bytes read from shared memory for one multiply-add."""
        tile = group_block(self.workload, group, MIN_MATRIX_STAGES)
        rule = "registers per thread" if consumer_registers(tile, self.workload.facts) > THREAD_REGISTERS else ""
        return Look(tile.held_registers * WARPGROUP_THREADS * WORD_BYTES, 1 / ROWS + 1 / tile.keys, rule)

    # block level ----------------------------------------------------------------------------------------------------
    def _block_stage(self, base: Base) -> Stage:
        p = self.workload
        most = min(MOST_CONSUMERS, -(-p.extent(p.m) // ROWS))
        steps = tuple(
            tuple(ROWS * c for c in range(1, most + 1)) if axis == p.m else (extent,)
            for axis, extent in enumerate(base.thread)
        )
        return Stage(
            level=p.machine.hw.block_level.name, names=axis_names(p), steps=steps, rank=tuple(range(len(steps))),
            look=lambda block: self.look(block, base), saturates=lambda _: True,
        )  # fmt: skip

    def look(self, block: Tile, base: Base) -> Look:
        """Bytes of the fewest stages, bytes loaded from outside for one multiply-add, broken rules."""
        p = self.workload
        tile = group_block(p, block, MIN_MATRIX_STAGES)
        traffic = (p.a.moved_bytes(block) / max(1, p.extent(p.k)) + p.b.moved_bytes(block) / tile.keys) / tile.m
        return Look(tile.shared_bytes, traffic, self._too_large(tile))

    def _too_large(self, tile: AttentionGroupTile) -> str:
        if through := " and ".join(through_registers(tile)):
            return f"{through} through registers"
        if consumer_registers(tile, self.workload.facts) > tile.consumer_registers:
            return "registers per thread"
        limits = self.workload.machine.hw.limits
        return "shared memory" if tile.shared_bytes > limits.shared_bytes_per_block else ""

    def _shape(self, block: Tile, base: Base) -> Shape:
        """As many stages as do not keep other blocks from the core; blocks that stay, where there are more tiles than
        run at once and all take as long."""
        p = self.workload
        steps = -(-p.extent(p.k) // at(block, p.k))
        resident = self._resident(block, MIN_MATRIX_STAGES)
        most = max(MIN_MATRIX_STAGES, min(MOST_STAGES, steps))
        deep = [s for s in range(MIN_MATRIX_STAGES, most + 1) if self._resident(block, s) == resident]
        at_once = resident * p.machine.cores
        stays = spatial_grid(p, block) > at_once and self.workload.facts.found.bounds == KeyBounds()
        return Shape(block, base, 1, Pipeline(deep[-1], blocks=at_once if stays else 0))

    def _resident(self, block: Tile, stages: int) -> int:
        """Blocks of a core; 0: not even one."""
        hw, tile = self.workload.machine.hw, group_block(self.workload, block, stages)
        fits = tile.shared_bytes <= hw.limits.shared_bytes_per_block
        return blocks_per_core(block_needs(tile, self.workload.facts), hw) if fits else 0

    # parts ----------------------------------------------------------------------------------------------------------
    def _steps(self, chosen: dict[int | None, Tile]) -> tuple[Tile, ...]:
        p = self.workload
        features = next(i for i, axis in enumerate(p.space.axes) if axis.role is AxisRole.INNER)
        columns = whole(-(-p.extent(p.n) // -(-p.extent(p.n) // MOST_COLUMNS)))
        return steps_along(p, chosen | {p.n: (columns,), features: (whole(p.extents[features]),)})
