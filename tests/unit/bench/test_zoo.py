"""Whole models against other engines: rounds, errors, ratios."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from roller_bench.zoo import run
from roller_svc.errors import ArgumentError


def answers(monkeypatch: pytest.MonkeyPatch, listed: dict[str, list[dict[str, Any]]]) -> list[str]:
    """Engines answer these rows, in order. Returns the engines as they are called."""
    called: list[str] = []

    def answer(arguments: Sequence[str], _: int) -> dict[str, Any]:
        called.append(arguments[0])
        return listed[arguments[0]].pop(0)

    monkeypatch.setattr(run, "_run", answer)
    return called


def times(least: float, middle: float) -> dict[str, Any]:
    return {"min_ms": least, "median_ms": middle, "max_abs_error": 0.0}


def test_engines_take_turns_and_least_times_count(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = {"ours": [times(3, 4), times(2, 5)], "openvino": [times(6, 7), times(8, 9)]}
    called = answers(monkeypatch, rows)
    (row,) = run.bench_models(["a.onnx"], 2, ["openvino"], "model", 2)
    assert called == ["ours", "openvino"] * 2
    assert row["ours_ms"] == {"min": 2, "median": 4}
    assert row["peers"] == {"openvino": {"min": 6, "median": 7}}
    assert row["ratio"] == 3


@pytest.mark.parametrize("engine", ["inductor", "inductor-max-autotune"])
def test_inductor_needs_modules(monkeypatch: pytest.MonkeyPatch, engine: str) -> None:
    with pytest.raises(ArgumentError, match="compiles torch modules"):
        next(run.bench_models(["a.onnx"], 1, [engine], "model"))
    called = answers(monkeypatch, {"ours": [times(3, 4)], engine: [times(6, 7)]})
    (row,) = run.bench_models(["a.onnx"], 1, [engine], "model", modules="made.py")
    assert called == ["ours", engine]
    assert row["ratio"] == 2


def test_a_model_that_fails_is_not_timed_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    called = answers(monkeypatch, {"ours": [times(3, 4), {"error": "no"}], "openvino": [times(6, 7)]})
    (row,) = run.bench_models(["a.onnx"], 2, ["openvino"], "model", 3)
    assert called == ["ours", "openvino", "ours"]
    assert row["ours_ms"] == {"error": "no"}
    assert row["ratio"] is None


def test_all_engines_run_the_quantized_model(monkeypatch: pytest.MonkeyPatch) -> None:
    files: list[str] = []

    def answer(arguments: Sequence[str], _: int) -> dict[str, Any]:
        files.append(arguments[1])
        return times(2, 3)

    monkeypatch.setattr(run, "_run", answer)
    monkeypatch.setattr(run, "_quantize", lambda file, folder: f"quantized {file}")
    (row,) = run.bench_models(["a.onnx"], 1, ["openvino"], "model", is_quantized=True)
    assert files == ["quantized a.onnx"] * 2
    assert row["file"] == "a.onnx"


def test_a_model_that_is_not_quantized_is_named(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"--quantize: .*none.onnx was not quantized"):
        next(run.bench_models([str(tmp_path / "none.onnx")], 1, [], "model", is_quantized=True))
