"""Sums over the lanes that `rfactor` makes: shuffles where lanes are whole vectors, and loops elsewhere."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from run_tree import run_tree
from schedule_support import inputs_of, judged, program

import roller_svc
from roller_svc import hardware
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Expr, Load
from roller_svc.ir.index import num, ref, sub
from roller_svc.ir.program import Combine, TensorProgram
from roller_svc.ir.schedule import (
    Compute,
    HorizontalReduce,
    Loop,
    LoopKind,
    Node,
    ScheduleTree,
    Scope,
    Storage,
    iter_nodes,
)
from roller_svc.schedule.by_hand import schedule_by_hand
from roller_svc.schedule.combine_lanes import combine_lanes
from roller_svc.schedule.device_launches import build_device_launches
from roller_svc.schedule.legality import check

HW = hardware.load("cpu-x86-avx2")
STEPS = """
s: split r 2 as ro ri
s: accumulate_at ro
s.acc.update: split c {lanes} as co ci
s.acc.update: rfactor ci
s.acc.part: store_in registers
s.acc.part: vectorise ci
s.acc.part.update: reorder co r ci
s.acc.part.update: vectorise ci
"""


def row_sum(dtype: str = "float32", combine: str = "+=!", extent: int = 70) -> TensorProgram:
    return program(f"s[r] {combine} a[r, c]", a=f"{dtype} 5 {extent}")


@pytest.mark.parametrize(
    ("dtype", "combine", "lanes", "halvings"),
    [
        ("float32", "+=!", 8, 0),
        ("float32", "+=!", 32, 2),
        ("float32", ">=!", 16, 1),
        ("int32", "<=!", 32, 2),
        ("float64", "+=!", 8, 1),
        ("int8", "+=!", 16, 1),  # in accumulators of int32
    ],
)
def test_lanes_of_whole_vectors_are_combined_in_registers(dtype: str, combine: str, lanes: int, halvings: int) -> None:
    scheduled = row_sum(dtype, combine)
    (tree,), _ = build_device_launches(schedule_by_hand(scheduled, STEPS.format(lanes=lanes)), HW)
    assert {node.lanes for node in iter_nodes(tree.body) if isinstance(node, HorizontalReduce)} == {lanes >> halvings}
    check(tree.body, frozenset({"a", "s"}))
    arrays = inputs_of(scheduled)
    results, _ = run_tree(tree.body, arrays, {"s": (5,)})
    assert judged(scheduled, arrays, {"s": results["s"].astype(arrays["a"].dtype)}).ok


@pytest.mark.parametrize(
    ("dtype", "combine", "lanes", "why"),
    [
        ("float32", "+=!", 12, "lanes that halves do not make a vector of"),
        ("float32", "+=!", 4, "less than a vector"),
        ("float32", "*=!", 8, "products have no shuffles"),
    ],
)
def test_other_lanes_are_combined_one_by_one(dtype: str, combine: str, lanes: int, why: str) -> None:
    scheduled = row_sum(dtype, combine)
    (tree,), _ = build_device_launches(schedule_by_hand(scheduled, STEPS.format(lanes=lanes)), HW)
    assert not [node for node in iter_nodes(tree.body) if isinstance(node, HorizontalReduce)], why


LANE = ref("l")


def lane_sum(
    loop: Loop | None = None, tile: Storage | None = None, index: tuple[Expr, ...] = (), lane: Expr = LANE, of: str = "p"
) -> tuple[Node, ...]:
    """A tile of 8 lanes, and the loop that adds them to `s`."""
    update = Compute("s", index, Load(of, (num(0), lane), DType.FLOAT32), Combine.SUM)
    kept = loop or Loop("l", 8, LoopKind.SERIAL, ())
    room = tile or Storage("p", DType.FLOAT32, (1, 8), Scope.REGISTER, ())
    return (replace(room, body=(replace(kept, body=(update,)),)),)


@pytest.mark.parametrize(
    ("nodes", "is_combined"),
    [
        (lane_sum(), True),
        (lane_sum(Loop("l", 8, LoopKind.UNROLL, ())), True),
        (lane_sum(tile=Storage("p", DType.FLOAT32, (1, 8), Scope.STACK, ())), True),
        (lane_sum(Loop("l", 8, LoopKind.SERIAL, (), ref("end"))), False),  # some lanes only
        (lane_sum(Loop("l", 8, LoopKind.VECTOR, ())), False),
        (lane_sum(tile=Storage("p", DType.FLOAT32, (1, 16), Scope.REGISTER, ())), False),  # half of the lanes
        (lane_sum(tile=Storage("p", DType.FLOAT32, (1, 8), Scope.SHARED, ())), False),
        (lane_sum(index=(LANE,)), False),  # a map
        (lane_sum(lane=sub(num(7), LANE)), False),
        (lane_sum(of="a"), False),  # in memory
    ],
)
def test_only_loops_over_all_lanes_of_a_tile_are_combined(nodes: tuple[Node, ...], is_combined: bool) -> None:
    combined = combine_lanes(ScheduleTree("kernel", nodes), HW)
    assert any(isinstance(node, HorizontalReduce) for node in iter_nodes(combined.body)) == is_combined
    assert is_combined or combined.body == nodes


@pytest.mark.slow
def test_compiled_lanes_keep_nan_infinity_and_wrapped_integers() -> None:
    a = np.full((5, 70), 1.5, np.float32)
    a[0, 3], a[1, 69], a[2, 5], a[2, 6] = np.nan, np.inf, np.inf, -np.inf
    b = np.full((5, 70), 2**31 - 1, np.int32)
    for combine, values in (("+=!", a), (">=!", a), ("+=!", b)):
        text = f"s[r] {combine} a[r, c]"
        kernel = roller_svc.compile(text, {"a": values}, schedule=STEPS.format(lanes=16))
        expected = roller_svc.reference(text, {"a": values}, {"a": values})["s"]
        np.testing.assert_array_equal(kernel(a=values)["s"], expected)
