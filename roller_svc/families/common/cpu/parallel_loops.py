"""Outer axes of a loop nest on a CPU → parallel tasks and the points of each task."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from roller_svc.ir.expr import Expr
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, ceil_div, le, mul, num, ref, sub
from roller_svc.ir.program import Axis
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Branch, Let, Loop, LoopKind, Node
from roller_svc.schedule.nest_statements import nest_loops

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
    simd_rows: Sequence[SimdRows],
    nodes_at: Callable[[Point, tuple[int, ...]], tuple[Node, ...]],
) -> tuple[Node, ...]:
    """Return the task loops and point loops around `nodes_at(point, widths)`.

    A width is smaller in the tail of its axis.
    """
    at: Point = {a.name: ref(a.name) for a in group.outer}
    nodes = _simd_groups(at, tuple(simd_rows), (), nodes_at)
    for axis in reversed(group.outer):
        rows = next((rows for rows in simd_rows if rows.axis == axis), None)
        nodes = loop_over_points(axis, program.block[axis.name], rows, nodes)
    return task_loops(group.outer, program, nodes)


def task_loops(axes: Iterable[Axis], program: RProgram, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Return parallel loops over the tasks along the axes, the first one outermost."""
    tasks = [(f"{axis.name}.task", ceil_div(axis.extent, program.block[axis.name])) for axis in axes]
    return nest_loops(LoopKind.PARALLEL, tasks, nodes)


def _simd_groups(
    at: Point,
    simd_rows: tuple[SimdRows, ...],
    widths: tuple[int, ...],
    nodes_at: Callable[[Point, tuple[int, ...]], tuple[Node, ...]],
) -> tuple[Node, ...]:
    """Return the nodes of full groups of points along each axis, and of the tail groups where they differ."""
    if not simd_rows:
        return nodes_at(at, widths)
    rows, *others = simd_rows
    start = ref(f"{rows.axis.name}.first")
    at = {**at, rows.axis.name: add(start, rows.lane)}
    return whole_or_tail(
        start, rows.width, rows.axis.extent, lambda count: _simd_groups(at, tuple(others), (*widths, count), nodes_at)
    )


def whole_or_tail(first: Expr, size: int, extent: int, nodes_of: Callable[[int], tuple[Node, ...]]) -> tuple[Node, ...]:
    """Return the nodes of `size` points from `first` on, or of the tail at the axis's end, by a test if both occur."""
    tail = extent % size
    if extent < size or not tail:
        return nodes_of(tail or size)
    return (Branch(le(add(first, num(size)), num(extent)), nodes_of(size), nodes_of(tail)),)


def serial_loops(axes: tuple[Axis, ...], nodes: Iterable[Node]) -> tuple[Node, ...]:
    """Loop over the axes, the first one outermost, around the nodes."""
    return nest_loops(LoopKind.SERIAL, ((axis.name, axis.extent) for axis in axes), nodes)


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
