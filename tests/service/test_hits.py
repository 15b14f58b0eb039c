"""The path of remembered hits answers as the routed path does, to the byte, or leaves the request to it."""

from __future__ import annotations

import asyncio
import gzip
import hashlib
import json
import re
import socket
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from builders import BODY, Builder, digest_of
from fastapi import Request
from fastapi.responses import JSONResponse
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families
from sampling import examples
from serving import answer_of, running, served

from roller_svc.client.schemas import CompileRequest
from roller_svc.errors import StoreError
from roller_svc.farm.api_keys import ApiKeys, Scope, id_of_key
from roller_svc.farm.blobs import blob_name
from roller_svc.farm.database.connect import Database
from roller_svc.farm.database.migrate import upgrade
from roller_svc.farm.operations import cached_operation
from roller_svc.farm.store import Artifact, Store
from roller_svc.service import hits, key_cache
from roller_svc.service.app import create_app
from roller_svc.service.hits import Answer, HitAnswers
from roller_svc.service.logs import LogFormatter, Redactor
from roller_svc.service.mapping import build_request_from_body
from roller_svc.service.metrics import Metrics
from roller_svc.service.shares import ANONYMOUS
from roller_svc.service.state import State
from roller_svc.settings import Resource, Settings

PATH = "/v1/kernels:compile"
TIME = re.compile(rb'"create_time":"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z"')
CONTENT = json.dumps(BODY).encode()
MEASURED = json.dumps(BODY | {"options": {**BODY["options"], "select": "measure"}}).encode()


@dataclass(frozen=True)
class Sent:
    """A request, as it goes over the wire."""

    method: str = "POST"
    target: str = PATH
    headers: tuple[tuple[str, str], ...] = ()
    content: bytes = CONTENT
    host: str | None = None
    media_type: str | None = "application/json"
    is_chunked: bool = False

    def encode(self, port: int) -> bytes:
        lines = [f"{self.method} {self.target} HTTP/1.1", f"Host: {self.host or f'127.0.0.1:{port}'}", "X-Request-ID: one"]
        lines += [] if self.media_type is None else [f"Content-Type: {self.media_type}"]
        lines += [f"{name}: {value}" for name, value in self.headers]
        if self.is_chunked:
            half = len(self.content) // 2
            parts = [part for part in (self.content[:half], self.content[half:]) if part]
            lines.append("Transfer-Encoding: chunked")
            body = b"".join(b"%x\r\n%s\r\n" % (len(part), part) for part in parts) + b"0\r\n\r\n"
        else:
            lines.append(f"Content-Length: {len(self.content)}")
            body = self.content
        return "\r\n".join([*lines, "", ""]).encode("latin-1") + body


class Service:
    """A service whose answers from memory are counted."""

    def __init__(self, state: State, port: int, *, routes_all: bool, monkeypatch: pytest.MonkeyPatch) -> None:
        self.state = state
        self.port = port
        self.found = 0
        find = state.hits.find

        async def counted(scope: Any, body: bytes) -> Answer | None:
            answer = None if routes_all else await find(scope, body)
            self.found += answer is not None
            return answer

        monkeypatch.setattr(state.hits, "find", counted)

    def ask(self, sent: Sent) -> tuple[list[bytes], bytes]:
        """The head's lines but the date, and the content of an answer, expanded; its time is replaced."""
        with socket.create_connection(("127.0.0.1", self.port), timeout=60.0) as connection:
            connection.sendall(sent.encode(self.port))
            answer = b""
            while sent.method == "HEAD" and not answer.endswith(b"\r\n\r\n"):  # it has no content
                answer += connection.recv(1 << 16)
            answer = answer or answer_of(connection)
        head, _, content = answer.partition(b"\r\n\r\n")
        lines = [line for line in head.split(b"\r\n") if not line.lower().startswith(b"date:")]
        if b"content-encoding: gzip" in lines:  # the length is of compressed text with the time
            content = gzip.decompress(content)
            lines = [line for line in lines if not line.startswith(b"content-length:")]
        return lines, TIME.sub(b'"create_time":""', content)

    def hit(self, sent: Sent) -> bool:
        """Whether the answer to a request comes from memory."""
        before = self.found
        self.ask(sent)
        return self.found > before


@dataclass
class Pair:
    """Two services on one store: one remembers hits, the other routes each request."""

    remembering: Service
    routing: Service
    folder: Path
    builder: Builder

    def same(self, sent: Sent) -> bool:
        """Check that both give one answer; return whether the first gave it from memory."""
        before = self.remembering.found
        assert self.remembering.ask(sent) == self.routing.ask(sent)
        return self.remembering.found > before


@contextmanager
def services(folder: Path, builder: Builder, **more: Any) -> Iterator[Pair]:
    made = Settings(store=folder, workers=1, **more)
    with ExitStack() as stack:
        monkeypatch = stack.enter_context(pytest.MonkeyPatch.context())
        found = []
        for routes_all in (False, True):
            app = create_app(made, builder, digest_of)
            _, port = stack.enter_context(running(app))
            found.append(Service(app.state.roller, port, routes_all=routes_all, monkeypatch=monkeypatch))
        yield Pair(*found, folder, builder)


def build(service: Service, *sent: Sent) -> None:
    """Have the results of requests in the store, and the answers in memory."""
    for each in sent:
        waiting = replace(each, headers=(*each.headers, ("Prefer", "wait=60")))
        assert b" 200 " in service.ask(waiting)[0][0]
        service.ask(each)


@pytest.fixture
def pair(tmp_path: Path, builder: Builder) -> Iterator[Pair]:
    with services(tmp_path / "store", builder) as found:
        build(found.remembering, Sent())
        yield found


def test_a_hit_is_answered_from_memory_and_as_the_route_answers(pair: Pair) -> None:
    assert [pair.same(Sent()) for _ in range(3)] == [True] * 3
    head, content = pair.remembering.ask(Sent())
    assert b"x-content-type-options: nosniff" in head
    assert b"x-request-id: one" in head
    assert json.loads(content)["metadata"]["cache"] == "hit"
    assert pair.builder.built == 1


def test_the_time_of_a_remembered_hit_is_that_of_the_request(pair: Pair) -> None:
    url = f"http://127.0.0.1:{pair.remembering.port}{PATH}"
    times = []
    for _ in range(2):
        times.append(httpx.post(url, json=BODY, timeout=60.0).json()["metadata"]["create_time"])
        time.sleep(0.01)
    assert times[0] < times[1]


AS_SENT = {
    "chunked": (Sent(is_chunked=True), True),
    "wait": (Sent(headers=(("Prefer", "wait=5"),)), True),
    "wait and more": (Sent(headers=(("Prefer", "respond-async, wait=100"),)), True),
    "gzip": (Sent(headers=(("Accept-Encoding", "gzip"), ("Content-Encoding", "gzip"))), True),
    "a key nobody asked for": (Sent(headers=(("Authorization", "Bearer x"),)), True),
    "an absolute target": (Sent(target=f"http://localhost{PATH}", host="ignored"), True),
    "a charset": (Sent(media_type="application/json; charset=utf-8"), True),
    "two waits": (Sent(headers=(("Prefer", "wait=5"), ("Prefer", "wait=6"))), False),
    "a long preference": (Sent(headers=(("Prefer", "wait=5" + " " * 50 + "x" * 200),)), False),
    "an idempotency key": (Sent(headers=(("Idempotency-Key", "k"),)), False),
    "a query": (Sent(target=f"{PATH}?x=1"), False),
    "a slash": (Sent(target=f"{PATH}/"), False),
    "an escaped path": (Sent(target="/v1/kernels%3Acompile"), False),
    "another path": (Sent(target="/v1/kernels:measure"), False),
    "another media type": (Sent(media_type="text/plain"), False),
    "text that ends in json": (Sent(media_type="text/x+json"), False),
    "no media type": (Sent(media_type=None), False),
    "another host": (Sent(host="evil.example"), False),
    "another site": (Sent(headers=(("Origin", "http://evil.example"),)), False),
    "GET": (Sent(method="GET"), False),
    "HEAD": (Sent(method="HEAD", content=b""), False),
    "PUT": (Sent(method="PUT"), False),
    "no JSON": (Sent(content=CONTENT[:-1]), False),
    "an unknown field": (Sent(content=json.dumps(BODY | {"x": 1}).encode()), False),
    "an error": (Sent(content=json.dumps(BODY | {"expression": "bad"}).encode()), False),
    "oversized": (Sent(content=b"[" + b"0," * (1 << 20) + b"0]"), False),
    "both framings": (Sent(headers=(("Transfer-Encoding", "chunked"),)), False),
}


@pytest.mark.parametrize("case", AS_SENT)
def test_what_decides_an_answer_is_respected(pair: Pair, case: str) -> None:
    """A request that may be remembered is, from its second time on; another one is routed each time."""
    sent, is_remembered = AS_SENT[case]
    assert [pair.same(sent) for _ in range(3)][1:] == [is_remembered] * 2
    assert pair.same(Sent())


@pytest.fixture
def keys(tmp_path: Path) -> Iterator[ApiKeys]:
    (tmp_path / "store").mkdir()
    database = Database(f"sqlite:///{tmp_path}/store/operations.db")
    upgrade(database)
    yield ApiKeys(database)
    database.close()


def with_key(key: str, **more: Any) -> Sent:
    return Sent(headers=(("Authorization", f"Bearer {key}"),), **more)


def test_every_client_is_checked(tmp_path: Path, builder: Builder, keys: ApiKeys, monkeypatch: pytest.MonkeyPatch) -> None:
    both = keys.add("both", frozenset({Scope.COMPILE, Scope.MEASURE, Scope.READ}))[0]
    compiling = keys.add("compiling", frozenset({Scope.COMPILE}))[0]
    reading = keys.add("reading", frozenset({Scope.READ}))[0]
    with services(tmp_path / "store", builder) as pair:
        build(pair.remembering, with_key(both), with_key(both, content=MEASURED))
        assert pair.same(with_key(both))
        assert pair.same(with_key(both, content=MEASURED))
        assert pair.same(with_key(compiling))
        for sent in (
            Sent(),
            with_key(reading),
            with_key(compiling, content=MEASURED),
            with_key("rk_000000000000_" + "x" * 30),
            with_key(both[:-1]),
        ):
            assert not pair.same(sent)
        assert pair.remembering.ask(with_key(reading))[0][0].startswith(b"HTTP/1.1 403")
        monkeypatch.setattr(key_cache, "MAX_AGE_S", 0.0)  # the time in which a revocation takes effect
        keys.revoke(id_of_key(compiling) or "")
        assert not pair.same(with_key(compiling))
        assert pair.same(with_key(both))


def remove_kernel(store: Store) -> None:
    store.objects.remove([info.name for info in store.objects.list("kernels/")])


def remove_action(store: Store) -> None:
    store.objects.remove([info.name for info in store.objects.list("ac/")])


def remove_blobs(store: Store) -> None:
    store.objects.remove([info.name for info in store.objects.list("cas/")])


def flip_blobs(store: Store) -> None:
    for info in list(store.objects.list("cas/")):
        content = store.objects.read(info.name)
        assert content is not None
        store.objects.write(info.name, content[:-1] + bytes([content[-1] ^ 1]))


@pytest.mark.parametrize("damage", [remove_kernel, remove_action, remove_blobs, flip_blobs])
def test_a_result_that_is_gone_or_damaged_is_built_again(
    pair: Pair, damage: Callable[[Store], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(hits, "MAX_AGE_S", -1.0)
    assert pair.same(Sent())
    damage(Store(pair.folder))
    head, _ = pair.remembering.ask(Sent())
    assert head[0].startswith(b"HTTP/1.1 202")
    build(pair.remembering, Sent())
    assert pair.builder.built == 2
    assert pair.same(Sent())


def test_the_store_is_asked_once_a_second(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[float] = []
    clock_s = [1e9]  # far from the clock of the answer
    find_result = Store.find_result

    def counted(store: Store, action: str) -> Any:
        asked.append(clock_s[0] - 1e9)
        return find_result(store, action)

    monkeypatch.setattr(Store, "find_result", counted)
    monkeypatch.setattr(pair.remembering.state.hits, "_clock", lambda: clock_s[0])

    def hits_at(seconds: float) -> bool:
        clock_s[0] = 1e9 + seconds
        return pair.remembering.hit(Sent())

    assert all(map(hits_at, (0.0, 0.5, 1.0, 1.25, 1.5, 2.25, 2.5, 10.0, 10.0)))
    assert asked == [0.0, 1.25, 2.5, 10.0]
    remove_action(Store(pair.folder))
    assert all(map(hits_at, (10.5, 11.0)))  # a result that is gone is answered for a second at most
    assert not hits_at(11.25)


def test_a_store_that_is_away_is_reported_by_the_route(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(store: Store, action: str) -> Any:
        raise StoreError("cannot read the store: gone")

    monkeypatch.setattr(hits, "MAX_AGE_S", -1.0)
    with monkeypatch.context() as broken:
        broken.setattr(Store, "find_result", away)
        assert not pair.same(Sent())
        assert pair.remembering.ask(Sent())[0][0].startswith(b"HTTP/1.1 503")
    assert pair.same(Sent())


def test_a_model_whose_upload_is_gone_is_unknown(tmp_path: Path, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hits, "MAX_AGE_S", -1.0)
    with services(tmp_path / "store", builder) as pair:
        state = pair.remembering.state
        blob = state.store.put_upload(b"a model")
        sent = Sent(
            target="/v1/graphs:compile",
            content=json.dumps({"model": {"blob": f"sha256:{blob}"}, "target": "cpu-x86-avx2"}).encode(),
        )
        operation = json.loads(pair.routing.ask(sent)[1])
        facts: dict[str, object] = {
            "digest": "sha256:" + "d" * 64, "target": "cpu-x86-avx2", "inputs": [], "outputs": [], "kernels": [], "plan": {},
            "estimate": {"seconds": 0.1}, "files": {"bundle": hashlib.sha256(b"content").hexdigest()},
        }  # fmt: skip
        artifact = Artifact("sha256:" + "d" * 64, facts, {"bundle": b"content"}, "models")
        state.store.publish(operation["metadata"]["action"], artifact)
        assert [pair.same(sent) for _ in range(3)] == [False, True, True]
        state.store.objects.remove([blob_name(blob)])
        assert not pair.same(sent)
        assert pair.remembering.ask(sent)[0][0].startswith(b"HTTP/1.1 404")


@pytest.mark.parametrize("resource", [Resource.CONNECTIONS, Resource.BODY_BYTES])
def test_a_remembered_hit_uses_what_is_finite(pair: Pair, resource: Resource) -> None:
    with ExitStack() as stack:
        for service in (pair.remembering, pair.routing):
            shares = service.state.shares
            stack.enter_context(shares.hold(resource, ANONYMOUS, shares.part_of(resource, ANONYMOUS) or 0))
        assert not pair.same(Sent())
        assert pair.remembering.ask(Sent())[0][0].startswith(b"HTTP/1.1 503")
    assert pair.same(Sent())


def test_hits_are_counted_and_logged_alike(pair: Pair, caplog: pytest.LogCaptureFixture) -> None:
    def count(service: Service) -> float:
        text = httpx.get(f"http://127.0.0.1:{service.port}/metrics", timeout=60.0).text
        return next(
            sample.value
            for family in text_string_to_metric_families(text)
            for sample in family.samples
            if sample.name == "roller_submissions_total" and sample.labels["cache"] == "hit"
        )

    pair.routing.ask(Sent())
    before = count(pair.remembering), count(pair.routing)
    caplog.handler.setFormatter(LogFormatter("json", Redactor()))
    caplog.clear()
    with caplog.at_level("INFO", logger="roller_svc.service.request_log"):
        assert pair.same(Sent())
    assert (count(pair.remembering), count(pair.routing)) == (before[0] + 1, before[1] + 1)
    lines = [json.loads(line) for line in caplog.text.splitlines() if json.loads(line).get("path") == PATH]
    times = [(line.pop("timestamp"), line.pop("seconds")) for line in lines]
    assert len(times) == 2
    assert lines[0] == lines[1]
    assert {"request_id", "client", "operation", "cache", "method", "path", "status"} <= set(lines[0])


def test_the_memory_of_answers_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests may be much larger or smaller than their answers: what is kept has the weight it is given."""
    monkeypatch.setattr(hits, "MAX_BYTES", 1 << 20)
    wanted = build_request_from_body(CompileRequest(**BODY))

    async def remember(answers: HitAnswers, count: int) -> None:
        for number in range(count):
            facts: dict[str, object] = {"digest": f"sha256:{number:064x}", "names": [str(each) for each in range(number % 100)]}
            operation = cached_operation(f"sha256:{number:064x}", facts, {"expression": "x" * 10_000})
            response = JSONResponse({"create_time": operation.create_time, **facts})
            state = {"hit_key": number.to_bytes(32)}
            request = Request({"type": "http", "headers": [], "state": state})
            answers.remember(request, wanted, operation, response, frozenset({Scope.COMPILE}))

    async def run_now(work: Callable[[], bool]) -> bool:
        return work()

    answers = HitAnswers(Store(tmp_path), run_now, Metrics())
    asyncio.run(remember(answers, 1))
    tracemalloc.start()
    before, _ = tracemalloc.get_traced_memory()
    asyncio.run(remember(answers, 1000))
    after, _ = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert 1 << 18 < after - before < hits.MAX_BYTES


targets = st.sampled_from([PATH, PATH, PATH, f"{PATH}/", f"{PATH}?a", "/v1/kernels:measure", "/v1/graphs:compile", "/v1/kernels"])
header = st.one_of(
    st.tuples(st.sampled_from(["Prefer", "prefer"]), st.sampled_from(["wait=1", "wait=0", "wait", "x", "wait=1,wait=2"])),
    st.tuples(st.just("Accept"), st.sampled_from(["text/html", "*/*"])),
    st.tuples(st.just("Expect"), st.just("100-wait")),
    st.tuples(st.just("Range"), st.just("bytes=0-3")),
    st.tuples(st.just("X-API-Key"), st.sampled_from(["", "k"])),
    st.tuples(st.just("Cookie"), st.text("ab=;", max_size=5)),
    st.tuples(st.just("X-Forwarded-Host"), st.just("evil.example")),
    st.tuples(st.just("If-None-Match"), st.just("*")),
)
contents = st.sampled_from([
    CONTENT,
    CONTENT,
    CONTENT,
    CONTENT + b" ",
    json.dumps(BODY, indent=1).encode(),
    json.dumps(BODY | {"priority": 3}).encode(),
    json.dumps(BODY | {"timeout_s": -1}).encode(),
    CONTENT.replace(b'"A"', b'"Z"'),
    CONTENT[1:],
    b"",
    b"{}",
    "\N{BOM}".encode() + CONTENT,
])  # fmt: skip
requests = st.builds(
    Sent,
    method=st.sampled_from(["POST", "POST", "POST", "POST", "GET", "DELETE"]),
    target=targets,
    headers=st.lists(header, max_size=3).map(tuple),
    content=contents,
    host=st.sampled_from([None, None, None, "localhost", "evil.example"]),
    media_type=st.sampled_from(["application/json", "application/json", "application/x+json", "Application/JSON;a=b", "text/json"]),
    is_chunked=st.booleans(),
)


@pytest.fixture(scope="module")
def warm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    with services(tmp_path_factory.mktemp("warm") / "store", Builder()) as found:
        build(found.remembering, Sent(), Sent(content=CONTENT.replace(b'"A"', b'"Z"').replace(b"A[", b"Z[")))
        yield found


@settings(max_examples=examples(60), suppress_health_check=list(HealthCheck))
@given(st.lists(requests, min_size=2, max_size=4))
def test_random_requests_have_one_answer_on_both_paths(warm: Pair, several: list[Sent]) -> None:
    for sent in [*several, *several]:
        if b" 202 " not in warm.routing.ask(sent)[0][0]:  # a build ends when it ends
            warm.same(sent)
    assert warm.same(Sent())


def test_a_hit_whose_answer_was_compressed_is_answered_again(tmp_path: Path, builder: Builder) -> None:
    body = BODY | {"expression": f"{BODY['expression']} # {'x' * 4000}"}  # long enough to be compressed
    with served(create_app(Settings(store=tmp_path / "store", workers=1), builder, digest_of)) as client:
        answers = [client.post(PATH, json=body, headers={"Prefer": "wait=30"}) for _ in range(4)]
    assert "content-encoding" in answers[1].headers
    assert [answer.status_code for answer in answers] == [200] * 4
    assert all(answer.json()["response"] == answers[0].json()["response"] for answer in answers)
