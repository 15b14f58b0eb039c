"""Scatter group → schedule trees: the target copied to the result, then written at computed places."""

from __future__ import annotations

import math

from roller_svc.ir.build import add, ceil_div, div, less, mod, mul, num, ref
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import Family
from roller_svc.ir.program import Axis, AxisKind, TensorExpr
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree
from roller_svc.lower.rows import converted

THREADS = 256
FEW_POINTS = 32  # one warp's: a launch takes longer than one thread takes for them
WIDEST_BYTES = 16  # of one access of a thread (LD.128)


def lower_scatter(group: KernelGroup, family: Family) -> tuple[ScheduleTree, ...]:
    """Two trees. A CPU walks the points in row-major order, so that the last write wins; a GPU joins atomically, and
    walks a few plain writes as a CPU does."""
    (statement,) = group.statements
    axes = tuple(Axis(f".{d}", extent, AxisKind.SPATIAL) for d, extent in enumerate(statement.type.shape))
    write = _write(statement, atomic=family is not Family.CPU and statement.combine is not None)
    if family is Family.CPU:
        bodies = (_serial(axes, (_copy(statement, tuple(ref(a.name) for a in axes)),)), _serial(statement.axes, write))
    else:
        in_order = statement.combine is None and statement.points <= FEW_POINTS
        bodies = (_wide_copy(statement, axes), (_serial if in_order else _threads)(statement.axes, write))
    return (ScheduleTree(f"{group.name}_copy", bodies[0]), ScheduleTree(group.name, bodies[1]))


def _copy(statement: TensorExpr, place: tuple[Expr, ...]) -> Node:
    return Compute(statement.output, place, Load(statement.target or "", place, statement.type.dtype))


def _wide_copy(statement: TensorExpr, axes: tuple[Axis, ...]) -> tuple[Node, ...]:
    """A thread copies neighbours of a row, as many as one access moves and rows are a multiple of."""
    if not axes:
        return _threads(axes, (_copy(statement, ()),))
    *outer, row = axes
    width = math.gcd(row.extent, WIDEST_BYTES // statement.type.dtype.bytes)
    vectors = Axis(row.name, row.extent // width, row.kind)
    lane = ref(".lane")
    place = (*(ref(a.name) for a in outer), add(mul(ref(row.name), num(width)), lane))
    return _threads((*outer, vectors), (Loop(lane.name, width, LoopKind.VECTOR, (_copy(statement, place),)),))


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
