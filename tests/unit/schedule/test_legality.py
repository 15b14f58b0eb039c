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
from roller_svc.ir.expr import Const, Load
from roller_svc.ir.index import add, eq, lt, mul, num, ref
from roller_svc.ir.program import Combine
from roller_svc.ir.report import Plan
from roller_svc.ir.schedule import (
    Barrier,
    Branch,
    Compute,
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


PRODUCE = loop("i", 4, write("p", "i"))
CONSUME = loop("i", 4, Compute("out", (ref("i"),), load("p", "i")))
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
    "one lane writes": loop("v", 4, Branch(eq(ref("v"), num(0)), (write("out"),)), kind=LoopKind.THREAD),
    "tiles": loop("i", 4, loop("j", 8, Compute("out", (add(mul(ref("i"), num(8)), ref("j")),), ONE)),
                  kind=LoopKind.PARALLEL),
    "the last thread elsewhere": without(8),
    "the first eight threads": below(8),
    "added up by all": loop("i", 4, Compute("out", (), ONE, Combine.SUM, atomic=True), kind=LoopKind.BLOCK),
    "half onto half": room("p", (8,), loop("i", 8, write("p", "i")),
                           loop("v", 4, join_further(4), kind=LoopKind.VECTOR)),
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
