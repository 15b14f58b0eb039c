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

# Assumed: a consumer's overhead per k-tile (a completed barrier, a fence, consumer_release); the issue time of a TMA
# box; and its extra latency over thread loads: about 400 cycles from L2, against 263 of a load.
STEP_CYCLES = 60.0
BOX_CYCLES = 16.0
BOX_LATENCY_CYCLES = 100.0
# Cycles per issue slot of a lone warp on its scheduler, as those of a producer and of an epilogue under ping-pong are.
# A producer's are half integer arithmetic at 16 lanes a cycle (CUDA Programming Guide, table of throughputs), with no
# other warp to fill the gaps. Assumed the same for an epilogue, whose special functions have 4 lanes a cycle.
LONE_WARP_SLOT_CYCLES = 1.5


def epilogue_handoff_cycles(p: Workload[Any], tile: WgmmaTile, slot_cycles: float = 1.0) -> float:
    """Return cycles of accumulators through each warp's buffer, then of the epilogue's instructions."""
    mach = p.machine
    rounds = tile.fragments * -(-tile.group_n // tile.epilogue_columns)
    issued = epilogue_slots(p, tile.m * tile.columns) / (mach.hw.limits.warp_size * SCHEDULERS)
    return max(buffered_cycles(p, tile) + slot_cycles * issued, rounds * 2 * BARRIER_CYCLES)


def buffered_cycles(p: Workload[Any], tile: WgmmaTile) -> float:
    """Return shared-memory cycles of a tile's accumulators, written to the warps' buffers and read again."""
    return 2 * tile.m * tile.n * WORD_BYTES / p.machine.staged_bytes_per_cycle
