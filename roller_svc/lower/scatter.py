"""Scatter group → schedule trees: the target copied to the result, then written at computed places."""

from __future__ import annotations

from roller_svc.ir.build import add, ceil_div, div, less, mod, mul, num, ref
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import Family
from roller_svc.ir.program import Axis, AxisKind, TensorExpr
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree
from roller_svc.lower.rows import converted

THREADS = 256


def lower_scatter(group: KernelGroup, family: Family) -> tuple[ScheduleTree, ...]:
    """Two trees. A CPU walks the points in row-major order, so that the last write wins; a GPU joins atomically."""
    (statement,) = group.statements
    axes = tuple(Axis(f".{d}", extent, AxisKind.SPATIAL) for d, extent in enumerate(statement.type.shape))
    place = tuple(ref(a.name) for a in axes)
    copy = Compute(statement.output, place, Load(statement.target or "", place, statement.type.dtype))
    write = _write(statement, atomic=family is not Family.CPU and statement.combine is not None)
    if family is Family.CPU:
        bodies = (_serial(axes, (copy,)), _serial(statement.axes, write))
    else:
        bodies = (_threads(axes, (copy,)), _threads(statement.axes, write))
    return (ScheduleTree(f"{group.name}_copy", bodies[0]), ScheduleTree(group.name, bodies[1]))


def _write(statement: TensorExpr, *, atomic: bool) -> tuple[Node, ...]:
    value = converted(statement.body, statement)
    nodes: tuple[Node, ...] = (
        Compute(statement.output, statement.index, value, statement.combine, atomic, statement.checked),
    )
    return nodes if statement.predicate is None else (Branch(statement.predicate, nodes),)


def _serial(axes: tuple[Axis, ...], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    for axis in reversed(axes):
        nodes = (Loop(axis.name, axis.extent, LoopKind.SERIAL, nodes),)
    return nodes


def _threads(axes: tuple[Axis, ...], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """One thread a point, points numbered in row-major order."""
    points = 1
    for axis in axes:
        points *= axis.extent
    flat, stride = ref(".point"), 1
    for axis in reversed(axes):
        place: Expr = div(flat, stride)
        nodes = (Let(axis.name, place if stride * axis.extent >= points else mod(place, axis.extent), nodes),)
        stride *= axis.extent
    threads = min(THREADS, points)
    if points % threads:
        nodes = (Branch(less(flat, num(points)), nodes),)
    nodes = (Let(flat.name, add(mul(ref(".block"), num(threads)), ref(".thread")), nodes),)
    nodes = (Loop(".thread", threads, LoopKind.THREAD, nodes),)
    return (Loop(".block", ceil_div(points, threads), LoopKind.BLOCK, nodes),)
