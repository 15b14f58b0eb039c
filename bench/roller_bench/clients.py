"""Measure what one client of a service does to another: `python -m roller_bench.clients`.

For each finite resource, a greedy client sends what uses it up, and repeats a refused request after about two seconds,
as `Retry-After` says, but at once in floods. Another client sends cached compiles and
requests of the same kind, one at a time, alone and with the greedy one in turns. Prints JSON, one line
for each resource: latencies, their ratio, statuses and the largest memory of the service. The greedy client is a process
of its own.
"""

from __future__ import annotations

import argparse
import asyncio
import hashlib
import json
import multiprocessing
import os
import random
import secrets
import statistics
import tempfile
import time
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from roller_bench.service import BODY, request_build, run_service

GREEDY, OTHER, WRONG = "a-greedy-key", "another-key", "a-wrong-key"
COMPILE, EXPLAIN, BATCH, ESTIMATES, GRAPH_ESTIMATE = (
    f"/v1/{path}" for path in ("kernels:compile", "actions:explain", "kernels:batchCompile", "estimates", "graphs:estimate")
)
PAUSE_S = (1.0, 3.0)  # before a refused request is repeated
SETTLE_S = 3.0  # from the first requests of the greedy client to the measurement
LARGE_BLOB = bytes(256 << 20)
SMALL_BLOB = bytes(1 << 16)
NODES = 60  # of the model that the greedy client estimates


@dataclass(frozen=True, slots=True)
class Target:
    """A service, and an operation that nobody builds."""

    port: int
    operation: str


Send = Callable[[Target, str], Awaitable[int]]


@dataclass(frozen=True, slots=True)
class Case:
    """Use up a resource by numbers of requests at once; measure another client by cached compiles and `request`."""

    attacks: Sequence[tuple[int, Send]]
    request: Send


@dataclass(frozen=True, slots=True)
class Sample:
    """Latencies and statuses of one kind of request."""

    latencies_s: list[float]
    statuses: Counter[int]

    def percentile_s(self, percent: int) -> float:
        if len(self.latencies_s) == 1:
            return self.latencies_s[0]
        return statistics.quantiles(self.latencies_s, n=100, method="inclusive")[percent - 1]

    def summary(self) -> dict[str, Any]:
        return {
            "requests": len(self.latencies_s),
            "statuses": {str(status): count for status, count in sorted(self.statuses.items())},
            "p50_ms": 1e3 * self.percentile_s(50),
            "p99_ms": 1e3 * self.percentile_s(99),
        }


async def exchange(target: Target, key: str, method: str, path: str, content: Any = None, *, raw: bytes = b"") -> int:
    """Send a request on a connection of its own; return the status of the complete response, 0 for none."""
    body = json.dumps(content).encode() if content is not None else raw
    try:
        reader, writer = await _begin(target, key, method, path, len(body), is_json=content is not None)
        writer.write(body)
        await writer.drain()
        status = int((await reader.readline()).split()[1])
        while await reader.read(1 << 20):
            pass
        writer.close()
    except (OSError, IndexError):
        return 0
    return status


async def _begin(
    target: Target, key: str, method: str, path: str, length: int, *, is_json: bool
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    reader, writer = await asyncio.open_connection("127.0.0.1", target.port)
    head = f"{method} {path} HTTP/1.1\r\nHost: 127.0.0.1:{target.port}\r\nX-API-Key: {key}\r\nConnection: close\r\n"
    fields = f"Content-Length: {length}\r\n" if length else ""
    media = "Content-Type: application/json\r\n" if is_json else ""
    writer.write(f"{head}{fields}{media}\r\n".encode())
    return reader, writer


def _blob_path(content: bytes) -> str:
    return f"/v1/blobs/sha256:{hashlib.sha256(content).hexdigest()}"


LARGE_PATH = _blob_path(LARGE_BLOB)


def _program() -> str:
    """Return a program that was never sent before."""
    return f"y[i] = x[i] * {secrets.randbelow(1 << 40)}.0"


def _items(count: int) -> dict[str, Any]:
    inputs = {"x": {"dtype": "float32", "shape": [64]}}
    return {"items": [{"expression": _program(), "inputs": inputs} for _ in range(count)], "targets": ["cpu-x86-avx2"]}


def _graph(nodes: int) -> dict[str, Any]:
    """Return a request with a chain of nodes, each of a program of its own."""
    number = secrets.randbelow(1 << 40)
    steps = [
        {
            "name": f"n{step}",
            "expression": f"y[i, j] +=! x[i, k] * x[k, j] * {number + step}.0",
            "inputs": {"x": f"t{step}" if step else "x"},
            "outputs": {"y": f"t{step + 1}"},
        }
        for step in range(nodes)
    ]
    x = {"dtype": "float32", "shape": [64, 64]}
    graph = {"format": "roller-graph/1", "name": "chain", "inputs": {"x": x}, "constants": {}, "nodes": steps}
    return {"model": {"graph": graph | {"outputs": {"y": f"t{nodes}"}}}, "target": "cpu-x86-avx2"}


def _wait(target: Target, key: str) -> Awaitable[int]:
    return exchange(target, key, "GET", f"/v1/{target.operation}?wait=60")


def _stream(target: Target, key: str) -> Awaitable[int]:
    return exchange(target, key, "GET", f"/v1/{target.operation}/events")


def _compile(target: Target, key: str) -> Awaitable[int]:
    return exchange(target, key, "POST", COMPILE, BODY)


def _explain(target: Target, key: str) -> Awaitable[int]:
    inputs = {"x": {"dtype": "float32", "shape": [64]}}
    return exchange(target, key, "POST", EXPLAIN, {"expression": _program(), "inputs": inputs, "target": "cpu-x86-avx2"})


def _upload(target: Target, key: str) -> Awaitable[int]:
    content = secrets.token_bytes(16)
    return exchange(target, key, "PUT", _blob_path(content), raw=content)


async def _trickle(target: Target, key: str) -> int:
    """Send a byte of an upload every half second until the service answers."""
    content = secrets.token_bytes(200)
    reader, writer = await _begin(target, key, "PUT", _blob_path(content), len(content), is_json=False)
    line = asyncio.ensure_future(reader.readline())
    try:
        for byte in content:
            writer.write(bytes([byte]))
            await asyncio.wait({line}, timeout=0.5)
            if line.done():
                break
        return int((await line).split()[1])
    except (OSError, IndexError):
        return 0
    finally:
        line.cancel()
        writer.close()


async def _trickle_body(target: Target, key: str) -> int:
    """Send all of a large JSON body but its end, and wait."""
    try:
        reader, writer = await _begin(target, key, "POST", ESTIMATES, 1 << 20, is_json=True)
        writer.write(b" " * ((1 << 20) - 1))
        status = int((await reader.readline()).split()[1])
        writer.close()
    except (OSError, IndexError):
        return 0
    return status


async def _stream_briefly(target: Target, key: str) -> int:
    """Read the status of an event stream, and leave."""
    reader, writer = await _begin(target, key, "GET", f"/v1/{target.operation}/events", 0, is_json=False)
    status = int((await reader.readline()).split()[1])
    writer.close()
    return status


async def _read_slowly(target: Target, key: str) -> int:
    """Read a large blob, a little at a time, into little memory."""
    try:
        reader, writer = await _begin(target, key, "GET", LARGE_PATH, 0, is_json=False)
        status = int((await reader.readline()).split()[1])
        while await reader.read(1 << 12):
            await asyncio.sleep(0.5)
        writer.close()
    except (OSError, IndexError):
        return 0
    return status


def _guess(target: Target, key: str) -> Awaitable[int]:
    return exchange(target, WRONG, "POST", COMPILE, BODY)


def _flood(send: Send) -> Send:
    """Return what sends a request as soon as the one before it is answered."""

    async def send_always(target: Target, key: str) -> int:
        while True:
            await send(target, key)

    return send_always


def _batch(count: int) -> Send:
    return lambda target, key: exchange(target, key, "POST", BATCH, {"requests": [BODY] * count})


def _new_batch(target: Target, key: str) -> Awaitable[int]:
    requests = [{"expression": _program(), "inputs": {"x": {"dtype": "float32", "shape": [64]}}, "target": "cpu-x86-avx2"}]
    return exchange(target, key, "POST", BATCH, {"requests": requests * 64})


def _estimate(count: int) -> Send:
    return lambda target, key: exchange(target, key, "POST", ESTIMATES, _items(count))


def _estimate_model(nodes: int) -> Send:
    return lambda target, key: exchange(target, key, "POST", GRAPH_ESTIMATE, _graph(nodes))


def _get_blob(target: Target, key: str) -> Awaitable[int]:
    return exchange(target, key, "GET", _blob_path(SMALL_BLOB))


def _probe(target: Target, key: str) -> Awaitable[int]:
    return exchange(target, key, "GET", "/healthz")


CASES: Mapping[str, Case] = {
    "waits": Case([(1000, _wait)], _probe),
    "streams": Case([(64, _stream)], _stream_briefly),
    "uploads": Case([(8, _trickle)], _upload),
    "batches": Case([(16, _new_batch)], _batch(4)),
    "checks": Case([(32, _explain)], _explain),
    "estimates": Case([(16, _estimate(60))], _estimate(8)),
    "large_estimates": Case([(16, _estimate(1024))], _estimate(64)),
    "model_estimates": Case([(24, _estimate_model(NODES))], _estimate_model(4)),
    "body_bytes": Case([(200, _trickle_body)], _estimate(1)),
    "wrong_keys": Case([(64, _flood(_guess))], _probe),
    "refused_waits": Case([(300, _flood(_wait))], _probe),
    "response_bytes": Case([(50, _read_slowly)], _get_blob),
    "everything": Case([(50, _read_slowly), (1000, _wait), (8, _trickle), (24, _estimate_model(NODES))], _upload),
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m roller_bench.clients")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each measurement (default: 3)")
    parser.add_argument("--rounds", type=int, default=2, help="measurements alone and with the greedy client (default: 2)")
    parser.add_argument("--cases", nargs="+", default=list(CASES), choices=list(CASES), metavar="CASE")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="roller-bench-") as folder:
        with run_service(Path(folder), "--workers", "1") as server:
            request_build(server.port)
        os.environ["ROLLER_API_KEYS"] = f"{GREEDY},{OTHER}"
        for name in options.cases:
            with run_service(Path(folder), "--workers", "0") as server:  # nothing that is queued ends
                row = measure(server.port, CASES[name], options.rounds, options.seconds)
                print(json.dumps({"case": name, "cpus": os.cpu_count()} | row), flush=True)


def measure(port: int, case: Case, rounds: int, seconds: float) -> dict[str, Any]:
    """Return the latencies of the other client, alone and with the greedy one."""
    asyncio.run(_prepare(Target(port, "")))
    target = Target(port, asyncio.run(_queue_operation(port)))
    before_bytes = memory_bytes(port)
    sends = {"cached_compile": _compile, "same_kind": case.request}
    alone, together = ({kind: Sample([], Counter()) for kind in sends} for _ in range(2))
    for _ in range(rounds):
        asyncio.run(repeat(sends, alone, target, seconds))
        with greedy(case, target):
            time.sleep(SETTLE_S)
            asyncio.run(repeat(sends, together, target, seconds))
    return {
        kind: {
            "alone": alone[kind].summary(),
            "together": together[kind].summary(),
            "p99_ratio": together[kind].percentile_s(99) / alone[kind].percentile_s(99),
        }
        for kind in sends
    } | {"memory_before_mb": before_bytes >> 20, "memory_mb": memory_bytes(port) >> 20}


async def _prepare(target: Target) -> None:
    """Store the blobs, and have requests validated, workers started and code loaded."""
    for content in (LARGE_BLOB, SMALL_BLOB):
        assert await exchange(target, GREEDY, "PUT", _blob_path(content), raw=content) in (200, 201)
    for send in (_compile, _explain, _batch(1), _estimate(8), _estimate_model(2), _upload):
        assert await send(target, OTHER) == 200 or send is _upload


async def _queue_operation(port: int) -> str:
    """Queue a build; return the name of its operation."""
    body = json.dumps(BODY | {"expression": f"C[m, n] = A[m, n] * {secrets.randbelow(1 << 40)}.0 + B[m, n]"}).encode()
    reader, writer = await _begin(Target(port, ""), OTHER, "POST", COMPILE, len(body), is_json=True)
    writer.write(body)
    answer = await reader.read()
    writer.close()
    return str(json.loads(answer.partition(b"\r\n\r\n")[2])["name"])


async def repeat(sends: Mapping[str, Send], samples: Mapping[str, Sample], target: Target, seconds: float) -> None:
    """Send requests of each kind in turn, one after the other, for `seconds` of each."""
    for kind, send in sends.items():
        until_s = time.perf_counter() + seconds
        while (begin_s := time.perf_counter()) < until_s:
            samples[kind].statuses[await send(target, OTHER)] += 1
            samples[kind].latencies_s.append(time.perf_counter() - begin_s)


@contextmanager
def greedy(case: Case, target: Target) -> Iterator[None]:
    """Run the greedy client in a process of its own."""
    process = multiprocessing.get_context("fork").Process(target=_attack, args=(case, target), daemon=True)
    process.start()
    try:
        yield
    finally:
        process.terminate()
        process.join()


def _attack(case: Case, target: Target) -> None:
    with suppress(KeyboardInterrupt):
        asyncio.run(_attack_together(case, target))


async def _attack_together(case: Case, target: Target) -> None:
    await asyncio.gather(*(_send_always(send, target) for count, send in case.attacks for _ in range(count)))


async def _send_always(send: Send, target: Target) -> None:
    await asyncio.sleep(random.uniform(0.0, 1.0))
    while True:
        with suppress(OSError):
            if await send(target, GREEDY) == 200:
                continue
        await asyncio.sleep(random.uniform(*PAUSE_S))


def memory_bytes(port: int) -> int:
    """Return the largest memory so far of the process that listens on a port."""
    for status in Path("/proc").glob("[0-9]*/status"):
        with suppress(OSError):
            arguments = (status.parent / "cmdline").read_bytes().split(b"\0")
            if b"serve" in arguments and str(port).encode() in arguments:
                return max(int(line.split()[1]) << 10 for line in status.read_text().splitlines() if line.startswith("VmHWM"))
    raise SystemExit(f"no service listens on port {port}")


if __name__ == "__main__":
    main()
