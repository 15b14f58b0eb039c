"""Attention's rProgram on warpgroups → what its blocks stage and hold; the model and the schedule agree on it.

A block has one to three consumer warpgroups of 64 rows each, and one producer that only loads. Q is staged once. K and
V have pipelines of their own, so that QK^T can begin before V arrives.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace

from roller_svc.errors import InvariantError
from roller_svc.families.common.gpu.attention.shapes import MAX_COLUMNS
from roller_svc.families.common.gpu.attention.terms import attention_operations
from roller_svc.families.common.gpu.attention.tile import AttentionOperands, TiledAttention, prepare_attention_operands
from roller_svc.families.common.gpu.matrix.tile import COLUMNS, OperandLoad
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.result_store import ResultStore, TmaStoreBoxes
from roller_svc.families.common.gpu.warpgroups.tile import (
    EMPTY,
    FULL,
    ROWS,
    SWIZZLE_ATOMS,
    WARPS,
    WgmmaOperand,
    WgmmaTile,
    barriers,
    block_threads,
    consumer_register_limit,
)
from roller_svc.families.common.gpu.warpgroups.tma_load import TmaLoadPlan, plan_tma_load
from roller_svc.ir.group import AxisRole, KernelGroup, TileAxis
from roller_svc.ir.hardware import Arch, ComputeUnit, UnitKind
from roller_svc.ir.rprogram import WARPGROUP_THREADS, PipelineOptions, RProgram
from roller_svc.ir.schedule import Storage, shared_bytes
from roller_svc.perf.workload import Workload

QUERIES, KEYS, VALUES = ".q_shared", ".k_shared", ".v_shared"
WARP_ROWS = ROWS // WARPS  # rows of a warp, as in an `mma.sync` instruction


def group_columns(columns: int) -> int:
    """Return the columns of a consumer: as few consumers as possible share the columns of a block evenly."""
    return columns // -(-columns // MAX_COLUMNS)


@dataclass(frozen=True, slots=True)
class WgmmaAttentionFacts:
    """Attention's operands, how TMA loads each or why it cannot, and the axes of keys and head_dim."""

    operands: AttentionOperands
    q: TmaLoadPlan | str
    k: TmaLoadPlan | str
    v: TmaLoadPlan | str
    kv: TileAxis
    head_dim: TileAxis
    results: ResultStore
    _tiles: dict[tuple[int, int, int, int, int], WgmmaAttentionTile] = field(default_factory=dict, compare=False)

    def tile(self, block: tuple[int, int, int, int], stages: int) -> WgmmaAttentionTile:
        """Return the tile of `block` (rows, columns, keys, head_dim); cached."""
        known = self._tiles.get((*block, stages))
        if known is None:
            known = self._tiles[*block, stages] = self._tile(block, stages)
        return known

    @property
    def _stages_values_with_keys(self) -> bool:
        """Whether K is staged as V would be."""
        return self.operands.has_values_in_keys and self.operands.k.operand.k_major and not self.operands.v.operand.k_major

    def _tile(self, block: tuple[int, int, int, int], stages: int) -> WgmmaAttentionTile:
        m, n, keys, features = block
        along = KTileOrder.linear(self.head_dim.extent, features)
        k = _staged(self.operands.k, self.k, keys, along)
        v = _staged(self.operands.v, self.v, n, KTileOrder.linear(self.kv.extent, keys))
        is_slice = self._stages_values_with_keys and group_columns(n) * k.dtype.bytes % k.atom_bytes == 0
        # no split-KV: groups with few rows do not fill the 64 rows of the unit
        return WgmmaAttentionTile(
            m,
            n,
            keys,
            features,
            WARP_ROWS,
            keys,
            stages,
            1,
            _staged(self.operands.q, self.q, m, along),
            k,
            replace(k, k_major=False, extent=n, k=keys) if is_slice else v,
            is_slice,
            self.results.boxes((m, n), group_columns(n), ROWS * group_columns(n) // WARPGROUP_THREADS),
        )


@dataclass(frozen=True, slots=True)
class WgmmaAttentionTile(TiledAttention[WgmmaOperand]):
    """A tile with 64 rows per consumer. `stages`: of the pipelines of K and of V.

    Consumers share the columns of wide results, each with scores of its own.
    """

    has_values_in_keys: bool  # V is read from the stages of K, row by row its first columns
    tma_store: TmaStoreBoxes | None

    @property
    def group_n(self) -> int:
        """Columns of a consumer."""
        return group_columns(self.n)

    @property
    def column_groups(self) -> int:
        """Consumers that share the columns of a row."""
        return self.n // self.group_n

    @property
    def consumers(self) -> int:
        return self.m // ROWS * self.column_groups

    @property
    def fragments(self) -> int:
        """Fragments of a consumer's output along n."""
        return self.group_n // COLUMNS

    @property
    def threads(self) -> int:
        return block_threads(self.consumers)

    @property
    def result(self) -> WgmmaTile:
        """The output as a contraction's tile, for the epilogue."""
        order, pipeline = KTileOrder.linear(self.kv, self.kv), PipelineOptions(self.stages)
        return WgmmaTile(self.m, self.n, self.kv, ROWS, self.group_n, pipeline, self.q, self.v, order, tma_store=self.tma_store)

    @property
    def producer_registers(self) -> int:
        return max(buffer.producer_registers for buffer in (self.q, self.k, self.v))

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread after setmaxnreg."""
        return consumer_register_limit(self.consumers, self.producer_registers)

    @property
    def live_registers(self) -> int:
        """Registers of a consumer thread: O, S of a KV tile, and P of the tile before."""
        weights = self.kv * self.v.dtype.bytes // 4
        return ROWS * (self.group_n + self.kv + weights) // WARPGROUP_THREADS

    @property
    def shared_buffers(self) -> tuple[Storage, ...]:
        """All shared memory of a block: Q, K, V and the output, then barriers, which need less alignment."""
        slots = [(QUERIES, self.q, 1), (KEYS, self.k, self.stages)]
        slots += [] if self.has_values_in_keys else [(VALUES, self.v, self.stages)]
        staged = [buffer.buffer(name, stages) for name, buffer, stages in slots]
        synchronised = [barriers(name + role, stages) for name, _, stages in slots for role in (FULL, EMPTY)]
        return (*staged, self.result.result_buffer, *synchronised)

    @property
    def shared_bytes(self) -> int:
        return shared_bytes(self.shared_buffers)


def wgmma_attention_facts(group: KernelGroup, unit: ComputeUnit, arch: Arch) -> WgmmaAttentionFacts:
    """Prepare the facts of a group of kind ATTENTION."""
    if group.attention is None:
        raise InvariantError(f"{group.name} is not an attention group")
    found, types, batch = (
        prepare_attention_operands(group, unit, arch),
        dict(group.inputs),
        group.space.role(AxisRole.BATCH),
    )
    (m,), (n,), (keys,), (features,) = (group.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K, AxisRole.INNER))

    def feed(of: OperandLoad, axis: TileAxis, along: TileAxis) -> TmaLoadPlan | str:
        return plan_tma_load(of.operand, of.dtype, (axis, along), batch, types)

    return WgmmaAttentionFacts(
        found, feed(found.q, m, features), feed(found.k, keys, features), feed(found.v, n, keys), keys, features,
        ResultStore.of(group, group.space),
    )  # fmt: skip


def wgmma_attention_tile(program: RProgram, known: WgmmaAttentionFacts) -> WgmmaAttentionTile:
    """Return the tile of an rProgram on a unit of kind WGMMA."""
    block = program.block
    names = (program.space.role(role)[0].name for role in (AxisRole.M, AxisRole.N, AxisRole.K, AxisRole.INNER))
    m, n, keys, features = (block[name] for name in names)
    return known.tile((m, n, keys, features), program.pipeline.stages)


def operands_through_registers(tile: WgmmaAttentionTile) -> Iterator[str]:
    """Yield the operands that neither TMA nor cp.async loads."""
    for name, buffer in (("queries", tile.q), ("keys", tile.k), ("values", tile.v)):
        if buffer.load.through_registers:
            yield name


def _staged(threads: OperandLoad, tma: TmaLoadPlan | str, extent: int, order: KTileOrder) -> WgmmaOperand:
    along_k, size = threads.operand.k_major, threads.dtype.bytes
    row = order.depth if along_k else group_columns(extent)
    atom = next(atom for atom in SWIZZLE_ATOMS if row * size % atom == 0)
    boxes = tma if isinstance(tma, str) else tma.tile(extent, order, atom // size)
    load = threads.load if isinstance(boxes, str) else boxes
    return WgmmaOperand(threads.dtype, along_k, extent, order.depth, atom, load)


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[WgmmaAttentionFacts] | None:
    """Prepare attention on a unit that warpgroups drive; None for any other group or unit."""
    unit, hw = base.machine.unit, base.machine.hw
    if group.attention is None or group.attention.weights is not None or unit.kind is not UnitKind.WGMMA:
        return None
    facts = wgmma_attention_facts(group, unit, hw.arch)
    return replace(base.with_facts(facts), operations=attention_operations(base, facts.operands))
