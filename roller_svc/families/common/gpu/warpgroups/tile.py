"""RProgram on warpgroups → what its blocks stage and hold; the model and the schedule agree on it.

A block has one to three consumer warpgroups, which multiply, and one producer, which only loads.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from enum import Enum
from functools import cached_property
from typing import NamedTuple

from roller_svc.analysis.operand import Operand, staged_dtype
from roller_svc.construct.align import round_up
from roller_svc.errors import InvariantError
from roller_svc.families.common.gpu.matrix.terms import MatrixStep
from roller_svc.families.common.gpu.matrix.tile import (
    BANK_WORDS,
    CHUNK_BYTES,
    MMA_SYNC,
    ROW_PADDING_WORDS,
    SHARED_A,
    SHARED_B,
    WORD_BYTES,
    LoadClass,
    LoadKind,
    OperandLoad,
    ScaleRegisters,
    is_unpacked,
    load_class,
)
from roller_svc.families.common.gpu.warpgroups.k_iteration import KTileOrder
from roller_svc.families.common.gpu.warpgroups.register_prefetch import (
    RegisterPrefetch,
    choose_prefetched_k_tiles,
    plan_register_prefetch,
)
from roller_svc.families.common.gpu.warpgroups.result_store import EPILOGUE_ROWS, ResultStore, TmaStoreBoxes
from roller_svc.families.common.gpu.warpgroups.tma_load import PATTERN_ROWS, TmaLoadPlan, TmaTile, plan_tma_load
from roller_svc.ir.accumulation import accumulator_precision
from roller_svc.ir.dtype import DType
from roller_svc.ir.group import AxisRole, ScaleRuns, TileAxis, TileSpace
from roller_svc.ir.hardware import Arch, ComputeUnit
from roller_svc.ir.program import TensorType
from roller_svc.ir.rprogram import WARPGROUP_THREADS, PipelineOptions, RProgram
from roller_svc.ir.schedule import Scope, Storage, shared_bytes
from roller_svc.ir.tensor_map import MapMode
from roller_svc.perf.occupancy import BlockResources

# wgmma multiplies 64 rows by N columns over 32 bytes of k for every operand type (PTX ISA, "Asynchronous Warpgroup
# Level Matrix Multiply-Accumulate Operation").
ROWS, STEP_BYTES = 64, 32
MAX_COLUMNS = 256
PINGPONG_CONSUMERS = 2  # one in the mainloop, one in the epilogue (CUTLASS: KernelTmaWarpSpecializedPingpong)
MAX_CONSUMERS = 3  # with more, accumulators of 64 x 256 do not fit in registers
SWIZZLE_ATOMS = (128, 64, 32)  # bytes of a row that a swizzle mode permutes (PTX ISA, "Shared Memory Matrix Layout")
BUFFER_ALIGNMENT_BYTES = SWIZZLE_ATOMS[0] * PATTERN_ROWS  # of a buffer of the pipeline
TRANSPOSABLE_BYTES = 2  # element size for which wgmma reads MN-major operands; all others must be K-major
FULL, EMPTY = ".full", ".empty"  # mbarriers of each stage
ORDER = ".order"  # mbarriers of a ping-pong schedule: one for each consumer, on which the other one arrives
ACC_TILE, RESULTS = ".sums", ".results"  # of warps: accumulators by rows; outputs for TMA
RESULT_BUFFERS = 2  # of a warp, one written while TMA reads the other
WARPS = WARPGROUP_THREADS // 32
EPILOGUE_COLUMNS = 32  # of the accumulators that a warp passes to the epilogue at once
# Words of all parts of split results that a thread reads before it stores: stores keep later reads from moving up.
READ_BATCH_WORDS = 64
CORE_REGISTERS = 65536  # (CUDA Programming Guide, compute capability 9.0)
MAX_REGISTERS = 240  # of a thread after setmaxnreg, next to a producer's
THREAD_REGISTERS = 255  # without setmaxnreg
CONSUMER_REGISTERS = 56  # in addition to accumulators: descriptors, indices, epilogue operands
ADDRESS_REGISTERS = 56  # of a producer thread that loads into registers, in addition to data in flight
MAX_PADDING = 1.5  # of k, for TMA boxes in place of copies by threads


class WgmmaLoad(Enum):
    """How an operand is copied from memory to the pipeline."""

    TMA = "tma"  # boxes of a tensor, by one thread
    IM2COL = "im2col"  # the same, pixels under a sliding window
    ASYNC = "async"  # cp.async of all producer threads
    VECTOR = "vector"  # wide loads into their registers, converted there
    UNPACK = "unpack"  # words of packed integers into registers, unpacked there in pairs
    ELEMENT = "element"  # the same element by element: gathered, computed or transposed

    __hash__ = object.__hash__

    @property
    def is_tma(self) -> bool:
        return self in (WgmmaLoad.TMA, WgmmaLoad.IM2COL)

    @property
    def through_registers(self) -> bool:
        return self in (WgmmaLoad.VECTOR, WgmmaLoad.UNPACK, WgmmaLoad.ELEMENT)


_BY_THREADS = {
    LoadKind.ASYNC: WgmmaLoad.ASYNC, LoadKind.VECTOR: WgmmaLoad.VECTOR, LoadKind.UNPACK: WgmmaLoad.UNPACK,
    LoadKind.ELEMENT: WgmmaLoad.ELEMENT,
}  # fmt: skip
# Registers of a producer thread: coordinates of TMA boxes; addresses; data in flight.
_PRODUCER_REGISTERS = {
    WgmmaLoad.TMA: 40, WgmmaLoad.IM2COL: 40, WgmmaLoad.ASYNC: 88, WgmmaLoad.VECTOR: 120,
    WgmmaLoad.UNPACK: 120, WgmmaLoad.ELEMENT: 120,
}  # fmt: skip
# Registers of a producer thread for words of packed operands, with several consumers and with one, which leaves more.
PREFETCH_REGISTERS, LONE_PREFETCH_REGISTERS = 48, 80
PREFETCH_ADDRESS_REGISTERS = 88  # in addition to these words (NVRTC 13, sm_90a)


@dataclass(frozen=True)
class WgmmaOperand:
    """One operand's tile of one stage: `extent` (m or n of the block) x `k` elements.

    `[panels, rows, atom]` is its shape in shared memory.
    """

    dtype: DType
    k_major: bool  # rows are along k, else along m or n
    extent: int
    k: int
    atom_bytes: int  # of a row's part that is swizzled as one
    copy_plan: TmaTile | LoadClass  # TMA boxes, or loads of threads
    num_parts: int = 1  # adjacent tiles along `extent` that are copied separately; boxes are those of one
    prefetch: RegisterPrefetch | None = None  # of threads that unpack words

    @cached_property
    def load(self) -> WgmmaLoad:
        if isinstance(self.copy_plan, LoadClass):
            return _BY_THREADS[self.copy_plan.kind]
        return WgmmaLoad.IM2COL if self.copy_plan.mode is MapMode.IM2COL else WgmmaLoad.TMA

    @property
    def rows(self) -> int:
        return self.extent if self.k_major else self.k

    @property
    def panels(self) -> int:
        row = self.k if self.k_major else self.extent
        return row * self.dtype.bytes // self.atom_bytes

    @cached_property
    def bytes(self) -> int:
        return self.extent * self.k * self.dtype.bytes

    @property
    def copies(self) -> int:
        """TMA copies of the tile."""
        return 0 if isinstance(self.copy_plan, LoadClass) else self.num_parts * self.copy_plan.copies

    def buffer(self, name: str, stages: int) -> Storage:
        """Return the shared memory of the stages."""
        shape = (stages, self.panels, self.rows, self.atom_bytes // self.dtype.bytes)
        return Storage(name, self.dtype, shape, Scope.SHARED, (), swizzled=True, alignment_bytes=BUFFER_ALIGNMENT_BYTES)

    @property
    def producer_registers(self) -> int:
        """Registers of a producer thread that copies it without a prefetch."""
        return _PRODUCER_REGISTERS[self.load]

    @property
    def word_registers(self) -> int:
        """Registers of a producer thread for prefetched words."""
        if self.prefetch is None:
            return 0
        fixed, moving = (self.prefetch.registers(is_fixed=is_fixed) for is_fixed in (True, False))
        return fixed + self.prefetch.prefetched_k_tiles * moving


def batch_rounds(rounds: int, most: int) -> int:
    """Return the rounds of a batch, which divide all rounds; one where these are a prime above `most`."""
    return next(count for count in range(max(1, min(most, rounds)), 0, -1) if rounds % count == 0)


class WgmmaTile(NamedTuple):
    """Extents of a block's tile and of a warpgroup's, the staged operands, and the k-tile order.

    `n` and `group_n` count columns of accumulators: in a dual GEMM the first half of a warpgroup's columns belongs to
    the first product, the other half to the second.
    """

    m: int
    n: int
    k: int
    group_m: int
    group_n: int
    pipeline: PipelineOptions
    a: WgmmaOperand
    b: WgmmaOperand
    k_order: KTileOrder
    num_accumulators: int = 1
    # products along k before accumulators are promoted (ir/accumulation.py); None: all
    promotion_interval: int | None = None
    accumulator: DType = DType.FLOAT32
    scale_runs: ScaleRuns | None = None  # of sums of a k-tile, which are scaled as they are promoted
    tma_store: TmaStoreBoxes | None = None  # of warps' outputs; None: accumulators by rows, through shared memory

    @property
    def columns(self) -> int:
        """Output columns of the block's tile."""
        return self.n // self.num_accumulators

    @property
    def group_columns(self) -> int:
        """Output columns of a warpgroup's tile."""
        return self.group_n // self.num_accumulators

    @property
    def groups(self) -> tuple[int, int]:
        """Consumers of a tile along m and n."""
        return self.m // self.group_m, self.n // self.group_n

    @property
    def tile_consumers(self) -> int:
        """Consumer warpgroups that multiply one tile."""
        return self.m // self.group_m * (self.n // self.group_n)

    @property
    def consumers(self) -> int:
        """Consumer warpgroups of the block."""
        return PINGPONG_CONSUMERS if self.pipeline.pingpong else self.tile_consumers

    @property
    def threads(self) -> int:
        return block_threads(self.consumers)

    @property
    def fragments(self) -> int:
        """Instructions of a warpgroup along m in one step of the instruction along k."""
        return self.group_m // ROWS

    @property
    def k_steps(self) -> int:
        """Instructions along k in one k-tile."""
        return self.k * self.a.dtype.bytes // STEP_BYTES

    @property
    def promotes_accumulators(self) -> bool:
        """Whether the accumulators of a k-tile are promoted into separate ones."""
        return self.promotion_interval is not None or self.scale_runs is not None

    @property
    def scales(self) -> ScaleRegisters | None:
        """Registers of a consumer thread for the scales of a k-tile."""
        return None if self.scale_runs is None else ScaleRegisters.of(self.scale_runs, MMA_SYNC, self.fragments, self.group_n)

    @property
    def accumulator_set_registers(self) -> int:
        """Registers of a consumer thread for one set of accumulators."""
        return self.group_m * self.group_n // WARPGROUP_THREADS

    @property
    def promoted_k_tiles(self) -> int:
        """K-tiles whose sums are promoted at once."""
        if self.scale_runs is None or self.promotion_interval is not None:
            return 1
        return self.scale_runs.k_tiles(self.k)

    @property
    def promotion_slots(self) -> float:
        """Issue slots of a consumer's warp to add sums of k-tiles to the others, for each k-tile, with loads of scales."""
        if not self.promotes_accumulators:
            return 0.0
        if self.scale_runs is None or (scales := self.scales) is None:
            return self.accumulator_set_registers
        return scales.promotion_slots(self.accumulator_set_registers, self.scale_runs.sum_dtype) / self.promoted_k_tiles

    @property
    def accumulator_registers(self) -> int:
        """Registers of a consumer thread for all accumulators and their scales."""
        scales = 0 if (known := self.scales) is None else known.num_registers
        return self.accumulator_set_registers * (2 if self.promotes_accumulators else 1) + scales

    @property
    def producer_registers(self) -> int:
        """Registers of a producer thread, a multiple of eight."""
        words = self.a.word_registers + self.b.word_registers
        if not words:
            return max(self.a.producer_registers, self.b.producer_registers)
        return round_up(PREFETCH_ADDRESS_REGISTERS + words + _other_registers(self.a, self.b), 8)

    @property
    def prefetched_k_tiles(self) -> int:
        """K-tiles whose words a producer thread holds in registers; 0 if it unpacks none."""
        return max([0, *(o.prefetch.prefetched_k_tiles for o in (self.a, self.b) if o.prefetch is not None)])

    @property
    def as_pingpong(self) -> WgmmaTile:
        """The tile of one consumer as two consumers take it in turn."""
        a, b = fit_prefetches(self.a, self.b, PINGPONG_CONSUMERS)
        return self._replace(a=a, b=b, pipeline=replace(self.pipeline, pingpong=True))

    def with_stages(self, stages: int) -> WgmmaTile:
        return self._replace(pipeline=replace(self.pipeline, stages=stages))

    @property
    def as_partial(self) -> WgmmaTile:
        """The tile of a launch that stores partial results."""
        return self._replace(tma_store=None)

    @property
    def consumer_registers(self) -> int:
        """Registers of a consumer thread after setmaxnreg; with one consumer, the architectural maximum."""
        return consumer_register_limit(self.consumers, self.producer_registers)

    @property
    def epilogue_columns(self) -> int:
        """Columns of a warp's accumulators that go through its buffer at once."""
        return min(EPILOGUE_COLUMNS, self.group_n)

    @property
    def epilogue_row_words(self) -> int:
        """Row pitch of a warp's buffer: accumulator pairs of four rows are in different banks."""
        return self.epilogue_columns + (ROW_PADDING_WORDS - self.epilogue_columns) % BANK_WORDS

    @property
    def partial_row_words(self) -> int:
        """Row pitch of a block's part of the tile: accumulator pairs of four rows are in different banks."""
        return self.n + (ROW_PADDING_WORDS - self.n) % BANK_WORDS

    @property
    def min_partial_stages(self) -> int:
        """Stages whose memory holds a block's part of the tile after the mainloop."""
        return -(-self.m * self.partial_row_words * WORD_BYTES // (self.a.bytes + self.b.bytes))

    @property
    def result_buffer(self) -> Storage:
        """Shared memory through which all consumer warps store outputs."""
        warps = WARPS * self.consumers
        if self.tma_store is None:
            pad = self.epilogue_row_words - self.epilogue_columns
            shape = (warps, EPILOGUE_ROWS, self.epilogue_columns)
            return Storage(ACC_TILE, self.accumulator, shape, Scope.SHARED, (), pad)
        buffers = (warps, RESULT_BUFFERS, EPILOGUE_ROWS, self.tma_store.columns)
        alignment = BUFFER_ALIGNMENT_BYTES
        return Storage(RESULTS, self.tma_store.dtype, buffers, Scope.SHARED, (), swizzled=True, alignment_bytes=alignment)

    @property
    def shared_buffers(self) -> tuple[Storage, ...]:
        """All shared memory of a block, in order; parts of a split tile reuse the pipeline's stages."""
        pipeline = self.pipeline
        order = (barriers(ORDER, PINGPONG_CONSUMERS),) if pipeline.pingpong else ()
        return (
            self.a.buffer(SHARED_A, pipeline.stages), self.b.buffer(SHARED_B, pipeline.stages), *order,
            barriers(FULL, pipeline.stages), barriers(EMPTY, pipeline.stages),
            *(() if pipeline.cluster_k > 1 else (self.result_buffer,)),
        )  # fmt: skip

    @property
    def shared_bytes(self) -> int:
        return shared_bytes(self.shared_buffers)

    @property
    def resources(self) -> BlockResources:
        """A block's resources at launch: `setmaxnreg` redistributes registers with several consumers.

        With one consumer, each thread has what the role with the most registers needs.
        """
        if self.consumers > 1:
            return BlockResources(self.threads, launch_registers(self.threads), self.shared_bytes)
        registers = max(self.accumulator_registers + CONSUMER_REGISTERS, self.producer_registers)
        return BlockResources(self.threads, registers, self.shared_bytes)


@dataclass(frozen=True, slots=True)
class WgmmaOperandLoad:
    """How tiles of one operand can be loaded: by threads, and by TMA or why not."""

    by_threads: OperandLoad
    axis: TileAxis  # m or n
    tma: TmaLoadPlan | None
    tma_unsupported_reason: str

    @property
    def dtype(self) -> DType:
        return self.by_threads.dtype

    @property
    def k_major(self) -> bool:
        """Whether rows of the pipeline are along k: as in memory where the instruction reads both."""
        return self.by_threads.operand.k_major or self.dtype.bytes != TRANSPOSABLE_BYTES


@dataclass(frozen=True, slots=True)
class WgmmaOperandLoads:
    """Loads of both operands, which agree on the order of k-tiles; cached.

    `b2`: operand B of the second product of a dual GEMM.
    """

    a: WgmmaOperandLoad
    b: WgmmaOperandLoad
    k: TileAxis
    b2: WgmmaOperandLoad | None = None
    promotion_interval: int | None = None
    scale_runs: ScaleRuns | None = None
    results: ResultStore | None = None  # of a group whose kernel is planned; None: only its operands are known
    _k_orders: dict[int, KTileOrder] = field(default_factory=dict, compare=False)
    _staged: dict[tuple[int, int, int, int], WgmmaOperand] = field(default_factory=dict, compare=False)

    @property
    def num_accumulators(self) -> int:
        """Accumulators of each output point."""
        return 1 if self.b2 is None else 2

    @property
    def promotes_accumulators(self) -> bool:
        """Whether the accumulators of a k-tile are promoted into separate ones."""
        return self.promotion_interval is not None or self.scale_runs is not None

    @property
    def by_operand(self) -> tuple[tuple[WgmmaOperandLoad, ...], tuple[WgmmaOperandLoad, ...]]:
        """Loads of operand A (0) and B (1), one for each accumulator."""
        return (self.a,), (self.b,) if self.b2 is None else (self.b, self.b2)

    def k_order(self, depth: int) -> KTileOrder:
        """Return the order that lets TMA load most operands, with the fewest outer members.

        Operands that threads can copy asynchronously are not padded much for that.
        """
        known = self._k_orders.get(depth)
        if known is None:
            orders = [KTileOrder.within(self.k, outer, depth) for outer in range(len(self.k.members))]
            if (runs := self.scale_runs) is not None:
                orders = [order for order in orders if order.stays_within(runs.k)] or orders[-1:]
            known_feeds = [feed for side in self.by_operand for feed in side]
            feeds = [feed.tma for feed in known_feeds if feed.tma is not None]
            if all(feed.by_threads.is_async or feed.tma is None for feed in known_feeds):
                orders = [order for order in orders if order.steps <= MAX_PADDING * orders[0].steps]
            known = self._k_orders[depth] = max(orders, key=lambda order: sum(feed.supports(order) for feed in feeds))
        return known

    def tile(self, block: tuple[int, int, int], group: tuple[int, int], pipeline: PipelineOptions) -> WgmmaTile:
        """Return the tile of a block (m, n, k) and a warpgroup (m, n).

        Raises:
            InvariantError: The k-tile is longer than the promotion interval.
        """
        (m, n, k), (group_m, group_n), sums = block, group, self.num_accumulators
        if self.promotion_interval is not None and k > self.promotion_interval:
            raise InvariantError(f"sums of {self.a.dtype.value} take in {self.promotion_interval} products, not {k}")
        a, b = self.staged(0, m, group_m, k), self.staged(1, n, group_n, k)
        consumers = PINGPONG_CONSUMERS if pipeline.pingpong else m // group_m * (n // group_n)
        a, b = fit_prefetches(a, b, consumers)
        tile = WgmmaTile(m, sums * n, k, group_m, sums * group_n, pipeline, a, b, self.k_order(k), sums, self.promotion_interval)
        tile = tile._replace(scale_runs=self.scale_runs)
        if (results := self.results) is None:
            return tile
        boxes = results.boxes((m, n), tile.group_columns, tile.accumulator_set_registers // sums)
        return tile._replace(accumulator=results.accumulator, tma_store=boxes)

    def staged(self, side: int, extent: int, group: int, depth: int) -> WgmmaOperand:
        """Return the tile of A (0) or B (1), `extent` points of m or n, by TMA where it comes in boxes."""
        key = (side, extent, group, depth)
        known = self._staged.get(key)
        if known is None:
            known = self._staged[key] = self._plan_staged(side, extent, group, depth)
        return known

    def boxes(self, side: int, extent: int, depth: int, panel: int) -> tuple[TmaTile, ...] | str:
        """Return the TMA boxes of each accumulator's operand, or why one cannot be loaded so."""
        found: tuple[TmaTile, ...] = ()
        for feed in self.by_operand[side]:
            boxes = feed.tma_unsupported_reason if feed.tma is None else feed.tma.tile(extent, self.k_order(depth), panel)
            if isinstance(boxes, str):
                return boxes
            found += (boxes,)
        return found

    def _plan_staged(self, side: int, extent: int, group: int, depth: int) -> WgmmaOperand:
        feeds = self.by_operand[side]
        feed, sums = feeds[0], len(feeds)
        row, size = depth if feed.k_major else group, feed.dtype.bytes
        atom = next(atom for atom in SWIZZLE_ATOMS if row * size % atom == 0)
        each = extent if sums == 1 else group  # the columns of a warpgroup's accumulators alternate
        found = self.boxes(side, each, depth, atom // size)
        staged = (feed.dtype, feed.k_major, sums * extent, depth, atom)
        if isinstance(found, str):
            prefetch = self._plan_prefetch(feed, extent, depth) if self.num_accumulators == 1 else None
            return WgmmaOperand(*staged, feed.by_threads.load, prefetch=prefetch)
        return WgmmaOperand(*staged, max(found, key=lambda tile: tile.copies), sums * extent // each)

    def _plan_prefetch(self, feed: WgmmaOperandLoad, extent: int, depth: int) -> RegisterPrefetch | None:
        """Return what producer threads prefetch of a packed operand; None of other operands."""
        sides = (feed.axis, extent), (self.k, depth)
        rows, row = sides if feed.k_major else sides[::-1]
        return plan_register_prefetch(feed.by_threads, rows, row, self.k, self.k_order(depth))

    def can_multicast(self, side: int, staged: WgmmaOperand, blocks: int) -> bool:
        """Return whether each of `blocks` blocks can load its part of the tile for all of them."""
        part, uneven = divmod(staged.extent // staged.num_parts, blocks)
        atom = staged.atom_bytes // staged.dtype.bytes
        if not staged.load.is_tma or uneven or part % (PATTERN_ROWS if staged.k_major else atom):
            return False
        return not isinstance(self.boxes(side, part, staged.k, atom), str)


def fit_prefetches(a: WgmmaOperand, b: WgmmaOperand, consumers: int) -> tuple[WgmmaOperand, WgmmaOperand]:
    """Return the operands with as many k-tiles of words in registers as fit, or without a prefetch."""
    prefetches = [operand.prefetch for operand in (a, b) if operand.prefetch is not None]
    if not prefetches:
        return a, b
    launched = launch_registers(block_threads(consumers)) if consumers > 1 else THREAD_REGISTERS
    words = PREFETCH_REGISTERS if consumers > 1 else LONE_PREFETCH_REGISTERS
    free = launched - PREFETCH_ADDRESS_REGISTERS - _other_registers(a, b)  # setmaxnreg cannot give a producer more
    k_tiles = choose_prefetched_k_tiles(prefetches, min(words, free))
    return _with_prefetched_k_tiles(a, k_tiles), _with_prefetched_k_tiles(b, k_tiles)


def _with_prefetched_k_tiles(operand: WgmmaOperand, k_tiles: int) -> WgmmaOperand:
    if (known := operand.prefetch) is None:
        return operand
    return replace(operand, prefetch=replace(known, prefetched_k_tiles=k_tiles) if k_tiles else None)


def _other_registers(a: WgmmaOperand, b: WgmmaOperand) -> int:
    """Return the registers of a producer thread for data in flight of operands that have no words."""
    return sum(max(0, o.producer_registers - ADDRESS_REGISTERS) for o in (a, b) if o.prefetch is None)


def wgmma_tile(program: RProgram, factors: tuple[Operand, ...], arch: Arch) -> WgmmaTile:
    """Return the tile of an rProgram on a unit of kind WGMMA; its `thread` tile is a warpgroup's."""
    m, n, k = (program.space.role(role)[0].name for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    block, group = program.block, program.thread
    feeds = plan_wgmma_loads(program.space, program.unit, factors, arch)
    return feeds.tile((block[m], block[n], block[k]), (group[m], group[n]), program.pipeline)


def plan_wgmma_loads(space: TileSpace, unit: ComputeUnit, factors: tuple[Operand, ...], arch: Arch) -> WgmmaOperandLoads:
    """Return the loads of a contraction's operands: A, B, and B of a second product."""
    (m,), (n,), (k,) = (space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    types = {access.tensor: TensorType(access.dtype, tuple(d.size for d in access.dims)) for access in space.accesses}
    batch = space.role(AxisRole.BATCH)

    def feed(operand: Operand, axis: TileAxis) -> WgmmaOperandLoad:
        dtype = staged_dtype(unit, operand)
        return _plan_wgmma_load(operand, dtype, arch, axis, plan_tma_load(operand, dtype, (axis, k), batch, types))

    a, b, *second = factors
    added = accumulator_precision(unit, arch)
    chain = None if added is None else added.promotion_interval
    return WgmmaOperandLoads(feed(a, m), feed(b, n), k, feed(second[0], n) if second else None, chain, space.scale_runs)


def _plan_wgmma_load(operand: Operand, dtype: DType, arch: Arch, axis: TileAxis, by_tma: TmaLoadPlan | str) -> WgmmaOperandLoad:
    needs_transpose = not operand.k_major and dtype.bytes != TRANSPOSABLE_BYTES
    if needs_transpose:
        by_tma = f"MN-major {dtype.value} must be transposed"
    load = LoadClass(LoadKind.ELEMENT, 1) if needs_transpose else load_class(operand, dtype, arch)
    if load.kind is LoadKind.ASYNC and dtype is DType.FLOAT32:
        # float32 must be rounded to tf32, which cp.async cannot do
        load = LoadClass(LoadKind.VECTOR if load.elements > 1 else LoadKind.ELEMENT, load.elements)
    if load.kind is LoadKind.VECTOR and is_unpacked(operand, dtype, arch):
        load = LoadClass(LoadKind.UNPACK, CHUNK_BYTES // dtype.bytes)  # words wait in registers, not elements
    threads = OperandLoad(operand, dtype, load)
    tma, reason = (None, by_tma) if isinstance(by_tma, str) else (by_tma, "")
    return WgmmaOperandLoad(threads, axis, tma, reason)


def launch_registers(threads: int) -> int:
    """Return the registers of each thread of a block that has an SM for itself, a multiple of eight."""
    return min(THREAD_REGISTERS, CORE_REGISTERS // threads) // 8 * 8


def block_threads(consumers: int) -> int:
    """Return the threads of a block: its consumers and one producer."""
    return WARPGROUP_THREADS * (consumers + 1)


def consumer_register_limit(consumers: int, producer_registers: int) -> int:
    """Return the registers of a consumer thread after setmaxnreg; with one consumer, the architectural maximum."""
    if consumers == 1:
        return THREAD_REGISTERS
    threads = block_threads(consumers)
    remaining = launch_registers(threads) * threads - WARPGROUP_THREADS * producer_registers
    return min(MAX_REGISTERS, remaining // (WARPGROUP_THREADS * consumers) // 8 * 8)


def barriers(name: str, slots: int) -> Storage:
    """Return the shared memory of mbarriers."""
    return Storage(name, DType.UINT64, (slots,), Scope.SHARED, ())


class WgmmaBlock(NamedTuple):
    """A block's tile with the fewest stages, and its k-tile without DRAM and multicast."""

    tile: WgmmaTile
    step: MatrixStep
    requested_bytes: tuple[float, float]  # LLC bytes that a k-tile requests for A and for B
    latencies: int  # dependent memory round trips of a producer thread per k-tile; 0 if it does not wait
    resources: BlockResources  # with the fewest stages
