"""RProgram of warpgroups → what its blocks stage and hold: what model and lowering of the `wgmma` family agree on.

A block has one to three warpgroups that multiply, its consumers, and one that only loads, its producer.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from roller_svc.ir.dtype import DType
from roller_svc.ir.group import AxisRole
from roller_svc.ir.hardware import Arch, ComputeUnit
from roller_svc.ir.operand import Operand, staged_dtype
from roller_svc.ir.rprogram import WARPGROUP, RProgram
from roller_svc.perf.mma_tile import BANK_WORDS, ROW_SKEW_WORDS, WORD_BYTES, LoadClass, LoadKind, load_class

# wgmma of every operand type multiplies 64 rows by N columns over 32 bytes of k (PTX ISA, "Asynchronous Warpgroup Level
# Matrix Multiply-Accumulate Operation").
ROWS, STEP_BYTES = 64, 32
MOST_COLUMNS = 256
ATOMS = (128, 64, 32)  # bytes of a row that a swizzle mode permutes (PTX ISA, "Shared Memory Matrix Layout")
ROOM_BYTES = 1024  # what a room of the ring begins at a multiple of: 8 rows of the widest atom
TRANSPOSABLE_BYTES = 2  # of elements that the instruction reads along m or n; of all others only along k
BARRIER_BYTES = 8
WARPS = WARPGROUP // 32
EPILOGUE_ROWS, EPILOGUE_COLUMNS = 16, 32  # of the sums that a warp hands on at once
POOL_REGISTERS = 65536  # of a core (CUDA Programming Guide, compute capability 9.0)
MOST_REGISTERS = 240  # of a thread that setmaxnreg leaves room for beside a producer's
THREAD_REGISTERS = 255  # where it is not used
# What a producer's thread holds: an elected thread's coordinates; addresses of copies; what is on its way as well.
PRODUCER_REGISTERS = {"tma": 40, "async": 88, "registers": 120}


class WgmmaLoad(Enum):
    """How an operand's elements come from memory to the ring."""

    TMA = "tma"  # boxes of a tensor, by one thread
    IM2COL = "im2col"  # the same, boxes of pixels under a window
    ASYNC = "async"  # cp.async of all threads of the producer
    VECTOR = "vector"  # wide loads into their registers, converted there
    ELEMENT = "element"  # the same one element at a time: gathered, computed, or turned on the way

    @property
    def is_tma(self) -> bool:
        return self in (WgmmaLoad.TMA, WgmmaLoad.IM2COL)


_BY_THREADS = {LoadKind.ASYNC: WgmmaLoad.ASYNC, LoadKind.VECTOR: WgmmaLoad.VECTOR, LoadKind.ELEMENT: WgmmaLoad.ELEMENT}


@dataclass(frozen=True, slots=True)
class WgmmaOperand:
    """One operand's tile of one stage: `extent` (m or n of the block) x `k` elements.

    `along_k`: rows of the ring lie along k (K-major), else along m or n. `atom_bytes`: of a row's part that is swizzled
    as one; `[panels, rows, atom]` is the tile's shape in shared memory. `copies`: of TMA, for the tile.
    """

    dtype: DType
    along_k: bool
    extent: int
    k: int
    atom_bytes: int
    load: WgmmaLoad
    feed: LoadClass
    copies: int = 0

    @property
    def rows(self) -> int:
        return self.extent if self.along_k else self.k

    @property
    def panels(self) -> int:
        row = self.k if self.along_k else self.extent
        return row * self.dtype.bytes // self.atom_bytes

    @property
    def bytes(self) -> int:
        return self.extent * self.k * self.dtype.bytes


@dataclass(frozen=True, slots=True)
class WgmmaTile:
    """Extents of a block's tile and of a warpgroup's, and the staged operands."""

    m: int
    n: int
    k: int
    group_m: int
    group_n: int
    stages: int
    cluster: tuple[int, int]
    a: WgmmaOperand
    b: WgmmaOperand

    @property
    def groups(self) -> tuple[int, int]:
        """Consumers along m and n."""
        return self.m // self.group_m, self.n // self.group_n

    @property
    def consumers(self) -> int:
        return math.prod(self.groups)

    @property
    def threads(self) -> int:
        return WARPGROUP * (self.consumers + 1)

    @property
    def fragments(self) -> int:
        """Instructions of a warpgroup along m in one step of the instruction along k."""
        return self.group_m // ROWS

    @property
    def k_steps(self) -> int:
        """Instructions along k in one staged step."""
        return self.k * self.a.dtype.bytes // STEP_BYTES

    @property
    def accumulators(self) -> int:
        """Registers of a consumer's thread that hold sums."""
        return self.group_m * self.group_n // WARPGROUP

    @property
    def thread_fed(self) -> bool:
        """Whether all threads of the producer fill part of each stage."""
        return not (self.a.load.is_tma and self.b.load.is_tma)

    @property
    def producer_registers(self) -> int:
        """Of a producer's thread, in eights."""
        return max(producer_registers(self.a.load), producer_registers(self.b.load))

    @property
    def consumer_registers(self) -> int:
        """What is left to a consumer's thread of those that the block was launched with, in eights; with one consumer
        nothing is handed over, and each thread has as many."""
        if self.consumers == 1:
            return THREAD_REGISTERS
        launched = min(THREAD_REGISTERS, POOL_REGISTERS // self.threads) // 8 * 8
        left = launched * self.threads - WARPGROUP * self.producer_registers
        return min(MOST_REGISTERS, left // (WARPGROUP * self.consumers) // 8 * 8)

    @property
    def ring_bytes(self) -> int:
        return _rooms(self.stages * self.a.bytes) + _rooms(self.stages * self.b.bytes)

    @property
    def epilogue_columns(self) -> int:
        """Columns of a warp's sums that go through its room at once; the last of them may be fewer."""
        return min(EPILOGUE_COLUMNS, self.group_n)

    @property
    def epilogue_row_words(self) -> int:
        """From one row of a warp's room to the next: pairs of sums of four rows then lie in different banks."""
        return self.epilogue_columns + (ROW_SKEW_WORDS - self.epilogue_columns) % BANK_WORDS

    @property
    def epilogue_bytes(self) -> int:
        """Rooms of all warps of the consumers."""
        return WARPS * self.consumers * EPILOGUE_ROWS * self.epilogue_row_words * WORD_BYTES

    @property
    def barrier_bytes(self) -> int:
        """`full` and `empty` of each stage."""
        return 2 * self.stages * BARRIER_BYTES

    @property
    def shared_bytes(self) -> int:
        return self.ring_bytes + self.epilogue_bytes + self.barrier_bytes


def wgmma_tile(program: RProgram, factors: tuple[Operand, Operand], arch: Arch) -> WgmmaTile:
    """Of an rProgram on a unit of kind WGMMA whose `thread` tile is a warpgroup's."""
    (m,), (n,), (k,) = (program.space.role(role) for role in (AxisRole.M, AxisRole.N, AxisRole.K))
    block, group = program.block, program.thread
    a, b = wgmma_feeds(program.unit, factors, arch)
    depth = block[k.name]
    return WgmmaTile(
        block[m.name], block[n.name], depth, group[m.name], group[n.name], program.stages, program.cluster,
        _staged(a, block[m.name], group[m.name], depth), _staged(b, block[n.name], group[n.name], depth),
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class WgmmaFeed:
    """How tiles of one operand are filled where threads do it."""

    operand: Operand
    dtype: DType
    load: LoadClass

    @property
    def along_k(self) -> bool:
        return self.operand.along_k or self.dtype.bytes != TRANSPOSABLE_BYTES


def wgmma_feeds(unit: ComputeUnit, factors: tuple[Operand, Operand], arch: Arch) -> tuple[WgmmaFeed, WgmmaFeed]:
    """Those of a contraction's operands."""
    a, b = (_feed(operand, staged_dtype(unit, operand), arch) for operand in factors)
    return a, b


def _feed(operand: Operand, dtype: DType, arch: Arch) -> WgmmaFeed:
    lies_alike = operand.along_k or dtype.bytes == TRANSPOSABLE_BYTES
    load = load_class(operand, dtype, arch) if lies_alike else LoadClass(LoadKind.ELEMENT, 1)
    return WgmmaFeed(operand, dtype, load)


def _staged(feed: WgmmaFeed, extent: int, group: int, k: int) -> WgmmaOperand:
    row = k if feed.along_k else group
    atom = next(atom for atom in ATOMS if row * feed.dtype.bytes % atom == 0)
    return WgmmaOperand(feed.dtype, feed.along_k, extent, k, atom, _BY_THREADS[feed.load.kind], feed.load)


def producer_registers(load: WgmmaLoad) -> int:
    """Of a producer's thread that brings an operand so."""
    if load.is_tma:
        return PRODUCER_REGISTERS["tma"]
    return PRODUCER_REGISTERS["async" if load is WgmmaLoad.ASYNC else "registers"]


def _rooms(size: int) -> int:
    return -(-size // ROOM_BYTES) * ROOM_BYTES
