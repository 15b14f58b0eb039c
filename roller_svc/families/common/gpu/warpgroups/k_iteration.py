"""Order of the k-tiles of a block, on which all its operand loads agree."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from roller_svc.errors import InvariantError
from roller_svc.ir.expr import Expr
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import add, ceil_div, div, lt, mod, mul, num


@dataclass(frozen=True)
class KTileOrder:
    """k in tiles of `depth` elements: `outer` members one value at a time, `inner` elements of the others within each.

    `outer`: (name, extent) each. The last k-tile of a row is padded with zeros.
    """

    outer: tuple[tuple[str, int], ...]
    inner: int
    depth: int

    def __post_init__(self) -> None:
        if self.inner < 1 or self.depth < 1:
            raise InvariantError(f"invalid k-tile order: {self.inner} elements in tiles of {self.depth}")

    @classmethod
    def linear(cls, extent: int, depth: int) -> KTileOrder:
        """Return all of k as one row."""
        return cls((), extent, depth)

    @classmethod
    def within(cls, k: TileAxis, outer: int, depth: int) -> KTileOrder:
        """Return k with its first `outer` members iterated one value at a time."""
        members = tuple((m.name, m.extent) for m in k.members)
        return cls(members[:outer], math.prod(extent for _, extent in members[outer:]), depth)

    @property
    def num_rows(self) -> int:
        """Iterations over the inner members."""
        return math.prod(extent for _, extent in self.outer)

    @property
    def row_steps(self) -> int:
        """K-tiles of each row."""
        return ceil_div(self.inner, self.depth)

    @cached_property
    def steps(self) -> int:
        return self.num_rows * self.row_steps

    @property
    def has_tail(self) -> bool:
        """Whether the last k-tile of a row is padded."""
        return self.inner % self.depth != 0

    def stays_within(self, run: int) -> bool:
        """Return whether no k-tile has points of two runs, which begin at multiples of `run` along k."""
        whole = run % self.inner == 0  # rows
        return whole or (run % self.depth == 0 and (not self.outer or self.inner % run == 0))

    def outer_index(self, step: Expr) -> Expr:
        """Return the fused value of the outer members in a k-tile."""
        return div(step, self.row_steps) if self.outer else num(0)

    def inner_position(self, step: Expr, element: Expr) -> Expr:
        """Return the position on the fused inner members of an element of a k-tile."""
        chunk = mod(step, self.row_steps) if self.outer else step
        return add(mul(chunk, num(self.depth)), element)

    def k_position(self, step: Expr, element: Expr) -> Expr:
        """Return the position on k of an element of a k-tile that is `in_bounds`."""
        return add(mul(self.outer_index(step), num(self.inner)), self.inner_position(step, element))

    def in_bounds(self, step: Expr, element: Expr) -> Expr | None:
        """Return whether an element of a k-tile is not padding; None: always."""
        return lt(self.inner_position(step, element), num(self.inner)) if self.has_tail else None
