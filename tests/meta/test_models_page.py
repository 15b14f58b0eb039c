"""docs/models.md: its tables are up to date, its passes are those that run, its examples do what they show."""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import numpy as np
import onnx
import pytest
from onnx import helper
from onnx_models import mlp, model

import roller_svc
from roller_svc.errors import UnsupportedModelError
from roller_svc.graph.interpret import interpret
from roller_svc.graph.load import load_graph
from roller_svc.graph.weights import Weights
from roller_svc.settings import read_settings, use

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def lister() -> ModuleType:
    spec = importlib.util.spec_from_file_location("lister", ROOT / "tools" / "list_model_operators.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    use(read_settings(cache=tmp_path_factory.mktemp("cache")))
    yield
    use(read_settings())


def block(language: str) -> str:
    match = re.search(rf"^```{language}\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
    assert match is not None
    return match[1]


def test_the_table_of_onnx_operators_is_up_to_date(lister: ModuleType) -> None:
    match = re.search(r"With onnx ([\d.]+),", PAGE)
    assert match is not None
    if onnx.__version__ != match[1]:
        pytest.skip(f"the page has the operators of onnx {match[1]}")
    assert lister.onnx_table() in PAGE


def test_the_list_of_aten_operators_is_up_to_date(lister: ModuleType) -> None:
    pytest.importorskip("torch")
    assert lister.aten_list() in PAGE


@pytest.mark.parametrize("operator", ["Bernoulli", "MaxRoiPool", "NonMaxSuppression", "RandomUniformLike"])
def test_an_operator_listed_as_refused_is_refused(lister: ModuleType, operator: str) -> None:
    assert any(operator in names for names in lister.REFUSED.values())
    inputs = ["x", "y"] if operator in ("MaxRoiPool", "NonMaxSuppression") else ["x"]
    source = model([helper.make_node(operator, inputs, ["z"])], dict.fromkeys(inputs, (1, 4, 4)), {"z": (1, 4, 4)})
    with pytest.raises(UnsupportedModelError) as refusal:
        load_graph(source, Weights())
    assert [node.operator for node in refusal.value.nodes] == [operator]


def test_the_python_example_prints_what_is_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shown = PAGE.split(block("python"))[1].split("```\n")[2]
    monkeypatch.chdir(tmp_path)
    shutil.copy(ROOT / "examples" / "model.onnx", ".")
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(block("python"), {})  # the page's own example
    assert printed.getvalue() == shown
    section = PAGE.split("\n## Passes")[1].split("\n## ")[0]
    assert re.findall(r"^\d+\. `(\w+)`", section, re.MULTILINE) == re.findall(r"'(\w+)'", shown)


def test_the_example_of_states_prints_what_is_shown() -> None:
    code, shown = re.findall(r"^```(?:python)?\n(.*?)^```$", PAGE.split("\n### States\n")[1], re.MULTILINE | re.DOTALL)[:2]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        exec(code, {"np": np, "roller_svc": roller_svc})
    assert printed.getvalue() == shown


@pytest.mark.needs("gcc")
def test_the_c_example_runs_a_saved_model(tmp_path: Path) -> None:
    x = np.linspace(-1, 1, 16, dtype=np.float32).reshape(2, 8)
    built = roller_svc.compile_model(mlp(), select="model", top_k=1, name="mlp")
    built.save(tmp_path / "saved")
    (tmp_path / "main.c").write_text(block("c"))
    (tmp_path / "x.bin").write_bytes(x.tobytes())
    command = re.search(r"^cc .*$", PAGE, re.MULTILINE)
    assert command is not None
    subprocess.run(["sh", "-c", command[0]], cwd=tmp_path, check=True)
    y = np.frombuffer((tmp_path / "y.bin").read_bytes(), np.float32).reshape(2, 4)
    np.testing.assert_array_equal(y, built(x=x)["y"])


def test_the_json_graph_is_one() -> None:
    weights = Weights()
    graph = load_graph(json.loads(block("json")), weights)
    x = np.linspace(-4, 4, 8, dtype=np.float32)
    wanted = np.maximum(x.reshape(2, 4) + np.arange(4, dtype=np.float32), 0)
    np.testing.assert_array_equal(interpret(graph, weights, {"x": x.reshape(1, 8)})["y"], wanted)
