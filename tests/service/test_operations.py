"""Operations over HTTP: pages, cancellation, events, deadlines, positions, idempotency keys."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from builders import BODY, Builder, digest_of
from fastapi import FastAPI
from httpx import Client
from serving import running
from waiting import PATIENCE_S, wait_until

from roller_svc.farm import runner
from roller_svc.service import event_stream
from roller_svc.service.app import create_app
from roller_svc.service.builds import RequestBuilds
from roller_svc.service.routes.operations import MAX_PAGE_SIZE
from roller_svc.service.server import ServiceServer
from roller_svc.settings import Limit, Resource, Settings

ALICE, BOB = "a-key-of-alice", "a-key-of-bob"
WAIT = {"Prefer": "wait=30"}
COMPILE = "/v1/kernels:compile"


@pytest.fixture
def service(tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[ServiceServer, int]]:
    """A service that loses no lease, however slow the machine, and whose heartbeats come soon."""
    monkeypatch.setattr(runner, "HEARTBEATS_PER_LEASE", 100)
    settings = Settings(store=tmp_path / "store", api_keys=f"{ALICE},{BOB}", workers=1, lease_s=PATIENCE_S, queue_length=40)
    with running(create_app(settings, builder, digest_of)) as (server, port):
        yield server, port
        builder.gate.set()


@pytest.fixture
def alice(service: tuple[ServiceServer, int]) -> Iterator[Client]:
    with client_of(service[1], ALICE) as client:
        yield client


@pytest.fixture
def bob(service: tuple[ServiceServer, int]) -> Iterator[Client]:
    with client_of(service[1], BOB) as client:
        yield client


def client_of(port: int, key: str) -> Client:
    return Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0, headers={"Authorization": f"Bearer {key}"})


def compiled(client: Client, number: int, headers: dict[str, str] | None = None, **fields: Any) -> Any:
    """The operation of a request of its own."""
    body = BODY | {"expression": f"{BODY['expression']} # {number}"} | fields
    response = client.post(COMPILE, json=body, headers=headers)
    assert response.status_code in (200, 202), response.text
    return response.json()


def operation(client: Client, name: str, wait_s: float = 0) -> Any:
    response = client.get(f"/v1/{name}", params={"wait": wait_s})
    assert response.status_code == 200
    return response.json()


def cancelled(client: Client, name: str, **body: Any) -> httpx.Response:
    return client.post(f"/v1/{name}:cancel", json=body)


def blocked(client: Client, builder: Builder) -> Any:
    """An operation that the only worker builds until the gate is opened."""
    builder.gate.clear()
    first = compiled(client, 0)
    wait_until(lambda: operation(client, first["name"])["metadata"]["stage"] == "building")
    return first


# ---------------------------------------------------------------- pages


def test_pages_list_the_latest_first_and_only_ones_own(alice: Client, bob: Client) -> None:
    names = [compiled(alice, number, WAIT)["name"] for number in range(5)]
    # the environment's keys have every scope, so that admin sees both clients
    others = [compiled(bob, number, WAIT)["name"] for number in range(5, 7)]
    found: list[str] = []
    token, sizes = "", []
    while True:
        page = alice.get("/v1/operations", params={"page_size": 3, "page_token": token}).json()
        found += [each["name"] for each in page["operations"]]
        sizes.append(len(page["operations"]))
        token = page["next_page_token"]
        if not token:
            break
    assert found == (names + others)[::-1]
    assert sizes == [3, 3, 1]


def test_a_page_is_at_most_so_long(alice: Client) -> None:
    compiled(alice, 1, WAIT)
    assert len(alice.get(f"/v1/operations?page_size={MAX_PAGE_SIZE * 1000}").json()["operations"]) == 1
    assert alice.get("/v1/operations?page_size=-1").status_code == 422


@pytest.mark.parametrize("token", ["x", "aGl0LSU", "AAAA", "%00", "bm90IGFuIGlk", "é", "===="])
def test_a_token_of_another_origin_is_rejected(alice: Client, token: str) -> None:
    response = alice.get("/v1/operations", params={"page_token": token})
    assert (response.status_code, response.json()["code"]) == (422, "invalid-argument")


# ---------------------------------------------------------------- metadata


def test_metadata_says_where_an_operation_is(alice: Client, bob: Client, builder: Builder) -> None:
    first = blocked(alice, builder)
    names = [compiled(alice, number)["name"] for number in (1, 2)]
    urgent = compiled(alice, 3, priority=5)["name"]
    other = compiled(bob, 4)["name"]
    building = operation(alice, first["name"])["metadata"]
    assert (building["attempt"], building["queue"]) == (1, "build.cpu.x86-64-v3")
    assert building["worker"]
    assert "queue_position" not in building
    positions = {name: operation(alice, name)["metadata"]["queue_position"] for name in [*names, urgent, other]}
    # bob has one build, which starts before alice's second one
    assert positions == {urgent: 1, names[0]: 2, names[1]: 3, other: 1}
    assert operation(alice, names[0])["metadata"]["stage"] == "queued"


def test_the_highest_priority_is_built_first(alice: Client, builder: Builder) -> None:
    blocked(alice, builder)
    low, high = compiled(alice, 1, priority=-1)["name"], compiled(alice, 2, priority=1)["name"]
    builder.gate.set()
    operation(alice, low, 30)
    listed = [operation(alice, name) for name in (low, high)]
    assert all(each["done"] for each in listed)
    assert builder.expressions[1:] == [f"{BODY['expression']} # 2", f"{BODY['expression']} # 1"]


@pytest.mark.parametrize("field", [{"priority": 101}, {"priority": 1.5}, {"timeout_s": 0}, {"timeout_s": 1e9}])
def test_terms_out_of_range_are_rejected(alice: Client, field: dict[str, Any]) -> None:
    response = alice.post(COMPILE, json=BODY | field)
    assert (response.status_code, response.json()["code"]) == (422, "invalid-body")


@pytest.mark.slow
def test_an_operation_ends_at_its_deadline(alice: Client, builder: Builder) -> None:
    blocked(alice, builder)
    late = compiled(alice, 1, timeout_s=0.1)
    ended = operation(alice, late["name"], 30)
    assert ended["done"]
    assert (ended["error"]["code"], ended["error"]["status"]) == ("deadline-exceeded", 504)


def test_a_client_beyond_its_quota_gets_429(tmp_path: Path, builder: Builder) -> None:
    settings = Settings(store=tmp_path, api_keys=f"{ALICE},{BOB}", workers=1, queue_length=3, queue_length_per_client=2)
    with running(create_app(settings, builder, digest_of)) as (_, port), client_of(port, ALICE) as alice:
        blocked(alice, builder)
        compiled(alice, 1)
        body = BODY | {"expression": "another"}
        response = alice.post(COMPILE, json=body)
        assert (response.status_code, response.json()["code"]) == (429, "quota-exceeded")
        assert int(response.headers["Retry-After"]) > 0
        with client_of(port, BOB) as bob:
            compiled(bob, 2)
            response = bob.post(COMPILE, json=body)
            assert (response.status_code, response.json()["code"]) == (503, "queue-full")
            assert int(response.headers["Retry-After"]) > 0
        builder.gate.set()


# ---------------------------------------------------------------- cancellation


def test_a_queued_operation_is_cancelled_at_once(alice: Client, builder: Builder) -> None:
    blocked(alice, builder)
    name = compiled(alice, 1)["name"]
    ended = cancelled(alice, name).json()
    assert ended["done"]
    assert (ended["error"]["code"], ended["error"]["status"]) == ("operation-cancelled", 499)
    assert cancelled(alice, name).json() == ended  # again changes nothing


def test_a_build_ends_when_nobody_waits_for_it(
    alice: Client, bob: Client, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupted = threading.Event()
    monkeypatch.setattr(RequestBuilds, "interrupt", lambda *_: interrupted.set())  # a fake build cannot be interrupted
    first = blocked(alice, builder)
    assert compiled(bob, 0)["name"] == first["name"]
    assert not cancelled(alice, first["name"]).json()["done"]
    assert operation(alice, first["name"])["metadata"]["stage"] == "building"
    cancelled(bob, first["name"])
    assert interrupted.wait(PATIENCE_S)  # a heartbeat notices it
    builder.gate.set()
    assert operation(bob, first["name"], 30)["error"]["code"] == "operation-cancelled"


def test_another_client_cancels_nothing_but_for_all(alice: Client, bob: Client, builder: Builder) -> None:
    blocked(alice, builder)
    name = compiled(alice, 1)["name"]
    assert not cancelled(bob, name).json()["done"]
    assert cancelled(bob, name, for_all=True).json()["error"]["code"] == "operation-cancelled"


def test_a_finished_operation_and_a_hit_stay(alice: Client) -> None:
    done = compiled(alice, 1, WAIT)
    assert cancelled(alice, done["name"]).json()["response"] == done["response"]
    hit = compiled(alice, 1)
    assert hit["metadata"]["cache"] == "hit"
    assert cancelled(alice, hit["name"]).json()["response"] == done["response"]


@pytest.mark.parametrize("name", ["operations/nothing", "operations/%00", f"operations/hit-{'0' * 64}"])
def test_an_unknown_operation_cannot_be_cancelled(alice: Client, name: str) -> None:
    response = cancelled(alice, name)
    assert (response.status_code, response.json()["code"]) == (404, "unknown-operation")


# ---------------------------------------------------------------- events


def events(client: Client, name: str, after: int | None = None) -> list[dict[str, Any]]:
    """All events of a stream, which ends by itself."""
    headers = {} if after is None else {"Last-Event-ID": str(after)}
    with client.stream("GET", f"/v1/{name}/events", headers=headers) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-store"
        blocks = "".join(response.iter_text()).split("\n\n")
    assert blocks[0].startswith("retry: ")
    found = []
    for block in blocks[1:-1]:
        fields = dict(line.split(": ", 1) for line in block.split("\n"))
        event = json.loads(fields["data"])
        assert (fields["id"], fields["event"]) == (str(event["number"]), event["type"])
        found.append(event)
    return found


def test_events_tell_the_whole_story_and_end(alice: Client, builder: Builder) -> None:
    first = blocked(alice, builder)
    opened = threading.Timer(0.3, builder.gate.set)
    opened.start()
    live = events(alice, first["name"])
    assert [event["type"] for event in live] == ["queued", "building", "done"]
    assert [event["number"] for event in live] == [1, 2, 3]
    assert live[-1]["data"]["digest"].startswith("sha256:")
    assert events(alice, first["name"]) == live
    assert events(alice, first["name"], after=1) == live[1:]
    assert events(alice, first["name"], after=3) == []
    assert events(alice, first["name"], after=1000) == []


def test_a_hit_has_one_event(alice: Client) -> None:
    compiled(alice, 1, WAIT)
    hit = compiled(alice, 1)
    (event,) = events(alice, hit["name"])
    assert (event["type"], event["data"]["digest"]) == ("done", hit["response"]["digest"])
    assert events(alice, hit["name"], after=1) == []


@pytest.mark.parametrize("last", ["x", "-1", "1.5", str(1 << 31), "9" * 100])
def test_a_damaged_last_event_id_is_rejected(alice: Client, last: str) -> None:
    done = compiled(alice, 1, WAIT)
    response = alice.get(f"/v1/{done['name']}/events", headers={"Last-Event-ID": last})
    assert (response.status_code, response.json()["code"]) == (422, "invalid-body")


def test_silent_streams_are_kept_alive(alice: Client, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(event_stream, "POLL_S", 0.02)
    monkeypatch.setattr(event_stream, "KEEP_ALIVE_S", 0.05)
    first = blocked(alice, builder)
    with alice.stream("GET", f"/v1/{first['name']}/events") as response:
        lines = response.iter_lines()
        assert ": keep-alive" in (next(lines) for _ in range(20))


def test_streams_are_limited(service: Any, alice: Client, builder: Builder) -> None:
    shares = service[0].config.app.state.roller.shares
    shares.limits[Resource.STREAMS] = Limit(3, 2)
    path = f"/v1/{blocked(alice, builder)['name']}/events"
    with client_of(service[1], BOB) as bob, alice.stream("GET", path), alice.stream("GET", path):
        assert (alice.get(path).status_code, alice.get(path).json()["code"]) == (429, "quota-exceeded")
        with bob.stream("GET", path):
            assert (bob.get(path).status_code, bob.get(path).json()["code"]) == (503, "queue-full")
    wait_until(lambda: not shares.used(Resource.STREAMS))  # those who left gave their places back
    builder.gate.set()
    assert events(alice, path.removeprefix("/v1/").removesuffix("/events"))[-1]["type"] == "done"


def test_streams_end_at_shutdown(service: tuple[ServiceServer, int], alice: Client, builder: Builder) -> None:
    first = blocked(alice, builder)
    with alice.stream("GET", f"/v1/{first['name']}/events") as response:
        content = response.iter_text()
        next(content)
        service[0].should_exit = True
        app = service[0].config.app
        assert isinstance(app, FastAPI)
        wait_until(lambda: app.state.roller.is_ending)
        assert "done" not in "".join(content)  # complete: a connection that is cut raises
    builder.gate.set()


# ---------------------------------------------------------------- idempotency keys


def test_a_repeated_request_gets_its_operation(alice: Client, bob: Client, builder: Builder) -> None:
    blocked(alice, builder)
    key = {"Idempotency-Key": "1234"}
    first = compiled(alice, 1, key)
    assert compiled(alice, 1, key)["name"] == first["name"]
    cancelled(alice, first["name"])
    # it ended, and the repetition has no other result; a new request starts again
    assert compiled(alice, 1, key)["error"]["code"] == "operation-cancelled"
    assert compiled(alice, 1)["name"] != first["name"]
    # the keys of clients are independent
    assert compiled(bob, 2, key)["name"] != first["name"]


def test_a_key_belongs_to_one_request(alice: Client, builder: Builder) -> None:
    blocked(alice, builder)
    key = {"Idempotency-Key": "1234"}
    compiled(alice, 1, key)
    response = alice.post(COMPILE, json=BODY, headers=key)
    assert (response.status_code, response.json()["code"]) == (409, "idempotency-key-reused")
    response = alice.post(COMPILE, json=BODY | {"expression": f"{BODY['expression']} # 1", "priority": 1}, headers=key)
    assert response.status_code == 409


def test_a_default_that_is_given_makes_no_other_request(alice: Client, builder: Builder) -> None:
    blocked(alice, builder)
    key = {"Idempotency-Key": "1234"}
    first = alice.post(COMPILE, json=BODY, headers=key).json()
    again = alice.post(COMPILE, json=BODY | {"options": {"allow_tf32": False, "max_workspace_bytes": None}}, headers=key)
    assert again.json()["name"] == first["name"]


@pytest.mark.parametrize("key", ["", "x" * 201, "two words"])
def test_an_unusable_key_is_rejected(alice: Client, key: str) -> None:
    response = alice.post(COMPILE, json=BODY, headers={"Idempotency-Key": key})
    assert (response.status_code, response.json()["code"]) == (422, "invalid-body")


def test_a_request_that_was_rejected_may_be_repeated(alice: Client) -> None:
    key = {"Idempotency-Key": "1234"}
    assert alice.post(COMPILE, json=BODY | {"expression": "bad"}, headers=key).status_code == 422
    assert compiled(alice, 1, key)["name"]
