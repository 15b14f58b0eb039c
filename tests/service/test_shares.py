"""Shares: one client at its worst, and another one is served. Findings 2, 4 to 6 and 17 to 19 of the farm's review."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import json
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from builders import BODY, Builder, digest_of
from httpx import Client, Response
from prometheus_client.parser import text_string_to_metric_families
from serving import answer_of, connected, parsed, received, running
from waiting import PATIENCE_S, wait_until

from roller_svc import hardware
from roller_svc.errors import QueueFullError, QuotaExceededError
from roller_svc.ir.report import BuildRequest
from roller_svc.service.app import create_app
from roller_svc.service.authentication import client_id_of
from roller_svc.service.routes import models
from roller_svc.service.shares import ANONYMOUS, Shares
from roller_svc.settings import LIMITS, Limit, Resource, Settings
from tests.service.test_models import CPU, GRAPH

GREEDY, OTHER = "a-greedy-key", "another-key"
COMPILE, BATCH, ESTIMATES, GRAPH_ESTIMATE = (
    f"/v1/{path}" for path in ("kernels:compile", "kernels:batchCompile", "estimates", "graphs:estimate")
)
ITEMS = {"items": [{field: BODY[field] for field in ("expression", "inputs", "outputs")}], "targets": [CPU]}
MODEL = {"model": {"graph": GRAPH}, "target": CPU}


class Gate:
    """What a request waits for within the service."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.waiting = threading.Semaphore(0)

    def wait(self) -> None:
        self.waiting.release()
        assert self.opened.wait(PATIENCE_S)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


@contextlib.contextmanager
def service(folder: Path, builder: Builder, limits: str = "", digest: Any = digest_of, **changes: Any) -> Iterator[Any]:
    """The application, its port, and clients with a key each."""
    settings = Settings(store=folder / "store", api_keys=f"{GREEDY},{OTHER}", limits=limits, **({"workers": 1} | changes))
    app = create_app(settings, builder, digest)
    with running(app) as (_, port), client_of(port, GREEDY) as greedy, client_of(port, OTHER) as other:
        try:
            yield app, port, greedy, other
        finally:
            builder.gate.set()


def client_of(port: int, key: str) -> Client:
    return Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, headers={"X-API-Key": key})


def until_used(app: Any, resource: Resource, amount: int) -> None:
    wait_until(lambda: app.state.roller.shares.used(resource) == amount)


def body(number: int) -> dict[str, Any]:
    return BODY | {"expression": f"{BODY['expression']} # {number}"}


def refused(response: Response, status: int = 429, code: str = "quota-exceeded") -> bool:
    assert (response.status_code, response.json()["code"]) == (status, code), response.text
    return int(response.headers["Retry-After"]) > 0


def request_of(method: str, path: str, key: str, more: str = "") -> bytes:
    return f"{method} {path} HTTP/1.1\r\nHost: localhost\r\nX-API-Key: {key}\r\n{more}\r\n".encode()


def blob_path(content: bytes) -> str:
    return f"/v1/blobs/sha256:{hashlib.sha256(content).hexdigest()}"


# ---------------------------------------------------------------- connections and waits


@pytest.mark.parametrize(("limits", "waiting"), [("", 10), ("waits=20/3", 3)])
def test_waits_of_one_client_close_the_service_to_nobody(tmp_path: Path, builder: Builder, limits: str, waiting: int) -> None:
    with service(tmp_path, builder, limits, max_connections=40) as (app, port, greedy, other), contextlib.ExitStack() as stack:
        builder.gate.clear()
        name = greedy.post(COMPILE, json=body(0)).json()["name"]
        connections, statuses, sought = [], [], []
        find = app.state.roller.farm.get
        app.state.roller.farm.get = lambda operation_id: sought.append(operation_id) or find(operation_id)
        for number in range(60):
            connection = stack.enter_context(connected(port))
            connections.append(connection)
            connection.sendall(request_of("GET", f"/v1/{name}?wait=60", GREEDY))
            if number < waiting:
                until_used(app, Resource.WAITS, number + 1)
            else:
                answer = answer_of(connection)
                assert b"retry-after: " in answer.lower()
                statuses.append(parsed(answer)[0])
        assert statuses == [429] * (60 - waiting)
        assert len(sought) == waiting  # a refused request costs no search
        assert other.get("/healthz").status_code == 200
        assert other.get("/readyz").status_code == 200
        assert other.get("/metrics").status_code == 200
        assert other.post(COMPILE, json=body(1)).status_code == 202
        assert other.get(f"/v1/{name}?wait=0.1").status_code == 200
        builder.gate.set()
        assert all(parsed(answer_of(connection))[1]["done"] for connection in connections[:waiting])


def test_a_preference_to_wait_is_ignored_beyond_the_part(tmp_path: Path, builder: Builder) -> None:
    with service(tmp_path, builder, "waits=2/1") as (app, port, greedy, other), connected(port) as first:
        builder.gate.clear()
        name = greedy.post(COMPILE, json=body(0)).json()["name"]
        first.sendall(request_of("GET", f"/v1/{name}?wait=60", GREEDY))
        wait_until(lambda: app.state.roller.shares.used(Resource.WAITS))
        answer = greedy.post(COMPILE, json=body(1), headers={"Prefer": "wait=60"})
        assert (answer.status_code, "Preference-Applied" in answer.headers) == (202, False)
        builder.gate.set()
        assert other.post(COMPILE, json=body(1), headers={"Prefer": "wait=60"}).json()["done"]


def test_probes_have_connections_of_their_own(tmp_path: Path, builder: Builder) -> None:
    """All clients together use every connection."""
    with service(tmp_path, builder, max_connections=8) as (app, port, greedy, other), contextlib.ExitStack() as stack:
        app.state.roller.shares.limits[Resource.CONNECTIONS] = Limit(8, 4)
        builder.gate.clear()
        name = greedy.post(COMPILE, json=body(0)).json()["name"]
        for number in range(8):
            connection = stack.enter_context(connected(port))
            connection.sendall(request_of("GET", f"/v1/{name}?wait=60", (GREEDY, OTHER)[number % 2]))
            until_used(app, Resource.WAITS, number + 1)
        refused(greedy.get(f"/v1/{name}"))
        app.state.roller.shares.limits[Resource.CONNECTIONS] = Limit(8, 8)
        refused(other.get(f"/v1/{name}"), 503, "too-many-connections")
        for _ in range(20):
            assert other.get("/healthz").status_code == 200
            assert other.get("/metrics").status_code == 200


# ---------------------------------------------------------------- uploads


def test_trickling_uploads_of_one_client_stop_no_other(tmp_path: Path, builder: Builder) -> None:
    with service(tmp_path, builder) as (app, port, _, other), contextlib.ExitStack() as stack:
        answers = []
        for number in range(8):
            connection = stack.enter_context(connected(port))
            connection.sendall(request_of("PUT", blob_path(b"%d" % number), GREEDY, "Content-Length: 100\r\n") + b"x")
            if number < 2:
                until_used(app, Resource.UPLOADS, number + 1)
            else:
                answers.append(parsed(received(connection)))
        assert [(status, problem["code"]) for status, problem in answers] == [(429, "quota-exceeded")] * 6
        assert other.put(blob_path(b"small"), content=b"small").status_code == 201


def test_a_trickling_upload_loses_its_place(tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    with service(tmp_path, builder, "uploads=1/1") as (app, port, _, other), connected(port) as connection:
        with monkeypatch.context() as hurried:
            hurried.setattr(models, "SLOW_START_S", 0.2)
            connection.sendall(request_of("PUT", blob_path(b"x" * 100), GREEDY, "Content-Length: 100\r\n") + b"x")
            status, problem = parsed(received(connection))
        assert (status, problem["code"]) == (408, "request-timeout")
        assert not app.state.roller.shares.used(Resource.UPLOADS)
        assert other.put(blob_path(b"small"), content=b"small").status_code == 201
        assert not list((tmp_path / "store" / "tmp").iterdir())


def test_bytes_stored_in_a_day_are_limited(tmp_path: Path, builder: Builder) -> None:
    contents = [b"%d" % number * 3000 for number in range(5)]
    with service(tmp_path, builder, "stored_bytes=none/10000") as (_, _, greedy, other):
        statuses = [greedy.put(blob_path(content), content=content).status_code for content in contents]
        assert statuses == [201, 201, 429, 429, 429]  # each is a block of 4096 bytes at least
        response = greedy.put(blob_path(contents[2]), content=contents[2])
        assert refused(response)
        assert 0 < int(response.headers["Retry-After"]) <= 86_400
        assert greedy.put(blob_path(contents[0]), content=contents[0]).status_code == 200  # it is there
        assert other.get(blob_path(contents[2])).status_code == 404
        assert other.put(blob_path(contents[2]), content=contents[2]).status_code == 201
        response = greedy.post("/v1/graphs:compile", json=MODEL | {"model": {"graph": GRAPH | {"name": "x" * 5000}}})
        assert refused(response)


def test_seconds_of_builds_in_a_day_are_limited(tmp_path: Path, builder: Builder) -> None:
    with service(tmp_path, builder, "build_seconds=none/5") as (app, _, greedy, other):
        assert greedy.post(COMPILE, json=body(0), headers={"Prefer": "wait=60"}).json()["done"]
        usage, client = app.state.roller.farm.usage, client_id_of(GREEDY)
        wait_until(lambda: usage.allowance(client, Resource.BUILD_SECONDS, 5).left < 5)  # the build itself
        usage.add(client, Resource.BUILD_SECONDS, 5.0)
        assert refused(greedy.post(COMPILE, json=body(1)))
        assert greedy.post(COMPILE, json=body(0)).json()["metadata"]["cache"] == "hit"
        assert other.post(COMPILE, json=body(1), headers={"Prefer": "wait=60"}).json()["done"]


# ---------------------------------------------------------------- estimates, checks, batches


def test_estimates_of_models_by_one_client_end_no_other_estimates(
    tmp_path: Path, builder: Builder, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(tmp_path, builder) as (app, _, greedy, other), ThreadPoolExecutor(24) as threads:
        estimate = app.state.roller.models.estimate

        def wait(request: Any) -> Any:
            if b"slow" in request.content:
                gate.wait()
            return estimate(request)

        monkeypatch.setattr(app.state.roller.models, "estimate", wait)
        slow = MODEL | {"model": {"graph": GRAPH | {"name": "slow"}}}
        sent = [threads.submit(greedy.post, GRAPH_ESTIMATE, json=slow) for _ in range(24)]
        gate.waiting.acquire()
        wait_until(lambda: sum(each.done() for each in sent) == 23)
        for _ in range(10):
            assert other.post(ESTIMATES, json=ITEMS).status_code == 200
        assert greedy.post(ESTIMATES, json=ITEMS).status_code == 200
        assert other.post(GRAPH_ESTIMATE, json=MODEL).status_code == 200
        gate.opened.set()
        assert sorted(each.result().status_code for each in sent) == [200] + [429] * 23


@pytest.mark.slow
def test_an_estimate_of_a_model_uses_its_place_until_it_ends(
    tmp_path: Path, builder: Builder, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    with service(tmp_path, builder) as (app, port, greedy, _):
        estimate = app.state.roller.models.estimate

        def wait(request: Any) -> Any:
            gate.wait()
            return estimate(request)

        monkeypatch.setattr(app.state.roller.models, "estimate", wait)
        content = json.dumps(MODEL)
        head = f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n"
        with connected(port) as gone:
            gone.sendall(request_of("POST", GRAPH_ESTIMATE, GREEDY, head) + content.encode())
            gate.waiting.acquire()
        until_used(app, Resource.CONNECTIONS, 0)  # its request has ended
        assert refused(greedy.post(GRAPH_ESTIMATE, json=MODEL))
        gate.opened.set()
        until_used(app, Resource.MODEL_ESTIMATES, 0)
        assert greedy.post(GRAPH_ESTIMATE, json=MODEL).status_code == 200


def test_a_body_is_counted_while_its_request_waits(tmp_path: Path, builder: Builder) -> None:
    with service(tmp_path, builder) as (app, port, _, other), connected(port) as first:
        builder.gate.clear()
        content = json.dumps(body(0)).encode() + b" " * 100_000
        head = f"Content-Type: application/json\r\nPrefer: wait=60\r\nContent-Length: {len(content)}\r\n"
        first.sendall(request_of("POST", COMPILE, GREEDY, head) + content)
        until_used(app, Resource.WAITS, 1)
        assert app.state.roller.shares.used(Resource.BODY_BYTES) == len(content)
        builder.gate.set()
        assert parsed(answer_of(first))[1]["done"]
        until_used(app, Resource.BODY_BYTES, 0)
        assert other.post(COMPILE, json=body(0)).status_code == 200


def test_checks_of_one_client_delay_no_other(tmp_path: Path, builder: Builder, gate: Gate) -> None:
    def digest(request: BuildRequest) -> str:
        if "slow" in request.expression:
            gate.wait()
        return digest_of(request)

    with service(tmp_path, builder, digest=digest) as (_, _, greedy, other), ThreadPoolExecutor(6) as threads:
        slow = [threads.submit(greedy.post, COMPILE, json=body(n) | {"expression": f"slow {n}"}) for n in range(6)]
        gate.waiting.acquire()
        for number in range(10):
            assert other.post(COMPILE, json=body(number)).is_success
        gate.opened.set()
        assert all(each.result().is_success for each in slow)


def test_batches_of_one_client_stop_no_other(tmp_path: Path, builder: Builder, gate: Gate) -> None:
    def digest(request: BuildRequest) -> str:
        if "slow" in request.expression:
            gate.wait()
        return digest_of(request)

    with service(tmp_path, builder, digest=digest) as (app, _, greedy, other), ThreadPoolExecutor(16) as threads:
        slow = {"requests": [body(0) | {"expression": "slow"}]}
        batches = [threads.submit(greedy.post, BATCH, json=slow) for _ in range(16)]
        wait_until(lambda: sum(each.done() for each in batches) == 14)
        assert app.state.roller.shares.used(Resource.BATCHES) == 2
        assert other.post(BATCH, json={"requests": [body(1)]}).status_code == 200
        gate.opened.set()
        assert sorted(each.result().status_code for each in batches) == [200] * 2 + [429] * 14


# ---------------------------------------------------------------- what a request leaves


@pytest.mark.parametrize("graph", [{"x": "A" * 10_000}, GRAPH], ids=["invalid", "valid"])
def test_an_estimate_writes_nothing_to_the_store(tmp_path: Path, builder: Builder, graph: dict[str, Any]) -> None:
    path = blob_path(json.dumps(graph, separators=(",", ":")).encode())
    with service(tmp_path, builder) as (_, _, greedy, _other):
        response = greedy.post(GRAPH_ESTIMATE, json={"model": {"graph": graph}, "target": CPU})
        assert response.status_code == (200 if graph is GRAPH else 422)
        assert greedy.get(path).status_code == 404
        assert not list((tmp_path / "store").glob("uploads/*"))


def test_a_build_stores_its_model_once_it_is_accepted(tmp_path: Path, builder: Builder) -> None:
    path = blob_path(json.dumps(GRAPH, separators=(",", ":")).encode())
    with service(tmp_path, builder, queue_length=1) as (_, _, greedy, other):
        builder.gate.clear()
        assert other.post(COMPILE, json=body(0)).status_code == 202
        refused(greedy.post("/v1/graphs:compile", json=MODEL), 503, "queue-full")
        assert greedy.get(path).status_code == 404
        builder.gate.set()
        wait_until(lambda: greedy.post("/v1/graphs:compile", json=MODEL).status_code == 202)
        assert greedy.get(path).status_code == 200


def test_a_measurement_on_an_unknown_device_is_refused(tmp_path: Path, builder: Builder) -> None:
    spec = hardware.to_mapping(hardware.load("nvidia-h200-sxm")) | {"id": "of-a-stranger", "arch": "sm_77"}
    wanted = BODY | {"target": None, "hardware": spec, "options": {"select": "measure"}}
    with service(tmp_path, builder, workers=0) as (_, _, greedy, _other):
        response = greedy.post(COMPILE, json=wanted)
        assert (response.status_code, response.json()["code"]) == (422, "no-measuring-worker")
        known = greedy.post(COMPILE, json=BODY | {"target": "nvidia-h200-sxm", "options": {"select": "measure"}})
        assert (known.status_code, known.json()["metadata"]["queue"]) == (202, "measure.sm_90a")


def test_one_key_at_once_makes_one_build(tmp_path: Path, builder: Builder) -> None:
    with service(tmp_path, builder) as (_, _, greedy, _other), ThreadPoolExecutor(8) as threads:
        builder.gate.clear()
        for key in "abcd":
            requests = [
                threads.submit(greedy.post, COMPILE, json=body(number), headers={"Idempotency-Key": key}) for number in range(8)
            ]
            assert sorted(each.result().status_code for each in requests) == [202] + [409] * 7
        assert len(greedy.get("/v1/operations").json()["operations"]) <= 4


@pytest.mark.parametrize("headers", [{}, {"Content-Length": "0"}])
def test_a_cancellation_needs_no_body(tmp_path: Path, builder: Builder, headers: dict[str, str]) -> None:
    with service(tmp_path, builder) as (_, port, greedy, _other), connected(port) as connection:
        builder.gate.clear()
        greedy.post(COMPILE, json=body(0))
        name = greedy.post(COMPILE, json=body(1)).json()["name"]
        fields = "".join(f"{field}: {value}\r\n" for field, value in headers.items())
        connection.sendall(request_of("POST", f"/v1/{name}:cancel", GREEDY, fields))
        status, operation = parsed(answer_of(connection))
        assert (status, operation["error"]["code"]) == (200, "operation-cancelled")
        connection.sendall(request_of("POST", COMPILE, GREEDY, fields))
        assert parsed(answer_of(connection))[0] == 422  # this one needs a body


# ---------------------------------------------------------------- the mechanism


def test_metrics_say_what_is_used_and_refused(tmp_path: Path, builder: Builder) -> None:
    with service(tmp_path, builder, "uploads=8/2") as (_, port, _greedy, other), contextlib.ExitStack() as stack:
        connections = [stack.enter_context(connected(port)) for _ in range(3)]
        for number, connection in enumerate(connections):
            connection.sendall(request_of("PUT", blob_path(b"%d" % number), GREEDY, "Content-Length: 100\r\n") + b"x")
        wait_until(lambda: "roller_refusals_total{" in other.get("/metrics").text)
        samples = {
            (sample.name, *sample.labels.values()): sample.value
            for family in text_string_to_metric_families(other.get("/metrics").text)
            for sample in family.samples
        }
        assert samples["roller_resource_used", "uploads"] == 2
        assert samples["roller_resource_limit", "uploads"] == 8
        assert samples["roller_refusals_total", "uploads", "429"] == 1


def test_a_share_is_given_back_whole() -> None:
    counted: list[tuple[Resource, int]] = []
    shares = Shares(LIMITS | {Resource.RESPONSE_BYTES: Limit(100, 60)}, lambda *refusal: counted.append(refusal))
    with shares.hold(Resource.RESPONSE_BYTES, "a", 40) as first:
        first.add(20)
        with pytest.raises(QuotaExceededError):
            first.add(1)
        with pytest.raises(QueueFullError, match="bytes of responses"), shares.hold(Resource.RESPONSE_BYTES, "b", 41):
            pass
        with shares.hold(Resource.RESPONSE_BYTES, "b", 40):
            assert shares.used(Resource.RESPONSE_BYTES) == 100
        first.close()
        assert shares.used(Resource.RESPONSE_BYTES) == 0
    assert shares.used(Resource.RESPONSE_BYTES) == 0
    assert counted == [(Resource.RESPONSE_BYTES, 429), (Resource.RESPONSE_BYTES, 503)]


def test_a_service_without_keys_has_one_client_with_all() -> None:
    shares = Shares(LIMITS | {Resource.UPLOADS: Limit(3, 1)})
    with contextlib.ExitStack() as stack:
        for _ in range(3):
            stack.enter_context(shares.hold(Resource.UPLOADS, ANONYMOUS))
        with pytest.raises(QueueFullError) as full:
            shares.hold(Resource.UPLOADS, ANONYMOUS)
    assert not isinstance(full.value, QuotaExceededError)
    assert shares.part_of(Resource.STORED_BYTES, ANONYMOUS) is None


def test_a_client_that_floods_waits_for_itself(tmp_path: Path, builder: Builder, gate: Gate) -> None:
    """Four of its requests are processed; another client's come first. Whoever waits is not counted."""
    with service(tmp_path, builder) as (app, port, greedy, other), contextlib.ExitStack() as stack:
        builder.gate.clear()
        name = greedy.post(COMPILE, json=body(0)).json()["name"]
        for number in range(8):
            connection = stack.enter_context(connected(port))
            connection.sendall(request_of("GET", f"/v1/{name}?wait=60", GREEDY))
            until_used(app, Resource.WAITS, number + 1)
        assert app.state.roller.shares.used(Resource.REQUESTS) == 0
        processed, find = [], app.state.roller.farm.get

        def find_slowly(operation_id: str) -> Any:
            processed.append(operation_id)
            gate.wait()
            return find(operation_id)

        app.state.roller.farm.get = find_slowly
        for _ in range(20):
            stack.enter_context(connected(port)).sendall(request_of("GET", f"/v1/{name}", GREEDY))
        until_used(app, Resource.CONNECTIONS, 28)
        assert app.state.roller.shares.used(Resource.REQUESTS) == 4
        assert other.get("/v1/version").status_code == 200
        app.state.roller.farm.get = find
        gate.opened.set()
        until_used(app, Resource.CONNECTIONS, 8)
        assert len(processed) <= 20
        assert greedy.get(f"/v1/{name}").status_code == 200


async def _order(clients: str, limit: Limit, given_up: int | None = None) -> str:
    """The order in which clients get places that each gives back when the next one has it."""
    shares, served = Shares(LIMITS | {Resource.CHECKS: limit}), []

    async def run(client: str) -> None:
        with await shares.wait_for(Resource.CHECKS, client):
            served.append(client)
            await asyncio.sleep(0)

    tasks = [asyncio.create_task(run(client)) for client in clients]
    await asyncio.sleep(0)
    if given_up is not None:
        tasks[given_up].cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    assert shares.used(Resource.CHECKS) == 0
    return "".join(served)


@pytest.mark.parametrize(
    ("clients", "limit", "given_up", "order"),
    [
        ("aaab", Limit(2, 1), None, "abaa"),  # the second place is for another client
        ("aaabc", Limit(1, 1), None, "abaca"),  # clients take turns
        ("aaabb", Limit(2, 2), None, "aabab"),  # the client that uses less is next
        ("aaab", Limit(2, 1), 1, "aba"),
        ("aab", Limit(1, 1), 0, "aba"),
    ],
)
def test_the_client_that_uses_least_is_next(clients: str, limit: Limit, given_up: int | None, order: str) -> None:
    assert asyncio.run(_order(clients, limit, given_up)) == order
