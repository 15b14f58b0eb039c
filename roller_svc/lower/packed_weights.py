"""Weights of a convolution → panels of a task's filters, one row of them for each channel and tap."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from roller_svc.ir.affine import affine
from roller_svc.ir.build import add, ceil_div, div, least, less_equal, mul, num, ref, sub
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, Load, substitute
from roller_svc.ir.program import Axis, TensorType
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, Transpose
from roller_svc.lower.fused_axis import decoded, member_values
from roller_svc.lower.micro_kernel_cpu import LANE
from roller_svc.perf.image_tile import ImageSpace

PACKED = ".weights"


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """`panels` of `wide` filters, `channels` of them a step. Rows are in the order of the micro-kernel's loops."""

    image: ImageSpace
    factor: Expr
    type: TensorType | None  # of the factor in memory, where it is one load
    dtype: DType
    panels: int
    wide: int
    channels: int
    lanes: int

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.panels, self.channels * self.image.taps, self.wide

    @property
    def row(self) -> Expr:
        """The row of channel `.channel` under the taps."""
        channel: Expr = num(0) if self.image.channels is None else ref(".channel")
        tap: Expr = num(0)
        for axis in self._taps:
            tap = add(mul(tap, num(axis.extent)), ref(axis.name))
        if self.image.channels_last:
            return add(mul(tap, num(self.channels)), channel)
        return add(mul(channel, num(self.image.taps)), tap)

    def pack(self) -> tuple[Node, ...]:
        """packed[panel][row][filter] = weight there; beyond the last filter 0, which adds nothing."""
        filters, wide = self.image.filters, self.wide
        place = add(ref(".filters.first"), mul(ref(".filters.panel"), num(wide)))
        rest = filters.extent % wide
        nodes = self._rows(place, rest or wide)
        if rest and filters.extent > wide:
            inside = less_equal(add(place, num(wide)), num(filters.extent))
            nodes = (Branch(inside, self._whole(place), nodes),)
        elif not rest:
            nodes = self._whole(place)
        return (Loop(".filters.panel", self.panels, LoopKind.SERIAL, nodes, ref(".filters.panels")),)

    def _whole(self, place: Expr) -> tuple[Node, ...]:
        """A panel without edge: turned block by block where rows follow each other in memory, filter by filter."""
        load = self._rows_in_memory()
        return self._rows(place, self.wide) if load is None else self._turned(load, place)

    def _turned(self, load: Load, place: Expr) -> tuple[Node, ...]:
        """Blocks of rows; the last one may overlap the one before it. All of a vector's filters before the next one's:
        32 filters side by side, whose rows are often a multiple of 1 KiB apart, push from L1 the lines that two blocks
        share, and packing 9 MB took 0.8 ms in place of 0.45 on Zen 4."""
        lanes, taps = self.lanes, self.image.taps
        filters, channels = self.image.filters, self.image.channels
        rows: Expr = num(self.channels * taps)
        limit: Expr | None = None
        if channels is not None and channels.extent % self.channels:
            rows_left = mul(ref(".channels"), num(taps))
            rows, limit = rows_left, div(add(rows_left, num(lanes - 1)), lanes)
        first = least(mul(ref(".block"), num(lanes)), sub(rows, num(lanes)))
        at: dict[str, Expr] = {axis.name: num(0) for axis in self._taps}
        at[filters.members[0].name] = add(place, mul(ref(".vector"), num(lanes)))
        if self._taps:
            at[self._taps[-1].name] = ref(".row")
        if channels is not None:
            start = mul(ref(".step"), num(self.channels))
            at[channels.members[0].name] = start if self._taps else add(start, ref(".row"))
        source = replace(load, index=tuple(substitute(i, at) for i in load.index))
        target = (ref(".filters.panel"), ref(".row"), mul(ref(".vector"), num(lanes)))
        nodes: tuple[Node, ...] = (Transpose(PACKED, target, self.wide, source, self._filter_stride(load)),)
        blocks = ceil_div(self.channels * taps, lanes)
        nodes = (Loop(".block", blocks, LoopKind.SERIAL, (Let(".row", first, nodes),), limit),)
        return (Loop(".vector", self.wide // lanes, LoopKind.SERIAL, nodes),)

    def _rows_in_memory(self) -> Load | None:
        """The weights, where a panel's rows are neighbours in memory for each filter, and fill at least a block."""
        image, load = self.image, self.factor
        channels = image.channels
        if not image.along_filters or not isinstance(load, Load) or load.dtype is not self.dtype or any(load.checked):
            return None
        if len(image.filters.members) > 1 or (channels is not None and len(channels.members) > 1):
            return None
        if not self.dtype.is_float or self.dtype.bits < 32 or (self.type is None or self.type.dtype is not self.dtype):
            return None
        if image.channels_last and channels is not None and self._taps:
            return None
        shortest = image.depth % self.channels or self.channels
        if shortest * image.taps < self.lanes:
            return None
        strides = self._strides(load)
        step = 1
        for axis in reversed((*(() if channels is None else channels.members), *self._taps)):
            if strides is None or strides.get(axis.name) != step:
                return None
            step *= axis.extent
        return load

    def _filter_stride(self, load: Load) -> int:
        return (self._strides(load) or {}).get(self.image.filters.members[0].name, 0)

    def _strides(self, load: Load) -> dict[str, int] | None:
        """Elements between neighbours along each axis; None where some index is no sum of axes."""
        if self.type is None:
            return None
        found: dict[str, int] = {}
        for d, index in enumerate(load.index):
            known = affine(index)
            if known is None:
                return None
            for name, c in known.coeffs:
                found[name] = found.get(name, 0) + c * math.prod(self.type.shape[d + 1 :])
        return found

    def _rows(self, place: Expr, count: int) -> tuple[Node, ...]:
        at = member_values(self.image.filters, add(place, ref(LANE)))
        value = substitute(Cast(self.factor, self.dtype, implicit=True), at)
        target = (ref(".filters.panel"), self.row)
        nodes: tuple[Node, ...] = (Loop(LANE, count, LoopKind.VECTOR, (Compute(PACKED, (*target, ref(LANE)), value),)),)
        if count < self.wide:
            beyond = Compute(PACKED, (*target, add(num(count), ref(LANE))), _zero(self.dtype))
            nodes += (Loop(LANE, self.wide - count, LoopKind.VECTOR, (beyond,)),)
        for tap in reversed(self._taps):
            nodes = (Loop(tap.name, tap.extent, LoopKind.SERIAL, nodes),)
        channels = self.image.channels
        if channels is None:
            return nodes
        position = add(mul(ref(".step"), num(self.channels)), ref(".channel"))
        limit = ref(".channels") if channels.extent % self.channels else None
        return (Loop(".channel", self.channels, LoopKind.SERIAL, decoded(channels, position, nodes), limit),)

    @property
    def _taps(self) -> tuple[Axis, ...]:
        return tuple(s.tap for s in self.image.slides if s.tap is not None)


def _zero(dtype: DType) -> Const:
    return Const(0.0 if dtype.is_float else 0, dtype)
