"""Weights of a convolution → panels of a task's filters, one row of them for each channel and tap."""

from __future__ import annotations

from dataclasses import dataclass

from roller_svc.ir.build import add, less_equal, mul, num, ref
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Cast, Const, Expr, substitute
from roller_svc.ir.program import Axis
from roller_svc.ir.schedule import Branch, Compute, Loop, LoopKind, Node
from roller_svc.lower.fused_axis import decoded, member_values
from roller_svc.lower.micro_kernel_cpu import LANE
from roller_svc.perf.image_tile import ImageSpace

PACKED = ".weights"


@dataclass(frozen=True, slots=True)
class PackedWeights:
    """`panels` of `wide` filters, `channels` of them a step. Rows are in the order of the micro-kernel's loops."""

    image: ImageSpace
    factor: Expr
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
            nodes = (Branch(inside, self._rows(place, wide), nodes),)
        return (Loop(".filters.panel", self.panels, LoopKind.SERIAL, nodes, ref(".filters.panels")),)

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
