"""POST /v1/schedules:check, and `options.schedule` of a build."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from httpx import Client
from serving import running

from roller_svc.service.app import create_app
from roller_svc.settings import Settings

PROGRAM = {
    "expression": "C[m, n] +=! A[m, k] * B[k, n]",
    "inputs": {"A": {"dtype": "float32", "shape": [50, 20]}, "B": {"dtype": "float32", "shape": [20, 30]}},
}
STEPS = "C.update: split m 8\nC.update: vectorise n"


@pytest.fixture
def client(tmp_path: Path) -> Iterator[Client]:
    settings = Settings(store=tmp_path / "store", workers=1)
    with running(create_app(settings)) as (_, port), Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
        yield client


def check(client: Client, schedule: Any, **device: Any) -> Any:
    response = client.post("/v1/schedules:check", json=PROGRAM | {"schedule": schedule} | device)
    assert response.status_code == 200, response.text
    return response.json()


def test_a_schedule_is_checked_and_compiled(client: Client) -> None:
    refused = check(client, STEPS)
    assert refused["tree"] is None
    (problem,) = refused["problems"]
    assert (problem["step"], problem["rule"], problem["line"], problem["column"]) == (1, "vector-inner", 2, 1)
    legal = f"C.update: split m 8\n{problem['hint']}\nC.update: vectorise n"
    assert check(client, legal)["problems"] == []
    assert "vector n in 30" in check(client, legal)["tree"]

    (problem,) = check(client, legal, target="nvidia-h200-sxm")["problems"]
    assert (problem["step"], problem["rule"], problem["hint"]) == (None, "launch", "C: accumulate_at n")
    assert check(client, legal)["cost"] is None
    cost = check(client, legal, target="cpu-x86-avx2")["cost"]
    assert cost["seconds"] > 0
    assert [launch["operations"] for launch in cost["launches"]] == [2 * 50 * 20 * 30]
    estimates = client.post("/v1/estimates", json={"items": [PROGRAM], "targets": ["cpu-x86-avx2"], "schedule": legal}).json()
    (candidate,) = estimates["estimates"][0]["candidates"]
    assert candidate["seconds"] == cost["seconds"]
    refused = client.post("/v1/estimates", json={"items": [PROGRAM], "targets": ["cpu-x86-avx2"], "schedule": STEPS}).json()
    assert refused["estimates"][0]["error"]["code"] == "schedule-vector-inner"
    both = PROGRAM | {"schedule": legal, "target": "local", "hardware": {}}
    assert client.post("/v1/schedules:check", json=both).status_code == 422

    body = PROGRAM | {"target": "local", "options": {"schedule": STEPS}}
    response = client.post("/v1/kernels:compile", json=body)
    (error,) = response.json()["errors"]
    assert (response.status_code, response.json()["code"], error["pointer"]) == (
        422,
        "schedule-vector-inner",
        "/options/schedule/steps/1",
    )

    body["options"] = {"schedule": legal}
    done = client.post("/v1/kernels:compile", json=body, headers={"Prefer": "wait=60"}).json()
    assert done["done"], done
    assert "error" not in done, done
    source = client.get(f"/v1/kernels/{done['response']['digest']}/source").text
    assert "scheduled by hand" in source
    assert client.get(f"/v1/kernels/{done['response']['digest']}/report").json()["log"] is not None
