"""Requests for estimates under way: clients that hang up, places that are taken, small requests beside large ones."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import answer_of, connected, parsed, running
from waiting import PATIENCE_S

from roller_svc.compiler.estimates.batch import EstimateCache
from roller_svc.compiler.estimates.worker import Deadline, EstimateResult, EstimateTask
from roller_svc.service import state
from roller_svc.service.app import create_app
from roller_svc.settings import Resource, Settings

LARGE = state.LARGE_REQUEST_PLANS
X4 = {"x": {"dtype": "float32", "shape": [4]}}


class Stub:
    """Outcomes that come once they are let through, or once nobody waits for them any more."""

    def __init__(self) -> None:
        self.begun = threading.Semaphore(0)
        self.gone = threading.Event()
        self.through = threading.Event()

    def __call__(self, works: Sequence[EstimateTask], patience: Deadline) -> list[EstimateResult]:
        self.begun.release()
        while len(works) >= LARGE and not self.through.is_set() and not patience.has_passed:
            time.sleep(0.01)
        if patience.has_passed:
            self.gone.set()
        return [EstimateResult([b'{"roofline":[],"candidates":[]}'] * len(work.specs)) for work in works]


def body(count: int) -> dict[str, Any]:
    items = [{"expression": f"y[i] = x[i] + {n}", "inputs": X4} for n in range(count)]
    return {"items": items, "targets": ["cpu-x86-avx2"]}


def request(count: int) -> bytes:
    content = json.dumps(body(count)).encode()
    head = "POST /v1/estimates HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Content-Length: {len(content)}\r\n\r\n".encode() + content


def settings(folder: Path) -> Settings:
    return Settings(store=folder / "store", estimates_at_once=1)


def test_whoever_hangs_up_is_no_longer_computed_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "DISCONNECT_POLL_S", 0.05)
    app, stub = create_app(settings(tmp_path)), Stub()
    app.state.roller.estimate_cache = EstimateCache(stub)
    with running(app) as (_, port):
        with connected(port) as connection:
            connection.sendall(request(LARGE))
            stub.begun.acquire()
            assert app.state.roller.shares.used(Resource.ESTIMATES) == 1
        assert stub.gone.wait(PATIENCE_S)
        answer = httpx.post(f"http://127.0.0.1:{port}/v1/estimates", json=body(1), timeout=60.0)
        assert answer.status_code == 200
    assert app.state.roller.shares.used(Resource.ESTIMATES) == 0


def test_a_small_request_passes_large_ones_and_these_wait_for_each_other(tmp_path: Path) -> None:
    app, stub = create_app(settings(tmp_path)), Stub()
    app.state.roller.estimate_cache = EstimateCache(stub)
    with running(app) as (_, port), ThreadPoolExecutor(2) as clients:

        def ask(count: int) -> httpx.Response:
            return httpx.post(f"http://127.0.0.1:{port}/v1/estimates", json=body(count), timeout=60.0)

        large = [clients.submit(ask, LARGE) for _ in range(2)]
        stub.begun.acquire()
        small = ask(1)
        assert len(small.json()["estimates"]) == 1
        stub.begun.acquire()  # the small one
        assert not stub.begun.acquire(blocking=False)
        assert not any(one.done() for one in large)
        stub.through.set()
        assert [len(one.result().json()["estimates"]) for one in large] == [LARGE, LARGE]


def test_whoever_waits_when_the_service_ends_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "DISCONNECT_POLL_S", 0.05)
    app, stub = create_app(settings(tmp_path)), Stub()
    app.state.roller.estimate_cache = EstimateCache(stub)
    with running(app) as (server, port), connected(port) as connection:
        connection.sendall(request(LARGE))
        stub.begun.acquire()
        server.should_exit = True
        status, problem = parsed(answer_of(connection))
    assert (status, problem["code"]) == (503, "shutting-down")


def test_requests_beyond_the_places_are_refused(tmp_path: Path) -> None:
    app, stub = create_app(settings(tmp_path).model_copy(update={"limits": "estimates=1/1"})), Stub()
    app.state.roller.estimate_cache = EstimateCache(stub)
    with running(app) as (_, port), connected(port) as connection:
        connection.sendall(request(LARGE))
        stub.begun.acquire()
        refused = httpx.post(f"http://127.0.0.1:{port}/v1/estimates", json=body(1), timeout=60.0)
        assert (refused.status_code, refused.json()["code"]) == (503, "queue-full")
        stub.through.set()


def test_a_refused_request_is_not_validated(tmp_path: Path) -> None:
    """Validation of a large body keeps the event loop for milliseconds."""
    app = create_app(settings(tmp_path).model_copy(update={"limits": "estimates=1/1,batches=1/1,model_estimates=1/1"}))
    shares = app.state.roller.shares
    paths = {Resource.ESTIMATES: "estimates", Resource.BATCHES: "kernels:batchCompile", Resource.MODEL_ESTIMATES: "graphs:estimate"}
    with running(app) as (_, port):
        for resource, path in paths.items():
            wrong = {"items": [{"no": "program"}] * 1024}
            assert httpx.post(f"http://127.0.0.1:{port}/v1/{path}", json=wrong, timeout=60.0).status_code == 422
            with shares.hold(resource, ""):
                refused = httpx.post(f"http://127.0.0.1:{port}/v1/{path}", json=wrong, timeout=60.0)
            assert (refused.status_code, refused.json()["code"]) == (503, "queue-full")
