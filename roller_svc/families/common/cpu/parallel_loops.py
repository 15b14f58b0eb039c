"""Outer axes of a nest on a CPU → parallel tasks, and the points of each."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from roller_svc.ir.expr import Expr
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, ceil_div, le, mul, num, ref, sub
from roller_svc.ir.program import Axis
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Let, Loop, LoopKind, Node

Point = dict[str, Expr]  # outer axis → its value


@dataclass(frozen=True, slots=True)
class Together:
    """`width` neighbours along an outer axis that are computed at once; `place` tells them apart."""

    axis: Axis
    width: int
    place: Expr


def outer_loops(
    group: KernelGroup, program: RProgram, together: Together | None, nodes_at: Callable[[Point, int], tuple[Node, ...]]
) -> tuple[Node, ...]:
    """Tasks, the points of each, and at those `nodes_at(point, neighbours)`: fewer neighbours at a ragged end."""
    at: Point = {a.name: ref(a.name) for a in group.outer}
    nodes = nodes_at(at, 1) if together is None else _neighbours(at, together, nodes_at)
    for axis in reversed(group.outer):
        nodes = steps(axis, program.block[axis.name], together, nodes)
    for axis in reversed(group.outer):
        tasks = ceil_div(axis.extent, program.block[axis.name])
        nodes = (Loop(f"{axis.name}.task", tasks, LoopKind.PARALLEL, nodes),)
    return nodes


def _neighbours(at: Point, together: Together, nodes_at: Callable[[Point, int], tuple[Node, ...]]) -> tuple[Node, ...]:
    axis, width = together.axis, together.width
    start = ref(f"{axis.name}.first")
    at[axis.name] = add(start, together.place)
    nodes = nodes_at(at, width) if axis.extent >= width else ()
    tail = axis.extent % width
    if not tail:
        return nodes
    rest = nodes_at(at, tail)
    inside = le(add(start, num(width)), num(axis.extent))
    return (Branch(inside, nodes, rest),) if nodes else rest


def steps(axis: Axis, tile: int, together: Together | None, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """One task's points along an axis, or its groups of neighbours."""
    task, step = ref(f"{axis.name}.task"), ref(f"{axis.name}.step")
    if together is None or axis != together.axis:
        limit = sub(num(axis.extent), mul(task, num(tile)))
        inside = (Let(axis.name, add(mul(task, num(tile)), step), nodes),)
        return (Loop(step.name, tile, LoopKind.SERIAL, inside, limit if axis.extent % tile else None),)
    width, count = together.width, tile // together.width
    groups = ceil_div(axis.extent, width)
    position = add(mul(task, num(count)), step)
    inside = (Let(f"{axis.name}.first", mul(position, num(width)), nodes),)
    limit = sub(num(groups), mul(task, num(count)))
    return (Loop(step.name, count, LoopKind.SERIAL, inside, limit if groups % count else None),)
