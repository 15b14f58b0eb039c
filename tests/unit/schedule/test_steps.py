"""Schedules by hand: text, JSON, Python, the kernels they make, and what is refused."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sampling import examples
from schedule_support import BLUR, MATMUL, SOFTMAX, compiled, inputs_of, interpreted, judged, program

import roller_svc
from roller_svc.cli import main
from roller_svc.compiler.request import build_request, request_json
from roller_svc.errors import ArgumentError, ScheduleError
from roller_svc.ir.program import TensorProgram
from roller_svc.ir.schedule_text import render
from roller_svc.schedule import build_tree
from roller_svc.schedule.by_hand import schedule_by_hand
from roller_svc.schedule.schedule import At
from roller_svc.schedule.steps import OPERATIONS, Step, apply_step

EXPRESSION = "C[m, n] +=! A[m, k] * B[k, n]"
INPUTS = {"A": ("float32", (50, 20)), "B": ("float32", (20, 30))}
STEPS = """# a tiled product
C.update: split m 8 as mo mi
C.update: reorder mo k mi n
C.update: vectorise n   # lanes
C.update: parallel mo
"""


def test_a_kernel_by_hand_has_the_values_of_the_program() -> None:
    kernel = roller_svc.compile(EXPRESSION, INPUTS, schedule=STEPS)
    generator = np.random.default_rng(1)
    a, b = (generator.random(shape, np.float32) for _, shape in INPUTS.values())
    np.testing.assert_allclose(kernel(A=a, B=b)["C"], a @ b, rtol=1e-5)
    assert "scheduled by hand" in kernel.source
    assert kernel.estimate is None
    assert kernel.candidates == ()


def test_intermediates_at_root_are_in_memory() -> None:
    """Each function at root is a launch; what they exchange is larger than a stack."""
    text = "t[i, j] = x[i, j] * 2.0; y[i, j] = t[j, i] + 1.0"
    steps = "t: compute_root\nt: parallel i\ny: parallel i\n"
    kernel = roller_svc.compile(text, {"x": ("float32", (2048, 2048))}, schedule=steps)
    x = np.random.default_rng(1).random((2048, 2048), np.float32)
    np.testing.assert_array_equal(kernel(x=x)["y"], (x * 2).T + 1)


SCALARS = (
    ("s[] +=! x[i].cast(`int8`)", "float32"),
    ("s[] +=! x[i]; y[i] = x[i] / s[]", "float32"),
    ("s[] >=! x[i]; y[i] = x[i] - s[]", "float32"),
    ("p[i] = x[i] * 2; q[i] = p[i] - x[i]; r[] +=! q[i]; u[i] = q[i] + r[]", "int16"),
)


@pytest.mark.parametrize(("text", "dtype"), SCALARS)
def test_scalars_that_launches_exchange_are_in_memory(text: str, dtype: str) -> None:
    x = np.arange(1, 38).astype(dtype)
    inputs = {"x": (dtype, (37,))}
    results = roller_svc.compile(text, inputs, schedule="")(x=x)
    for name, expected in roller_svc.reference(text, inputs, {"x": x}).items():
        np.testing.assert_allclose(results[name], expected, rtol=1e-5)


ACCUMULATED = """
C: split m 8 as mo mi
C: split n 32 as no ni
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
C: parallel no
"""


@pytest.mark.parametrize(
    ("dtype", "rows", "columns"), [("float32", 32, 64), ("float32", 29, 50), ("float16", 24, 64), ("int16", 17, 64)]
)
def test_a_reduction_is_accumulated_in_a_tile(dtype: str, rows: int, columns: int) -> None:
    """One nest sets, updates and writes a tile, in registers; also where it does not divide the columns."""
    inputs = {"A": (dtype, (rows, 40)), "B": (dtype, (40, columns))}
    kernel = roller_svc.compile(EXPRESSION, inputs, schedule=ACCUMULATED)
    generator = np.random.default_rng(1)
    a, b = (generator.integers(-4, 4, shape).astype(dtype) for _, shape in inputs.values())
    np.testing.assert_array_equal(kernel(A=a, B=b)["C"], a @ b)
    assert "C_acc_tile[" not in kernel.source


LANES_OF_LANES = """s: accumulate_at i
s.acc.update: split j 2 as a b
s.acc.update: rfactor b
s.acc.part: accumulate_at b
s.acc.part.acc.update: split a 2 as c d
s.acc.part.acc.update: rfactor c
s.acc.part.acc.part: accumulate_at c"""
LANES = "C.update: split k 4\nC.update: rfactor k.inner\n"
FACTORED = (
    (MATMUL, LANES + "C.part: vectorise k.inner\nC.part.update: reorder m n k.outer k.inner\nC.part.update: vectorise k.inner"),
    (MATMUL, "C: accumulate_at m\nC.acc.update: split k 5 as ko ki\nC.acc.update: rfactor ko\nC.acc.part.update: parallel ko"),
    (MATMUL, LANES + "C.part.update: split k.outer 1 as a b\nC.part.update: rfactor a\nC.part: compute_at C.update k.inner"),
    (MATMUL, "A: cache C.update k stack\n" + LANES),
    (MATMUL, LANES + "C.update: split k.inner 2\nC.update: rfactor k.inner.outer"),
    (
        SOFTMAX,
        "mx.update: split c 4\nmx.update: rfactor c.inner\ns: compute_at o r\nmx: compute_at o r\nmx.part: compute_at mx.update r",
    ),
    (program("s[] +=! x[i]", x="int8 37"), "s.acc.update: split i 8\ns.acc.update: rfactor i.outer"),
    (program("p[r] *=! x[r, c]", x="float32 3 7"), "p.update: split c 3\np.update: rfactor c.inner"),
    (program("s[i] >=! min(x[i, j], -5)", x="int8 2 13"), LANES_OF_LANES),  # a lane without an element
    (program("s[i] <=! max(x[i, j], 5)", x="int16 2 13"), LANES_OF_LANES),
)


@pytest.mark.parametrize(("scheduled", "steps"), FACTORED)
def test_iterations_of_a_reduction_have_accumulators(scheduled: TensorProgram, steps: str) -> None:
    """Those beyond the end of a ragged split add nothing."""
    schedule = schedule_by_hand(scheduled, steps)
    inputs = inputs_of(scheduled)
    assert any(f.name.endswith(".part") for f in schedule.functions)
    for values in (interpreted(schedule, inputs), *(module.run(inputs) for module in compiled([schedule]))):
        verdict = judged(scheduled, inputs, values)
        assert verdict.ok, verdict.detail


@pytest.mark.parametrize(
    ("steps", "code", "message", "hint"),
    [
        ("C.update: rfactor k", "schedule-scope", "k of C.update is not a loop of a split reduced axis", "C.update: split k 4"),
        ("C.update: split m 2\nC.update: rfactor m.inner", "schedule-scope", "m.inner of C.update is not", "C.update: split k 4"),
        ("C: split m 2\nC: rfactor m.inner", "schedule-scope", "m.inner of C is not a loop", None),
        ("C: add_threads t 0", "schedule-extent", "invalid number of threads: expected 1 to 1024, got 0", "C: add_threads t 64"),
        ("C: add_threads t 2000", "schedule-extent", "got 2000", "C: add_threads t 64"),
        ("C: add_threads m 8", "schedule-name", "had, a loop m", "C: add_threads m_new 8"),
    ],
)
def test_what_has_no_accumulators_or_threads_is_refused(steps: str, code: str, message: str, hint: str | None) -> None:
    with pytest.raises(ScheduleError) as refused:
        schedule_by_hand(MATMUL, steps)
    assert (refused.value.code, refused.value.hint) == (code, hint)
    assert message in refused.value.message


def test_what_cannot_be_accumulated_in_a_loop_is_refused() -> None:
    for steps, message in (
        ("C.update: accumulate_at m", "not the stage that writes C"),
        ("C: accumulate_at k", "C has no loop k"),
        ("C: store_in registers", "not stored in a loop"),
    ):
        with pytest.raises(ScheduleError, match=message):
            schedule_by_hand(MATMUL, steps)
    with pytest.raises(ScheduleError, match="is not a reduction"):
        schedule_by_hand(BLUR, "B: accumulate_at y")


REGIONS = (
    (  # as large as the tensor: all of it, without guards
        program("t[y] = a[y] * 2.0; o[y] = t[y - 1].when(y >= 1, 0.0) + t[y] + t[y + 1].when(y < 2, 0.0)", a="float32 3"),
        "t: compute_root\nt: compute_at o y",
        "stack t.tile: float32[3]\n    serial t.y in 3\n      t.tile[...] =",
    ),
    (  # of elements that data selects, all, in each dimension
        program("t[i, c] = a[i, c] * 2.0; o[n, c] = t[ids[n], c]", a="float32 4 3", ids="int32 5"),
        "t: compute_root\nt: compute_at o c",
        "stack t.tile: float32[4, 3]",
    ),
    (
        program("t[i] = a[i] * 2.0; o[n] = t[ids[n] % 4]", a="float32 8", ids="int32 5"),
        "t: compute_root\nt: compute_at o n",
        "stack t.tile: float32[8]",
    ),
    (  # of a tensor that is computed whole, also where its readers need less
        program("t[i] = a[i] * 2.0; o[r, i, j] = t[i] + t[j] + b[r] where i in 4, j in 4", a="float32 9", b="float32 2"),
        "t: compute_root\nt: compute_at o j\nt: store_at o r",
        "stack t.tile: float32[9]",
    ),
)


@pytest.mark.parametrize(("scheduled", "steps", "tile"), REGIONS)
def test_a_tile_has_the_region_that_is_written(scheduled: TensorProgram, steps: str, tile: str) -> None:
    schedule = schedule_by_hand(scheduled, steps)
    assert tile in render(build_tree.build_tree(schedule))
    inputs = inputs_of(scheduled)
    verdict = judged(scheduled, inputs, interpreted(schedule, inputs))
    assert verdict.ok, verdict.detail


def test_copies_and_accumulators_have_names_of_their_own() -> None:
    steps = "A: cache C.update k stack\nB: cache C.update k stack\nC.update: split k 4 as ko ki\nC.update: rfactor ki\n"
    schedule = schedule_by_hand(MATMUL, steps + "C.update: split ki 2 as a b\nC.update: rfactor a")
    assert [f.name for f in schedule.functions] == ["A.cache", "B.cache", "C.part", "C.part2", "C"]
    assert [f.computed for f in schedule.functions[:2]] == 2 * [At("C.part.update", "ki")]
    squares = program("o[i] = a[i] * 2.0; p[i] = o[i] + a[i]", ["o", "p"], a="float32 9")
    copied = schedule_by_hand(squares, "a: cache o i stack\na: cache p i stack")
    assert [f.name for f in copied.functions] == ["a.cache", "o", "a.cache2", "p"]


def test_a_function_in_a_loop_of_an_update_stays_there() -> None:
    text = "t[m, k] = A[m, k] * 2.0; C[m, n] +=! t[m, k] * B[k, n]"
    steps = "t: compute_root\nt: compute_at C.update m\nC: accumulate_at n"
    with pytest.raises(ScheduleError, match=r"C\.acc\.update"):
        roller_svc.compile(text, INPUTS, schedule=steps + "\nt: compute_at C.update m")
    tree = roller_svc.Schedule(text, INPUTS, steps=steps).tree()
    assert tree.index("C.acc.update.m") < tree.index("t.tile") < tree.index("C.acc.update.k")


def test_a_recurrence_is_refused() -> None:
    text = "h[t] = 0.5 * h[t - 1].when([t > 0], 0.0) + x[t]"
    with pytest.raises(ScheduleError, match="recurrences have no schedule"):
        roller_svc.compile(text, {"x": ("float32", (8,))}, schedule="")


@pytest.mark.parametrize("values", [("m", "2"), ("m", 2.0), ("m", True), ("m", 2, ["a"]), ("m", 2, None, "foo")])
def test_the_chained_form_checks_its_values(values: tuple[Any, ...]) -> None:
    with pytest.raises(ScheduleError) as refused:
        roller_svc.Schedule(EXPRESSION, INPUTS)["C"].split(*values)
    assert refused.value.code == "schedule-syntax"


def test_all_forms_are_one_schedule() -> None:
    schedule = roller_svc.Schedule(EXPRESSION, INPUTS, steps=STEPS)
    chained = roller_svc.Schedule(EXPRESSION, INPUTS)["C.update"].split("m", 8, ("mo", "mi")).reorder("mo", "k", "mi", "n")
    chained = chained.vectorise("n").parallel("mo")
    assert chained.schedule.text() == schedule.text() == STEPS.partition("\n")[2].replace("   # lanes", "")
    forms = [STEPS, schedule, schedule.text(), schedule.to_json(), schedule.to_json()["steps"], json.dumps(schedule.to_json())]
    requests = [build_request(EXPRESSION, INPUTS, schedule=form) for form in forms]
    assert len({request.schedule for request in requests}) == 1
    document: dict[str, Any] = request_json(requests[0])
    assert build_request(**document) == requests[0]
    assert schedule.check() == ()
    assert "parallel mo in 7" in schedule.tree()
    assert schedule.compile() is roller_svc.compile(EXPRESSION, INPUTS, schedule=STEPS)


def test_every_operation_has_a_method() -> None:
    assert set(OPERATIONS) <= set(dir(roller_svc.Schedule(EXPRESSION, INPUTS)["C"]))


REFUSED = (
    ("C.update split m 8", "schedule-syntax", "expected `:`", "STAGE: OPERATION FIELDS"),
    ("C: spilt m 8", "schedule-syntax", "unknown operation spilt", "split"),
    ("C: split m", "schedule-syntax", "expected factor", "split LOOP FACTOR"),
    ("C: split m x", "schedule-syntax", "got x", "split LOOP FACTOR"),
    ("C: split m 8 as a", "schedule-syntax", "two new names", "as OUTER INNER"),
    ("C: split m 8 as a b.c", "schedule-syntax", "invalid name 'b.c'", None),
    ("C: parallel m n", "schedule-syntax", "unexpected n", "STAGE: parallel LOOP"),
    ("C: split m 99", "schedule-extent", "expected 1 to 5, got 99", "C: split m 4"),
    ("C: split m 2 tail exact", "schedule-extent", "does not divide", "C: split m 2 tail guard"),
    ("C.update: vectorise m", "schedule-vector-inner", "innermost", "C.update: reorder n k m"),
    ("C.update: parallel k", "schedule-dependence", "same elements", "C.update: parallel m"),
    ("C.update: vectorise k", "schedule-dependence", "same elements", "C.update: reorder m k n"),
    ("C.update: fuse m k", "schedule-fuse", "not directly inside", "C.update: reorder m k n"),
    ("C.updat: unroll k", "schedule-name", "no stage C.updat", "C.update: unroll k"),
    ("C.update: split m 2\nC.update: parallel m", "schedule-name", "no loop m", "C.update: parallel m.outer"),
    ("C.update: parallel m\nC.update: split m 2", "schedule-marked", "already marked", "C.update: serial m"),
    ("C: rename m n", "schedule-name", "had, a loop n", "C: rename m n_new"),
    ("C: split m 2 as n q", "schedule-name", "had, a loop n", "C: split m 2 as n_outer q_inner"),
    ("C: inline", "schedule-inline", "output C", None),
    ("C: split m 2\n" * 257, "schedule-syntax", "too many steps", None),
    ("#" * 70_000, "schedule-syntax", "too long", None),
    ('{"format": "roller-schedule/2", "steps": []}', "schedule-syntax", "roller-schedule/1", None),
    ('{"format": "roller-schedule/1", "steps": [], "step": 1}', "schedule-syntax", "no field 'step'", "steps"),
    ('{"format": "roller-schedule/1", "program": "sha256:0", "steps": []}', "schedule-program", "another program", "leave out"),
    ("[1]", "schedule-syntax", "field op", None),
    ('[{"op": "splitt"}]', "schedule-syntax", "unknown operation 'splitt'", "split"),
    ('[{"op": "split", "stage": "C", "loop": "m", "factor": true}]', "schedule-syntax", "a whole number, got True", None),
    ('[{"op": "split", "stage": "C", "loop": "m", "factr": 8}]', "schedule-syntax", "no field 'factr'", "factor"),
    ('[{"op": "unroll", "stage": "C"}]', "schedule-syntax", "expected loop to be a name, got None", None),
    ("[" * 60_000, "schedule-syntax", "", None),
    ('[{"op": "unroll", "stage": "C", "loop": "\\ud800"}]', "schedule-syntax", "invalid name", None),
)


@pytest.mark.parametrize(("text", "code", "message", "hint"), REFUSED)
def test_what_is_wrong_is_said_with_its_place(text: str, code: str, message: str, hint: str | None) -> None:
    with pytest.raises(ScheduleError) as refused:
        schedule_by_hand(MATMUL, text)
    error = refused.value
    assert error.code == code
    assert message in error.message
    assert (hint or "") in (error.hint or "")
    if hint and hint.startswith("C"):  # it is a step, and legal in place of the last one
        schedule_by_hand(MATMUL, "\n".join([*text.split("\n")[:-1], hint]))


def test_a_step_checks_the_launches_that_it_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """So a schedule of many statements is checked in the time of its steps, not of steps times statements."""
    lines = [f"t{i + 1}[i, j] = t{i}[i, j] + t{i}[j, i]" for i in range(30)]
    chain = program(";".join(lines), t0="float32 9 9")
    schedule = schedule_by_hand(chain, "\n".join(f"t{i}: compute_root" for i in range(1, 30)))
    checked: list[int] = []
    monkeypatch.setattr(build_tree, "check", lambda nodes, buffers: checked.append(len(nodes)))
    split = apply_step(schedule, Step("split", "t7", (("loop", "i"), ("factor", 4))))
    assert len(checked) == 1
    apply_step(split, Step("inline", "t7"))
    assert len(checked) == 2
    assert split.nests is not None
    assert schedule.nests is not None
    assert split.nests.nests["t8"] is schedule.nests.nests["t8"]


DEEP = (
    ("\n".join(["b: split i 2", *(f"b: split i{'.inner' * n} 2" for n in range(1, 40))]), "at most 32 loops around it, got 33"),
    (
        "\n".join(
            f"b: split {x} 2 as o{n} i{n}\nb: fuse o{n} i{n}" for n, x in enumerate(["i", *(f"o{n}.i{n}.fused" for n in range(40))])
        ),
        "nodes",
    ),
)


@pytest.mark.parametrize(("steps", "message"), DEEP)
def test_a_nest_that_is_too_deep_is_refused(steps: str, message: str) -> None:
    with pytest.raises(ScheduleError, match=message) as refused:
        schedule_by_hand(program("b[i] = a[i] + 1.0", a="float32 1024"), steps)
    assert refused.value.code == "schedule-extent"


def test_an_axis_that_indexes_a_scatter_may_be_parallel() -> None:
    text = "d[pos[n], c] =. x[n, c] * 2.0"
    scatter = program(text, d="float32 6 13", x="float32 9 13", pos="int32 9")
    steps = "d__1.update: split c 4\nd__1.update: vectorise c.inner\nd__1.update: parallel c.outer"
    (module,) = compiled([schedule_by_hand(scatter, steps)])
    inputs = inputs_of(scatter)
    verdict = judged(scatter, inputs, module.run(inputs))
    assert verdict.ok, verdict.detail
    with pytest.raises(ScheduleError, match="may write the same elements") as refused:
        schedule_by_hand(scatter, "d__1.update: parallel n")
    assert refused.value.hint == "d__1.update: parallel c"


def test_a_problem_has_its_step_and_line() -> None:
    (problem,) = roller_svc.Schedule(EXPRESSION, INPUTS, steps="\n# first\nC: split m 8\n  C: split m 8  # again").check()
    assert (problem.step, problem.rule, problem.line, problem.column) == (1, "name", 4, 3)
    with pytest.raises(ScheduleError, match="C: split m 8") as refused:
        roller_svc.compile(EXPRESSION, INPUTS, schedule="\n# first\nC: split m 8\n  C: split m 8  # again")
    assert "4 |   C: split m 8" in str(refused.value)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"family": "simt"}, "family and schedule exclude each other"),
        ({"tiles": {"split_k": 2}}, "tiles and schedule exclude each other"),
        ({"constants": ["B"]}, "constants and schedule exclude each other"),
        ({"max_workspace_bytes": 0}, "max_workspace_bytes and schedule exclude each other"),
        ({"target": "graphcore-mk2"}, "for CPUs and GPUs"),
    ],
)
def test_options_that_a_schedule_excludes(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        roller_svc.compile(EXPRESSION, INPUTS, schedule=STEPS, **options)


def test_other_devices_than_cpus_and_gpus_have_no_schedule(capsys: pytest.CaptureFixture[str]) -> None:
    schedule = roller_svc.Schedule(EXPRESSION, INPUTS, "graphcore-mk2", STEPS)
    tune = partial(roller_svc.tune, EXPRESSION, INPUTS, "graphcore-mk2")
    estimate = partial(roller_svc.estimate, EXPRESSION, INPUTS, targets=["graphcore-mk2"], schedule=STEPS)
    for call in (schedule.check, schedule.cost, tune, estimate):
        with pytest.raises(ArgumentError, match="for CPUs and GPUs"):
            call()
    words = [EXPRESSION, "--input", "A=float32[50,20]", "--input", "B=float32[20,30]", "--target", "graphcore-mk2"]
    assert main(["explain", *words, "--as-schedule"]) == 0
    assert "graphcore-mk2 is neither" in capsys.readouterr().out


def test_the_command_line_prints_no_source_that_its_device_cannot_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "steps").write_text("b: split i 4")
    words = ["schedule", "apply", str(tmp_path / "steps"), "b[i] = a[i] * 2.0", "--input", "a=float32[64]", "--target"]
    assert main([*words, "cpu-x86-avx2"]) == 0
    assert "scheduled by hand" in capsys.readouterr().out
    assert main([*words, "nvidia-h200-sxm"]) == 2
    assert "a launch of nvidia-h200-sxm without blocks" in capsys.readouterr().err
    words[1] = "check"
    assert main([*words, "nvidia-h200-sxm"]) == 2
    assert "a launch of nvidia-h200-sxm without blocks" in "".join(capsys.readouterr())
    assert main([*words, "cpu-x86-avx2"]) == main(words[:-1]) == 0


def test_a_schedule_is_no_other_program_s() -> None:
    document = roller_svc.Schedule(EXPRESSION, INPUTS, steps=STEPS).to_json()
    other = INPUTS | {"B": ("float32", (20, 31))}
    with pytest.raises(ScheduleError) as refused:
        roller_svc.compile(EXPRESSION, other, schedule=document)
    assert refused.value.code == "schedule-program"
    roller_svc.Schedule(EXPRESSION, other, steps=document["steps"]).tree()


WORDS = ("C", "C.update", "bx", "B", ":", "\n", "#", "m", "64", "-1", "as", "tail", *OPERATIONS, '"', "{", "[", "\0", "é")
FIELDS = ("op", "stage", "loop", "factor", "steps", "names", *WORDS)


def is_read_or_refused(source: object) -> bool:
    """Whether a schedule is applied to both programs, or refused by a rule of schedules."""
    for each in (MATMUL, BLUR):
        try:
            schedule_by_hand(each, source)
        except ScheduleError as error:
            if not error.code.startswith("schedule-"):
                return False
    return True


@settings(max_examples=examples(300))
@given(text=st.one_of(st.lists(st.sampled_from(WORDS), max_size=24).map(" ".join), st.text(max_size=40)))
def test_any_text_is_read_or_refused(text: str) -> None:
    assert is_read_or_refused(text)


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.sampled_from(FIELDS),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from(FIELDS), inner, max_size=4),
    max_leaves=8,
)


@settings(max_examples=examples(300))
@given(document=json_values)
def test_any_document_is_read_or_refused(document: object) -> None:
    assert is_read_or_refused(document)
