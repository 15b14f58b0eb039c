"""Small quantized models of the bench: names, exported files, formats."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest

from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights


@pytest.fixture
def models() -> Any:
    pytest.importorskip("torch")
    from roller_bench.zoo import quantized_models

    return quantized_models


def test_a_model_is_exported_and_quantized(models: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[Any] = []

    def quantize(file: str, target: str, asked: str) -> None:
        graph = load_graph(file, Weights())
        shapes = {name: type_.shape for name, type_ in graph.inputs}
        loaded.append((Path(target).name, asked, shapes, [name for name, _ in graph.outputs]))
        Path(target).touch()

    monkeypatch.setattr(models, "quantize", quantize)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of torch's exporter
        models.main([str(tmp_path), "dilated", "--format", "qoperator"])
    assert loaded == [("dilated.onnx", "qoperator", {"x": (1, 40, 400)}, ["y"])]
    assert [path.name for path in tmp_path.iterdir()] == ["dilated.onnx"]


def test_a_model_that_does_not_exist_is_refused(models: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        models.main([str(tmp_path / "made"), "unet", "no_such"])
    assert "no models no_such" in capsys.readouterr().err
    assert not (tmp_path / "made").exists()
