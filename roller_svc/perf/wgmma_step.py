"""A block of warpgroups, and one staged step of it."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.perf.mma_step import Step
from roller_svc.perf.occupancy import BlockNeeds
from roller_svc.perf.wgmma_tile import WgmmaTile


@dataclass(frozen=True, slots=True)
class WgmmaBlock:
    """What does not depend on how blocks run: a block's tile, `tile.stages` being the fewest, and its step but for DRAM
    and for what clusters share.

    `moved`: bytes that a step asks of the last cache for A and for B. `latencies`: round trips of memory that a thread
    of the producer makes one after another for a step; 0 where it need not wait. `needs`: with the fewest stages.
    """

    tile: WgmmaTile
    step: Step
    moved: tuple[float, float]
    latencies: int
    needs: BlockNeeds
