"""Builds of a service whose processes are killed: every one ends with a kernel, and nothing stays behind.

tests/fuzz/load.py runs the long form: `python tests/fuzz/load.py kill --count 300`.
"""

from __future__ import annotations

import contextlib
import http.client
import itertools
import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from service_process import ServiceProcess, process_name, running

BUILDS, CLIENTS, PAUSE_S = 16, 4, 0.4
POLL_S = 0.01  # until the first process to kill is there
FAULT_SPACING = 3  # builds share the cores: so many times as long as one alone, a fault in each is rare
ATTEMPTS = 10  # of a request that a fault meets
LANES_MOST = 5  # two that build, three that check: one for each thread that submits, and that which resumes
KINDS = {"workers": ("build_task", "compute_digest"), "compilers": ("gcc", "cc1", "as"), "all": ("",)}


@contextlib.contextmanager
def killing(service: ServiceProcess, names: tuple[str, ...], pause_s: float) -> Iterator[list[str]]:
    """Kill one of the service's descendants of these names, again after each pause; yield the names of the killed."""
    killed, stop, rng = list[str](), threading.Event(), random.Random(1)

    def kill() -> None:
        while not stop.wait(pause_s if killed else POLL_S):
            there = [(pid, name) for pid in service.tree()[1:] if (name := process_name(pid)).startswith(names)]
            if there:
                pid, name = rng.choice(there)
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
                    killed.append(name)

    killer = threading.Thread(target=kill)
    killer.start()
    try:
        yield killed
    finally:
        stop.set()
        killer.join()


def seconds_to_recover(service: ServiceProcess, names: tuple[str, ...]) -> float:
    """Return the time of a build after processes of these names were killed: builds survive faults that far apart."""
    for pid in service.tree()[1:]:
        if process_name(pid).startswith(names):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    began = time.monotonic()
    built(service, BUILDS + 1, "measure")
    return time.monotonic() - began


def built(service: ServiceProcess, factor: int, select: str) -> dict[str, Any]:
    """The operation of a program that nobody else asks for, once it is done."""
    inputs = {"x": {"dtype": "float32", "shape": [64, 32]}}
    body = {
        "expression": f"y[i, j] = x[i, j] * {factor}.5", "inputs": inputs, "target": "local",
        "options": {"top_k": 2, "select": select},
    }  # fmt: skip
    operation = asked(service, "POST", "/v1/kernels:compile", json.dumps(body))
    while not operation["done"]:
        operation = asked(service, "GET", f"/v1/{operation['name']}?wait=30")
    return operation


def asked(service: ServiceProcess, method: str, path: str, body: str | None = None) -> dict[str, Any]:
    """The answer; a request is repeated after 503, which says that a fault passes."""
    headers = {"Content-Type": "application/json", "Prefer": "wait=30"}
    for _ in range(ATTEMPTS):
        connection = http.client.HTTPConnection("127.0.0.1", service.port, timeout=120.0)
        with contextlib.closing(connection):
            connection.request(method, path, body, headers)
            answer = connection.getresponse()
            text = answer.read()
        if answer.status != 503:
            break
        time.sleep(float(answer.headers.get("Retry-After", "1")))
    assert answer.status in (200, 202), text
    found: dict[str, Any] = json.loads(text)
    return found


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["workers", "compilers", "all"])
def test_every_build_ends_with_a_kernel(kind: str) -> None:
    with running("--workers", "2") as service:
        built(service, 0, "model")
        pause_s = max(PAUSE_S, FAULT_SPACING * seconds_to_recover(service, KINDS[kind]))
        selects = itertools.cycle(("model", "measure"))
        with ThreadPoolExecutor(CLIENTS) as pool, killing(service, KINDS[kind], pause_s) as killed:
            operations = list(pool.map(built, itertools.repeat(service), range(1, BUILDS + 1), selects))
        assert [operation.get("error") for operation in operations] == [None] * BUILDS
        assert killed
        service.wait_until_quiet()
        assert not [name for pid in service.tree() if (name := process_name(pid)) in ("gcc", "cc1", "as", "ld")]
        (scratch,) = (service.folder / "tmp").glob("roller-farm-*")
        assert len(list(scratch.glob("worker-*"))) <= LANES_MOST
