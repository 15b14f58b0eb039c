"""Cost of a scatter on a GPU: that of a loop nest, and atomics that serialise where updates meet."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache

from roller_svc.families.common.gpu.serial_cost import SECTOR_BYTES, serial_cost
from roller_svc.families.gpu.scatter.workload import (
    PRIVATE_REGISTERS,
    PRIVATE_THREADS,
    PRIVATE_UNROLL,
    ScatterUpdates,
)
from roller_svc.perf.banks import BANKS
from roller_svc.perf.common import Costs, Launch, streaming_bandwidth
from roller_svc.perf.machine import Machine
from roller_svc.perf.occupancy import BlockResources
from roller_svc.perf.workload import Workload

LANES = 32  # that shared memory serves together
NATIVE_CYCLES = 2.0  # of shared memory, for one atomic of distinct banks
SWAP_CYCLES = 8.0  # the same for a load, an operation and a compare-and-swap
PASS_INSTRUCTIONS = 12.0  # of a thread, to clear an element of a private target and add it to the result
PASS_BARRIERS_CYCLES = 200.0


def scatter_cost(p: Workload[ScatterUpdates], launch: Launch) -> Costs:
    """Return the cost of a loop nest with the time of atomics as one more stage.

    Blocks with a private target also clear it, and add its elements to the result at the end.
    """
    costs, mach, updates = serial_cost(p, launch), p.machine, p.facts
    if not updates.is_atomic:
        return costs
    blocks = launch.pipeline.persistent_blocks
    if not blocks:
        atomics = ("atomics", _global_seconds(mach, updates, updates.count))
        return costs._replace(stage_seconds=(*costs.stage_seconds, atomics))
    loaded = sum([access.tensor_bytes for access in p.space.accesses if not access.is_output])
    in_flight = blocks * PRIVATE_THREADS * PRIVATE_UNROLL * loaded / updates.count
    last = mach.llc
    return costs._replace(
        core_s=costs.core_s + _pass_seconds(mach, updates, blocks),
        stage_seconds=(
            ("atomics", _shared_seconds(mach, updates, blocks)),
            (last.name if last else "cache", loaded / (last.bytes_per_s if last else math.inf)),
            ("dram", loaded / streaming_bandwidth(mach, in_flight) if loaded else 0.0),
        ),
        moved_bytes=(("dram", loaded),),
        resources=BlockResources(PRIVATE_THREADS, PRIVATE_REGISTERS, updates.target_bytes),
    )


def _global_seconds(mach: Machine, updates: ScatterUpdates, count: float) -> float:
    """Return the time of atomics in L2, which updates a sector once a cycle.

    Updates of one sector wait for each other, except successive ones of successive elements.
    """
    joined = min(updates.adjacent, SECTOR_BYTES // updates.element_bytes)
    sectors = -(-updates.target_bytes // SECTOR_BYTES)
    rate = sectors * mach.clock_hz
    if mach.llc is not None:
        rate = min(rate, mach.llc.bytes_per_s / SECTOR_BYTES)
    return count / joined / rate


def _shared_seconds(mach: Machine, updates: ScatterUpdates, blocks: int) -> float:
    """Return the time of atomics in shared memory, where the lanes of a request that share a bank serialise."""
    busy = min(blocks, mach.cores)
    groups = max(1, LANES // updates.adjacent)
    conflicts = expected_maximum(groups, max(1, min(BANKS, updates.elements) // (LANES // groups)))
    cycles = NATIVE_CYCLES if updates.is_native else SWAP_CYCLES
    words = max(1, updates.element_bytes // 4)
    return mach.seconds(updates.count / LANES / busy * conflicts * cycles * words)


def _pass_seconds(mach: Machine, updates: ScatterUpdates, blocks: int) -> float:
    """Return the time to clear private targets and to add their elements, at most one of each update, to the result."""
    on_core = -(-blocks // mach.cores)
    warps = on_core * updates.elements / LANES
    cycles = warps * PASS_INSTRUCTIONS / mach.issue_per_cycle + PASS_BARRIERS_CYCLES + mach.dram_latency_cycles
    written = min(updates.elements, updates.count / blocks)
    return mach.seconds(cycles) + _global_seconds(mach, replace(updates, adjacent=LANES), blocks * written)


@lru_cache(maxsize=1024)
def expected_maximum(balls: int, boxes: int) -> float:
    """Return the expected number of balls in the fullest box, with boxes taken as independent."""
    mean, below = 0.0, 0.0
    for k in range(balls):
        below += math.comb(balls, k) * (1 / boxes) ** k * (1 - 1 / boxes) ** (balls - k)
        mean += 1.0 - below**boxes
    return mean
