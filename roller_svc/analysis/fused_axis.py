"""Values of the axes that a fused axis of a contraction has as its members."""

from __future__ import annotations

from roller_svc.ir.expr import Expr
from roller_svc.ir.group import TileAxis
from roller_svc.ir.index import div, mod


def member_values(axis: TileAxis, position: Expr) -> dict[str, Expr]:
    """Return the value of each member axis at `position` of the fused axis, the innermost first."""
    values: dict[str, Expr] = {}
    stride = 1
    for member in reversed(axis.members):
        value = div(position, stride)
        stride *= member.extent
        values[member.name] = value if stride >= axis.extent else mod(value, member.extent)
    return values
