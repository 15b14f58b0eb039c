"""Plots of the model's judgement: what is drawn of a document."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("matplotlib")

from roller_bench.model import plot

CURVE = [{"first": first, "mean": 0.1 / first, "p90": 0.2 / first, "random": 0.5 / first} for first in range(1, 21)]


def candidate(measured_s: float | None, predicted_s: float, *, drawn: bool) -> dict[str, Any]:
    error = None if measured_s else "wrong-answer"
    return {"min_s": measured_s, "predicted_s": predicted_s, "drawn": drawn, "error": error}


def document() -> dict[str, Any]:
    figures = {"cases": 1, "spearman": None, "median_abs_log_ratio": 0.2}
    timed = [candidate(1e-3, 2e-3, drawn=False), candidate(4e-3, 3e-3, drawn=True), candidate(None, 1e-3, drawn=True)]
    return {
        "machine": {"cpu": "Some CPU"},
        "settings": {"threads": 2, "target": "local"},
        "overall": {"cases": 2, "regret_curve": CURVE},
        "classes": {"gemm": figures, "conv": figures},
        "cases": [
            {"id": "a", "cls": "gemm", "error": None, "candidates": timed},
            {"id": "b", "cls": "conv", "error": None, "candidates": timed[:1]},
            {"id": "c", "cls": "conv", "error": "no-candidate: none", "candidates": []},
        ],
    }


def test_points_are_the_timed_plans_of_a_class() -> None:
    assert plot.points(document(), "gemm") == [(1e-3, 2e-3, False), (4e-3, 3e-3, True)]
    assert plot.points(document(), "conv") == [(1e-3, 2e-3, False)]


def test_each_class_has_a_plot_and_regret_its_curves() -> None:
    titles = [axes.get_title() for axes in plot.times(document()).axes]
    assert titles[0].startswith("conv (1)")
    assert titles[1].startswith("gemm (1)")
    (axes,) = plot.regrets(document()).axes
    curves = [line for line in axes.get_lines() if len(line.get_xdata()) == 20]
    assert len(curves) == 3
    assert list(curves[0].get_ydata())[:2] == pytest.approx([20.0, 10.0])


def test_files_are_named_by_the_prefix(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "r.json").write_text(json.dumps(document()), encoding="utf-8")
    monkeypatch.setattr(sys, "argv", ["plot", str(tmp_path / "r.json"), str(tmp_path / "out")])
    plot.main()
    assert sorted(path.name for path in tmp_path.glob("*.png")) == ["out-regret.png", "out-times.png"]
