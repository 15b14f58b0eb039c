"""Kernel groups: the statements that become one kernel, and the tile space that construction works in."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import Enum

from roller_svc.ir.affine import Dim
from roller_svc.ir.attention import Attention
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr
from roller_svc.ir.program import Axis, AxisKind, Output, StatementKind, TensorExpr, TensorType

# Number of a block's tile along n: an axis of what is computed for each of those tiles.
COLUMN_TILE = "n.block"


class GroupKind(Enum):
    """CONTRACTION: a sum over a product of two factors, C[b, m, n] += A[b, m, k] * B[b, k, n], each of b, m, n, k
    any number of program axes; or two such sums over one A, which differ in B only. ATTENTION: such a sum whose A is
    the softmax along k of another one. NEST: everything else, one loop nest: maps, layout changes, reductions, windowed
    programs, several statements over shared outer axes (softmax, norms). SCATTER: writes at computed places.
    """

    CONTRACTION = "contraction"
    ATTENTION = "attention"
    NEST = "nest"
    SCATTER = "scatter"


class AxisRole(Enum):
    """What a tile axis is. A contraction has BATCH, M, N, K; a nest or scatter has OUTER and INNER. Attention has the
    axes of its second contraction, K being the keys, and INNER, the features that the first one sums over.

    A contraction seen as a convolution has BATCH (groups), PIXEL, N (filters), K (channels) and TAP: PIXEL axes are
    those of its image's results, one each; TAP axes are added to them where a window slides.

    OUTER axes are spatial and shared by all statements of the group; INNER axes are walked whole inside each outer
    point (reduced, or mapped over again by the last statement, as in softmax).
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
    """One axis of the tile space: program axes fused, outermost first. Its extent is their product."""

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
        """Most values of each member axis that a tile meets: `tile` consecutive points from a multiple of `tile`."""
        extents: dict[str, int] = {}
        rest, aligned_to = tile, tile
        for axis in reversed(self.members):
            extents[axis.name] = min(axis.extent, rest)
            # a run that wraps touches one more value of the next axis out, unless it starts where that one starts
            start = axis.extent - math.gcd(aligned_to, axis.extent)
            aligned_to = aligned_to // axis.extent if aligned_to % axis.extent == 0 else 1
            rest = -(-(start + rest) // axis.extent)
        return extents


@dataclass(frozen=True, slots=True)
class TileAccess:
    """One tensor as the group touches it. `dims` are walks over member axes; `operand` is 'a' or 'b' for a factor
    of a contraction, '' otherwise; `passes` is how many statements of a nest touch it; `constant`: it stays the same
    from call to call."""

    tensor: str
    dtype: DType
    dims: tuple[Dim, ...]
    is_output: bool
    operand: str = ""
    num_uses: int = 1
    constant: bool = False

    @property
    def tensor_bytes(self) -> int:
        return math.prod(d.size for d in self.dims) * self.dtype.bytes

    def tile_shape(self, extents: Mapping[str, int]) -> tuple[int, ...]:
        """Elements touched along each dimension when member axis x covers reach[x] consecutive values."""
        return tuple(accessed_extent(dim, extents) for dim in self.dims)

    def tile_elements(self, extents: Mapping[str, int]) -> int:
        return math.prod(self.tile_shape(extents))

    def tile_bytes(self, extents: Mapping[str, int]) -> int:
        return self.tile_elements(extents) * self.dtype.bytes

    def contiguous_elements(self, extents: Mapping[str, int]) -> int:
        """Length of the runs of consecutive elements that the tile consists of."""
        run = 1
        for dim in reversed(self.dims):
            inner = contiguous_values(dim, extents)
            run *= inner
            if inner < dim.size:
                return run
        return run


def contiguous_values(dim: Dim, extents: Mapping[str, int]) -> int:
    """Consecutive values that the index takes before it jumps."""
    if dim.opaque:
        return 1 if dim.repeat == 1 else accessed_extent(dim, extents)
    run = 1
    for stride, extent in sorted((abs(c), extents.get(name, 1)) for name, c in dim.coeffs):
        if extent > 1 and stride > run:
            break
        run += stride * (extent - 1)
    return min(dim.size, run)


_ENUMERATED = 1024  # combinations up to which an irregular walk is counted instead of bounded


def accessed_extent(dim: Dim, extents: Mapping[str, int]) -> int:
    """Values of the index: exact for walks whose strides nest (windows, blocks), else counted or bounded."""
    count = math.prod(extents.get(name, 1) for name, _ in dim.coeffs)
    if dim.opaque:
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
    if count > _ENUMERATED:
        return min(dim.size, span, count)
    values = {0}
    for stride, extent in steps:
        values = {v + stride * i for v in values for i in range(extent)}
    return min(dim.size, len(values))


_LONG_ROW = 64  # inner points that are a row rather than a window, where those of neighbours do not overlap


def _is_window(dim: Dim, outer: Collection[str], inner: Mapping[str, int]) -> bool:
    """Whether an index adds inner axes to outer ones, but for long pieces of an axis that was cut."""
    steps = [abs(c) for name, c in dim.coeffs if name in outer]
    reach = 1 + sum(abs(c) * (inner[name] - 1) for name, c in dim.coeffs if name in inner)
    return bool(steps) and reach > 1 and (min(steps) < reach or math.prod(inner.values()) < _LONG_ROW)


@dataclass(frozen=True, slots=True)
class TileSpace:
    """What construction and the model see of a group. `vector_axis`: name of the tile axis whose points are
    neighbours in memory for most accesses; an OUTER/N axis, or an INNER one (then lanes share the reduction)."""

    axes: tuple[TileAxis, ...]
    accesses: tuple[TileAccess, ...]
    flops: int  # of the whole group
    compute_dtype: DType
    vector_axis: str
    copied_bytes: int = 0  # a scatter's target, which becomes its result before anything is written to it
    num_accumulators: int = 1  # of a contraction, at each of its points

    def axis(self, name: str) -> TileAxis:
        return next(a for a in self.axes if a.name == name)

    def role(self, role: AxisRole) -> tuple[TileAxis, ...]:
        return tuple(a for a in self.axes if a.role is role)

    @property
    def spatial(self) -> tuple[TileAxis, ...]:
        return tuple([a for a in self.axes if a.role not in _REDUCED])

    @property
    def reduced(self) -> tuple[TileAxis, ...]:
        return tuple([a for a in self.axes if a.role in _REDUCED])

    @property
    def reduces_rows(self) -> bool:
        """Whether an outer point has a row of its own: inner axes that no index adds to outer ones, as a window's are,
        unless in long pieces."""
        outer = {m.name for a in self.spatial for m in a.members if m.extent > 1}
        inner = {m.name: m.extent for a in self.axes if a.role is AxisRole.INNER for m in a.members}
        return bool(inner) and not any(
            _is_window(dim, outer, inner) for access in self.accesses for dim in access.dims if not dim.opaque
        )

    @property
    def compulsory_bytes(self) -> int:
        """Compulsory traffic: every tensor once."""
        whole = {a.name: a.extent for axis in self.axes for a in axis.members}
        return sum(access.tile_bytes(whole) for access in self.accesses) + 2 * self.copied_bytes


@dataclass(frozen=True, slots=True)
class ContractionOperands:
    """The two factors of a contraction's body: `a` walks batch, m, k; `b` walks batch, k, n. `second`: what stands for
    `b` in another sum over the same `a`."""

    a: Expr
    b: Expr
    b2: Expr | None = None


@dataclass(frozen=True, slots=True)
class KernelGroup:
    """Statements that become one kernel, producers already inlined and axes renamed so that all share `outer`.

    `locals` are the tensors that live in registers, one value for each outer point; every other tensor written is
    stored to memory: `stored` has its type there, `inputs` those of all tensors read from memory (views of the same
    dense data where axes were fused; an intermediate of a narrow float is stored as float32). In a contraction,
    statements[0] is the sum, statements[1] the second one where there are two, and the rest is their epilogue: maps
    over the same outer axes, and on devices with matrix units, behind a single sum, perhaps one reduction over all of
    n. So it is in `attention`, whose sum is the second contraction's, divided by the sum of exponentials; what comes
    before it is said there. `constants` are the inputs that stay the same from call to call.
    """

    name: str
    kind: GroupKind
    statements: tuple[TensorExpr, ...]
    outer: tuple[Axis, ...]
    register_tensors: frozenset[str]
    stored: tuple[tuple[str, TensorType], ...]
    inputs: tuple[tuple[str, TensorType], ...]
    space: TileSpace
    operands: ContractionOperands | None = None
    attention: Attention | None = None
    constants: frozenset[str] = frozenset()

    @property
    def row_reduction(self) -> TensorExpr | None:
        """The statement of a contraction's epilogue that reduces rows of its results, all of n."""
        if self.kind is not GroupKind.CONTRACTION or self.is_dual_gemm:
            return None
        return next((s for s in self.statements[1:] if s.kind is StatementKind.REDUCE), None)

    @property
    def is_dual_gemm(self) -> bool:
        """Whether it is a contraction of two sums."""
        return self.operands is not None and self.operands.b2 is not None

    @property
    def forbids_split_k(self) -> bool:
        """Whether no block of a contraction may have part of a tile's sums, to be joined by a second launch."""
        return self.is_dual_gemm or self.row_reduction is not None

    def is_constant(self, outputs: Collection[Output]) -> bool:
        """Whether all that the group writes follows from constants alone, and is none of the program's `outputs`."""
        written = {name for name, _ in self.stored}
        return 0 < len(self.constants) == len(self.inputs) and written.isdisjoint(o.tensor for o in outputs)

    @property
    def anchor(self) -> TensorExpr:
        """The statement with the most points."""
        return max(self.statements, key=lambda s: s.points)
