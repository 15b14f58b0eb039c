"""Outer axes of a loop nest on a CPU → parallel tasks and the points of each task."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from roller_svc.ir.expr import Expr
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, ceil_div, le, mul, num, ref, sub
from roller_svc.ir.program import Axis
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Let, Loop, LoopKind, Node

Point = dict[str, Expr]  # outer axis → its value


@dataclass(frozen=True, slots=True)
class SimdRows:
    """`width` adjacent points along an outer axis that are computed together; `lane` is the index within them."""

    axis: Axis
    width: int
    lane: Expr


def outer_loops(
    group: KernelGroup,
    program: RProgram,
    simd_rows: SimdRows | None,
    nodes_at: Callable[[Point, int], tuple[Node, ...]],
) -> tuple[Node, ...]:
    """Return the task loops and point loops around `nodes_at(point, width)`.

    The width is smaller in the tail of the axis.
    """
    at: Point = {a.name: ref(a.name) for a in group.outer}
    nodes = nodes_at(at, 1) if simd_rows is None else _simd_group(at, simd_rows, nodes_at)
    for axis in reversed(group.outer):
        nodes = loop_over_points(axis, program.block[axis.name], simd_rows, nodes)
    for axis in reversed(group.outer):
        tasks = ceil_div(axis.extent, program.block[axis.name])
        nodes = (Loop(f"{axis.name}.task", tasks, LoopKind.PARALLEL, nodes),)
    return nodes


def _simd_group(at: Point, simd_rows: SimdRows, nodes_at: Callable[[Point, int], tuple[Node, ...]]) -> tuple[Node, ...]:
    """Return the nodes of a full group of `width` points, and of the tail group where it differs."""
    axis, width = simd_rows.axis, simd_rows.width
    start = ref(f"{axis.name}.first")
    at[axis.name] = add(start, simd_rows.lane)
    nodes = nodes_at(at, width) if axis.extent >= width else ()
    tail = axis.extent % width
    if not tail:
        return nodes
    tail_nodes = nodes_at(at, tail)
    inside = le(add(start, num(width)), num(axis.extent))
    return (Branch(inside, nodes, tail_nodes),) if nodes else tail_nodes


def serial_loops(axes: tuple[Axis, ...], nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Loop over the axes, the first one outermost, around the nodes."""
    nodes = tuple(nodes)
    for axis in reversed(axes):
        nodes = (Loop(axis.name, axis.extent, LoopKind.SERIAL, nodes),)
    return nodes


def loop_over_points(axis: Axis, tile: int, simd_rows: SimdRows | None, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Loop over one task's points along an axis, or over its groups of `width` points."""
    task, step = ref(f"{axis.name}.task"), ref(f"{axis.name}.step")
    if simd_rows is None or axis != simd_rows.axis:
        limit = sub(num(axis.extent), mul(task, num(tile)))
        inside = (Let(axis.name, add(mul(task, num(tile)), step), nodes),)
        return (Loop(step.name, tile, LoopKind.SERIAL, inside, limit if axis.extent % tile else None),)
    width, count = simd_rows.width, tile // simd_rows.width
    groups = ceil_div(axis.extent, width)
    position = add(mul(task, num(count)), step)
    inside = (Let(f"{axis.name}.first", mul(position, num(width)), nodes),)
    limit = sub(num(groups), mul(task, num(count)))
    return (Loop(step.name, count, LoopKind.SERIAL, inside, limit if groups % count else None),)
