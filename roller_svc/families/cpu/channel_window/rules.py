"""ROLLER's rules for windows over channels on a CPU: output positions in registers, lines of the input in L1 or L2."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from roller_svc.construct.align import round_up
from roller_svc.construct.rules import ThreadTile, replaced
from roller_svc.construct.scale_up import ScaleUpLevel, ScaleUpResult
from roller_svc.families.common.cpu.rules import equal_parts
from roller_svc.families.common.cpu.tasks import TaskRules, task_range
from roller_svc.families.cpu.channel_window.cost import tile_cycles
from roller_svc.families.cpu.channel_window.workload import ChannelSpace
from roller_svc.ir.search import TileMetrics, check_limit
from roller_svc.perf.footprint import Tile
from roller_svc.perf.workload import Workload

POSITIONS = (1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16)  # adjacent outputs of a line
VECTORS = (1, 2, 4)  # of channels
MAX_BASES = 5
CUTS = (2, 4, 8, 16)


@dataclass(frozen=True, slots=True)
class ChannelWindowRules(TaskRules):
    space: ChannelSpace

    @property
    def _channels(self) -> int:
        return len(self.space.leading) + len(self.space.lines) + 1

    def thread_level(self, lanes: int) -> ScaleUpLevel:
        p, width = self.workload, self.workload.machine.unit.shape[-1]
        positions, channels = p.extents[self._channels - 1], p.extents[self._channels]
        steps = {
            self._channels - 1: tuple([n for n in POSITIONS if n <= positions]),
            self._channels: tuple([width * v for v in VECTORS if width * v <= channels]),
        }
        return self._thread_level(steps, self._evaluate_thread)

    def rank_thread_tiles(self, grown: ScaleUpResult, lanes: int) -> Sequence[Tile]:
        """Return the tiles that take the fewest cycles for a whole line."""
        return sorted(grown.saturated, key=self._line_cycles)[:MAX_BASES]

    def _line_cycles(self, thread: Tile) -> float:
        p, at = self.workload, self._channels
        tiles = -(-p.extents[at - 1] // thread[at - 1]) * -(-p.extents[at] // thread[at])
        return tiles * tile_cycles(p.machine, self.space, thread[at - 1], thread[at])

    def _evaluate_thread(self, thread: Tile) -> TileMetrics:
        positions, vectors = thread[self._channels - 1], thread[self._channels] // self.workload.machine.unit.shape[-1]
        weights = self.space.columns.taps if self.space.weights else 0
        registers = (positions + len(self.space.reduction.planes) + weights) * vectors + 1
        most = self.workload.machine.hw.limits.max_registers_per_thread
        return self._measured(thread, check_limit("registers per thread", registers, most))

    def fallback_tiles(self) -> Sequence[tuple[Tile, ThreadTile]]:
        """Return one line and one vector of channels in a task, an output at a time."""
        p, width = self.workload, self.workload.machine.unit.shape[-1]
        thread = replaced(tuple([1] * len(p.extents)), self._channels, width)
        block = tuple([p.extents[i] if i in p.reduced else thread[i] for i in range(len(p.extents))])
        return [(replaced(block, self._channels - 1, p.extents[self._channels - 1]), ThreadTile(thread))]

    def _allows_small_tasks(self, block: Tile) -> bool:
        return True

    def _block_steps(self, axis: int, extent: int, unit: int) -> Tile:
        """Return whole lines of positions; channels and lines whole or in a few parts."""
        p = self.workload
        whole = round_up(extent, unit)
        if axis == self._channels - 1:
            return (whole,)
        cuts = equal_parts(extent, unit, (*CUTS, p.machine.cores))
        return tuple(sorted({whole} | cuts | ({unit} if axis == self._channels else set())))


def channel_window_rules(p: Workload[Any], space: ChannelSpace) -> ChannelWindowRules:
    """Return the rules of one group."""
    fewest, most = task_range(p)
    return ChannelWindowRules(p, fewest, most, space)
