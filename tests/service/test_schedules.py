"""POST /v1/schedules:check, and `options.schedule` of a build."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from httpx import Client
from serving import running
from waiting import PATIENCE_S

from roller_svc.compiler.action import ActionKey
from roller_svc.farm import workers
from roller_svc.farm.checking import RequestValidator
from roller_svc.farm.models import Request
from roller_svc.service.app import COMPUTE_THREADS, create_app
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
    vector_hint = problem["hint"]
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
    assert (error["line"], error["column"], error["hint"]) == (2, 1, vector_hint)
    body["options"] = {"schedule": f"# tiled\n\n{STEPS}"}  # the same steps, and another place
    (error,) = client.post("/v1/kernels:compile", json=body).json()["errors"]
    assert error["line"] == 4
    body["options"] = {"schedule": {"format": "roller-schedule/1", "program": "sha256:0", "steps": []}}
    assert client.post("/v1/kernels:compile", json=body).json()["code"] == "schedule-program"

    body["options"] = {"schedule": legal}
    done = client.post("/v1/kernels:compile", json=body, headers={"Prefer": "wait=60"}).json()
    assert done["done"], done
    assert "error" not in done, done
    source = client.get(f"/v1/kernels/{done['response']['digest']}/source").text
    assert "scheduled by hand" in source
    assert client.get(f"/v1/kernels/{done['response']['digest']}/report").json()["log"] is not None


@pytest.mark.slow
def test_schedules_that_take_minutes_stop_no_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As many as the service has threads for requests, of a long statement: others are answered meanwhile."""
    monkeypatch.setattr(workers, "STALLED_CPU_FRACTION", 0.0)  # a busy machine lets a process run little
    key, are_answered = RequestValidator.key, threading.Event()

    def key_after_answers(validator: RequestValidator, request: Request) -> ActionKey:
        try:
            return key(validator, request)
        finally:
            are_answered.wait(PATIENCE_S)

    monkeypatch.setattr(RequestValidator, "key", key_after_answers)
    loads = ["(" + " + ".join(f"x[i, j + {60 * row + k}]" for k in range(60)) + ")" for row in range(50)]
    names = ["i", *(f"r{n}" for n in range(256))]
    body = {
        "expression": f"y[i, j] = {' + '.join(loads)} where j in 9",
        "inputs": {"x": {"dtype": "float32", "shape": [9, 4000]}},
        "target": "cpu-x86-avx2",
        "options": {"schedule": "\n".join(f"y: rename {old} {new}" for old, new in pairwise(names))},
    }
    settings = Settings(store=tmp_path / "store", workers=1, check_timeout_s=1.0)
    with (
        running(create_app(settings)) as (_, port),
        Client(base_url=f"http://127.0.0.1:{port}", timeout=2 * PATIENCE_S) as client,
        ThreadPoolExecutor(COMPUTE_THREADS) as pool,
    ):
        slow = [pool.submit(client.post, "/v1/kernels:compile", json=body) for _ in range(COMPUTE_THREADS)]
        assert client.get(f"/v1/kernels/sha256:{'0' * 64}").status_code == 404
        assert not any(each.done() for each in slow)
        are_answered.set()
        assert {(each.result().status_code, each.result().json()["code"]) for each in slow} == {(422, "check-timeout")}
