"""Measure requests for a compiled kernel that the service has in its store: `python -m roller_bench.service`.

Servers take turns, round by round, each as a process of its own: a bare FastAPI route with the same content, the
service, the service in several processes, and the service of another checkout if one is named. The clients share one
process. Prints JSON with medians over rounds.
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
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI, Request, Response

START_S, STOP_S = 60.0, 30.0
PATH = "/v1/kernels:compile"
BODY = {
    "expression": "C[m, n] +=! A[m, k] * B[k, n]",
    "inputs": {name: {"dtype": "float32", "shape": [256, 256]} for name in "AB"},
    "target": "cpu-x86-avx2",
    "options": {"select": "model"},
}
BARE, SERVICE, PROCESSES, OTHER = "bare", "service", "processes", "other"
_HEADERS = {"Content-Type": "application/json", "Prefer": "wait=30"}


@dataclass(frozen=True)
class Server:
    """A server that is measured: its port, and the processes that serve."""

    port: int
    process: subprocess.Popen[bytes]

    def cpu_s(self) -> float:
        """Return the CPU time of the process and its children so far."""
        pids = {str(self.process.pid)}
        found = 0.0
        stats = {each.parent.name: each for each in Path("/proc").glob("[0-9]*/stat")}
        fields = {pid: _fields(each) for pid, each in stats.items()}
        for pid, (parent, _) in sorted(fields.items(), key=lambda each: int(each[0])):  # children have greater ids
            if parent in pids:
                pids.add(pid)
        for pid in pids:
            found += fields[pid][1] if pid in fields else 0.0
        return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, prog="python -m roller_bench.service")
    parser.add_argument("--seconds", type=float, default=4.0, help="of each measurement (default: 4)")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--connections", type=int, nargs="+", default=[1, 32])
    parser.add_argument("--processes", type=int, default=2, help="of the service that has several; 0: leave it out")
    parser.add_argument("--other", type=Path, help="checkout of another version, which takes turns with this one")
    parser.add_argument("--serve-bare", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--port", type=int, default=0, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.serve_bare is not None:
        uvicorn.run(bare_app(options.serve_bare.read_bytes()), port=options.port, access_log=False, log_level="warning")
        return
    with tempfile.TemporaryDirectory(prefix="roller-bench-") as folder, ExitStack() as resources:
        servers = start_servers(Path(folder), options.processes, options.other, resources)
        rows = measure_rounds(servers, options.connections, options.rounds, options.seconds)
    print(json.dumps({"cpus": os.cpu_count(), "load": os.getloadavg()[0], "rows": rows}, indent=2))


def bare_app(content: bytes) -> FastAPI:
    """Return an application that reads a request and responds with a content."""
    app = FastAPI()

    @app.post(PATH)
    async def respond(request: Request) -> Response:
        await request.body()
        return Response(content, media_type="application/json")

    return app


def start_servers(folder: Path, processes: int, other: Path | None, resources: ExitStack) -> dict[str, Server]:
    """Start the servers, and have each service build the kernel."""
    names = {SERVICE: (1, None)} | ({PROCESSES: (processes, None)} if processes else {}) | ({OTHER: (1, other)} if other else {})
    servers: dict[str, Server] = {}
    for name, (count, checkout) in names.items():
        more = ["--processes", str(count)] if count > 1 else []
        servers[name] = resources.enter_context(run_service(folder / name, "--workers", "1", *more, checkout=checkout))
        for _ in range(8 * count):  # every process has validated the request and has the answer
            content = request_build(servers[name].port)
    answer = folder / "answer"
    answer.write_bytes(content)
    command = ["-m", "roller_bench.service", "--serve-bare", str(answer)]
    return {BARE: resources.enter_context(run_server(command, folder / "bare.log", {})), **servers}


@contextmanager
def run_service(folder: Path, *options: str, checkout: Path | None = None) -> Iterator[Server]:
    """Run a service whose store is in a folder, until the block ends."""
    folder.mkdir(exist_ok=True)
    variables = {"ROLLER_STORE": str(folder / "store"), "ROLLER_CALIBRATE": "0"}
    if checkout is not None:
        variables["PYTHONPATH"] = str(checkout)
    with run_server(["-m", "roller_svc", "serve", *options], folder / "log", variables) as server:
        yield server


@contextmanager
def run_server(command: Sequence[str], log: Path, variables: Mapping[str, str]) -> Iterator[Server]:
    """Run a server until the block ends."""
    port = _free_port()
    with log.open("wb") as file:
        process = subprocess.Popen(
            [sys.executable, *command, "--port", str(port)],
            env={**os.environ, **variables},
            cwd=variables.get("PYTHONPATH"),  # which python -m puts first
            stdout=file,
            stderr=file,
        )
    try:
        _wait_until_served(port)
        yield Server(port, process)
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(STOP_S)


def request_build(port: int) -> bytes:
    """Build the kernel unless it is stored; return the response."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}{PATH}", _request_body(), _HEADERS)
    with urllib.request.urlopen(request, timeout=START_S) as response:
        content: bytes = response.read()
    operation = json.loads(content)
    if not operation["done"] or "error" in operation:
        raise SystemExit(f"the kernel was not built: {operation}")
    return content


def measure_rounds(servers: Mapping[str, Server], connections: Sequence[int], rounds: int, seconds: float) -> list[dict[str, Any]]:
    """Measure each server with each number of connections in each round; return medians and ratios to the bare route."""
    found: dict[tuple[str, int], list[dict[str, float]]] = {}
    for number in range(rounds):
        order = list(servers) if number % 2 == 0 else list(servers)[::-1]
        for name in order:
            for count in connections:
                before_s = servers[name].cpu_s()
                latencies = asyncio.run(measure(servers[name].port, count, seconds))
                cpu_s = servers[name].cpu_s() - before_s
                row = summary(latencies, seconds) | {"cpu_ms": 1e3 * cpu_s / len(latencies)}
                found.setdefault((name, count), []).append(row)
    rows = []
    for (name, count), several in found.items():
        medians = {field: round(statistics.median(row[field] for row in several), 3) for field in several[0]}
        ratios = [row["requests_per_s"] / bare["requests_per_s"] for row, bare in zip(several, found[BARE, count], strict=True)]
        rows.append({"server": name, "connections": count} | medians | {"ratio_to_bare": round(statistics.median(ratios), 3)})
    return rows


async def measure(port: int, connections: int, seconds: float) -> list[float]:
    """Return the latencies of all requests, in seconds."""
    until = time.perf_counter() + seconds
    found = await asyncio.gather(*(_repeat(port, until) for _ in range(connections)))
    return [latency for latencies in found for latency in latencies]


async def _repeat(port: int, until: float) -> list[float]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = "".join(f"{name}: {value}\r\n" for name, value in _HEADERS.items())
    body = _request_body()
    start = f"POST {PATH} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
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


def summary(latencies_s: Sequence[float], seconds: float) -> dict[str, float]:
    percentiles = statistics.quantiles(latencies_s, n=100)
    return {
        "requests_per_s": len(latencies_s) / seconds,
        "p50_ms": 1e3 * percentiles[49],
        "p99_ms": 1e3 * percentiles[98],
    }


def _request_body() -> bytes:
    return json.dumps(BODY).encode()


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_served(port: int) -> None:
    """Wait until something answers, with whatever status."""
    until = time.monotonic() + START_S
    while True:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/readyz", timeout=5.0):
                return
        except urllib.error.HTTPError:
            return
        except (urllib.error.URLError, ConnectionError):
            if time.monotonic() > until:
                raise
        time.sleep(0.1)


def _fields(path: Path) -> tuple[str, float]:
    """Return the parent of a process and its CPU time in seconds; nothing of one that has ended."""
    try:
        fields = path.read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()
    except OSError:
        return "", 0.0
    return fields[1], (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


if __name__ == "__main__":
    main()
