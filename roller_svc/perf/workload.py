"""What the model knows of a kernel group on a device before any tile is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from roller_svc.analysis.operand import Operand as Factor
from roller_svc.ir.estimate import COMPUTE, FLOOR, StageCost
from roller_svc.ir.group import AxisRole, TileSpace
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec, UnitKind
from roller_svc.ir.program import AxisKind
from roller_svc.perf.footprint import AccessFootprint, Footprints, Lines, SpaceFootprint, Tile, extents_on, footprint
from roller_svc.perf.machine import Machine, machine

if TYPE_CHECKING:
    from roller_svc.families.common.cpu.op_counts import Pass
    from roller_svc.families.common.gpu.attention.tile import Attended
    from roller_svc.families.common.gpu.elementwise_space import MapSpace
    from roller_svc.families.common.gpu.matrix.terms import MmaBlock, Step
    from roller_svc.families.common.gpu.matrix.tile import Feed
    from roller_svc.families.common.gpu.warpgroups.tile import WgmmaBlock, WgmmaFeeds
    from roller_svc.families.cpu.convolution.workload import ImageSpace
    from roller_svc.families.cpu.transpose.workload import LayoutSpace
    from roller_svc.families.cpu.window.workload import PlaneSpace
    from roller_svc.families.gpu.reduction.workload import RowSpace
    from roller_svc.families.gpu.simt_contraction.workload import SimtFeeds, ThreadRegisters
    from roller_svc.families.gpu.simt_contraction.workload import Step as SimtStep
    from roller_svc.families.gpu.wgmma_attention.workload import GroupedAttention
    from roller_svc.families.gpu.window.workload import WindowSpace

ADDRESS_OPS = 2  # one multiply-add and one pointer add for a load
DIVISION_OPS = 8  # a division by a constant: multiply-high, shift, multiply-subtract, and what feeds them


@dataclass(frozen=True, slots=True)
class Operand:
    """A factor of a contraction: its tensors, and what finding one element costs in integer operations."""

    tensors: tuple[AccessFootprint, ...]
    axes: tuple[int, ...]  # positions of the tile axes that it walks
    address_ops: float
    elem_bytes: int  # widest of its tensors
    total_bytes: int
    on_axes: Callable[[Tile], Tile] = field(compare=False)  # a tile's extents on `axes`
    _moved: dict[Tile, float] = field(default_factory=dict, compare=False)

    def moved_bytes(self, tile: Tile) -> float:
        """Bytes that the tile asks of memory's cache, in whole transactions; remembered by the extents that matter."""
        key = self.on_axes(tile)
        known = self._moved.get(key)
        if known is None:
            known = self._moved[key] = sum([t.asked_bytes(tile) for t in self.tensors])
        return known

    def elements(self, tile: Tile) -> int:
        return sum([t.elements(tile) for t in self.tensors])

    @property
    def constant(self) -> bool:
        """Whether all of it stays the same from call to call: then it is packed once."""
        return bool(self.tensors) and all(t.access.constant for t in self.tensors)


@dataclass(frozen=True, slots=True)
class Problem:
    """`m`, `n`, `k`: positions of those axes (contractions), None where there is no such axis."""

    machine: Machine
    space: TileSpace
    touched: SpaceFootprint
    is_contraction: bool
    spatial: tuple[int, ...]  # positions of the spatial axes
    reduced: tuple[int, ...]
    vector: int | None  # position of the vector axis
    fast: int | None  # position of the spatial axis along which neighbouring threads stand
    m: int | None
    n: int | None
    k: int | None
    a: Operand
    b: Operand
    rest: Operand  # epilogue reads and what is written; of a nest: everything
    outer_points: int
    inner_points: int
    operations: int
    compulsory_bytes: int
    elem_bytes: int  # of a staged or computed value
    feeds: tuple[Feed, Feed] | None = None  # of a matrix unit's operands
    # what the model of matrix units remembers of each (block's tile, warp's tile)
    mma_blocks: dict[tuple[Tile, Tile], MmaBlock] = field(default_factory=dict, compare=False)
    mma_steps: dict[tuple[Tile, Tile], Step] = field(default_factory=dict, compare=False)
    warpgroups: WgmmaFeeds | None = None  # the same of a unit that warpgroups drive
    wgmma_blocks: dict[tuple[Tile, Tile], WgmmaBlock] = field(default_factory=dict, compare=False)
    # what that of scalar lanes does: registers of each thread's sides, steps of each (block's tile, thread's, threads)
    simt_registers: dict[tuple[int, int], ThreadRegisters] = field(default_factory=dict, compare=False)
    simt_steps: dict[tuple[Tile, Tile, int], SimtStep] = field(default_factory=dict, compare=False)
    simt: SimtFeeds | None = None  # of a contraction's on scalar lanes
    map: MapSpace | None = None  # of a map on a SIMT machine
    attention: Attended | None = None
    attention_groups: GroupedAttention | None = None  # the same for a unit that warpgroups drive
    windows: WindowSpace | None = None  # of a windowed reduction on a SIMT machine
    rows: RowSpace | None = None  # of a reducing nest on a SIMT machine
    image: ImageSpace | None = None  # of a contraction that is seen as a convolution
    planes: PlaneSpace | None = None  # of a windowed reduction on a CPU
    layout: LayoutSpace | None = None  # of maps that a CPU turns
    passes: tuple[Pass, ...] = ()  # of a nest on a CPU

    @property
    def extents(self) -> Tile:
        return self.touched.extents

    # These are not kept: a CPU's depend on costs, and `Model.with_costs` replaces those.
    @property
    def found_in(self) -> str:
        """Name of the level where a repeated run finds what it touches."""
        return _outer_level(self.machine, self.compulsory_bytes)

    @property
    def floor_s(self) -> float:
        """Seconds that no tile stays below: operations over the unit's rate, each byte once from where it is found."""
        rate = self.machine.most_bytes_per_s(self.found_in)
        return max(self.operations / self.machine.unit.flops_per_s, self.compulsory_bytes / rate)

    @property
    def floor(self) -> StageCost:
        """The same, and what it is of."""
        is_arithmetic = self.operations / self.machine.unit.flops_per_s == self.floor_s
        return StageCost((COMPUTE if is_arithmetic else self.found_in) + FLOOR, self.floor_s)

    def words(self, depth: int) -> int:
        """What so many of k are in an operand that is packed for the unit, each of `elem_bytes`."""
        return -(-depth // self.machine.unit.group)

    def extent(self, position: int | None) -> int:
        return 1 if position is None else self.touched.extents[position]


def problem(
    space: TileSpace, hw: HardwareSpec, unit: ComputeUnit, factors: tuple[Factor, ...] | None = None,
    footprints: Footprints | None = None,
) -> Problem:  # fmt: skip
    """Prepare a space for many estimates. A GPU's contractions also depend on how their operands lie: `factors`, a, b,
    and what stands for b in a second sum.
    `footprints` are those of problems with the same program; grow."""
    from roller_svc.families.common.gpu.elementwise_space import is_map, map_space  # noqa: PLC0415
    from roller_svc.families.common.gpu.matrix.tile import feeds  # noqa: PLC0415
    from roller_svc.families.common.gpu.warpgroups.tile import wgmma_feeds  # noqa: PLC0415
    from roller_svc.families.cpu.convolution.workload import image_space  # noqa: PLC0415
    from roller_svc.families.gpu.reduction.workload import row_space  # noqa: PLC0415
    from roller_svc.families.gpu.simt_contraction.workload import simt_feeds  # noqa: PLC0415
    from roller_svc.families.gpu.window.workload import window_space  # noqa: PLC0415

    lines = _lines(hw)
    touched = None if footprints is None else footprints.get((space, lines))
    if touched is None:
        touched = footprint(space, lines)
        if footprints is not None:
            footprints[space, lines] = touched
    is_contraction = any(a.role in (AxisRole.M, AxisRole.N, AxisRole.K) for a in space.axes)
    is_nest = not is_contraction
    place = {a.role: i for i, a in enumerate(space.axes)}
    outer = math.prod(a.extent for a in space.spatial)
    inner = math.prod(a.extent for a in space.reduced)
    compulsory = touched.bytes(touched.extents)
    flops = 2 * outer * inner * space.sums if is_contraction else space.flops
    by_operand = {op: tuple(t for t in touched.accesses if t.access.operand == op) for op in ("a", "b", "")}
    mach = machine(hw, unit)
    both = None if factors is None else (factors[0], factors[1])
    spatial = tuple(i for i, a in enumerate(space.axes) if a.kind is AxisKind.SPATIAL)
    vector = next((i for i, a in enumerate(space.axes) if a.name == space.vector_axis), None)
    return Problem(
        machine=mach,
        space=space,
        touched=touched,
        is_contraction=is_contraction,
        spatial=spatial,
        reduced=tuple(i for i, a in enumerate(space.axes) if a.kind is AxisKind.REDUCE),
        vector=vector,
        fast=vector if vector in spatial else spatial[-1] if spatial else None,
        m=place.get(AxisRole.M),
        n=place.get(AxisRole.N),
        k=place.get(AxisRole.K),
        a=_operand(by_operand["a"], touched),
        b=_operand(by_operand["b"], touched, space.sums),
        rest=_operand(by_operand[""], touched),
        outer_points=outer,
        inner_points=inner,
        operations=flops,
        compulsory_bytes=compulsory,
        elem_bytes=space.compute_dtype.bytes,
        feeds=feeds(unit, both, hw.arch) if both is not None and unit.takes_fragments else None,
        warpgroups=wgmma_feeds(space, unit, factors, hw.arch)
        if factors is not None and unit.kind is UnitKind.WGMMA
        else None,
        simt=simt_feeds(space, both, hw.arch) if both is not None and unit.kind is UnitKind.FMA else None,
        map=map_space(space) if mach.simt and is_map(space) else None,
        windows=window_space(space) if mach.simt and is_nest and not space.walks_rows else None,
        rows=row_space(space, touched, hw) if mach.simt and is_nest and AxisRole.INNER in place else None,
        image=image_space(space),
    )


def _lines(hw: HardwareSpec) -> Lines:
    """A miss of V100's L2 fetches 64 bytes where a hit moves 32: memory and its cache count for themselves."""
    cache = hw.dram if hw.levels[1].name in hw.tile_levels else hw.levels[1]
    return hw.dram.transaction_bytes, cache.transaction_bytes


def _outer_level(mach: Machine, compulsory_bytes: int) -> str:
    """Name of the level a repeated run finds its data in: DRAM, or the innermost of a CPU's caches that keep any of
    it."""
    if not mach.simt:
        for cache in reversed(mach.caches):
            is_last = cache is mach.last_cache
            if mach.costs.memory.held_share(cache.total_bytes, compulsory_bytes, is_last=is_last) > 0:
                return cache.name
    return mach.dram.name


def _operand(tensors: tuple[AccessFootprint, ...], touched: SpaceFootprint, factors: int = 1) -> Operand:
    """`factors`: so many that are staged alike, the tensors being those of all."""
    axes = tuple(sorted({i for t in tensors for i in t.axes}))
    return Operand(
        tensors=tensors,
        axes=axes,
        on_axes=extents_on(axes),
        address_ops=sum(address_ops(t) for t in tensors) / factors,
        elem_bytes=max((t.elem_bytes for t in tensors), default=0),
        total_bytes=sum(t.bytes(touched.extents) for t in tensors),
    )


def address_ops(tensor: AccessFootprint) -> float:
    """Integer operations to find one element: fused axes are taken apart by divisions with constants."""
    members = sum(len([m for m in table.axis.members if m.extent > 1]) for table in tensor.tables)
    splits = max(0, members - len(tensor.tables))
    return ADDRESS_OPS * max(1, len(tensor.access.dims)) + DIVISION_OPS * splits
