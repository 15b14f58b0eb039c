"""A reduction over sliding windows: its dimensions, and the parts of its body that are staged as planes."""

from __future__ import annotations

import math
from dataclasses import dataclass

from roller_svc.families.common.cpu.op_counts import OpCounts, count_ops
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, axes_of
from roller_svc.ir.index import add, mul, num
from roller_svc.ir.program import TensorExpr

POSITION_SUFFIX = ".place"  # suffix of position variables


@dataclass(frozen=True, slots=True)
class PlaneWindowDim:
    """One dimension of a plane: the element under tap `i` of output `o` is stride * o + dilation * i.

    Positions count from the first element under any tap. `inner` is None where no window slides: one tap.
    """

    axis: str
    extent: int
    inner: str | None = None
    taps: int = 1
    stride: int = 1
    dilation: int = 0

    @property
    def span(self) -> int:
        """From the first tap's element to the last one's."""
        return abs(self.dilation) * (self.taps - 1)

    @property
    def offset(self) -> int:
        """Position of element 0: windows may extend backwards."""
        return max(0, -self.dilation * (self.taps - 1))

    @property
    def position_name(self) -> str:
        """Name of a position variable."""
        return self.axis + POSITION_SUFFIX

    def input_extent(self, outputs: int) -> int:
        """Return the positions under the windows of adjacent outputs."""
        return self.stride * (outputs - 1) + self.span + 1

    def tap_position(self, tap: Expr) -> Expr:
        """Return the position under a tap of output 0."""
        return add(mul(tap, num(self.dilation)), num(self.offset))


@dataclass(frozen=True, slots=True)
class Plane:
    """A part of a reduction's body that depends on windows only through positions.

    Positions inside of `inside`, half-open ranges, have `value`, all others `margin`.
    """

    name: str
    dtype: DType
    value: Expr
    margin: Const
    inside: tuple[tuple[int, int], ...]
    lines: int = 1  # of the input, between those of neighbouring staged lines

    @property
    def work(self) -> OpCounts:
        """Operations on one element that is staged."""
        return count_ops(self.value, {name for name in axes_of(self.value) if name.endswith(POSITION_SUFFIX)})


@dataclass(frozen=True, slots=True)
class WindowedSum:
    """A reduction: `body` loads planes by name, without indices."""

    statement: TensorExpr
    window_dims: tuple[PlaneWindowDim, ...]
    planes: tuple[Plane, ...]
    body: Expr

    @property
    def taps(self) -> int:
        return math.prod(s.taps for s in self.window_dims)
