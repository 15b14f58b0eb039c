"""`roller worker` with SQLite and without a broker: real builds, queues, and what an operator sees."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import httpx
import pytest
from farm_stack import Requests, Stack, body
from service_process import ServiceProcess, descendants, process_name, start
from waiting import PATIENCE_S, wait_until

from roller_svc.farm.machine import machine_queues

pytestmark = pytest.mark.slow

WAIT = {"Prefer": "wait=60"}
HTTP = httpx.Client(timeout=90.0)


@pytest.fixture
def service(folder: Path) -> Iterator[ServiceProcess]:
    """A real service that builds nothing, with a real worker."""
    settings = {"ROLLER_STORE": str(folder / "store")}
    command = [sys.executable, "-m", "roller_svc"]
    made = start([*command, "serve", "--port", "0", "--workers", "0"], folder, settings)
    worker = subprocess.Popen([*command, "worker", "--jobs", "2", "--store", str(folder / "store")], env=_variables())
    yield made
    worker.terminate()
    made.stop()
    assert worker.wait(PATIENCE_S) == 0


def test_a_worker_builds_measures_and_serves_local(service: ServiceProcess) -> None:
    url = f"http://127.0.0.1:{service.port}/v1"
    wait_until(lambda: HTTP.get(f"{url}/workers").json()["workers"])
    (worker,) = HTTP.get(f"{url}/workers").json()["workers"]
    assert (worker["state"], worker["jobs"], worker["is_compatible"]) == ("active", 2, True)
    assert tuple(worker["queues"]) == machine_queues()
    assert {"host", "cpu", "devices", "compilers"} <= worker.keys()
    for target, select in (("local", "model"), ("local", "measure")):
        request = body(1, select=select, top_k=2) | {"target": target}
        answer = HTTP.post(f"{url}/kernels:compile", json=request, headers=WAIT)
        assert answer.status_code == 200, answer.text
        kernel = answer.json()["response"]
        assert (kernel["measurement"] is None) == (select == "model")
        assert HTTP.get(f"http://127.0.0.1:{service.port}{kernel['links']['binary']}").content[:4] == b"\x7fELF"


def test_a_killed_supervisor_loses_nothing(service: ServiceProcess, requests: Requests) -> None:
    """kill -9 of the process that starts a build's compilers, while one runs. Its worker and its compilers end with it."""
    names = [requests.compile(service, number)["name"] for number in range(40)]
    killed: set[int] = set()

    def kill_one() -> bool:
        for pid in [pid for pid in descendants(os.getpid()) if process_name(pid) == "supervisor"]:
            left = descendants(pid)[1:]
            if "cc1" in map(process_name, left):
                os.kill(pid, signal.SIGKILL)
                killed.add(pid)
                wait_until(partial(all_have_ended, left))
                return True
        return False

    for _ in range(2):
        wait_until(kill_one)
    for name in names:
        document = requests.ended(service, name)
        assert "error" not in document, document
    attempts = [requests.get(service, f"/v1/{name}").json()["metadata"]["attempt"] for name in names]
    assert sum(attempts) == len(names) + len(killed)


def all_have_ended(pids: Sequence[int]) -> bool:
    return not any(process_name(pid) for pid in pids)


def test_a_queue_without_a_worker_is_named_and_then_fails(polling_farm: Stack, requests: Requests) -> None:
    service = polling_farm.serve(NO_WORKER_TIMEOUT_S=3)
    polling_farm.work("--queues", "build.cpu.x86-64-v3")
    cuda = body(1) | {"target": "nvidia-h200-sxm"}
    url = f"http://127.0.0.1:{service.port}/v1/kernels:compile"
    waiting = HTTP.post(url, json=cuda).json()
    assert waiting["metadata"]["waiting_for"] == "build.cuda"
    assert requests.compile(service, 2, 60.0)["done"]
    error = requests.ended(service, waiting["name"])["error"]
    assert (error["code"], error["status"]) == ("no-worker", 503)
    refused = HTTP.post(url, json=body(3) | {"target": "local"})
    assert (refused.status_code, refused.json()["code"]) == (422, "local-not-served")


def test_builds_of_a_killed_worker_go_to_another(polling_farm: Stack, requests: Requests) -> None:
    service = polling_farm.serve()
    workers = polling_farm.work_many(2, build_s=1.0, WORKERS=2)
    names = [requests.compile(service, number)["name"] for number in range(8)]
    wait_until(lambda: len(polling_farm.lines("build")) >= 4)
    workers[0].kill()
    requests.check_done_once(polling_farm, service, names)


@pytest.mark.parametrize(
    ("arguments", "code"),
    [(["--queues", "build.cuda,build.ipu"], "unknown-queue"), (["--jobs", "0"], "invalid-setting")],
)
def test_a_worker_that_could_build_nothing_does_not_start(folder: Path, arguments: list[str], code: str) -> None:
    command = [sys.executable, "-m", "roller_svc", "worker", "--store", str(folder), *arguments]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert code in ended.stderr


@pytest.mark.parametrize(
    ("variable", "value"), [("ROLLER_BROKER", "redis://:hunter2@x"), ("ROLLER_DATABASE", "mysql://x:hunter2@h/d")]
)
def test_a_worker_refuses_a_server_that_it_cannot_use(folder: Path, variable: str, value: str) -> None:
    command = [sys.executable, "-m", "roller_svc", "worker", "--store", str(folder)]
    environment = _variables() | {variable: value}
    ended = subprocess.run(command, capture_output=True, text=True, check=False, env=environment)
    assert ended.returncode == 2
    assert variable in ended.stderr
    assert "hunter2" not in ended.stdout + ended.stderr


def _variables() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith("ROLLER_")}
