"""Positions on a fused tile axis → values of its member axes."""

from __future__ import annotations

from roller_svc.ir.build import div, mod
from roller_svc.ir.expr import Expr
from roller_svc.ir.group import TileAxis
from roller_svc.ir.schedule import Let, Node


def decoded(axis: TileAxis, position: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """The nodes, with every member axis named as its value at that position of the fused axis."""
    stride = 1
    for member in reversed(axis.members):
        value = div(position, stride)
        stride *= member.extent
        if stride < axis.extent:
            value = mod(value, member.extent)
        nodes = (Let(member.name, value, nodes),)
    return nodes


def member_values(axis: TileAxis, position: Expr) -> dict[str, Expr]:
    """The same as expressions, to be put in place of the axes."""
    values: dict[str, Expr] = {}
    stride = 1
    for member in reversed(axis.members):
        value = div(position, stride)
        stride *= member.extent
        values[member.name] = value if stride >= axis.extent else mod(value, member.extent)
    return values
