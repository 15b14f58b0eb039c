"""The model judged by measuring: which plans are tried, in which turns, how they are kept, and what is printed."""

from __future__ import annotations

import argparse
import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from roller_bench.cases import BenchCase
from roller_bench.cli.cpu import journal_of
from roller_bench.model.candidate_plans import sample_sizes, trial_plans
from roller_bench.model.measured_plans import plan_of, tiles_of
from roller_bench.model.random_tiles import random_rprograms
from roller_bench.model.report import read_measurements, report
from roller_bench.model.run import evaluate_case
from roller_bench.model.worker import Describe, LoadKernels, TimeKernel, local_spec, work
from roller_bench.timing_worker import Sample
from roller_svc import hardware
from roller_svc.cli import main
from roller_svc.compiler.autotune import build_candidates
from roller_svc.compiler.plans import rank_best_partition
from roller_svc.compiler.rank import rank_units
from roller_svc.errors import ArgumentError, InvariantError, NoCandidateError, WrongAnswerError
from roller_svc.families import prepare
from roller_svc.families.family import Family
from roller_svc.ir.group import KernelGroup
from roller_svc.ir.hardware import ComputeUnit, HardwareSpec
from roller_svc.perf.workload import Workload
from roller_svc.settings import Settings

F32 = "float32"
PRODUCT = BenchCase(
    "product",
    "gemm",
    "C[m, n] +=! A[m, k] * B[k, n]",
    {"A": {"dtype": F32, "shape": [96, 40]}, "B": {"dtype": F32, "shape": [40, 80]}},
    None,
)
CONVOLUTION = BenchCase(
    "convolution",
    "conv",
    "Y[n, f, h, w] +=! X[n, c, h + r, w + s] * W[f, c, r, s] where r in 3, s in 3, h in 12, w in 12",
    {"X": {"dtype": F32, "shape": [1, 8, 14, 14]}, "W": {"dtype": F32, "shape": [16, 8, 3, 3]}},
    None,
)
SOFTMAX = BenchCase(
    "softmax",
    "softmax",
    "M[a] >=! X[a, c]; E[a, c] = (X[a, c] - M[a]).call(`exp`); S[a] +=! E[a, c]; Y[a, c] = E[a, c] / S[a]",
    {"X": {"dtype": F32, "shape": [512, 96]}},
    ("Y",),
)
TWO = BenchCase(
    "two",
    "fused",
    "H[m, n] +=! A[m, k] * B[k, n]; C[m, j] +=! H[m, n] * D[n, j]",
    {"A": {"dtype": F32, "shape": [64, 32]}, "B": {"dtype": F32, "shape": [32, 64]}, "D": {"dtype": F32, "shape": [64, 48]}},
    ("C",),
)


@pytest.fixture(scope="module")
def hw() -> Any:
    return hardware.load("local")


@pytest.mark.parametrize("case", [PRODUCT, CONVOLUTION, SOFTMAX, TWO], ids=lambda case: case.id)
def test_drawn_plans_are_new_and_the_same_for_the_same_seed(case: BenchCase, hw: Any) -> None:
    program = case.program()
    trial = trial_plans(program, hw, 4, 6, "7")
    tiles = [tuple(c.program for c in plan.choices) for plan in trial.plans]
    assert len(set(tiles)) == len(tiles)
    assert 1 <= len(trial.ranked) <= 4
    assert 1 <= len(trial.drawn) <= 6
    assert trial.plans == trial_plans(program, hw, 4, 6, "7").plans


def test_each_kernel_of_a_plan_is_drawn(hw: Any) -> None:
    first, *_ = (trial := trial_plans(TWO.program(), hw, 4, 6, "7")).ranked
    changed = {
        tuple(mine.program != its.program for mine, its in zip(plan.choices, first.choices, strict=True)) for plan in trial.drawn
    }
    assert (True, True) in changed


def test_a_program_of_few_plans_is_drawn_whole(hw: Any) -> None:
    few = trial_plans(SOFTMAX.program(), hw, 1, 1000, "7")
    (group,) = few.groups
    everything = set(random_rprograms(group, hw, 1000, random.Random(2)))
    assert {plan.choices[0].program for plan in few.plans} == everything


def test_a_class_of_few_cases_draws_more_of_each() -> None:
    cases = [PRODUCT, replace(PRODUCT, id="other"), SOFTMAX]
    assert sample_sizes(cases, 10, 60) == {"gemm": 30, "softmax": 60}
    assert sample_sizes(cases, 40, 60) == {"gemm": 40, "softmax": 60}


def test_another_seed_draws_other_plans(hw: Any) -> None:
    program = PRODUCT.program()
    assert trial_plans(program, hw, 2, 5, "1").drawn != trial_plans(program, hw, 2, 5, "2").drawn


def test_random_tiles_reach_what_construction_leaves_out(hw: Any) -> None:
    """Construction builds blocks from the three best register tiles only."""
    (group,), _, _ = rank_best_partition(PRODUCT.program(), hw, 1)
    _, construction = rank_units(group, hw, 1)
    kept = {program.thread for program in construction.programs}
    drawn = random_rprograms(group, hw, 30, random.Random(1))
    assert len({program.thread for program in drawn} - kept) > len(kept)


@pytest.mark.parametrize("case", [PRODUCT, CONVOLUTION, SOFTMAX, TWO], ids=lambda case: case.id)
def test_tiles_are_kept_exactly(case: BenchCase, hw: Any) -> None:
    trial = trial_plans(case.program(), hw, 3, 5, "3")
    for plan in trial.plans:
        kept = json.loads(json.dumps(tiles_of(plan, trial.groups, hw)))
        assert plan_of(kept, trial.groups, hw) == plan


@pytest.mark.parametrize(
    "change", [{"reading": 9}, {"unit": "abacus"}, {"thread": {"m": 5}}, {"lanes": 0}, {"block": None}], ids=str
)
def test_tiles_that_fit_no_more_are_refused(change: dict[str, Any], hw: Any) -> None:
    trial = trial_plans(PRODUCT.program(), hw, 1, 0, "")
    (kernel,) = tiles_of(trial.ranked[0], trial.groups, hw)
    with pytest.raises(ArgumentError, match="do not fit") as refused:
        plan_of([kernel | change], trial.groups, hw)
    assert refused.value.code == "stale-measurements"


def test_the_worker_times_right_kernels_and_names_wrong_ones(hw: Any) -> None:
    program = PRODUCT.program()
    assert work(Describe("local", measure=False)) == hw
    trial = trial_plans(program, hw, 2, 1, "0")
    kernels = [a.compiled for a in build_candidates(trial.grouped, program, hw) if a.compiled is not None]
    other = replace(PRODUCT, expression="C[m, n] +=! A[m, k] * B[k, n] * B[k, n]")
    wrong_trial = trial_plans(other.program(), hw, 1, 0, "0")
    (wrong,) = build_candidates(wrong_trial.grouped, other.program(), hw)
    assert wrong.compiled is not None
    errors = work(LoadKernels(PRODUCT, (*kernels, wrong.compiled)))
    assert isinstance(errors, tuple)
    assert errors[:-1] == (None,) * len(kernels)
    assert isinstance(errors[-1], WrongAnswerError)
    sample = work(TimeKernel(0))
    assert isinstance(sample, Sample)
    assert sample.seconds == pytest.approx(sum(sample.call_seconds) / len(sample.call_seconds))


def test_a_smaller_target_gets_this_machines_cores() -> None:
    spec, local = local_spec("cpu-x86-avx2"), hardware.detect_local()
    assert (spec.id, spec.vector_bytes) == ("cpu-x86-avx2", 32)
    assert (spec.num_cores, spec.clock_hz) == (local.num_cores, local.clock_hz)


def corpus(tmp_path: Path, longer: str = "") -> Path:
    """Three cases; the one that is to be `longer` has another program."""
    file = tmp_path / f"cases{longer}.json"
    cases = [
        {"id": c.id, "cls": c.cls, "inputs": c.inputs, "outputs": c.outputs} | {"expr": c.expression + ";" * (c.id == longer)}
        for c in (PRODUCT, SOFTMAX, BenchCase("broken", "gemm", "C[m] = D[m]", PRODUCT.inputs, None))
    ]
    file.write_text(json.dumps({"cases": cases}), encoding="utf-8")
    return file


@pytest.mark.slow
def test_measured_plans_are_judged_and_judged_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    command = ["bench", "model", "--cases", str(corpus(tmp_path)), "--json"]
    assert main([*command, "--top", "2", "--sample", "2", "--class-sample", "0", "--uncalibrated"]) == 0
    text = capsys.readouterr().out
    document = json.loads(text)
    rows = {row["id"]: row for row in document["cases"]}
    assert "unknown-name" in rows["broken"]["error"]
    assert document["overall"]["cases"] == 2
    assert set(document["classes"]) == {"gemm", "softmax"}
    regrets = ("top1_regret_mean", "top1_regret_p90", "top3_regret_mean", "random_top3_regret_mean")
    for name in ("spearman", *regrets, "top10_regret_mean", "median_abs_log_ratio"):
        assert {name} <= document["overall"].keys() & document["classes"]["gemm"].keys()
    for row in (rows["product"], rows["softmax"]):
        time_calls = [c for c in row["candidates"] if c["error"] is None]
        assert row["best_s"] == min(c["quiet_s"] for c in time_calls)
        first, *others = sorted(time_calls, key=lambda c: c["predicted_s"])
        assert row["top1_regret"] == pytest.approx(first["quiet_s"] / row["best_s"] - 1)
        best_of_three_s = min(c["quiet_s"] for c in (first, *others[:2]))
        assert row["top3_regret"] == pytest.approx(best_of_three_s / row["best_s"] - 1)
    kept = tmp_path / "measured.json"
    kept.write_text(text, encoding="utf-8")
    assert main([*command, "--measurements", str(kept)]) == 0
    again = json.loads(capsys.readouterr().out)
    assert again["overall"] == document["overall"]
    assert main([*command[:-1], "--measurements", str(kept), "--only", "softmax"]) == 0
    shown = capsys.readouterr().out
    assert "softmax" in shown
    assert "gemm" not in shown
    changed = corpus(tmp_path, "softmax")
    assert main([*command[:2], "--cases", str(changed), "--json", "--measurements", str(kept)]) == 0
    errors = {row["id"]: row["error"] for row in json.loads(capsys.readouterr().out)["cases"]}
    assert errors["product"] is None
    assert errors["softmax"].startswith("stale-measurements")


def test_measurements_of_other_cases_are_refused(hw: HardwareSpec) -> None:
    document = {"cases": [ROW], "hardware": hardware.to_mapping(hw)}
    with pytest.raises(ArgumentError, match="no measured program is among the cases") as refused:
        report(document, {"other": PRODUCT})
    assert refused.value.code == "stale-measurements"


def test_a_run_goes_on_with_the_same_programs_only(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr("roller_bench.cli.cpu.settings", lambda: Settings(store=tmp_path))
    options = argparse.Namespace(resume=True)
    larger = replace(PRODUCT, inputs={name: value | {"shape": [64, 64]} for name, value in PRODUCT.inputs.items()})
    journal_of("model", options, [PRODUCT], []).add([{"id": PRODUCT.id}])
    assert journal_of("model", options, [PRODUCT], []).rows()
    assert not journal_of("model", options, [larger], []).rows()


def test_measurements_that_are_none_are_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    for content in ('{"cases": []}', "[]", "{"):
        file.write_text(content, encoding="utf-8")
        assert main(["bench", "model", "--cases", str(corpus(tmp_path)), "--measurements", str(file)]) == 2
        assert "no measurements of candidates" in capsys.readouterr().err


KERNEL: dict[str, Any] = {"reading": 0, "unit": "vector_f32", "block": {"m": 1}, "thread": {"m": 1}}
CANDIDATE: dict[str, Any] = {"error": None, "min_s": 1.0, "kernels": [KERNEL]}
ROW: dict[str, Any] = {"id": "product", "cls": "gemm", "error": None, "candidates": [CANDIDATE]}


@pytest.mark.parametrize(
    ("change", "where"),
    [
        ({}, None),
        ({"machine": {}}, "machine.cpu"),
        ({"cases": [{}]}, "cases.0.id"),
        ({"cases": [ROW, ROW]}, "duplicate case id"),
        ({"cases": [ROW | {"candidates": [CANDIDATE | {"min_s": None}]}]}, "cases.0.candidates.0"),
        ({"cases": [ROW | {"candidates": [CANDIDATE | {"min_s": 0.0}]}]}, "cases.0.candidates.0.min_s"),
        (
            {"cases": [ROW | {"candidates": [CANDIDATE | {"kernels": [KERNEL | {"reading": -1}]}]}]},
            "cases.0.candidates.0.kernels.0.reading",
        ),
        ({"hardware": {"id": "x"}}, "hardware: "),
    ],
    ids=lambda value: str(value)[:40],
)
def test_it_is_said_where_measurements_are_wrong(change: dict[str, Any], where: str | None, tmp_path: Path, hw: Any) -> None:
    right = {"machine": {"cpu": "a", "date": "2026"}, "settings": {"threads": 1}, "cases": [ROW],
             "hardware": hardware.to_mapping(hw)}  # fmt: skip
    file = tmp_path / "measured.json"
    file.write_text(json.dumps(right | change), encoding="utf-8")
    if where is None:
        assert read_measurements(file) == right
        return
    with pytest.raises(ArgumentError, match="no measurements of candidates") as refused:
        read_measurements(file)
    assert where in refused.value.message
    assert refused.value.code == "unreadable-file"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ("--every 0", "--every must be positive"),
        ("--sample -1", "--sample must not be negative"),
        ("--class-sample -1", "--class-sample must not be negative"),
        ("--published a --measurements b", "--published and --measurements"),
        ("--published a --top 3", "--published and --top"),
        ("--measurements a --target local", "--measurements and --target"),
        ("--measurements a --class-sample 3", "--measurements and --class-sample"),
        ("--measurements a --uncalibrated", "--measurements and --uncalibrated"),
    ],
)
def test_options_that_mean_nothing_or_would_be_ignored_are_refused(
    given: str, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "model", *given.split()]) == 2
    assert said in capsys.readouterr().err


@pytest.mark.slow
def test_what_was_measured_outlives_a_failure_to_report_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(*_: object) -> None:
        raise ArgumentError("no report")

    never = pytest.MonkeyPatch()  # on a busy machine the case would come once more
    never.setattr("roller_bench.interleaved_timing.InterleavedSamples.is_disturbed", False)
    monkeypatch.setattr("roller_bench.cli.model.report", failing)
    command = ["bench", "model", "--cases", str(corpus(tmp_path)), "--only", "softmax", "--top", "1", "--sample", "0",
               "--class-sample", "0", "--uncalibrated"]  # fmt: skip
    assert main(command) == 2
    monkeypatch.undo()
    capsys.readouterr()
    assert main([*command, "--resume"]) == 0
    never.undo()
    shown = capsys.readouterr()
    assert "candidates" not in shown.err  # nothing was measured again
    assert "softmax" in shown.out


def test_a_reading_without_rules_is_left_out(monkeypatch: pytest.MonkeyPatch, hw: Any) -> None:
    (group,), _, _ = rank_best_partition(CONVOLUTION.program(), hw, 1)
    spaces = {program.space for program in random_rprograms(group, hw, 30, random.Random(1))}
    assert len(spaces) > 1

    def plain_only(view: KernelGroup, hw: HardwareSpec, unit: ComputeUnit) -> tuple[Family[Any], Workload[Any]]:
        if view == group:
            return prepare(view, hw, unit)
        raise NoCandidateError("no rules")

    def none_at_all(*_: object) -> tuple[Family[Any], Workload[Any]]:
        raise NoCandidateError("no rules")

    monkeypatch.setattr("roller_bench.model.random_tiles.prepare", plain_only)
    assert {program.space for program in random_rprograms(group, hw, 30, random.Random(1))} == {group.space}
    monkeypatch.setattr("roller_bench.model.random_tiles.prepare", none_at_all)
    assert random_rprograms(group, hw, 30, random.Random(1)) == ()


def test_only_cpus_are_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    assert main(["bench", "model", "--cases", str(corpus(tmp_path)), "--target", "nvidia-h200-sxm"]) == 2
    assert "is not a CPU" in capsys.readouterr().err


def test_stale_rows_are_said_and_not_counted(hw: Any) -> None:
    row = {"candidates": [{"error": None, "kernels": [], "min_s": 1.0}]}
    with pytest.raises(ArgumentError, match="do not fit"):
        evaluate_case(row, PRODUCT, hw)


def test_kernels_are_held_only_for_a_known_spec(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roller_bench.model.worker._state.hardware", None)
    with pytest.raises(InvariantError, match="expected the task Describe"):
        work(LoadKernels(PRODUCT, ()))
