"""A contraction's reduced axis → the steps in which it is staged, and where the reduced axes stand in each."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.ir.build import add, ceil_div, div, mod, mul, num
from roller_svc.ir.expr import Expr
from roller_svc.ir.group import TileAxis
from roller_svc.ir.program import Axis
from roller_svc.lower.fused_axis import member_values


@dataclass(frozen=True, slots=True)
class ReductionSteps:
    """`rows` points a step. `inner`: the member of the axis along which they lie, all others standing still; None:
    consecutive points of the fused axis.

    A sum may be walked in any order. With `inner`, the others move fastest from step to step: a window's steps read the
    same elements again, out of a near cache.
    """

    axis: TileAxis
    rows: int
    inner: Axis | None

    @property
    def count(self) -> int:
        return ceil_div(self.axis.extent, self.rows)

    @property
    def is_ragged(self) -> bool:
        return self.axis.extent % self.rows > 0

    @property
    def is_fused(self) -> bool:
        """Whether a row is a place on several axes."""
        return self.inner is None and len(self.axis.members) > 1

    def position(self, step: Expr, row: Expr) -> Expr:
        """Of a row on the fused axis, where steps follow it."""
        return add(mul(step, num(self.rows)), row)

    def values(self, step: Expr, row: Expr) -> dict[str, Expr]:
        """Reduced axis → where it stands at a row of a step."""
        if self.inner is None:
            return member_values(self.axis, self.position(step, row))
        others = TileAxis(self.axis.name, self.axis.role, tuple(a for a in self.axis.members if a is not self.inner))
        standing = math.prod(a.extent for a in others.members)
        values = member_values(others, mod(step, standing))
        return values | {self.inner.name: add(mul(div(step, standing), num(self.rows)), row)}
