"""The service over HTTP, with a builder that makes hand-written kernels at once."""

from __future__ import annotations

import io
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from builders import BODY, Builder
from httpx import Client
from serving import served

from roller_svc.service import readiness
from roller_svc.service.app import create_app
from roller_svc.settings import Settings

WAIT = {"Prefer": "wait=30"}


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(store=tmp_path / "store", max_body_bytes=8192, max_items=4, queue_length=2)


@pytest.fixture
def client(settings: Settings, builder: Builder) -> Iterator[Client]:
    with served(create_app(settings, builder)) as client:
        yield client


def compiled(client: Client, **changes: Any) -> Any:
    return client.post("/v1/kernels:compile", json=BODY | changes, headers=WAIT)


def problem(response: Any, status: int, code: str) -> dict[str, Any]:
    assert response.headers["content-type"] == "application/problem+json"
    body: dict[str, Any] = response.json()
    assert (response.status_code, body["status"], body["code"]) == (status, status, code)
    assert set(body) >= {"type", "title", "status", "detail", "code", "errors"}
    assert "Traceback" not in response.text
    return body


def test_estimates_that_there_is_no_time_for_say_so(tmp_path: Path) -> None:
    items = [{"expression": BODY["expression"], "inputs": BODY["inputs"]}]
    late = Settings(store=tmp_path / "store", estimates_timeout_s=1e-9)
    with served(create_app(late)) as client:
        answer = client.post("/v1/estimates", json={"items": items, "targets": ["cpu-x86-avx2"]}).json()
    (one,) = answer["estimates"]
    assert one["error"]["code"] == "estimates-timeout"
    assert "candidates" not in one


def test_estimates_donate_the_inputs_that_each_item_has(client: Client) -> None:
    row = {"dtype": "float32", "shape": [64]}
    inputs = {"at": row | {"dtype": "int32"}, "x": row}
    large = row | {"shape": [1 << 28]}
    items = [{"expression": f"{t}[at[n]] +=. x[n]", "inputs": inputs | {t: large}} for t in ("g", "h")]
    items.append({"expression": "y[n] = x[n]", "inputs": {"x": row}})
    body = {"items": items, "targets": ["nvidia-h200-sxm"]}

    def seconds(**options: Any) -> list[float]:
        answer = client.post("/v1/estimates", json=body | options).json()
        return [each["candidates"][0]["seconds"] for each in answer["estimates"]]

    copied, some, both = seconds(), seconds(donate=["g"]), seconds(donate=["h", "g"])
    assert some[0] < copied[0] / 5
    assert some[1:] == copied[1:]
    assert both == [some[0], some[0], copied[2]]
    refused = problem(client.post("/v1/estimates", json=body | {"donate": ["g", "T"]}), 422, "invalid-option")
    assert refused["detail"] == "donate: no item has an input 'T'"
    wrong = client.post("/v1/estimates", json=body | {"donate": ["x"]}).json()["estimates"]
    assert [each["error"]["code"] for each in wrong] == ["invalid-option"] * 3  # all have x, and none updates it


def test_compile_answers_with_an_operation(client: Client, builder: Builder) -> None:
    response = compiled(client)
    assert response.status_code == 200
    assert response.headers["preference-applied"] == "wait=30"
    body = response.json()
    assert body["name"].startswith("operations/")
    assert body["done"] is True
    assert body["metadata"]["stage"] == "done"
    assert body["metadata"]["cache"] == "miss"
    answer = body["response"]
    assert set(answer) >= {
        "digest",
        "target",
        "expression",
        "language",
        "launches",
        "resources",
        "estimate",
        "measurement",
        "links",
    }
    assert answer["links"]["source"] == f"/v1/kernels/{answer['digest']}/source"
    again = compiled(client).json()
    assert again["metadata"]["cache"] == "hit"
    assert again["response"] == answer
    assert builder.built == 1
    assert client.get(f"/v1/{again['name']}").json()["response"] == answer


def test_what_is_not_done_is_202_with_its_place(client: Client, builder: Builder) -> None:
    builder.gate.clear()
    response = client.post("/v1/kernels:compile", json=BODY)
    assert response.status_code == 202
    body = response.json()
    assert body["done"] is False
    assert "response" not in body
    assert "error" not in body
    assert response.headers["location"] == f"/v1/{body['name']}"
    joined = client.post("/v1/kernels:compile", json=BODY, headers={"Prefer": "respond-async, wait=0.01"})
    assert joined.status_code == 202
    assert joined.json()["metadata"]["cache"] == "joined"
    assert client.get(response.headers["location"]).json()["done"] is False
    builder.gate.set()
    ended = client.get(f"{response.headers['location']}?wait=30").json()
    assert ended["done"] is True
    assert ended["response"]["language"] == "c"
    assert builder.built == 1


def test_a_failed_build_is_a_served_request(client: Client) -> None:
    response = compiled(client, options={"top_k": 99})
    assert response.status_code == 200
    body = response.json()
    assert body["done"] is True
    assert "response" not in body
    assert (body["error"]["code"], body["error"]["status"], body["error"]["log"]) == ("compile-failed", 500, "line 1")
    assert compiled(client, options={"top_k": 98}).json()["error"]["code"] == "toolchain-missing"
    assert compiled(client, options={"top_k": 97}).json()["error"]["code"] == "farm-error"


def test_a_refused_expression_points_into_itself(client: Client) -> None:
    body = problem(compiled(client, expression="C[m, n] +=! A[m, k] * Q[k, n]"), 422, "unknown-name")
    assert body["errors"][0]["pointer"] == "/expression"
    assert body["errors"][0]["line"] == 1
    assert body["errors"][0]["column"] == 23
    assert body["errors"][0]["message"]


@pytest.mark.parametrize(
    ("changes", "status", "code"),
    [
        ({"target": "nvidia-nothing"}, 404, "unknown-hardware"),
        ({"options": {"top_k": 0}}, 422, "invalid-option"),
        ({"options": {"name": "a;b"}}, 422, "invalid-option"),
        ({"options": {"select": "best"}}, 422, "invalid-option"),
        ({"options": {"top_k": "10"}}, 422, "invalid-body"),
        ({"options": {"unknown": 1}}, 422, "invalid-body"),
        ({"options": {"runtime": "emulator"}}, 422, "emulator-unavailable"),
        ({"inputs": {"A": {"dtype": "float33", "shape": [8, 8]}}}, 422, "unknown-dtype"),
        ({"inputs": {"A": {"dtype": "float32", "shape": [-1]}}}, 422, "invalid-shape"),
        ({"inputs": {"A": {"dtype": "float32"}}}, 422, "invalid-body"),
        ({"inputs": {}}, 422, "unknown-name"),
        ({"expression": ""}, 422, None),
        ({"expression": 5}, 422, "invalid-body"),
        ({"outputs": ["Q"]}, 422, "unknown-output"),
        ({"extra": 1}, 422, "invalid-body"),
        ({"target": None}, 422, "invalid-body"),
        ({"hardware": {}}, 422, "invalid-body"),
        ({"target": None, "hardware": {"id": "x"}}, 422, "invalid-spec"),
    ],
)
def test_refusals(client: Client, changes: dict[str, Any], status: int, code: str | None) -> None:
    response = compiled(client, **changes)
    problem(response, status, code or response.json()["code"])


def test_a_wrong_field_is_pointed_to(client: Client) -> None:
    body = problem(compiled(client, inputs={"A": {"dtype": "float32", "shape": [1, "x"]}}), 422, "invalid-body")
    assert body["errors"][0]["pointer"] == "/inputs/A/shape/1"
    body = problem(compiled(client, inputs={"A": "float32[1,2]"}), 422, "invalid-body")
    message = 'expected {"dtype": "float32", "shape": [64, 32]}, got \'float32[1,2]\''
    assert body["errors"] == [{"pointer": "/inputs/A", "message": message}]


def test_a_spec_may_stand_in_place_of_a_target(client: Client) -> None:
    spec = client.get("/v1/hardware/cpu-x86-avx2").json()
    response = compiled(client, target=None, hardware=spec)
    assert response.status_code == 200, response.text
    assert response.json()["done"] is True


@pytest.mark.parametrize(
    ("method", "path", "status", "code"),
    [
        ("GET", "/nothing", 404, "no-such-path"),
        ("GET", "/v1/kernels:compile", 405, "method-not-allowed"),
        ("DELETE", "/v1/estimates", 405, "method-not-allowed"),
        ("GET", "/v1/operations/none", 404, "unknown-operation"),
        ("GET", "/v1/operations/..%2Fx", 404, "no-such-path"),
        ("GET", "/v1/operations/x?wait=soon", 422, "invalid-body"),
        ("GET", "/v1/kernels/sha256:00/source", 404, "unknown-kernel"),
        ("GET", "/v1/hardware/none", 404, "unknown-hardware"),
    ],
)
def test_paths(client: Client, method: str, path: str, status: int, code: str) -> None:
    problem(client.request(method, path), status, code)


def test_bodies(client: Client) -> None:
    json_type = {"Content-Type": "application/json"}
    path = "/v1/kernels:compile"
    problem(client.post(path, content=b"{", headers=json_type), 400, "invalid-json")
    problem(client.post(path, content=b"\xff", headers=json_type), 400, "invalid-json")
    problem(client.post(path, content=b"[" * 3000, headers=json_type), 400, "invalid-json")
    problem(client.post(path, content=b"[]", headers=json_type), 422, "invalid-body")
    problem(client.post(path, content=b"{}", headers={"Content-Type": "text/plain"}), 415, "unsupported-media-type")
    problem(client.post(path, content=b"{}"), 415, "unsupported-media-type")
    problem(client.post(path, content=b" " * 9000, headers=json_type), 413, "body-too-large")
    problem(client.post(path, content=iter([b" " * 3000] * 4), headers=json_type), 413, "body-too-large")


def test_a_full_queue_is_503_with_a_time_to_come_back(client: Client, builder: Builder) -> None:
    builder.gate.clear()
    for extent in (1, 2):
        client.post("/v1/kernels:compile", json=BODY | {"expression": f"C[m] = A[m, 0] * {extent}"})
    response = client.post("/v1/kernels:compile", json=BODY | {"expression": "C[m] = A[m, 0] * 3"})
    builder.gate.set()
    problem(response, 503, "queue-full")
    assert response.headers["retry-after"]


def test_files_of_a_kernel(client: Client) -> None:
    answer = compiled(client).json()["response"]
    digest = answer["digest"]
    assert client.get(f"/v1/kernels/{digest}").json() == answer
    source = client.get(answer["links"]["source"])
    assert source.text == BODY["expression"]
    assert source.headers["content-type"] == "text/plain; charset=utf-8"
    assert "immutable" in source.headers["cache-control"]
    tag = source.headers["etag"]
    assert digest in tag
    unchanged = client.get(answer["links"]["source"], headers={"If-None-Match": f'"other", {tag}'})
    assert (unchanged.status_code, unchanged.content) == (304, b"")
    assert client.get(answer["links"]["binary"]).content == b"\x7fELF"
    metadata = client.get(answer["links"]["metadata"])
    assert (metadata.json(), metadata.headers["etag"]) == ({}, f'W/"{digest}/metadata"')  # sent with and without gzip
    for tag in (metadata.headers["etag"], f'"{digest}/metadata"'):
        assert client.get(answer["links"]["metadata"], headers={"If-None-Match": tag}).status_code == 304
    bundle = client.get(answer["links"]["bundle"])
    with zipfile.ZipFile(io.BytesIO(bundle.content)) as archive:
        assert sorted(archive.namelist()) == ["kernel.c", "kernel.so", "metadata.json"]
    assert client.get(answer["links"]["bundle"]).content == bundle.content
    problem(client.get(f"/v1/kernels/{digest}/sass"), 404, "unknown-artifact")
    problem(client.get(f"/v1/kernels/{digest}/ptx"), 404, "unknown-artifact")
    problem(client.get(f"/v1/kernels/{digest}/nothing"), 404, "unknown-artifact")


def test_operations_and_kernels_outlive_the_process(settings: Settings, builder: Builder) -> None:
    with served(create_app(settings, builder)) as first:
        body = compiled(first).json()
    with served(create_app(settings, builder)) as second:
        assert second.get(f"/v1/{body['name']}").json() == body
        assert second.get(body["response"]["links"]["source"]).text == BODY["expression"]
        assert compiled(second).json()["metadata"]["cache"] == "hit"
    assert builder.built == 1


def test_hardware(client: Client) -> None:
    rows = client.get("/v1/hardware").json()["hardware"]
    assert {"nvidia-h200-sxm", "cpu-x86-avx2", "nvidia-k80"} <= {row["id"] for row in rows}
    k80 = next(row for row in rows if row["id"] == "nvidia-k80")
    assert k80["compiles"] is False
    assert k80["toolchain"]
    assert client.get("/v1/hardware/nvidia-h200-sxm").json()["id"] == "nvidia-h200-sxm"


def test_health_and_version(client: Client, settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readiness, "MAX_AGE_S", 0.0)
    assert client.get("/healthz").json() == {"status": "ok"}
    assert client.get("/readyz").json()["status"] == "ready"
    assert set(client.get("/v1/version").json()) >= {"version", "generator", "toolchain"}
    assert client.get("/openapi.json").json()["openapi"].startswith("3.")
    (settings.folder / "tmp").rename(settings.folder / "gone")
    problem(client.get("/readyz"), 503, "store-error")


def test_a_key_is_wanted_where_one_is_set(tmp_path: Path, builder: Builder) -> None:
    settings = Settings(store=tmp_path, api_keys="one,two")
    with served(create_app(settings, builder)) as client:
        refused = client.get("/v1/hardware")
        problem(refused, 401, "unauthorized")
        assert refused.headers["www-authenticate"] == "Bearer"
        problem(client.get("/v1/hardware", headers={"Authorization": "Bearer three"}), 401, "unauthorized")
        assert client.get("/v1/hardware", headers={"Authorization": "Bearer two"}).status_code == 200
        assert client.get("/v1/hardware", headers={"X-API-Key": "one"}).status_code == 200
        assert client.get("/healthz").status_code == 200
