"""Elementwise group → how a CPU transposes inputs whose contiguous axis differs from the output's.

Rules, model and schedule read it. Positions are those of the axes in the group's space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import Enum

from roller_svc.families.common.cpu.op_counts import subtract_folded_flops
from roller_svc.ir.affine import Affine, affine
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import AxisRef, Expr, Load
from roller_svc.ir.group import GroupKind, KernelGroup
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import StatementKind, TensorExpr, TensorType
from roller_svc.perf.workload import Workload

MIN_LANES = 4
MAX_SHORT_ROW = 4  # elements of a row that is deinterleaved or interleaved: n (n - 1) shuffles for n vectors
NARROW_BYTES = 16  # the least vector, and that of 8- and 16-bit elements: no instruction interleaves wider ones


class TransposeKind(Enum):
    """How vectors are transposed."""

    BLOCK = "square"  # as many rows as vectors have lanes
    DEINTERLEAVE = "deinterleave"  # reads short rows, x[i, 0:3], that whole vectors hold without a gap
    INTERLEAVE = "interleave"  # writes such rows


@dataclass(frozen=True, slots=True)
class TransposeSpace:
    """Tile space of a layout change."""

    kind: TransposeKind
    row: int  # axis along which the results are contiguous
    columns: tuple[int, ...]  # axes along which the transposed loads are, outermost first; a tile has all but the first
    transposed: tuple[Load, ...]
    stride: tuple[int, ...]  # of each transposed load, elements between neighbours along the row
    lanes: int  # of the vectors in which blocks are transposed
    short_row: int = 1  # elements of a short row

    @property
    def column(self) -> int:
        return self.columns[0]


def transpose_space(group: KernelGroup, hw: HardwareSpec) -> TransposeSpace | None:
    """Return the group as a transpose in vectors; None where it is not one."""
    names = [a.name for a in group.outer]
    if group.kind is not GroupKind.NEST or any(
        s.kind is not StatementKind.MAP or {a.name for a in s.axes} != set(names) for s in group.statements
    ):
        return None
    stored = [s for s in group.statements if s.output not in group.register_tensors]
    rows = {_run(_strides(s.index, dict(group.stored)[s.output]), group) for s in stored}
    row = rows.pop() if len(rows) == 1 else None
    if row is None:
        return None
    return _Reading(group, hw, row).space(stored)


def transpose_lanes(dtype: DType, vector_bytes: int) -> int:
    """Return the lanes of the widest vectors in which elements are transposed."""
    return (vector_bytes if dtype.bytes >= 4 else NARROW_BYTES) // dtype.bytes


@dataclass(frozen=True, slots=True)
class _Reading:
    group: KernelGroup
    hw: HardwareSpec
    row: str

    def space(self, stored: list[TensorExpr]) -> TransposeSpace | None:
        loads = [load for s in self.group.statements for load in s.reads]
        found = [(load, strides) for load in dict.fromkeys(loads) if (strides := self._crossing(load)) is not None]
        if not found:
            return None
        first, strides = found[0]
        most = transpose_lanes(first.dtype, self.hw.vector_bytes)
        columns = self._columns(strides, most)
        transposed = tuple(
            (load, s[self.row]) for load, s in found if load.dtype.bits == first.dtype.bits and self._columns(s, most) == columns
        )
        height, short = self._extent(self.row), math.prod(self._extent(c) for c in columns)
        lanes = _lanes(most, min(height, short))
        if short <= MAX_SHORT_ROW and height >= most and all(stride == short for _, stride in transposed):
            kind, lanes = TransposeKind.DEINTERLEAVE, most
        elif height <= MAX_SHORT_ROW and self._extent(columns[-1]) >= most and self._is_interleaved(stored, columns[-1]):
            kind, lanes, short, columns = TransposeKind.INTERLEAVE, most, height, columns[-1:]
        elif lanes >= MIN_LANES and lanes * first.dtype.bytes >= NARROW_BYTES:
            kind = TransposeKind.BLOCK
        else:
            return None
        place = {a.name: i for i, a in enumerate(self.group.space.axes)}
        return TransposeSpace(
            kind,
            place[self.row],
            tuple(place[c] for c in columns),
            tuple(load for load, _ in transposed),
            tuple(stride for _, stride in transposed),
            lanes,
            short,
        )

    def _crossing(self, load: Load) -> dict[str, int] | None:
        """Return a load's strides along each axis; None unless it is contiguous along an axis other than the row.

        Every element that a tile accesses exists, and has its type in memory: intermediates may be wider there.
        """
        type_ = dict(self.group.inputs).get(load.tensor)
        if type_ is None or type_.dtype is not load.dtype or any(load.bounds_checked):
            return None
        strides = _strides(load.index, type_)
        if strides is None or strides.get(self.row, 0) < 2 or _run(strides, self.group) is None:
            return None
        indices = [affine(i) for i in load.index]
        inside = all(w is not None and self._is_inside(w, n) for w, n in zip(indices, type_.shape, strict=True))
        return strides if inside else None

    def _is_inside(self, index: Affine, size: int) -> bool:
        ends = [c * (self._extent(name) - 1) for name, c in index.coeffs]
        low, high = (index.offset + sum(f(0, end) for end in ends) for f in (min, max))
        return low >= 0 and high < size

    def _columns(self, strides: dict[str, int], enough: int) -> tuple[str, ...]:
        """Axes whose points follow each other in memory, the innermost last: as many as fill a vector."""
        by_step = {c: name for name, c in strides.items() if self._extent(name) > 1 and name != self.row}
        found: list[str] = []
        step = 1
        while step < enough and step in by_step:
            found.insert(0, by_step[step])
            step *= self._extent(found[0])
        return tuple(found)

    def _is_interleaved(self, stored: list[TensorExpr], column: str) -> bool:
        """Whether results lie in whole short rows behind each other along that axis, along which all reads lie too."""
        statement = stored[0]
        type_ = dict(self.group.stored)[statement.output]
        if len(stored) > 1 or len(statement.index) < 2 or type_.shape[-1] != self._extent(self.row):
            return False
        if statement.index[-2:] != (AxisRef(column), AxisRef(self.row)):
            return False
        types = {**dict(self.group.inputs), **{s.output: s.type for s in self.group.statements}}
        for load in (load for s in self.group.statements for load in s.reads):
            strides = _strides(load.index, types[load.tensor])
            if load.tensor not in self.group.register_tensors and (strides is None or strides.get(column, 0) not in (0, 1)):
                return False
        return True

    def _extent(self, axis: str) -> int:
        return next(a.extent for a in self.group.outer if a.name == axis)


def _lanes(most: int, extent: int) -> int:
    while most > extent:
        most //= 2
    return most


def _strides(index: tuple[Expr, ...], type_: TensorType) -> dict[str, int] | None:
    """Elements between neighbours along each axis; None where some index is not affine."""
    found: dict[str, int] = {}
    for d, i in enumerate(index):
        known = affine(i)
        if known is None:
            return None
        for name, c in known.coeffs:
            found[name] = found.get(name, 0) + c * math.prod(type_.shape[d + 1 :])
    return found


def _run(strides: dict[str, int] | None, group: KernelGroup) -> str | None:
    """Return the axis whose next point is the next element in memory."""
    wide = {a.name for a in group.outer if a.extent > 1}
    return next((name for name, c in (strides or {}).items() if c == 1 and name in wide), None)


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[TransposeSpace] | None:
    """Prepare a layout change on a CPU; None for any other group or device."""
    if base.machine.is_gpu or base.is_contraction:
        return None
    layout = transpose_space(group, base.machine.hw)
    return None if layout is None else subtract_folded_flops(group, base.with_facts(layout))
