"""The part of the performance model that depends on the kernel group and the device, not on the tile."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from operator import itemgetter
from typing import Generic, TypeVar, cast

from roller_svc.analysis.tile_bounds import KRanges, count_k_tiles, visible_fraction
from roller_svc.ir.estimate import COMPUTE, FLOOR, StageCost
from roller_svc.ir.group import AxisRole, TileSpace, sum_within_tensors
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


@dataclass(frozen=True)
class OperandFootprint:
    """An operand of a contraction: its tensors, and the integer operations to address one element."""

    tensors: tuple[AccessFootprint, ...]
    axes: tuple[int, ...]  # positions of the tile axes that index it
    address_ops: float
    elem_bytes: int  # widest of its tensors
    total_bytes: int
    select_axes: Callable[[Tile], Tile] = field(compare=False)  # a tile's extents on `axes`
    _moved: dict[Tile, float] = field(default_factory=dict, compare=False)

    def requested_bytes(self, tile: Tile) -> float:
        """Return the bytes that the tile requests from memory's cache, in whole transactions; cached."""
        key = self.select_axes(tile)
        known = self._moved.get(key)
        if known is None:
            known = self._moved[key] = sum([t.requested_bytes(tile) for t in self.tensors])
        return known

    def elements(self, tile: Tile) -> int:
        return sum([t.elements(tile) for t in self.tensors])

    @cached_property
    def is_constant(self) -> bool:
        """Whether all of it stays the same between calls: then it is packed once."""
        return bool(self.tensors) and all(t.access.constant for t in self.tensors)


F = TypeVar("F")  # facts of a kernel family
G = TypeVar("G")


@dataclass(frozen=True)
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
    contiguous_axis: int | None  # position of the spatial axis that adjacent threads follow
    m: int | None
    n: int | None
    k: int | None
    a: OperandFootprint
    b: OperandFootprint
    epilogue: OperandFootprint  # epilogue reads and outputs; of a loop nest: everything
    outer_points: int
    inner_points: int
    mnk: Callable[[Tile], tuple[int, int, int]] = field(compare=False)  # a tile's extents on these axes, 1 without one
    operations: int
    compulsory_bytes: int
    elem_bytes: int  # of a staged or computed value
    facts: F  # prepared by the kernel family
    _k_tiles: dict[tuple[Tile, int], KRanges | None] = field(default_factory=dict, compare=False)

    def with_facts(self, facts: G) -> Workload[G]:
        """Return the workload with the facts of a kernel family."""
        return cast("Workload[G]", replace(cast("Workload[object]", self), facts=facts))

    @cached_property
    def extents(self) -> Tile:
        return self.footprint.extents

    @cached_property
    def data_level(self) -> str:
        """Name of the level in which a repeated run finds its data."""
        return find_data_level(self.machine, self.compulsory_bytes)

    @cached_property
    def lower_bound_s(self) -> float:
        """Roofline bound in seconds: operations at the unit's rate, each byte once from `data_level`."""
        rate = self.machine.max_bytes_per_s(self.data_level)
        return max(self.operations / self.machine.unit.flops_per_s, self.compulsory_bytes / rate)

    @cached_property
    def lower_bound(self) -> StageCost:
        """Roofline bound with the name of what bounds it."""
        is_arithmetic = self.operations / self.machine.unit.flops_per_s == self.lower_bound_s
        return StageCost((COMPUTE if is_arithmetic else self.data_level) + FLOOR, self.lower_bound_s)

    def k_tiles(self, tile: Tile, depth: int, steps: float) -> KRanges:
        """Return the k-tiles of `depth` points of a tile's results that a guard leaves of `steps`; cached."""
        if self.space.k_bounds is None:
            return KRanges(steps, steps)
        key = tuple([tile[i] for i in self.spatial]), depth
        if key not in self._k_tiles:
            self._k_tiles[key] = count_k_tiles(self.space, tile, depth)
        left = self._k_tiles[key]
        if left is None:
            return KRanges(steps, steps)
        share = steps / -(-self.inner_points // depth)  # of a part of k
        return KRanges(max(1.0, left.mean * share), max(1.0, min(steps, left.longest)))

    def packed_words(self, depth: int) -> int:
        """Return the words that `depth` elements of k take in a packed operand."""
        return -(-depth // self.machine.unit.k_group)

    def extent(self, position: int | None) -> int:
        return 1 if position is None else self.footprint.extents[position]


def prepare_workload(space: TileSpace, hw: HardwareSpec, unit: ComputeUnit, footprints: Footprints | None = None) -> Workload[None]:
    """Prepare a space for many estimates, without the facts of a family.

    Args:
        footprints: Footprints of the same program's spaces, from other devices and units. Grows.
    """
    lines = lines_of(hw)
    prepared = None if footprints is None else footprints.get((space, lines))
    if prepared is None:
        prepared = footprint(space, lines)
        if footprints is not None:
            footprints[space, lines] = prepared
    is_contraction = any(a.role in (AxisRole.M, AxisRole.N, AxisRole.K) for a in space.axes)
    position = {a.role: i for i, a in enumerate(space.axes)}
    outer = math.prod(a.extent for a in space.spatial)
    inner = math.prod(a.extent for a in space.reduced)
    products = outer * inner * space.word_elements * space.num_accumulators
    flops = round(2 * products * visible_fraction(space)) if is_contraction else space.flops
    machine = prepare_machine(hw, unit)
    if machine.is_gpu and not is_contraction:
        flops -= space.operand_flops  # integers and conversions, on other units than the products
    by_operand = {op: tuple(t for t in prepared.accesses if t.access.operand == op) for op in ("a", "b", "")}
    spatial = tuple(i for i, a in enumerate(space.axes) if a.kind is AxisKind.SPATIAL)
    vector = next((i for i, a in enumerate(space.axes) if a.name == space.vector_axis), None)
    return Workload(
        machine=machine,
        space=space,
        footprint=prepared,
        is_contraction=is_contraction,
        spatial=spatial,
        reduced=tuple(i for i, a in enumerate(space.axes) if a.kind is AxisKind.REDUCE),
        vector_axis=vector,
        contiguous_axis=vector if vector in spatial else spatial[-1] if spatial else None,
        m=position.get(AxisRole.M),
        n=position.get(AxisRole.N),
        k=position.get(AxisRole.K),
        a=_operand(by_operand["a"], prepared),
        b=_operand(by_operand["b"], prepared, space.num_accumulators),
        epilogue=_operand(by_operand[""], prepared),
        outer_points=outer,
        inner_points=inner,
        mnk=_mnk_selector(position.get(AxisRole.M), position.get(AxisRole.N), position.get(AxisRole.K)),
        operations=flops,
        compulsory_bytes=sum_within_tensors((a.access, a.bytes(prepared.extents)) for a in prepared.accesses),
        elem_bytes=space.compute_dtype.bytes,
        facts=None,
    )


def _mnk_selector(m: int | None, n: int | None, k: int | None) -> Callable[[Tile], tuple[int, int, int]]:
    """Return a function that picks a tile's extents on m, n and k; 1 for an axis that is None."""
    if m is not None and n is not None and k is not None:
        return itemgetter(m, n, k)

    def select(tile: Tile) -> tuple[int, int, int]:
        along_m, along_n, along_k = (1 if axis is None else tile[axis] for axis in (m, n, k))
        return along_m, along_n, along_k

    return select


def lines_of(hw: HardwareSpec) -> Lines:
    """Return the transaction bytes of memory and of its cache, which may differ.

    An L2 miss of a V100 fetches 64 bytes, a hit moves 32.
    """
    cache = hw.dram if hw.levels[1].name in hw.tile_levels else hw.levels[1]
    return hw.dram.transaction_bytes, cache.transaction_bytes


def find_data_level(mach: Machine, compulsory_bytes: int) -> str:
    """Return DRAM, or the innermost CPU cache that retains any of the data between runs."""
    if not mach.is_gpu:
        for cache in reversed(mach.caches):
            is_last = cache is mach.llc
            if mach.costs.memory.hit_rate(cache.total_bytes, compulsory_bytes, is_last=is_last) > 0:
                return cache.name
    return mach.dram.name


def _operand(tensors: tuple[AccessFootprint, ...], prepared: SpaceFootprint, factors: int = 1) -> OperandFootprint:
    """Prepare an operand; `factors` operands that are staged alike share the tensors."""
    axes = tuple(sorted({i for t in tensors for i in t.axes}))
    return OperandFootprint(
        tensors=tensors,
        axes=axes,
        select_axes=extent_selector(axes),
        address_ops=sum([t.address_ops for t in tensors]) / factors,
        elem_bytes=max((t.elem_bytes for t in tensors), default=0),
        total_bytes=sum(t.bytes(prepared.extents) for t in tensors),
    )
