"""build_kernel: plans, fallbacks, what is measured, what is reported."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest

from roller_svc import hardware
from roller_svc.compiler import autotune, pipeline
from roller_svc.compiler.backends import BACKENDS
from roller_svc.compiler.lower_and_emit import emit_plan, emit_plans
from roller_svc.compiler.pipeline import build_kernel
from roller_svc.compiler.plans import best_plans, merge_ranked_plans, rank_best_partition
from roller_svc.errors import ArgumentError, CompileError, ToolchainMissingError
from roller_svc.frontend.parse import parse
from roller_svc.ir.dtype import DType
from roller_svc.ir.estimate import Candidate
from roller_svc.ir.hardware import TargetKind
from roller_svc.ir.kernel import CompiledKernel, KernelSource, Resources
from roller_svc.ir.options import MAX_TOP_K, SelectionMode
from roller_svc.ir.program import TensorType
from roller_svc.ir.report import BuildRequest
from roller_svc.runtime.cpu import CpuModule
from roller_svc.semantics.compare import agrees
from roller_svc.semantics.inputs import random_inputs
from roller_svc.semantics.interpreter import evaluate
from roller_svc.toolchain import compile_source

MATMUL = BuildRequest(
    "C[m,n] +=! A[m,k]*B[k,n]",
    (("A", TensorType(DType.FLOAT32, (64, 48))), ("B", TensorType(DType.FLOAT32, (48, 80)))),
    top_k=3,
)


def test_plans_are_the_least_sums_over_groups() -> None:
    report = build_kernel(replace(MATMUL, select=SelectionMode.MODEL))
    one = report.results[0].plan.choices[0]

    def candidate(seconds: float) -> Candidate:
        return replace(one, estimate=replace(one.estimate, seconds=seconds))

    ranked = (tuple(map(candidate, (1.0, 2.0, 5.0))), tuple(map(candidate, (1.0, 1.5))))
    sums = [plan.estimate.seconds for plan in best_plans(ranked, 4)]
    assert sums == [2.0, 2.5, 3.0, 3.5]
    assert len(best_plans(ranked, 100)) == 6


def test_measured_candidates_are_best_first_and_stages_are_reported() -> None:
    report = build_kernel(MATMUL)
    times = [a.measurement.min_s for a in report.results if a.measurement]
    assert len(times) == 3
    assert times == sorted(times)
    stages = ["parse", "hardware", "construct", "compile", "measure", "settle"]
    assert [stage for stage, _ in report.stage_seconds] == stages


@pytest.mark.slow
def test_candidates_of_one_text_are_right_each_and_the_winner_stands_alone() -> None:
    """Several plans go through one run of the compiler; what is delivered holds one plan's kernel only."""
    split = replace(MATMUL, expression="C[m, n] +=! A[m, k] * B[k, n]; Y[m] +=! C[m, n]", outputs=("C", "Y"))
    for request in (MATMUL, split):
        program = parse(request.expression, dict(request.inputs), request.outputs)
        hw = hardware.load("local")
        groups, ranked, _ = rank_best_partition(program, hw, 6)
        plans = best_plans(ranked, 6)
        sources = emit_plans(plans, program, groups, hw)
        assert len({source.text for source in sources}) == 1
        arrays = random_inputs(program, seed=3)
        want = evaluate(program, arrays)
        compiled = compile_source(sources[0])
        for source in sources:
            got = CpuModule(replace(compiled, source=source)).run(arrays)
            assert agrees(program, got, want).ok
        report = build_kernel(request)
        assert report.winner.source == emit_plan(report.winner.plan, report.program, report.groups, report.hardware)
        assert report.winner.measurement is not None


def test_plans_share_what_they_have_in_common() -> None:
    """Ten plans of four groups differ in one or two of them: each group's tiles stand in the text once."""
    types = {n: TensorType(DType.FLOAT32, (2, 48, 16)) for n in "qkv"}
    program = parse("s[h, i, j] +=! q[h, i, d] * k[h, j, d]; Y[h, i, d] +=! s[h, i, j] * v[h, j, d]", types, ("Y",))
    hw = hardware.load("local")
    groups, ranked, _ = rank_best_partition(program, hw, 6)
    plans = best_plans(ranked, 6)
    sources = emit_plans(plans, program, groups, hw)
    choices = {(g.name, c.program) for plan in plans for g, c in zip(groups, plan.choices, strict=True)}
    assert len(choices) < len(plans) * len(groups)
    assert len(set(re.findall(r"void (?:tasks_)?(choice\w+)\(", sources[0].text))) == len(choices)
    arrays = random_inputs(program, seed=1)
    compiled, want = compile_source(sources[0]), evaluate(program, arrays)
    assert all(agrees(program, CpuModule(replace(compiled, source=s)).run(arrays), want).ok for s in sources)


def test_the_launches_of_a_program_are_one_parallel_region_on_a_cpu() -> None:
    types = {n: TensorType(DType.FLOAT32, (2, 48, 16)) for n in "qkv"}
    text = "s[h, i, j] +=! q[h, i, d] * k[h, j, d]; m[h, i] >=! s[h, i, j]; e[h, i, j] = (s[h, i, j] - m[h, i])"
    text += ".call(`exp`); z[h, i] +=! e[h, i, j]; Y[h, i, d] +=! e[h, i, j] * v[h, j, d] / z[h, i]"
    report = build_kernel(BuildRequest(text, tuple(types.items()), outputs=("Y",), select=SelectionMode.MODEL))
    source = report.winner.source
    assert len(report.groups) > 1
    assert source is not None
    assert [launch.name for launch in source.launches] == [f"{source.name}_kernel"]
    assert source.text.count("#pragma omp parallel") == 1
    arrays = random_inputs(report.program, seed=0)
    assert report.winner.compiled is not None
    got = CpuModule(report.winner.compiled).run(arrays)
    assert agrees(report.program, got, evaluate(report.program, arrays)).ok


def test_a_text_of_several_plans_that_does_not_compile_is_taken_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(source: KernelSource) -> CompiledKernel:
        if "choice1_" in source.text:
            raise CompileError("no", log="one of them")
        return compile_source(source)

    monkeypatch.setattr(autotune, "compile_source", compiler)
    report = build_kernel(MATMUL)
    assert all(attempt.error is None for attempt in report.results)


def test_every_stage_is_traced() -> None:
    seen: dict[str, Any] = {}

    def watch(stage: str, value: Any) -> Any:
        seen[stage] = value
        return value

    build_kernel(replace(MATMUL, select=SelectionMode.MODEL), watch)
    assert list(seen) == ["parse", "hardware", "construct", "shortlist", "report"]


def test_where_there_is_no_device_the_model_chooses_and_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = next(b for b in BACKENDS if b.family is TargetKind.CPU)
    absent = replace(backend, is_present=lambda _: False)
    monkeypatch.setattr(pipeline, "backend_for", lambda _: absent)
    report = build_kernel(MATMUL)
    assert report.winner.measurement is None
    assert "nothing was measured" in report.remarks[0]


def test_a_candidate_that_is_not_measured_was_chosen_by_the_caller(monkeypatch: pytest.MonkeyPatch) -> None:
    backend = next(b for b in BACKENDS if b.family is TargetKind.CPU)
    monkeypatch.setattr(pipeline, "backend_for", lambda _: replace(backend, is_present=lambda _: False))
    (remark,) = build_kernel(replace(MATMUL, candidate=2)).remarks
    assert remark.endswith("the caller chose")


@pytest.mark.parametrize(("top_k", "hint"), [(1, "a larger top_k may rank more candidates"), (MAX_TOP_K, "these are all")])
def test_a_candidate_beyond_the_last_is_refused(top_k: int, hint: str) -> None:
    copy = BuildRequest("y[i] = x[i]", (("x", TensorType(DType.FLOAT32, (8,))),), top_k=top_k, candidate=MAX_TOP_K)
    with pytest.raises(ArgumentError, match="candidate must be at most") as refused:
        build_kernel(copy)
    assert refused.value.hint == hint


def test_a_plan_that_does_not_compile_or_spills_gives_way_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[KernelSource] = []

    def compiler(source: KernelSource) -> CompiledKernel:
        made.append(source)
        if len(made) == 1:
            raise CompileError("no", log="because")
        return CompiledKernel(source, b"x", "", (Resources(spill_bytes=64 if len(made) == 2 else 0),))

    monkeypatch.setattr(autotune, "compile_source", compiler)
    report = build_kernel(replace(MATMUL, select=SelectionMode.MODEL))
    assert len(made) == 3
    assert report.winner.source is made[2]
    outcomes = [(a.error is None, a.compiled is not None) for a in report.results]
    assert outcomes[:3] == [(True, True), (True, True), (False, False)]


def test_when_nothing_compiles_the_best_plan_s_error_is_the_build_s(monkeypatch: pytest.MonkeyPatch) -> None:
    def compiler(source: KernelSource) -> CompiledKernel:
        raise CompileError("no", log="because")

    monkeypatch.setattr(autotune, "compile_source", compiler)
    with pytest.raises(CompileError) as caught:
        build_kernel(replace(MATMUL, select=SelectionMode.MODEL))
    assert caught.value.log == "because"


@pytest.mark.parametrize("target", ["nvidia-k80", "graphcore-mk2", "amd-mi300x"])
def test_devices_that_nothing_compiles_for_are_named_with_what_is_missing(target: str) -> None:
    with pytest.raises(ToolchainMissingError, match=r"sm_37|Poplar|hipcc"):
        build_kernel(replace(MATMUL, target=target))


def test_a_build_of_which_every_built_plan_failed_ends_with_their_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> CompiledKernel:
        raise CompileError("no plan compiles", log="because")

    monkeypatch.setattr(autotune, "compile_source", fail)
    # the shortlist then has plans that are not built
    monkeypatch.setattr(pipeline, "FALLBACK_PLANS", 1 - MATMUL.top_k)
    monkeypatch.setattr(pipeline, "select_for_measurement", lambda _, partitions, count: merge_ranked_plans(partitions, count))
    with pytest.raises(CompileError, match="no plan compiles"):
        build_kernel(replace(MATMUL, select=SelectionMode.MODEL))
