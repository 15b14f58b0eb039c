"""Attention's rProgram → tiles of its warps and what its block stages; the model and the schedule agree on it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import Generic, Protocol, TypeVar

from roller_svc.analysis.instruction_counts import count_value_instructions
from roller_svc.analysis.operand import operand_along
from roller_svc.errors import InvariantError
from roller_svc.families.common.gpu.attention.mask import KeyBounds, exact_bounds, key_bounds
from roller_svc.families.common.gpu.attention.weight_vectors import (
    WeightVectors,
    approximate_exponentials,
    weight_vectors,
)
from roller_svc.families.common.gpu.matrix.tile import (
    ACCUMULATORS,
    CHUNK_BYTES,
    MMA_SYNC,
    Fragment,
    LoadKind,
    MmaTile,
    OperandLoad,
    StagedTile,
    chunk_copies,
    fragment_of,
    load_class,
    staged,
    transposed_load,
)
from roller_svc.ir.attention import unmasked
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Op, OpKind, iter_subexpressions
from roller_svc.ir.group import AxisRole, KernelGroup, TileAxis
from roller_svc.ir.hardware import Arch, ComputeUnit
from roller_svc.ir.program import TensorType
from roller_svc.ir.rprogram import RProgram

HIP_VOTE_BYTES = 256  # of __syncthreads_or (ROCm 5.2, code objects)
MAX_Q_REGISTERS = 32  # per lane, for Q kept across KV tiles: 16 rows of head_dim 128


@dataclass(frozen=True, slots=True)
class AttentionOperands:
    """How Q, K and V are loaded, which keys are visible, and the operations per score."""

    q: OperandLoad
    k: OperandLoad
    v: OperandLoad
    bounds: KeyBounds
    score_operations: int
    has_values_in_keys: bool
    fragment: Fragment
    exact: KeyBounds | None  # bounds that are the whole mask, where tiles that no row masks leave it out
    unmasked_operations: int  # the operations per score of these tiles
    second: tuple[OperandLoad, OperandLoad] | None = None  # Q and K of another product, which weights are made of
    exponentials: int = 1  # of a score
    vectors: WeightVectors | None = None  # of weights; None: softmax

    @property
    def has_softmax(self) -> bool:
        return self.vectors is None

    @property
    def products(self) -> int:
        """Return the products that a score is made of."""
        return 1 if self.second is None else 2


def attention_fragment(unit: ComputeUnit) -> Fragment:
    """Return the fragments of S and O on a unit, whose layout is that of P as the next product's operand.

    That holds for `mma.sync` (PTX ISA, "Matrix Fragments for mma.m16n8k16") and `wgmma`. MFMA multiplies K by Q^T and
    V^T by P^T: accumulators of K Q^T have the layout of its operand B (AMD Instinct MI200 ISA).
    """
    fragment = fragment_of(unit)
    return replace(fragment, is_transposed=fragment.is_square)


def prepare_attention_operands(group: KernelGroup, unit: ComputeUnit, arch: Arch) -> AttentionOperands:
    """Classify the loads of a group of kind ATTENTION."""
    if group.attention is None:
        raise InvariantError(f"{group.name} is not an attention group")
    attention, types = group.attention, dict(group.inputs)
    (m,), (n,), (keys,), (features,) = (group.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K, AxisRole.INNER))

    def load(factor: Expr, axis: TileAxis, along: TileAxis, dtype: DType) -> OperandLoad:
        operand = operand_along(factor, axis, along, types)
        return OperandLoad(operand, dtype, load_class(operand, dtype, arch))

    q, *more_q = (load(each, m, features, unit.in_dtype) for each in attention.queries)
    k, *more_k = (load(each, keys, features, unit.in_dtype) for each in attention.keys)
    v = load(attention.v, n, keys, attention.dtype)
    has_softmax = attention.weights is None
    fragment = attention_fragment(unit)
    exact = exact_bounds(group) if fragment.is_square and has_softmax else None
    operations, unmasked_operations = (
        sum(isinstance(node, Op) for node in iter_subexpressions(score)) for score in (attention.score, unmasked(attention))
    )
    v = transposed_load(v, fragment)
    is_slice = attention.has_values_in_keys(n.members)
    exponentials = 1 if has_softmax else _count_exponentials(attention.score)
    if not has_softmax:
        operations = count_value_instructions(approximate_exponentials(attention.score, attention.dtype))
    second = next(zip(more_q, more_k, strict=True), None)
    return AttentionOperands(
        *(q, k, v, key_bounds(group), operations, is_slice, fragment, exact, unmasked_operations),
        second=second, exponentials=exponentials, vectors=None if has_softmax else weight_vectors(group, attention),
    )  # fmt: skip


def _count_exponentials(score: Expr) -> int:
    return sum(isinstance(node, Op) and node.kind in (OpKind.EXP, OpKind.EXP2) for node in iter_subexpressions(score))


class StagedBuffer(Protocol):
    """An operand's tile of one stage, in the layout of a unit."""

    @property
    def dtype(self) -> DType: ...


Staged = TypeVar("Staged", bound=StagedBuffer, covariant=True)


@dataclass(frozen=True, slots=True)
class TiledAttention(Generic[Staged]):
    """A block's rows `m`, output columns `n`, KV tile `kv` and `head_dim`, and the part of a warp.

    A warp has all columns and all of head_dim, in whole instructions.
    """

    m: int
    n: int
    kv: int
    head_dim: int
    warp_m: int
    warp_kv: int
    stages: int
    kv_splits: int  # blocks that share the keys (split-KV)
    q: Staged
    k: Staged
    v: Staged
    fragment: Fragment = field(default=MMA_SYNC, kw_only=True)

    @property
    def row_fragments(self) -> int:
        return self.warp_m // self.fragment.rows

    @property
    def kv_fragments(self) -> int:
        return self.warp_kv // self.fragment.columns

    @property
    def fragments(self) -> int:
        """Fragments of the output along n."""
        return self.n // self.fragment.columns

    @property
    def head_dim_steps(self) -> int:
        """Instructions of QK^T along head_dim, of one product."""
        return self.head_dim * self.q.dtype.bytes // self.fragment.step_bytes

    @property
    def kv_steps(self) -> int:
        """Instructions of PV along a warp's keys of one KV tile."""
        return self.warp_kv * self.v.dtype.bytes // self.fragment.step_bytes


@dataclass(frozen=True, slots=True)
class MmaAttentionTile(TiledAttention[StagedTile]):
    """Rows are split over warps, or keys where one warp has all rows: each then has its own maxima and sums."""

    vote_bytes: int  # of shared memory, for `AnyThread`
    products: int = field(default=1, kw_only=True)  # QK^T that scores are made of, with Q and K of equal layout
    has_values_in_keys: bool = field(default=False, kw_only=True)  # V is read from the stages of K

    @property
    def row_warps(self) -> int:
        return self.m // self.warp_m

    @property
    def kv_warps(self) -> int:
        return self.kv // self.warp_kv

    @property
    def threads(self) -> int:
        return self.row_warps * self.kv_warps * self.fragment.lanes

    @property
    def num_splits(self) -> int:
        """Partial results of a row's keys, each by its own warp; 1 needs no combination."""
        return self.kv_splits * self.kv_warps

    @property
    def has_q_in_registers(self) -> bool:
        """Whether a warp keeps Q in registers; else it reloads Q for every KV tile."""
        return self.fragment.a_words * self.row_fragments * self.products * self.head_dim_steps <= MAX_Q_REGISTERS

    @property
    def is_q_overlaid(self) -> bool:
        """Whether Q, once it is in registers, leaves its memory to K and V: where no copy of Q is in flight with theirs."""
        return self.fragment.is_square and self.has_q_in_registers and self.products == 1

    @property
    def can_store_rows(self) -> bool:
        """Whether lanes have enough adjacent columns of a row to store them; else O goes through shared memory."""
        return self.fragment.is_transposed

    @property
    def result(self) -> MmaTile:
        """The output as a contraction's tile, for the epilogue."""
        return MmaTile(self.m, self.n, self.kv, self.warp_m, self.n, 1, self.q, self.k, self.fragment)

    @property
    def shared_bytes(self) -> int:
        stage = self.products * self.k.bytes + (0 if self.has_values_in_keys else self.v.bytes)
        pipeline = self.stages * stage
        pipeline = max(self.q.bytes, pipeline) if self.is_q_overlaid else self.products * self.q.bytes + pipeline
        is_direct = self.num_splits > 1 or self.can_store_rows
        return self.vote_bytes + (pipeline if is_direct else max(pipeline, self.result.shared_bytes))


def mma_attention_tile(program: RProgram, found: AttentionOperands) -> MmaAttentionTile:
    """Return the tile of an rProgram on a unit of kind MMA."""
    block, warp = program.block, program.thread
    (m,), (n,), (keys,), (features,) = (program.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K, AxisRole.INNER))
    extents = (block[m.name], block[n.name], block[keys.name], block[features.name])
    return make_mma_attention_tile(extents, (warp[m.name], warp[keys.name]), program.pipeline.stages, program.split_k, found)


def make_mma_attention_tile(
    block: tuple[int, int, int, int], warp: tuple[int, int], stages: int, parts: int, found: AttentionOperands
) -> MmaAttentionTile:
    """Return a tile of `block` (rows, columns, keys, head_dim) and `warp` (rows, keys)."""
    m, n, keys, features = block
    k = staged(found.k.operand, found.k.dtype, keys, features, found.fragment)
    v = staged(found.v.operand, found.v.dtype, n, keys, found.fragment)
    is_same_buffer = found.fragment.transposes and found.k.load == found.v.load and k._replace(k_major=False) == v
    return MmaAttentionTile(
        m,
        n,
        keys,
        features,
        *warp,
        stages,
        parts,
        staged(found.q.operand, found.q.dtype, m, features, found.fragment),
        k,
        v,
        HIP_VOTE_BYTES if found.fragment.is_square and found.bounds.may_need_masked_tiles else 0,
        fragment=found.fragment,
        products=found.products,
        has_values_in_keys=found.has_values_in_keys and is_same_buffer,
    )


# Registers in addition to O, S, Q and P, fitted to 100 kernels that NVRTC 13 compiled for sm_80 and sm_90 with head_dim
# 16 to 256: a base, per further row fragment, per KV fragment beyond MAX_FREE_KV_FRAGMENTS, per instruction along
# head_dim, per score operation, and an address per copied chunk. Kernels that spilled are rejected, and those within
# ten registers of the limit. `bench/roller_bench/attention_registers.py` checks others near the limit.
BASE_REGISTERS = 64
MAX_FREE_KV_FRAGMENTS, KV_REGISTERS = 8, 5
ROW_REGISTERS = 10
HEAD_DIM_STEP_REGISTERS = 0.8
CHUNK_COPY_REGISTERS = 0.9
FREE_SCORE_OPERATIONS = 3  # of a score: a scale, a comparison with an axis


def thread_registers(tile: MmaAttentionTile, found: AttentionOperands) -> int:
    """Return the registers of a thread."""
    rows = tile.row_fragments
    operands = tile.fragment.a_words * (1 + (tile.products * tile.head_dim_steps if tile.has_q_in_registers else 1))
    words = ACCUMULATORS * (tile.fragments + tile.products * tile.kv_fragments) + operands
    copies = [(found.k, tile.k), *([] if found.second is None else [(found.second[1], tile.k)])]
    copies += [] if tile.has_values_in_keys else [(found.v, tile.v)]
    brought = sum(_copy_registers(feed, buffer.bytes, tile.threads) for feed, buffer in copies)
    overhead = BASE_REGISTERS + ROW_REGISTERS * (rows - 1) + HEAD_DIM_STEP_REGISTERS * tile.head_dim_steps
    overhead += KV_REGISTERS * max(0, tile.kv_fragments - MAX_FREE_KV_FRAGMENTS)
    scores = max(0, found.score_operations - FREE_SCORE_OPERATIONS)
    vectors = 0 if found.vectors is None else found.vectors.registers(tile.fragment, rows, tile.kv_fragments)
    return math.ceil(rows * words + overhead + scores + brought + vectors)


def _copy_registers(feed: OperandLoad, buffer_bytes: int, threads: int) -> float:
    """Return the registers of the copies of one buffer and KV tile."""
    item_chunks = feed.load.elements if feed.load.kind is LoadKind.TRANSPOSE else 1
    chunks = -(-buffer_bytes // (CHUNK_BYTES * threads * item_chunks)) * item_chunks
    if feed.is_async and chunk_copies(feed) == 1:
        return chunks * CHUNK_COPY_REGISTERS
    in_flight = min(1.0, feed.operand.memory_dtype.bytes / feed.dtype.bytes) if feed.load.kind is LoadKind.VECTOR else 1.0
    return chunks * feed.chunk_registers * in_flight  # vectors wait in their type in memory


def partial_results(group: KernelGroup, tile: MmaAttentionTile) -> tuple[tuple[str, TensorType], ...]:
    """Return the workspaces of split keys: [split, ...] of outputs, row maxima and row sums."""
    if group.attention is None:
        raise InvariantError(f"{group.name} is not an attention group")
    dtype = group.space.compute_dtype
    mixed, total = group.statements[0], group.attention.row_sum
    shapes = ((mixed.output, mixed.type.shape), (f"{total.output}.high", total.type.shape),
              (total.output, total.type.shape))  # fmt: skip
    return tuple((f"{name}.partial", TensorType(dtype, (tile.num_splits, *shape))) for name, shape in shapes)
