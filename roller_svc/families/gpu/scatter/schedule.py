"""Scatter on a GPU → schedule trees: atomics for combining writes, plain writes in order otherwise.

Updates of a small target are reduced in shared memory first, where the rProgram has persistent blocks.
"""

from __future__ import annotations

import math

from roller_svc.families.common.scatter import lower_scatter, visit_point, write_update
from roller_svc.families.gpu.scatter.workload import PRIVATE_THREADS, PRIVATE_UNROLL, ScatterUpdates
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load, Op, OpKind
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.index import add, ceil_div, lt, mul, num, ref
from roller_svc.ir.program import Axis, AxisKind, Combine, TensorExpr, identity
from roller_svc.ir.rprogram import RProgram
from roller_svc.ir.schedule import Barrier, Branch, Compute, Let, Loop, LoopKind, Node, ScheduleTree, Scope, Storage
from roller_svc.perf.workload import Workload
from roller_svc.schedule.nest_statements import wrap_in_storages


def lower(group: KernelGroup, program: RProgram, workload: Workload[ScatterUpdates]) -> tuple[ScheduleTree, ...]:
    *copies, write = lower_scatter(group, workload.machine.hw.family)
    (statement,) = group.statements
    if not program.pipeline.persistent_blocks or statement.combine is None:
        return (*copies, write)
    nodes = _reduce_privately(statement, statement.combine, program.pipeline.persistent_blocks)
    return (*copies, ScheduleTree(group.name, nodes))


def _reduce_privately(statement: TensorExpr, combine: Combine, blocks: int) -> tuple[Node, ...]:
    """Reduce a block's updates in shared memory, then each element that they changed by one atomic of the result."""
    private = f"{statement.output}.private"
    dtype, shape = statement.type.dtype, statement.type.shape
    neutral = identity(combine, dtype)
    axes = tuple(Axis(f".{d}", extent, AxisKind.SPATIAL) for d, extent in enumerate(shape))
    index = tuple(ref(axis.name) for axis in axes)
    partial = Load(private, index, dtype)
    changed = Op(OpKind.NE, (partial, neutral), DType.INT8)
    flush = Branch(changed, (Compute(statement.output, index, partial, combine, atomic=True),))
    nodes = wrap_in_storages(
        [Storage(private, dtype, shape, Scope.SHARED, ())],
        (
            *_for_elements(axes, (Compute(private, index, neutral),)),
            Barrier(),
            *_for_updates(statement, blocks, write_update(statement, atomic=True, tensor=private)),
            Barrier(),
            *_for_elements(axes, (flush,)),
        ),
    )
    nodes = (Loop(".thread", PRIVATE_THREADS, LoopKind.THREAD, nodes),)
    return (Loop(".block", blocks, LoopKind.BLOCK, nodes),)


def _for_elements(axes: tuple[Axis, ...], nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Visit the elements of the target by the threads of a block."""
    count, element = math.prod(axis.extent for axis in axes), ref(".element")
    nodes = visit_point(axes, element, nodes)
    if count % PRIVATE_THREADS:
        nodes = (Branch(lt(element, num(count)), nodes),)
    at = add(mul(ref(".pass"), num(PRIVATE_THREADS)), ref(".thread"))
    return (Loop(".pass", ceil_div(count, PRIVATE_THREADS), LoopKind.SERIAL, (Let(element.name, at, nodes),)),)


def _for_updates(statement: TensorExpr, blocks: int, nodes: tuple[Node, ...]) -> tuple[Node, ...]:
    """Visit the points by the threads of all blocks, several without a guard, so that their loads are hoisted."""
    point, threads = ref(".point"), blocks * PRIVATE_THREADS
    nodes = visit_point(statement.axes, point, nodes)
    first = add(mul(ref(".block"), num(PRIVATE_THREADS)), ref(".thread"))

    def visit(step: Expr, body: tuple[Node, ...]) -> tuple[Node, ...]:
        return (Let(point.name, add(mul(step, num(threads)), first), body),)

    steps, rest = divmod(statement.points, threads)
    rounds, more = divmod(steps, PRIVATE_UNROLL)
    found: tuple[Node, ...] = ()
    if rounds:
        step = add(mul(ref(".round"), num(PRIVATE_UNROLL)), ref(".step"))
        unrolled = Loop(".step", PRIVATE_UNROLL, LoopKind.UNROLL, visit(step, nodes))
        found += (Loop(".round", rounds, LoopKind.SERIAL, (unrolled,)),)
    if more:
        step = add(num(rounds * PRIVATE_UNROLL), ref(".more"))
        found += (Loop(".more", more, LoopKind.UNROLL, visit(step, nodes)),)
    if rest:
        found += visit(num(steps), (Branch(lt(point, num(statement.points)), nodes),))
    return found
