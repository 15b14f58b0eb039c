"""Lint of a case file: rows, figures, worker processes, an interrupted run."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from roller_bench.cases import BenchCase
from roller_bench.lint import LintTask, batch_tasks, lint_cases, summary
from roller_svc import settings
from roller_svc.cli import main
from roller_svc.errors import BuildServiceError
from roller_svc.toolchain.binaries import sass

TARGET = "nvidia-l40s"
MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
BAD = BenchCase("bad", "gemm", "C[m] = A[q", {}, None)


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path) -> None:
    settings.use(settings.read_settings(store=tmp_path / "store"))


def matmul(name: str, dtype: str, m: int, n: int, k: int) -> BenchCase:
    inputs = {"A": {"dtype": dtype, "shape": [m, k]}, "B": {"dtype": dtype, "shape": [k, n]}}
    return BenchCase(name, "gemm", MATMUL, inputs, None)


def test_a_row_says_what_was_compiled() -> None:
    cases = (matmul("fp32", "float32", 128, 128, 128), BAD, matmul("ints", "int32", 64, 64, 64))
    row, refused, ints = lint_cases(LintTask(cases, TARGET))
    assert refused == {"id": "bad", "cls": "gemm", "error": refused["error"]}
    assert refused["error"].startswith("unbalanced-bracket: ")
    assert ints["id"] == "ints"
    assert ints["instructions"]["IMAD"] > 0
    assert (row["id"], row["cls"], row["error"]) == ("fp32", "gemm", None)
    assert row["kernels"] == len(row["launches"]) >= 1
    assert row["instructions"]["FFMA"] == sum(launch["counts"].get("FFMA", 0) for launch in row["launches"]) > 0
    assert row["registers"] == max(launch["registers_per_thread"] for launch in row["launches"])
    assert row["half_contractions"] == row["tensor_core_contractions"] == row["warpgroup_contractions"] == 0
    assert row["compile_seconds"] > 0
    assert row["spill_bytes"] == 0
    assert json.loads(json.dumps(row)) == row


def test_a_scatter_to_a_large_target_is_one_reduction_an_update() -> None:
    """The counts stay: no load of the bin, no compare-and-swap, no result that is waited for."""
    inputs = {"grid": {"dtype": "int32", "shape": [1 << 20]}, "at": {"dtype": "int32", "shape": [4000001]}}
    (row,) = lint_cases(LintTask((BenchCase("bins", "scatter", "grid[at[n]] +=. 1", inputs, None),), "nvidia-h200-sxm"))
    _, update = row["launches"]
    memory = {name: count for name, count in update["counts"].items() if name.startswith(("LD", "ST", "RED", "ATOM"))}
    assert memory == {"LDG.32": 1, "REDG": 1}
    assert row["findings"] == []


def test_tasks_have_all_cases_in_order() -> None:
    cases = [matmul(str(i), "float32", 8, 8, 8) for i in range(7)]
    tasks = batch_tasks(cases, TARGET, 3)
    assert [len(task.cases) for task in tasks] == [3, 3, 1]
    assert [case for task in tasks for case in task.cases] == cases


def built(spills: tuple[int, ...], halves: int, on_tensor_cores: int, seconds: float) -> dict[str, Any]:
    return {
        "launches": [{"spill_bytes": spill} for spill in spills],
        "c75xx": 1,
        "half_contractions": halves,
        "tensor_core_contractions": on_tensor_cores,
        "warpgroup_contractions": on_tensor_cores // 2,
        "compile_seconds": seconds,
        "findings": [{"kind": "spill"}],
        "error": None,
    }


def test_figures_of_a_target() -> None:
    rows = [built((0, 8), 3, 2, 1.0), built((0, 0), 0, 0, 3.0), built((0,), 1, 1, 2.0), {"error": "no-candidate: no"}]
    assert summary(rows) == {
        "kernels": 5,
        "zero_spill_share": 0.8,
        "c75xx": 3,
        "half_contractions": 4,
        "tensor_core_share": 0.75,
        "warpgroup_share": 0.25,
        "compile_median_s": 2.0,
        "compile_p95_s": 3.0,
        "errors": 1,
        "findings": {"spill": 3},
    }
    nothing = summary([])
    assert nothing["zero_spill_share"] is nothing["tensor_core_share"] is nothing["compile_p95_s"] is None


def write_cases(path: Path) -> Path:
    shape = {"dtype": "float16", "shape": [64, 64]}
    cases = [
        {"id": "good", "cls": "gemm", "expr": MATMUL, "inputs": {"A": shape, "B": shape}},
        {"id": "bad", "expr": "C[m] = A[q", "inputs": {"A": shape}},
        {"id": "other", "expr": "C[m, n] = A[m, n]", "inputs": {"A": shape}, "use": ["correctness"]},
    ]
    path.write_text(json.dumps({"cases": cases}), encoding="utf-8")
    return path


def test_bench_lint(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_cases(tmp_path / "cases.json")
    words = ["bench", "lint", "--cases", str(path), "--target", TARGET, "--jobs", "1", "--json"]
    monkeypatch.setattr("roller_svc.cli.journal.Journal.drop", lambda self: None)
    assert main(words) == 0
    first = json.loads(capsys.readouterr().out)["targets"][TARGET]
    assert set(first) >= {
        "kernels",
        "zero_spill_share",
        "c75xx",
        "tensor_core_share",
        "warpgroup_share",
        "compile_median_s",
        "compile_p95_s",
        "cases",
    }
    assert [row["id"] for row in first["cases"]] == ["good", "bad"]
    assert first["half_contractions"] == first["cases"][0]["half_contractions"] == 1
    assert first["errors"] == 1
    monkeypatch.setattr(
        "roller_bench.cli.map_unordered", lambda work, tasks, jobs, timeout: iter([(task, 1 / 0) for task in tasks])
    )
    assert main([*words, "--resume"]) == 0
    assert json.loads(capsys.readouterr().out)["targets"][TARGET] == first


@pytest.mark.parametrize("words", [("--target", "local"), ("--jobs", "0"), ("--every", "0"), ("--cases", "nowhere")])
def test_bench_lint_refuses(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    assert main(["bench", "lint", *words]) == 2


def test_without_a_disassembler_nothing_is_built(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sass, "wheel_roots", list)
    monkeypatch.setattr(sass, "_SYSTEM", tmp_path / "nvdisasm")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert main(["bench", "lint", "--target", TARGET]) == 3
    assert "roller-svc[cuda]" in capsys.readouterr().err


def test_cases_of_a_task_that_is_lost_are_tried_alone(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def crashing(work: object, tasks: list[LintTask], *_: object) -> Iterator[tuple[LintTask, object]]:
        for task in tasks:
            if BAD.id in [case.id for case in task.cases]:
                yield task, BuildServiceError("the worker process died", code="worker-lost")
            else:
                yield task, lint_cases(task)

    monkeypatch.setattr("roller_bench.cli.map_unordered", crashing)
    path = write_cases(tmp_path / "cases.json")
    assert main(["bench", "lint", "--cases", str(path), "--target", TARGET, "--json"]) == 0
    good, bad = json.loads(capsys.readouterr().out)["targets"][TARGET]["cases"]
    assert good["error"] is None
    assert bad["error"] == "worker-lost: the worker process died"
