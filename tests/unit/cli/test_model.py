"""`roller model`: compile, run, plan, profile; errors with their exit codes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import mlp, model

from roller_svc import settings
from roller_svc.cli.command import main
from roller_svc.graph.load import load_graph, save_graph
from roller_svc.graph.weights import Weights

QUICK = ("--select", "model", "--top-k", "1")


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLER_CACHE", str(tmp_path / "cache"))
    settings.use(settings.read_settings())


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "mlp.onnx"
    onnx.save(mlp("batch"), path)
    return str(path)


def run(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, Any, str]:
    """The exit code, the JSON document (or text) on stdout, and stderr."""
    code = main(("model", *words))
    out, err = capsys.readouterr()
    return code, json.loads(out) if "--json" in words and out else out, err


def test_a_saved_model_runs_as_the_file_does(capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path) -> None:
    folder, array = str(tmp_path / "saved"), tmp_path / "x.npy"
    code, facts, _ = run(capsys, "compile", file, *QUICK, "--dim", "batch=3", "--save", folder, "--json")
    assert code == 0
    assert facts["saved"] == folder
    assert facts["inputs"] == [{"name": "x", "dtype": "float32", "shape": [3, 8]}]
    np.save(array, np.ones((3, 8), np.float32))
    _, saved, _ = run(capsys, "run", folder, "--input", f"x=@{array}", "--json")
    code, fresh, _ = run(capsys, "run", file, *QUICK, "--dim", "batch=3", "--input", f"x=@{array}", "--check", "--json")
    assert code == 0
    assert saved["outputs"] == fresh["outputs"]
    assert fresh["max_abs_error"] < 1e-5
    assert 0 < fresh["min_s"] <= fresh["median_s"]


def test_a_json_graph_is_checked_with_its_own_types(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    weights = Weights()
    folder = save_graph(load_graph(mlp(3).SerializeToString(), weights), weights, tmp_path / "graph")
    code, facts, err = run(capsys, "run", str(folder / "graph.json"), *QUICK, "--check", "--json")
    assert (code, facts["max_abs_error"] < 1e-5 if facts else err) == (0, True)


def test_text_names_what_it_shows(capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path) -> None:
    options = (file, *QUICK, "--dim", "batch=2")
    assert "4 operators in 2 nodes, 2 kernels" in run(capsys, "compile", *options)[1]
    assert "input  x: float32[2, 8]" in run(capsys, "plan", *options)[1]
    trace = tmp_path / "trace.json"
    code, text, _ = run(capsys, "profile", *options, "--trace", str(trace))
    assert code == 0
    assert "fc0+relu0" in text
    assert len(json.loads(trace.read_text())["traceEvents"]) >= 2


def test_an_open_dimension_is_named(capsys: pytest.CaptureFixture[str], file: str) -> None:
    code, _, err = run(capsys, "compile", file, *QUICK)
    assert code == 2
    assert "x[0] (batch)" in err
    assert "hint: give them, as --dim batch=1\n" in err


def test_every_unsupported_node_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nodes = [helper.make_node("NonZero", ["x"], ["a"], "first"), helper.make_node("Unique", ["x"], ["b"], "second")]
    onnx.save(model(nodes, {"x": (4,)}, {"a": None, "b": None}), tmp_path / "bad.onnx")
    code, _, err = run(capsys, "compile", str(tmp_path / "bad.onnx"), *QUICK)
    assert code == 2
    assert "'first'" in err
    assert "'second'" in err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dim", "batch"), "--dim batch: expected NAME=EXTENT"),
        (("--dim", "batch=2", "--input", "x=1"), "--input x=1: expected NAME=@FILE.npy"),
        (("--dim", "batch=2", "--input", "z=@missing.npy"), "cannot read missing.npy"),
        (("--dim", "batch=2", "--plan", "fast"), "plan must be one of"),
        (("--dim", "batch=2", "--threads", "0"), "threads must be a whole number"),
    ],
)
def test_wrong_options(capsys: pytest.CaptureFixture[str], file: str, words: tuple[str, ...], message: str) -> None:
    code, _, err = run(capsys, "run", file, *QUICK, *words)
    assert code == 2
    assert message in err


def test_a_file_that_is_no_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "noise.onnx"
    path.write_bytes(b"\x08\xff\xff\xff not a model")
    code, _, err = run(capsys, "compile", str(path), *QUICK)
    assert code == 2
    assert err.startswith("error")
