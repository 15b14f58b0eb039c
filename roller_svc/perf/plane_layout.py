"""A staged plane's layout: phases, pitches, and the run of vectors that computes a block of outputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.ir.build import add, div, mod, mul, num
from roller_svc.ir.expr import Expr
from roller_svc.perf.plane_tile import PlaneSpace, Slide, WindowedSum

Tile = tuple[int, ...]
LINE = 64  # elements that rooms are whole multiples of
# Phases that lie a multiple of so many elements apart (2 KiB of float32) meet in one or two of the 64 sets of L1, where
# 16 of them crowd each other out of 8 ways: 5 x 5 taps with stride 2, phases of 4 KiB, took 1.5 to 1.9 times as long on
# Zen 4.
CROWDED = 512


@dataclass(frozen=True, slots=True)
class Dimension:
    """A slide under a tile of `block` outputs, `rows` of which are computed together.

    Place p lies in phase p % phases at p // phases: output rows * q + r finds its tap at the same phase for all q, and
    what several of the `rows` outputs read is one element.
    """

    slide: Slide
    block: int
    rows: int

    @property
    def phases(self) -> int:
        return self.slide.stride * self.rows

    @property
    def steps(self) -> int:
        return -(-self.block // self.rows)

    @property
    def size(self) -> int:
        """Elements of one phase."""
        return self.steps + (self.slide.stride * (self.rows - 1) + self.slide.span) // self.phases

    @property
    def places(self) -> int:
        return self.slide.reach(self.block)


@dataclass(frozen=True, slots=True)
class Layout:
    """Where the places of one sum's planes lie, and the run of outputs over its last two dimensions.

    Outputs of `rows` neighbouring lines are computed together at each point of the run; points between the last output
    of a line and the first of the next are computed for nothing.
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
        """Of a phase's room."""
        whole = -(-math.prod(d.size for d in self.dims) // LINE) * LINE
        return whole + LINE if whole % CROWDED == 0 else whole

    @property
    def elements(self) -> int:
        """Of the whole room; the last step of the run may read beyond the last phase."""
        phases = math.prod(d.phases for d in self.dims)
        return phases * self.phase_elements + -(-self.width // LINE) * LINE

    @property
    def pitch(self) -> int:
        """Of lines of results, as of staged ones."""
        return self.dims[-1].size

    @property
    def run_steps(self) -> int:
        lines = self.dims[-2].steps if len(self.dims) > 1 else 1
        return -(-((lines - 1) * self.pitch + self.dims[-1].block) // self.width)

    def element(self, places: tuple[Expr, ...]) -> Expr:
        """Where the element at these places lies in the room."""
        phase, offset = num(0), num(0)
        total: Expr = offset
        number: Expr = phase
        for dim, place, pitch in zip(self.dims, places, self.pitches, strict=True):
            number = add(mul(number, num(dim.phases)), mod(place, dim.phases))
            total = add(total, mul(div(place, dim.phases), num(pitch)))
        return add(mul(number, num(self.phase_elements)), total)


def layout(space: PlaneSpace, of: WindowedSum, block: Tile, thread: Tile) -> Layout:
    """The layout of one sum's planes under an rProgram's tiles, in the order of the space's axes."""
    first, last = space.first, len(space.axes) - 1
    dims = []
    for i, slide in enumerate(of.slides):
        rows = thread[first + i] if i == last - 1 else 1
        wanted = min(block[first + i], slide.extent)
        dims.append(Dimension(slide, -(-wanted // rows) * rows if i == last - 1 else wanted, rows))
    return Layout(tuple(dims), thread[first + last])
