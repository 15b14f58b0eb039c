"""The benchmark of first answers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from onnx_models import mlp

from roller_bench.zoo import first
from roller_svc.settings import read_settings, use


@pytest.mark.slow
def test_a_models_first_answer_is_timed_beside_the_old_way(tmp_path: Path) -> None:
    file = tmp_path / "model.onnx"
    file.write_bytes(mlp().SerializeToString())
    row = first.time_first_answer(str(file), 1, tmp_path)
    use(read_settings())
    assert row["state"] in ("committed", "stopped")
    assert row["warm_s"] > 0
    assert 0 < row["first_answer_s"] < row["ended_s"]  # both from the same start
    assert row["loss"]["last"] == row["call_s"]["first"] / row["call_s"]["last"] - 1
    assert json.loads(json.dumps(row)) == row
