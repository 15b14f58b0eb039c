"""Tiles of a matrix unit → roughly what they take, to choose those that are worth an estimate.

Scale-up lets many more tiles through than the model can price in a few milliseconds. What a tile loads for a
multiply-add is known when it has been looked at; with that and how it fills the device, its time is known well enough
to leave most of them out.
"""

from __future__ import annotations

from roller_svc.construct.mma_waves import streams
from roller_svc.construct.rules import Base, at, spatial_grid
from roller_svc.perf.footprint import Tile
from roller_svc.perf.fragment import fragment_of
from roller_svc.perf.machine import SCHEDULERS
from roller_svc.perf.matrix_terms import CORE_L2_BYTES_PER_CYCLE, columns
from roller_svc.perf.mma_contraction import MMA_LATENCY_CYCLES
from roller_svc.perf.mma_tile import WORD_BYTES
from roller_svc.perf.problem import Problem
from roller_svc.perf.terms import second_launch_s

WARPS_AT_WORK = 16  # of a core: their sums and fragments take half of its registers and more


def promised_cycles(p: Problem, block: Tile, base: Base, split_k: int, traffic: float) -> float:
    """Of the core that has the most blocks; `traffic`: bytes loaded for a multiply-add."""
    mach = p.machine
    m, n, k = at(block, p.m), columns(p, block), at(block, p.k)
    tasks = spatial_grid(p, block) * split_k
    rounds = -(-tasks // mach.cores)
    warps = (m // at(base.thread, p.m)) * (n // columns(p, base.thread))
    together = min(rounds, max(1, WARPS_AT_WORK // warps))
    steps = -(-p.extent(p.k) // (k * split_k))
    step = _step_cycles(p, block, base, traffic, min(tasks, mach.cores), together)
    latency = mach.last_cache.latency_cycles if mach.last_cache else mach.dram_latency_cycles
    edges = latency / together + 2 * m * n * WORD_BYTES / mach.staged_bytes_per_cycle
    if split_k > 1:
        return rounds * (steps * step + edges) + joining_cycles(p, split_k * p.outer_points)
    whole = rounds * (steps * step + edges)
    if p.space.sums > 1 or not streams(tasks, steps, mach.cores):
        return whole
    return min(whole, tasks * steps / mach.cores * step + edges + joining_cycles(p, 2 * mach.cores * m * n))


def _step_cycles(p: Problem, block: Tile, base: Base, traffic: float, working: int, together: int) -> float:
    """Of a staged step while so many cores are at work, each on so many blocks: its slowest pipe, or the chain of
    instructions that each warp has."""
    mach = p.machine
    m, n, k = at(block, p.m), columns(p, block), at(block, p.k)
    warp_m, warp_n = at(base.thread, p.m), columns(p, base.thread)
    size = p.feeds[0].dtype.bytes if p.feeds else 1
    warps = (m // warp_m) * (n // warp_n) * together
    bandwidth = mach.last_cache.bytes_per_s if mach.last_cache else mach.dram.bandwidth_bytes_per_s
    pipes = (
        max(1.0, SCHEDULERS / warps) / mach.fma_per_cycle,
        traffic / min(bandwidth / (working * mach.clock_hz), CORE_L2_BYTES_PER_CYCLE),
        size * (1 / warp_m + 1 / warp_n) / mach.staged_bytes_per_cycle,
    )
    fragment = fragment_of(mach.unit)
    instructions = (warp_m // fragment.rows) * (warp_n // fragment.columns)
    each = fragment.rows * fragment.columns * fragment.step_bytes / size * SCHEDULERS / mach.fma_per_cycle
    chain = k * size / fragment.step_bytes * max(MMA_LATENCY_CYCLES, instructions * each)
    return max(m * n * k * max(pipes), chain / together)


def joining_cycles(p: Problem, sums: int) -> float:
    """Of the launch that joins so many partial sums."""
    mach = p.machine
    return mach.clock_hz * second_launch_s(mach, sums * p.elem_bytes)
