"""Whole models compiled for GPUs: cold and warm rows, refusals, crashes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from roller_bench.cli.gpu_models import COLUMNS, _shown
from roller_bench.zoo import gpu
from roller_bench.zoo.gpu_worker import compile_row
from roller_svc.settings import read_settings, use

H200 = "nvidia-h200-sxm"
GRAPH = {
    "format": "roller-graph/1",
    "name": "tower",
    "inputs": {"x": {"dtype": "float32", "shape": [4, 8]}},
    "constants": {"b": {"dtype": "float32", "shape": [8], "values": list(range(8))}},
    "nodes": [
        {"name": "sum", "expression": "C[i] +=! A[i, j]", "inputs": {"A": "x"}, "outputs": {"C": "s"}},
        {"name": "act", "expression": "C[i, j] = A[i] + B[j]", "inputs": {"A": "s", "B": "b"}, "outputs": {"C": "y"}},
    ],
    "outputs": {"y": "y"},
}


@pytest.fixture
def file(tmp_path: Path) -> str:
    use(read_settings(cache=tmp_path / "cache"))
    path = tmp_path / "tower.json"
    path.write_text(json.dumps(GRAPH))
    return str(path)


def test_a_row_has_the_kernel_of_all_and_what_each_lowering_costs(file: str) -> None:
    cold, warm = (compile_row(file, H200, "persistent") for _ in range(2))
    use(read_settings())
    assert (cold["plan"], cold["classes"], cold["launches"], cold["spills"]) == ("persistent", 1, 2, {})
    assert [each["name"] for each in cold["joint_kernels"]] == ["roller_persistent"]
    assert cold["joint_kernels"][0]["registers"] > 0
    assert set(cold["lowerings"]) == {"launches", "graph", "waves", "persistent"}
    assert (cold["cache"]["misses"], warm["cache"]["misses"]) == (1, 0)
    assert {name: warm[name] for name in ("joint_kernels", "lowerings", "memory_bytes")} == {
        name: cold[name] for name in ("joint_kernels", "lowerings", "memory_bytes")
    }


def test_a_refusal_is_a_row_with_its_reason(file: str) -> None:
    row = compile_row(file, "amd-mi300x", "persistent")
    use(read_settings())
    assert row["refused"]["code"] == "not-joinable"
    assert "NVIDIA" in row["refused"]["reason"]


def test_warm_compiles_follow_cold_ones_and_a_crash_is_a_result(monkeypatch: pytest.MonkeyPatch) -> None:
    made = {
        "plan": "graph",
        "classes": 2,
        "launches": 1,
        "lowerings": {"graph": {"seconds": 1e-5}},
        "joint_kernels": [],
        "spills": {},
    }
    times = {"seconds": 2.0, "cpu_seconds": 1.0, "stages": {}, "peak_rss_bytes": {}, "cache": {}}
    called: list[str] = []

    def answer(_: str, __: str, plan: str, ___: str) -> dict[str, Any]:
        called.append(plan)
        return {"error": "exit code -11: no output"} if plan == "persistent" else {**made, **times}

    monkeypatch.setattr(gpu, "_run", answer)
    (row,) = gpu.compile_models(["a.onnx"], [H200], ["auto", "persistent"])
    assert called == ["auto", "persistent", "auto"]
    assert row["plans"]["auto"] == {**made, "cold": times, "warm": times}
    assert row["plans"]["persistent"] == {"error": "exit code -11: no output"}
    assert [len(_shown(row, plan)) for plan in row["plans"]] == [len(COLUMNS)] * 2
