"""POST /v1/kernels:explain: the story of a program over HTTP."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import httpx
import pytest
from serving import served

import roller_svc
from roller_svc.ir.canonical import from_json
from roller_svc.ir.story import Story
from roller_svc.service.app import create_app
from roller_svc.settings import Settings

EXPRESSION = "C[m, n] +=! A[m, k] * B[k, n]"
INPUTS = {"A": ("float16", (1024, 512)), "B": ("float16", (512, 1024))}
BODY = {
    "expression": EXPRESSION,
    "inputs": {name: {"dtype": dtype, "shape": list(shape)} for name, (dtype, shape) in INPUTS.items()},
}


@pytest.fixture(scope="module")
def client(tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = Settings(store=tmp_path_factory.mktemp("store"), workers=0, database_url="")
    with served(create_app(settings)) as client:
        yield client


def explain(client: httpx.Client, **changes: Any) -> httpx.Response:
    return client.post("/v1/kernels:explain", json=BODY | changes)


def test_story_is_the_one_of_python(client: httpx.Client) -> None:
    response = explain(client, target="nvidia-h200-sxm", options={"top_k": 3})
    assert response.status_code == 200, response.text
    assert from_json(Story, response.json()) == roller_svc.explain(EXPRESSION, INPUTS, target="nvidia-h200-sxm", top_k=3)
    assert explain(client, target="nvidia-h200-sxm", options={"top_k": 3}).content == response.content


def test_edited_spec_has_a_story(client: httpx.Client) -> None:
    spec = client.get("/v1/hardware/nvidia-h200-sxm").json()
    story = explain(client, hardware=spec | {"id": "edited"}).json()
    assert (story["target"], story["device"]["id"]) == ("edited", "edited")


def test_json_is_compressed_where_that_is_accepted(client: httpx.Client) -> None:
    plain, packed = (
        client.post("/v1/kernels:explain", json=BODY | {"target": "nvidia-h200-sxm"}, headers={"Accept-Encoding": encoding})
        for encoding in ("gzip;q=0, *;q=0.5", "x, gzip;q=0.8")
    )
    assert "content-encoding" not in plain.headers
    assert packed.headers["content-encoding"] == "gzip"
    assert packed.json() == plain.json()
    assert int(packed.headers["content-length"]) < len(plain.content) / 4
    assert "content-encoding" not in client.get("/healthz", headers={"Accept-Encoding": "gzip"}).headers


def test_estimates_take_an_edited_spec_constants_and_winograd(client: httpx.Client) -> None:
    images = {"X": {"dtype": "float32", "shape": [1, 64, 56, 56]}, "W": {"dtype": "float32", "shape": [64, 64, 3, 3]}}
    items = [{"expression": "Y = conv2d(X, W, padding=1)", "inputs": images}]
    spec = client.get("/v1/hardware/cpu-x86-avx512").json() | {"id": "edited"}

    def seconds(**options: Any) -> list[tuple[str, float]]:
        answer = client.post("/v1/estimates", json={"items": items, **options}).json()
        return [(each["target"], each["candidates"][0]["seconds"]) for each in answer["estimates"]]

    (_, shipped), (name, edited) = seconds(targets=["cpu-x86-avx512"], hardware=spec)
    assert (name, edited) == ("edited", shipped)
    ((_, direct),) = seconds(hardware=spec, winograd="never")
    ((_, packed),) = seconds(hardware=spec, winograd="never", constants=["W"])
    ((_, winograd),) = seconds(hardware=spec, winograd="always", constants=["W"])
    assert winograd < packed < direct
    refused = client.post("/v1/estimates", json={"items": items})
    assert refused.status_code == 422
    refused = client.post("/v1/estimates", json={"items": items, "hardware": spec, "constants": ["V"]})
    assert refused.json()["code"] == "invalid-option"


def test_wrong_program_has_its_error_in_place_of_a_story(client: httpx.Client) -> None:
    response = explain(client, target="nvidia-h200-sxm", expression="C[m, n] +=! A[m, k] * D[k, n]")
    assert response.status_code == 422
    (error,) = response.json()["errors"]
    assert (error["line"], error["column"]) == (1, 23)
    assert explain(client, target="nowhere").json()["code"] == "unknown-hardware"
