"""One staged step of a block on a matrix unit: what it takes of each pipe of a core, and how long that makes it."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from roller_svc.perf.machine import SCHEDULERS
from roller_svc.perf.mma_tile import MmaTile

LEAK = 0.05  # pipes overlap, but not perfectly: this share of the others adds to the longest


@dataclass(frozen=True, slots=True)
class MmaBlock:
    """What does not depend on how many stages there are: a block's tile, `tile.stages` being the fewest, and the
    registers of its threads."""

    tile: MmaTile
    registers: int


class Step(NamedTuple):
    """One staged step of one block, in cycles of a core.

    `port`: of the core's way to the last cache. `last_cache`, `dram`: of an even share of their bandwidth while every
    core works. `chain`: what its warps need one after another, however empty the core is. `latency`: from the request
    of a step's first byte to its arrival. `leak`: the share of the other pipes that adds to the longest.
    """

    warps: int
    mma: float
    shared: float
    issue: float
    port: float
    last_cache: float
    dram: float
    chain: float
    latency: float
    leak: float = LEAK

    def cycles(self, blocks: float, ahead: int, working: float = 1.0) -> float:
        """t_k of so many blocks of a core, each with `ahead` steps requested before their use; `working`: blocks of
        the whole device over those that it had if all its cores held that many."""
        total = blocks * self.warps
        uneven = SCHEDULERS * math.ceil(total / SCHEDULERS) / total  # a warp stays on one scheduler
        memory = max(self.port, self.last_cache * working)
        pipes = (self.mma * uneven, self.issue * uneven, self.shared, memory, self.dram * working)
        longest = max(pipes)
        busy = blocks * (longest + self.leak * (sum(pipes) - longest))
        # Little's law: `ahead` steps are on their way for each block
        arriving = (self.latency + blocks * max(pipes[3:])) / ahead
        return max(busy, self.chain, arriving)
