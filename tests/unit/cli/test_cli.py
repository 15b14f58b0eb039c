"""The command: exit codes, what goes to stdout and what to stderr, and every verb once."""

from __future__ import annotations

import importlib.metadata
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from roller_svc import settings
from roller_svc.cli import command
from roller_svc.cli.command import COMMANDS, main
from roller_svc.errors import ArgumentError, RollerError
from roller_svc.version import __version__

MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
INPUTS = ("--input", "A=float32[16,24]", "--input", "B=float32[24,20]")
PUBLISHED = Path(__file__).resolve().parents[3] / "bench" / "data" / "roller_v100.json"
QUICK = ("--select", "model", "--top-k", "1")


class Ran:
    """What a command left: its exit code, stdout and stderr."""

    def __init__(self, capsys: pytest.CaptureFixture[str], *words: str) -> None:
        self.code = main(words)
        self.out, self.err = capsys.readouterr()

    @property
    def json(self) -> Any:
        return json.loads(self.out)


@pytest.fixture(autouse=True)
def _own_store(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings.use(settings.read_settings(store=tmp_path / "store"))
    monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=io.BytesIO(MATMUL.encode())))


def test_version_and_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert Ran(capsys, "--version").out == f"roller {__version__}\n"
    shown = Ran(capsys, "--help")
    assert shown.code == 0
    assert all(verb in shown.out for verb in COMMANDS)
    assert Ran(capsys, "compile", "--help").code == 0


def test_a_second_device_is_refused_where_the_last_would_win(capsys: pytest.CaptureFixture[str]) -> None:
    for devices in (("--target", "h200", "--target", "a100"), ("--target", "h200,a100")):
        for words in (("compile", MATMUL, *INPUTS), ("model", "plan", "net.onnx")):
            ran = Ran(capsys, *words, *devices)
            assert ran.code == 2
            assert f"--target of `roller {words[0]}" in ran.err
            assert "takes one device, got h200 and a100" in ran.err
            assert "hint: run it once for each; `roller estimate` takes several" in ran.err
    for words in (("run", MATMUL, *INPUTS), ("model", "plan", "net.onnx")):
        for first, second in (("local", "h200"), ("h200", "local")):
            ran = Ran(capsys, *words, "--target", first, "--target", second)
            assert (ran.code, f"takes one device, got {first} and {second}" in ran.err) == (2, True)


@pytest.mark.parametrize("words", [(), ("frobnicate",), ("compile",), ("targets", "--frobnicate"), ("run", "x", "--top-k", "y")])
def test_a_wrong_command_line_is_refused(capsys: pytest.CaptureFixture[str], words: tuple[str, ...]) -> None:
    ran = Ran(capsys, *words)
    assert ran.code == 2
    assert ran.out == ""
    assert "usage" in ran.err


@pytest.mark.parametrize("way", ["text", "stdin", "file"])
def test_ways_to_give_an_expression(capsys: pytest.CaptureFixture[str], tmp_path: Path, way: str) -> None:
    (tmp_path / "matmul.txt").write_text(MATMUL)
    given = {"text": MATMUL, "stdin": "-", "file": f"@{tmp_path / 'matmul.txt'}"}[way]
    ran = Ran(capsys, "estimate", given, *INPUTS, "--target", "nvidia-k80", "--target", "local", "--json")
    assert ran.code == 0, ran.err
    assert ran.err == ""
    assert [answer["target"] for answer in ran.json["estimates"]] == ["nvidia-k80", "local"]
    assert ran.json["estimates"][0]["candidates"][0]["tiles"]["shared"]


def test_estimate_says_what_would_change_it(capsys: pytest.CaptureFixture[str]) -> None:
    given = ("estimate", MATMUL, *INPUTS, "--target", "nvidia-k80", "--target", "local", "--what-if")
    for answer in Ran(capsys, *given, "--json").json["estimates"]:
        saved = [change["saved"] for change in answer["sensitivity"]]
        assert saved == sorted(saved, reverse=True)
        assert 0 < saved[0] <= 0.1
    assert "launch overhead" in Ran(capsys, *given).out
    assert Ran(capsys, *given, "--server", "http://127.0.0.1:1").code == 2


def test_estimate_for_people(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "estimate", MATMUL, *INPUTS, "--target", "nvidia-h200-sxm", "--top-k", "2")
    assert ran.code == 0
    plans, _, roofs = ran.out.partition("Roofline (lower bounds)")
    assert plans.count("nvidia-h200-sxm") == 2
    roofs, _, floor = roofs.partition("\n\n")
    assert [line.split()[1] for line in roofs.splitlines()[2:]] == ["compute", "dram", "l2", "shared"]
    assert floor.startswith("Floor of the program on nvidia-h200-sxm: ")
    assert "% of the estimate" in floor


def test_compile_shows_and_saves(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "kernel"
    ran = Ran(capsys, "compile", MATMUL, *INPUTS, *QUICK, "--output", "C", "--save", str(folder), "--source")
    assert ran.code == 0, ran.err
    assert "_kernel0(const float *restrict A" in ran.out
    name = json.loads((folder / "metadata.json").read_text())["name"]
    assert f"all that it exports begins with {name}" in ran.out
    ran = Ran(capsys, "compile", MATMUL, *INPUTS, *QUICK, "--name", "product", "--json")
    assert ran.json["digest"].startswith("sha256:")
    assert [launch["name"] for launch in ran.json["launches"]] == ["product_kernel0"]
    assert ran.json["language"] == "c"


def test_run_checks_and_times(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "run", MATMUL, *INPUTS, *QUICK, "--json")
    assert ran.code == 0, ran.err
    assert ran.json["median_s"] > 0
    assert ran.json["gflops"] > 0
    assert ran.json["max_abs_error"] < 1e-4
    assert ran.json["numpy_s"] > 0
    shown = Ran(capsys, "run", "y[i] = exp(x[i])", "--input", "x=float32[100]", *QUICK)
    assert shown.code == 0
    assert "PASS: max abs error" in shown.out
    assert "numpy" not in shown.out


def test_run_needs_the_device(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roller_svc.verify.run_and_verify.device_present", lambda: False)
    ran = Ran(capsys, "run", MATMUL, *INPUTS, *QUICK, "--target", "nvidia-h200-sxm")
    assert ran.code == 3
    assert "no NVIDIA device" in ran.err


@pytest.mark.parametrize("target", ["local", "nvidia-h200-sxm", "nvidia-k80"])
def test_explain_tells_the_story(capsys: pytest.CaptureFixture[str], target: str) -> None:
    ran = Ran(capsys, "explain", MATMUL, *INPUTS, "--target", target, "--steps", "5")
    assert ran.code == 0, ran.err
    for word in ("tiles visited", "footprint", "Candidates", "bound by", "occupancy"):
        assert word in ran.out
    ran = Ran(capsys, "explain", MATMUL, *INPUTS, "--target", target, "--json", "--top-k", "2")
    assert len(ran.json["attempts"]) == 2
    story = ran.json["story"]
    assert story["searches"][story["programs"][0]["kernels"][0]["found"][0]["search"]]["steps"]
    assert story["programs"][0]["limited_by"]


def test_targets(capsys: pytest.CaptureFixture[str]) -> None:
    assert "nvidia-h200-sxm" in Ran(capsys, "targets").out
    rows = {row["id"]: row for row in Ran(capsys, "targets", "--json").json["targets"]}
    assert rows["local"]["compiles"] is True
    assert rows["nvidia-k80"]["compiles"] is False


def test_a_refusal_has_a_caret_and_exit_code_2(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "compile", "C[m, n] +=! A[m, k] * Q[k, n]", *INPUTS)
    assert ran.code == 2
    assert ran.out == ""
    assert "line 1, column 23: unknown-name" in ran.err
    lines = ran.err.splitlines()
    at = next(number for number, line in enumerate(lines) if "Q[k, n]" in line)
    assert lines[at].index("Q[k") == lines[at + 1].index("^")


def test_with_json_a_refusal_is_the_one_document(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "compile", "C[m] = ", *INPUTS, "--json")
    assert ran.code == 2
    assert ran.json["error"]["line"] == 1
    assert ran.json["error"]["code"]
    assert ran.err


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("--input", "A=float32[16"), 2, "NAME=DTYPE"),
        (("--input", "A=float32[16,x]"), 2, "whole numbers"),
        (("--input", "A=float33[16,24]"), 2, "unknown-dtype"),
        (("--input", "A=float32[1]", "--input", "A=float32[1]"), 2, "twice"),
        ((*INPUTS, "--target", "nvidia-nothing"), 2, "unknown-hardware"),
        ((*INPUTS, "--target", "local", "--hardware", "x"), 2, "exclude"),
        ((*INPUTS, "--hardware", "no-such-file.yaml"), 2, "no-such-file.yaml"),
        ((*INPUTS, "--top-k", "0"), 2, "top_k"),
        ((*INPUTS, "--emulate"), 2, "emulator-unavailable"),
        ((*INPUTS, "--target", "nvidia-k80"), 3, "sm_37"),
        ((*INPUTS, "--server", "http://127.0.0.1:9"), 1, "server-unreachable"),
        ((*INPUTS, "--server", "nonsense"), 2, "invalid URL"),
        ((*INPUTS, *QUICK, "--save", "/proc/nowhere"), 2, "unwritable-folder"),
    ],
)
def test_exit_codes(capsys: pytest.CaptureFixture[str], words: tuple[str, ...], code: int, says: str) -> None:
    ran = Ran(capsys, "compile", MATMUL, *words)
    assert ran.code == code
    assert says in ran.err
    assert ran.out == ""


def test_a_wrong_spec_is_named_by_its_file(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = tmp_path / "mine.yaml"
    spec.write_text("id: mine\nnum_coers: 3\n")
    ran = Ran(capsys, "compile", MATMUL, *INPUTS, "--hardware", str(spec))
    assert ran.code == 2
    assert f"{spec}: num_coers: unknown field; did you mean num_cores?" in ran.err
    assert MATMUL not in ran.err


def test_a_wrong_option_is_a_json_document_too(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "compile", MATMUL, *INPUTS, "--frobnicate", "--json")
    assert ran.code == 2
    assert ran.json["error"]["code"] == "invalid-argument"


def test_a_missing_file_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    (tmp_path / "binary").write_bytes(b"\xff\xfe")
    assert Ran(capsys, "compile", "@no-such-file", *INPUTS).code == 2
    assert Ran(capsys, "compile", f"@{tmp_path / 'binary'}", *INPUTS).code == 2


def test_control_c(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(command, "_parse", interrupted)
    ran = Ran(capsys, "targets")
    assert ran.code == 130
    assert "Traceback" not in ran.err


def test_errors_that_are_nobodys_fault_exit_with_1() -> None:
    assert command.exit_code(RollerError("a bug")) == 1


CORPUS = {
    "cases": [
        {"id": "good", "cls": "gemm", "expr": MATMUL, "out_meta": {"C": {}},
         "inputs": {"A": {"dtype": "float32", "shape": [8, 8]}, "B": {"dtype": "float32", "shape": [8, 8]}}},
        {"id": "big", "cls": "map", "expr": "y[i] = x[i]", "inputs": {"x": {"dtype": "float32", "shape": [1 << 20]}},
         "small": {"expr": "y[i] = x[i]", "inputs": {"x": {"dtype": "float32", "shape": [8]}}}},
        {"id": "bad", "cls": "map", "expr": "y[i] = q[i]", "inputs": {"x": {"dtype": "float32", "shape": [8]}}},
        {"id": "twin", "cls": "map", "expr": "y[i] = q[i]", "inputs": {"x": {"dtype": "float32", "shape": [8]}}},
    ]
}  # fmt: skip


def test_corpus_judges_every_case(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps(CORPUS))
    ran = Ran(capsys, "corpus", str(path), "--small", "--jobs", "1", "--json")
    assert ran.code == 0, ran.err
    rows = {row["id"]: row for row in ran.json["cases"]}
    assert [rows[name]["status"] for name in ("good", "big", "bad", "twin")] == ["ok", "ok", "refused", "refused"]
    assert set(rows["good"]) >= {"id", "cls", "status", "detail", "max_abs_error", "compile_seconds"}
    assert "unknown-name" in rows["bad"]["detail"]
    assert ran.json["summary"]["ok"] == 2
    assert not list((settings.settings().folder / "corpus").iterdir())


def test_corpus_demands_tiles(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps({"cases": CORPUS["cases"][:1]}))
    words = ("corpus", str(path), "--target", "nvidia-a100-sxm-80gb", "--jobs", "1", "--json")
    refused = Ran(capsys, *words, "--family", "mma")
    assert refused.code == 0
    assert "tf32 is not allowed" in refused.json["cases"][0]["detail"]
    staged = Ran(capsys, *words, "--family", "simt", "--tiles", "raster=1")
    assert staged.json["cases"][0]["kernels"][0]["family"] == "simt"
    assert Ran(capsys, *words, "--family", "wmma").code == 2
    assert Ran(capsys, *words, "--tiles", "depth=1").code == 2


def test_corpus_resumes(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps({"cases": CORPUS["cases"][:2]}))
    words = ("corpus", str(path), "--small", "--jobs", "1", "--json")
    monkeypatch.setattr("roller_svc.cli.corpus.Journal.drop", lambda self: None)
    first = Ran(capsys, *words).json
    journal = next((settings.settings().folder / "corpus").iterdir())
    one, two = journal.read_text().splitlines()
    journal.write_text(one.replace('"detail": ""', '"detail": "kept"') + "\n" + two[:-5])
    again = Ran(capsys, *words, "--resume").json
    assert sorted(row["detail"] for row in again["cases"]) == ["", "kept"]
    assert [row["id"] for row in again["cases"]] == [row["id"] for row in first["cases"]]


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"cases": [5]}', '{"cases": [{"id": 1}]}'])
def test_what_is_no_corpus_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path, content: str) -> None:
    path = tmp_path / "corpus.json"
    path.write_text(content)
    assert Ran(capsys, "corpus", str(path)).code == 2


def test_bench_construct(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    path = tmp_path / "corpus.json"
    path.write_text(json.dumps(CORPUS))
    ran = Ran(capsys, "bench", "construct", "--cases", str(path), "--target", "nvidia-h200-sxm", "--json")
    assert ran.code == 0, ran.err
    found = ran.json["targets"]["nvidia-h200-sxm"]
    assert set(found) >= {"median_s", "p99_s", "max_s", "cases"}
    assert len(found["cases"]) == 4
    assert Ran(capsys, "bench", "nothing").code == 2


def test_bench_names_the_distribution_that_brings_it(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda **_: ())
    ran = Ran(capsys, "bench", "construct")
    assert ran.code == 2
    assert "missing-package" in ran.err
    assert "python -m pip install -e bench" in ran.err
    assert Ran(capsys, "targets").code == 0


def test_serve_refuses_to_open_up_without_a_key(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "serve", "--host", "0.0.0.0", "--port", "0")
    assert ran.code == 2
    assert "ROLLER_API_KEYS" in ran.err
    assert Ran(capsys, "serve", "--port", "70000").code == 2


def test_a_closed_pipe_is_no_traceback() -> None:
    command = f"{sys.executable} -m roller_svc targets --json | head -c 10"
    done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, check=False)
    assert "Traceback" not in done.stderr
    assert "Exception" not in done.stderr


@pytest.mark.parametrize("arguments", [("targets",), ("targets", "--json"), ("ops", "nosuch", "--json")])
@pytest.mark.parametrize("unbuffered", ["", "1"])
def test_an_output_without_space_is_an_error_in_one_line(arguments: tuple[str, ...], unbuffered: str) -> None:
    with Path("/dev/full").open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", "roller_svc", *arguments],
            env=os.environ | {"PYTHONUNBUFFERED": unbuffered},
            stdout=full, stderr=subprocess.PIPE, text=True, check=False,
        )  # fmt: skip
    *usage, error = done.stderr.splitlines()
    assert error == "error: cannot write the output: No space left on device; free space, or write elsewhere"
    assert not any("Traceback" in line for line in usage)
    assert done.returncode == 1


def test_bench_model(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    operators = json.loads(PUBLISHED.read_text(encoding="utf-8"))
    path = tmp_path / "published.json"
    path.write_text(json.dumps(operators | {"ops": operators["ops"][:3]}))
    ran = Ran(capsys, "bench", "model", "--published", str(path), "--json")
    assert ran.code == 0, ran.err
    assert ran.json["overall"]["median_abs_log_ratio"] >= 0
    assert {"id", "predicted_s", "best_published_s", "roller_s"} <= set(ran.json["cases"][0])
    assert Ran(capsys, "bench", "model", "--published", "no-such-file").code == 2
    other = Ran(capsys, "bench", "model", "--published", str(path), "--target", "nvidia-h200-sxm")
    assert other.code == 2
    assert "no times are published for nvidia-h200-sxm" in other.err


def test_a_result_that_is_too_large_to_check_is_said_to_be_unchecked(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def too_large(*_: object, **__: object) -> None:
        raise ArgumentError("too large", code="reference-too-large")

    monkeypatch.setattr("roller_svc.cli.run.verify_results", too_large)
    ran = Ran(capsys, "run", MATMUL, *INPUTS, *QUICK)
    assert ran.code == 0
    assert "not checked" in ran.out


def test_a_wrong_answer_fails(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    wrong = {"C": np.zeros((16, 20), np.float32)}
    monkeypatch.setattr("roller_svc.verify.run_and_verify.LoadedKernel.results", lambda self: wrong)
    ran = Ran(capsys, "run", MATMUL, *INPUTS, *QUICK)
    assert ran.code == 1
    assert "wrong-answer" in ran.err


def test_run_checks_a_kernel_that_updates_a_donated_input(capsys: pytest.CaptureFixture[str]) -> None:
    inputs = ("--input", "grid=float32[50]", "--input", "at=int32[40]")
    ran = Ran(capsys, "run", "grid[at[n]] +=. 1.0", *inputs, *QUICK, "--donate", "grid", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["checked"] is True
    refused = Ran(capsys, "run", "grid[at[n]] +=. 1.0", *inputs, *QUICK, "--donate", "at")
    assert refused.code == 2
    assert "donate: at must be the target of one scatter" in refused.err
    for name, flag in (("run", "--donate"), ("estimate", "--donate"), ("compile", "--constant")):
        listed = Ran(capsys, name, "grid[at[n]] +=. 1.0", *inputs, flag, "grid,at")
        assert (listed.code, f"{flag} grid,at: expected one name" in listed.err) == (2, True)
        assert f"hint: repeat the flag: {flag} grid {flag} at" in listed.err


@pytest.mark.emulator
def test_run_in_the_emulator_is_checked_and_not_timed(capsys: pytest.CaptureFixture[str]) -> None:
    ran = Ran(capsys, "run", MATMUL, *INPUTS, *QUICK, "--target", "nvidia-h200-sxm", "--emulate", "--json")
    assert ran.code == 0, ran.err
    assert ran.json["checked"] is True
    assert ran.json["max_abs_error"] < 1e-4
    assert ran.json["median_s"] is None
    shown = Ran(capsys, "run", MATMUL, *INPUTS, *QUICK, "--target", "nvidia-h200-sxm", "--emulate")
    assert "time:" not in shown.out
