"""Operands of a SIMT GEMM → how a block stages them; the model and the schedule agree on it.

A staged tile is [row along k, column along m or n], whatever the operand's order in memory.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
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
from roller_svc.perf.machine import SCHEDULERS, register_words
from roller_svc.perf.workload import Workload

# Fraction of the other pipes that adds to the longest one. Assumed: it predicts cuBLAS's SGEMM on a V100 4 to 9 % slow
# (docs/model.md).
IMPERFECT_OVERLAP = 0.08
BARRIER_CYCLES = 30.0
# Registers of a thread in addition to its tile: per operand that is copied or staged in registers, per copy of a
# k-tile, per staged element (twice that where positions need divisions).
COPYING, HOLDING, EACH_COPY, EACH_STAGED = 6.0, 2.0, 1.0, 1.3


class SimtStep(NamedTuple):
    """One k-tile of one block, in cycles of an otherwise idle core."""

    fma: float
    shared: float
    issue: float
    latency: float  # from requesting a k-tile to having it
    handoff: float  # between two k-tiles, hidden by other resident blocks: stores, a barrier, reads

    @property
    def busy(self) -> float:
        worst = max(self.fma, self.shared, self.issue)
        return worst + IMPERFECT_OVERLAP * (self.fma + self.shared + self.issue - worst)

    def cycles(self, blocks: float, warps: int, prefetch_stages: int) -> float:
        """Return t_k (§5 of the design notes) of `blocks` resident blocks."""
        # a warp stays on one scheduler: a block of fewer warps than those keeps only its share of the lanes busy
        busy = self.busy
        alone = SCHEDULERS / min(SCHEDULERS, warps) * busy
        if prefetch_stages == 0:
            # single buffer: a block's own load and compute do not overlap, those of other blocks do
            return max(blocks * busy, alone + self.latency + self.handoff + BARRIER_CYCLES)
        return max(blocks * busy, alone + self.handoff, (self.latency + self.handoff) / prefetch_stages)


@dataclass(frozen=True, slots=True)
class StagingRegisters:
    """Registers of a thread to stage one operand, in vectors of `width` elements."""

    fixed: float
    per_element: float
    width: int


@dataclass(frozen=True, slots=True)
class ThreadRegisters:
    """Registers of a thread as a function of the staged elements of either operand."""

    fixed: float
    a: StagingRegisters
    b: StagingRegisters

    def of(self, staged_a: float, staged_b: float) -> int:
        a, b = self.a, self.b
        of_a = a.per_element * a.width * math.ceil(staged_a / a.width)
        of_b = b.per_element * b.width * math.ceil(staged_b / b.width)
        return math.ceil(self.fixed + of_a + of_b)


CHUNK_BYTES = 16  # the widest access of a thread
MIN_COPY_BYTES = 4  # of cp.async (PTX ISA)
K_ELEMENTS_PER_TRANSACTION = (  # contiguous along k that adjacent threads take: 32 bytes of 4-byte elements
    8  # neighbours along k that neighbouring threads take: a transaction of 32 bytes, of 4-byte elements
)


@dataclass(frozen=True)
class SimtOperandLoad:
    """How one operand is staged."""

    operand: Operand
    dtype: DType  # of the staged tile
    has_cp_async: bool  # the device copies asynchronously
    reduced_axis: TileAxis
    needs_division: bool  # rows of the fused reduced axis are found by divisions, not one stride

    @property
    def is_direct(self) -> bool:
        """Whether memory holds the staged bits."""
        return self.operand.source is not None and self.operand.memory_dtype is self.dtype

    @cached_property
    def _is_copied(self) -> bool:
        return self.has_cp_async and self.is_direct

    @cached_property
    def _copy_width(self) -> int:
        """Elements of the widest copy: contiguous columns, but one row only, since copies cannot transpose."""
        return 1 if self.operand.k_major else math.gcd(self.operand.vector_width, chunk(self.dtype.bytes))

    def is_async(self, columns: int) -> bool:
        return self._is_copied and math.gcd(self._copy_width, columns) * self.dtype.bytes >= MIN_COPY_BYTES

    def width(self, columns: int, rows: int, inner: Axis | None) -> int:
        """Return the elements that a thread moves at once; `inner`: see `inner_member`."""
        if self.is_async(columns):
            return math.gcd(self._copy_width, columns)
        if self.operand.source is None:
            return 1
        if not self.operand.k_major:
            return self._neighbours(max(self.operand.memory_dtype.bytes, self.dtype.bytes), columns)
        is_contiguous = inner is None or inner == self.reduced_axis.members[-1]
        return self._neighbours(self.operand.memory_dtype.bytes, math.gcd(K_ELEMENTS_PER_TRANSACTION, rows)) if is_contiguous else 1

    def _neighbours(self, element_bytes: int, most: int) -> int:
        return math.gcd(self.operand.vector_width, chunk(element_bytes), most)


@dataclass(frozen=True, slots=True)
class SimtOperandLoads:
    """Loads of both operands."""

    a: SimtOperandLoad
    b: SimtOperandLoad

    def inner_member(self, rows: int) -> Axis | None:
        """Return the reduced axis that the rows of a k-tile follow, or None for the fused axis.

        The innermost axis is first, if its extent is a multiple of `rows`. Another axis would lose the order of the
        fused axis, so it is tried only if no operand is contiguous along the fused axis.
        """
        members = self.a.reduced_axis.members
        tried = members[-1:] if self.a.operand.k_major or self.b.operand.k_major else members[::-1]
        return next((axis for axis in tried if axis.extent % rows == 0), None)


def prepare_operand_loads(space: TileSpace, factors: tuple[Operand, Operand], arch: Arch) -> SimtOperandLoads:
    """Prepare the loads of a SIMT GEMM's operands on that architecture."""
    may_copy = arch.prefix == MIN_ASYNC_ARCH.prefix and arch >= MIN_ASYNC_ARCH
    (reduced,) = space.role(AxisRole.K)
    shapes = {access.tensor: tuple(dim.size for dim in access.dims) for access in space.accesses}
    a, b = (
        SimtOperandLoad(factor, space.compute_dtype, may_copy, reduced, _is_divided(factor, reduced, shapes)) for factor in factors
    )
    return SimtOperandLoads(a, b)


def _is_divided(factor: Operand, reduced: TileAxis, shapes: Mapping[str, tuple[int, ...]]) -> bool:
    if len(reduced.members) == 1:
        return False
    if factor.source is None or (factor.guard is not None and axes_of(factor.guard) & {a.name for a in reduced.members}):
        return True
    return fused_stride(factor.source, reduced, shapes[factor.source.tensor]) is None


def chunk(element_bytes: int) -> int:
    """Return the elements of the widest access."""
    return max(1, CHUNK_BYTES // element_bytes)


def staged_row(columns: int, element_bytes: int) -> int:
    """Return the elements from one row of a staged tile to the next: an odd number of 16-byte chunks.

    The chunks of eight rows then begin in eight different groups of four banks: a warp that scatters eight elements
    along k, four columns or more each, accesses every bank once.
    """
    width = chunk(element_bytes)
    return (-(-columns // width) | 1) * width


def vector_elements(thread_extent: int, element_bytes: int) -> int:
    """Return the points of a thread's tile that are read from shared memory at once."""
    return math.gcd(thread_extent, chunk(element_bytes))


def fused_stride(load: Load, axis: TileAxis, shape: tuple[int, ...]) -> int | None:
    """Return the address stride along a fused axis; None where the address is not linear in its position."""
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
    """Staging of operands. `loads` is None on units other than FMA units; dictionaries are caches."""

    loads: SimtOperandLoads | None
    a_registers: StagingRegisters
    b_registers: StagingRegisters
    registers: dict[tuple[int, int], ThreadRegisters] = field(default_factory=dict, compare=False)
    row_bytes: dict[int, int] = field(default_factory=dict, compare=False)  # of a staged tile, by its columns
    steps: dict[tuple[Tile, Tile, int], SimtStep] = field(default_factory=dict, compare=False)


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[SimtFacts] | None:
    """Prepare a contraction on the FMA units of a GPU; None for any other group or unit."""
    unit, hw = base.machine.unit, base.machine.hw
    if not base.machine.is_gpu or unit.is_matrix or group.attention is not None or not base.is_contraction:
        return None
    staged = unit.kind is UnitKind.FMA and group.operands is not None
    feeds = prepare_operand_loads(base.space, operands(group), hw.arch) if staged else None
    words = register_words(base.space.compute_dtype)
    a, b = (_staging_registers(feed, words) for feed in ((feeds.a, feeds.b) if feeds is not None else (None, None)))
    return base.with_facts(SimtFacts(feeds, a, b))


def _staging_registers(feed: SimtOperandLoad | None, words: int) -> StagingRegisters:
    if feed is None:
        return StagingRegisters(HOLDING, EACH_STAGED * words, 1)
    at_once = feed.width(feed.operand.vector_width, feed.operand.vector_width, None)
    if feed.is_async(feed.operand.vector_width):
        return StagingRegisters(COPYING, EACH_COPY / at_once, at_once)
    return StagingRegisters(HOLDING, EACH_STAGED * words * (1 + feed.needs_division), at_once)
