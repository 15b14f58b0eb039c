"""The farm on PostgreSQL and RabbitMQ: load, kills of every part, and parts that are away for a while."""

from __future__ import annotations

import os
import shutil
import signal
import threading
import time
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from farm_stack import LONG_LEASE_S, Broker, PostgreSql, Requests, Stack, Worker, base_url, body
from service_process import ServiceProcess, descendants, process_name
from waiting import PATIENCE_S, wait_until

pytestmark = [pytest.mark.farm, pytest.mark.slow]

ROOT = Path(__file__).resolve().parents[2]
AWAY_S = 10.0


def test_identical_requests_make_one_build(farm: Stack, requests: Requests) -> None:
    farm.lease_s = LONG_LEASE_S
    service = farm.serve()
    farm.work(build_s=1.0)
    with ThreadPoolExecutor(64) as pool:
        answers = list(pool.map(lambda _: requests.compile(service, 1, 60.0), range(1000)))
    assert len({answer["response"]["digest"] for answer in answers}) == 1
    assert len(farm.lines("build")) == 1


def test_builders_add_up(farm: Stack, requests: Requests) -> None:
    """Each builder that comes has a build of its own in progress, while those of the others have not ended."""
    farm.lease_s = LONG_LEASE_S
    service = farm.serve()
    for number in range(8):
        requests.compile(service, number)
    workers: list[Worker] = []
    for builders in (1, 2, 4):
        workers += farm.work_many(builders - len(workers), build_s=600.0)
        wait_until(partial(has_more_lines, farm, "by", builders - 1))
    assert len(farm.lines("build")) == len(set(farm.lines("build"))) == 4
    assert len(set(farm.lines("by"))) == 4
    for worker in workers:
        worker.kill()


def test_two_services_and_four_workers_build_each_action_once(farm: Stack, requests: Requests) -> None:
    """P8 of the audit: one result an operation, one build an action."""
    farm.lease_s = LONG_LEASE_S
    services = [farm.serve(), farm.serve()]
    farm.work_many(4, build_s=0.05)

    def run(number: int) -> tuple[dict[str, Any], dict[str, Any]]:
        first = requests.compile(services[number % 2], number // 2, 60.0)
        return first, requests.ended(services[(number + 1) % 2], first["name"])

    with ThreadPoolExecutor(16) as pool:
        answers = list(pool.map(run, range(80)))
    assert all(here["response"] == there["response"] for here, there in answers)
    assert max(Counter(farm.lines("build")).values()) == 1
    assert max(Counter(farm.lines("publishing")).values()) == 1
    assert len({here["response"]["digest"] for here, _ in answers}) == 40
    builders = {line.rpartition(" ")[2] for line in farm.lines("by")}
    assert len(builders) >= 2


def has_more_lines(farm: Stack, kind: str, known: int) -> bool:
    return len(farm.lines(kind)) > known


@pytest.mark.parametrize("part", ["api", "worker", "build process", "broker", "database"])
def test_a_killed_part_loses_nothing(farm: Stack, requests: Requests, broker: Broker, postgresql: PostgreSql, part: str) -> None:
    """kill -9 while operations are queued, claimed and built, and while a result is published."""
    service = farm.serve()
    workers = farm.work_many(2, claim_s=0.7, build_s=0.7, publish_s=0.7)
    for round_, at in enumerate(("queued", "claimed", "build", "publishing")):
        known = len(farm.lines(at))
        names = [requests.compile(service, 100 * round_ + number)["name"] for number in range(6)]
        if at != "queued":
            wait_until(partial(has_more_lines, farm, at, known))
        if part == "api":
            service.kill()
            service = farm.serve()
        elif part == "worker":
            workers.pop(0).kill()
            workers.append(farm.work(claim_s=0.7, build_s=0.7, publish_s=0.7))
        elif part == "build process":
            wait_until(lambda: build_processes(workers))
            os.kill(build_processes(workers)[0], signal.SIGKILL)
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
        url = f"{base_url(service)}/v1/kernels:compile"
        response = httpx.post(url, json=body(100 + sum(statuses.values())), timeout=60.0)
        statuses[response.status_code] += 1
        if response.status_code == 202:
            names.append(response.json()["name"])
        time.sleep(0.2)
    assert set(statuses) == ({202} if part == "broker" else {503})
    server.start()
    requests.check_done_once(farm, service, names)
    late = requests.compile(service, 999, 60.0)
    assert late["done"]


def test_sigterm_under_load_loses_nothing(farm: Stack, requests: Requests) -> None:
    farm.lease_s = LONG_LEASE_S
    service = farm.serve()
    workers = farm.work_many(2, build_s=0.5, WORKERS=2)
    answers, threads = in_threads(service, 30)
    wait_until(lambda: len(farm.lines("build")) >= 4)
    workers[0].terminate()
    assert service.stop() != -signal.SIGKILL
    assert workers[0].popen.wait(PATIENCE_S) == 0
    for thread in threads:
        thread.join()
    codes = {answer.status_code for answer in answers}
    assert codes <= {200, 202, 503}
    names = [answer.json()["name"] for answer in answers if answer.status_code < 300]
    assert len(names) >= 20
    requests.check_done_once(farm, farm.serve(), names)
    assert max(Counter(farm.lines("build")).values()) == 1  # a drained worker finishes what it began


def test_a_second_signal_releases_builds_at_once(farm: Stack, requests: Requests) -> None:
    farm.lease_s = LONG_LEASE_S
    service = farm.serve()
    worker = farm.work(build_s=600.0)
    name = requests.compile(service, 1)["name"]
    wait_until(lambda: farm.lines("build"))
    worker.terminate()
    time.sleep(1.0)
    assert worker.popen.poll() is None
    worker.popen.send_signal(signal.SIGINT)
    assert worker.popen.wait(PATIENCE_S) == 0
    farm.work()
    document = requests.ended(service, name)
    assert "error" not in document
    assert "given back" in worker.log.read_text()


def test_a_drain_that_takes_too_long_releases_builds(farm: Stack, requests: Requests) -> None:
    farm.lease_s = LONG_LEASE_S
    service = farm.serve()
    worker = farm.work(build_s=600.0, DRAIN_TIMEOUT_S=1)
    requests.compile(service, 1)
    wait_until(lambda: farm.lines("build"))
    worker.terminate()
    assert worker.popen.wait(PATIENCE_S) == 0
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


def test_a_killed_worker_leaves_no_process_and_no_folder(farm: Stack, requests: Requests) -> None:
    """P13 of the audit."""
    service = farm.serve()
    worker = farm.work(build_s=600.0)
    requests.compile(service, 1)
    wait_until(lambda: farm.lines("build"))
    left = descendants(worker.pid)[1:]
    assert build_processes([worker])
    worker.kill()
    wait_until(lambda: not any(process_name(pid) for pid in left))
    scratch = set(worker.log.parent.glob("roller-farm-*"))
    assert scratch
    farm.work(temporary=worker.log.parent)
    assert not scratch & set(worker.log.parent.glob("roller-farm-*"))


def test_each_version_builds_its_own_operations(farm: Stack, requests: Requests, tmp_path: Path) -> None:
    """P14 of the audit, and a rolling upgrade: two versions side by side, then the new one alone."""
    package = other_version(tmp_path)
    old, new = farm.serve(), farm.serve(package=package)
    old_worker, new_worker = farm.work(build_s=0.1), farm.work(package=package, build_s=0.1)
    names = {version: [requests.compile(version, number)["name"] for number in range(6)] for version in (old, new)}
    for version in (old, new):
        requests.check_done_once(farm, old, names[version])
        listed = requests.get(version, "/v1/workers").json()["workers"]
        own = {worker["id"] for worker in listed if worker["is_compatible"]}
        assert len(listed) == 2
        assert len(own) == 1
        assert {str(farm.builders()[name.partition("/")[2]]) for name in names[version]} == {str(own)}
    old_worker.stop()
    late = [requests.compile(old, 100 + number) for number in range(3)]
    old.kill()
    requests.check_done_once(farm, new, [operation["name"] for operation in late])
    new_worker.stop()


def test_a_lost_result_is_built_again(farm: Stack, requests: Requests) -> None:
    """P16 of the audit: a hit is whole or a miss, whoever damaged the store."""
    farm.lease_s = LONG_LEASE_S
    services = [farm.serve(), farm.serve()]
    farm.work()
    first = requests.compile(services[0], 1, 60.0)
    for path in (farm.folder / "store" / "cas").rglob("*"):
        if path.is_file():
            path.write_bytes(b"damaged")
    second = requests.compile(services[1], 1, 60.0)
    assert second["metadata"]["cache"] == "miss"
    assert requests.get(services[0], second["response"]["links"]["source"]).content.startswith(b"y[i]")
    assert second["name"] != first["name"]
    assert len(farm.lines("build")) == 2


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


def build_processes(workers: Sequence[Worker]) -> list[int]:
    """The processes in which the workers build."""
    return [pid for worker in workers for pid in descendants(worker.pid) if process_name(pid) == "sleepy_build"]


def other_version(folder: Path) -> Path:
    """A copy of the package with another generator's digest."""
    package = folder / "other"
    for name in ("roller_svc", "hwspecs"):
        shutil.copytree(ROOT / name, package / name, ignore=shutil.ignore_patterns("__pycache__"))
    with (package / "roller_svc" / "version.py").open("a", encoding="utf-8") as module:
        module.write("# another version\n")
    return package
