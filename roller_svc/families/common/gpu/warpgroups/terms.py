"""Cost terms that the wgmma families share."""

from __future__ import annotations

from typing import Any

from roller_svc.families.common.gpu.matrix.terms import (
    BARRIER_CYCLES,
    epilogue_slots,
)
from roller_svc.families.common.gpu.matrix.tile import WORD_BYTES
from roller_svc.families.common.gpu.warpgroups.tile import (
    WgmmaTile,
)
from roller_svc.perf.machine import SCHEDULERS
from roller_svc.perf.workload import Workload

# Assumed: what a consumer needs between two steps beside its products (a barrier that is already complete, a fence, the
# release of a slot); the time of one box's request; and by how much a box comes later than what threads ask for: about
# 400 cycles after its request where L2 has it, against 263 of a load and somewhat more of cp.async, which the latency
# of other families leaves out.
STEP_CYCLES = 60.0
BOX_CYCLES = 16.0
BOX_LATENCY_CYCLES = 100.0
# Of a lone warp on its scheduler, as the producer's are: about half of what it issues is integer arithmetic, for which
# a scheduler has 16 lanes (CUDA Programming Guide, table of throughputs) and no other warp to fill the cycles between.
PRODUCER_SLOT_CYCLES = 1.5


def epilogue_handoff_cycles(p: Workload[Any], tile: WgmmaTile) -> float:
    """Sums through each warp's room, then the epilogue's instructions."""
    mach = p.machine
    points = tile.m * tile.n
    through = 2 * points * WORD_BYTES / mach.staged_bytes_per_cycle
    turns = tile.fragments * -(-tile.group_n // tile.epilogue_columns)
    issued = epilogue_slots(p, points // tile.num_accumulators) / (mach.hw.limits.warp_size * SCHEDULERS)
    return max(through + issued, turns * 2 * BARRIER_CYCLES)
