"""The client and the command line against a service: kernels, estimates, errors."""

from __future__ import annotations

import io
import json
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import served

from roller_svc import settings
from roller_svc.cli import main, remote
from roller_svc.client import NO_RETRIES, Client
from roller_svc.client.schemas import CompileRequest
from roller_svc.errors import (
    BuildError,
    BuildServiceError,
    InputError,
    NotFoundError,
    RollerError,
    ToolchainMissingError,
)
from roller_svc.farm.build import build_artifact
from roller_svc.service.app import create_app
from roller_svc.settings import Settings

MATMUL = "C[m, n] +=! A[m, k] * B[k, n]"
INPUTS = ("--input", "A=float32[16,24]", "--input", "B=float32[24,20]")
TYPES = {"A": {"dtype": "float32", "shape": [16, 24]}, "B": {"dtype": "float32", "shape": [24, 20]}}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    # builds in the service's own process: worker processes have their own tests, and take a second to start
    app = create_app(Settings(store=tmp_path_factory.mktemp("store"), api_keys="key"), build_artifact)
    with served(app) as client:
        yield str(client.base_url)


@pytest.fixture(autouse=True)
def _with_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ROLLER_API_KEY", "key")
    settings.use(settings.read_settings())


def ran(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str, str]:
    code = main(words)
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_compile_and_run_on_a_service(capsys: pytest.CaptureFixture[str], server: str, tmp_path: Path) -> None:
    words = (MATMUL, *INPUTS, "--select", "model", "--server", server)
    code, out, _ = ran(capsys, "compile", *words, "--save", str(tmp_path / "kernel"), "--name", "product", "--json")
    assert code == 0
    assert json.loads(out)["digest"].startswith("sha256:")
    assert json.loads((tmp_path / "kernel" / "metadata.json").read_text())["name"] == "product"
    code, out, _ = ran(capsys, "run", *words)
    assert code == 0
    assert "PASS" in out


@pytest.mark.slow
def test_who_waits_for_a_worker_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    app = create_app(Settings(store=tmp_path, api_keys="key", workers=0, no_worker_timeout_s=1.0))
    with served(app) as client:
        words = (MATMUL, *INPUTS, "--target", "nvidia-h200-sxm", "--server", str(client.base_url))
        code, _, err = ran(capsys, "compile", *words)
    assert code == 1
    assert "none takes from measure.sm_90a" in err
    assert "--select model" in err
    assert "no-worker" in err


def test_a_spec_in_a_file_is_sent_along(capsys: pytest.CaptureFixture[str], server: str) -> None:
    spec = Path(__file__).resolve().parents[2] / "hwspecs" / "cpu-x86-avx2.yaml"
    words = (MATMUL, *INPUTS, "--select", "model", "--hardware", str(spec), "--server", server, "--json")
    code, out, err = ran(capsys, "compile", *words)
    assert code == 0, err
    assert json.loads(out)["target"] == "cpu-x86-avx2"


def test_estimates_and_targets(capsys: pytest.CaptureFixture[str], server: str) -> None:
    words = ("estimate", MATMUL, *INPUTS, "--target", "nvidia-k80", "--target", "local", "--json")
    code, there, _ = ran(capsys, *words, "--server", server)
    assert code == 0
    _, here, _ = ran(capsys, *words)
    assert json.loads(there) == json.loads(here)
    code, out, _ = ran(capsys, "targets", "--server", server)
    assert code == 0
    assert "nvidia-k80" in out


@pytest.mark.parametrize(
    ("words", "code", "says"),
    [
        (("compile", "C[m, n] +=! A[m, k] * Q[k, n]"), 2, "line 1, column 23: unknown-name"),
        (("estimate", "C[m, n] +=! A[m, k] * Q[k, n]"), 2, "line 1, column 23: unknown-name"),
        (("compile", MATMUL, "--target", "nvidia-nothing"), 2, "unknown-hardware"),
        (("compile", MATMUL, "--target", "nvidia-k80"), 3, "toolchain-missing"),
        (("compile", MATMUL, "--top-k", "0"), 2, "invalid-option"),
        (("compile", MATMUL, "--name", "int"), 2, "invalid-option"),
    ],
)
def test_errors_are_the_same_as_without_a_service(
    capsys: pytest.CaptureFixture[str], server: str, words: tuple[str, ...], code: int, says: str
) -> None:
    got, out, err = ran(capsys, *words, *INPUTS, "--server", server)
    assert (got, out) == (code, "")
    assert says in err
    assert ran(capsys, *words, *INPUTS)[::2] == (got, err)


def test_a_wrong_key_is_refused(server: str) -> None:
    with Client(server, api_key="wrong") as client, pytest.raises(RollerError) as refused:
        client.hardware()
    assert (refused.value.code, "ROLLER_API_KEY" in str(refused.value)) == ("unauthorized", True)


def replying(status: int, body: Any) -> Client:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    transport = httpx.MockTransport(lambda _: httpx.Response(status, content=content))
    return Client("http://there", transport=transport, retry=NO_RETRIES)


@pytest.mark.parametrize(
    ("status", "body", "kind", "code"),
    [
        (422, {"status": 422, "code": "wrong-rank", "detail": "no", "errors": [{"line": 3}]}, InputError, "wrong-rank"),
        (404, {"status": 404, "code": "unknown-operation", "detail": "no"}, NotFoundError, "unknown-operation"),
        (503, {"status": 503, "code": "queue-full", "detail": "no"}, BuildServiceError, "queue-full"),
        (500, {"status": 500, "code": "internal", "detail": "no"}, RollerError, "internal"),
        (502, b"<html>", BuildServiceError, "http-error"),
        (200, b"<html>", BuildServiceError, "bad-answer"),
        (400, [], InputError, "http-error"),
    ],
)
def test_what_a_service_says_becomes_an_error(status: int, body: Any, kind: type[RollerError], code: str) -> None:
    with pytest.raises(RollerError) as told, replying(status, body) as client:
        client.hardware()
    assert told.value.code == code
    assert isinstance(told.value, kind)


def test_a_failed_build_is_raised() -> None:
    metadata = {"stage": "done", "cache": "miss", "create_time": "now"}
    problem = {"type": "", "title": "", "status": 500, "detail": "no", "code": "compile-timeout"}
    answer = {"name": "operations/1", "done": True, "metadata": metadata, "error": problem}
    body = CompileRequest.model_validate({"expression": MATMUL, "inputs": TYPES, "target": "local"})
    with replying(200, answer) as client, pytest.raises(BuildError) as failed:
        client.compile(body)
    assert failed.value.code == "compile-timeout"
    missing = answer | {"error": problem | {"code": "toolchain-missing"}}
    with replying(200, missing) as client, pytest.raises(ToolchainMissingError):
        client.compile(body)


# ---------------------------------------------------------------- operations


def listed(capsys: pytest.CaptureFixture[str], server: str) -> list[dict[str, Any]]:
    code, out, _ = ran(capsys, "operations", "list", "--server", server, "--json")
    assert code == 0
    found: list[dict[str, Any]] = json.loads(out)["operations"]
    return found


def test_operations_on_the_command_line(capsys: pytest.CaptureFixture[str], server: str) -> None:
    words = ("y[i] = x[i] + 7.0", "--input", "x=float32[77]", "--select", "model", "--server", server)
    assert ran(capsys, "compile", *words)[0] == 0
    latest = listed(capsys, server)[0]
    name = latest["name"].removeprefix("operations/")
    code, out, _ = ran(capsys, "operations", "watch", name, "--server", server)
    assert code == 0
    assert [line.split()[1] for line in out.splitlines()] == ["queued", "building", "done"]
    code, out, _ = ran(capsys, "operations", "watch", name, "--server", server, "--json")
    assert [json.loads(line)["number"] for line in out.splitlines()] == [1, 2, 3]
    code, out, _ = ran(capsys, "operations", "cancel", name, "--server", server, "--json")
    assert json.loads(out) == latest  # it is done: nothing changes
    code, out, _ = ran(capsys, "operations", "show", latest["name"], "--server", server)
    assert name in out
    code, out, _ = ran(capsys, "operations", "list", "--count", "1", "--server", server)
    assert any(line.startswith(name) for line in out.splitlines())


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (("show", "nothing"), "unknown-operation"),
        (("watch", "nothing"), "unknown-operation"),
        (("list", "--count", "0"), "--count"),
    ],
)
def test_errors_of_operations(capsys: pytest.CaptureFixture[str], server: str, words: tuple[str, ...], says: str) -> None:
    code, _, err = ran(capsys, "operations", *words, "--server", server)
    assert code == 2
    assert says in err


def test_operations_need_a_service(capsys: pytest.CaptureFixture[str]) -> None:
    code, _, err = ran(capsys, "operations", "list")
    assert code == 2
    assert "--server" in err


@pytest.mark.parametrize("name", ["../x", "/etc/x", "a/../b", "a//b", ".hidden", "a/.b", "a/b/c/d/e", "a\\b", "a/", "x\n", ""])
def test_a_bundle_with_other_paths_is_refused(tmp_path: Path, name: str) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr(zipfile.ZipInfo(name), b"x")
    with pytest.raises(BuildServiceError, match="unexpected file"):
        remote.unpack(archive.getvalue(), tmp_path / "inside")
    assert list(tmp_path.rglob("*")) == []


def test_a_bundle_may_have_folders(tmp_path: Path) -> None:
    archive = io.BytesIO()
    with zipfile.ZipFile(archive, "w") as bundle:
        bundle.writestr("kernels/sha256:00/kernel.c", b"x")
    remote.unpack(archive.getvalue(), tmp_path)
    assert (tmp_path / "kernels" / "sha256:00" / "kernel.c").read_bytes() == b"x"
