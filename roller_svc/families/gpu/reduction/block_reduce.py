"""What the lanes of a row have reduced, each its part → the whole, for all of them to see.

Lanes that are neighbours join by shuffles, and warps of them through a few words of shared memory: a row of more lanes
than a warp has is made of whole warps. Lanes that stand apart, each in a row of threads, put what they have into shared
memory and share out the joining.
"""

from __future__ import annotations

from roller_svc.families.gpu.reduction.thread_mapping import LANE, POINT, ThreadRows
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.index import add, ceil_div, div, eq, lt, mod, mul, num, ref
from roller_svc.ir.program import Combine, TensorExpr
from roller_svc.ir.schedule import Barrier, Branch, Compute, Let, Loop, LoopKind, Node, Scope, Storage, WarpReduce
from roller_svc.schedule.nest_statements import acc_name, register, wrap_in_storages

FIRST, SLOT, TOTAL = ".in_warp", ".slot", ".total"


def lane_rooms(rows: ThreadRows, statement: TensorExpr) -> tuple[Storage, ...]:
    """Shared memory that joining takes. Every reduction has its own: one barrier less between two of them."""
    if rows.lanes == 1 or (rows.along and rows.lanes <= rows.warp):
        return ()
    shape = (rows.count, rows.points, rows.lanes // rows.warp) if rows.along else (rows.lanes, rows.count, rows.points)
    return (Storage(_room(statement), statement.accumulator, shape, Scope.SHARED, ()),)


def joined_lanes(rows: ThreadRows, statement: TensorExpr) -> tuple[Node, ...]:
    """What makes the accumulators of all lanes the whole reduction."""
    if rows.lanes == 1:
        return ()
    return (_neighbours if rows.along else _apart)(rows, statement)


def _room(statement: TensorExpr) -> str:
    return f"{statement.output}.lanes"


def _join(statement: TensorExpr) -> tuple[str, Combine, DType]:
    return acc_name(statement.output), statement.combine or Combine.SUM, statement.accumulator


def _neighbours(rows: ThreadRows, statement: TensorExpr) -> tuple[Node, ...]:
    acc, combine, dtype = _join(statement)
    near = WarpReduce(acc, rows.elements, combine, min(rows.lanes, rows.warp))
    nodes = rows.each((near,), vector=False)
    if rows.lanes <= rows.warp:
        return nodes
    warps = rows.lanes // rows.warp
    point, slot = ref(POINT), rows.flat_element
    room = _room(statement)
    mine = (slot, point, div(ref(LANE), rows.warp))
    put = rows.each((Compute(room, mine, Load(acc, rows.elements, dtype)),), vector=False)
    take = (
        Compute(acc, rows.elements, Load(room, (slot, point, mod(ref(LANE), warps)), dtype)),
        WarpReduce(acc, rows.elements, combine, warps),
    )
    put = (Let(FIRST, mod(ref(LANE), rows.warp), (Branch(eq(ref(FIRST), num(0)), put),)),)
    return (*nodes, *put, Barrier(), *rows.each(take, vector=False))


def _apart(rows: ThreadRows, statement: TensorExpr) -> tuple[Node, ...]:
    """Lane l joins element l, l + lanes, ... of its rows, and all lanes fetch the results."""
    acc, combine, dtype = _join(statement)
    room, point, slot = _room(statement), ref(POINT), rows.flat_element
    put = rows.each((Compute(room, (ref(LANE), slot, point), Load(acc, rows.elements, dtype)),), vector=False)
    here: Expr = ref(SLOT)
    nodes: tuple[Node, ...] = (
        Compute(TOTAL, (), Load(room, (num(0), here, point), dtype)),
        Loop(
            ".other", rows.lanes - 1, LoopKind.UNROLL,
            (Compute(TOTAL, (), Load(room, (add(ref(".other"), num(1)), here, point), dtype), combine),),
        ),
        Compute(room, (num(0), here, point), Load(TOTAL, (), dtype)),
    )  # fmt: skip
    nodes = wrap_in_storages((register(TOTAL, dtype),), nodes)
    if rows.count % rows.lanes:
        nodes = (Branch(lt(here, num(rows.count)), nodes),)
    nodes = (Let(SLOT, add(mul(ref(".share"), num(rows.lanes)), ref(LANE)), nodes),)
    shares = Loop(".share", ceil_div(rows.count, rows.lanes), LoopKind.UNROLL, nodes)
    fetch = rows.each((Compute(acc, rows.elements, Load(room, (num(0), slot, point), dtype)),), vector=False)
    return (*put, Barrier(), shares, Barrier(), *fetch)
