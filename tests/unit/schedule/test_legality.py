"""The verifier of schedule trees, on hand-written trees and on trees of rPrograms."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
from schedule_support import BLUR

from roller_bench.cases import performance_cases
from roller_svc import hardware
from roller_svc.compiler.lower_and_emit import emit_plan, verify_tree
from roller_svc.compiler.plans import rank_best_partition
from roller_svc.errors import InvariantError, ScheduleError
from roller_svc.ir.dtype import DType
from roller_svc.ir.expr import Const, Expr, Load
from roller_svc.ir.index import add, eq, logical_and, lt, mul, num, ref, sub
from roller_svc.ir.program import Combine
from roller_svc.ir.report import Plan
from roller_svc.ir.schedule import (
    Barrier,
    Branch,
    Compute,
    Let,
    LoadMatrix,
    Loop,
    LoopKind,
    Node,
    ScheduleTree,
    Scope,
    Storage,
)
from roller_svc.schedule import transforms as t
from roller_svc.schedule.build_tree import build_tree
from roller_svc.schedule.default import default_schedule
from roller_svc.schedule.legality import check

ROOT = Path(__file__).resolve().parents[3]
F32 = DType.FLOAT32
ONE = Const(1.0, F32)


def loop(var: str, extent: int, *body: Node, kind: LoopKind = LoopKind.SERIAL) -> Loop:
    return Loop(var, extent, kind, body)


def room(tensor: str, shape: tuple[int, ...], *body: Node, scope: Scope = Scope.STACK) -> Storage:
    return Storage(tensor, F32, shape, scope, body)


def load(tensor: str, *index: str) -> Load:
    return Load(tensor, tuple(ref(i) for i in index), F32)


def write(tensor: str, *index: str) -> Compute:
    return Compute(tensor, tuple(ref(i) for i in index), ONE)


def join_further(distance: int) -> Compute:
    """p[v] += p[v + distance]."""
    return Compute("p", (ref("v"),), Load("p", (add(ref("v"), num(distance)),), F32), Combine.SUM)


def at(tensor: str, *index: Expr) -> Compute:
    return Compute(tensor, index, ONE)


def copied(tensor: str, index: Expr, source: Expr) -> Compute:
    """tensor[index] = tensor[source]."""
    return Compute(tensor, (index,), Load(tensor, (source,), F32))


def after_filling(node: Node, *more: Expr) -> Node:
    """The node after a loop that writes 16 elements of `p`, whose other indices are `more`."""
    return room("p", (16,), loop("f", 16, at("p", ref("f"), *more)), node)


def in_blocks(size: int, cond: Expr, *, holds: bool = True) -> Node:
    """Blocks of that size, written by the threads of 32 that meet a condition, or do not."""
    own = at("out", add(mul(ref("i"), num(size)), ref("w")))
    branch = Branch(cond, (own,)) if holds else Branch(cond, (), otherwise=(own,))
    return loop("i", 4, loop("j", 4, loop("w", 32, branch, kind=LoopKind.THREAD)), kind=LoopKind.BLOCK)


PRODUCE = loop("i", 4, write("p", "i"))
CONSUME = loop("i", 4, Compute("out", (ref("i"),), load("p", "i")))
A_ROUND_AGO = loop("i", 4, Branch(lt(num(0), ref("i")), (Compute("out", (ref("i"),), load("p")),)))
JOIN = Compute("acc", (), ONE, Combine.SUM)
LANES = Loop("v", 4, LoopKind.THREAD, (Branch(lt(ref("v"), num(2)), (Barrier(),)),))


def without(last: int) -> Node:
    """Blocks of eight elements, written by all threads but one of nine."""
    own = Compute("out", (add(mul(ref("i"), num(8)), ref("w")),), ONE)
    branch = Branch(eq(ref("w"), num(last)), (), otherwise=(own,))
    return loop("i", 4, loop("w", 9, branch, kind=LoopKind.THREAD), kind=LoopKind.BLOCK)


def below(bound: int) -> Node:
    """Blocks of eight elements, written by the threads below a bound of 32."""
    own = Compute("out", (add(mul(ref("i"), num(8)), ref("w")),), ONE)
    return loop("i", 4, loop("w", 32, Branch(lt(ref("w"), num(bound)), (own,)), kind=LoopKind.THREAD), kind=LoopKind.BLOCK)


LEGAL: dict[str, Node] = {
    "producer first": room("p", (4,), PRODUCE, CONSUME),
    "a round ago": room("p", (), loop("i", 4, Branch(lt(num(0), ref("i")), (Compute("out", (ref("i"),), load("p")),)),
                                      write("p"))),
    "own elements": loop("i", 4, write("out", "i"), kind=LoopKind.PARALLEL),
    "own accumulator": loop("i", 4, room("acc", (), write("acc"), JOIN, Compute("out", (ref("i"),), load("acc"))),
                            kind=LoopKind.PARALLEL),
    "the first thread of both loops writes": loop(
        "v", 4, loop("w", 4, Branch(lt(add(mul(ref("v"), num(4)), ref("w")), num(1)), (write("out"),)), kind=LoopKind.THREAD),
        kind=LoopKind.THREAD),
    "one lane writes": loop("v", 4, Branch(eq(ref("v"), num(0)), (write("out"),)), kind=LoopKind.THREAD),
    "tiles": loop("i", 4, loop("j", 8, Compute("out", (add(mul(ref("i"), num(8)), ref("j")),), ONE)),
                  kind=LoopKind.PARALLEL),
    "the last thread elsewhere": without(8),
    "the first eight threads": below(8),
    "added up by all": loop("i", 4, Compute("out", (), ONE, Combine.SUM, atomic=True), kind=LoopKind.BLOCK),
    "half onto half": room("p", (8,), loop("i", 8, write("p", "i")),
                           loop("v", 4, join_further(4), kind=LoopKind.VECTOR)),
    "tiles from their ends": loop("i", 4, loop("j", 8, at("out", sub(mul(ref("i"), num(8)), ref("j")))), kind=LoopKind.PARALLEL),
    "tiles by other names": loop("j", 4, loop("i", 8, at("out", add(mul(ref("j"), num(8)), ref("i")))), kind=LoopKind.PARALLEL),
    "one of all threads": loop("v", 4, loop(
        "w", 4, Branch(logical_and(eq(ref("v"), num(0)), eq(ref("w"), num(0))), (write("out"),)), kind=LoopKind.THREAD),
        kind=LoopKind.THREAD),
    "a loop of one round": loop("i", 4, loop("z", 1, at("out", add(ref("i"), ref("z")))), kind=LoopKind.PARALLEL),
    "one thread for all": loop("i", 1, write("out"), kind=LoopKind.PARALLEL),
    "threads that share elements": loop("v", 4, loop("j", 2, at("out", add(ref("v"), ref("j")))), kind=LoopKind.THREAD),
    "its own element": after_filling(loop("v", 4, join_further(0), kind=LoopKind.PARALLEL)),
    "at a place that it stored": loop(
        "v", 4, Storage("p", DType.INT32, (), Scope.STACK,
                        (Compute("p", (), ref("v")), at("out", Load("p", (), DType.INT32)))), kind=LoopKind.PARALLEL),
    "all meet": loop("v", 4, loop("i", 3, Barrier()), kind=LoopKind.THREAD),
}  # fmt: skip
ILLEGAL: dict[str, tuple[str, Node]] = {
    "consumer first": ("schedule-order", room("p", (4,), CONSUME, PRODUCE)),
    "never written": ("schedule-order", room("p", (4,), CONSUME)),
    "joined to nothing": ("schedule-order", room("acc", (), JOIN)),
    "a round ago, in the first": (
        "schedule-order",
        room("p", (), loop("i", 4, Compute("out", (), load("p")), write("p"))),
    ),
    "outside of its room": ("schedule-scope", loop("z", 2, room("p", (4,), PRODUCE), CONSUME)),
    "outside of its loop": ("schedule-scope", write("out", "i")),
    "loop in a vector": (
        "schedule-vector-inner",
        loop("v", 4, loop("i", 2, write("out", "v", "i")), kind=LoopKind.VECTOR),
    ),
    "an end out of scope": ("schedule-scope", Loop("i", 4, LoopKind.SERIAL, (write("out", "i"),), ref("z"))),
    "a condition out of scope": ("schedule-scope", Branch(lt(ref("z"), num(2)), (write("out"),))),
    "a value out of scope": ("schedule-scope", Let("x", ref("z"), (write("out", "x"),))),
    "another room of its name": ("schedule-order", loop("z", 2, room("p", (4,), PRODUCE), room("p", (4,), CONSUME))),
    "a round ago, in a later room": ("schedule-order", loop("z", 2, room("p", (), A_ROUND_AGO), room("p", (), write("p")))),
    "a round ago, on another thread": (
        "schedule-order",
        room("p", (), loop("i", 4, Branch(lt(num(0), ref("i")), (Compute("out", (ref("i"),), load("p")),)), write("p"),
                           kind=LoopKind.PARALLEL)),
    ),
    "the first round of a branch": (
        "schedule-order",
        loop("i", 4, Branch(lt(num(0), ref("i")), (
            room("p", (), loop("j", 2, Compute("out", (ref("i"),), load("p")), write("p"))),))),
    ),
    "memory in use": (
        "schedule-scope",
        room("p", (4,), PRODUCE, Storage("q", F32, (4,), Scope.SHARED, (write("q"),), aliases=("p",)), CONSUME),
    ),
    "a neighbour overwritten": (
        "schedule-scope",
        room("p", (4,), PRODUCE, Storage("q", F32, (4,), Scope.SHARED, (write("q"), CONSUME), overlays=("p",))),
    ),
    "ragged vector": ("schedule-extent", Loop("v", 4, LoopKind.VECTOR, (write("out", "v"),), num(3))),
    "ragged unrolling": ("schedule-extent", Loop("v", 4, LoopKind.UNROLL, (write("out", "v"),), num(3))),
    "one element for all": ("schedule-dependence", loop("i", 4, write("out"), kind=LoopKind.PARALLEL)),
    "a shared accumulator": (
        "schedule-dependence",
        room("acc", (), write("acc"), loop("i", 4, JOIN, kind=LoopKind.VECTOR)),
    ),
    "overlapping tiles": (
        "schedule-dependence",
        loop("i", 4, loop("j", 9, Compute("out", (add(mul(ref("i"), num(8)), ref("j")),), ONE)),
             kind=LoopKind.PARALLEL),
    ),
    "another thread elsewhere": ("schedule-dependence", without(7)),
    "the first nine threads": ("schedule-dependence", below(9)),
    "all lanes but one": (
        "schedule-dependence",
        loop("v", 4, Branch(eq(ref("v"), num(0)), (), otherwise=(write("out"),)), kind=LoopKind.PARALLEL),
    ),
    "a neighbour's element": (
        "schedule-dependence",
        room("p", (8,), loop("i", 8, write("p", "i")), loop("v", 4, join_further(1), kind=LoopKind.PARALLEL)),
    ),
    "threads at and above a bound": ("schedule-dependence", in_blocks(8, lt(ref("w"), num(8)), holds=False)),
    "twice the thread below a bound": ("schedule-dependence", in_blocks(4, lt(mul(ref("w"), num(2)), num(9)))),
    "a difference below a bound": ("schedule-dependence", in_blocks(8, lt(sub(ref("w"), ref("j")), num(8)))),
    "the last onto the next": ("schedule-dependence", after_filling(loop("v", 4, join_further(3), kind=LoopKind.PARALLEL))),
    "the first onto the last": ("schedule-dependence", after_filling(loop("v", 4, join_further(-3), kind=LoopKind.PARALLEL))),
    "elements of any tile": (
        "schedule-dependence",
        after_filling(loop("z", 2, loop("y", 2, loop(
            "v", 4, copied("p", add(mul(ref("z"), num(8)), ref("v")), add(add(mul(ref("y"), num(8)), ref("v")), num(4))),
            kind=LoopKind.PARALLEL)))),
    ),
    "elements of another round": (
        "schedule-dependence",
        after_filling(loop(
            "v", 4, loop("j", 2, copied("p", add(ref("v"), mul(ref("j"), num(4))),
                                        add(add(ref("v"), mul(ref("j"), num(4))), num(4)))), kind=LoopKind.PARALLEL)),
    ),
    "a neighbour in the same column": (
        "schedule-dependence",
        after_filling(loop("v", 4, Compute("p", (ref("v"), num(0)), Load("p", (add(ref("v"), num(1)), num(0)), F32)),
                           kind=LoopKind.PARALLEL), num(0)),
    ),
    "elements of the second write": (
        "schedule-dependence",
        loop("v", 4, write("p", "v"), at("p", add(ref("v"), num(8))),
             Compute("out", (ref("v"),), Load("p", (add(ref("v"), num(9)),), F32)), kind=LoopKind.PARALLEL),
    ),
    "an outer loop of the same name selects": (
        "schedule-dependence",
        loop("v", 4, Branch(eq(ref("v"), num(0)), (loop("v", 4, write("out"), kind=LoopKind.PARALLEL),)))),
    "two threads below a bound": (
        "schedule-dependence", loop("v", 4, Branch(lt(ref("v"), num(2)), (write("out"),)), kind=LoopKind.THREAD)),
    "threads whose difference is below a bound": (
        "schedule-dependence",
        loop("v", 4, loop("w", 4, Branch(lt(sub(ref("v"), ref("w")), num(1)), (write("out"),)), kind=LoopKind.THREAD),
             kind=LoopKind.THREAD)),
    "threads below a bound from elsewhere": (
        "schedule-dependence",
        loop("v", 4, Branch(lt(sub(ref("v"), num(2)), num(1)), (write("out"),)), kind=LoopKind.THREAD)),
    "a shared element for all threads": (
        "schedule-dependence",
        loop("v", 4, room("p", (), write("p"), scope=Scope.SHARED), kind=LoopKind.THREAD),
    ),
    "parallel loops meet": ("schedule-barrier", loop("i", 4, Barrier(), kind=LoopKind.PARALLEL)),
    "threads meet by what they stored": (
        "schedule-barrier",
        loop("v", 4, Storage("p", DType.INT32, (), Scope.STACK, (
            Compute("p", (), num(1)), Branch(lt(Load("p", (), DType.INT32), num(2)), (Barrier(),)))), kind=LoopKind.THREAD),
    ),
    "threads meet after a branch of fewer": (
        "schedule-barrier",
        loop("v", 4, Branch(lt(ref("v"), num(3)), (Branch(lt(ref("v"), num(2)), (write("out", "v"),)), Barrier())),
             kind=LoopKind.THREAD),
    ),
    "lanes that differ in two loops": (
        "schedule-barrier",
        loop("half", 2, loop("lane", 32, Storage("f", DType.UINT32, (1,), Scope.REGISTER, (
            Branch(lt(add(ref("half"), ref("lane")), num(2)), (LoadMatrix("f", (num(0),), 1, "X", (num(0),)),)),)),
            kind=LoopKind.THREAD), kind=LoopKind.THREAD),
    ),
    "some threads meet": ("schedule-barrier", LANES),
    "threads that stop early": (
        "schedule-barrier",
        loop("v", 4, Loop("i", 4, LoopKind.SERIAL, (Barrier(),), ref("v")), kind=LoopKind.THREAD),
    ),
}  # fmt: skip


@pytest.mark.parametrize("what", sorted(LEGAL))
def test_a_legal_tree_passes(what: str) -> None:
    check((LEGAL[what],))


@pytest.mark.parametrize("what", sorted(ILLEGAL))
def test_row_28_an_illegal_tree_is_refused(what: str) -> None:
    code, node = ILLEGAL[what]
    with pytest.raises(ScheduleError) as refused:
        check((node,))
    assert refused.value.code == code


def test_buffers_are_known_by_name() -> None:
    check((PRODUCE,), {"p"})
    with pytest.raises(ScheduleError, match="p is used outside"):
        check((PRODUCE,), {"out"})


def test_row_27_swapped_producers_of_a_schedule_are_refused() -> None:
    (storage,) = build_tree(t.compute_root(default_schedule(BLUR), "bx"))
    assert isinstance(storage, Storage)
    check((storage,))
    with pytest.raises(ScheduleError) as refused:
        check((room(storage.tensor, storage.shape, *reversed(storage.body)),))
    assert refused.value.code == "schedule-order"


def test_an_illegal_tree_of_our_own_is_a_bug() -> None:
    with pytest.raises(InvariantError, match="the tree of k is not legal"):
        verify_tree(ScheduleTree("k", (ILLEGAL["one element for all"][1],)), {"out"}, 32)


def test_half_a_wave_is_a_warp_of_other_devices() -> None:
    """What a warp does together under a condition that 32 neighbouring threads see alike, but not 64."""
    load = LoadMatrix("f", (num(0),), 1, "X", (num(0),))
    lanes = loop("lane", 32, Branch(lt(ref("half"), num(1)), (load,)), kind=LoopKind.THREAD)
    tree = loop("half", 2, Storage("f", DType.UINT32, (1,), Scope.REGISTER, (lanes,)), kind=LoopKind.THREAD)
    check((tree,), {"X"}, 32)
    with pytest.raises(ScheduleError, match="warp-collective node in divergent control flow") as refused:
        check((tree,), {"X"}, 64)
    assert refused.value.code == "schedule-barrier"


@pytest.mark.parametrize("target", ["local", "nvidia-h200-sxm"])
def test_trees_of_rprograms_are_legal(target: str) -> None:
    """Generating a kernel checks its trees: here the best of a slice of the corpus."""
    hw = hardware.load(target)
    seen = 0
    for case in itertools.islice(performance_cases(ROOT / "bench" / "data" / "public.json"), 0, None, 60):
        program = case.program()
        groups, ranked, _ = rank_best_partition(program, hw, 1)
        emit_plan(Plan(tuple(candidates[0] for candidates in ranked)), program, groups, hw)
        seen += 1
    assert seen > 10


@pytest.mark.parametrize(("index", "is_uniform"), [("block", True), ("lane", False)])
def test_threads_agree_on_what_no_launch_writes(index: str, is_uniform: bool) -> None:
    cond = lt(Load("n", (ref(index),), DType.INT32), num(1))
    load = LoadMatrix("f", (num(0),), 1, "X", (num(0),))
    lanes = loop("lane", 32, Branch(cond, (load,)), kind=LoopKind.THREAD)
    tree = loop("block", 2, Storage("f", DType.UINT32, (1,), Scope.REGISTER, (lanes,)), kind=LoopKind.BLOCK)
    if is_uniform:
        check((tree,), {"X", "n"}, 32)
    else:
        with pytest.raises(ScheduleError, match="divergent control flow"):
            check((tree,), {"X", "n"}, 32)
