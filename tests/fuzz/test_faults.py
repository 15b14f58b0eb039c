"""Builds of a service whose processes are killed: every one ends with a kernel, and nothing stays behind.

tests/fuzz/load.py runs the long form: `python tests/fuzz/load.py kill --count 300`.
"""

from __future__ import annotations

import contextlib
import http.client
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

from roller_svc.farm.queue import RETRY_DELAYS_S

BUILDS, CLIENTS = 16, 4
FAULTS = len(RETRY_DELAYS_S)  # that a build survives, if all of them meet it
ATTEMPTS = 10  # of a request that a fault meets
LANES_MOST = 5  # two that build, three that check: one for each thread that submits, and that which resumes
KINDS = {"workers": ("build_task", "compute_digest"), "compilers": ("gcc", "cc1", "as"), "all": ("",)}


@contextlib.contextmanager
def killing(service: ServiceProcess, names: tuple[str, ...], ended: list[object]) -> Iterator[list[str]]:
    """Kill one of the service's descendants of these names, again after each part of the builds; yield the killed."""
    killed, stop, rng = list[str](), threading.Event(), random.Random(1)

    def kill() -> None:
        while len(killed) < FAULTS and not stop.wait(0.01):
            there = [(pid, name) for pid in service.tree()[1:] if (name := process_name(pid)).startswith(names)]
            if there and len(ended) >= len(killed) * BUILDS // FAULTS:
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
        operations: list[Any] = []

        def build(number: int) -> None:
            operations.append(built(service, number, ("model", "measure")[number % 2]))

        with ThreadPoolExecutor(CLIENTS) as pool, killing(service, KINDS[kind], operations) as killed:
            for each in [pool.submit(build, number) for number in range(1, BUILDS + 1)]:
                each.result()
        assert [operation.get("error") for operation in operations] == [None] * BUILDS
        assert killed
        service.wait_until_quiet()
        assert not [name for pid in service.tree() if (name := process_name(pid)) in ("gcc", "cc1", "as", "ld")]
        (scratch,) = (service.folder / "tmp").glob("roller-farm-*")
        assert len(list(scratch.glob("worker-*"))) <= LANES_MOST
