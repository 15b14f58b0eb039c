"""bench/roller_bench/coverage.py: what occurs often enough is chosen, run, and counted where it is right."""

from __future__ import annotations

import json
from typing import Any

import pytest

from roller_bench import coverage
from roller_svc.ir.constraints import OpClass
from roller_svc.verify import corpus
from roller_svc.verify.corpus import Row, Run, Task


def case(name: str, expression: str, **inputs: tuple[str, list[int]]) -> dict[str, Any]:
    kinds = {tensor: {"dtype": dtype, "shape": shape} for tensor, (dtype, shape) in inputs.items()}
    return {"id": name, "cls": "gemm", "expr": expression, "inputs": kinds}


MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
CASES = {
    "cases": [
        case("plain", MATMUL, A=("float16", [32, 128]), B=("float16", [128, 64])),
        case("biased", f"{MATMUL}; Y[m, n] = C[m, n] + v[n]",
             A=("bfloat16", [32, 128]), B=("bfloat16", [128, 64]), v=("bfloat16", [64])),
    ]
}  # fmt: skip


def test_cases_are_taken_until_all_has_occurred_often_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(coverage, "NEEDED", frozenset({"epilogue none", "epilogue bias", "operand bfloat16"}))
    tasks = coverage.select_tasks(corpus.parse_cases(CASES, small=True), 2)
    assert [task.cases[0].id for task in tasks].count("plain") == 2
    assert [task.cases[0].id for task in tasks].count("biased") == 2
    assert len({(task.cases[0].id, task.run) for task in tasks}) == 4
    monkeypatch.setattr(coverage, "NEEDED", frozenset({"stream-K"}))
    (streamed,) = coverage.select_tasks(corpus.parse_cases(CASES, small=True), 1)
    assert dict(streamed.run.tiles)["stream_k"] > 0


def test_only_what_is_right_counts() -> None:
    kernel = {
        "kind": "contraction", "family": "mma", "unit": "mma_f16", "lanes": 32, "split_k": 2, "stream_k": 0,
        "stages": 3, "raster": 1, "blocks": 0, "cluster_m": 1, "cluster_n": 1, "cluster_k": 1, "pingpong": 0,
        "epilogue": ["bias"],
        "operands": [{"dtype": "float16", "stored": "float16", "load": load} for load in ("async16", "vector")],
    }  # fmt: skip
    run = Run("nvidia-a100-sxm-80gb", family=OpClass.MMA, tiles=(("split_k", 2),))
    task = Task(tuple(corpus.parse_cases(CASES, small=True)[:1]), run)
    rows = [(task, Row("right", "gemm", "ok", kernels=(kernel,))), (task, Row("off", "gemm", "wrong", "by 1"))]
    found = coverage.summary(rows, 1, 0.0)
    assert found["occurrences"]["split reduction"] == 1
    assert found["occurrences"]["load vector"] == 1
    assert "epilogue residual" in found["short"]
    assert "epilogue bias" not in found["short"]
    assert [row["id"] for row in found["not_ok"]] == ["off"]
    json.dumps(found)
