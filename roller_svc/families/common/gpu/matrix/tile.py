"""RProgram of a matrix unit → tiles of its warps and what its block stages; the model and the schedule agree on it.

`mma.sync` of NVIDIA and MFMA of AMD are one family: they differ only in the `Fragment` that a warp multiplies.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property, lru_cache
from typing import NamedTuple

from roller_svc.analysis.operand import Operand, staged_dtype
from roller_svc.analysis.packed_operands import has_pair_conversions, unpacking_of
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import COMPARISONS, Op, OpKind, axes_of, iter_subexpressions
from roller_svc.ir.group import AxisRole, ScaleRuns
from roller_svc.ir.hardware import Arch, ComputeUnit, UnitKind
from roller_svc.ir.program import TensorExpr
from roller_svc.ir.rprogram import RProgram

REGISTER_BYTES, WAVE = 4, 64
SHARED_A, SHARED_B = ".a_shared", ".b_shared"  # staged tiles
LANE_SUMS = 4
ROW_LANES = 4  # that share the rows of a fragment, as neighbours or, transposed, in each quarter of the wave
FUNCTION_OPERATIONS = 16  # operations of an inlined function such as erf
_PLAIN = frozenset({OpKind.ADD, OpKind.SUB, OpKind.MUL, OpKind.NEG, OpKind.MAX, OpKind.MIN, OpKind.RELU}) | COMPARISONS


@dataclass(frozen=True, slots=True)
class Fragment:
    """`rows` x `columns` accumulators, four a lane, of products over `step_bytes` along k."""

    rows: int
    columns: int
    step_bytes: int
    lanes: int
    a_words: int  # 32-bit registers of a lane for A
    b_words: int  # the same for B
    transposes: bool  # MN-major operands are transposed on the way from shared memory; else all are K-major
    b_loads: float  # instructions that load a fragment of B
    row_padding_words: int  # between rows of accumulators in shared memory, modulo the banks: no bank conflicts
    is_transposed: bool = False  # operands change places: a lane's accumulators are in one row, not in one column
    sum_words: int = 1  # 32-bit registers of an accumulator
    interleaves_rows: bool = False  # the four lanes of a column hold every fourth row each, not four adjacent rows

    @property
    def is_square(self) -> bool:
        """Whether a lane's accumulators are in one column, as in 16 x 16, or in one row; else they are adjacent pairs."""
        return self.rows == self.columns

    @property
    def holds_elements(self) -> bool:
        """Whether a lane loads elements of the operands' type; else `ldmatrix` gives it words."""
        return self.is_square or self.sum_words > 1

    @property
    def halves(self) -> int:
        """Parts of a lane's accumulators: one, if they are adjacent."""
        return 1 if self.is_transposed else 2

    @property
    def half_sums(self) -> int:
        """Accumulators of one part: adjacent columns of a row, or rows of a column."""
        return LANE_SUMS // self.halves


# For every operand type (PTX ISA, "Matrix Fragments for mma.m16n8k16"). ldmatrix loads two fragments of B. The eight
# lanes of a quarter warp store pairs.
MMA_SYNC = Fragment(
    rows=16, columns=8, step_bytes=32, lanes=32, a_words=4, b_words=2, transposes=True, b_loads=0.5, row_padding_words=8
)
# The layout of tf32, each word a float64 (PTX ISA, "Matrix Fragments for mma.m16n8k8"). Pairs of sums have 16 bytes:
# the eight lanes that store at once have two rows.
MMA_SYNC_F64 = replace(MMA_SYNC, step_bytes=64, a_words=8, b_words=4, b_loads=2.0, row_padding_words=16, sum_words=2)


@lru_cache(maxsize=64)
def fragment_of(unit: ComputeUnit) -> Fragment:
    """Return the fragments of a unit whose instructions are issued by warps."""
    if unit.kind is not UnitKind.MFMA:
        return MMA_SYNC_F64 if unit.acc_dtype is DType.FLOAT64 else MMA_SYNC
    # V_MFMA_*_16X16Xk: lane l has the l / 16-th quarter along k of row, or column, l % 16, and of the sums four rows of
    # one column (AMD Instinct MI200 ISA, "Matrix Arithmetic Instructions"). Two rows of 16 lanes store at once, four
    # rows of sums apart. The rows of float64 are l / 16, l / 16 + 4, ... (AMD lab notes, "Matrix cores").
    rows, columns, k = unit.shape
    step_bytes = k * unit.in_dtype.bytes
    words = rows * step_bytes // (REGISTER_BYTES * WAVE)
    fragment = Fragment(rows, columns, step_bytes, WAVE, words, words, transposes=False, b_loads=1.0, row_padding_words=4)
    return replace(fragment, sum_words=2, interleaves_rows=True) if unit.acc_dtype is DType.FLOAT64 else fragment


def mfma_unsupported_reason(unit: ComputeUnit) -> str:
    """Return why MFMA instructions of that shape are not used; '' where they are."""
    rows, columns, k = unit.shape
    if (rows, columns) != (16, 16):
        return f"instructions of {rows} x {columns}, kernels are made of 16 x 16"
    operand_bytes = rows * k * unit.in_dtype.bytes
    return "" if operand_bytes % (REGISTER_BYTES * WAVE) == 0 else f"lanes do not hold whole words of {rows} x {k} elements"


LOAD_SCALE_SLOTS = 6  # issue slots to load a scale: address, guard, load, product


class ScaleRegisters(NamedTuple):
    """Registers of a lane for the scales of a warp's sums over a block of k: of its rows, and of its columns."""

    fragment: Fragment
    fragments: int  # along m
    columns: int  # of the warp's tile
    row_run: int  # rows with one scale; 0: no scale varies with m
    column_run: int  # columns of the warp's tile with one scale, whole fragments that divide it; 1: each its own

    @classmethod
    def of(cls, runs: ScaleRuns, fragment: Fragment, fragments: int, columns: int) -> ScaleRegisters:
        run = math.gcd(runs.n, columns)
        return cls(fragment, fragments, columns, runs.m, run if run % fragment.columns == 0 else 1)

    @property
    def rows_of_lane(self) -> int:
        """Rows of a lane's four accumulators of a fragment."""
        return LANE_SUMS if self.fragment.is_square else 2

    @property
    def columns_of_lane(self) -> int:
        """Columns of a lane's four accumulators of a fragment."""
        return LANE_SUMS // self.rows_of_lane

    @property
    def num_columns(self) -> int:
        """Scales of columns; 0 if all columns have the same, which those of rows include."""
        if self.column_run == self.columns:
            return 0
        fragments = self.columns // self.fragment.columns
        return self.columns // self.column_run if self.column_run > 1 else fragments * self.columns_of_lane

    @property
    def num_registers(self) -> int:
        return self.fragments * self.rows_of_lane + self.num_columns

    @property
    def sectors(self) -> int:
        """Sectors that the loads of a warp touch, each of another row or column of scales.

        L1 looks up four tags a cycle (R. Smith, developer forum of NVIDIA), as many sectors as it passes on.
        """
        rows, columns = self.fragment.rows // self.rows_of_lane, self.fragment.columns // self.columns_of_lane
        of_rows = -(-rows // self.row_run) if self.row_run else 1
        of_columns = columns if self.column_run == 1 else 1
        return self.fragments * self.rows_of_lane * of_rows + self.num_columns * of_columns

    def promotion_slots(self, accumulators: int, sum_dtype: DType) -> int:
        """Return the issue slots of a warp to load the scales, and to convert, scale and add its sums."""
        each = 1 + (self.num_columns > 0) + (not sum_dtype.is_float)
        return accumulators * each + LOAD_SCALE_SLOTS * self.num_registers


CHUNK_BYTES = 16  # a row of an ldmatrix matrix, and the widest copy
WORD_BYTES = 4  # of an accumulator, and the narrowest asynchronous copy
MIN_ASYNC_ARCH = Arch("sm_", 80)  # cp.async (PTX ISA, "cp.async": target ISA notes)
BANK_WORDS = 32
ACCUMULATORS = LANE_SUMS
ROWS, COLUMNS, STEP_BYTES = MMA_SYNC.rows, MMA_SYNC.columns, MMA_SYNC.step_bytes  # for NVIDIA's units only
# Row padding of a 4-byte MN-major operand, modulo the banks: four rows of eight lanes read different banks.
ROW_PADDING_WORDS = 8
# Bytes of an element that lanes load one by one → the length of a padded row, and its modulus. Half a warp loads four
# doubles of four rows.
ROW_LENGTHS = {4: (ROW_PADDING_WORDS, BANK_WORDS), 8: (4, 8)}


class StagedTile(NamedTuple):
    """One operand's tile of one stage: `rows` x `row` elements of `dtype`."""

    dtype: DType
    k_major: bool  # a row is along k, else along m or n
    rows: int
    row: int
    pad: int  # elements after each row
    swizzled: bool  # the 16-byte chunks of rows are permuted

    @property
    def bytes(self) -> int:
        return self.rows * (self.row + self.pad) * self.dtype.bytes

    @property
    def chunk(self) -> int:
        """Elements of 16 bytes."""
        return CHUNK_BYTES // self.dtype.bytes


class MmaTile(NamedTuple):
    """Extents of a block's tile and of a warp's, and the staged operands.

    `n` and `warp_n` count columns of accumulators: in a dual GEMM the first half of a tile belongs to the first
    product, the other half to the second.
    """

    m: int
    n: int
    k: int
    warp_m: int
    warp_n: int
    stages: int
    a: StagedTile
    b: StagedTile
    fragment: Fragment = MMA_SYNC
    scale_runs: ScaleRuns | None = None  # of sums of k-tiles, which are scaled and added to others

    @property
    def scales(self) -> ScaleRegisters | None:
        """Registers of a lane for the scales of a k-tile."""
        if self.scale_runs is None:
            return None
        return ScaleRegisters.of(self.scale_runs, self.fragment, self.fragments[0], self.warp_n)

    @property
    def promoted_k_tiles(self) -> int:
        """K-tiles whose sums are scaled at once."""
        return 1 if self.scale_runs is None else self.scale_runs.k_tiles(self.k)

    @property
    def promotion_slots(self) -> float:
        """Issue slots of a warp to scale sums and add them to others, for each k-tile."""
        if self.scale_runs is None or (scales := self.scales) is None:
            return 0.0
        slots = scales.promotion_slots(LANE_SUMS * math.prod(self.fragments), self.scale_runs.sum_dtype)
        return slots / self.promoted_k_tiles

    @property
    def warps(self) -> tuple[int, int]:
        return self.m // self.warp_m, self.n // self.warp_n

    @property
    def threads(self) -> int:
        return math.prod(self.warps) * self.fragment.lanes

    @property
    def fragments(self) -> tuple[int, int]:
        """Instructions of a warp along m and n in one step of k."""
        return self.warp_m // self.fragment.rows, self.warp_n // self.fragment.columns

    @property
    def k_steps(self) -> int:
        """Instructions along k in one k-tile."""
        return self.k * self.a.dtype.bytes // self.fragment.step_bytes

    @property
    def pipeline_bytes(self) -> int:
        return self.stages * (self.a.bytes + self.b.bytes)

    @property
    def epilogue_row(self) -> int:
        """Accumulators of a padded row."""
        words = self.fragment.sum_words
        return self.n + (self.fragment.row_padding_words - self.n * words) % BANK_WORDS // words

    @property
    def epilogue_fragments(self) -> int:
        """Fragment rows that each warp passes to the epilogue at once: as many as fit in the pipeline's memory."""
        whole = self.fragments[0]
        fitting = (q for q in range(whole, 0, -1) if whole % q == 0 and self._epilogue_bytes(q) <= self.pipeline_bytes)
        return next(fitting, 1)

    @property
    def shared_bytes(self) -> int:
        """The epilogue reuses the pipeline's memory; more only where one fragment row does not fit."""
        return max(self.pipeline_bytes, self._epilogue_bytes(1))

    def _epilogue_bytes(self, fragments: int) -> int:
        return self.warps[0] * self.fragment.rows * fragments * self.epilogue_row * self.fragment.sum_words * WORD_BYTES


def mma_tile(program: RProgram, a: Operand, b: Operand) -> MmaTile:
    """Return the tile of an rProgram on a unit that takes fragments; its `thread` tile is a warp's."""
    fragment = fragment_of(program.unit)
    (m,), (n,), (k,) = (program.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    block, warp, sums = program.block, program.thread, program.space.num_accumulators
    columns = sums * block[n.name]
    return MmaTile(
        block[m.name],
        columns,
        block[k.name],
        warp[m.name],
        sums * warp[n.name],
        program.pipeline.stages,
        staged(a, staged_dtype(program.unit, a), block[m.name], block[k.name], fragment),
        staged(b, staged_dtype(program.unit, b), columns, block[k.name], fragment),
        fragment,
        program.space.scale_runs,
    )


def staged(operand: Operand, dtype: DType, extent: int, k: int, fragment: Fragment = MMA_SYNC) -> StagedTile:
    """Return the layout of the tile `extent` x `k`: as in memory, unless no instruction can transpose it.

    Bytes on NVIDIA's devices, anything on AMD's.
    """
    along_k = operand.k_major or dtype.bytes == 1 or not fragment.transposes
    rows, row = (extent, k) if along_k else (k, extent)
    is_padded = fragment.transposes and (dtype.bytes > WORD_BYTES or (dtype.bytes == WORD_BYTES and not along_k))
    if not is_padded:
        return StagedTile(dtype, along_k, rows, row, 0, swizzled=True)
    length, modulus = ROW_LENGTHS[dtype.bytes]
    return StagedTile(dtype, along_k, rows, row, (length - row) % modulus, swizzled=False)


class LoadKind(Enum):
    """How an operand is copied from memory to the staged tile."""

    ASYNC = "async"  # cp.async, as many k-tiles in flight as there are stages
    VECTOR = "vector"  # wide loads into registers, converted there and stored a k-tile later
    UNPACK = "unpack"  # words of packed integers into registers, unpacked there in pairs
    TRANSPOSE = "transpose"  # wide loads along m or n into registers, stored along k
    ELEMENT = "element"  # the same element by element: gathered, computed or transposed

    __hash__ = object.__hash__


@dataclass(frozen=True, slots=True)
class LoadClass:
    """Kind of a copy, and the contiguous elements of one load."""

    kind: LoadKind
    elements: int


def is_unpacked(operand: Operand, dtype: DType, arch: Arch) -> bool:
    """Return whether an operand is unpacked in pairs as `dtype` on that architecture."""
    is_nvidia = arch.prefix == MIN_ASYNC_ARCH.prefix
    return is_nvidia and unpacking_of(operand.expr, dtype) is not None and has_pair_conversions(operand.expr, arch)


def load_class(operand: Operand, dtype: DType, arch: Arch) -> LoadClass:
    """Classify the load of an operand that is staged as `dtype` on that architecture."""
    source, size = operand.memory_dtype, dtype.bytes
    is_nvidia = arch.prefix == MIN_ASYNC_ARCH.prefix
    has_staged_layout = operand.k_major or (size > 1 and is_nvidia)  # as in `staged`
    if operand.copied is None and has_staged_layout and is_unpacked(operand, dtype, arch):
        return LoadClass(LoadKind.UNPACK, CHUNK_BYTES // size)
    if operand.copied is None or not has_staged_layout:
        return LoadClass(LoadKind.ELEMENT, 1)
    same = source is dtype or (source is DType.BOOL and dtype is DType.UINT8)
    if same and is_nvidia and arch >= MIN_ASYNC_ARCH and operand.vector_width * size >= WORD_BYTES:
        return LoadClass(LoadKind.ASYNC, min(operand.vector_width, CHUNK_BYTES // size))
    together = min(operand.vector_width, CHUNK_BYTES // max(size, source.bytes))
    return LoadClass(LoadKind.VECTOR if together > 1 else LoadKind.ELEMENT, together)


@dataclass(frozen=True)
class OperandLoad:
    """How tiles of one operand are loaded: source, staged type, and load class."""

    operand: Operand
    dtype: DType
    load: LoadClass

    @cached_property
    def is_async(self) -> bool:
        return self.load.kind is LoadKind.ASYNC

    @cached_property
    def chunk_registers(self) -> float:
        """Registers of one 16-byte chunk that a thread copies."""
        each = FUSED_COPY_REGISTERS if is_fused(self) else COPY_REGISTERS
        return CHUNK_REGISTERS[self.load.kind] + each * (chunk_copies(self) - 1)


def transposed_load(feed: OperandLoad, fragment: Fragment) -> OperandLoad:
    """Return a load that is transposed in registers, if staged rows are along k and those in memory are not."""
    operand, size = feed.operand, feed.dtype.bytes
    if fragment.transposes or operand.k_major or operand.source is None or operand.memory_dtype.bytes != size:
        return feed
    together = min(operand.vector_width, CHUNK_BYTES // size)
    return replace(feed, load=LoadClass(LoadKind.TRANSPOSE, together)) if together > 1 else feed


def plan_operand_loads(unit: ComputeUnit, operands: tuple[Operand, Operand], arch: Arch) -> tuple[OperandLoad, OperandLoad]:
    """Return the loads of a contraction's operands."""
    types = [staged_dtype(unit, operand) for operand in operands]
    a, b = (OperandLoad(o, t, load_class(o, t, arch)) for o, t in zip(operands, types, strict=True))
    return a, b


# Registers in addition to accumulators, fitted to 227 kernels that NVRTC 13 compiled for sm_80 and sm_90, most of them
# near the limit (RMS error 17 registers where all loads are asynchronous): a base, per unrolled instruction along k,
# per fragment word, per 16-byte chunk that a thread copies (address or data in flight), and per further copy of a
# chunk. Copies through registers, or with their own addresses, are overestimated so that kernels that spilled are
# rejected.
BASE_REGISTERS = 20
K_STEP_REGISTERS = 2
FRAGMENT_FACTOR = 1.3
CHUNK_REGISTERS = {
    LoadKind.ASYNC: 3.6,
    LoadKind.VECTOR: 7.0,
    LoadKind.UNPACK: 8.0,
    LoadKind.TRANSPOSE: 7.0,
    LoadKind.ELEMENT: 8.0,
}
COPY_REGISTERS = 1.25
FUSED_COPY_REGISTERS = 14.0  # where indices of several axes make the address


def thread_registers(tile: MmaTile, a: OperandLoad, b: OperandLoad) -> int:
    """Return the registers of a thread: its part of the warp's tile, and its copies."""
    chunks = CHUNK_BYTES * tile.threads
    brought = -(-tile.a.bytes // chunks) * a.chunk_registers + -(-tile.b.bytes // chunks) * b.chunk_registers
    return math.ceil(warp_registers(tile.fragment, *tile.fragments, tile.k_steps, tile.scale_runs) + brought)


MATRIX_AXES = 3  # of a batch of matrices


def is_fused(feed: OperandLoad) -> bool:
    """Return whether more axes index the operand than those of a batch of matrices."""
    source = feed.operand.source
    return source is not None and len({name for i in source.index for name in axes_of(i)}) > MATRIX_AXES


def chunk_copies(feed: OperandLoad) -> int:
    """Return the asynchronous copies of a chunk; through registers it is stored whole."""
    return CHUNK_BYTES // (feed.load.elements * feed.dtype.bytes) if feed.is_async else 1


def warp_registers(
    fragment: Fragment, fragments_m: int, fragments_n: int, k_steps: int = 1, runs: ScaleRuns | None = None
) -> float:
    """Return the registers of one thread, without those of its copies."""
    sums = LANE_SUMS * fragments_m * fragments_n * fragment.sum_words
    if runs is not None:  # two sets of sums, and scales
        sums = 2 * sums + ScaleRegisters.of(runs, fragment, fragments_m, fragments_n * fragment.columns).num_registers
    words = fragment.a_words * fragments_m + fragment.b_words * fragments_n
    return sums + FRAGMENT_FACTOR * words + K_STEP_REGISTERS * k_steps + BASE_REGISTERS


def count_operations(statements: Iterable[TensorExpr]) -> int:
    """Return the number of operations of one output point in the maps of an epilogue, with its store."""
    expressions = (expression for s in statements for expression in iter_subexpressions(s.body))
    return 1 + sum(1 if p.kind in _PLAIN else FUNCTION_OPERATIONS for p in expressions if isinstance(p, Op))
