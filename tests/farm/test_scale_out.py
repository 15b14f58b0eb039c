"""The farm on PostgreSQL and RabbitMQ: load, kills of every part, and parts that are away for a while."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from farm_stack import Broker, PostgreSql, Requests, Stack, Worker, base_url, body, wait_until
from service_process import ServiceProcess, descendants, process_name

pytestmark = [pytest.mark.farm, pytest.mark.slow]

AWAY_S = 10.0
TIMES = {"queued": {"build_s": 4.0}, "building": {"build_s": 1.0}, "publishing": {"publish_s": 2.0}}


def test_identical_requests_make_one_build(farm: Stack, requests: Requests) -> None:
    service = farm.serve()
    farm.work(build_s=1.0)
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: requests.compile(service, 1, 60.0), range(1000)))
    assert len({answer["response"]["digest"] for answer in answers}) == 1
    assert len(farm.lines("build")) == 1


def test_builders_add_up(farm: Stack, requests: Requests) -> None:
    """300 distinct builds of 0.25 s by 1, 2 and 4 builders. See docs/operating.md for what was measured."""
    service = farm.serve()
    durations_s = {}
    for round_, builders in enumerate((1, 2, 4)):
        workers = [farm.work(build_s=0.25, LEASE_S=15) for _ in range(builders)]
        for worker in workers:
            os.kill(worker.pid, signal.SIGSTOP)  # until everything is queued
        numbers = range(300 * round_, 300 * round_ + 100 * (1 if builders == 1 else 3))
        with ThreadPoolExecutor(16) as pool:
            names = [answer["name"] for answer in pool.map(lambda n: requests.compile(service, n), numbers)]
        began = time.monotonic()
        for worker in workers:
            os.kill(worker.pid, signal.SIGCONT)
        for name in names:
            requests.ended(service, name, 120.0)
        durations_s[builders] = (time.monotonic() - began) / len(names)
        for worker in workers:
            worker.stop()
    ratios = {count: durations_s[1] / durations_s[count] for count in (2, 4)}
    print(f"\n1, 2, 4 builders: {', '.join(f'{1 / s:.2f}/s' for s in durations_s.values())}; ratios {ratios}")
    assert ratios[2] > 1.5
    assert ratios[4] > 2.6
    assert max(Counter(farm.lines("build")).values()) == 1


def test_two_services_and_four_workers_build_each_action_once(farm: Stack, requests: Requests) -> None:
    """P8 of the audit: one result an operation, one build an action."""
    services = [farm.serve(), farm.serve()]
    for _ in range(4):
        farm.work(build_s=0.05)

    def run(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        first = requests.compile(services[number % 2], number // 2, 30.0)
        return first, requests.ended(services[(number + 1) % 2], first["name"])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(run, range(80)))
    assert all(here["response"] == there["response"] for here, there in answers)
    assert max(Counter(farm.lines("build")).values()) == 1
    assert max(Counter(farm.lines("publishing")).values()) == 1
    assert len({here["response"]["digest"] for here, _ in answers}) == 40
    builders = {line.rpartition(" ")[2] for line in farm.lines("by")}
    assert len(builders) == 4


@pytest.mark.parametrize("at", ["queued", "building", "publishing"])
@pytest.mark.parametrize("part", ["api", "worker", "build process", "broker", "database"])
def test_a_killed_part_loses_nothing(
    farm: Stack, requests: Requests, broker: Broker, postgresql: PostgreSql, part: str, at: str
) -> None:
    service = farm.serve()
    workers = [farm.work(**TIMES[at])] if at == "queued" else [farm.work(**TIMES[at]) for _ in range(2)]
    names = [requests.compile(service, number)["name"] for number in range(5)]
    wait_until(lambda: farm.lines("publishing" if at == "publishing" else "build"))
    if part == "api":
        service.kill()
        service = farm.serve()
    elif part == "worker":
        workers[0].kill()
        if at == "queued":
            farm.work()
    elif part == "build process":
        os.kill(build_process(workers[0]), signal.SIGKILL)
    elif part == "broker":
        broker.kill()
        broker.start()
    else:
        postgresql.kill()
        postgresql.start()
    requests.check_done_once(farm, service, names)


@pytest.mark.parametrize("part", ["broker", "database"])
def test_a_part_that_is_away_for_ten_seconds_loses_nothing(
    farm: Stack, requests: Requests, broker: Broker, postgresql: PostgreSql, part: str
) -> None:
    service = farm.serve()
    farm.work("--jobs", "2", build_s=0.5)
    server: Broker | PostgreSql = broker if part == "broker" else postgresql
    names = [requests.compile(service, number)["name"] for number in range(8)]
    wait_until(lambda: farm.lines("build"))
    server.kill()
    began = time.monotonic()
    statuses: Counter[int] = Counter()
    while time.monotonic() < began + AWAY_S:
        asked = time.monotonic()
        response = httpx.post(f"{base_url(service)}/v1/kernels:compile", json=body(100 + sum(statuses.values())))
        assert time.monotonic() - asked < 8.0
        statuses[response.status_code] += 1
        if response.status_code == 202:
            names.append(response.json()["name"])
        time.sleep(0.2)
    assert set(statuses) == ({202} if part == "broker" else {503})
    server.start()
    requests.check_done_once(farm, service, names)
    late = requests.compile(service, 999, 20.0)
    assert late["done"]


def test_sigterm_under_load_loses_nothing(farm: Stack, requests: Requests) -> None:
    service = farm.serve()
    workers = [farm.work("--jobs", "2", build_s=0.5) for _ in range(2)]
    answers, refused = in_threads(service, 30)
    wait_until(lambda: len(farm.lines("build")) >= 4)
    workers[0].terminate()
    began = time.monotonic()
    service.stop()
    assert time.monotonic() - began < 15
    assert workers[0].popen.wait(15) == 0
    for thread in refused:
        thread.join()
    codes = {answer.status_code for answer in answers}
    assert codes <= {200, 202, 503}
    names = [answer.json()["name"] for answer in answers if answer.status_code < 300]
    assert len(names) >= 20
    requests.check_done_once(farm, farm.serve(), names)
    assert max(Counter(farm.lines("build")).values()) == 1  # a drained worker finishes what it began


def test_a_second_signal_releases_builds_at_once(farm: Stack, requests: Requests) -> None:
    service = farm.serve()
    worker = farm.work(build_s=60.0)
    name = requests.compile(service, 1)["name"]
    wait_until(lambda: farm.lines("build"))
    worker.terminate()
    time.sleep(1.0)
    assert worker.popen.poll() is None
    worker.popen.send_signal(signal.SIGINT)
    assert worker.popen.wait(10) == 0
    farm.work()
    document = requests.ended(service, name, 10.0)
    assert "error" not in document
    assert "given back" in worker.log.read_text()


def test_a_drain_that_takes_too_long_releases_builds(farm: Stack, requests: Requests) -> None:
    service = farm.serve()
    worker = farm.work(build_s=60.0, DRAIN_TIMEOUT_S=1)
    requests.compile(service, 1)
    wait_until(lambda: farm.lines("build"))
    worker.terminate()
    assert worker.popen.wait(15) == 0
    assert "given back" in worker.log.read_text()


def test_a_stopped_worker_is_overtaken_and_publishes_nothing(farm: Stack, requests: Requests) -> None:
    """P9 of the audit: SIGSTOP is a lost worker. What it does when it goes on is fenced."""
    service = farm.serve()
    stopped = farm.work(build_s=1.0)
    name = requests.compile(service, 1)["name"]
    wait_until(lambda: farm.lines("build"))
    processes = descendants(stopped.pid)
    for pid in processes:
        os.kill(pid, signal.SIGSTOP)
    farm.work()
    document = requests.ended(service, name)
    for pid in processes:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: "dropped" in stopped.log.read_text() or "overtaken" in stopped.log.read_text())
    assert requests.ended(service, name)["response"] == document["response"]
    assert len({line.split()[1] for line in farm.lines("published")}) == 1


def in_threads(service: ServiceProcess, count: int) -> tuple[list[httpx.Response], list[threading.Thread]]:
    """Requests that wait, and the threads that do."""
    answers: list[httpx.Response] = []

    def ask(number: int) -> None:
        try:
            url = f"{base_url(service)}/v1/kernels:compile"
            answers.append(httpx.post(url, json=body(number), headers={"Prefer": "wait=60"}, timeout=90.0))
        except httpx.TransportError:  # it had closed its port
            return

    threads = [threading.Thread(target=ask, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    return answers, threads


def build_process(worker: Worker) -> int:
    """The process that builds for a worker."""
    return next(pid for pid in descendants(worker.pid) if process_name(pid) == "sleepy_build")
