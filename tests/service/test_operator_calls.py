"""Calls of operators over HTTP: estimated and refused as other text is."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from serving import served

from roller_svc.service.app import create_app
from roller_svc.settings import Settings

INPUTS = {"X": {"dtype": "float32", "shape": [1, 3, 8, 8]}, "W": {"dtype": "float32", "shape": [4, 3, 3, 3]}}


def test_calls_over_http(tmp_path: Path) -> None:
    texts = ["Y = conv2d(X, W, stride=2, padding=1)", "conv2d(stride=2)", "Y = cov2d(X, W)", "Y = conv2d(X)"]
    with served(create_app(Settings(store=tmp_path))) as client:
        items = [{"expression": text, "inputs": INPUTS} for text in texts]
        answer = client.post("/v1/estimates", json={"items": items, "targets": ["nvidia-h200-sxm"]}).json()
        found: list[dict[str, Any]] = answer["estimates"]
        assert [bool(one.get("candidates")) for one in found] == [True, True, False, False]
        assert [one["error"]["code"] for one in found[2:]] == ["unknown-op", "wrong-arguments"]
        refused = client.post("/v1/kernels:compile", json={"expression": texts[2], "inputs": INPUTS, "target": "nvidia-h200-sxm"})
    problem = refused.json()
    assert (refused.status_code, problem["code"]) == (404, "unknown-op")
    assert (problem["errors"][0]["line"], problem["errors"][0]["column"]) == (1, 5)
    assert problem["errors"][0]["hint"] == "did you mean `conv2d`?"
