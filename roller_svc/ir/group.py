"""Kernel groups: the statements that become one kernel, and the tile space that construction works in."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from functools import cached_property
from itertools import pairwise

from roller_svc.ir.affine import Affine, Dim
from roller_svc.ir.attention import Attention
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Expr, Op, OpKind, axes_of
from roller_svc.ir.index import conjuncts
from roller_svc.ir.program import Axis, AxisKind, Output, StatementKind, TensorExpr, TensorType

# Axis of values that are computed once for each tile along n: the number of the tile.
COLUMN_TILE = "n.block"


class GroupKind(Enum):
    """Kinds of kernel groups."""

    # C[b, m, n] += A[b, m, k] * B[b, k, n], each of b, m, n, k any number of program axes; or two such over one A
    CONTRACTION = "contraction"
    ATTENTION = "attention"  # a contraction whose A is the softmax along k of another contraction
    # One loop nest: maps, transposes, reductions, windows, several statements over shared outer axes (softmax, norms)
    NEST = "nest"
    SCATTER = "scatter"  # writes at computed indices
    SCAN = "scan"  # combines the elements up to each one along an axis, then maps over the same points
    SCAN_TOTALS = "scan totals"  # the state after all steps of a recurrence from zero, and the product of their gates
    SCAN_STEPS = "scan steps"  # a recurrence whose steps are such totals: several steps that are composed

    @property
    def is_scan(self) -> bool:
        return self in (GroupKind.SCAN, GroupKind.SCAN_TOTALS, GroupKind.SCAN_STEPS)


class AxisRole(Enum):
    """The role of a tile axis.

    A contraction has BATCH, M, N, K. Seen as a convolution it has BATCH (groups), PIXEL (one for an output dimension),
    N (output channels), K (input channels) and TAP (filter positions, added to PIXEL). Attention has the axes of
    its second contraction, K being the keys, and INNER, the head dimension. A nest or scatter has OUTER and INNER. The
    INNER axis of a scan is the one along which it goes: one pass visits each of its points once.
    OUTER axes are spatial and shared by all statements. INNER axes run whole at each outer point: they are reduced, or
    mapped over again by the last statement, as in softmax.
    """

    BATCH = "batch"
    M = "m"
    N = "n"
    K = "k"
    PIXEL = "pixel"
    TAP = "tap"
    OUTER = "outer"
    INNER = "inner"


_REDUCED = (AxisRole.K, AxisRole.TAP, AxisRole.INNER)


@dataclass(frozen=True, slots=True)
class TileAxis:
    """One axis of the tile space: fused program axes, outermost first."""

    name: str
    role: AxisRole
    members: tuple[Axis, ...]

    @property
    def extent(self) -> int:
        return math.prod(a.extent for a in self.members)

    @property
    def kind(self) -> AxisKind:
        return AxisKind.REDUCE if self.role in _REDUCED else AxisKind.SPATIAL

    def member_extents(self, tile: int) -> dict[str, int]:
        """Return the most values of each member axis in a tile: `tile` consecutive points from a multiple of `tile`."""
        extents: dict[str, int] = {}
        remaining, alignment = tile, tile
        for axis in reversed(self.members):
            extents[axis.name] = min(axis.extent, remaining)
            # a segment that wraps meets one more value of the next outer axis, unless it starts where that one starts
            start = axis.extent - math.gcd(alignment, axis.extent)
            alignment = alignment // axis.extent if alignment % axis.extent == 0 else 1
            remaining = -(-(start + remaining) // axis.extent)
        return extents


@dataclass(frozen=True, slots=True)
class TileAccess:
    """One tensor as the group accesses it."""

    tensor: str
    dtype: DType
    dims: tuple[Dim, ...]  # its indices over member axes
    is_output: bool
    operand: str = ""  # "a" or "b": an operand of a contraction
    num_uses: int = 1  # statements of a nest that access it
    constant: bool = False  # the same in every call
    is_conditional: bool = False  # read only where conditions hold
    rereads: bool = False  # only elements of rows, along the innermost dimension, that another access reads whole
    num_loads: int = 1  # loads of a point, at different offsets

    @property
    def tensor_bytes(self) -> int:
        return math.prod(d.size for d in self.dims) * self.dtype.bytes

    def tile_shape(self, extents: Mapping[str, int]) -> tuple[int, ...]:
        """Return the elements accessed along each dimension if axis x covers extents[x] consecutive values."""
        return tuple(accessed_extent(dim, extents) for dim in self.dims)

    def tile_elements(self, extents: Mapping[str, int]) -> int:
        return math.prod(self.tile_shape(extents))

    def tile_bytes(self, extents: Mapping[str, int]) -> int:
        return self.tile_elements(extents) * self.dtype.bytes

    def contiguous_elements(self, extents: Mapping[str, int]) -> int:
        """Return the length of the contiguous segments of the tile. Reference for perf/footprint.py."""
        length = 1
        for dim in reversed(self.dims):
            inner = contiguous_values(dim, extents)
            length *= inner
            if inner < dim.size:
                return length
        return length


def contiguous_values(dim: Dim, extents: Mapping[str, int]) -> int:
    """Return the number of consecutive values that the index takes before it jumps."""
    if not dim.is_affine:
        if dim.permuted_block is not None and (extent := extents.get(dim.permuted_block[0], 1)) >= dim.permuted_block[1]:
            return min(dim.size, extent)
        if dim.segment is not None and not dim.is_divided:
            axis, points = dim.segment
            return min(dim.size, extents.get(axis, 1), points)
        return accessed_extent(dim, extents) if dim.is_divided else 1
    steps = [(abs(c), abs(c) * (extents.get(name, 1) - 1)) for name, c in dim.coeffs if extents.get(name, 1) > 1]
    if len(dim.offsets) > 1:
        steps.append((max(b - a for a, b in pairwise(dim.offsets)), dim.offsets[-1] - dim.offsets[0]))
    run = 1
    for stride, added in sorted(steps):
        if stride > run:
            break
        run += added
    return min(dim.size, run)


_MAX_ENUMERATED = 1024  # combinations of axis values that are counted instead of bounded


def accessed_extent(dim: Dim, extents: Mapping[str, int]) -> int:
    """Return the number of values of the index: exact if strides nest (windows, blocks), else counted or bounded."""
    values = _values_at_one_offset(dim, extents)
    if len(dim.offsets) == 1:
        return values
    unit = math.gcd(*(c for name, c in dim.coeffs if extents.get(name, 1) > 1)) or dim.size
    total = 0
    for first in {offset % unit for offset in dim.offsets}:  # values at offsets that differ otherwise are distinct
        alike = [offset for offset in dim.offsets if offset % unit == first]
        total += values + sum(min(values, (b - a) // unit) for a, b in pairwise(alike))
    return min(dim.size, total)


def _values_at_one_offset(dim: Dim, extents: Mapping[str, int]) -> int:
    count = math.prod(extents.get(name, 1) for name, _ in dim.coeffs)
    if not dim.is_affine:
        return min(dim.size, -(-count // dim.repeat))
    steps = sorted((abs(c), extents.get(name, 1)) for name, c in dim.coeffs if extents.get(name, 1) > 1)
    if len(steps) < 2:
        return min(dim.size, count)
    unit, run = steps[0]
    span = 1 + sum(c * (r - 1) for c, r in steps) // math.gcd(*(c for c, _ in steps))
    for stride, extent in steps[1:]:
        if stride % unit or stride // unit > run:
            break
        run += stride // unit * (extent - 1)
    else:
        return min(dim.size, run)
    if count > _MAX_ENUMERATED:
        return min(dim.size, span, count)
    values = {0}
    for stride, extent in steps:
        values = {v + stride * i for v in values for i in range(extent)}
    return min(dim.size, len(values))


_MIN_ROW = 64  # inner points of a row; fewer are a window. Only where those of adjacent outer points do not overlap


def _is_window(dim: Dim, outer: Collection[str], inner: Mapping[str, int]) -> bool:
    """Return whether an index adds inner axes to outer ones, other than long blocks of a split axis."""
    steps = [abs(c) for name, c in dim.coeffs if name in outer]
    span = 1 + sum(abs(c) * (inner[name] - 1) for name, c in dim.coeffs if name in inner)
    return bool(steps) and span > 1 and (min(steps) < span or math.prod(inner.values()) < _MIN_ROW)


MIN_SCALE_RUN = 16  # points along k with one scale: the shortest step of a matrix unit
MAX_BYTE_PRODUCTS = (1 << 31) // (1 << 16)  # of bytes, that an int32 adds without wrapping


@dataclass(frozen=True, slots=True)
class ScaleRuns:
    """Points along each axis of a contraction with one scale: 128 of n and of k for S[m, n // 128, k // 128].

    0 along m or n if no scale varies with that axis; a scale of k alone counts along m.
    """

    m: int
    n: int
    k: int
    sum_dtype: DType  # of the sums that are scaled

    @property
    def transposed(self) -> ScaleRuns:
        return replace(self, m=self.n, n=self.m)

    def scales(self, rows: int, columns: int) -> float:
        """Return the scales of a tile of results."""
        return sum(extent / run for extent, run in ((rows, self.m), (columns, self.n)) if run)

    def k_tiles(self, depth: int) -> int:
        """Return the k-tiles of `depth` points whose sums are scaled at once: those of a run, if no integer may wrap."""
        may_wrap = not self.sum_dtype.is_float and self.k > MAX_BYTE_PRODUCTS
        return 1 if may_wrap or self.k % depth else self.k // depth


@dataclass(frozen=True, slots=True)
class KBounds:
    """Bounds of the points along k that the guard of a product leaves: up to all of `uppers`, from all of `lowers` on.

    They are affine functions of axes of results. Kernels of contractions leave out k-tiles outside of them.
    """

    uppers: tuple[Affine, ...]
    lowers: tuple[Affine, ...]


@dataclass(frozen=True)
class TileSpace:
    """A kernel group as construction and the model see it."""

    axes: tuple[TileAxis, ...]
    accesses: tuple[TileAccess, ...]
    flops: int  # of the whole group
    compute_dtype: DType
    vector_axis: str  # contiguous in most accesses: an OUTER or N axis, or an INNER one whose reduction threads share
    copied_bytes: int = 0  # of a scatter's target, which is copied to the result first
    num_accumulators: int = 1  # of a contraction, at each point
    # of the whole group's operators on a GPU, without a contraction's computed operands: a function takes several
    instructions: int = 0
    operand_flops: int = 0  # of computed operands of products, part of `flops`; a contraction's staging computes them
    scale_runs: ScaleRuns | None = None  # of a contraction whose sums over blocks of k are scaled
    transposed: bool = False  # of a contraction: M and N, and with them its operands, change places
    k_bounds: KBounds | None = None  # of a contraction whose product has a guard along k
    computed: float = 1.0  # expected part of the tiles, of a grouped GEMM: data decide which batches have rows
    word_elements: int = 1  # of a contraction whose points along k are words: the elements of one, multiplied at once
    winograd_tile: int = 0  # outputs of a tile along each window dimension (Winograd); 0: direct convolution

    @property
    def can_stream_k(self) -> bool:
        """Whether the k-tiles of all tiles of a contraction are equally many, so that blocks may share them evenly."""
        return self.num_accumulators == 1 and self.k_bounds is None

    def axis(self, name: str) -> TileAxis:
        return next(a for a in self.axes if a.name == name)

    def role(self, role: AxisRole) -> tuple[TileAxis, ...]:
        return tuple(a for a in self.axes if a.role is role)

    @cached_property
    def spatial(self) -> tuple[TileAxis, ...]:
        return tuple([a for a in self.axes if a.role not in _REDUCED])

    @cached_property
    def reduced(self) -> tuple[TileAxis, ...]:
        return tuple([a for a in self.axes if a.role in _REDUCED])

    @cached_property
    def longest_reduced(self) -> Axis:
        """The longest member of the reduced axes."""
        return max([m for axis in self.reduced for m in axis.members], key=lambda m: m.extent)

    @cached_property
    def reduces_rows(self) -> bool:
        """Return whether each outer point has a row of its own.

        No index adds inner axes to outer ones, as a window's does, except for long blocks of a split axis.
        """
        outer = {m.name for a in self.spatial for m in a.members if m.extent > 1}
        inner = {m.name: m.extent for a in self.axes if a.role is AxisRole.INNER for m in a.members}
        return bool(inner) and not any(
            _is_window(dim, outer, inner) for access in self.accesses for dim in access.dims if dim.is_affine
        )

    @property
    def compulsory_bytes(self) -> int:
        """Return the compulsory traffic: every accessed element once."""
        whole = {a.name: a.extent for axis in self.axes for a in axis.members}
        moved = sum_within_tensors((access, access.tile_bytes(whole)) for access in self.accesses if not access.rereads)
        return moved + 2 * self.copied_bytes


def sum_within_tensors(accessed: Iterable[tuple[TileAccess, int]]) -> int:
    """Return the sum of the bytes of accesses; those of one tensor are at most its own."""
    tensors: dict[str, list[tuple[TileAccess, int]]] = {}
    for access, moved in accessed:
        tensors.setdefault(access.tensor, []).append((access, moved))
    return sum([min(sum(moved for _, moved in each), max(a.tensor_bytes for a, _ in each)) for each in tensors.values()])


@dataclass(frozen=True, slots=True)
class ContractionOperands:
    """The operands of a contraction."""

    a: Expr  # over batch, m, k
    b: Expr  # over batch, k, n
    b2: Expr | None = None  # B of the second accumulator of a dual GEMM
    scales: tuple[Expr, ...] = ()  # factors of sums over blocks of k, each over m or n and the number of the block


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """Statements that become one kernel. Producers are inlined, and axes renamed so that all statements share `outer`.

    In a contraction, statements[0] accumulates, statements[1] does too in a dual GEMM, and the others are the epilogue:
    maps over the same outer axes. Matrix units also take one reduction over all of n after a single contraction. In
    attention, statements[0] is the second contraction, divided by the sum of exponentials.
    """

    name: str
    kind: GroupKind
    statements: tuple[TensorExpr, ...]
    outer: tuple[Axis, ...]
    register_tensors: frozenset[str]  # written tensors that are not stored: one value for each outer point
    stored: tuple[tuple[str, TensorType], ...]  # the other written tensors; intermediates of narrow floats are float32
    inputs: tuple[tuple[str, TensorType], ...]  # tensors read from memory, as views where axes were fused
    space: TileSpace
    operands: ContractionOperands | None = None
    attention: Attention | None = None
    constants: frozenset[str] = frozenset()  # inputs that are the same in every call
    runs_once: bool = False  # it depends on constants alone, and writes none of the program's outputs

    @property
    def row_reduction(self) -> TensorExpr | None:
        """Return the statement of a contraction's epilogue that reduces its results over all of n, if there is one."""
        if self.kind is not GroupKind.CONTRACTION or self.is_dual_gemm:
            return None
        return next((s for s in self.statements[1:] if s.kind is StatementKind.REDUCE), None)

    @property
    def is_dual_gemm(self) -> bool:
        """Return whether the group is two contractions over one A (dual GEMM)."""
        return self.operands is not None and self.operands.b2 is not None

    @property
    def scatter(self) -> TensorExpr | None:
        """Return the statement of a contraction's epilogue that scatters its rows, if there is one."""
        last = self.statements[-1]
        return last if self.kind is GroupKind.CONTRACTION and last.kind is StatementKind.SCATTER else None

    @property
    def num_batches(self) -> Expr | None:
        """Return the number of batches, along the outermost batch axis, of which rows are scattered; None for all."""
        batch = next(iter(self.space.role(AxisRole.BATCH)), None)
        if self.scatter is None or batch is None:
            return None
        for condition in conjuncts(self.scatter.predicate):
            match condition:
                case Op(kind=OpKind.LT, args=(AxisRef(name=batch.name), limit)) if not axes_of(limit):
                    return limit
        return None

    @property
    def forbids_split_k(self) -> bool:
        """Return whether the reduction of a contraction must not be split over blocks."""
        return self.is_dual_gemm or self.row_reduction is not None or self.scatter is not None

    @property
    def product_sum_dtype(self) -> DType:
        """Return the type in which the products of a contraction are added, before any scale: exact for integers."""
        if self.space.scale_runs is None:
            return self.space.compute_dtype
        return self.space.scale_runs.sum_dtype

    def is_constant(self, outputs: Collection[Output]) -> bool:
        """Return whether the group depends on constants alone and writes none of the program's `outputs`."""
        written = {name for name, _ in self.stored}
        return 0 < len(self.constants) == len(self.inputs) and written.isdisjoint(o.tensor for o in outputs)

    @property
    def anchor(self) -> TensorExpr:
        """Return the statement with the most points."""
        return max(self.statements, key=lambda s: s.points)


def source_names(groups: Iterable[KernelGroup]) -> dict[str, str]:
    """Return the name in the source of each tensor that statements of groups write. Parts of a tensor keep their ids."""
    return {s.output: s.name for group in groups for s in group.statements if "." not in s.output}
