"""GET /v1/farm and GET /v1/farm/events: figures, and operations as they change."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from builders import BODY, Builder, digest_of
from serving import served
from waiting import PATIENCE_S

from roller_svc.service import farm_events
from roller_svc.service.app import create_app
from roller_svc.settings import Settings

Event = tuple[str, str, Any]  # id, type, data


@pytest.fixture
def builder() -> Builder:
    return Builder()


@pytest.fixture
def client(tmp_path: Path, builder: Builder) -> Iterator[httpx.Client]:
    with served(create_app(Settings(store=tmp_path / "store", workers=1), builder, digest_of)) as client:
        yield client


def events(response: httpx.Response) -> Iterator[Event]:
    fields: dict[str, str] = {}
    for line in response.iter_lines():
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield fields["id"], fields["event"], json.loads(fields["data"])
            fields = {}


def stages(stream: Iterator[Event], last: str) -> list[tuple[str, str]]:
    """Return the ids and stages of operations until one has the last stage."""
    seen = []
    for number, kind, data in stream:
        if kind == "operation":
            seen.append((number, data["metadata"]["stage"]))
            if seen[-1][1] == last:
                break
    return seen


def test_stream_tells_of_an_operation_from_its_start_to_its_end(client: httpx.Client, builder: Builder) -> None:
    builder.gate.clear()
    with client.stream("GET", "/v1/farm/events") as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        stream = events(response)
        number, kind, figures = next(stream)
        assert kind == "figures"
        assert figures["queues"] == []
        operation = client.post("/v1/kernels:compile", json=BODY).json()
        assert operation["request"] == {"expression": BODY["expression"], "target": BODY["target"]}
        assert [stage for _, stage in stages(stream, "building")][-1] == "building"
        (queue,) = client.get("/v1/farm").json()["queues"]
        assert (queue["state"], queue["operations"]) == ("building", 1)
        builder.gate.set()
        assert stages(stream, "done")[-1][1] == "done"
    farm = client.get("/v1/farm").json()
    assert (farm["queues"], farm["ended"], farm["submissions"]["miss"]) == ([], {"ok": 1}, 1)
    with client.stream("GET", "/v1/farm/events", headers={"Last-Event-ID": number}) as response:
        assert [stage for _, stage in stages(events(response), "done")] == ["done"]


def test_stream_does_not_repeat_what_has_not_changed(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(farm_events, "OVERLAP_S", PATIENCE_S)  # every look finds the same operations
    operation = client.post("/v1/kernels:compile", json=BODY, headers={"Prefer": "wait=30"}).json()
    assert operation["done"]
    with client.stream("GET", "/v1/farm/events") as response:
        stream = events(response)
        first = [next(stream), next(stream)]
        other = BODY | {"expression": BODY["expression"] + " # other"}
        name = client.post("/v1/kernels:compile", json=other, headers={"Prefer": "wait=30"}).json()["name"]
        names = []
        for _, kind, data in stream:
            names += [data["name"]] if kind == "operation" else []
            if kind == "operation" and data["done"]:
                break
    assert sorted(kind for _, kind, _ in first) == ["figures", "operation"]
    assert set(names) == {name}


def test_failure_is_counted_by_its_code(client: httpx.Client) -> None:
    failing = BODY | {"options": {**BODY["options"], "top_k": 99}}
    client.post("/v1/kernels:compile", json=failing, headers={"Prefer": "wait=30"})
    assert client.get("/v1/farm").json()["ended"] == {"compile-failed": 1}


def test_clients_that_share_an_operation_do_not_see_each_others_texts(tmp_path: Path, builder: Builder) -> None:
    """The program is read, so that its canonical text is known before and after it is built."""
    builder.gate.clear()
    written = BODY["expression"] + "  # of a secret project"
    shown = []
    with served(create_app(Settings(store=tmp_path / "store", workers=1), builder)) as client:
        for text in (written, BODY["expression"]):
            operation = client.post("/v1/kernels:compile", json=BODY | {"expression": text}).json()
            shown.append(operation["request"]["expression"])
        assert operation["metadata"]["cache"] == "joined"
        with client.stream("GET", "/v1/farm/events", headers={"Last-Event-ID": "0"}) as response:
            shown.append(next(data for _, kind, data in events(response) if kind == "operation")["request"]["expression"])
        builder.gate.set()
    assert shown == ["C[m, n] +=! A[m, k] * B[k, n] where m in 8, n in 8, k in 8"] * 3
    assert builder.expressions == [written]


def test_a_client_that_was_cut_misses_no_operation(client: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Several pages are found at one look, and the client is cut after the first event."""
    monkeypatch.setattr(farm_events, "PAGE_OPERATIONS", 2)
    with client.stream("GET", "/v1/farm/events") as response:
        start = next(events(response))[0]
    names = set()
    for number in range(5):
        body = BODY | {"expression": f"{BODY['expression']} # {number}"}
        names.add(client.post("/v1/kernels:compile", json=body, headers={"Prefer": "wait=30"}).json()["name"])
    seen = set()
    for _ in range(2):  # every event of a look resumes before it
        with client.stream("GET", "/v1/farm/events", headers={"Last-Event-ID": start}) as response:
            start, kind, data = next(events(response))
            assert kind == "operation"
            seen.add(data["name"])
    assert len(seen) == 1
    with client.stream("GET", "/v1/farm/events", headers={"Last-Event-ID": start}) as response:
        lines = response.iter_lines()
        for line in lines:
            if line.startswith('data: {"name"'):
                seen.add(json.loads(line.removeprefix("data: "))["name"])
            if line == "event: figures":
                break
        assert seen == names
        end = next(line for line in lines if line.startswith("id: "))
    assert float(end.removeprefix("id: ")) > float(start)
