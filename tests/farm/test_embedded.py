"""The embedded farm, SQLite and builders in the service's own process: kills, several services, many clients."""

from __future__ import annotations

import contextlib
import os
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from service_process import ServiceProcess, process_name, start

SUPPORT = Path(__file__).resolve().parents[1] / "support"
RETURN_S = 30.0  # in which everything is done after a part returns
LEASE_S = 3.0


class Stack:
    """Services on one store and one database."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.services: list[ServiceProcess] = []
        self.build_log = folder / "builds"
        self.http = httpx.Client(timeout=120.0, limits=httpx.Limits(max_connections=128))

    def serve(self, *, claim_s: float = 0.0, build_s: float = 0.0, publish_s: float = 0.0, **settings: object) -> ServiceProcess:
        values = {"PORT": 0, "STORE": self.folder / "store", "WORKERS": 2, "LEASE_S": LEASE_S, "CONFINE_WORKERS": 0}
        environment = {f"ROLLER_{name}": str(value) for name, value in (values | settings).items()}
        environment |= {
            "SLEEPY_CLAIM_S": str(claim_s),
            "SLEEPY_BUILD_S": str(build_s),
            "SLEEPY_PUBLISH_S": str(publish_s),
            "SLEEPY_LOG": str(self.build_log),
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(SUPPORT.parents[1])]),
        }
        own = self.folder / f"service{len(self.services)}"
        own.mkdir()
        command = [sys.executable, "-c", "import sleepy_service as s; s.main()"]
        service = start(command, own, environment)
        self.services.append(service)
        return service

    def lines(self, kind: str) -> list[str]:
        """What the services noted of a kind."""
        text = self.build_log.read_text() if self.build_log.exists() else ""
        return [line.partition(" ")[2] for line in text.splitlines() if line.startswith(f"{kind} ")]

    def ends(self) -> Counter[str]:
        """How often each operation ended, as its events say."""
        with contextlib.closing(sqlite3.connect(self.folder / "store" / "operations.db")) as database:
            rows = database.execute("SELECT operation FROM events WHERE type = 'done'")
            return Counter(operation for (operation,) in rows)

    def close(self) -> None:
        self.http.close()
        for service in self.services:
            service.stop()


@pytest.fixture
def stack() -> Iterator[Stack]:
    # A short path: the fork server's socket is below it, and may have 108 characters.
    with tempfile.TemporaryDirectory(prefix="roller-", ignore_cleanup_errors=True) as folder:
        made = Stack(Path(folder))
        yield made
        made.close()


def body(number: int, **options: object) -> dict[str, Any]:
    return {
        "expression": f"y[i] = x[i] * {number}.5",
        "inputs": {"x": {"dtype": "float32", "shape": [64]}},
        "target": "cpu-x86-avx2",
        "options": {"select": "model", **options},
    }


def compiled(stack: Stack, service: ServiceProcess, number: int, wait_s: float = 0.0) -> dict[str, Any]:
    response = stack.http.post(
        f"http://127.0.0.1:{service.port}/v1/kernels:compile", json=body(number), headers={"Prefer": f"wait={wait_s:g}"}
    )
    assert response.status_code in (200, 202), response.text
    document: dict[str, Any] = response.json()
    return document


def ended(stack: Stack, service: ServiceProcess, name: str, within_s: float = RETURN_S) -> dict[str, Any]:
    """The operation once it is done."""
    until = time.monotonic() + within_s
    while True:
        response = stack.http.get(f"http://127.0.0.1:{service.port}/v1/{name}?wait=5")
        assert response.status_code == 200, response.text
        document: dict[str, Any] = response.json()
        if document["done"]:
            return document
        assert time.monotonic() < until, document


def has_lines(stack: Stack, kind: str, count: int) -> bool:
    return len(stack.lines(kind)) >= count


def wait_until(condition: Callable[[], object], within_s: float = 30.0) -> None:
    until = time.monotonic() + within_s
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def check_all_done_once(stack: Stack, service: ServiceProcess, names: list[str], within_s: float = RETURN_S) -> None:
    """Every operation has a kernel of its own, that its links give, and ended once."""
    until = time.monotonic() + within_s
    digests = []
    for name in names:
        document = ended(stack, service, name, max(1.0, until - time.monotonic()))
        assert "error" not in document, document
        digests.append(document["response"]["digest"])
        link = document["response"]["links"]["source"]
        assert stack.http.get(f"http://127.0.0.1:{service.port}{link}").status_code == 200
    assert len(set(digests)) == len(names)
    assert {stack.ends()[name.partition("/")[2]] for name in names} == {1}
    published: dict[str, set[str]] = {}
    for line in stack.lines("published"):
        action, _, digest = line.partition(" ")
        published.setdefault(action, set()).add(digest)
    assert all(len(found) == 1 for found in published.values())


@pytest.mark.parametrize("at", ["queued", "claimed", "building", "publishing"])
@pytest.mark.slow
def test_a_killed_service_loses_nothing(stack: Stack, at: str) -> None:
    times = {
        "queued": {"build_s": 5.0}, "claimed": {"claim_s": 2.0}, "building": {"build_s": 1.0}, "publishing": {"publish_s": 2.0},
    }[at]  # fmt: skip
    service = stack.serve(**times, WORKERS=1 if at == "queued" else 2)
    names = [compiled(stack, service, number)["name"] for number in range(5)]
    wait_until(lambda: stack.lines(at if at in ("claimed", "publishing") else "build"))
    service.kill()
    check_all_done_once(stack, stack.serve(), names)


@pytest.mark.parametrize("at", ["building", "publishing"])
@pytest.mark.slow
def test_a_killed_build_process_loses_nothing(stack: Stack, at: str) -> None:
    service = stack.serve(build_s=1.0, publish_s=1.0 if at == "publishing" else 0.0)
    names = [compiled(stack, service, number)["name"] for number in range(5)]
    for count in (1, 2, 3):
        wait_until(partial(has_lines, stack, "build" if at == "building" else "publishing", count))
        workers = [pid for pid in service.tree() if process_name(pid) == "sleepy_build"]
        os.kill(workers[0], signal.SIGKILL)
    check_all_done_once(stack, service, names)


@pytest.mark.slow
def test_a_service_that_is_killed_leaves_its_builds_to_another(stack: Stack) -> None:
    first, second = stack.serve(build_s=1.0), stack.serve(build_s=1.0)
    names = [compiled(stack, service, number)["name"] for number, service in enumerate([first, second] * 6)]
    wait_until(lambda: len(stack.lines("build")) >= 3)
    first.kill()
    check_all_done_once(stack, second, names)


@pytest.mark.slow
def test_two_services_build_each_action_once(stack: Stack) -> None:
    """P8 of the audit: 40 builds, two services, and each operation has one result for ever."""
    services = [stack.serve(build_s=0.05), stack.serve(build_s=0.05)]

    def run(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        first = compiled(stack, services[number % 2], number // 2, 30.0)
        return first, ended(stack, services[(number + 1) % 2], first["name"])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(run, range(80)))
    assert all(here["response"] == there["response"] for here, there in answers)
    assert max(Counter(stack.lines("build")).values()) == 1
    assert len({here["response"]["digest"] for here, _ in answers}) == 40
    before = {here["name"]: here["response"]["digest"] for here, _ in answers}
    stack.serve()
    time.sleep(1.0)
    assert {name: ended(stack, services[0], name)["response"]["digest"] for name in before} == before


@pytest.mark.slow
def test_identical_requests_make_one_build(stack: Stack) -> None:
    service = stack.serve(build_s=1.0)
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: compiled(stack, service, 1, 60.0), range(1000)))
    assert len({answer["response"]["digest"] for answer in answers}) == 1
    assert len(stack.lines("build")) == 1


@pytest.mark.slow
def test_sigterm_under_load_loses_nothing(stack: Stack) -> None:
    service = stack.serve(build_s=0.5)
    answers: list[httpx.Response] = []
    refused: list[Exception] = []

    def ask(number: int) -> None:
        try:
            url = f"http://127.0.0.1:{service.port}/v1/kernels:compile"
            answers.append(stack.http.post(url, json=body(number), headers={"Prefer": "wait=60"}))
        except httpx.TransportError as failure:  # it had closed its port
            refused.append(failure)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(stack.lines("build")) >= 4)
    began = time.monotonic()
    service.stop()
    assert time.monotonic() - began < 15
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} <= {200, 202, 503}
    names = [answer.json()["name"] for answer in answers if answer.status_code < 300]
    assert len(names) + len(refused) + sum(answer.status_code == 503 for answer in answers) == 30
    assert len(names) >= 20
    check_all_done_once(stack, stack.serve(), names)
    assert max(Counter(stack.lines("published")).values()) == 1


@pytest.mark.slow
def test_one_client_with_thousands_of_builds_holds_up_nobody(stack: Stack) -> None:
    service = stack.serve(build_s=0.2, WORKERS=1, API_KEYS="greedy,modest", QUEUE_LENGTH=5000, QUEUE_LENGTH_PER_CLIENT=3000)
    url = f"http://127.0.0.1:{service.port}/v1/kernels:compile"
    with httpx.Client(headers={"Authorization": "Bearer greedy"}, timeout=60.0) as greedy:
        for number in range(2000):
            assert greedy.post(url, json=body(number)).status_code in (200, 202)
    modest = {"Authorization": "Bearer modest"}
    assert stack.http.post(url, json=body(9999), headers=modest).status_code == 202
    begun = len(stack.lines("build"))  # when it was queued, or later
    assert stack.http.post(url, json=body(9999), headers=modest | {"Prefer": "wait=60"}).status_code == 200
    assert stack.lines("build").index(body(9999)["expression"]) <= begun + 1  # one of the other client may come first
