"""One request to a running service → what is wrong with its answer, its cost, and the source that came of it."""

from __future__ import annotations

import http.client
import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from bodies import COMPILE, COMPILED, ESTIMATES, JSON_HEADERS, Request, request
from c_text import leaks
from service_process import ServiceProcess

CPU_MOST_S = 2.0
BUILD_CPU_MOST_S = 20.0  # of a request that ends in a kernel
RSS_MOST_BYTES = 400_000_000
PROBLEM_BYTES_MOST = 1 << 16
ANSWER_S = 120.0  # far above what any answer may take: the time that is judged is the processors'
BUILD_WAITS_MOST = 60
GENERATED = ("source", "header")
BAD_CODES = ("internal", "http-error")
SECRETS = ("Traceback (most recent", "roller-load-", "/site-packages/", "root:x:0")


@dataclass
class Summary:
    """What a run of requests came to."""

    requests: int = 0
    built: int = 0
    busy: int = 0  # 503 with Retry-After: sent again
    statuses: Counter[str] = field(default_factory=Counter)
    codes: Counter[str] = field(default_factory=Counter)
    cpu_most_s: float = 0.0
    cpu_total_s: float = 0.0
    wall_most_s: float = 0.0
    compile_failures: list[str] = field(default_factory=list)  # a spec may ask for what its device lacks
    slowest: list[tuple[float, str]] = field(default_factory=list)
    faults: list[tuple[str, str]] = field(default_factory=list)
    rss_peak_bytes: int = 0
    children_rss_peak_bytes: int = 0

    def as_json(self) -> dict[str, Any]:
        plain = {key: value for key, value in vars(self).items() if key not in ("statuses", "codes", "slowest")}
        slowest = sorted(self.slowest, reverse=True)[:10]
        return plain | {
            "statuses": dict(self.statuses.most_common()),
            "codes": dict(self.codes.most_common()),
            "slowest": slowest,
        }


@dataclass(frozen=True)
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes


class Judge:
    """Sends requests one after another, so that what the processors do belongs to the one that is under way."""

    def __init__(self, service: ServiceProcess) -> None:
        self.summary = Summary()
        self._service = service

    def warm(self) -> None:
        """Have the worker processes started: their imports are no request's."""
        for target in COMPILED:
            body = {"expression": "warm[i] = x[i] + 1.0", "target": target,
                    "inputs": {"x": {"dtype": "float32", "shape": [77]}}}  # fmt: skip
            headers = JSON_HEADERS | {"Prefer": "wait=30"}
            self._ended(self._ask("POST", COMPILE, headers, json.dumps(body).encode()))
        self._service.wait_until_quiet()

    def spec(self, device: str) -> dict[str, Any]:
        """A device as the service shows it."""
        return dict(json.loads(self._ask("GET", f"/v1/hardware/{device}").body))

    def estimates(self, items: list[dict[str, Any]], target: str) -> list[dict[str, Any]]:
        body = json.dumps({"items": items, "targets": [target]}).encode()
        return list(json.loads(self._ask("POST", ESTIMATES, JSON_HEADERS, body).body)["estimates"])

    def judge(self, given: Request) -> list[str]:
        """What is wrong with the answer; nothing, one hopes."""
        summary, faults = self.summary, list[str]()
        summary.requests += 1
        answer: Answer | None = None
        operation: dict[str, Any] | None = None
        cpu_s, start, built = self._service.cpu_s(), time.monotonic(), self.summary.built
        try:
            answer = self._answered(given, faults)
            operation = self._ended(answer)
        except (OSError, http.client.HTTPException) as failure:
            faults.append(f"no answer: {failure!r}")
        wall_s, cpu_s = time.monotonic() - start, self._service.cpu_s() - cpu_s
        if not self._service.alive():
            faults.append("the service has ended")
        elif answer is not None:
            self._look(given, answer, operation, faults)
            self._weigh(faults)
        # A kernel that is built took a compiler's time too.
        if cpu_s > (CPU_MOST_S if self.summary.built == built else BUILD_CPU_MOST_S):
            faults.append(f"{cpu_s:.2f} s of a core")
        summary.cpu_total_s += cpu_s
        summary.cpu_most_s = max(summary.cpu_most_s, cpu_s)
        summary.wall_most_s = max(summary.wall_most_s, wall_s)
        summary.slowest = sorted([*summary.slowest, (round(cpu_s, 2), given.seed)], reverse=True)[:10]
        summary.faults += [(given.seed, fault) for fault in faults]
        return faults

    def _answered(self, given: Request, faults: list[str]) -> Answer:
        """The answer, asked for again while the service says that it is busy and when to come back."""
        while True:
            answer = self._ask(given.method, given.path, given.headers, given.content.encode("latin-1"))
            self.summary.statuses[str(answer.status)] += 1
            if answer.status != 503:
                return answer
            wait_s = answer.headers.get("retry-after", "")
            if not wait_s.isdecimal() or not 1 <= int(wait_s) <= 30:
                faults.append(f"503 with Retry-After {wait_s!r}")
                return answer
            self.summary.busy += 1
            if self.summary.busy > 10 + self.summary.requests:
                faults.append("503 again and again, with nobody else there")
                return answer
            time.sleep(int(wait_s))

    def _ended(self, answer: Answer) -> dict[str, Any] | None:
        """The operation, once it is done; None where the answer is none."""
        if answer.status not in (200, 202) or b'"metadata"' not in answer.body:
            return None
        operation = _parsed(answer.body)
        for _ in range(BUILD_WAITS_MOST):
            if not isinstance(operation, dict) or not str(operation.get("name")).startswith("operations/"):
                return None
            if operation["done"]:
                return operation
            operation = _parsed(self._ask("GET", f"/v1/{operation['name']}?wait=10").body)
        return operation if isinstance(operation, dict) else None

    def _look(self, given: Request, answer: Answer, operation: dict[str, Any] | None, faults: list[str]) -> None:
        if answer.status >= 500 and answer.status != 503:
            faults.append(f"status {answer.status}")
        if 300 <= answer.status < 400 and answer.status != 304:
            faults.append(f"sent elsewhere: {answer.headers.get('location')}")
        if answer.status >= 400:
            _look_at_problem(answer, faults, self.summary.codes)
        if operation is not None:
            self._look_at_operation(given, operation, faults)
        elif given.renamed_only and answer.status != 404:
            faults.append(f"refused for a name: {answer.status} {answer.body[:300]!r}")
        shown = answer.body.decode(errors="replace") + json.dumps(operation)
        faults += [f"{secret!r} in the answer" for secret in SECRETS if secret in shown]

    def _look_at_operation(self, given: Request, operation: dict[str, Any], faults: list[str]) -> None:
        if not operation["done"]:
            faults.append("an operation that does not end")
        elif error := operation.get("error"):
            self.summary.codes[f"operation:{error['code']}"] += 1
            if error["code"] in (*BAD_CODES, "worker-bug", "worker-lost", "invariant"):
                faults.append(f"operation: {error['code']}: {error['detail'][:300]}")
            if error["code"] == "compile-failed":
                self.summary.compile_failures.append(given.seed)
                if given.shipped:
                    faults.append(f"generated text that does not compile: {str(error.get('log'))[:300]}")
            if given.renamed_only and error["code"] != "toolchain-missing":
                faults.append(f"failed for a name: {error['code']}: {error['detail'][:300]}")
        else:
            self.summary.built += 1
            links = operation["response"]["links"]
            base = links["source"].rpartition("/")[0]
            for kind in GENERATED:
                text = self._ask("GET", f"{base}/{kind}")
                if text.status == 200:
                    found = leaks(text.body.decode(), given.texts, given.names)
                    faults += [f"{one!r} of the request in the {kind}" for one in found]
                elif kind == "source" or text.status != 404:
                    faults.append(f"{kind}: status {text.status}")

    def _weigh(self, faults: list[str]) -> None:
        summary = self.summary
        before, peak = summary.rss_peak_bytes, self._service.rss_peak_bytes()
        summary.rss_peak_bytes = max(before, peak)
        summary.children_rss_peak_bytes = max(summary.children_rss_peak_bytes, self._service.children_rss_bytes())
        if before <= RSS_MOST_BYTES < peak:
            faults.append(f"{peak / 1e6:.0f} MB resident")

    def _ask(self, method: str, path: str, headers: dict[str, str] | None = None, content: bytes = b"") -> Answer:
        with _connection(self._service.port) as connection:
            connection.request(method, path, content or None, headers or {})
            answer = connection.getresponse()
            return Answer(answer.status, {key.lower(): value for key, value in answer.headers.items()}, answer.read())


def run(service: ServiceProcess, seed: int, *, first: int = 0, count: int | None = None, seconds: float | None = None) -> Summary:
    """So many requests from the first on, or as many as there is time for."""
    judge = Judge(service)
    judge.warm()
    until = None if seconds is None else time.monotonic() + seconds
    index = first
    while (count is None or index < first + count) and (until is None or time.monotonic() < until) and service.alive():
        judge.judge(request(seed, index))
        index += 1
    return judge.summary


@contextmanager
def _connection(port: int) -> Iterator[http.client.HTTPConnection]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=ANSWER_S)
    try:
        yield connection
    finally:
        connection.close()


def _look_at_problem(answer: Answer, faults: list[str], codes: Counter[str]) -> None:
    problem = _parsed(answer.body)
    if answer.headers.get("content-type", "").partition(";")[0] != "application/problem+json":
        faults.append(f"{answer.status} as {answer.headers.get('content-type')}")
    if not isinstance(problem, dict) or not isinstance(problem.get("code"), str) or not problem.get("detail"):
        faults.append(f"{answer.status} without a code: {answer.body[:200]!r}")
        return
    codes[problem["code"]] += 1
    if problem["code"] in BAD_CODES:
        faults.append(f"{problem['code']}: {problem['detail'][:300]}")
    if len(answer.body) > PROBLEM_BYTES_MOST:
        faults.append(f"{problem['code']}: {len(answer.body)} bytes of problem")


def _parsed(body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        return None
