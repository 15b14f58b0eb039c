"""Connections: how many, how long, how finely cut. Findings P5, P6 and P12 of the service's audit."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import re
import resource
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
from serving import answer_of, connected, exchanged, parsed, received, running
from waiting import PATIENCE_S, wait_until

from roller_svc.farm.store import Artifact
from roller_svc.farm.watch import EndWatcher
from roller_svc.ir.report import BuildRequest
from roller_svc.service import connections
from roller_svc.service.app import create_app
from roller_svc.service.connections import (
    ACCEPT_ITERATIONS,
    FREE_CHUNKS,
    MAX_HEAD_BYTES,
    MIN_MEAN_CHUNK_BYTES,
    RESERVED_DESCRIPTORS,
    fit_connections,
)
from roller_svc.service.server import MAX_PENDING, ServiceServer
from roller_svc.settings import LIMITS, Resource, Settings

ROOT = Path(__file__).resolve().parents[2]
SHORT_S = 0.3  # a deadline that a test waits for
LONG_S = 600.0  # one that no test reaches
HEALTH = b"GET /healthz HTTP/1.1\r\nHost: localhost\r\n\r\n"
VERSION = b"GET /v1/version HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n"
POST = b"POST /v1/estimates HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n"
BODY: dict[str, Any] = {
    "expression": "y[i] = x[i] * 2.0",
    "inputs": {"x": {"dtype": "float32", "shape": [8]}},
    "target": "cpu-x86-avx2",
}


class Gate:
    """A builder that waits until it is opened."""

    def __init__(self) -> None:
        self.opened = threading.Event()

    def __call__(self, _: BuildRequest) -> Artifact:
        assert self.opened.wait(PATIENCE_S)
        digest = "sha256:" + "0" * 64
        return Artifact(digest, {"digest": digest, "language": "c", "files": {"source": "kernel.c"}}, {"source": b""})


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


@pytest.fixture
def lingering(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let clients that still send take their time to read a response."""
    monkeypatch.setattr(connections, "LINGER_S", LONG_S)


@contextlib.contextmanager
def service(folder: Path, gate: Gate, **changes: Any) -> Iterator[tuple[ServiceServer, int]]:
    chosen = {"header_timeout_s": LONG_S, "body_timeout_s": LONG_S} | changes
    with running(create_app(Settings(store=folder, **chosen), gate)) as (server, port):
        try:
            yield server, port
        finally:
            gate.opened.set()


def healthy(port: int) -> None:
    status, body = exchanged(port, HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
    assert (status, body) == (200, {"status": "ok"})


@pytest.mark.parametrize(
    "sent",
    [b"", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", POST + b"Content-Length: 100\r\n\r\n{", CHUNKED + b"\r\n5\r\n{", HEALTH],
    ids=["nothing", "headers", "a body", "a chunk", "idle"],
)
def test_150_silent_connections_keep_nobody_out(tmp_path: Path, gate: Gate, sent: bytes) -> None:
    with service(tmp_path, gate, max_connections=20) as (server, port), ExitStack() as silent:
        for _ in range(150):
            connection = silent.enter_context(connected(port))
            connection.sendall(sent)
            if sent == HEALTH:
                assert b"ok" in answer_of(connection)
        for _ in range(5):
            healthy(port)
        wait_until(lambda: len(server.server_state.connections) <= 20 + LIMITS[Resource.PROBES].total)


def test_a_request_that_is_answered_is_never_given_up(tmp_path: Path, gate: Gate) -> None:
    waiting = post_of(BODY, b"Prefer: wait=60\r\n")
    with service(tmp_path, gate, max_connections=3) as (server, port), ExitStack() as stack:
        asked = [stack.enter_context(connected(port)) for _ in range(3)]
        for connection in asked:
            connection.sendall(waiting)
        wait_until(lambda: len(server.server_state.tasks) == 3)
        for _ in range(10):
            with connected(port) as late:
                late.sendall(VERSION)
                answer = received(late)
                status, body = parsed(answer)
                assert (status, body["code"]) == (503, "too-many-connections")
                assert b"retry-after: 2" in answer.lower()
        healthy(port)
        gate.opened.set()
        for connection in asked:
            assert answer_of(connection).startswith(b"HTTP/1.1 200")


def post_of(body: dict[str, Any], headers: bytes = b"", path: bytes = b"/v1/kernels:compile") -> bytes:
    content = json.dumps(body).encode()
    head = POST.replace(b"/v1/estimates", path) + headers + b"Content-Length: %d\r\n\r\n" % len(content)
    return head + content


def answer_to_drops(port: int, first: bytes, drip: bytes) -> bytes:
    """What comes to a client that sends a part of a request and then drops, until the server closes."""
    answer, give_up_s = b"", time.monotonic() + PATIENCE_S
    with connected(port) as connection, contextlib.suppress(ConnectionError):
        connection.sendall(first)
        connection.settimeout(0.02)
        while time.monotonic() < give_up_s:
            try:
                part = connection.recv(1 << 16)
            except TimeoutError:
                with contextlib.suppress(OSError):
                    connection.sendall(drip)
                continue
            answer += part
            if not part:
                break
    return answer


@pytest.mark.slow
@pytest.mark.usefixtures("lingering")
@pytest.mark.parametrize(
    ("changed", "first", "drip", "status"),
    [
        ("header_timeout_s", b"", b"", None),
        ("header_timeout_s", b"GET / HTTP/1.1\r\nHost: localhost\r\n", b"", 408),
        ("header_timeout_s", b"GET / HTTP/1.1\r\nHost: localhost\r\nX: ", b"x", 408),
        ("body_timeout_s", POST + b"Content-Length: 100000\r\n\r\n", b"", 408),
        ("body_timeout_s", POST + b"Content-Length: 100000\r\n\r\n", b" ", 408),
        ("body_timeout_s", CHUNKED + b"\r\n", b"1\r\n \r\n", 408),
    ],
    ids=["silent", "headers", "headers in drops", "body", "body in drops", "chunks in drops"],
)
def test_a_request_comes_in_time_or_not_at_all(
    tmp_path: Path, gate: Gate, changed: str, first: bytes, drip: bytes, status: int | None
) -> None:
    with service(tmp_path, gate, **{changed: SHORT_S}) as (server, port):
        for _ in range(100):
            answer = answer_to_drops(port, first, drip)
            if answer or status is None:  # a slow machine may send nothing in time
                break
        if status is None:
            assert answer == b""
        else:
            got, body = parsed(answer)
            assert (got, body["code"]) == (status, "request-timeout")
        wait_until(lambda: not server.server_state.connections)
        assert not server.server_state.tasks


def test_the_second_request_of_a_connection_has_its_own_deadlines(tmp_path: Path, gate: Gate) -> None:
    with service(tmp_path, gate) as (server, port), connected(port) as connection:
        for _ in range(3):
            connection.sendall(HEALTH)
            assert b"ok" in answer_of(connection)
        (opened,) = server.server_state.connections
        opened._limits = dataclasses.replace(opened._limits, header_timeout_s=SHORT_S)
        connection.sendall(HEALTH[:20])
        assert parsed(received(connection))[0] == 408


def test_deadlines_do_not_touch_a_request_that_is_whole(tmp_path: Path, gate: Gate) -> None:
    with service(tmp_path, gate) as (server, port), connected(port) as connection:
        wait_until(lambda: server.server_state.connections)
        (opened,) = server.server_state.connections
        wait_until(lambda: opened._deadline is not None)
        connection.sendall(post_of(BODY, b"Prefer: wait=60\r\n"))
        wait_until(lambda: server.server_state.tasks and opened._deadline is None)
        gate.opened.set()
        assert answer_of(connection).startswith(b"HTTP/1.1 200")


def test_an_idle_connection_is_closed(tmp_path: Path, gate: Gate) -> None:
    with service(tmp_path, gate) as (server, port):
        server.config.timeout_keep_alive = SHORT_S  # uvicorn gives it to call_later
        with connected(port) as connection:
            connection.sendall(HEALTH)
            assert received(connection).endswith(b'{"status":"ok"}')


def test_a_client_that_reads_nothing_is_let_go(tmp_path: Path, gate: Gate) -> None:
    with service(tmp_path, gate, body_timeout_s=SHORT_S) as (server, port), connected(port) as connection:
        asked = b"GET /openapi.json HTTP/1.1\r\nHost: localhost\r\n\r\n" * 100
        connection.settimeout(0.2)
        with contextlib.suppress(OSError):  # until the server's buffers, and then ours, are full
            for _ in range(1000):
                connection.sendall(asked)
        wait_until(lambda: not server.server_state.connections)
        healthy(port)


def test_pipelined_requests_are_answered_in_order(tmp_path: Path, gate: Gate) -> None:
    with service(tmp_path, gate) as (_, port), connected(port) as connection:
        connection.sendall(HEALTH * 30 + HEALTH.replace(b"\r\n\r\n", b"\r\nConnection: close\r\n\r\n"))
        assert received(connection).count(b'{"status":"ok"}') == 31


@pytest.mark.usefixtures("lingering")
@pytest.mark.parametrize("head", [CHUNKED, CHUNKED.replace(b"POST", b"GET"), CHUNKED.replace(b"POST", b"HEAD")])
@pytest.mark.parametrize("key", ["", "wanted"])
def test_a_million_chunks_are_not_parsed(
    tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch, head: bytes, key: str
) -> None:
    parsed_events = 0
    next_event = connections._CountingConnection.next_event

    def counted(self: connections._CountingConnection) -> Any:
        nonlocal parsed_events
        parsed_events += 1
        return next_event(self)

    monkeypatch.setattr(connections._CountingConnection, "next_event", counted)
    with service(tmp_path, gate, api_keys=key) as (_, port), connected(port) as connection:
        with contextlib.suppress(OSError):
            connection.sendall(head + b"\r\n")
            for _ in range(100):
                connection.sendall(b"1\r\n \r\n" * 10_000)
        answer = received(connection)
        assert parsed_events < FREE_CHUNKS + (1 << 20) // MIN_MEAN_CHUNK_BYTES
        assert int(answer.split()[1]) in (401, 405, 413)
    with service(tmp_path, gate) as (_, port):
        healthy(port)


def test_a_body_in_small_chunks_is_taken(tmp_path: Path, gate: Gate) -> None:
    content = json.dumps({"items": [BODY | {"target": None}], "targets": ["x"]}).encode()
    chunks = b"".join(b"1\r\n%c\r\n" % byte for byte in content)
    large = b"".join(b"40\r\n%s\r\n" % (b" " * 64) for _ in range(4 * FREE_CHUNKS))
    with service(tmp_path, gate) as (_, port):
        for body in (chunks, large + chunks):
            with connected(port) as connection:
                connection.sendall(CHUNKED + b"Connection: close\r\n\r\n" + body + b"0\r\n\r\n")
                assert parsed(received(connection))[0] == 422


@pytest.mark.usefixtures("lingering")
@pytest.mark.parametrize("framing", [b"Content-Length: 1000000\r\n\r\n", b"Transfer-Encoding: chunked\r\n\r\nf4240\r\n"])
def test_an_answer_before_the_body_is_read_by_who_still_sends(tmp_path: Path, gate: Gate, framing: bytes) -> None:
    """No reset overtakes the answer, the body is not waited for, and nothing behind it is served."""
    with service(tmp_path, gate, api_keys="wanted") as (server, port), connected(port) as connection:
        connection.sendall(POST + framing)
        for _ in range(10):
            connection.sendall(b" " * 10_000)
        connection.sendall(HEALTH)
        answer = received(connection)
        assert answer.startswith(b"HTTP/1.1 401")
        assert b"connection: close" in answer.lower()
        assert answer.count(b"HTTP/1.1") == 1
        connection.close()
        wait_until(lambda: not server.server_state.connections)


def test_a_refused_request_without_a_body_keeps_its_connection(tmp_path: Path, gate: Gate) -> None:
    with service(tmp_path, gate, api_keys="wanted") as (_, port), connected(port) as connection:
        for _ in range(3):
            connection.sendall(b"GET /v1/version HTTP/1.1\r\nHost: localhost\r\n\r\n")
            assert answer_of(connection).startswith(b"HTTP/1.1 401")


@pytest.mark.usefixtures("lingering")
@pytest.mark.parametrize(
    ("sent", "status", "code"),
    [
        (b"GET / HTTP/1.1\r\nHost : localhost\r\n\r\n", 400, "malformed-request"),
        (b"\x16\x03\x01\x02\x00\x01\x00", 400, "malformed-request"),
        (b"GET /" + b"a" * 2 * MAX_HEAD_BYTES, 414, "target-too-long"),
        (b"GET / HTTP/1.1\r\n" + b"X: " + b"a" * 2 * MAX_HEAD_BYTES, 431, "headers-too-large"),
        (CHUNKED + b"\r\nzz\r\n", 400, "malformed-request"),
        (CHUNKED + b"\r\n2\r\n{}xx", 400, "malformed-request"),
    ],
)
def test_the_parsers_refusals_are_problems_too(tmp_path: Path, gate: Gate, sent: bytes, status: int, code: str) -> None:
    with service(tmp_path, gate) as (server, port), connected(port) as connection:
        connection.sendall(sent)
        answer = received(connection)
        got, body = parsed(answer)
        assert (got, body["status"], body["code"]) == (status, status, code)
        assert b"content-type: application/problem+json" in answer.lower()
        assert b"connection: close" in answer.lower()
        connection.close()
        wait_until(lambda: not server.server_state.connections)


def test_a_body_that_breaks_off_leaves_nothing_behind(tmp_path: Path, gate: Gate) -> None:
    with service(tmp_path, gate) as (server, port):
        for _ in range(20):
            with connected(port) as connection:
                connection.sendall(POST + b"Content-Length: 100000\r\n\r\n{")
        wait_until(lambda: not server.server_state.connections and not server.server_state.tasks)
        healthy(port)


@pytest.mark.parametrize(
    "sent", [POST + b"Content-Length: 2000\r\n\r\n", CHUNKED + b"\r\n7d0\r\n" + b" " * 2000], ids=["declared", "chunks"]
)
def test_bodies_are_bounded_together(tmp_path: Path, gate: Gate, sent: bytes) -> None:
    """One whose length is declared is refused before it is sent."""
    limits = {"max_body_bytes": 4096, "limits": "body_bytes=4096/4096"}
    with service(tmp_path, gate, **limits) as (server, port), connected(port) as first:
        first.sendall(POST + b"Content-Length: 4000\r\n\r\n" + b" " * 3000)
        shares = server.config.app.state.roller.shares
        wait_until(lambda: shares.used(Resource.BODY_BYTES) == 3000)
        with connected(port) as second:
            second.sendall(sent)
            status, body = parsed(received(second))
        assert (status, body["code"]) == (503, "too-many-bodies")
        first.close()
        wait_until(lambda: exchanged(port, POST + b"Connection: close\r\nContent-Length: 2\r\n\r\n{}")[0] == 422)


def test_the_end_is_announced_and_everyone_has_an_answer(tmp_path: Path, gate: Gate) -> None:
    """Idle connections and halves of requests go at once; what is cut off in the end has a problem."""
    announced = threading.Event()
    with service(tmp_path, gate) as (server, port), ExitStack() as stack:
        server.config.timeout_graceful_shutdown = 1
        server.begin_shutdown = announced.set
        idle, half, body, waiting = (stack.enter_context(connected(port)) for _ in range(4))
        idle.sendall(HEALTH)
        assert b"ok" in answer_of(idle)
        half.sendall(HEALTH[:20])
        body.sendall(POST + b"Content-Length: 100\r\n\r\n{")
        waiting.sendall(post_of(BODY, b"Prefer: wait=60\r\n"))
        wait_until(lambda: len(server.server_state.tasks) == 2)
        server.should_exit = True
        assert received(idle) == b""
        assert received(half) == b""
        for connection in (body, waiting):
            answer = answer_of(connection)
            status, problem = parsed(answer)
            assert (status, problem["code"]) == (503, "shutting-down")
            assert b"retry-after" in answer.lower()
        gate.opened.set()
        assert announced.is_set()


def test_who_waits_at_the_end_is_told_where_to_ask(tmp_path: Path, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    watched: list[str] = []

    def add(watcher: EndWatcher, operation_id: str, wake: Callable[[], None], add: Any = EndWatcher.add) -> None:
        add(watcher, operation_id, wake)
        watched.append(operation_id)

    monkeypatch.setattr(EndWatcher, "add", add)
    with service(tmp_path, gate) as (server, port), ExitStack() as stack:
        waiting = [stack.enter_context(connected(port)) for _ in range(10)]
        for connection in waiting:
            connection.sendall(post_of(BODY, b"Prefer: wait=60\r\n"))
        wait_until(lambda: len(watched) == 10)  # all of them have been accepted, and wait
        server.should_exit = True
        for connection in waiting:
            answer = received(connection)
            assert answer.startswith(b"HTTP/1.1 202")
            assert b"location: /v1/operations/" in answer.lower()


@pytest.mark.parametrize("descriptors", [1, 8, 64, 65, 128, 256, 1024, 4096, 1 << 20])
def test_connections_leave_descriptors_for_everything_else(descriptors: int) -> None:
    backlog, most = fit_connections(descriptors, 1000)
    assert 1 <= backlog <= 128
    assert 1 <= most <= 1000
    if descriptors >= 128:
        # those that the loop has accepted and not yet looked at come on top
        assert most + ACCEPT_ITERATIONS * backlog + RESERVED_DESCRIPTORS <= descriptors
    assert fit_connections(resource.RLIM_INFINITY, 7)[1] == 7


def test_the_kernel_keeps_connections_until_they_are_accepted(tmp_path: Path, gate: Gate) -> None:
    """More than the event loop accepts at once: the kernel drops others, and their clients try again after a second."""
    with service(tmp_path, gate) as (server, _):
        listener = server.servers[0].sockets[0]
        wait_until(lambda: _max_pending(listener) == MAX_PENDING)


def _max_pending(listener: Any) -> int:
    """The field `tcpi_sacked` of Linux's tcp_info, which is the backlog of a socket that listens."""
    return int(struct.unpack_from("I", listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 32), 28)[0])


@pytest.mark.slow
def test_with_128_descriptors_150_silent_connections_keep_nobody_out(tmp_path: Path) -> None:
    """The audit's own case: before, answers were wrong and the log filled the disk."""
    command = f"ulimit -n 128; exec {sys.executable} -m roller_svc serve --port 0 --store {tmp_path / 'store'}"
    log = tmp_path / "log"
    with log.open("w") as output:
        process = subprocess.Popen(
            ["bash", "-c", command], env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=output, stderr=output
        )
        try:
            wait_until(lambda: "running on" in log.read_text())
            found = re.search(r"http://127\.0\.0\.1:(\d+)", log.read_text())
            assert found
            port = int(found[1])
            with ExitStack() as silent, httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=60.0) as client:
                for _ in range(150):
                    with contextlib.suppress(ConnectionError):
                        silent.enter_context(connected(port)).sendall(POST + b"Content-Length: 100\r\n\r\n{")
                built = client.post("/v1/kernels:compile", json=BODY, headers={"Prefer": "wait=60"}).json()
                assert built["done"] is True
                for _ in range(20):
                    assert client.get(f"/v1/{built['name']}").json() == built
                    healthy(port)
            process.send_signal(signal.SIGTERM)
            process.wait(PATIENCE_S)
        finally:
            process.kill()
            process.wait()
    assert log.read_text().count("\n") < 1000
    assert "Traceback" not in log.read_text()
    assert not [line for line in log.read_text().splitlines() if "system resource" in line]
