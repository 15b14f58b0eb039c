"""Clients of a service: single requests, distinct programs, a watcher and a flooding client in own processes."""

from __future__ import annotations

import http.client
import itertools
import json
import multiprocessing
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any, Self

Json = dict[str, Any]

JSON_HEADERS = {"Content-Type": "application/json"}
COMPILE, ESTIMATES = "/v1/kernels:compile", "/v1/estimates"
ANSWER_S = 300.0
NO_ANSWER = 0  # status: connection lost, or timeout


@dataclass(frozen=True)
class Answer:
    status: int
    body: bytes = b""
    headers: dict[str, str] = field(default_factory=dict)

    def json(self) -> Json:
        """Return the body as an object; empty if it is not one."""
        try:
            found = json.loads(self.body)
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}


def asked(
    port: int,
    method: str,
    path: str,
    body: Json | bytes | None = None,
    *,
    timeout_s: float = ANSWER_S,
    headers: dict[str, str] | None = None,
) -> Answer:
    """Send one request on a new connection."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=timeout_s)
    content = json.dumps(body).encode() if isinstance(body, dict) else body
    try:
        connection.request(method, path, content, (JSON_HEADERS if body is not None else {}) | (headers or {}))
        answer = connection.getresponse()
        return Answer(answer.status, answer.read(), {key.lower(): value for key, value in answer.headers.items()})
    except (OSError, http.client.HTTPException):
        return Answer(NO_ANSWER)
    finally:
        connection.close()


def program(number: int) -> Json:
    """Return a small program that is distinct for each number: a map, a product or a sum."""
    n, m = 8 + number % 97, 8 + number // 97
    match number % 3:
        case 0:
            inputs = {"x": (n, m)}
            text = f"y[i, j] = x[i, j] * {1 + number}.0"
        case 1:
            inputs = {"A": (n, 8), "B": (8, m)}
            text = f"C[i, j] +=! A[i, k] * B[k, j]; D[i, j] = C[i, j] + {number}.0"
        case _:
            inputs = {"x": (n, m)}
            text = f"s[i] +=! x[i, j]; t[i] = s[i] * {number}.5"
    shaped = {name: {"dtype": "float32", "shape": list(shape)} for name, shape in inputs.items()}
    return {"expression": text, "inputs": shaped}


def compile_body(number: int, target: str = "cpu-x86-avx2") -> Json:
    return program(number) | {"target": target, "options": {"top_k": 1, "select": "model"}}


def estimates_body(numbers: Sequence[int], target: str = "nvidia-h200-sxm") -> Json:
    return {"items": [program(number) for number in numbers], "targets": [target], "top_k": 1}


def built(port: int, body: Json, within_s: float = 60.0) -> Json:
    """Wait until an operation is done or time is up; return it."""
    until = time.monotonic() + within_s
    operation = asked(port, "POST", COMPILE, body, headers={"Prefer": "wait=20"}).json()
    while not operation.get("done", True) and time.monotonic() < until:
        operation = asked(port, "GET", f"/v1/{operation['name']}?wait=10").json()
    return operation


def quantiles(seconds: Sequence[float]) -> Json:
    """Return count, median, p99 and maximum."""
    if not seconds:
        return {"count": 0}
    ordered = sorted(seconds)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    shown = {"p50_s": statistics.median(ordered), "p99_s": p99, "worst_s": ordered[-1]}
    return {"count": len(ordered)} | {name: round(value, 4) for name, value in shown.items()}


@dataclass(frozen=True)
class Watched:
    """The request of a watcher."""

    port: int
    method: str = "GET"
    path: str = "/healthz"
    body: Json | None = None
    pause_s: float = 0.02
    timeout_s: float = ANSWER_S


class Watcher:
    """Repeats one request in its own process, so that other load of this program does not delay it."""

    def __init__(self, watched: Watched) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_watch, args=(watched, theirs), daemon=True)
        self.found: Json = {}

    def __enter__(self) -> Self:
        self._process.start()
        self._ours.recv()  # its imports are done
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.send(None)
        seconds, statuses = self._ours.recv()
        self._process.join()
        self._ours.close()
        self.found = quantiles(seconds) | {"statuses": dict(statuses)}


def _watch(watched: Watched, connection: Connection) -> None:
    connection.send(None)
    seconds, statuses = list[float](), Counter[str]()
    while not connection.poll(watched.pause_s):
        start = time.monotonic()
        answer = asked(watched.port, watched.method, watched.path, watched.body, timeout_s=watched.timeout_s)
        seconds.append(time.monotonic() - start)
        statuses[str(answer.status)] += 1
    connection.send((seconds, statuses))


class Greedy:
    """A client that floods batches of new estimates, in its own process."""

    def __init__(self, port: int, items: int) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self._process = context.Process(target=_batches, args=(port, items, theirs), daemon=True)
        self.found: Json = {}

    def __enter__(self) -> Self:
        self._process.start()
        self._ours.recv()
        return self

    def __exit__(self, *_: object) -> None:
        self._ours.send(None)
        seconds, statuses = self._ours.recv()
        self._process.join()
        self._ours.close()
        self.found = quantiles(seconds) | {"statuses": dict(statuses)}


def _batches(port: int, items: int, connection: Connection) -> None:
    connection.send(None)
    seconds, statuses, numbers = list[float](), Counter[str](), itertools.count(1_000_000)
    while not connection.poll():
        body = estimates_body(list(itertools.islice(numbers, items)))
        start = time.monotonic()
        answer = asked(port, "POST", ESTIMATES, body)
        seconds.append(time.monotonic() - start)
        statuses[str(answer.status)] += 1
        if answer.status == 503:
            time.sleep(0.05)
    connection.send((seconds, statuses))
