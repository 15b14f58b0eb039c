"""ROLLER's rules for direct convolution on a CPU: output positions in registers, patches and weights in caches."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from roller_svc.construct.align import round_up
from roller_svc.construct.rules import ThreadTile, extent_on, replaced
from roller_svc.construct.scale_up import ScaleUpLevel, ScaleUpResult
from roller_svc.families.common.cpu.image_space import ImageSpace
from roller_svc.families.common.cpu.micro_kernel_cost import kernel_cycles
from roller_svc.families.common.cpu.rules import Steps, TileRules, equal_parts, equal_steps
from roller_svc.ir.group import AxisRole
from roller_svc.ir.search import BrokenRule, check_limit
from roller_svc.perf.footprint import Tile

VECTORS = (1, 2, 3, 4)
MAX_ROWS = 28
# Fractions of caches: packed weights of a channel block, a panel of them, accumulators between channel blocks.
L2_WEIGHTS_FRACTION, L1_PANEL_FRACTION, LLC_ACCUMULATOR_FRACTION = 0.5, 0.7, 0.4
TASKS_PER_CORE, MAX_CUTS = (1, 2, 4, 8, 16), 3


@dataclass(frozen=True)
class CpuConvolutionRules(TileRules):
    image: ImageSpace

    # register tiles -------------------------------------------------------------------------------------------------
    def thread_level(self, lanes: int) -> ScaleUpLevel:
        """Return one vector and one row: `rank_thread_tiles` ranks the short list of register tiles."""
        one = {i: (extent,) for i, extent in enumerate(self._smallest)}
        return self._thread_level(one, self._evaluate_thread, lambda _tile: False)

    def _register_tiles(self, grown: ScaleUpResult) -> Sequence[Tile]:
        return self.register_tiles()

    def register_tiles(self) -> list[Tile]:
        """Return all tiles that fit in registers."""
        p, image = self.workload, self.image
        width = p.machine.unit.shape[-1]
        last, extent = self._pixels[-1], p.extents[self._pixels[-1]]
        second = self._pixels[-2] if len(self._pixels) > 1 else None
        across = (1,) if second is None else _row_extents(p.extents[second])
        if image.along_filters:
            wide = [width * v for v in VECTORS if width * (v - 1) < image.filters.extent]
            along = _row_extents(extent)
        else:
            wide = [r for r in range(1, 15) if r <= image.filters.extent]
            along = [width * v for v in VECTORS if width * (v - 1) < extent]
        largest = width * p.machine.hw.limits.max_registers_per_thread
        tiles = [
            replaced(replaced(replaced(self._smallest, p.n, f), second, b), last, a)
            for f, a, b in itertools.product(wide, along, across)
            if f * a * b <= largest
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

    def _register_rule(self, thread: Tile) -> BrokenRule | None:
        return check_limit("vector registers", self._shape(thread)[0], MAX_ROWS) or TileRules._register_rule(self, thread)

    def _kernel_time(self, thread: Tile) -> tuple[float, float]:
        p = self.workload
        rows, vectors = self._shape(thread)
        each, costs = kernel_cycles(p.machine, rows, vectors), p.machine.costs.convolution
        calls = math.prod(-(-p.extents[i] // thread[i]) for i in (*self._pixels, *(() if p.n is None else (p.n,))))
        cycles = calls * (self.image.depth * self.image.taps * each + costs.call_cycles)
        return cycles, -rows * vectors

    # tasks ----------------------------------------------------------------------------------------------------------
    def _task_steps(self, base: ThreadTile) -> Steps:
        p = self.workload
        steps: dict[int | None, Tile] = {i: (p.extents[i],) for i in p.reduced}
        if p.k is not None:
            steps[p.k] = self._channel_steps(base)
        for i in (p.n, *self._pixels):
            if i is not None:
                steps[i] = self._cuts(i, base)
        last = self._pixels[-1]
        if self.image.window_dims[-1].tap is not None:  # a row is staged whole
            steps[last] = (round_up(p.extents[last], base.tile[last]),)
        return steps

    def _footprint_bytes(self, block: Tile) -> int:
        return self.workload.footprint.bytes(block)

    def _capacity_rule(self, block: Tile, base: ThreadTile) -> BrokenRule | None:
        p, mach = self.workload, self.workload.machine
        broken = None
        if extent_on(block, p.n) > extent_on(base.tile, p.n):  # several panels
            weights = extent_on(block, p.n) * extent_on(block, p.k) * self.image.taps * p.elem_bytes
            most = L2_WEIGHTS_FRACTION * mach.hw.block_level.capacity_bytes
            broken = check_limit(f"{mach.hw.block_level.name} weights", weights, most)
        if broken is None and extent_on(block, p.k) < p.extent(p.k):
            sums = math.prod(block[i] for i in self._pixels) * extent_on(block, p.n) * p.elem_bytes
            most = LLC_ACCUMULATOR_FRACTION * mach.caches[0].total_bytes / mach.cores
            broken = check_limit(f"{mach.caches[0].name} sums", sums, most)
        return broken

    def _channel_steps(self, base: ThreadTile) -> Tile:
        """Return all channels, and blocks whose panel fits in L1, or whose panels fit in L2."""
        p, mach = self.workload, self.workload.machine
        depth, row = p.extent(p.k), self.image.taps * p.elem_bytes
        panel = L1_PANEL_FRACTION * mach.caches[-1].bytes_per_core / (row * extent_on(base.tile, p.n))
        filters = round_up(p.extent(p.n), extent_on(base.tile, p.n))
        weights = L2_WEIGHTS_FRACTION * mach.hw.block_level.capacity_bytes / (row * filters)
        return tuple(sorted({depth} | {equal_steps(depth, int(limit)) for limit in (panel, weights) if 1 <= limit < depth}))

    def _cuts(self, axis: int, base: ThreadTile) -> Tile:
        """Return the axis whole, or in a few equal parts for the cores."""
        p = self.workload
        parts = (1, 2, 4, *(n * p.machine.cores for n in TASKS_PER_CORE))
        return tuple(sorted(equal_parts(p.extents[axis], base.tile[axis], parts))[-MAX_CUTS:])

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return one row, one vector, one filter panel, one output position, a channel at a time."""
        p = self.workload
        thread = self._smallest
        block = tuple(p.extents[i] if i in p.reduced and i != p.k else extent for i, extent in enumerate(thread))
        return [(block, ThreadTile(thread))]


def _row_extents(extent: int) -> list[int]:
    """Return the extents of a register tile that divide output positions into equal parts, but for the last."""
    return [size for size in range(1, min(extent, MAX_ROWS) + 1) if equal_steps(extent, size) == size]
