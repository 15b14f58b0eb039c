"""Factors of a contraction on scalar lanes → how a block stages them: what model and lowering agree on.

A staged tile is [row along k, column along m or n], whatever the factor's order in memory.

One staged step of a contraction on scalar lanes, and the registers of its threads: what its model remembers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

from roller_svc.analysis.operand import Operand, operands
from roller_svc.families.common.gpu.matrix.tile import MIN_ASYNC_ARCH
from roller_svc.ir.affine import affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Load, axes_of
from roller_svc.ir.group import AxisRole, KernelGroup, TileAxis, TileSpace
from roller_svc.ir.hardware import Arch, UnitKind
from roller_svc.ir.program import Axis
from roller_svc.perf.footprint import Tile
from roller_svc.perf.machine import SCHEDULERS
from roller_svc.perf.workload import Workload

# Compiled kernels stay below the rate of the tightest pipe: of the others this share shows through. An assumption; with
# it cuBLAS's SGEMM of 1024 to 4096 on a V100 (the sources of its spec) comes out 4 to 9 % slow (docs/model.md).
IMPERFECT_OVERLAP = 0.08
BARRIER_CYCLES = 30.0


class SimtStep(NamedTuple):
    """One staged step of one block, in cycles of a core that runs nothing else.

    `latency`: from asking for a step's tiles to having them. `turn`: what passes between the last product of a step and
    the first of the next, for which the other blocks of a core are there: stores, a barrier, reads.
    """

    fma: float
    shared: float
    issue: float
    latency: float
    handoff: float

    @property
    def busy(self) -> float:
        worst = max(self.fma, self.shared, self.issue)
        return worst + IMPERFECT_OVERLAP * (self.fma + self.shared + self.issue - worst)

    def cycles(self, blocks: float, warps: int, prefetch_stages: int) -> float:
        """t_k (§5 of the design notes): of so many blocks of a core, each loading `ahead` steps before their use."""
        # a warp stays on one scheduler: a block of fewer warps than those keeps only its share of the lanes busy
        busy = self.busy
        alone = SCHEDULERS / min(SCHEDULERS, warps) * busy
        if prefetch_stages == 0:
            # a single buffer: a block's own load and compute do not overlap, other blocks' do
            return max(blocks * busy, alone + self.latency + self.handoff + BARRIER_CYCLES)
        return max(blocks * busy, alone + self.handoff, (self.latency + self.handoff) / prefetch_stages)


@dataclass(frozen=True, slots=True)
class StagingRegisters:
    """Registers that staging one factor takes of a thread, `each` for an element; `width` elements move at once."""

    fixed: float
    per_element: float
    width: int

    def of(self, elements: float) -> float:
        return self.per_element * self.width * math.ceil(elements / self.width)


@dataclass(frozen=True, slots=True)
class ThreadRegisters:
    """Registers of a thread as a function of how many elements of either factor it stages in one step."""

    fixed: float
    a: StagingRegisters
    b: StagingRegisters

    def of(self, staged_a: float, staged_b: float) -> int:
        return math.ceil(self.fixed + self.a.of(staged_a) + self.b.of(staged_b))


CHUNK_BYTES = 16  # the widest access of a thread
MIN_COPY_BYTES = 4  # of cp.async (PTX ISA)
K_ELEMENTS_PER_TRANSACTION = (
    8  # neighbours along k that neighbouring threads take: a transaction of 32 bytes, of 4-byte elements
)


@dataclass(frozen=True, slots=True)
class SimtOperandLoad:
    """One factor. `dtype` is that of the staged tile; `may_copy`: the device copies asynchronously.

    `divided`: whether finding a row of the fused reduced axis takes divisions, its members being no one run in memory.
    """

    operand: Operand
    dtype: DType
    has_cp_async: bool
    reduced_axis: TileAxis
    needs_division: bool

    @property
    def is_direct(self) -> bool:
        """Whether memory holds what is staged, bit for bit."""
        return self.operand.source is not None and self.operand.memory_dtype is self.dtype

    def is_async(self, columns: int) -> bool:
        return self.has_cp_async and self.is_direct and self._copied(columns) * self.dtype.bytes >= MIN_COPY_BYTES

    def width(self, columns: int, rows: int, inner: Axis | None) -> int:
        """Elements that a thread moves at once; `inner` as `inner_member` has it."""
        if self.is_async(columns):
            return self._copied(columns)
        if self.operand.source is None:
            return 1
        if not self.operand.k_major:
            return self._neighbours(max(self.operand.memory_dtype.bytes, self.dtype.bytes), columns)
        lies_along = inner is None or inner == self.reduced_axis.members[-1]
        return (
            self._neighbours(self.operand.memory_dtype.bytes, math.gcd(K_ELEMENTS_PER_TRANSACTION, rows))
            if lies_along
            else 1
        )

    def _copied(self, columns: int) -> int:
        """By one copy: columns that are neighbours in memory, but one row only, for a copy cannot transpose."""
        return 1 if self.operand.k_major else self._neighbours(self.dtype.bytes, columns)

    def _neighbours(self, element_bytes: int, most: int) -> int:
        return math.gcd(self.operand.vector_width, chunk(element_bytes), most)


@dataclass(frozen=True, slots=True)
class SimtOperandLoads:
    """Both factors."""

    a: SimtOperandLoad
    b: SimtOperandLoad

    def inner_member(self, rows: int) -> Axis | None:
        """The reduced axis along which the rows of a step lie, all others standing still; None: rows are consecutive
        points of the fused axis. The innermost where its extent allows; another one only where no factor is contiguous
        along the fused axis, for that order would be lost."""
        members = self.a.reduced_axis.members
        tried = members[-1:] if self.a.operand.k_major or self.b.operand.k_major else members[::-1]
        return next((axis for axis in tried if axis.extent % rows == 0), None)


def prepare_operand_loads(space: TileSpace, factors: tuple[Operand, Operand], arch: Arch) -> SimtOperandLoads:
    """How the factors of a contraction come to scalar lanes of that architecture."""
    may_copy = arch.prefix == MIN_ASYNC_ARCH.prefix and arch >= MIN_ASYNC_ARCH
    (reduced,) = space.role(AxisRole.K)
    shapes = {access.tensor: tuple(dim.size for dim in access.dims) for access in space.accesses}
    a, b = (
        SimtOperandLoad(factor, space.compute_dtype, may_copy, reduced, _is_divided(factor, reduced, shapes))
        for factor in factors
    )
    return SimtOperandLoads(a, b)


def _is_divided(factor: Operand, reduced: TileAxis, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    if len(reduced.members) == 1:
        return False
    if factor.source is None or (
        factor.guard is not None and axes_of(factor.guard) & {a.name for a in reduced.members}
    ):
        return True
    return fused_stride(factor.source, reduced, shapes[factor.source.tensor]) is None


def chunk(element_bytes: int) -> int:
    """Elements of the widest access."""
    return max(1, CHUNK_BYTES // element_bytes)


def staged_row(columns: int, element_bytes: int) -> int:
    """Elements from one row of a staged tile to the next: an odd number of 16-byte chunks.

    Eight rows' chunks then begin in eight different groups of four banks: what a warp scatters from eight neighbours
    along k, four columns or more of each, meets every bank once.
    """
    return (-(-columns // chunk(element_bytes)) | 1) * chunk(element_bytes)


def vector_elements(thread_extent: int, element_bytes: int) -> int:
    """Points of a thread's tile that lie side by side, read from shared memory at once."""
    return math.gcd(thread_extent, chunk(element_bytes))


def fused_stride(load: Load, axis: TileAxis, shape: tuple[int, ...]) -> int | None:
    """Elements by which the address moves along a fused axis, where it is linear in the position on it."""
    names = {a.name for a in axis.members}
    moves = dict.fromkeys(names, 0)
    for d, place in enumerate(load.index):
        if not names & axes_of(place):
            continue
        known = affine(place)
        if known is None:
            return None
        for name in names:
            moves[name] += known.coeff(name) * math.prod(shape[d + 1 :])
    step, points = moves[axis.members[-1].name], 1
    for member in reversed(axis.members):
        if moves[member.name] != step * points:
            return None
        points *= member.extent
    return step


@dataclass(frozen=True, slots=True)
class SimtFacts:
    """How operands are staged; None on units that are not FMA units.

    `registers` caches what threads of (rows, columns) hold; `steps` what (block's tile, thread's tile, threads) take.
    """

    loads: SimtOperandLoads | None
    registers: dict[tuple[int, int], ThreadRegisters] = field(default_factory=dict, compare=False)
    steps: dict[tuple[Tile, Tile, int], SimtStep] = field(default_factory=dict, compare=False)


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[SimtFacts] | None:
    """Prepare a contraction on the FMA units of a GPU; None for any other group or unit."""
    unit, hw = base.machine.unit, base.machine.hw
    if not base.machine.is_gpu or unit.is_matrix or group.attention is not None or not base.is_contraction:
        return None
    staged = unit.kind is UnitKind.FMA and group.operands is not None
    feeds = prepare_operand_loads(base.space, operands(group), hw.arch) if staged else None
    return base.with_facts(SimtFacts(feeds))
