"""Tiles in registers without guards where no lane is past an end, and with them where one is."""

from __future__ import annotations

import pytest
from run_tree import Room, TreeRun, run_tree
from schedule_support import inputs_of, judged, program

from roller_svc import hardware
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load
from roller_svc.ir.index import add, div, le, logical_and, lt, min_, mul, num, ref, sub
from roller_svc.ir.schedule import Branch, Compute, Loop, LoopKind, Node, ScheduleTree, Scope, Storage, iter_nodes
from roller_svc.schedule.by_hand import schedule_by_hand
from roller_svc.schedule.device_launches import build_device_launches
from roller_svc.schedule.legality import check
from roller_svc.schedule.whole_tiles import separate_whole_tiles

HW = hardware.load("cpu-x86-avx2")
TILED = """
C: split m 4 as mo mi
C: split n {columns} as no ni
C: reorder no mo mi ni
C: accumulate_at mo
C.acc: store_in registers
C.acc: unroll m
C.acc: vectorise n
C.acc.update: reorder k m n
C.acc.update: unroll m
C.acc.update: vectorise n
C: unroll mi
C: vectorise ni
B: cache C.acc.update k stack
B.cache: compute_at C no
B.cache: vectorise d1
"""


def tiles_of(nodes: tuple[Node, ...]) -> list[Storage]:
    """The tiles of the accumulator, and of the copy, as they are and with a tail."""
    names = ("C.acc.tile", "C.acc.tile.tail", "t", "t.tail")
    return [node for node in iter_nodes(nodes) if isinstance(node, Storage) and node.tensor in names]


def guarded(tile: Storage) -> bool:
    return any(isinstance(node, Branch) or (isinstance(node, Loop) and node.stop is not None) for node in iter_nodes(tile.body))


@pytest.mark.parametrize(("rows", "columns", "width"), [(8, 16, 8), (6, 16, 8), (8, 21, 8), (7, 21, 16), (5, 5, 4)])
def test_whole_tiles_of_a_product_have_no_guards(rows: int, columns: int, width: int) -> None:
    product = program("C[m, n] +=! A[m, k] * B[k, n]", A=f"float32 {rows} 3", B=f"float32 3 {columns}")
    (tree,), _ = build_device_launches(schedule_by_hand(product, TILED.format(columns=width)), HW)
    check(tree.body, frozenset({"A", "B", "C"}))
    has_tail = bool(rows % 4 or columns % width)
    assert [guarded(tile) for tile in tiles_of(tree.body)] == ([False, True] if has_tail else [False])
    scopes = {tile.tensor: tile.scope for tile in tiles_of(tree.body)}
    assert scopes["C.acc.tile"] is Scope.REGISTER
    in_loops = Scope.STACK if columns % width else Scope.REGISTER  # loops go through lanes of its vectors
    assert scopes.get("C.acc.tile.tail", in_loops) is in_loops
    arrays = inputs_of(product)
    results, _ = run_tree(tree.body, arrays, {"C": (rows, columns)})
    assert judged(product, arrays, {"C": results["C"].astype("float32")}).ok


LANE, TILE = ref("i"), ref("o")
PLACE = add(mul(TILE, num(4)), LANE)


def copy_in_tiles(guard: Expr | None = None, stop: Expr | None = None, kind: LoopKind = LoopKind.SERIAL) -> tuple[Node, ...]:
    """`y[4 o + i] = x[4 o + i]` for four lanes of each `o`, by way of a tile, where a guard and an end let them."""
    filled = Loop("i", 4, LoopKind.VECTOR, (Compute("t", (LANE,), Const(0.0, DType.FLOAT32)),))
    read: Node = Compute("y", (PLACE,), Load("x", (PLACE,), DType.FLOAT32))
    body = (read,) if guard is None else (Branch(guard, (read,)),)
    tile = Storage("t", DType.FLOAT32, (4,), Scope.REGISTER, (filled, Loop("i", 4, kind, body, stop)))
    return (Loop("o", 3, LoopKind.SERIAL, (tile,)),)


@pytest.mark.parametrize(
    ("nodes", "is_separated"),
    [
        (copy_in_tiles(lt(PLACE, num(10))), True),
        (copy_in_tiles(logical_and(le(num(2), PLACE), lt(PLACE, num(10)))), True),
        (copy_in_tiles(stop=sub(num(11), mul(TILE, num(4)))), True),
        (copy_in_tiles(stop=min_(sub(num(10), mul(TILE, num(4))), num(4))), True),
        (copy_in_tiles(lt(PLACE, num(12)), sub(num(10), mul(TILE, num(4)))), True),
        (copy_in_tiles(), False),
        (copy_in_tiles(lt(LANE, num(3))), False),  # no tile is whole
        (copy_in_tiles(lt(mul(div(PLACE, 3), num(3)), num(9))), False),  # not a sum of loops
        (copy_in_tiles(stop=sub(num(6), mul(div(TILE, 2), num(4)))), False),
    ],
)
def test_a_guard_is_decided_outside_where_it_is_a_sum_of_loops(nodes: tuple[Node, ...], is_separated: bool) -> None:
    separated = separate_whole_tiles(ScheduleTree("kernel", nodes)).body
    assert (separated != nodes) == is_separated
    written = []
    for each in (nodes, separated):
        run = TreeRun({"x": Room("x", (12,), {(i,): i + 0.5 for i in range(12)}), "y": Room("y", (12,))})
        run.run(each)
        written.append(run.rooms["y"].elements)
    assert written[0] == written[1]
    assert [guarded(tile) for tile in tiles_of(separated)] == ([False, True] if is_separated else [guarded(tiles_of(nodes)[0])])
