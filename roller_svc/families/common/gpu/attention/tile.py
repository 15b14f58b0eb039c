"""Attention's rProgram → tiles of its warps and what its block stages: what model and lowering agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from roller_svc.analysis.operand import operand_along
from roller_svc.errors import InvariantError
from roller_svc.families.common.gpu.attention.mask import KeyBounds, key_bounds
from roller_svc.families.common.gpu.matrix.tile import (
    ACCUMULATORS,
    CHUNK_BYTES,
    COLUMNS,
    ROWS,
    STEP_BYTES,
    MmaTile,
    OperandLoad,
    StagedTile,
    chunk_copies,
    chunk_registers,
    load_class,
    staged,
)
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Op, iter_subexpressions
from roller_svc.ir.group import AxisRole, KernelGroup
from roller_svc.ir.hardware import Arch, ComputeUnit
from roller_svc.ir.program import TensorType
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule_hopper import WARP_THREADS

MAX_Q_REGISTERS = 32  # of a lane, of queries that it keeps in registers from step to step: 16 rows of 128 features


@dataclass(frozen=True, slots=True)
class AttentionOperands:
    """What a matrix unit's kernel must know of a group: how its factors come, which keys count, what a score costs."""

    q: OperandLoad
    k: OperandLoad
    v: OperandLoad
    bounds: KeyBounds
    score_operations: int


def prepare_attention_operands(group: KernelGroup, unit: ComputeUnit, arch: Arch) -> AttentionOperands:
    """Of a group of kind ATTENTION."""
    if group.attention is None:
        raise InvariantError(f"{group.name} is no attention")
    attention, dtype, types = group.attention, unit.in_dtype, dict(group.inputs)
    (m,), (n,), (keys,), (features,) = (
        group.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K, AxisRole.INNER)
    )
    sides = ((attention.q, m, features), (attention.k, keys, features), (attention.v, n, keys))
    found = [operand_along(factor, axis, along, types) for factor, axis, along in sides]
    q, k, v = (OperandLoad(operand, dtype, load_class(operand, dtype, arch)) for operand in found)
    operations = sum(isinstance(node, Op) for node in iter_subexpressions(attention.score))
    return AttentionOperands(q, k, v, key_bounds(group), operations)


class StagedBuffer(Protocol):
    """A factor's tile of one stage, in the way in which a unit has it staged."""

    @property
    def dtype(self) -> DType: ...


Staged = TypeVar("Staged", bound=StagedBuffer, covariant=True)


@dataclass(frozen=True, slots=True)
class TiledAttention(Generic[Staged]):
    """A block's rows `m`, columns `n` of the result, keys of a step, features; of these a warp's rows and keys.

    A warp has all columns and features, and they are whole instructions. Its fragments are of 16 x 8, on every kind of
    unit.
    """

    m: int
    n: int
    kv: int
    head_dim: int
    warp_m: int
    warp_kv: int
    stages: int
    kv_splits: int  # blocks that share the keys
    q: Staged
    k: Staged
    v: Staged

    @property
    def row_fragments(self) -> int:
        return self.warp_m // ROWS

    @property
    def kv_fragments(self) -> int:
        return self.warp_kv // COLUMNS

    @property
    def fragments(self) -> int:
        """Of the result, along n."""
        return self.n // COLUMNS

    @property
    def head_dim_steps(self) -> int:
        """Instructions of the first contraction along the features."""
        return self.head_dim * self.q.dtype.bytes // STEP_BYTES

    @property
    def kv_steps(self) -> int:
        """Instructions of the second contraction along a warp's keys of one step."""
        return self.warp_kv * self.v.dtype.bytes // STEP_BYTES


@dataclass(frozen=True, slots=True)
class MmaAttentionTile(TiledAttention[StagedTile]):
    """Rows are shared out to warps, and keys where a block's rows are all in one warp: each then has maxima and sums of
    its own."""

    @property
    def row_warps(self) -> int:
        return self.m // self.warp_m

    @property
    def kv_warps(self) -> int:
        return self.kv // self.warp_kv

    @property
    def threads(self) -> int:
        return self.row_warps * self.kv_warps * WARP_THREADS

    @property
    def num_splits(self) -> int:
        """Into how many sums the keys of a row are cut, each by a warp of its own; 1: none is left to be joined."""
        return self.kv_splits * self.kv_warps

    @property
    def has_q_in_registers(self) -> bool:
        """Whether a warp keeps its queries in registers; else it loads them again for every step."""
        return ACCUMULATORS * self.row_fragments * self.head_dim_steps <= MAX_Q_REGISTERS

    @property
    def result(self) -> MmaTile:
        """The results as a contraction has them: how they get to memory."""
        return MmaTile(self.m, self.n, self.kv, self.warp_m, self.n, 1, self.q, self.k)

    @property
    def shared_bytes(self) -> int:
        pipeline = self.q.bytes + self.stages * (self.k.bytes + self.v.bytes)
        return pipeline if self.num_splits > 1 else max(pipeline, self.result.shared_bytes)


def mma_attention_tile(program: RProgram, found: AttentionOperands) -> MmaAttentionTile:
    """Of an rProgram on a unit of kind MMA."""
    block, warp = program.block, program.thread
    (m,), (n,), (keys,), (features,) = (
        program.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K, AxisRole.INNER)
    )
    extents = (block[m.name], block[n.name], block[keys.name], block[features.name])
    return make_mma_attention_tile(extents, (warp[m.name], warp[keys.name]), program.stages, program.split_k, found)


def make_mma_attention_tile(
    block: tuple[int, int, int, int], warp: tuple[int, int], stages: int, parts: int, found: AttentionOperands
) -> MmaAttentionTile:
    """`block`: rows, columns, keys, features; `warp`: rows, keys."""
    m, n, keys, features = block
    return MmaAttentionTile(
        m, n, keys, features, *warp, stages, parts, staged(found.q.operand, found.q.dtype, m, features),
        staged(found.k.operand, found.k.dtype, keys, features), staged(found.v.operand, found.v.dtype, n, keys),
    )  # fmt: skip


# Registers beside results, scores, queries and weights, fitted to 100 kernels that NVRTC 13 compiled for sm_80 and 90,
# with 16 to 256 features: what every kernel has, what each further fragment of rows has, each of keys beyond half of
# the most, what each instruction along the features and each operation of a score takes, and each chunk that a thread
# brings in one step: an address. Those that spilled are refused, and of those that did not the ones within ten of the
# limit. `roller_svc/bench/attention_registers.py` compiles others near it: 5 of its 26 spill, one of which is taken,
# with a count that is 4 short: 32 rows by 64 keys of a causal mask and 64 features, eight warps.
BASE_REGISTERS = 64
MAX_FREE_KV_FRAGMENTS, KV_REGISTERS = 8, 5
ROW_REGISTERS = 10
HEAD_DIM_STEP_REGISTERS = 0.8
CHUNK_COPY_REGISTERS = 0.9
FREE_SCORE_OPERATIONS = 3  # of a score: a factor, a comparison with an axis


def thread_registers(tile: MmaAttentionTile, found: AttentionOperands) -> int:
    """What a thread holds."""
    rows = tile.row_fragments
    words = tile.fragments + tile.kv_fragments + 1 + (tile.head_dim_steps if tile.has_q_in_registers else 1)
    brought = sum(
        _copy_registers(feed, room.bytes, tile.threads) for feed, room in ((found.k, tile.k), (found.v, tile.v))
    )
    beside = BASE_REGISTERS + ROW_REGISTERS * (rows - 1) + HEAD_DIM_STEP_REGISTERS * tile.head_dim_steps
    beside += KV_REGISTERS * max(0, tile.kv_fragments - MAX_FREE_KV_FRAGMENTS)
    scores = max(0, found.score_operations - FREE_SCORE_OPERATIONS)
    return math.ceil(ACCUMULATORS * rows * words + beside + scores + brought)


def _copy_registers(feed: OperandLoad, room_bytes: int, threads: int) -> float:
    """Of what a thread brings of a room in one step."""
    chunks = -(-room_bytes // (CHUNK_BYTES * threads))
    if feed.is_async and chunk_copies(feed) == 1:
        return chunks * CHUNK_COPY_REGISTERS
    return chunks * chunk_registers(feed)


def partial_results(group: KernelGroup, tile: MmaAttentionTile) -> tuple[tuple[str, TensorType], ...]:
    """Workspaces for what pieces of the keys leave to be joined: [piece, ...] as the results, the maxima and the sums
    of exponentials."""
    if group.attention is None:
        raise InvariantError(f"{group.name} is no attention")
    dtype = group.space.compute_dtype
    mixed, total = group.statements[0], group.attention.row_sum
    shapes = ((mixed.output, mixed.type.shape), (f"{total.output}.high", total.type.shape),
              (total.output, total.type.shape))  # fmt: skip
    return tuple((f"{name}.partial", TensorType(dtype, (tile.num_splits, *shape))) for name, shape in shapes)
