"""Measure requests for a compiled kernel that services have in their store: `python -m roller_bench.service`.

Prints JSON. Every service is a process of its own on one store and database; the clients share one process.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle, islice
from pathlib import Path
from typing import Any

START_S, STOP_S = 60.0, 30.0
BODY = {
    "expression": "C[m, n] +=! A[m, k] * B[k, n]",
    "inputs": {name: {"dtype": "float32", "shape": [256, 256]} for name in "AB"},
    "target": "cpu-x86-avx2",
    "options": {"select": "model"},
}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m roller_bench.service")
    parser.add_argument("--seconds", type=float, default=10.0, help="of each measurement (default: 10)")
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2], help="services that share the store")
    options = parser.parse_args(arguments)
    rows = []
    for processes in options.processes:
        with tempfile.TemporaryDirectory(prefix="roller-bench-") as folder, services(Path(folder), processes) as ports:
            for port in ports:
                build(port)
            for connections in options.connections:
                seconds = asyncio.run(measure(ports, connections, options.seconds))
                rows.append({"processes": processes, "connections": connections} | summary(seconds, options.seconds))
    print(json.dumps({"cpus": os.cpu_count(), "rows": rows}, indent=2))


@contextmanager
def services(folder: Path, count: int, workers: int = 1) -> Iterator[list[int]]:
    """Run services on one store; yield their ports."""
    ports = [_free_port() for _ in range(count)]
    environment = os.environ | {"ROLLER_STORE": str(folder / "store"), "ROLLER_CALIBRATE": "0"}
    with (folder / "log").open("wb") as log:
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "roller_svc", "serve", "--port", str(port), "--workers", str(workers)],
                env=environment,
                stdout=log,
                stderr=log,
            )
            for port in ports
        ]
        try:
            for port in ports:
                _wait_until_ready(port)
            yield ports
        finally:
            for process in started:
                process.send_signal(signal.SIGTERM)
            for process in started:
                process.wait(STOP_S)


def build(port: int) -> None:
    """Build the kernel unless it is stored: the service has then validated the request."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/kernels:compile", _request_body(), _HEADERS)
    with urllib.request.urlopen(request, timeout=START_S) as response:
        operation = json.load(response)
    if not operation["done"] or "error" in operation:
        raise SystemExit(f"the kernel was not built: {operation}")


async def measure(ports: Sequence[int], connections: int, seconds: float) -> list[float]:
    """Return the latencies of all requests, in seconds; connections are spread over the ports."""
    until = time.perf_counter() + seconds
    found = await asyncio.gather(*(_repeat(port, until) for port in islice(cycle(ports), connections)))
    return [latency for latencies in found for latency in latencies]


async def _repeat(port: int, until: float) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "".join(f"{name}: {value}\r\n" for name, value in _HEADERS.items())
    body = _request_body()
    start = f"POST /v1/kernels:compile HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
    request = f"{start}{head}Content-Length: {len(body)}\r\n\r\n"
    latencies = []
    while (began := time.perf_counter()) < until:
        writer.write(request.encode() + body)
        answer = (await reader.readuntil(b"\r\n\r\n")).lower()
        if not answer.startswith(b"http/1.1 200"):
            raise SystemExit(answer.decode())
        length = answer.partition(b"content-length:")[2].partition(b"\r\n")[0]
        await reader.readexactly(int(length))
        latencies.append(time.perf_counter() - began)
    writer.close()
    await writer.wait_closed()
    return latencies


def summary(latencies_s: Sequence[float], seconds: float) -> dict[str, Any]:
    percentiles = statistics.quantiles(latencies_s, n=100)
    return {
        "requests_per_s": len(latencies_s) / seconds,
        "p50_ms": 1e3 * percentiles[49],
        "p99_ms": 1e3 * percentiles[98],
        "max_ms": 1e3 * max(latencies_s),
    }


_HEADERS = {"Content-Type": "application/json", "Prefer": "wait=30"}


def _request_body() -> bytes:
    return json.dumps(BODY).encode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_ready(port: int) -> None:
    until = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5.0):
                return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


if __name__ == "__main__":
    main()
