"""Reduction over the lanes that share a row: warp shuffles and shared memory (CUB WarpReduce and BlockReduce).

Adjacent lanes reduce by shuffles, and their warps through some words of shared memory; rows with more lanes than a warp
consist of whole warps. Strided lanes store their values to shared memory and split the reduction.
"""

from __future__ import annotations

from roller_svc.families.common.gpu.row_space import lane_buffer_shape
from roller_svc.families.gpu.reduction.thread_mapping import LANE, POINT, ThreadRows
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.index import add, ceil_div, div, eq, lt, mod, mul, num, ref
from roller_svc.ir.program import Combine, TensorExpr
from roller_svc.ir.schedule import Barrier, Branch, Compute, Let, Loop, LoopKind, Node, Scope, Storage, WarpReduce
from roller_svc.schedule.nest_statements import acc_name, register, wrap_in_storages

FIRST, SLOT, TOTAL = ".in_warp", ".slot", ".total"


def reduction_buffers(rows: ThreadRows, statement: TensorExpr) -> tuple[Storage, ...]:
    """Return the shared memory of a reduction. Each reduction has its own, which saves a barrier between two."""
    shape = lane_buffer_shape(rows.count, rows.points, rows.lanes, rows.warp, adjacent=rows.lanes_are_adjacent)
    if shape is None:
        return ()
    return (Storage(_buffer_name(statement), statement.accumulator, shape, Scope.SHARED, ()),)


def reduce_lanes(rows: ThreadRows, statement: TensorExpr) -> tuple[Node, ...]:
    """Reduce the accumulators over the lanes of each row; every lane gets the result."""
    if rows.lanes == 1:
        return ()
    return (_reduce_adjacent if rows.lanes_are_adjacent else _reduce_strided)(rows, statement)


def _buffer_name(statement: TensorExpr) -> str:
    return f"{statement.output}.lanes"


def _accumulator(statement: TensorExpr) -> tuple[str, Combine, DType]:
    return acc_name(statement.output), statement.combine or Combine.SUM, statement.accumulator


def _reduce_adjacent(rows: ThreadRows, statement: TensorExpr) -> tuple[Node, ...]:
    acc, combine, dtype = _accumulator(statement)
    warp_reduce = WarpReduce(acc, rows.elements, combine, min(rows.lanes, rows.warp))
    nodes = rows.for_each_row((warp_reduce,), vector=False)
    if rows.lanes <= rows.warp:
        return nodes
    warps = rows.lanes // rows.warp
    point, slot = ref(POINT), rows.flat_element
    buffer = _buffer_name(statement)
    index = (slot, point, div(ref(LANE), rows.warp))
    store = rows.for_each_row((Compute(buffer, index, Load(acc, rows.elements, dtype)),), vector=False)
    load = (
        Compute(acc, rows.elements, Load(buffer, (slot, point, mod(ref(LANE), warps)), dtype)),
        WarpReduce(acc, rows.elements, combine, warps),
    )
    store = (Let(FIRST, mod(ref(LANE), rows.warp), (Branch(eq(ref(FIRST), num(0)), store),)),)
    return (*nodes, *store, Barrier(), *rows.for_each_row(load, vector=False))


def _reduce_strided(rows: ThreadRows, statement: TensorExpr) -> tuple[Node, ...]:
    """Reduce rows l, l + lanes, ... on lane l; all lanes then load the results."""
    acc, combine, dtype = _accumulator(statement)
    buffer, point, slot = _buffer_name(statement), ref(POINT), rows.flat_element
    store = rows.for_each_row((Compute(buffer, (ref(LANE), slot, point), Load(acc, rows.elements, dtype)),), vector=False)
    row: Expr = ref(SLOT)
    nodes: tuple[Node, ...] = (
        Compute(TOTAL, (), Load(buffer, (num(0), row, point), dtype)),
        Loop(
            ".other", rows.lanes - 1, LoopKind.UNROLL,
            (Compute(TOTAL, (), Load(buffer, (add(ref(".other"), num(1)), row, point), dtype), combine),),
        ),
        Compute(buffer, (num(0), row, point), Load(TOTAL, (), dtype)),
    )  # fmt: skip
    nodes = wrap_in_storages((register(TOTAL, dtype),), nodes)
    if rows.count % rows.lanes:
        nodes = (Branch(lt(row, num(rows.count)), nodes),)
    nodes = (Let(SLOT, add(mul(ref(".share"), num(rows.lanes)), ref(LANE)), nodes),)
    rows_of_lane = Loop(".share", ceil_div(rows.count, rows.lanes), LoopKind.UNROLL, nodes)
    fetch = rows.for_each_row((Compute(acc, rows.elements, Load(buffer, (num(0), slot, point), dtype)),), vector=False)
    return (*store, Barrier(), rows_of_lane, Barrier(), *fetch)
