"""Whole models of bench/gpu: their files, arrays and verdicts. The rehearsal runs the stage."""

from __future__ import annotations

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from roller_bench.gpu import graphs
from roller_bench.gpu.graph_models import PAGE, decode
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights


@pytest.mark.parametrize("bits", [16, 4])
def test_a_model_is_written_with_its_weights_beside_it(bits: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(graphs.MODELS, "small", partial(decode, bits=bits, pages=4))
    document = graphs.write_model("small", tmp_path / "small")
    weights = Weights()
    loaded = load_graph(tmp_path / "small", weights)
    assert loaded.states == ("keys", "values")
    assert all(weights.has(each) for each in loaded.constants.values())
    arrays = graphs.arrays_of(document)
    assert sorted(arrays["pages"][0].tolist()) == [1, 2, 3, 4]
    assert (arrays["lengths"].tolist(), arrays["position"].tolist()) == ([4 * PAGE], [4 * PAGE - 1])
    words = weights.array(loaded.constants["up_w"])
    assert words.dtype == (np.int32 if bits == 4 else words.dtype)
    assert len(np.unique(words.view(np.uint16 if bits == 16 else np.uint32))) > 1000


@pytest.mark.parametrize(
    ("value", "verdict"),
    [(1.0, "ok"), (1.0009, "ok"), (1.01, "wrong: y differs by 0.01"), (np.nan, "wrong: y differs by nan")],
)
def test_results_are_compared_in_parts_of_the_largest_value(value: float, verdict: str) -> None:
    want = {"y": np.array([0.5, 1.0], np.float32)}
    found = {"y": np.array([0.5, value], np.float32), "state": np.zeros(1, np.float32)}
    assert graphs._compare(found, want).startswith(verdict)
    assert graphs._compare(found, None).startswith("not checked")


def test_each_model_has_a_row_for_each_lowering() -> None:
    assert graphs.ids(["lstm"])[-2:] == ["lstm persistent", "lstm persistent without ring"]
    assert len(graphs.ids(graphs.MODELS)) == 5 * len(graphs.MODELS)
