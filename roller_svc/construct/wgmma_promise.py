"""Tiles of warpgroups → roughly what they take, to choose those that are worth an estimate.

As `mma_promise.py` does for tiles of warps: scale-up lets more of them through than can be priced in all the ways that
their blocks may run.
"""

from __future__ import annotations

from roller_svc.construct.mma_promise import joining_cycles
from roller_svc.construct.mma_waves import streams
from roller_svc.construct.rules import Base, spatial_grid
from roller_svc.perf.footprint import Tile
from roller_svc.perf.matrix_terms import last_cache_share
from roller_svc.perf.mma_tile import WORD_BYTES
from roller_svc.perf.occupancy import blocks_per_core
from roller_svc.perf.problem import Problem
from roller_svc.perf.wgmma_contraction import BOX_LATENCY_CYCLES, wgmma_block


def promised_cycles(p: Problem, block: Tile, base: Base, split_k: int) -> float:
    """Of the core that has the most blocks."""
    mach = p.machine
    known = wgmma_block(p, block, base.thread)
    tile, step = known.tile, known.step
    tasks = spatial_grid(p, block) * split_k
    rounds = -(-tasks // mach.cores)
    together = min(rounds, blocks_per_core(known.needs, mach.hw))
    # of pairs of blocks each loads the half of what they share, the larger operand if that can be
    asked = sum(known.moved) - max(known.moved) / 2
    loads = max(step.port, asked / last_cache_share(mach) * min(1.0, tasks / mach.cores))
    each = max(step.mma, step.shared, step.issue, loads, step.chain / together)
    steps = -(-tile.walk.steps // split_k)
    edges = (step.latency + BOX_LATENCY_CYCLES) / rounds
    edges += 2 * tile.m * tile.n * WORD_BYTES / mach.staged_bytes_per_cycle
    floor = p.floor_s * mach.clock_hz  # tiles that memory holds up are told apart by their edges and joins
    whole = max(floor, rounds * steps * each) + rounds * edges
    if split_k > 1:
        return whole + joining_cycles(p, split_k * p.outer_points)
    if p.space.sums > 1 or not streams(tasks, steps, mach.cores):
        return whole
    joins = joining_cycles(p, 2 * mach.cores * tile.m * tile.n)
    return min(whole, max(floor, tasks * steps / mach.cores * each) + edges + joins)
