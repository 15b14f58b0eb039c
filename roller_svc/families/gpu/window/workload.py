"""Tile space of a windowed reduction: which window slides along which axis, and the live values of a thread.

Depthwise convolutions, pooling, stencils: an index adds an inner axis to an outer one, h*2 + kh. Adjacent outputs share
inputs: a thread that computes several of them reads each input once. Axes are positions in the space.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.families.common.gpu.elementwise_space import MapSpace, Tile, map_space
from roller_svc.families.common.gpu.row_space import RowSpace, row_space
from roller_svc.ir.group import AxisRole, KernelGroup, TileSpace
from roller_svc.ir.program import StatementKind
from roller_svc.ir.rprogram import RProgram
from roller_svc.perf.workload import Workload

UNROLLED_STATEMENTS = 1024  # of one thread: 16 KiB of instructions, an eighth of an SM's instruction cache


@dataclass(frozen=True, slots=True)
class Window:
    """A sliding-window dimension: inputs at stride * outer + inner, with `taps` values of the inner axis."""

    axis: int  # the outer axis, a position
    inner: str
    taps: int
    stride: int

    def input_extent(self, outputs: int) -> int:
        """Return the inputs under the windows of adjacent outputs."""
        return (outputs - 1) * self.stride + self.taps


@dataclass(frozen=True, slots=True)
class WindowSpace:
    """Tile space of a windowed reduction."""

    map: MapSpace
    windows: tuple[Window, ...]  # innermost last
    other_inner: tuple[tuple[str, int], ...]  # (name, extent) of inner axes that belong to no window

    @property
    def row(self) -> int:
        return self.map.row

    def supports(self, thread: Tile) -> bool:
        """Return whether a thread's outputs are adjacent along windows, and one vector along a row."""
        under = {w.axis for w in self.windows}
        several = [i for i in range(len(self.map.extents)) if thread[i] > 1 and i not in under]
        spatial = [i for i in several if self.map.space.axes[i].role is AxisRole.OUTER]
        return spatial in ([], [self.row]) and (self.row in under or thread[self.row] == self.lanes(thread))

    def register_windows(self, thread: Tile) -> tuple[Window, ...]:
        """Return the windows under which a thread has several outputs."""
        return tuple([w for w in self.windows if thread[w.axis] > 1])

    def lanes(self, thread: Tile) -> int:
        """Return the vector width along a row without a window; 1 where a window slides along it."""
        if any(w.axis == self.row for w in self.windows):
            return 1
        return math.gcd(self.map.thread_vector_width(thread), self.map.extents[self.row])

    def live_inputs(self, thread: Tile) -> int:
        """Return the inputs that a thread has in registers: one line of its innermost window."""
        slid = self.register_windows(thread)
        return self.lanes(thread) * (slid[-1].input_extent(thread[slid[-1].axis]) if slid else 1)

    def inputs(self, thread: Tile) -> int:
        """Return the inputs that a thread reads of each tensor under windows."""
        count = self.lanes(thread) * math.prod(n for _, n in self.other_inner)
        return count * math.prod([w.input_extent(thread[w.axis]) for w in self.windows])

    def unrolled_statements(self, thread: Tile) -> int:
        """Return the unrolled statements of the register windows."""
        slid = self.register_windows(thread)
        if not slid:
            return self.lanes(thread)
        lines = math.prod([w.input_extent(thread[w.axis]) for w in slid[:-1]])
        return lines * self.live_inputs(thread) + self.lanes(thread) * math.prod([thread[w.axis] * w.taps for w in slid])


def is_windowed(group: KernelGroup) -> bool:
    """Return whether the group reduces windows of inputs, followed by elementwise statements only."""
    outer = {a.name for a in group.outer}
    written = {s.output for s in group.statements}
    for statement in group.statements:
        is_reduction = statement.kind is StatementKind.REDUCE
        if is_reduction != any(a.name not in outer for a in statement.axes):
            return False
        if is_reduction and written & set(statement.reads_tensors):
            return False
    return not group.space.reduces_rows and window_space(group.space) is not None


def window_space(space: TileSpace) -> WindowSpace | None:
    """Prepare a space for many tiles; None where it has no windows."""
    place = {a.name: i for i, a in enumerate(space.axes) if a.role is AxisRole.OUTER}
    inner = {m.name: m.extent for a in space.axes if a.role is AxisRole.INNER for m in a.members}
    found: dict[str, Window] = {}
    for access in space.accesses:
        for dim in access.dims:
            outer = [(name, c) for name, c in dim.coeffs if name in place]
            taps = [(name, c) for name, c in dim.coeffs if name in inner]
            if not dim.is_affine or len(outer) != 1 or len(taps) != 1 or outer[0][1] % taps[0][1]:
                continue
            (axis, step), (name, spacing) = outer[0], taps[0]
            window = Window(place[axis], name, inner[name], step // spacing)
            if window.stride > 0 and found.setdefault(name, window) != window:
                return None
    windows = tuple(sorted(found.values(), key=lambda w: w.axis))
    if not windows or len({w.axis for w in windows}) != len(windows):
        return None
    return WindowSpace(map_space(space), windows, tuple((n, e) for n, e in inner.items() if n not in found))


@dataclass(frozen=True, slots=True)
class WindowFacts:
    """Windows of the group, and the same group as rows for when its reduction is split."""

    windows: WindowSpace
    rows: RowSpace


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[WindowFacts] | None:
    """Prepare a windowed reduction on a GPU; None for any other group or device."""
    if not base.machine.is_gpu or base.is_contraction or not is_windowed(group):
        return None
    windows = window_space(base.space)
    if windows is None:
        return None
    return base.with_facts(WindowFacts(windows, row_space(base.space, base.footprint, base.machine.hw)))


def accepts(workload: Workload[WindowFacts], program: RProgram) -> bool:
    """Whether a thread's outputs are neighbours along windows: what the schedule can build."""
    thread = tuple(program.thread[a.name] for a in program.space.axes)
    return program.reduce_threads == 1 and workload.facts.windows.supports(thread)
