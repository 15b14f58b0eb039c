"""ROLLER's rules for direct convolution on a CPU: output positions in registers, patches and weights in caches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

from roller_svc.construct.align import round_up
from roller_svc.construct.rules import Relaxable, ThreadTile, axis_names, extent_on, fills_waves, replaced, spatial_grid
from roller_svc.construct.scale_up import ScaleUpLevel, ScaleUpResult, TileMetrics
from roller_svc.families.common.cpu.image_space import ImageSpace
from roller_svc.families.common.cpu.micro_kernel_cost import kernel_cycles
from roller_svc.ir.group import AxisRole
from roller_svc.ir.rprogram import DEFAULT_PIPELINE, PipelineOptions
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

VECTORS = (1, 2, 3, 4)
MAX_ROWS = 28
MAX_BASES = 3
# Output positions of a register tile along the last axis, and along the one before it.
ALONG, ACROSS = (1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 13, 14, 15, 16, 20, 24, 28), (1, 2, 3, 4, 7)
# Fractions of caches: packed weights of a channel block, a panel of them, accumulators between channel blocks.
L2_WEIGHTS_FRACTION, L1_PANEL_FRACTION, LLC_ACCUMULATOR_FRACTION = 0.5, 0.7, 0.4
TASKS_PER_CORE = (1, 2, 4, 8, 16)


@dataclass(frozen=True)
class CpuConvolutionRules(Relaxable):
    workload: Workload[Any]
    image: ImageSpace
    needs_whole_waves: bool = True

    def relax(self) -> Self:
        return replace(self, needs_whole_waves=False)

    def reduce_thread_choices(self) -> tuple[int, ...]:
        return (1,)

    # register tiles -------------------------------------------------------------------------------------------------
    def thread_level(self, lanes: int) -> ScaleUpLevel:
        """Return one vector and one row: `rank_thread_tiles` ranks the short list of register tiles."""
        one = self._smallest
        return ScaleUpLevel(
            level=self.workload.machine.hw.thread_level.name,
            names=axis_names(self.workload),
            steps=tuple((extent,) for extent in one),
            axis_rank=tuple(range(len(one))),
            evaluate=lambda t: TileMetrics(self._registers(t), 1.0, self._register_rule(t)),
            is_saturated=lambda t: False,
        )

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        """Return the register tiles with the fewest cycles for the whole problem, edges included."""
        return sorted(self.register_tiles(), key=self._kernel_time)[:MAX_BASES] or list(grown.border)

    def register_tiles(self) -> list[Tile]:
        """Return all tiles that fit in registers."""
        p, image = self.workload, self.image
        width = p.machine.unit.shape[-1]
        last, extent = self._pixels[-1], p.extents[self._pixels[-1]]
        second = self._pixels[-2] if len(self._pixels) > 1 else None
        across = [a for a in ACROSS if (second is None and a == 1) or (second is not None and a <= p.extents[second])]
        if image.along_filters:
            wide = [width * v for v in VECTORS if width * (v - 1) < image.filters.extent]
            along = [a for a in ALONG if a <= extent]
        else:
            wide = [r for r in range(1, 15) if r <= image.filters.extent]
            along = [width * v for v in VECTORS if width * (v - 1) < extent]
        tiles = [
            replaced(replaced(replaced(self._smallest, p.n, f), second, b), last, a)
            for f, a, b in itertools.product(wide, along, across)
        ]
        return [t for t in tiles if not self._register_rule(t)]

    @cached_property
    def _pixels(self) -> tuple[int, ...]:
        """Positions of the axes of output positions."""
        return tuple(i for i, a in enumerate(self.workload.space.axes) if a.role is AxisRole.PIXEL)

    @cached_property
    def _smallest(self) -> Tile:
        p = self.workload
        one = tuple([1] * len(p.extents))
        return replaced(one, p.n if self.image.along_filters else self._pixels[-1], p.machine.unit.shape[-1])

    def _shape(self, thread: Tile) -> tuple[int, int]:
        """Return (rows, vectors) of a register tile."""
        p = self.workload
        pixels, filters = math.prod([thread[i] for i in self._pixels]), extent_on(thread, p.n)
        rows, columns = (pixels, filters) if self.image.along_filters else (filters, pixels)
        return rows, -(-columns // p.machine.unit.shape[-1])

    def _registers(self, thread: Tile) -> int:
        """Return accumulators, one row of vectors, one broadcast element."""
        rows, vectors = self._shape(thread)
        return rows * vectors + vectors + 1

    def _register_rule(self, thread: Tile) -> str:
        rows, _ = self._shape(thread)
        fits = rows <= MAX_ROWS and self._registers(thread) <= self.workload.machine.hw.limits.max_registers_per_thread
        return "" if fits else "vector registers"

    def _kernel_time(self, thread: Tile) -> tuple[float, int]:
        p = self.workload
        rows, vectors = self._shape(thread)
        each, costs = kernel_cycles(p.machine, rows, vectors), p.machine.costs.convolution
        calls = math.prod(-(-p.extents[i] // thread[i]) for i in (*self._pixels, *(() if p.n is None else (p.n,))))
        cycles = calls * (self.image.depth * self.image.taps * each + costs.call_cycles)
        return cycles, -rows * vectors

    # tasks ----------------------------------------------------------------------------------------------------------
    def block_level(self, base: ThreadTile, epsilon: float) -> ScaleUpLevel:
        p = self.workload
        steps: list[Tile] = [(extent,) if i in p.reduced else (1,) for i, extent in enumerate(p.extents)]
        if p.k is not None:
            steps[p.k] = self._channel_steps(base)
        if p.n is not None:
            steps[p.n] = self._cuts(p.n, base, 3)
        for i in self._pixels:
            steps[i] = self._cuts(i, base, 3)
        last = self._pixels[-1]
        if self.image.window_dims[-1].tap is not None:  # a row is staged whole
            steps[last] = (round_up(p.extents[last], base.tile[last]),)
        return ScaleUpLevel(
            level=p.machine.hw.block_level.name,
            names=axis_names(self.workload),
            steps=tuple(steps),
            axis_rank=tuple(range(len(p.extents))),
            evaluate=lambda t: self.evaluate(t, base),
            is_saturated=lambda t: True,
        )

    def evaluate(self, block: Tile, base: ThreadTile) -> TileMetrics:
        p = self.workload
        too_large = self._capacity_rule(block, base)
        moved = p.a.requested_bytes(block) + p.b.requested_bytes(block)
        points = math.prod(min(b, e) for b, e in zip(block, p.extents, strict=True))
        return TileMetrics(
            p.footprint.bytes(block), moved / points, too_large, "" if too_large else self._balance_rule(block)
        )

    def _capacity_rule(self, block: Tile, base: ThreadTile) -> str:
        p, mach = self.workload, self.workload.machine
        depth = extent_on(block, p.k) * self.image.taps
        panels = extent_on(block, p.n) > extent_on(base.tile, p.n)
        if (
            panels
            and extent_on(block, p.n) * depth * p.elem_bytes > L2_WEIGHTS_FRACTION * mach.hw.block_level.capacity_bytes
        ):
            return f"{mach.hw.block_level.name} weights"
        pixels = math.prod(block[i] for i in self._pixels)
        if extent_on(block, p.k) < p.extent(p.k):
            sums = pixels * extent_on(block, p.n) * p.elem_bytes
            if sums > LLC_ACCUMULATOR_FRACTION * mach.caches[0].total_bytes / mach.cores:
                return f"{mach.caches[0].name} sums"
        return ""

    def _balance_rule(self, block: Tile) -> str:
        """Return the wave rule: cores must not wait for a last partial wave."""
        cores = self.workload.machine.cores
        tasks = spatial_grid(self.workload, block)
        return "" if not self.needs_whole_waves or fills_waves(tasks, cores) else "execution unit"

    def _channel_steps(self, base: ThreadTile) -> Tile:
        """Return all channels, and blocks whose panel fits in L1, or whose panels fit in L2."""
        p, mach = self.workload, self.workload.machine
        depth, row = p.extent(p.k), self.image.taps * p.elem_bytes
        panel = L1_PANEL_FRACTION * mach.caches[-1].bytes_per_core / (row * extent_on(base.tile, p.n))
        filters = round_up(p.extent(p.n), extent_on(base.tile, p.n))
        weights = L2_WEIGHTS_FRACTION * mach.hw.block_level.capacity_bytes / (row * filters)
        return tuple(
            sorted({depth} | {_equal_steps(depth, int(limit)) for limit in (panel, weights) if 1 <= limit < depth})
        )

    def _cuts(self, axis: int, base: ThreadTile, most: int) -> Tile:
        """Return the axis whole, or in a few equal parts for the cores."""
        p = self.workload
        extent, unit = p.extents[axis], base.tile[axis]
        parts = {1} if p.machine.cores == 1 else set()
        parts |= {n * p.machine.cores for n in TASKS_PER_CORE} | {1, 2, 4}
        sizes = {round_up(-(-extent // n), unit) for n in parts if n == 1 or extent >= n * unit}
        return tuple(sorted(sizes)[-most:])

    def pipeline_choices(self, block: Tile, base: ThreadTile, split_k: int) -> Sequence[PipelineOptions]:
        return (DEFAULT_PIPELINE,)

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return one row, one vector, one filter panel, one output position, a channel at a time."""
        p = self.workload
        thread = self._smallest
        block = tuple(p.extents[i] if i in p.reduced and i != p.k else extent for i, extent in enumerate(thread))
        return [(block, ThreadTile(thread))]


def _equal_steps(depth: int, limit: int) -> int:
    """Return steps of about equal length, none longer than the limit."""
    return -(-depth // -(-depth // limit))
