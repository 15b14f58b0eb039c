"""Windowed reduction → planes staged in a CPU core's scratch memory, and where each tap finds its element.

Depthwise convolutions, pooling, stencils: an index adds a tap to an outer axis, h*2 + kh*3. Inputs are copied into a
plane with padding filled in, split into phases so that for every tap adjacent outputs read adjacent elements at one
offset. A plane is then one long run of vectors, whatever its width.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.families.common.cpu.op_counts import subtract_folded_flops
from roller_svc.families.common.cpu.separable_window import separate
from roller_svc.families.common.cpu.window_analysis import find_windows
from roller_svc.families.common.cpu.window_reduction import PlaneWindowDim, WindowedSum
from roller_svc.ir.expr import (
    Expr,
)
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, div, mod, mul, num
from roller_svc.ir.program import Axis
from roller_svc.perf.workload import Workload


@dataclass(frozen=True, slots=True)
class PlaneSpace:
    """Windowed reductions of a group, in the order of its statements.

    `axes`: those of planes; `leading`: the outer axes before them.
    """

    leading: tuple[Axis, ...]
    axes: tuple[Axis, ...]
    reductions: tuple[WindowedSum, ...]

    @property
    def first(self) -> int:
        """Position of the first axis of planes among the tile axes."""
        return len(self.leading)


def plane_space(group: KernelGroup) -> PlaneSpace | None:
    """Return the group as reductions over windows, followed by elementwise statements; None for others."""
    found = find_windows(group)
    if found is None:
        return None
    axes = group.outer[found.first :]
    sums = found.reductions(axes)
    return None if sums is None else PlaneSpace(group.outer[: found.first], axes, tuple(map(separate, sums)))


Tile = tuple[int, ...]
LINE = 64  # elements; buffers are whole multiples
# Phases a multiple of this many elements apart (2 KiB of float32) share one or two of the 64 L1 sets: conflict misses.
CROWDED = 512


@dataclass(frozen=True, slots=True)
class Dimension:
    """A window dimension under a tile of `block` outputs, `rows` of which are computed together.

    Position p is in phase p % phases at p // phases: output rows * q + r finds its tap at the same phase for all q, and
    what several of the `rows` outputs read is one element.
    """

    window_dim: PlaneWindowDim
    block: int
    rows: int

    @property
    def phases(self) -> int:
        return self.window_dim.stride * self.rows

    @property
    def steps(self) -> int:
        return -(-self.block // self.rows)

    @property
    def size(self) -> int:
        """Elements of one phase."""
        return self.steps + (self.window_dim.stride * (self.rows - 1) + self.window_dim.span) // self.phases

    @property
    def places(self) -> int:
        return self.window_dim.input_extent(self.block)


@dataclass(frozen=True, slots=True)
class PlaneLayout:
    """Layout of a reduction's planes, and the run of outputs over its last two dimensions.

    Outputs of `rows` adjacent lines are computed together at each point of the run; points between two lines are
    wasted.
    """

    dims: tuple[Dimension, ...]
    width: int  # elements of a step of the run

    @property
    def rows(self) -> int:
        return self.dims[-2].rows if len(self.dims) > 1 else 1

    @property
    def pitches(self) -> Tile:
        return tuple(math.prod(d.size for d in self.dims[i + 1 :]) for i in range(len(self.dims)))

    @property
    def phase_elements(self) -> int:
        """Elements of a phase's buffer."""
        whole = -(-math.prod(d.size for d in self.dims) // LINE) * LINE
        return whole + LINE if whole % CROWDED == 0 else whole

    @property
    def elements(self) -> int:
        """Elements of the whole buffer; the run's last step may read beyond the last phase."""
        phases = math.prod(d.phases for d in self.dims)
        return phases * self.phase_elements + -(-self.width // LINE) * LINE

    @property
    def pitch(self) -> int:
        """Elements between lines of outputs, and of staged inputs."""
        return self.dims[-1].size

    @property
    def run_steps(self) -> int:
        lines = self.dims[-2].steps if len(self.dims) > 1 else 1
        return -(-((lines - 1) * self.pitch + self.dims[-1].block) // self.width)

    def element(self, places: tuple[Expr, ...]) -> Expr:
        """Return the offset in the buffer of the element at these positions."""
        phase, offset = num(0), num(0)
        total: Expr = offset
        number: Expr = phase
        for dim, place, pitch in zip(self.dims, places, self.pitches, strict=True):
            number = add(mul(number, num(dim.phases)), mod(place, dim.phases))
            total = add(total, mul(div(place, dim.phases), num(pitch)))
        return add(mul(number, num(self.phase_elements)), total)


def layout(space: PlaneSpace, of: WindowedSum, block: Tile, thread: Tile) -> PlaneLayout:
    """Return the layout of one reduction's planes under an rProgram's tiles."""
    first, last = space.first, len(space.axes) - 1
    dims = []
    for i, slide in enumerate(of.window_dims):
        rows = thread[first + i] if i == last - 1 else 1
        wanted = min(block[first + i], slide.extent)
        dims.append(Dimension(slide, -(-wanted // rows) * rows if i == last - 1 else wanted, rows))
    return PlaneLayout(tuple(dims), thread[first + last])


def staged_bytes(space: PlaneSpace, block: Tile, thread: Tile) -> int:
    """Return a task's scratch memory: staged planes and accumulators."""
    total = 0
    for one in space.reductions:
        found = layout(space, one, block, thread)
        run = found.rows * found.run_steps * found.width
        total += run * one.statement.accumulator.bytes
        total += sum(found.elements * plane.dtype.bytes for plane in one.planes)
    return total


def prepare(group: KernelGroup, base: Workload[None]) -> Workload[PlaneSpace] | None:
    """Prepare a windowed reduction over planes on a CPU; None for any other group or device."""
    if base.machine.is_gpu or base.is_contraction:
        return None
    planes = plane_space(group)
    return None if planes is None else subtract_folded_flops(group, base.with_facts(planes))
