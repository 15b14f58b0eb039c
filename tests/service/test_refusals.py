"""Refusals: who is refused too often waits for the answer, and nobody else does."""

from __future__ import annotations

import socket
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest
from builders import Builder
from serving import answer_of, connected, received, running
from waiting import PATIENCE_S, wait_until

from roller_svc.service import refusals
from roller_svc.service.app import create_app
from roller_svc.service.connections import BoundedConnection
from roller_svc.service.refusals import MAX_CLIENTS, MAX_DELAY_S, Refusals
from roller_svc.service.server import ServiceServer
from roller_svc.settings import Limit, Settings
from tests.service.test_shares import GREEDY, OTHER, request_of

LIST = "/v1/operations"


@pytest.fixture
def paused(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The pauses of all connections so far; none ends by itself, and no refusal is forgotten."""
    monkeypatch.setattr(refusals, "PERIOD_S", PATIENCE_S)
    found: list[float] = []
    pause = BoundedConnection.pause

    async def noted(connection: BoundedConnection, seconds: float) -> None:
        found.append(seconds)
        await pause(connection, 2 * PATIENCE_S)

    monkeypatch.setattr(BoundedConnection, "pause", noted)
    return found


class Served:
    """A service that runs until a block ends."""

    def __init__(self, folder: Path, builder: Builder, stack: ExitStack, limits: str) -> None:
        keys = f"{GREEDY},{OTHER}"
        self.app = create_app(Settings(store=folder / "store", api_keys=keys, limits=limits, workers=0), builder)
        self._stack = stack
        self.server: ServiceServer
        self.server, self.port = stack.enter_context(running(self.app))

    def sent(self, key: str, path: str = LIST) -> socket.socket:
        """A connection with one request."""
        connection = self._stack.enter_context(connected(self.port))
        connection.sendall(request_of("GET", path, key))
        return connection

    def status(self, key: str, path: str = LIST) -> int:
        return int(answer_of(self.sent(key, path)).split()[1])


def test_guesses_of_keys_wait_and_nobody_else(tmp_path: Path, builder: Builder, paused: list[float]) -> None:
    with ExitStack() as stack:
        service = Served(tmp_path, builder, stack, "refusals=10/1")
        assert service.status("wrong") == 401
        late = [service.sent("wrong") for _ in range(3)]
        wait_until(lambda: len(paused) == 3)
        assert [service.status(key, path) for key, path in ((GREEDY, LIST), (OTHER, LIST), ("", "/healthz"))] == [200] * 3
        assert all(0.0 < seconds <= MAX_DELAY_S for seconds in paused)
        service.server.should_exit = True  # a service that stops lets nobody wait
        assert all(received(connection).startswith(b"HTTP/1.1 401") for connection in late)


def test_refusals_before_the_key_is_read_are_those_of_an_address(tmp_path: Path, builder: Builder, paused: list[float]) -> None:
    with ExitStack() as stack:
        service = Served(tmp_path, builder, stack, "refusals=10/1")
        origin = "Origin: http://evil.example\r\nContent-Type: application/json\r\nContent-Length: 2\r\n"
        for _ in range(2):
            stack.enter_context(connected(service.port)).sendall(request_of("POST", LIST, GREEDY, origin) + b"{}")
        wait_until(lambda: len(paused) == 1)
        assert service.status("wrong", "/healthz") == 200
        assert service.status(GREEDY) == 200


def test_a_client_that_leaves_or_is_displaced_waits_no_more(tmp_path: Path, builder: Builder, paused: list[float]) -> None:
    with ExitStack() as stack:
        service = Served(tmp_path, builder, stack, "refusals=10/1,connections=4/2,probes=2/1")
        service.sent("wrong").close()
        late = [service.sent("wrong") for _ in range(6)]
        wait_until(lambda: len(paused) >= 5)
        assert [service.status(OTHER) for _ in range(6)] == [200] * 6  # they displace those that wait
        assert received(late[0]) == b""
        for connection in late:
            connection.close()
        wait_until(lambda: not service.server.server_state.tasks)


def test_a_refusal_that_waits_holds_no_share(tmp_path: Path, builder: Builder, paused: list[float]) -> None:
    with ExitStack() as stack:
        service = Served(tmp_path, builder, stack, "refusals=1000/1,connections=2/1,body_bytes=1000/5")
        large = "Content-Type: application/json\r\nContent-Length: 600\r\n"
        for key in (GREEDY, OTHER):
            for _ in range(2):
                connection = stack.enter_context(connected(service.port))
                connection.sendall(request_of("POST", "/v1/kernels:compile", key, large) + b" " * 600)
        wait_until(lambda: len(paused) == 2)
        assert [service.status(key) for key in (GREEDY, OTHER)] == [200, 200]


# ---------------------------------------------------------------- counting


class Clock:
    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


def delays(count: Callable[[str], float], client: str, times: int) -> list[float]:
    return [round(count(client), 6) for _ in range(times)]


def test_a_part_is_answered_at_once_and_more_in_order(clock: Clock) -> None:
    counted = Refusals(Limit(100, 4), clock)
    assert delays(counted.count, "a", 6) == [0.0, 0.0, 0.0, 0.0, 0.25, 0.5]
    assert delays(counted.count, "b", 4) == [0.0] * 4
    clock.now_s += 1.0
    assert delays(counted.count, "a", 3) == [0.0, 0.0, 0.25]
    clock.now_s += 60.0
    assert delays(counted.count, "a", 5) == [0.0, 0.0, 0.0, 0.0, 0.25]


def test_no_delay_is_longer_than_the_longest(clock: Clock) -> None:
    counted = Refusals(Limit(100, 4), clock)
    assert delays(counted.count, "a", 1000)[-1] == MAX_DELAY_S
    clock.now_s += 1.0 + MAX_DELAY_S
    assert delays(counted.count, "a", 1) == [0.0]


def test_many_clients_share_a_total_that_one_does_not_use_up(clock: Clock) -> None:
    counted = Refusals(Limit(8, 4), clock)
    delays(counted.count, "greedy", 1000)
    assert delays(counted.count, "another", 4) == [0.0] * 4
    assert [counted.count(f"client {number}") for number in range(2)] == [0.125, 0.25]


def test_clients_without_a_limit_share_the_total(clock: Clock) -> None:
    counted = Refusals(Limit(2, None), clock)
    assert delays(counted.count, "a", 3) == [0.0, 0.0, 0.5]


def test_clients_in_memory_are_bounded(clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(refusals, "MAX_CLIENTS", 10)
    assert MAX_CLIENTS > 10
    counted = Refusals(Limit(1000, 4), clock)
    for number in range(100):
        clock.now_s += 1.0
        counted.count(f"client {number}")
        assert len(counted._paid_s) <= 10
