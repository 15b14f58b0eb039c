"""`roller model`: compile, run, plan, profile; errors with their exit codes."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
from gpu_models import graph, tensor
from graph_files import save_graph
from onnx import helper
from onnx_models import branching, mlp, model

import roller_svc
from roller_svc import settings
from roller_svc.cli.command import main
from roller_svc.cli.model import _program_rows
from roller_svc.cli.progress import report_lines
from roller_svc.errors import ArgumentError
from roller_svc.graph.load import load_graph
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
    options = ("--dim", "batch=3", "--save", folder, "--name", "mlp")
    code, facts, _ = run(capsys, "compile", file, *QUICK, *options, "--json")
    assert code == 0
    assert facts["saved"] == folder
    assert facts["name"] == roller_svc.load_model(folder).name == "mlp"
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


def test_a_model_for_a_gpu_is_compiled_estimated_and_emulated(
    capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path
) -> None:
    target = (*QUICK, "--dim", "batch=2", "--target", "nvidia-a100-sxm-80gb")
    folder = str(tmp_path / "saved")
    code, text, err = run(capsys, "compile", file, *target, "--save", folder)
    assert code == 0, err
    assert "plan launches*: " in text
    assert "exports" not in text
    estimate, by_launches = (text.split(f"{words}: ")[1].split(" a call")[0] for words in ("estimate", "plan launches*"))
    assert estimate == by_launches
    assert "plan graph: " in text
    assert "threads" not in text
    code, facts, _ = run(capsys, "run", folder, "--emulate", "--json")
    assert (code, "min_s" in facts) == (0, False)
    code, facts, _ = run(capsys, "run", file, *target, "--emulate", "--check", "--json")
    assert (code, facts["max_abs_error"] < 1e-5) == (0, True)
    code, _, err = run(capsys, "run", folder)
    assert code != 0
    assert "no NVIDIA device" in err
    code, facts, _ = run(capsys, "estimate", file, *target, "--json")
    assert code == 0
    assert facts["seconds"] == pytest.approx(sum(each["seconds"] for each in facts["kernels"]))
    assert "by the performance model" in run(capsys, "estimate", file, *target)[1]
    assert run(capsys, "estimate", folder)[0] == 2


def test_an_estimate_names_its_bucket(capsys: pytest.CaptureFixture[str], file: str) -> None:
    target = ("--target", "cpu-x86-avx2")
    text = run(capsys, "estimate", file, "--dim", "batch=2..4", *target)[1]
    assert " a call for batch=2 (the first of 2 buckets) on cpu-x86-avx2" in text
    assert " a call for batch=3 on cpu-x86-avx2" in run(capsys, "estimate", file, "--dim", "batch=3", *target)[1]
    several, alone = (
        run(capsys, "estimate", file, "--dim", f"batch={extents}", *target, "--json")[1] for extents in ("64,1", "64")
    )
    assert (several["dims"], several["buckets"], alone["dims"], alone["buckets"]) == ({"batch": 64}, 2, {"batch": 64}, 1)
    assert several["seconds"] == alone["seconds"]


def test_text_names_what_it_shows(capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path) -> None:
    options = (file, *QUICK, "--dim", "batch=2")
    assert "4 operators in 2 nodes, 2 kernels" in run(capsys, "compile", *options)[1]
    assert "input  x: float32[2, 8]" in run(capsys, "plan", *options)[1]
    trace, page = tmp_path / "trace.json", tmp_path / "page.html"
    code, text, _ = run(capsys, "profile", *options, "--trace", str(trace), "--html", str(page))
    assert code == 0
    assert "fc0+relu0" in text
    assert len(json.loads(trace.read_text())["traceEvents"]) >= 2
    (data,) = re.findall(r'<script type="application/json" id="data">(.*?)</script>', page.read_text(), re.DOTALL)
    story = json.loads(data)["data"]
    planned = sorted(story["steps"][each["step"]]["name"] for each in story["instructions"] if "step" in each)
    assert sorted(each["operator"] for each in story["profile"]) == planned  # the page compares them one by one


def test_a_tuned_model_says_what_was_chosen(capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path) -> None:
    options = (file, "--dim", "batch=3", "--threads", "1", "--top-k", "2", "--trials", "2", "--budget", "600s")
    code, facts, _ = run(capsys, "tune", *options, "--json")
    assert code == 0
    assert facts["tuning"]["tree"]["format"] == "roller-wiring/1"
    assert facts["tuning"]["gain"] >= 1.0
    code, text, _ = run(capsys, "tune", *options, "--save", str(tmp_path / "saved"))
    assert code == 0
    assert "kernels replaced in 0 trials" in text
    assert roller_svc.load_model(tmp_path / "saved").digest == facts["digest"]
    code, _, error = run(capsys, "tune", str(tmp_path / "saved"))
    assert code == 2
    assert "cannot-measure" in error


def test_an_open_dimension_is_named(capsys: pytest.CaptureFixture[str], file: str) -> None:
    code, _, err = run(capsys, "compile", file, *QUICK)
    assert code == 2
    assert "x[0] (batch)" in err
    assert "hint: give them, as --dim batch=1\n" in err


@pytest.mark.slow
def test_a_constant_chooses_the_branch(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    onnx.save(branching(), file := tmp_path / "branch.onnx")
    code, _, err = run(capsys, "compile", str(file), *QUICK)
    assert code == 2
    assert "depends on the input rate; give its value with --constant rate=..." in err
    for value, largest in (("16000", 2), ("8000", 8001), (f"@{tmp_path / 'rate.npy'}", 2)):
        np.save(tmp_path / "rate.npy", np.array(16000))
        np.save(tmp_path / "x.npy", np.ones(4, np.float32))
        words = (str(file), *QUICK, "--constant", f"rate={value}", "--check", "--input", f"x=@{tmp_path / 'x.npy'}")
        code, facts, err = run(capsys, "run", *words, "--json")
        assert (code, facts["outputs"][0]["max_abs"] if facts else err) == (0, largest)


def test_a_state_is_updated_and_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nodes = [helper.make_node("Add", ["past_0", "x"], ["present_0"]), helper.make_node("Neg", ["present_0"], ["y"])]
    file, array = str(tmp_path / "sum.onnx"), tmp_path / "past.npy"
    onnx.save(model(nodes, {"past_0": (4,), "x": (4,)}, {"present_0": (4,), "y": (4,)}), file)
    np.save(array, np.full(4, 3e6, np.float32))
    words = (*QUICK, "--state", "past_*=present_*", "--input", f"past_0=@{array}", "--check")
    code, facts, err = run(capsys, "run", file, *words, "--json")
    assert code == 0, err
    assert [(each["name"], round(each["max_abs"] / 1e6)) for each in facts["outputs"]] == [("y", 3), ("past_0", 3)]
    code, facts, _ = run(capsys, "compile", file, *QUICK, "--state", "past_0=present_0", "--json")
    assert facts["states"] == [{"name": "past_0", "dtype": "float32", "shape": [4]}]
    assert facts["outputs"] == [{"name": "y", "dtype": "float32", "shape": [4]}]


def test_timed_calls_do_not_advance_a_state(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """A position that counts on would leave the table after 8 calls."""
    nodes = [
        {"name": "row", "expression": "C[j] = t[n[0], j]", "inputs": {"t": "t", "n": "n"}, "outputs": {"C": "row"}},
        {"name": "inc", "expression": "C[i] = n[i] + 1", "inputs": {"n": "n"}, "outputs": {"C": "inc"}, "updates": {"C": "n"}},
    ]
    source = graph({"t": tensor(8, 4)}, {}, nodes, "row") | {"states": {"n": tensor(1, dtype="int32")}}
    file, position = tmp_path / "count.json", tmp_path / "n.npy"
    file.write_text(json.dumps(source))
    np.save(position, np.array([7], np.int32))
    words = (str(file), *QUICK, "--threads", "1", "--input", f"n=@{position}", "--json")
    code, facts, err = run(capsys, "run", *words)
    assert code == 0, err
    assert [each["max_abs"] for each in facts["outputs"] if each["name"] == "n"] == [8]
    code, facts, err = run(capsys, "profile", *words)
    assert code == 0, err
    assert {"row", "inc"} <= facts["seconds_by_operator"].keys()


def test_a_profile_for_a_gpu_shows_the_programs_of_its_veus(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nodes = [
        {"name": "sum", "expression": "C[i] +=! A[i, j]", "inputs": {"A": "x"}, "outputs": {"C": "s"}},
        {"name": "all", "expression": "C[i, j] +=! A[i] * B[k, j]", "inputs": {"A": "s", "B": "x"}, "outputs": {"C": "y"}},
    ]
    file = tmp_path / "two.json"
    file.write_text(json.dumps(graph({"x": tensor(4, 4)}, {}, nodes, "y")))
    words = (str(file), *QUICK, "--target", "nvidia-a100-sxm-80gb")
    code, text, err = run(capsys, "profile", *words, "--plan", "persistent")
    assert code == 0, err
    assert "times are not measured: nvidia-a100-sxm-80gb is a GPU" in text
    assert re.search(r"\d +wait for sum", text)
    assert "wait for sum" in run(capsys, "plan", *words, "--plan", "persistent")[1]
    for more in (("--plan", "launches"), ("--plan", "persistent", "--trace", str(tmp_path / "t.json"))):
        code, _, err = run(capsys, "profile", *words, *more)
        assert code == 2
        assert "profiles are of CPUs" in err


def test_a_type_that_is_open_is_asked_for_in_words_of_the_command(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    nodes = [helper.make_node("Relu", ["x"], ["y"])]
    onnx.save(model(nodes, {"x": ("batch", None, 3)}, {"y": None}), tmp_path / "open.onnx")
    code, _, err = run(capsys, "compile", str(tmp_path / "open.onnx"), *QUICK)
    assert code == 2
    assert err.endswith("hint: give them, as --dim batch=1 and --shape x=float32[1,1,3]\n")


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
        (("--dim", "batch=2", "--constant", "x"), "--constant x: expected NAME=NUMBER"),
        (("--dim", "batch=2", "--constant", "x=@missing.npy"), "--constant x=@missing.npy: cannot read missing.npy"),
        (("--dim", "batch=2", "--constant", "x=" + 30000 * "["), "[[[: expected NAME=NUMBER"),
        (("--dim", "batch=2", "--constant", "x=" + 5000 * "1"), "111: expected NAME=NUMBER"),
        (("--dim", "batch=2", "--constant", "z=1"), "the model has no input 'z'"),
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


def test_the_programs_of_a_virtual_device_are_rows() -> None:
    node = {"node": "Gemm"}
    device = {"programs": [[{"execute": [0, 0, 2]}, {"wait": [[1, 0]]}], [{"execute": [1, 3, 1]}]]}
    step = {"steps": [node, {"node": "Relu"}], "operators": [{"step": 0}, {"step": 1}], "vdevice": device}
    expected = [(0, 0, "Gemm", "0..1"), (0, 1, "wait for vEU 1 at 0", ""), (1, 0, "Relu", "3..3")]
    assert _program_rows([{"node": "plain"}, {"body": [step]}]) == expected


def test_progress_without_a_terminal_is_a_line_every_few_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("roller_svc.cli.progress.PROGRESS_S", 1e9)
    report_lines()("kernels", 1, 9)
    monkeypatch.setattr("roller_svc.cli.progress.PROGRESS_S", 0.0)
    report_lines()("kernels", 3, 9)
    assert capsys.readouterr().err == "roller: kernels: 3 of 9\n"


def test_the_emulator_does_not_run_models_of_cpus(capsys: pytest.CaptureFixture[str], file: str, tmp_path: Path) -> None:
    folder, options = str(tmp_path / "saved"), (*QUICK, "--dim", "batch=3")
    code, _, err = run(capsys, "compile", file, *options, "--save", folder)
    assert code == 0, err
    for words in ((file, *options), (folder,)):
        code, out, err = run(capsys, "run", *words, "--emulate")
        assert code != 0
        assert not out
        assert "runs CUDA and HIP kernels only" in err
    with pytest.raises(ArgumentError) as raised:
        roller_svc.compile_model(file, dims={"batch": 3}, runtime="emulator")
    assert raised.value.code == "emulator-unavailable"
