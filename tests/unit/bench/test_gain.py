"""The benchmarks of what trials in calls gain, and of bits that they keep."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx_models import mlp

from roller_bench import exact
from roller_bench.cli.tuning import show_row
from roller_bench.zoo import gain
from roller_svc.cli import main
from roller_svc.settings import read_settings, use


def test_models_without_time_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "tuning", str(tmp_path / "a.onnx"), "b.onnx", "--threads", "1", "--limit", "1e-9", "--json"]) == 1
    document = json.loads(capsys.readouterr().out)
    assert document["summary"] == {"measured": 0, "of": 2}
    assert [(row["file"], row["error"]) for row in document["models"]] == [
        (name, "no time is left: run again, kernels are in the cache") for name in ("a.onnx", "b.onnx")
    ]


def test_a_model_that_cannot_be_read_has_a_line(tmp_path: Path) -> None:
    (tmp_path / "bad.onnx").write_bytes(b"no model")
    for name in ("none.onnx", "bad.onnx"):
        row = gain.measure_or_refuse(str(tmp_path / name), 1, 1.0)
        assert row["file"] == name
        assert len(str(row["error"]).splitlines()) == 1


def test_gains_have_a_geometric_mean() -> None:
    summary = gain.summarize_gains([{"speedup": 4.0}, {"speedup": 1.0}, {"error": "none"}])
    assert summary == {"measured": 2, "of": 3, "geometric_mean": pytest.approx(2.0), "least": 1.0, "most": 4.0}


@pytest.mark.slow
def test_a_gain_is_of_models_with_right_answers_and_exact_trials_keep_bits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gain, "TIMED_S", 0.1)
    file = tmp_path / "model.onnx"
    file.write_bytes(mlp().SerializeToString())
    use(read_settings(cache=tmp_path / "cache"))
    try:
        row = gain.measure_gain(str(file), 1, 2.0)
        found = exact.tune_once(str(file), 1)
    finally:
        use(read_settings())
    assert row["wrong"] == 0
    assert row["speedup"] == row["alone_s"] / row["tuned_s"]
    assert json.loads(json.dumps(row)) == row
    assert len(found["results"]) == 1
    shown = show_row(row)
    assert (shown[0], shown[3]) == ("model.onnx", f"{row['speedup']:.3f}")
    assert show_row({"file": "b.onnx", "error": "no time"})[:2] == ["b.onnx", "no time"]
