"""Schedules and their trees, on examples computed by hand."""

from __future__ import annotations

import doctest
import itertools
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from run_tree import TreeRun, alloc_bytes, run_tree
from schedule_support import (
    BLUR,
    GATHER,
    MATMUL,
    MIRROR,
    NARROW,
    PADDED_BLUR,
    PROGRAMS,
    compiled,
    inputs_of,
    interpreted,
    judged,
    program,
)

from roller_svc import hardware
from roller_svc.codegen.kernel import GroupLaunches, emit, tensors_in_memory
from roller_svc.errors import ScheduleError
from roller_svc.ir.dtype import DType
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.schedule import Loop, Storage, iter_nodes
from roller_svc.ir.schedule_text import render
from roller_svc.schedule import transforms as t
from roller_svc.schedule.bounds import infer_bounds
from roller_svc.schedule.build_tree import build_schedule_tree, build_tree
from roller_svc.schedule.by_hand import schedule_by_hand
from roller_svc.schedule.default import default_schedule, storage_types
from roller_svc.schedule.schedule import Fixed, Schedule
from roller_svc.semantics.interpreter import reference

ROOT = Path(__file__).resolve().parents[3]


def run(schedule: Schedule) -> TreeRun:
    outputs = {o.tensor: schedule.program.types[o.tensor].shape for o in schedule.program.outputs}
    return run_tree(build_tree(schedule), inputs_of(schedule.program), outputs)[1]


def visited(schedule: Schedule, tensor: str) -> list[tuple[int, ...]]:
    return [index for name, index in run(schedule).visits if name == tensor]


def text(schedule: Schedule, target: str = "cpu-x86-avx2") -> str:
    p = schedule.program
    views = (*p.inputs, *((o.tensor, p.types[o.tensor]) for o in p.outputs))
    part = GroupLaunches((build_schedule_tree(schedule, "kernel"),), views)
    return emit("kernel", (part,), tensors_in_memory(p, p.types, ()), hardware.load(target), "").text


class TestDefault:
    def test_row_30_maps_are_inlined_and_nothing_is_stored(self) -> None:
        blur = default_schedule(BLUR)
        assert blur.function("bx").computed is Fixed.INLINE
        assert render(build_tree(blur)) == "serial y in 8\n  serial x in 8\n    B[...] ="
        assert not any(isinstance(n, Storage) for n in iter_nodes(build_tree(blur)))

    def test_a_reduction_starts_and_joins(self) -> None:
        assert render(build_tree(default_schedule(MATMUL))).splitlines() == [
            "serial m in 5",
            "  serial n in 7",
            "    C[...] =",
            "serial m in 5",
            "  serial n in 7",
            "    serial k in 6",
            "      C[...] +=",
        ]

    def test_a_sum_wider_than_its_tensor_is_a_function_of_its_own(self) -> None:
        names = [f.name for f in default_schedule(NARROW).functions]
        assert names == ["C.acc", "C", "D"]

    def test_integer_sums_wrap_to_their_stated_types(self) -> None:
        values = {"int8": 100, "uint8": 200, "int16": 30_000, "int32": 1 << 30}
        stated = ("int8", "int16", "int32", "int64", "uint32")
        lines = [f"{x}_{y}[i]: {y} +=! {x}[i, k]" for x in values for y in stated]
        lines += ["p[i]: int16 +=! int8[i, k] * int8[i, k]", "q[i]: int32 *=! int8[i, k]", "m[i]: uint8 >=! int8[i, k]"]
        schedule = default_schedule(program(";".join(lines), **{f"{x}": f"{x} 2 9" for x in values}))
        inputs = {x: np.full((2, 9), value, x) for x, value in values.items()}
        (module,) = compiled([schedule])
        got = module.run(inputs)
        wanted = reference(schedule.program, inputs)
        assert {name: got[name].tolist() for name in wanted} == {name: each.tolist() for name, each in wanted.items()}

    @pytest.mark.parametrize("dtype", ["uint8", "int64"])
    def test_an_inlined_axis_that_data_replaces_is_compared_in_vectors(self, dtype: str) -> None:
        text = "t[i, j]: int8 = x[i, j].when([j < i], 0); u[g, b]: int8 = t[b, z[g] % 7] + t[b, 1] where b in 32"
        p = program(text, x="int8 32 7", z=f"{dtype} 5")
        assert default_schedule(p).function("t").computed is Fixed.INLINE
        schedule = t.vectorise(default_schedule(p), "u", "b")
        (module,) = compiled([schedule])
        inputs = inputs_of(p)
        assert judged(p, inputs, module.run(inputs)).ok

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
    def test_a_sum_of_narrow_elements_is_no_copy_of_them(self, dtype: str) -> None:
        p = program("s[i] +=! A[i, j]; z[i] = s[i] * 2; c[j, i] = A[i, j]; y[j] +=! c[j, i] * c[j, 0]", A=f"{dtype} 2 3")
        types = storage_types(t.compute_root(default_schedule(p), "c"))
        assert types["s"].dtype is DType.FLOAT32
        assert types["c"].dtype is p.types["A"].dtype

    def test_row_30_points_are_visited_in_row_major_order(self) -> None:
        assert visited(default_schedule(BLUR), "B") == list(itertools.product(range(8), range(8)))

    def test_statements_that_no_output_needs_are_left_out(self) -> None:
        p = program("y[i] = x[i] + 1.0; z[i] = x[i] * 2.0", ["y"], x="float32 4")
        assert [f.name for f in default_schedule(p).functions] == ["y"]

    def test_long_chains_do_not_double_for_ever(self) -> None:
        lines = ["v0[i] = x[i] + x[i]", *(f"v{k + 1}[i] = v{k}[i] + v{k}[i]" for k in range(40))]
        chain = default_schedule(program(";".join(lines), x="float32 3"))
        assert sum(f.computed is Fixed.ROOT for f in chain.functions) < 12
        assert judged(chain.program, inputs_of(chain.program), interpreted(chain, inputs_of(chain.program))).ok

    @pytest.mark.parametrize("name", sorted(PROGRAMS))
    def test_it_gives_the_reference(self, name: str) -> None:
        schedule = default_schedule(PROGRAMS[name])
        inputs = inputs_of(schedule.program)
        assert judged(schedule.program, inputs, interpreted(schedule, inputs)).ok


class TestTransforms:
    def test_row_32_split_of_ten_by_four_visits_each_point_once_in_order(self) -> None:
        p = program("b[i] = a[i] * 2.0", a="float32 10")
        parts = t.split(default_schedule(p), "b", "i", 4)
        assert visited(parts, "b") == [(i,) for i in range(10)]
        assert [x.extent for x in iter_nodes(build_tree(parts)) if isinstance(x, Loop)] == [3, 4]

    def test_row_33_fuse_visits_what_division_and_remainder_say(self) -> None:
        p = program("b[y, x] = a[y, x] + 1.0", a="float32 4 4")
        fused = t.fuse(default_schedule(p), "b", "y", "x")
        assert visited(fused, "b") == [(i // 4, i % 4) for i in range(16)]

    def test_row_34_tile_goes_through_one_tile_after_another(self) -> None:
        p = program("b[y, x] = a[y, x] + 1.0", a="float32 4 4")
        tiled = t.tile(default_schedule(p), "b", ("y", 2), ("x", 2))
        assert visited(tiled, "b") == [
            (yo * 2 + yi, xo * 2 + xi) for yo, xo, yi, xi in itertools.product(range(2), range(2), range(2), range(2))
        ]

    def test_row_31_reorder_of_a_reduction(self) -> None:
        ordered = t.reorder(default_schedule(MATMUL), "C.update", "k", "n", "m")
        joined = visited(ordered, "C")[35:]
        assert joined == [(m, n) for _, n, m in itertools.product(range(6), range(7), range(5))]

    def test_row_31_reorder_moves_only_the_loops_it_names(self) -> None:
        ordered = t.reorder(default_schedule(MATMUL), "C.update", "k", "m")
        assert [x.name for x in ordered.stage("C.update").loops] == ["k", "n", "m"]

    def test_row_35_a_vectorised_loop_is_vectors_in_the_text(self) -> None:
        p = program("b[y, x] = a[y, x] * 2.0", a="float32 4 16")
        assert "vf32x8" not in text(default_schedule(p))
        assert "*(vf32x8 *)(b" in text(t.vectorise(default_schedule(p), "b", "x"))

    def test_row_35_an_unrolled_loop_is_none_in_the_text(self) -> None:
        p = program("b[i] = a[i] * 2.0", a="float32 4")
        unrolled = text(t.unroll(default_schedule(p), "b", "i"))
        assert "for (" not in unrolled
        assert unrolled.count("b[") == 4

    def test_row_35_a_parallel_loop_runs_on_threads(self) -> None:
        assert "#pragma omp parallel for" in text(t.parallel(default_schedule(BLUR), "B", "y"))

    def test_a_large_room_in_an_unrolled_loop_is_declared_once(self) -> None:
        p = program("P[i, j] = A[i, j] + 1.0; Q[i, j] = P[i, j] * P[i, 7999 - j]", A="float32 3 8000")
        rooms = t.compute_at(t.unroll(default_schedule(p), "Q", "i"), "P", "Q", "i")
        assert text(rooms).count("[8000] __attribute__((aligned(64)));") == 1

    def test_large_rooms_are_shared_or_private_as_they_stand(self) -> None:
        p = program("P[i, j] = A[i, j] + 1.0; Q[i, j] = P[i, j] * P[i, 7999 - j]", A="float32 6 8000")
        shared = t.parallel(t.compute_root(default_schedule(p), "P"), "P", "j")
        shared = t.parallel(shared, "Q", "i")
        private = t.compute_at(t.parallel(default_schedule(p), "Q", "i"), "P", "Q", "i")
        for module in compiled([shared, private]):
            assert judged(p, inputs_of(p), module.run(inputs_of(p))).ok

    @pytest.mark.parametrize(
        ("site", "operations", "room"),
        [
            (None, 64 * 12, 0),  # every point of B computes nine taps of A
            ("root", 80 * 3 + 64 * 3, 10 * 8 * 4),
            ("y", 8 * (3 * 8 * 3) + 64 * 3, 3 * 8 * 4),  # three rows for every row
            ("x", 64 * (3 * 3) + 64 * 3, 3 * 4),
        ],
    )
    def test_row_36_recomputing_against_storing(self, site: str | None, operations: int, room: int) -> None:
        blur = default_schedule(BLUR)
        if site == "root":
            blur = t.compute_root(blur, "bx")
        elif site:
            blur = t.compute_at(blur, "bx", "B", site)
        assert run(blur).operations == operations
        assert alloc_bytes(build_tree(blur)) == room

    def test_row_36_a_room_may_stand_outside_of_where_it_is_filled(self) -> None:
        blur = t.store_root(t.compute_at(default_schedule(BLUR), "bx", "B", "x"), "bx")
        assert alloc_bytes(build_tree(blur)) == 10 * 8 * 4
        blur = t.store_at(blur, "bx", "B", "y")
        assert alloc_bytes(build_tree(blur)) == 3 * 8 * 4
        assert judged(BLUR, inputs_of(BLUR), interpreted(blur, inputs_of(BLUR))).ok

    def test_a_site_moves_with_the_loop_that_is_split_or_fused(self) -> None:
        blur = t.compute_at(default_schedule(BLUR), "bx", "B", "y")
        assert str(t.split(blur, "B", "y", 4).function("bx").computed) == "At(stage='B', loop='y.inner')"
        blur = t.compute_at(blur, "bx", "B", "x")
        assert str(t.fuse(blur, "B", "y", "x").function("bx").computed) == "At(stage='B', loop='y.x.fused')"

    def test_row_26_golden_tree_of_the_blur(self) -> None:
        blur = t.tile(default_schedule(BLUR), "B", ("y", 4), ("x", 4))
        blur = t.compute_at(blur, "bx", "B", "x.outer")
        blur = t.parallel(t.vectorise(t.unroll(blur, "bx", "y"), "B", "x.inner"), "B", "y.outer")
        assert render(build_tree(blur)) == "\n".join(
            [
                "parallel y.outer in 2",
                "  serial x.outer in 2",
                "    stack bx.tile: float32[6, 4]",
                "      unroll bx.y in 6",
                "        let bx.y.at",
                "          serial bx.x in 4",
                "            let bx.x.at",
                "              bx.tile[...] =",
                "      serial y.inner in 4",
                "        let y",
                "          vector x.inner in 4",
                "            B[...] =",
            ]
        )


TWICE = program("C[i, j] +=! A[i, k] * B[k, j]; D[i, j] = C[i, j] + C[i, 0]", A="float32 5 3", B="float32 3 7")
LATER_FIRST = program("p[i] = A[i] * 2.0; q[i] = p[i + 2] + p[i] * p[i + 1] where i in 6", A="float32 8")
FALLING = program("b[i, j] = a[6 - i, j] + a[i, 4 - j]", a="float32 7 5")
SMALLEST = program("m[r] <=! A[r, c] + 1.0; o[r, c] = A[r, c] - m[r]", A="float32 5 6")
PREDICATED = program("s[i] +=! A[j].when([j <= i], 0.0) where i in 5", A="float32 7")
PLACED = {
    "padded, in rows": (PADDED_BLUR, "bx: compute_root\nbx: compute_at B y"),
    "padded, in pairs of rows": (PADDED_BLUR, "B: split y 2\nbx: compute_root\nbx: compute_at B y.outer"),
    "padded, in points": (PADDED_BLUR, "B: fuse y x\nbx: compute_root\nbx: compute_at B y.x.fused"),
    "padded, stored outside": (PADDED_BLUR, "bx: compute_root\nbx: compute_at B x\nbx: store_at B y"),
    "in ragged tiles": (BLUR, "B: tile y 3 x 5\nbx: compute_root\nbx: compute_at B x.outer\nbx: split y 4\nbx: split x 3"),
    "in ragged vectors": (BLUR, "B: split x 3\nB: vectorise x.inner\nbx: compute_root\nbx: split x 3\nbx: vectorise x.inner"),
    "in ragged threads": (BLUR, "B: tile y 3 x 5\nB: parallel x.inner\nB: unroll y.inner"),
    "split twice": (BLUR, "B: split y 5\nB: split y.inner 2\nB: split y.outer 1"),
    "stretched": (BLUR, "bx: compute_root\nbx: split y 7\nbx: compute_at B y"),
    "fused": (MATMUL, "C.update: fuse m n\nC.update: split m.n.fused 4\nC.update: reorder k m.n.fused.outer"),
    "reads that move apart": (MIRROR, "P: compute_root\nP: compute_at R i"),
    "places from data": (GATHER, "t: compute_root\nt: compute_at o n"),
    "read at a place and at 0": (TWICE, "C: compute_at D i"),
    "read at a place and at 0, in columns": (TWICE, "D: reorder j i\nC: compute_at D j"),
    "read further on first": (LATER_FIRST, "p: compute_root\np: compute_at q i"),
    "read further on first, in tiles": (LATER_FIRST, "q: split i 4\np: compute_root\np: compute_at q i.outer\np: split i 3"),
    "read backwards": (FALLING, "a: cache b i stack\nb: split i 3"),
    "copied from the end": (FALLING, "b: split i 3\na: cache b i.outer stack"),
    "with a first value of its own": (SMALLEST, "m: compute_at o r"),
    "below a condition": (PREDICATED, "s.update: split i 2\ns.update: split j 3\ns.update: reorder j.outer i.outer"),
}


@pytest.mark.parametrize("what", sorted(PLACED))
def test_tiles_have_what_their_readers_need(what: str) -> None:
    scheduled, steps = PLACED[what]
    inputs = inputs_of(scheduled)
    verdict = judged(scheduled, inputs, interpreted(schedule_by_hand(scheduled, steps), inputs))
    assert verdict.ok, verdict.detail


def scatter(sign: str) -> Schedule:
    p = program(f"d[pos[n], c] {sign} x[n, c]", d="float32 6 3", x="float32 4 3", pos="int32 4")
    return default_schedule(p)


def writes(schedule: Schedule) -> str:
    """The stage of a scatter that scatters."""
    return schedule.functions[-1].stages[-1].name


REFUSED: dict[str, tuple[str, Callable[[], Schedule]]] = {
    "no such stage": ("schedule-name", lambda: t.split(default_schedule(BLUR), "C", "y", 2)),
    "no such loop": ("schedule-name", lambda: t.split(default_schedule(BLUR), "B", "z", 2)),
    "no such function": ("schedule-name", lambda: t.inline(default_schedule(BLUR), "q")),
    "a loop twice": ("schedule-name", lambda: t.reorder(default_schedule(BLUR), "B", "y", "y")),
    "factor 0": ("schedule-extent", lambda: t.split(default_schedule(BLUR), "B", "y", 0)),
    "factor too large": ("schedule-extent", lambda: t.split(default_schedule(BLUR), "B", "y", 9)),
    "fused inside out": ("schedule-fuse", lambda: t.fuse(default_schedule(BLUR), "B", "x", "y")),
    "fused around a producer": (
        "schedule-fuse",
        lambda: t.fuse(t.compute_at(default_schedule(BLUR), "bx", "B", "y"), "B", "y", "x"),
    ),
    "outer loop a vector": ("schedule-vector-inner", lambda: t.vectorise(default_schedule(BLUR), "B", "y")),
    "vector reordered outwards": (
        "schedule-vector-inner",
        lambda: t.reorder(t.vectorise(default_schedule(BLUR), "B", "x"), "B", "x", "y"),
    ),
    "producer in a vector": (
        "schedule-vector-inner",
        lambda: t.compute_at(t.vectorise(default_schedule(BLUR), "B", "x"), "bx", "B", "x"),
    ),
    "split after marking": (
        "schedule-marked",
        lambda: t.split(t.parallel(default_schedule(BLUR), "B", "y"), "B", "y", 2),
    ),
    "parallel reduction": ("schedule-dependence", lambda: t.parallel(default_schedule(MATMUL), "C.update", "k")),
    "vector reduction": ("schedule-dependence", lambda: t.vectorise(default_schedule(MATMUL), "C.update", "k")),
    "parallel fused reduction": (
        "schedule-dependence",
        lambda: t.parallel(t.fuse(default_schedule(MATMUL), "C.update", "n", "k"), "C.update", "n.k.fused"),
    ),
    "parallel scatter": ("schedule-dependence", lambda: t.parallel(scatter("+=."), writes(scatter("+=.")), "n")),
    "reordered writes": ("schedule-dependence", lambda: t.reorder(scatter("=."), writes(scatter("=.")), "c", "n")),
    "shared room": (
        "schedule-dependence",
        lambda: t.store_root(t.compute_at(t.parallel(default_schedule(BLUR), "B", "y"), "bx", "B", "y"), "bx"),
    ),
    "not around its readers": (
        "schedule-scope",
        lambda: t.compute_at(default_schedule(PROGRAMS["softmax"]), "mx", "s.update", "r"),
    ),
    "output in a loop": ("schedule-scope", lambda: t.compute_at(default_schedule(NARROW), "C", "D", "m")),
    "in its own loop": ("schedule-scope", lambda: t.compute_at(default_schedule(BLUR), "bx", "bx", "y")),
    "stored inside": (
        "schedule-scope",
        lambda: t.store_at(t.compute_at(default_schedule(BLUR), "bx", "B", "y"), "bx", "B", "x"),
    ),
    "reduction inlined": ("schedule-inline", lambda: t.inline(default_schedule(PROGRAMS["softmax"]), "mx")),
    "output inlined": ("schedule-inline", lambda: t.inline(default_schedule(NARROW), "C")),
    "needed for a check": ("schedule-inline", lambda: t.inline(default_schedule(PROGRAMS["gather"]), "t")),
    "too wide a vector": (
        "schedule-extent",
        lambda: t.vectorise(default_schedule(program("b[i] = a[i] + 1.0", a="float32 5000")), "b", "i"),
    ),
    "unrolled too often": (
        "schedule-extent",
        lambda: t.unroll(default_schedule(program("b[i] = a[i] + 1.0", a="float32 5000")), "b", "i"),
    ),
}


@pytest.mark.parametrize("what", sorted(REFUSED))
def test_row_29_an_illegal_step_is_refused(what: str) -> None:
    code, transform = REFUSED[what]
    with pytest.raises(ScheduleError) as refused:
        transform()
    assert refused.value.code == code


REASONS = (
    (BLUR, "bx: compute_root\nbx: compute_at B y\nbx: store_at B x", "bx is stored inside of where it is computed"),
    (PROGRAMS["softmax"], "mx: compute_at s.update r", "o reads mx outside of loop r of s.update"),
    (BLUR, "B: parallel y\nbx: compute_root\nbx: compute_at B y\nbx: store_root", "would share the storage of bx"),
    (PROGRAMS["scatter"], "d__1: compute_at z i", "scatter d__1 must be computed at root"),
    (NARROW, "C: compute_at D m", "output C must be computed at root"),
    (program("b[i, j] = a[i, j]", a="int8 65536 40000"), "b: fuse i j", "fused loop i.j.fused is too long"),
    (BLUR, "B: fuse y x\nB: split y.x.fused 8\nB: unroll y.x.fused.outer\nB: unroll y.x.fused.inner", None),
    (BLUR, "B: unroll y\nB: unroll x\nbx: compute_root\nbx: compute_at B x\nbx: unroll y", None),
    (program("b[i, j] = a[i, j]", a="int8 64 64"), "b: unroll i\nb: unroll j", "expected at most 512 copies, got 4096"),
    (program("b[i] = a[i]", a="int8 2048"), "b: vectorise i", "expected at most 1024 lanes, got 2048"),
    (
        program("p[i, j] = A[i, j] + 1.0; q[i, j] = p[i, j] + p[i, 63 - j]", A="float32 64 64"),
        "q: unroll i\np: compute_root\np: compute_at q i\np: unroll j",
        "p is unrolled too often",
    ),
    (PROGRAMS["scatter"], "d__1.update: parallel c", None),
    (BLUR, "B: split x 3 tail exact", "3 does not divide the 8 iterations of x"),
    (BLUR, "B: split x 8\nB: split y 8", None),
    (BLUR, "B: reorder x y\nB: split y 2\nB: fuse y.outer y.inner\nB: fuse x y.outer.y.inner.fused", None),
    (BLUR, "bx: inline\nbx: store_root", "bx is inlined and has no storage"),
    (BLUR, "B: split y 2 as a a", "has, or had, a loop a"),
    (MATMUL, "C.update: fuse m k", "k is not directly inside of m"),
)


@pytest.mark.parametrize(("scheduled", "steps", "reason"), REASONS)
def test_what_is_refused_is_refused_for_its_reason(scheduled: TensorProgram, steps: str, reason: str | None) -> None:
    if reason is None:
        schedule_by_hand(scheduled, steps)
        return
    with pytest.raises(ScheduleError, match=re.escape(reason)):
        schedule_by_hand(scheduled, steps)


@pytest.mark.parametrize("what", sorted(PLACED))
def test_nests_that_no_step_changes_are_those_of_all_steps(what: str) -> None:
    schedule = schedule_by_hand(*PLACED[what])
    assert infer_bounds(schedule) == infer_bounds(replace(schedule, nests=None))


def test_a_factor_is_at_most_the_extent_where_a_stage_is_computed() -> None:
    assert "serial bx.y.inner in 3" in render(build_tree(schedule_by_hand(*PLACED["stretched"])))


def test_the_page_on_schedules_says_what_happens() -> None:
    failed, tried = doctest.testfile(str(ROOT / "docs" / "schedule.md"), module_relative=False)
    assert not failed
    assert tried > 15


@pytest.mark.slow
@pytest.mark.emulator
def test_the_recipes_have_the_values_of_their_programs() -> None:
    failed, tried = doctest.testfile(str(ROOT / "docs" / "schedule_recipes.md"), module_relative=False)
    assert not failed
    assert tried > 10
