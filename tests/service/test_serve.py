"""`roller serve` as a process: one command starts it, Control-C ends it, kill -9 loses nothing."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from waiting import PATIENCE_S, wait_until

ROOT = Path(__file__).resolve().parents[2]

BODY = {
    "expression": "C[m, n] +=! A[m, k] * B[k, n]",
    "inputs": {"A": {"dtype": "float32", "shape": [256, 256]}, "B": {"dtype": "float32", "shape": [256, 256]}},
    "target": "local",
    "options": {"top_k": 10, "select": "measure"},
}


@contextmanager
def service(store: Path) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """The process and its address."""
    command = [sys.executable, "-m", "roller_svc", "serve", "--port", "0", "--store", str(store)]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(command, env=env, stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True)
    try:
        assert process.stderr is not None
        for line in process.stderr:
            if found := re.search(r"running on (http://\S+)", line):
                yield process, found[1]
                break
        else:
            pytest.fail("the service did not start")
    finally:
        process.kill()
        process.communicate()


@pytest.mark.slow
def test_control_c_ends_it(tmp_path: Path) -> None:
    with service(tmp_path) as (process, address):
        wait_until(lambda: is_ready(address))
        assert httpx.post(f"{address}/v1/kernels:compile", json=BODY, timeout=60).status_code in (200, 202)
        process.send_signal(signal.SIGINT)
        _, rest = process.communicate(timeout=PATIENCE_S)
        assert process.returncode in (0, 130)
        assert "Traceback" not in rest


@pytest.mark.slow
def test_an_accepted_request_survives_kill_9(tmp_path: Path) -> None:
    with service(tmp_path) as (process, address):
        accepted = httpx.post(f"{address}/v1/kernels:compile", json=BODY, timeout=60)
        assert accepted.status_code == 202
        name = accepted.json()["name"]
        process.kill()
    with service(tmp_path) as (process, address):
        operation = ended(address, name)
        assert operation["response"]["measurement"]["median_s"] > 0
        again = httpx.post(f"{address}/v1/kernels:compile", json=BODY, timeout=60).json()
        assert again["metadata"]["cache"] == "hit"


def ended(address: str, name: str) -> Any:
    """The operation once it is done: a build goes on when the lease of the killed service has run out."""
    found: list[Any] = []
    wait_until(lambda: found.append(httpx.get(f"{address}/v1/{name}?wait=60", timeout=90).json()) or found[-1]["done"])
    return found[-1]


@contextmanager
def service_of_processes(store: Path, **variables: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """A service of two processes and its address; the others end with the first one's parent."""
    command = [sys.executable, "-m", "roller_svc", "serve", "--port", "0", "--store", str(store), "--processes", "2"]
    env = os.environ | {"PYTHONPATH": str(ROOT), "ROLLER_WORKERS": "1"} | variables
    log = store.with_name("log")
    with log.open("w") as file:
        process = subprocess.Popen(command, env=env, stderr=file, stdout=subprocess.DEVNULL, text=True)
    try:
        wait_until(lambda: process.poll() is not None or "processes are running on" in log.read_text())
        found = re.search(r"processes are running on (http://\S+)", log.read_text())
        assert found is not None
        yield process, found[1]
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(PATIENCE_S)


def children_of(pid: int) -> set[int]:
    """The processes that serve: not what multiprocessing runs beside them."""
    found = set()
    for status in Path("/proc").glob("[0-9]*/stat"):
        try:
            parent = int(status.read_text().rpartition(")")[2].split()[1])
            command = (status.parent / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if parent == pid and b"spawn_main" in command:
            found.add(int(status.parent.name))
    return found


def is_replaced(victim: int, parent: int) -> bool:
    """Whether another process serves instead of one of two."""
    now = children_of(parent)
    return victim not in now and len(now) == 2


def listeners(port: int) -> int:
    """The sockets of this machine that listen on a port."""
    lines = Path("/proc/net/tcp").read_text().splitlines()[1:]
    fields = [line.split() for line in lines]
    return sum(each[1].endswith(f":{port:04X}") and each[3] == "0A" for each in fields)


def is_ready(address: str) -> bool:
    try:
        return httpx.get(f"{address}/readyz", timeout=10).status_code == 200
    except httpx.TransportError:
        return False


def refusal(folder: Path, *arguments: str) -> str:
    """What a service of two processes says that cannot start."""
    command = [sys.executable, "-m", "roller_svc", "serve", "--port", "0", "--processes", "2", "--store", str(folder), *arguments]
    env = os.environ | {"PYTHONPATH": str(ROOT), "ROLLER_API_KEYS": ""}
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert ended.returncode != 0
    assert "Traceback" not in ended.stderr
    return ended.stderr


@pytest.mark.slow
def test_processes_share_one_port_and_one_that_is_killed_is_replaced(tmp_path: Path) -> None:
    with service_of_processes(tmp_path / "store") as (process, address):
        port = int(address.rpartition(":")[2])
        wait_until(lambda: listeners(port) == 2)
        assert "Address already in use" in refusal(tmp_path, "--port", str(port))  # a second service takes no part of it
        body = BODY | {"options": {"top_k": 10, "select": "model"}}
        first = httpx.post(f"{address}/v1/kernels:compile", json=body, headers={"Prefer": "wait=60"}, timeout=90)
        assert (first.status_code, first.json()["done"]) == (200, True)
        for _ in range(20):  # each on a connection of its own, so that both processes have some
            assert httpx.post(f"{address}/v1/kernels:compile", json=body, timeout=60).json()["metadata"]["cache"] == "hit"
        counted = re.search(r'roller_submissions_total{cache="hit"} (\S+)', httpx.get(f"{address}/metrics", timeout=60).text)
        assert counted is not None
        assert float(counted[1]) == 20  # of both processes together
        assert len(httpx.get(f"{address}/v1/workers", timeout=60).json()["workers"]) == 1  # the builders are not multiplied
        for victim in sorted(children_of(process.pid)):
            os.kill(victim, signal.SIGKILL)
            wait_until(partial(is_replaced, victim, process.pid))
            wait_until(lambda: listeners(port) == 2 and is_ready(address))
        assert httpx.post(f"{address}/v1/kernels:compile", json=body, timeout=60).json()["metadata"]["cache"] == "hit"
        processes = children_of(process.pid)
        process.send_signal(signal.SIGTERM)
        assert process.wait(PATIENCE_S) == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in processes)


@pytest.mark.slow
def test_processes_end_with_their_parent(tmp_path: Path) -> None:
    with service_of_processes(tmp_path / "store") as (process, address):
        port = int(address.rpartition(":")[2])
        wait_until(lambda: listeners(port) == 2)
        process.kill()
        wait_until(lambda: listeners(port) == 0)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("arguments", "message"),
    [(("--store", "memory:"), "cannot share a store in memory"), (("--host", "0.0.0.0"), "without an API key")],
)
def test_processes_that_cannot_start_say_why(tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    assert message in refusal(tmp_path, *arguments)
