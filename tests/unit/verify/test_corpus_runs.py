"""Corpus cases judged on several random inputs each."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from emulator_support import cuda
from reference_kernels import tensor

from roller_svc.ir.constraints import OpClass
from roller_svc.ir.kernel import CompiledKernel, LaunchSpec, Role
from roller_svc.semantics.compare import Agreement
from roller_svc.semantics.inputs import random_inputs
from roller_svc.verify import corpus
from roller_svc.verify.corpus import Row, Run
from roller_svc.verify.run_and_verify import verify_results

CORPUS = {"cases": [{"id": "one", "cls": "map", "expr": "y[i] = x[i]", "inputs": {"x": {"dtype": "float32", "shape": [8]}}}]}


def row(seeds: int, target: str = "local", *, emulate: bool = False, races: bool = False) -> Row:
    cases = corpus.parse_cases(CORPUS, small=True)
    (task,) = corpus.group_tasks(cases, Run(target, emulate, seeds, races))
    (found,) = corpus.verify_task(task)
    return found


def test_a_case_runs_on_inputs_of_every_seed(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[int] = []

    def watched(program: Any, seed: int, hints: Any) -> Any:
        seeds.append(seed)
        return random_inputs(program, seed=seed, hints=hints)

    monkeypatch.setattr(corpus, "random_inputs", watched)
    assert row(3).status == "ok"
    assert seeds == [0, 1, 2]


def test_the_first_inputs_that_show_an_error_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts: list[Agreement] = []

    def wrong_at_second(*args: Any, **options: Any) -> Agreement:
        verdict = verify_results(*args, **options)
        verdicts.append(replace(verdict, ok=len(verdicts) != 1, detail="off by one"))
        return verdicts[-1]

    monkeypatch.setattr(corpus, "verify_results", wrong_at_second)
    found = row(3)
    assert (found.status, found.detail) == ("wrong", "inputs of seed 1: off by one")
    assert len(verdicts) == 2


@pytest.mark.emulator
def test_a_case_is_emulated_on_every_seed() -> None:
    found = row(2, "nvidia-a100-sxm-80gb", emulate=True)
    assert (found.status, found.detail, found.max_abs_error) == ("ok", "", 0.0)


# right numbers, each written by two threads
RACING = """
extern "C" __global__ void copy(const float *x, float *y) { y[threadIdx.x % 8] = x[threadIdx.x % 8]; }
"""


@pytest.mark.emulator
def test_races_of_a_case_are_its_error(monkeypatch: pytest.MonkeyPatch) -> None:
    buffers = (tensor("x", "x", Role.INPUT, shape=(8,)), tensor("y", "y", Role.OUTPUT, shape=(8,)))
    source = cuda(RACING, buffers, LaunchSpec("copy", ("x", "y"), (1, 1, 1), (16, 1, 1)))
    compiled = CompiledKernel(source, b"", "", ())
    monkeypatch.setattr(corpus, "package_kernel", lambda report: SimpleNamespace(compiled=compiled))
    assert row(1, "nvidia-a100-sxm-80gb", emulate=True).status == "ok"
    found = row(1, "nvidia-a100-sxm-80gb", emulate=True, races=True)
    assert found.status == "error"
    assert "emulator-fault" in found.detail
    assert "race: " in found.detail


HALVES = {
    "cases": [
        {
            "id": name, "cls": "gemm", "expr": f"C[m, n] +=! A[m, k] * B[k, n]{rest}",
            "inputs": {"A": {"dtype": "float16", "shape": [32, k]}, "B": {"dtype": "float16", "shape": [k, 64]}},
        }
        for name, k, rest in (("plain", 128, ""), ("short", 16, ""), ("rows", 128, "; Y[m] >=! C[m, n]"))
    ]
}  # fmt: skip


def halves(**tiles: int) -> dict[str, Row]:
    """Each case on a matrix unit, compiled only."""
    run = Run("nvidia-a100-sxm-80gb", family=OpClass.MMA, tiles=tuple(tiles.items()))
    tasks = corpus.group_tasks(corpus.parse_cases(HALVES, small=True), run)
    return {row.id: row for task in tasks for row in corpus.verify_task(task)}


def test_rows_say_what_their_kernels_are() -> None:
    rows = halves()
    assert {row.status for row in rows.values()} == {"ok"}
    (kernel,) = rows["rows"].kernels
    assert (kernel["family"], kernel["unit"], kernel["epilogue"]) == ("mma", "mma_f16", ["row reduction"])
    assert kernel["operands"] == [{"dtype": "float16", "stored": "float16", "load": "async16"}] * 2
    totals = corpus.summarize(rows.values())["kernels"]
    assert totals["family"] == {"mma": 3}
    assert totals["epilogue"] == {"none": 2, "row reduction": 1}
    assert totals["load"] == {"async16": 6}


def test_what_a_case_cannot_have_of_the_demands_is_refused_with_the_reason() -> None:
    rows = halves(split_k=2)
    assert [rows[name].status for name in ("plain", "short", "rows")] == ["ok", "refused", "refused"]
    assert "NoCandidateError no-candidate: " in rows["short"].detail
    assert "are too short" in rows["short"].detail
    assert "cannot be split" in rows["rows"].detail
    assert rows["plain"].kernels[0]["split_k"] == 2
    totals = corpus.summarize(rows.values())
    assert (totals["ok"], totals["refused"]) == (1, 2)
    assert totals["kernels"]["split_k"] == {"2": 1}
