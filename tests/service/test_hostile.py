"""Whatever is sent, the service answers with JSON, never with a 500, and lives on."""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Iterator
from typing import Any
from urllib.parse import quote

import pytest
from httpx import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from sampling import examples
from serving import served

from roller_svc.farm.store import Artifact
from roller_svc.ir.report import BuildRequest
from roller_svc.service.app import create_app
from roller_svc.service.routes.hardware import MAX_FAULTS
from roller_svc.settings import Settings

VALID: dict[str, Any] = {
    "expression": "C[m, n] +=! A[m, k] * B[k, n]",
    "inputs": {"A": {"dtype": "float32", "shape": [8, 8]}, "B": {"dtype": "float32", "shape": [8, 8]}},
    "outputs": ["C"],
    "target": "cpu-x86-avx2",
    "options": {"top_k": 3, "select": "model", "allow_tf32": False, "runtime": "auto"},
}
ESTIMATE: dict[str, Any] = {
    "items": [{"expression": VALID["expression"], "inputs": VALID["inputs"]}],
    "targets": ["cpu-x86-avx2"],
    "top_k": 1,
}

scalars = st.one_of(st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=12), st.just("float32"))
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=6), inner, max_size=3),
    max_leaves=6,
)


@st.composite
def mutated(draw: st.DrawFn, body: dict[str, Any]) -> Any:
    """The body with a few of its parts replaced or removed."""
    changed = json.loads(json.dumps(body))
    for _ in range(draw(st.integers(1, 3))):
        node, parent, key = changed, None, None
        while isinstance(node, dict | list) and node and (parent is None or draw(st.integers(0, 3))):
            parent = node
            key = draw(st.sampled_from(sorted(node) if isinstance(node, dict) else range(len(node))))
            node = node[key]
        if parent is None or key is None:
            return draw(values)
        if isinstance(parent, dict) and draw(st.booleans()):
            del parent[key]
        else:
            parent[key] = draw(values)
    return changed


def refused(_: BuildRequest) -> Artifact:
    return Artifact("sha256:" + "0" * 64, {"digest": "sha256:" + "0" * 64, "language": "c"}, {})


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory, stack_settings: dict[str, Any]) -> Iterator[Client]:
    app = create_app(Settings(store=tmp_path_factory.mktemp("store"), **stack_settings), refused, lambda _: "sha256:" + "1" * 64)
    with served(app) as client:
        yield client


def answered(client: Client, path: str, body: Any) -> None:
    content = json.dumps(body).encode()  # NaN and Infinity too: they are no JSON, and must be refused as such
    response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 202, 400, 404, 413, 422), response.text
    if response.status_code >= 400:
        problem = response.json()
        assert problem["code"] not in ("internal", "http-error")
        assert problem["detail"]


quick = settings(max_examples=examples(150), suppress_health_check=list(HealthCheck))


@quick
@given(body=mutated(VALID))
def test_compile(client: Client, body: Any) -> None:
    answered(client, "/v1/kernels:compile", body)


@quick
@given(body=mutated(ESTIMATE))
def test_estimates(client: Client, body: Any) -> None:
    answered(client, "/v1/estimates", body)


@quick
@given(body=mutated({"requests": [VALID, VALID | {"priority": 1, "timeout_s": 2.5}]}))
def test_batches(client: Client, body: Any) -> None:
    answered(client, "/v1/kernels:batchCompile", body)


@quick
@given(body=mutated(VALID | {"options": {"top_k": 3}, "priority": 0, "timeout_s": 60.0}))
def test_measurements(client: Client, body: Any) -> None:
    answered(client, "/v1/kernels:measure", body)


@quick
@given(body=mutated({"for_all": False}))
def test_cancellations(client: Client, body: Any) -> None:
    answered(client, "/v1/operations/0000000000000-0000000000000000:cancel", body)


@quick
@given(spec=st.data(), as_text=st.booleans())
def test_validated_specs(client: Client, spec: st.DataObject, as_text: bool) -> None:
    whole = client.get("/v1/hardware/cpu-x86-avx2").json()
    changed = spec.draw(mutated(whole))
    answered(client, "/v1/hardware:validate", {"hardware": json.dumps(changed) if as_text else changed})


@quick
@given(text=st.text(max_size=2000))
def test_text_as_yaml(client: Client, text: str) -> None:
    answered(client, "/v1/hardware:validate", {"hardware": text})


header_values = st.text(st.characters(min_codepoint=0x20, max_codepoint=0xFF, exclude_characters="\x7f"), max_size=300)


@pytest.mark.slow
@quick
@given(value=header_values)
def test_headers(client: Client, value: str) -> None:
    content = value.strip(" \t").encode("latin-1")
    response = client.post("/v1/kernels:compile", json=VALID, headers={"Idempotency-Key": content, "Prefer": content})
    assert response.status_code in (200, 202, 409, 422), response.text
    done = client.post("/v1/kernels:compile", json=VALID, headers={"Prefer": "wait=30"}).json()["name"]
    for header in ("Last-Event-ID", "If-None-Match", "Accept"):
        for path in (f"/v1/{done}/events", f"/v1/kernels/sha256:{'0' * 64}/source"):
            assert client.get(path, headers={header: content}).status_code in (200, 304, 404, 422)


@quick
@given(token=st.text(max_size=220), size=st.one_of(st.integers(), st.text(max_size=8)))
def test_pages(client: Client, token: str, size: object) -> None:
    with contextlib.suppress(UnicodeEncodeError):  # of a lone surrogate, which httpx does not send
        response = client.get("/v1/operations", params={"page_token": token, "page_size": str(size)})
        assert response.status_code in (200, 422), response.text
        if response.status_code == 422:
            assert response.json()["code"] in ("invalid-argument", "invalid-body")


@quick
@given(name=st.text(min_size=1, max_size=100))
def test_names_of_operations(client: Client, name: str) -> None:
    with contextlib.suppress(UnicodeEncodeError):
        quoted = quote(name, safe="")
        for path in (f"/v1/operations/{quoted}", f"/v1/operations/{quoted}/events"):
            assert client.get(path).status_code == 404
        assert client.post(f"/v1/operations/{quoted}:cancel", json={}).status_code == 404


BOMBS = {
    "aliases": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nd: [*c, *c]",
    "depth": "[" * 5000,
    "tag": "!!python/object/apply:os.system ['true']",
    "binary": "!!binary " + "A" * 1000,
    "long number": "id: " + "9" * 20_000,
    "long key": "k" * 100_000 + ": 1",
    "many keys": "\n".join(f"k{number}: 1" for number in range(9000)),
    "documents": "---\na: 1\n" * 2000,
    "merge": "a: &a {b: 1}\nc: {<<: *a}",
}


@pytest.mark.parametrize("name", BOMBS)
def test_yaml_that_expands_is_refused_at_once(client: Client, name: str) -> None:
    begin_s = time.monotonic()
    response = client.post("/v1/hardware:validate", json={"hardware": BOMBS[name]})
    assert (response.status_code, response.json()["code"]) == (422, "invalid-spec")
    assert len(response.content) < 50_000
    assert time.monotonic() - begin_s < 30


def test_a_spec_with_many_faults_has_a_short_response(client: Client) -> None:
    spec = {"levels": [{"x": number} for number in range(900)]}
    response = client.post("/v1/hardware:validate", json={"hardware": spec})
    assert response.status_code == 422
    assert len(response.json()["errors"]) <= MAX_FAULTS + 1
    assert len(response.content) < 50_000


@quick
@given(spec=st.data())
def test_specs(client: Client, spec: st.DataObject) -> None:
    whole = client.get("/v1/hardware/cpu-x86-avx2").json()
    body = VALID | {"hardware": spec.draw(mutated(whole))}
    del body["target"]
    answered(client, "/v1/kernels:compile", body)


@pytest.mark.parametrize("digest", ["", "sha256:", "sha256:" + "g" * 64, "%2e%2e%2f", "a" * 5000, "%00", "sha256:%0a"])
def test_digests(client: Client, digest: str) -> None:
    for path in (
        f"/v1/operations/{digest}/events",
        f"/v1/kernels/{digest}/source",
        f"/v1/kernels/{digest}",
        f"/v1/operations/{digest}",
        f"/v1/hardware/{digest}",
    ):
        assert client.get(path).status_code == 404
