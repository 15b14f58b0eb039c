"""What the model knows of a kernel group on a device before any tile is chosen."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Generic, TypeVar, cast

from roller_svc.ir.estimate import COMPUTE, FLOOR, StageCost
from roller_svc.ir.group import AxisRole, TileSpace
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec
from roller_svc.ir.program import AxisKind
from roller_svc.perf.footprint import (
    AccessFootprint,
    Footprints,
    Lines,
    SpaceFootprint,
    Tile,
    extent_selector,
    footprint,
)
from roller_svc.perf.machine import Machine, prepare_machine

ADDRESS_OPS = 2  # one multiply-add and one pointer add for a load
DIVISION_OPS = 8  # a division by a constant: multiply-high, shift, multiply-subtract, and what feeds them


@dataclass(frozen=True, slots=True)
class OperandFootprint:
    """A factor of a contraction: its tensors, and what finding one element costs in integer operations."""

    tensors: tuple[AccessFootprint, ...]
    axes: tuple[int, ...]  # positions of the tile axes that it walks
    address_ops: float
    elem_bytes: int  # widest of its tensors
    total_bytes: int
    select_axes: Callable[[Tile], Tile] = field(compare=False)  # a tile's extents on `axes`
    _moved: dict[Tile, float] = field(default_factory=dict, compare=False)

    def requested_bytes(self, tile: Tile) -> float:
        """Bytes that the tile asks of memory's cache, in whole transactions; remembered by the extents that matter."""
        key = self.select_axes(tile)
        known = self._moved.get(key)
        if known is None:
            known = self._moved[key] = sum([t.requested_bytes(tile) for t in self.tensors])
        return known

    def elements(self, tile: Tile) -> int:
        return sum([t.elements(tile) for t in self.tensors])

    @property
    def is_constant(self) -> bool:
        """Whether all of it stays the same from call to call: then it is packed once."""
        return bool(self.tensors) and all(t.access.constant for t in self.tensors)


F = TypeVar("F")  # facts of a kernel family
G = TypeVar("G")


@dataclass(frozen=True, slots=True)
class Workload(Generic[F]):
    """Tile space of a kernel group on a compute unit. `facts` are prepared by the kernel family that takes the group.

    `m`, `n`, `k`: positions of those axes (contractions), None where there is no such axis.
    """

    machine: Machine
    space: TileSpace
    footprint: SpaceFootprint
    is_contraction: bool
    spatial: tuple[int, ...]  # positions of the spatial axes
    reduced: tuple[int, ...]
    vector_axis: int | None  # position of the vector axis
    contiguous_axis: int | None  # position of the spatial axis along which neighbouring threads stand
    m: int | None
    n: int | None
    k: int | None
    a: OperandFootprint
    b: OperandFootprint
    epilogue: OperandFootprint  # epilogue reads and what is written; of a nest: everything
    outer_points: int
    inner_points: int
    operations: int
    compulsory_bytes: int
    elem_bytes: int  # of a staged or computed value
    facts: F  # what the kernel family knows beyond this

    def with_facts(self, facts: G) -> Workload[G]:
        return cast("Workload[G]", replace(cast("Workload[object]", self), facts=facts))

    @property
    def extents(self) -> Tile:
        return self.footprint.extents

    # These are not kept: a CPU's depend on costs, and `Model.with_costs` replaces those.
    @property
    def data_level(self) -> str:
        """Name of the level where a repeated run finds what it touches."""
        return _find_data_level(self.machine, self.compulsory_bytes)

    @property
    def lower_bound_s(self) -> float:
        """Seconds that no tile stays below: operations over the unit's rate, each byte once from where it is found."""
        rate = self.machine.max_bytes_per_s(self.data_level)
        return max(self.operations / self.machine.unit.flops_per_s, self.compulsory_bytes / rate)

    @property
    def lower_bound(self) -> StageCost:
        """The same, and what it is of."""
        is_arithmetic = self.operations / self.machine.unit.flops_per_s == self.lower_bound_s
        return StageCost((COMPUTE if is_arithmetic else self.data_level) + FLOOR, self.lower_bound_s)

    def packed_words(self, depth: int) -> int:
        """What so many of k are in an operand that is packed for the unit, each of `elem_bytes`."""
        return -(-depth // self.machine.unit.k_group)

    def extent(self, position: int | None) -> int:
        return 1 if position is None else self.footprint.extents[position]


def prepare_workload(
    space: TileSpace, hw: HardwareSpec, unit: ComputeUnit, footprints: Footprints | None = None
) -> Workload[None]:
    """Prepare a space for many estimates, without the facts of a family.

    Args:
        footprints: Footprints of the same program's spaces, from other devices and units. Grows.
    """
    lines = _lines(hw)
    touched = None if footprints is None else footprints.get((space, lines))
    if touched is None:
        touched = footprint(space, lines)
        if footprints is not None:
            footprints[space, lines] = touched
    is_contraction = any(a.role in (AxisRole.M, AxisRole.N, AxisRole.K) for a in space.axes)
    position = {a.role: i for i, a in enumerate(space.axes)}
    outer = math.prod(a.extent for a in space.spatial)
    inner = math.prod(a.extent for a in space.reduced)
    flops = 2 * outer * inner * space.num_accumulators if is_contraction else space.flops
    by_operand = {op: tuple(t for t in touched.accesses if t.access.operand == op) for op in ("a", "b", "")}
    spatial = tuple(i for i, a in enumerate(space.axes) if a.kind is AxisKind.SPATIAL)
    vector = next((i for i, a in enumerate(space.axes) if a.name == space.vector_axis), None)
    return Workload(
        machine=prepare_machine(hw, unit),
        space=space,
        footprint=touched,
        is_contraction=is_contraction,
        spatial=spatial,
        reduced=tuple(i for i, a in enumerate(space.axes) if a.kind is AxisKind.REDUCE),
        vector_axis=vector,
        contiguous_axis=vector if vector in spatial else spatial[-1] if spatial else None,
        m=position.get(AxisRole.M),
        n=position.get(AxisRole.N),
        k=position.get(AxisRole.K),
        a=_operand(by_operand["a"], touched),
        b=_operand(by_operand["b"], touched, space.num_accumulators),
        epilogue=_operand(by_operand[""], touched),
        outer_points=outer,
        inner_points=inner,
        operations=flops,
        compulsory_bytes=touched.bytes(touched.extents),
        elem_bytes=space.compute_dtype.bytes,
        facts=None,
    )


def _lines(hw: HardwareSpec) -> Lines:
    """A miss of V100's L2 fetches 64 bytes where a hit moves 32: memory and its cache count for themselves."""
    cache = hw.dram if hw.levels[1].name in hw.tile_levels else hw.levels[1]
    return hw.dram.transaction_bytes, cache.transaction_bytes


def _find_data_level(mach: Machine, compulsory_bytes: int) -> str:
    """Name of the level a repeated run finds its data in: DRAM, or the innermost of a CPU's caches that keep any of
    it."""
    if not mach.is_gpu:
        for cache in reversed(mach.caches):
            is_last = cache is mach.llc
            if mach.costs.memory.held_share(cache.total_bytes, compulsory_bytes, is_last=is_last) > 0:
                return cache.name
    return mach.dram.name


def _operand(tensors: tuple[AccessFootprint, ...], touched: SpaceFootprint, factors: int = 1) -> OperandFootprint:
    """`factors`: so many that are staged alike, the tensors being those of all."""
    axes = tuple(sorted({i for t in tensors for i in t.axes}))
    return OperandFootprint(
        tensors=tensors,
        axes=axes,
        select_axes=extent_selector(axes),
        address_ops=sum(address_ops(t) for t in tensors) / factors,
        elem_bytes=max((t.elem_bytes for t in tensors), default=0),
        total_bytes=sum(t.bytes(touched.extents) for t in tensors),
    )


def address_ops(tensor: AccessFootprint) -> float:
    """Integer operations to find one element: fused axes are taken apart by divisions with constants."""
    members = sum(len([m for m in table.axis.members if m.extent > 1]) for table in tensor.tables)
    splits = max(0, members - len(tensor.tables))
    return ADDRESS_OPS * max(1, len(tensor.access.dims)) + DIVISION_OPS * splits
