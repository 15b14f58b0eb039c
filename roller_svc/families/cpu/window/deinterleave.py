"""Staging of a strided line: whole vectors of adjacent elements are sorted into the line's phases in registers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.families.common.cpu.window_reduction import Plane
from roller_svc.ir.affine import affine
from roller_svc.ir.expr import Expr, Load, axes_of
from roller_svc.ir.index import add, ceil_div, min_, mul, num, ref
from roller_svc.ir.schedule import Loop, LoopKind, Node, Transpose

MAX_PHASES = 4  # n (n - 1) shuffles for n vectors
MIN_LANES = 4
ELEMENT_BYTES = 4  # of which vectors have `lanes`
MIN_BITS = 16  # of a float that is widened as it is sorted
BLOCK = ".block"


@dataclass(frozen=True, slots=True)
class Deinterleave:
    """Sorts `rows` times `phases` elements from position `first` on by blocks of `lanes` rows.

    The last block may overlap the one before.
    """

    first: int
    phases: int
    rows: int
    lanes: int

    @property
    def end(self) -> int:
        """Return the first position that remains."""
        return self.first + self.phases * self.rows

    def nodes(
        self, source: Callable[[Expr], Load], to: tuple[str, Callable[[Expr], tuple[Expr, ...]]], phase_elements: int
    ) -> tuple[Node, ...]:
        """Return the blocks: from `source` of a position to the plane's element, its name and index of a row."""
        start = mul(ref(BLOCK), num(self.lanes))
        if self.rows % self.lanes:
            start = min_(start, num(self.rows - self.lanes))
        plane, index = to
        position = add(num(self.first), mul(start, num(self.phases)))
        pitch = phase_elements if self.first % self.phases == 0 else 1 - phase_elements
        block = Transpose(plane, index(start), pitch, source(position), self.phases, columns=self.phases, lanes=self.lanes)
        return (Loop(BLOCK, ceil_div(self.rows, self.lanes), LoopKind.SERIAL, (block,)),)


def deinterleave(phases: int, first: int, count: int, lanes: int) -> Deinterleave | None:
    """Return how to sort `count` positions from `first` on; None where too few fill vectors.

    Two phases may begin with either. The addresses of more are equally far apart from a multiple of the phases on.
    """
    if not 2 <= phases <= MAX_PHASES:
        return None
    start = first if phases == 2 else ceil_div(first, phases) * phases
    rows = (first + count - start) // phases
    while lanes > rows:
        lanes //= 2
    return Deinterleave(start, phases, rows, lanes) if lanes >= MIN_LANES else None


def is_sorted_by_vectors(plane: Plane) -> bool:
    """Return whether the plane's elements are as wide as those that vectors sort."""
    return plane.dtype.bytes == ELEMENT_BYTES


def contiguous_load(plane: Plane, position: str) -> Load | None:
    """Return the load that is the staged value, if neighbours along the position are adjacent in memory.

    Vectors of float16 and bfloat16 are widened as they are sorted.
    """
    value = plane.value
    if not isinstance(value, Load) or value.dtype.compute is not plane.dtype or any(value.bounds_checked):
        return None
    if value.dtype.bits < MIN_BITS:
        return None
    last = affine(value.index[-1])
    if any(position in axes_of(index) for index in value.index[:-1]) or last is None:
        return None
    return value if last.coeff(position) == 1 else None
