"""The comparison of a pick with all choices."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from gpu_models import MATMUL, constant, graph, node, tensor

from roller_bench import fusions, tuning
from roller_svc.graph.passes import boundaries
from roller_svc.settings import read_settings, use


@pytest.mark.slow
def test_the_pick_and_the_choice_in_use_are_among_all_that_are_compared(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuning, "ROUNDS", 2)
    file = tmp_path / "model.json"
    file.write_text(json.dumps(graph({"x": tensor(8, 64)}, {"w": constant(64, 48)}, [node("y", MATMUL, A="x", B="w")], "y")))
    use(read_settings(cache=tmp_path / "cache"))
    try:
        row = tuning.compare_choices(file, 1, 2)
    finally:
        use(read_settings())
    combinations = 1
    for choices in row["choices"]:
        combinations *= choices
    assert row["compared"] == 2 * combinations  # serial plans alone, with tensors that share memory or not
    assert 0 < row["best_s"] <= min(row["used_s"], row["picked_s"])
    assert row["calls"] >= row["trials"]


@pytest.mark.slow
def test_both_sides_of_a_boundary_are_compared(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(fusions, "ROUNDS", 2)
    monkeypatch.setattr(boundaries, "ERROR_RATIO", 100.0)
    file = tmp_path / "model.json"
    nodes = [node("p", MATMUL, A="x", B="w"), node("y", "C[i, j] = max(A[i, j], 0)", A="p")]
    file.write_text(json.dumps(graph({"x": tensor(8, 64)}, {"w": constant(64, 48)}, nodes, "y")))
    use(read_settings(cache=tmp_path / "cache"))
    monkeypatch.setattr(sys, "argv", ["fusions", str(file), "--top-k", "1"])
    try:
        fusions.main()
    finally:
        use(read_settings())
    (row,) = map(json.loads, capsys.readouterr().out.splitlines())
    assert (row["used"], row["threads"]) == ("fused", 1)
    assert min(row["used_s"], row["other_s"], row["fused_estimate_s"], row["separate_estimate_s"]) > 0
