"""The embedded farm, SQLite and builders in the service's own process: kills, several services, many clients."""

from __future__ import annotations

import os
import signal
import threading
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import httpx
import pytest
from farm_stack import LONG_LEASE_S, Requests, Stack, base_url, body
from service_process import process_name
from waiting import wait_until

pytestmark = pytest.mark.slow


def has_lines(farm: Stack, kind: str, count: int) -> bool:
    return len(farm.lines(kind)) >= count


@pytest.mark.parametrize("at", ["queued", "claimed", "building", "publishing"])
def test_a_killed_service_loses_nothing(polling_farm: Stack, requests: Requests, at: str) -> None:
    times = {
        "queued": {"build_s": 5.0}, "claimed": {"claim_s": 2.0}, "building": {"build_s": 1.0}, "publishing": {"publish_s": 2.0},
    }[at]  # fmt: skip
    service = polling_farm.serve(**times, WORKERS=1 if at == "queued" else 2)
    names = [requests.compile(service, number)["name"] for number in range(5)]
    wait_until(lambda: polling_farm.lines(at if at in ("claimed", "publishing") else "build"))
    service.kill()
    requests.check_done_once(polling_farm, polling_farm.serve(WORKERS=2), names)


@pytest.mark.parametrize("at", ["building", "publishing"])
def test_a_killed_build_process_loses_nothing(polling_farm: Stack, requests: Requests, at: str) -> None:
    service = polling_farm.serve(build_s=1.0, publish_s=1.0 if at == "publishing" else 0.0, WORKERS=2)
    names = [requests.compile(service, number)["name"] for number in range(5)]
    for count in (1, 2, 3):
        wait_until(partial(has_lines, polling_farm, "build" if at == "building" else "publishing", count))
        workers = [pid for pid in service.tree() if process_name(pid) == "sleepy_build"]
        os.kill(workers[0], signal.SIGKILL)
    requests.check_done_once(polling_farm, service, names)


def test_a_service_that_is_killed_leaves_its_builds_to_another(polling_farm: Stack, requests: Requests) -> None:
    first, second = (polling_farm.serve(build_s=1.0, WORKERS=2) for _ in range(2))
    names = [requests.compile(service, number)["name"] for number, service in enumerate([first, second] * 6)]
    wait_until(partial(has_lines, polling_farm, "build", 3))
    first.kill()
    requests.check_done_once(polling_farm, second, names)


def test_two_services_build_each_action_once(polling_farm: Stack, requests: Requests) -> None:
    """P8 of the audit: 40 builds, two services, and each operation has one result for ever."""
    polling_farm.lease_s = LONG_LEASE_S
    services = [polling_farm.serve(build_s=0.05, WORKERS=2) for _ in range(2)]

    def run(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        first = requests.compile(services[number % 2], number // 2, 30.0)
        return first, requests.ended(services[(number + 1) % 2], first["name"])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(run, range(80)))
    assert all(here["response"] == there["response"] for here, there in answers if here["done"])
    assert max(Counter(polling_farm.lines("build")).values()) == 1
    before = {there["name"]: there["response"]["digest"] for _, there in answers}
    assert len(set(before.values())) == 40
    polling_farm.serve(WORKERS=2)
    assert {name: requests.ended(services[0], name)["response"]["digest"] for name in before} == before


def test_identical_requests_make_one_build(polling_farm: Stack, requests: Requests) -> None:
    polling_farm.lease_s = LONG_LEASE_S
    service = polling_farm.serve(build_s=1.0, WORKERS=2)
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: requests.compile(service, 1, 60.0), range(1000)))
    assert len({answer["response"]["digest"] for answer in answers}) == 1
    assert len(polling_farm.lines("build")) == 1


def test_sigterm_under_load_loses_nothing(polling_farm: Stack, requests: Requests) -> None:
    polling_farm.lease_s = LONG_LEASE_S
    service = polling_farm.serve(build_s=0.5, WORKERS=2)
    answers: list[httpx.Response] = []
    refused: list[Exception] = []

    def ask(number: int) -> None:
        try:
            url = f"{base_url(service)}/v1/kernels:compile"
            answers.append(httpx.post(url, json=body(number), headers={"Prefer": "wait=60"}, timeout=90.0))
        except httpx.TransportError as failure:  # it had closed its port
            refused.append(failure)

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(30)]
    for thread in threads:
        thread.start()
    wait_until(partial(has_lines, polling_farm, "build", 4))
    assert service.stop() != -signal.SIGKILL
    for thread in threads:
        thread.join()
    assert {answer.status_code for answer in answers} <= {200, 202, 503}
    names = [answer.json()["name"] for answer in answers if answer.status_code < 300]
    assert len(names) + len(refused) + sum(answer.status_code == 503 for answer in answers) == 30
    assert len(names) >= 20
    requests.check_done_once(polling_farm, polling_farm.serve(WORKERS=2), names)


def test_one_client_with_thousands_of_builds_holds_up_nobody(polling_farm: Stack, requests: Requests) -> None:
    polling_farm.lease_s = LONG_LEASE_S
    service = polling_farm.serve(build_s=0.2, WORKERS=1, API_KEYS="greedy,modest", QUEUE_LENGTH_PER_CLIENT=3000)
    requests.use_key("greedy")
    for number in range(2000):
        requests.compile(service, number)
    requests.use_key("modest")
    requests.compile(service, 9999)
    begun = len(polling_farm.lines("build"))  # when it was queued, or later
    requests.ended(service, requests.compile(service, 9999)["name"])
    assert polling_farm.lines("build").index(body(9999)["expression"]) <= begun + 1  # one of the other client may come first
