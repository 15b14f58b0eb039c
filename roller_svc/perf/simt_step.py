"""One staged step of a contraction on scalar lanes, and the registers of its threads: what its model remembers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from roller_svc.perf.machine import SCHEDULERS

# Compiled kernels stay below the rate of the tightest pipe: of the others this share shows through. An assumption; with
# it cuBLAS's SGEMM of 1024 to 4096 on a V100 (the sources of its spec) comes out 4 to 9 % slow (docs/model.md).
LEAK = 0.08
BARRIER_CYCLES = 30.0


class Step(NamedTuple):
    """One staged step of one block, in cycles of a core that runs nothing else.

    `latency`: from asking for a step's tiles to having them. `turn`: what passes between the last product of a step and
    the first of the next, for which the other blocks of a core are there: stores, a barrier, reads.
    """

    fma: float
    shared: float
    issue: float
    latency: float
    turn: float

    @property
    def busy(self) -> float:
        worst = max(self.fma, self.shared, self.issue)
        return worst + LEAK * (self.fma + self.shared + self.issue - worst)

    def cycles(self, blocks: float, warps: int, ahead: int) -> float:
        """t_k (§5 of the design notes): of so many blocks of a core, each loading `ahead` steps before their use."""
        # a warp stays on one scheduler: a block of fewer warps than those keeps only its share of the lanes busy
        busy = self.busy
        alone = SCHEDULERS / min(SCHEDULERS, warps) * busy
        if ahead == 0:
            # a single buffer: a block's own load and compute do not overlap, other blocks' do
            return max(blocks * busy, alone + self.latency + self.turn + BARRIER_CYCLES)
        return max(blocks * busy, alone + self.turn, (self.latency + self.turn) / ahead)


@dataclass(frozen=True, slots=True)
class Staged:
    """Registers that staging one factor takes of a thread, `each` for an element; `width` elements move at once."""

    fixed: float
    each: float
    width: int

    def of(self, elements: float) -> float:
        return self.each * self.width * math.ceil(elements / self.width)


@dataclass(frozen=True, slots=True)
class ThreadRegisters:
    """Registers of a thread as a function of how many elements of either factor it stages in one step."""

    fixed: float
    a: Staged
    b: Staged

    def of(self, staged_a: float, staged_b: float) -> int:
        return math.ceil(self.fixed + self.a.of(staged_a) + self.b.of(staged_b))
