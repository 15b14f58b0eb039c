"""Scatter group → schedule trees: the target copied to the result, then written at computed places."""

from __future__ import annotations

import math

from roller_svc.families.common.cpu.memory import LINE_BYTES
from roller_svc.families.common.cpu.prefetch import AHEAD_BYTES
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import TargetKind
from roller_svc.ir.index import add, ceil_div, div, lt, mod, mul, num, ref
from roller_svc.ir.program import Axis, AxisKind, TensorExpr
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, Prefetch, ScheduleTree
from roller_svc.schedule.nest_statements import converted

THREADS = 256
FEW_POINTS = 32  # one warp's: a launch takes longer than one thread takes for them
WIDEST_BYTES = 16  # of one access of a thread (LD.128)
# A CPU's copy.
ROW_BYTES = 256  # of a loop's step
SHARED_BYTES = 1 << 20  # what a core's own cache holds is copied sooner than threads begin
ENOUGH_TASKS = 16


def lower_scatter(group: KernelGroup, family: TargetKind) -> tuple[ScheduleTree, ...]:
    """Two trees. A CPU walks the points in row-major order, so that the last write wins; a GPU joins atomically, and
    walks a few plain writes as a CPU does."""
    (statement,) = group.statements
    axes = tuple(Axis(f".{d}", extent, AxisKind.SPATIAL) for d, extent in enumerate(statement.type.shape))
    write = _write(statement, atomic=family is not TargetKind.CPU and statement.combine is not None)
    if family is TargetKind.CPU:
        bodies = (_shared_copy(statement, axes), _serial(statement.axes, write))
    else:
        in_order = statement.combine is None and statement.points <= FEW_POINTS
        bodies = (_wide_copy(statement, axes), (_serial if in_order else _threads)(statement.axes, write))
    return (ScheduleTree(f"{group.name}_copy", bodies[0]), ScheduleTree(group.name, bodies[1]))


def _copy(statement: TensorExpr, place: tuple[Expr, ...]) -> Node:
    return Compute(statement.output, place, Load(statement.target or "", place, statement.type.dtype))


def _shared_copy(statement: TensorExpr, axes: tuple[Axis, ...]) -> tuple[Node, ...]:
    """A CPU's: vectors along a row, rows shared by threads where they are worth it, the lines to come asked for."""
    if not axes:
        return (_copy(statement, ()),)
    *outer, row = axes
    element_bytes = statement.type.dtype.bytes
    width = min(row.extent, max(1, ROW_BYTES // element_bytes))
    lane = ref(".lane")

    def vectors(first: Expr, count: int) -> tuple[Node, ...]:
        at = (*(ref(a.name) for a in outer), first)
        lanes = Loop(lane.name, count, LoopKind.VECTOR, (_copy(statement, (*at[:-1], add(first, lane))),))
        steps = range(0, count * element_bytes, LINE_BYTES) if statement.type.bytes > SHARED_BYTES else range(0)
        hints = (AHEAD_BYTES // element_bytes + step // element_bytes for step in steps)
        return (lanes, *(Prefetch(statement.output, at, ahead, for_write=True) for ahead in hints))

    nodes: tuple[Node, ...] = ()
    if rest := row.extent % width:
        nodes = vectors(num(row.extent - rest), rest)
    kind = LoopKind.PARALLEL if statement.type.bytes > SHARED_BYTES else LoopKind.SERIAL
    pieces = Loop(f"{row.name}.piece", row.extent // width, LoopKind.SERIAL if outer else kind,
                  vectors(mul(ref(f"{row.name}.piece"), num(width)), width))  # fmt: skip
    nodes = (pieces, *nodes)
    for d, axis in reversed(tuple(enumerate(outer))):
        tasks = math.prod(a.extent for a in outer[:d])
        nodes = (Loop(axis.name, axis.extent, kind if tasks < ENOUGH_TASKS else LoopKind.SERIAL, nodes),)
    return nodes


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
        Compute(statement.output, statement.index, value, statement.combine, atomic, statement.bounds_checked),
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
        nodes = (Branch(lt(flat, num(points)), nodes),)
    nodes = (Let(flat.name, add(mul(ref(".block"), num(threads)), ref(".thread")), nodes),)
    nodes = (Loop(".thread", threads, LoopKind.THREAD, nodes),)
    return (Loop(".block", ceil_div(points, threads), LoopKind.BLOCK, nodes),)
