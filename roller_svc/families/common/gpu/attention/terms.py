"""Cost terms that the attention families share."""

from __future__ import annotations

import math
from typing import Any

from roller_svc.construct.rules import extent_on
from roller_svc.families.common.gpu.attention.mask import unmasked_keys, visible_keys
from roller_svc.families.common.gpu.attention.tile import (
    AttentionOperands,
    StagedBuffer,
    TiledAttention,
)
from roller_svc.families.common.gpu.matrix.terms import tile_count
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import AxisRole
from roller_svc.perf.common import Launch, dram_bytes_with_reuse
from roller_svc.perf.workload import Workload

ROW_OPS = 24.0  # per row and KV tile: shuffles, corrections, branches
PROBABILITY_OPS = 5.0  # per score: maximum, multiply-add, exponential, sum, half a conversion
CONVERSION_OPS = 0.5  # per weight, to the type of the next product's operand
# Of an SM (CUDA C++ Programming Guide, throughput table: 8.x and 9.0). A CU has the same rate, but no unit of its own for
# them: V_EXP_F32 takes a SIMD four times as long as other instructions (AMD GCN Architecture whitepaper, 2012).
EXPONENTIALS_PER_CYCLE = 16.0
AMD_EXPONENTIAL_OPS = 3.0  # in addition, per score
AMD_BFLOAT16_OPS = 4.0  # the same, to round to nearest even without an instruction for it (counted, clang 15)
SAMPLED_BLOCKS = 64  # row blocks of a mask, evenly spread, whose visible keys are counted


def visible_fraction(p: Workload[Any], found: AttentionOperands, rows: int) -> float:
    """Return the fraction of KV tiles that blocks of `rows` rows visit under the mask."""
    if not found.bounds.uppers and not found.bounds.lowers:
        return 1.0
    keys, axis = found.bounds.period or p.extent(p.k), p.space.role(AxisRole.M)[0]
    sampled = _sampled_blocks(axis.extent, rows)
    total = 0
    for first, last in sampled:
        begin, end = visible_keys(found.bounds, axis, keys, first, last)
        total += end - begin
    return total / (keys * len(sampled))


def _sampled_blocks(extent: int, rows: int) -> list[tuple[int, int]]:
    """Return the first and the last row of some blocks of `rows` rows."""
    count = -(-extent // rows)
    sampled = sorted({i * (count - 1) // max(1, SAMPLED_BLOCKS - 1) for i in range(SAMPLED_BLOCKS)})
    return [(i * rows, min(extent, (i + 1) * rows) - 1) for i in sampled]


def score_operations(p: Workload[Any], found: AttentionOperands, rows: int, keys: int) -> float:
    """Return the operations per score of blocks of `rows` rows: tiles of `keys` keys that no row masks leave out the mask."""
    if found.exact is None:
        return found.score_operations
    axis, extent = p.space.role(AxisRole.M)[0], p.extent(p.k)
    visited = whole = 0
    for first, last in _sampled_blocks(axis.extent, rows):
        begin, end = visible_keys(found.bounds, axis, extent, first, last)
        visited += -(-end // keys) - begin // keys
        begin, end = unmasked_keys(found.exact, axis, extent, first, last)
        whole += max(0, end // keys - -(-begin // keys))
    return found.score_operations + (found.unmasked_operations - found.score_operations) * min(1.0, whole / max(1, visited))


def softmax_slots(tile: TiledAttention[StagedBuffer], found: AttentionOperands, operations: float) -> float:
    """Return a warp's issue slots from scores to probabilities, with the operations per score, and to rescale O."""
    scores = tile.row_fragments * tile.kv_fragments * 4
    if not found.has_softmax:
        return scores * (operations + CONVERSION_OPS)
    results = tile.row_fragments * tile.fragments * 4
    operations += PROBABILITY_OPS
    if tile.fragment.is_square:
        operations += AMD_EXPONENTIAL_OPS + (AMD_BFLOAT16_OPS if found.q.dtype is DType.BFLOAT16 else 0.0)
    return scores * operations + results + tile.fragment.halves * tile.row_fragments * ROW_OPS


def operand_dram_bytes(p: Workload[Any], launch: Launch, at_once: int) -> float:
    """Return the bytes of Q, K and V from DRAM: K and V once per wave of blocks, less LLC hits."""
    grid_m = -(-p.extent(p.m) // extent_on(launch.block, p.m))
    batches = max(1, tile_count(p, launch.block) // (grid_m * -(-p.extent(p.n) // extent_on(launch.block, p.n))))
    shared = p.b.total_bytes // batches
    times = math.ceil(grid_m * launch.split_k / at_once)
    return p.a.total_bytes + batches * dram_bytes_with_reuse(p.machine, shared, times)


# Assumed: the DRAM bandwidth that one core can use, over its even share, while others are idle. `bench/gpu` has a
# probe (decode-attention).
MAX_DRAM_SHARES = 1.5


def dram_cycles(p: Workload[Any], launch: Launch, cycles: float) -> float:
    """Return the DRAM cycles of a KV tile, from those at an even share of the bandwidth.

    Blocks on part of the cores do not reach the bandwidth of all: the model scales with the working cores elsewhere.
    """
    working = min(1.0, launch.grid / p.machine.cores)
    return cycles * max(1.0, 1.0 / (MAX_DRAM_SHARES * working))


def attention_operations(p: Workload[Any], found: AttentionOperands) -> int:
    """Return the multiply-adds of QK^T and PV, times two, for visible keys."""
    (features,) = p.space.role(AxisRole.INNER)
    rows = p.outer_points // p.extent(p.n)
    multiplied = found.products * features.extent + p.extent(p.n)
    return round(2 * rows * p.extent(p.k) * multiplied * visible_fraction(p, found, 1))
