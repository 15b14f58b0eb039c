"""Whatever is sent, the service answers with JSON, never with a 500, and lives on."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
from httpx import Client
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from serving import served

from roller_svc.farm.store import Artifact
from roller_svc.ir.report import BuildRequest
from roller_svc.service.app import create_app
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

scalars = st.one_of(
    st.none(), st.booleans(), st.integers(-(2**70), 2**70), st.floats(), st.text(max_size=12), st.just("float32")
)
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
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Client]:
    app = create_app(Settings(store=tmp_path_factory.mktemp("store")), refused, lambda _: "sha256:" + "1" * 64)
    with served(app) as client:
        yield client


def answered(client: Client, path: str, body: Any) -> None:
    content = json.dumps(body).encode()  # NaN and Infinity too: they are no JSON, and must be refused as such
    response = client.post(path, content=content, headers={"Content-Type": "application/json"})
    assert response.status_code in (200, 202, 400, 404, 422), response.text
    if response.status_code >= 400:
        problem = response.json()
        assert problem["code"] not in ("internal", "http-error")
        assert problem["detail"]


quick = settings(max_examples=150, derandomize=True, deadline=None, suppress_health_check=list(HealthCheck))


@quick
@given(body=mutated(VALID))
def test_compile(client: Client, body: Any) -> None:
    answered(client, "/v1/kernels:compile", body)


@quick
@given(body=mutated(ESTIMATE))
def test_estimates(client: Client, body: Any) -> None:
    answered(client, "/v1/estimates", body)


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
        f"/v1/kernels/{digest}/source",
        f"/v1/kernels/{digest}",
        f"/v1/operations/{digest}",
        f"/v1/hardware/{digest}",
    ):
        assert client.get(path).status_code == 404
