"""Cost terms that the attention families share."""

from __future__ import annotations

import math
from typing import Any

from roller_svc.construct.rules import extent_on
from roller_svc.families.common.gpu.attention.mask import visible_keys
from roller_svc.families.common.gpu.attention.tile import (
    AttentionOperands,
    StagedBuffer,
    TiledAttention,
)
from roller_svc.families.common.gpu.matrix.terms import tile_count
from roller_svc.ir.group import AxisRole
from roller_svc.perf.common import Launch, dram_bytes_with_reuse
from roller_svc.perf.workload import Workload

ROW_OPS = 24.0  # of a row in one step: shuffles, corrections, branches
PROBABILITY_OPS = 5.0  # of one score: maximum, multiply-add, exponential, sum, half of a conversion
EXPONENTIALS_PER_CYCLE = 16.0  # of a core (CUDA C++ Programming Guide, throughput table: 8.x and 9.0)
SAMPLED_BLOCKS = 64  # of a mask's blocks of rows, evenly: how many keys they see


def visible_fraction(p: Workload[Any], found: AttentionOperands, rows: int) -> float:
    """Of all steps over keys, those that blocks of so many rows make under the mask."""
    if not found.bounds.uppers and not found.bounds.lowers:
        return 1.0
    keys, axis = p.extent(p.k), p.space.role(AxisRole.M)[0]
    count = -(-axis.extent // rows)
    sampled = sorted({i * (count - 1) // max(1, SAMPLED_BLOCKS - 1) for i in range(SAMPLED_BLOCKS)})
    total = 0
    for i in sampled:
        begin, end = visible_keys(found.bounds, axis, keys, i * rows, min(axis.extent, (i + 1) * rows) - 1)
        total += end - begin
    return total / (keys * len(sampled))


def softmax_slots(tile: TiledAttention[StagedBuffer], found: AttentionOperands) -> float:
    """Of a warp, from products to weights, and for the results so far."""
    scores = tile.row_fragments * tile.kv_fragments * 4
    results = tile.row_fragments * tile.fragments * 4
    return scores * (PROBABILITY_OPS + found.score_operations) + results + 2 * tile.row_fragments * ROW_OPS


def operand_dram_bytes(p: Workload[Any], launch: Launch, at_once: int) -> float:
    """Keys and values once for every wave of blocks that share them, less what the last cache still holds."""
    grid_m = -(-p.extent(p.m) // extent_on(launch.block, p.m))
    batches = max(1, tile_count(p, launch.block) // (grid_m * -(-p.extent(p.n) // extent_on(launch.block, p.n))))
    shared = p.b.total_bytes // batches
    times = math.ceil(grid_m * launch.split_k / at_once)
    return p.a.total_bytes + batches * dram_bytes_with_reuse(p.machine, shared, times)


def attention_operations(p: Workload[Any], found: AttentionOperands) -> int:
    """Return the multiply-adds of both products, times two, of the keys that the mask lets through."""
    (features,) = p.space.role(AxisRole.INNER)
    rows = p.outer_points // p.extent(p.n)
    both = features.extent + p.extent(p.n)
    return round(2 * rows * p.extent(p.k) * both * visible_fraction(p, found, 1))
