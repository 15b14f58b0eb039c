"""The order in which a block's steps walk a contraction's reduced axis: what all of its loads agree on."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.errors import InvariantError
from roller_svc.ir.expr import Expr
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import add, ceil_div, div, lt, mod, mul, num


@dataclass(frozen=True, slots=True)
class KTileOrder:
    """k in steps of `depth` elements: the `outer` members, (name, extent) each, one value at a time, and within each
    the `inner` elements of the remaining, inner members, of whose last step what is beyond them counts as zeros."""

    outer: tuple[tuple[str, int], ...]
    inner: int
    depth: int

    def __post_init__(self) -> None:
        if self.inner < 1 or self.depth < 1:
            raise InvariantError(f"a walk of {self.inner} elements in steps of {self.depth}")

    @classmethod
    def linear(cls, extent: int, depth: int) -> KTileOrder:
        """All of k as one row."""
        return cls((), extent, depth)

    @classmethod
    def within(cls, k: TileAxis, outer: int, depth: int) -> KTileOrder:
        """So many of k's members one value at a time."""
        members = tuple((m.name, m.extent) for m in k.members)
        return cls(members[:outer], math.prod(extent for _, extent in members[outer:]), depth)

    @property
    def num_rows(self) -> int:
        """How often the inner members are walked."""
        return math.prod(extent for _, extent in self.outer)

    @property
    def row_steps(self) -> int:
        """Steps of each time."""
        return ceil_div(self.inner, self.depth)

    @property
    def steps(self) -> int:
        return self.num_rows * self.row_steps

    @property
    def has_tail(self) -> bool:
        """Whether last steps are padded."""
        return self.inner % self.depth != 0

    def outer_index(self, step: Expr) -> Expr:
        """Which value of the outer members, fused, the step has."""
        return div(step, self.row_steps) if self.outer else num(0)

    def inner_position(self, step: Expr, element: Expr) -> Expr:
        """Where among the inner members, fused, an element of the step lies."""
        chunk = mod(step, self.row_steps) if self.outer else step
        return add(mul(chunk, num(self.depth)), element)

    def k_position(self, step: Expr, element: Expr) -> Expr:
        """Where on k an element of the step lies, if it is `inside`."""
        return add(mul(self.outer_index(step), num(self.inner)), self.inner_position(step, element))

    def in_bounds(self, step: Expr, element: Expr) -> Expr | None:
        """Whether an element of the step is one of k's and no padding; None: it always is."""
        return lt(self.inner_position(step, element), num(self.inner)) if self.has_tail else None
