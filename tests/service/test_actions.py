"""/v1/actions, and `roller why-miss` on a service and on its store."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from builders import BODY, Builder
from serving import served

from roller_svc import settings as current
from roller_svc.cli import main
from roller_svc.client.client import Client
from roller_svc.client.schemas import CompileRequest
from roller_svc.service.app import create_app
from roller_svc.settings import Settings

WORDS = ["C[m, n] +=! A[m, k] * B[k, n]", "--input", "A=float32[8,8]", "--input", "B=float32[8,8]", "--output", "C",
         "--target", "cpu-x86-avx2", "--select", "model"]  # fmt: skip


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(store=tmp_path / "store", workers=1)


@pytest.fixture
def client(settings: Settings) -> Iterator[httpx.Client]:
    with served(create_app(settings, Builder())) as client:
        yield client


def compiled(client: httpx.Client, **options: Any) -> str:
    body = BODY | {"options": BODY["options"] | options}
    operation = client.post("/v1/kernels:compile", json=body, headers={"Prefer": "wait=30"}).json()
    assert operation["done"]
    return str(operation["metadata"]["action"])


@pytest.mark.slow
def test_an_action_is_explained_by_its_digest(client: httpx.Client) -> None:
    stored = compiled(client)
    document = client.get(f"/v1/actions/{stored}").json()
    assert document["action"] == stored
    assert document["result"].startswith("sha256:")
    assert set(document["parts"]) == {"expression", "spec", "options", "compiler", "generator"}
    failed = compiled(client, top_k=99)  # the builder refuses it
    document = client.get(f"/v1/actions/{failed}").json()
    assert document["result"] is None
    assert document["remembered_error"]["code"] == "compile-failed"
    assert document["remembered_error"]["until"] > "2026"
    assert document["nearest"]["action"] == stored
    fields = [{"field": "top_k", "this": 99, "nearest": 10}]
    assert document["nearest"]["differences"] == [{"part": "options", "fields": fields}]


@pytest.mark.parametrize(("digest", "code"), [("sha256:" + "0" * 64, "unknown-action"), ("x", "invalid-digest")])
def test_other_digests_are_refused(client: httpx.Client, digest: str, code: str) -> None:
    assert client.get(f"/v1/actions/{digest}").json()["code"] == code


def test_a_request_is_explained_without_a_build(client: httpx.Client) -> None:
    with Client(str(client.base_url)) as service:
        request = CompileRequest.model_validate(BODY)
        before = service.explain(request)
        assert (before.result, before.nearest) == (None, None)
        assert client.get(f"/v1/actions/{before.action}").status_code == 404
        assert compiled(client) == before.action
        assert service.explain(request).result is not None
    refused = client.post("/v1/actions:explain", json=BODY | {"expression": "C[m"})
    assert refused.status_code == 422


def test_explanations_show_no_text_of_other_clients(client: httpx.Client) -> None:
    compiled_text = BODY["expression"] + "  # of another client"
    client.post("/v1/kernels:compile", json=BODY | {"expression": compiled_text}, headers={"Prefer": "wait=30"})
    wanted = BODY | {"expression": BODY["expression"].replace("*", "+")}
    nearest = client.post("/v1/actions:explain", json=wanted).json()["nearest"]
    (difference,) = [part["fields"] for part in nearest["differences"] if part["part"] == "expression"]
    assert difference[0]["nearest"].startswith("C[")
    assert "another" not in str(nearest)


def test_the_command_line_explains_requests(client: httpx.Client, settings: Settings, capsys: pytest.CaptureFixture[str]) -> None:
    compiled(client, top_k=10)
    current.use(settings)
    for place in (["--server", str(client.base_url)], ["--store", settings.store]):
        assert main(["why-miss", *WORDS, "--top-k", "10", *place]) == 0
        assert "is stored: sha256:" in capsys.readouterr().out
        assert main(["why-miss", *WORDS, "--top-k", "3", *place]) == 0
        lines = capsys.readouterr().out.splitlines()
        assert "is not stored" in lines[0]
        assert lines[-1].split() == ["options", "top_k", "3", "10"]
        assert main(["why-miss", *WORDS, "--top-k", "3", "--json", *place]) == 0
        assert json.loads(capsys.readouterr().out)["nearest"]["differences"][0]["part"] == "options"


def test_the_command_line_says_that_nothing_was_built(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["why-miss", *WORDS, "--store", str(tmp_path)]) == 0
    assert "nothing comparable was built" in capsys.readouterr().out
