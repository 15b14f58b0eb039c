"""Scatter group → schedule trees: copy the target to the result, then write at computed indices."""

from __future__ import annotations

import math

from roller_svc.families.common.cpu.memory import LINE_BYTES
from roller_svc.families.common.cpu.parallel_loops import serial_loops
from roller_svc.families.common.cpu.prefetch import PREFETCH_DISTANCE_BYTES
from roller_svc.fusion.ordered_scatter import ordered_axes
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import TargetKind
from roller_svc.ir.index import add, ceil_div, div, lt, mod, mul, num, ref
from roller_svc.ir.program import Axis, AxisKind, TensorExpr, identity
from roller_svc.ir.schedule import Branch, Compute, Let, Loop, LoopKind, Node, Prefetch, ScheduleTree
from roller_svc.schedule.nest_statements import convert_to_type

THREADS = 256
MAX_ACCESS_BYTES = 16  # one access of a thread (LD.128)
# Copies on a CPU.
ROW_BYTES = 256  # one loop iteration
MIN_PARALLEL_BYTES = 1 << 20  # a copy within a private cache ends before threads start
MIN_TASKS = 16


def lower_scatter(group: KernelGroup, family: TargetKind) -> tuple[ScheduleTree, ...]:
    """Return two trees, the copy and the writes, or only the writes where the target is updated in place.

    A CPU visits the points in row-major order, so the last write wins. A GPU accumulates atomically, and each thread
    visits in order what may overwrite its elements (`fusion/ordered_scatter.py`).
    """
    (statement,) = group.statements
    axes = tuple(Axis(f".{d}", extent, AxisKind.SPATIAL) for d, extent in enumerate(statement.type.shape))
    write = write_update(statement, atomic=family is not TargetKind.CPU and statement.combine is not None)
    if family is TargetKind.CPU:
        bodies = (_cpu_copy(statement, axes), serial_loops(statement.axes, write))
    else:
        ordered = ordered_axes(statement)
        threads = tuple(axis for axis in statement.axes if axis not in ordered)
        bodies = (_gpu_copy(statement, axes), _thread_loops(threads, serial_loops(ordered, write)))
    copy, writes = ScheduleTree(f"{group.name}_copy", bodies[0]), ScheduleTree(group.name, bodies[1])
    return (writes,) if statement.in_place else (copy, writes)


def _copy(statement: TensorExpr, index: tuple[Expr, ...]) -> Node:
    """Copy an element of the target, or without a target write the reduction's identity."""
    dtype = statement.type.dtype
    if statement.target is None and statement.combine is not None:
        return Compute(statement.output, index, identity(statement.combine, dtype))
    return Compute(statement.output, index, Load(statement.target or "", index, dtype))


def _cpu_copy(statement: TensorExpr, axes: tuple[Axis, ...]) -> tuple[Node, ...]:
    """Copy by vectors along a row with prefetches; rows are split over threads if the copy is large enough."""
    if not axes:
        return (_copy(statement, ()),)
    *outer, row = axes
    element_bytes = statement.type.dtype.bytes
    width = min(row.extent, max(1, ROW_BYTES // element_bytes))
    lane = ref(".lane")

    def vectors(first: Expr, count: int) -> tuple[Node, ...]:
        at = (*(ref(a.name) for a in outer), first)
        lanes = Loop(lane.name, count, LoopKind.VECTOR, (_copy(statement, (*at[:-1], add(first, lane))),))
        steps = range(0, count * element_bytes, LINE_BYTES) if statement.type.bytes > MIN_PARALLEL_BYTES else range(0)
        distances = (PREFETCH_DISTANCE_BYTES // element_bytes + step // element_bytes for step in steps)
        return (lanes, *(Prefetch(statement.output, at, distance, for_write=True) for distance in distances))

    nodes: tuple[Node, ...] = ()
    if tail := row.extent % width:
        nodes = vectors(num(row.extent - tail), tail)
    kind = LoopKind.PARALLEL if statement.type.bytes > MIN_PARALLEL_BYTES else LoopKind.SERIAL
    chunks = Loop(
        f"{row.name}.piece",
        row.extent // width,
        LoopKind.SERIAL if outer else kind,
        vectors(mul(ref(f"{row.name}.piece"), num(width)), width),
    )
    nodes = (chunks, *nodes)
    for d, axis in reversed(tuple(enumerate(outer))):
        tasks = math.prod(a.extent for a in outer[:d])
        nodes = (Loop(axis.name, axis.extent, kind if tasks < MIN_TASKS else LoopKind.SERIAL, nodes),)
    return nodes


def _gpu_copy(statement: TensorExpr, axes: tuple[Axis, ...]) -> tuple[Node, ...]:
    """Copy contiguous elements of a row by each thread, as many as one access moves and divide the row."""
    if not axes:
        return _thread_loops(axes, (_copy(statement, ()),))
    *outer, row = axes
    width = math.gcd(row.extent, MAX_ACCESS_BYTES // statement.type.dtype.bytes)
    vectors = Axis(row.name, row.extent // width, row.kind)
    lane = ref(".lane")
    index = (*(ref(a.name) for a in outer), add(mul(ref(row.name), num(width)), lane))
    return _thread_loops((*outer, vectors), (Loop(lane.name, width, LoopKind.VECTOR, (_copy(statement, index),)),))


def write_update(statement: TensorExpr, *, atomic: bool, tensor: str = "") -> tuple[Node, ...]:
    """Write one point's value, to `tensor` in place of the result if it is given."""
    value = convert_to_type(statement.body, statement)
    target = tensor or statement.output
    nodes: tuple[Node, ...] = (Compute(target, statement.index, value, statement.combine, atomic, statement.bounds_checked),)
    return nodes if statement.predicate is None else (Branch(statement.predicate, nodes),)


def _thread_loops(axes: tuple[Axis, ...], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Map one point to one thread; points are numbered in row-major order."""
    points, flat = math.prod(axis.extent for axis in axes), ref(".point")
    threads = min(THREADS, points)
    nodes = visit_point(axes, flat, nodes)
    if points % threads:
        nodes = (Branch(lt(flat, num(points)), nodes),)
    nodes = (Let(flat.name, add(mul(ref(".block"), num(threads)), ref(".thread")), nodes),)
    nodes = (Loop(".thread", threads, LoopKind.THREAD, nodes),)
    return (Loop(".block", ceil_div(points, threads), LoopKind.BLOCK, nodes),)


def visit_point(axes: tuple[Axis, ...], flat: Expr, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Define the axes at a point by its number in row-major order."""
    points, stride = math.prod(axis.extent for axis in axes), 1
    for axis in reversed(axes):
        value: Expr = div(flat, stride)
        nodes = (Let(axis.name, value if stride * axis.extent >= points else mod(value, axis.extent), nodes),)
        stride *= axis.extent
    return nodes
