"""Benchmarks of construction and of the model against published times."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest

from roller_svc.bench.construct import bench_construct
from roller_svc.bench.published import bench_published
from roller_svc.errors import ArgumentError

DATA = Path(__file__).parents[2] / "bench" / "data"


def test_construct_reports_every_performance_case(tmp_path: Path) -> None:
    shape = {"dtype": "float32", "shape": [64, 64]}
    cases = [
        {"id": "good", "expr": "C[m, n] +=! A[m, k] * B[k, n]", "inputs": {"A": shape, "B": shape}},
        {"id": "bad", "expr": "C[m] = A[q", "inputs": {"A": shape}, "use": ["performance"]},
        {"id": "other", "expr": "C[m, n] = A[m, n]", "inputs": {"A": shape}, "use": ["correctness"]},
    ]
    path = tmp_path / "cases.json"
    path.write_text(json.dumps({"cases": cases}), encoding="utf-8")
    report = bench_construct(path, ["nvidia-v100-sxm2", "local"])
    assert list(report["targets"]) == ["nvidia-v100-sxm2", "local"]
    for target in report["targets"].values():
        good, bad = target["cases"]
        assert good["id"] == "good"
        assert 0 < good["candidates"] <= 64
        assert good["tiles_visited"] > 0
        assert target["median_s"] == target["p99_s"] == target["max_s"] == good["seconds"] > 0
        assert bad["id"] == "bad"
        assert "seconds" not in bad
        assert bad["error"]


def test_a_file_that_is_no_case_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cases.json"
    path.write_text("[]", encoding="utf-8")
    with pytest.raises(ArgumentError, match="not a case file"):
        bench_construct(path, ["local"])
    with pytest.raises(ArgumentError, match="published times"):
        bench_published(path)


def test_predictions_are_near_the_published_times() -> None:
    """ROLLER's artifact: the best published time of each operator on a V100. Its two runs differ by 2.4 %."""
    report = bench_published(DATA / "roller_v100.json")
    assert len(report["cases"]) == 71
    assert report["overall"]["median_abs_log_ratio"] < 0.08
    for kind in ("conv", "elementwise", "matmul", "pooling", "reduce"):
        assert report["classes"][kind]["median_abs_log_ratio"] < 0.12
    assert report["classes"]["depthwiseconv"]["median_abs_log_ratio"] < 0.3
    assert statistics.mean(row["predicted_s"] / row["roller_s"] for row in report["cases"]) < 1.1
