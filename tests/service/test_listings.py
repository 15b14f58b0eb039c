"""PTX and SASS of a kernel, made when they are asked for: over HTTP, on the command line, in Python."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx import Client
from serving import served

import roller_svc
from roller_svc.cli import main
from roller_svc.errors import ArgumentError
from roller_svc.farm.build import build_artifact
from roller_svc.service.app import create_app
from roller_svc.settings import Settings
from roller_svc.toolchain.binaries import sass

BODY: dict[str, Any] = {
    "expression": "C[n] = A[n] * 2",
    "inputs": {"A": {"dtype": "float32", "shape": [1024]}},
    "target": "nvidia-a100-sxm-80gb",
    "options": {"top_k": 1, "select": "model"},
}
WORDS = ("compile", BODY["expression"], "--input", "A=float32[1024]", "--select", "model", "--top-k", "1")


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    with served(create_app(Settings(store=tmp_path / "store"), build_artifact)) as client:
        yield client


@pytest.fixture
def _no_disassembler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sass, "wheel_roots", list)
    monkeypatch.setattr(sass, "_SYSTEM", tmp_path / "nvdisasm")
    monkeypatch.setattr(sass.shutil, "which", lambda name: None)


def links(client: Client) -> dict[str, str]:
    answer = client.post("/v1/kernels:compile", json=BODY, headers={"Prefer": "wait=60"}).json()
    found: dict[str, str] = answer["response"]["links"]
    return found


def test_a_cuda_kernel_has_both(client: Client) -> None:
    found = links(client)
    code = client.get(found["sass"])
    assert code.status_code == 200
    assert code.headers["content-type"] == "text/plain; charset=utf-8"
    assert "STG.E" in code.text
    assert ".target\tsm_80" in code.text
    assert ".target sm_80" in client.get(found["ptx"]).text


@pytest.mark.slow
def test_lines_and_numbers_are_linked(client: Client) -> None:
    found = links(client)
    lines = client.get(found["source"]).text.split("\n")
    for kind, word in (("ptx", "st.global"), ("sass", "STG.E")):
        answer = client.get(found[f"{kind}-links"])
        assert answer.headers["content-type"] == "application/json"
        assert answer.json()["note"] == ""
        listing = client.get(found[kind]).text.split("\n")
        stores = [
            each for each in answer.json()["links"] if any(word in line for line in listing[each["first"] - 1 : each["last"]])
        ]
        assert stores
        assert all("= " in lines[each["source"][-1] - 1] for each in stores)
    annotations = client.get(found["annotations"])
    assert "immutable" not in annotations.headers.get("cache-control", "")
    numbers = annotations.json()["numbers"]
    assert annotations.json()["note"] == ""
    assert all(lines[each["line"] - 1][each["column"] :][: each["length"]].isdecimal() for each in numbers)


@pytest.mark.slow
def test_a_c_kernel_has_assembly(client: Client) -> None:
    body = BODY | {"target": "cpu-x86-avx2"}
    answer = client.post("/v1/kernels:compile", json=body, headers={"Prefer": "wait=60"}).json()
    found = answer["response"]["links"]
    assert "sass" not in found
    assembly, source = (client.get(found[kind]).text.split("\n") for kind in ("assembly", "source"))
    links = client.get(found["assembly-links"]).json()["links"]
    vectors = [each for each in links if any("%ymm" in line for line in assembly[each["first"] - 1 : each["last"]])]
    assert any("*" in source[each["source"][0] - 1] for each in vectors)
    assert not any(".loc" in line or ".debug" in line for line in assembly)
    assert client.get(found["source"].replace("source", "sass")).status_code == 404


@pytest.mark.usefixtures("_no_disassembler")
def test_without_a_disassembler_the_answer_says_why(client: Client) -> None:
    answer = client.get(links(client)["sass"])
    assert answer.status_code == 404
    assert answer.json()["code"] == "no-disassembler"
    assert "pip install 'roller-svc[cuda]'" in answer.json()["detail"]


def test_the_command_line_shows_and_keeps_them(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    folder = tmp_path / "kernel"
    words = [*WORDS, "--target", BODY["target"], "--ptx", "--sass"]
    assert main([*words, "--json", "--save", str(folder)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert "STG.E" in shown["sass"]
    assert (folder / "kernel.sass").read_text() == shown["sass"]
    assert (folder / "kernel.ptx").read_text() == shown["ptx"]
    assert roller_svc.load(folder).sass() == shown["sass"]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert shown["sass"] in out
    assert shown["ptx"] in out


@pytest.mark.usefixtures("_no_disassembler")
def test_the_command_line_says_what_is_missing(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--target", BODY["target"], "--sass"]) == 3
    assert "roller-svc[cuda]" in capsys.readouterr().err


def test_a_kernel_in_c_has_neither(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*WORDS, "--sass"]) == 2
    kernel = roller_svc.compile(BODY["expression"], {"A": ("float32", (1024,))}, top_k=1, select="model")
    for listing in (kernel.ptx, kernel.sass):
        with pytest.raises(ArgumentError) as refused:
            listing()
        assert refused.value.code == "unknown-artifact"
