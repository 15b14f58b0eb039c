"""Windowed reduction whose channels are contiguous → output positions in registers, each a vector of channels.

A tile of adjacent positions of one line shares the vectors that it loads. Nothing is staged: vectors of channels are
contiguous in memory for each tap. Weights are packed by tap.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.families.common.cpu.op_counts import subtract_folded_flops
from roller_svc.families.common.cpu.separable_window import separate
from roller_svc.families.common.cpu.window_analysis import find_windows
from roller_svc.families.common.cpu.window_reduction import PlaneWindowDim, WindowedSum
from roller_svc.ir.affine import affine
from roller_svc.ir.expr import Expr, Load, axes_of, loads_of
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.program import Axis
from roller_svc.perf.workload import Workload

MAX_TAPS = 128  # of a window; the taps of a line are unrolled
MAX_LINE_TAPS = 16


@dataclass(frozen=True, slots=True)
class ChannelSpace:
    """A windowed reduction with vectors along `channels`, the last outer axis.

    `lines`, `columns`: dimensions of its windows; those of `lines` are outermost first. `leading`: the axes before.
    """

    leading: tuple[Axis, ...]
    lines: tuple[PlaneWindowDim, ...]
    columns: PlaneWindowDim
    channels: Axis
    reduction: WindowedSum
    weights: tuple[Load, ...]  # depend on taps and channels alone

    @property
    def line_taps(self) -> int:
        """Taps of all dimensions but the columns'."""
        return math.prod(d.taps for d in self.lines)

    def loaded_columns(self, positions: int) -> int:
        """Return the input columns under the windows of adjacent output positions."""
        slide = self.columns
        return len({p * slide.stride + t * slide.dilation for p in range(positions) for t in range(slide.taps)})


def channel_space(group: KernelGroup, lanes: int) -> ChannelSpace | None:
    """Return the group as a windowed reduction over vectors of channels; None for others."""
    found = find_windows(group)
    if found is None or len(found.statements) != 1 or len(group.outer) - found.first < 2:
        return None
    *dims, channels = group.outer[found.first :]
    if found.slides(channels) or channels.extent < lanes:
        return None
    reductions = found.reductions(tuple(dims))
    if reductions is None:
        return None
    reduction = separate(reductions[0])
    names = {p.name for p in reduction.planes}
    weights = tuple(dict.fromkeys(load for load in loads_of(reduction.body) if load.tensor not in names))
    *lines, columns = reduction.window_dims
    taps = {d.inner for d in reduction.window_dims if d.inner is not None}
    is_small = math.prod(d.taps for d in reduction.window_dims) <= MAX_TAPS and columns.taps <= MAX_LINE_TAPS
    values = [p.value for p in reduction.planes]
    if not is_small or not all(axes_of(w) <= taps | {channels.name} for w in weights):
        return None
    if not axes_of(reduction.body) <= taps | {channels.name} or not all(_is_vector(v, channels.name) for v in values):
        return None
    return ChannelSpace(group.outer[: found.first], tuple(lines), columns, channels, reduction, weights)


def _is_vector(value: Expr, channel: str) -> bool:
    """Return whether neighbours along the channel are adjacent in every load that varies with it."""
    vectors = [load for load in loads_of(value) if channel in axes_of(load)]
    return bool(vectors) and all(_is_contiguous(load, channel) for load in vectors)


def _is_contiguous(load: Load, channel: str) -> bool:
    last = affine(load.index[-1])
    inside = any(channel in axes_of(index) for index in load.index[:-1])
    return not inside and last is not None and last.coeff(channel) == 1


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[ChannelSpace] | None:
    """Prepare a windowed reduction over channels on a CPU; None for any other group or device."""
    if base.machine.is_gpu or base.is_contraction:
        return None
    space = channel_space(group, base.machine.unit.shape[-1])
    return None if space is None else subtract_folded_flops(group, base.with_facts(space))
