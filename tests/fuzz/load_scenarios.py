"""One function per scenario: start a service, load it, and return a JSON report."""

from __future__ import annotations

import argparse
import contextlib
import http.client
import itertools
import os
import random
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import judge
from expensive import polyhedral
from load_clients import (
    COMPILE,
    ESTIMATES,
    JSON_HEADERS,
    NO_ANSWER,
    Greedy,
    Json,
    Watched,
    Watcher,
    asked,
    built,
    compile_body,
    estimates_body,
    quantiles,
)
from service_process import ServiceProcess, command_line, process_name, running

X64 = {"x": {"dtype": "float32", "shape": [64]}}
SLOW_GUARDS = "((i*3+j*5+0)//2+k)%11 == 0, ((i*4+j*6+0)//3+k)%12 == 1, ((i*5+j*7+0)//4+k)%13 == 2, ((i*6+j*8+0)//5+k)%14 == 3"
SLOW = f"y[i,j,k]=x[(i+j+k)//40].when([{SLOW_GUARDS}], 0.0) where i in 1000, j in 1000, k in 1000"
SAMPLE_S = 30.0
SOAK_THREADS = 64
SILENT_S = 2.0  # how long an answer may take beside silent connections: far more than it does without them


# -- fuzz --------------------------------------------------------------------------------------------------------------


def fuzz(options: argparse.Namespace) -> Json:
    """Send the requests of a hostile client sequentially."""
    with running() as service:
        start = time.monotonic()
        seconds = options.seconds if options.count is None else None
        summary = judge.run(service, options.seed, first=options.first, count=options.count, seconds=seconds)
        return {"seed": options.seed, "wall_s": round(time.monotonic() - start, 1)} | summary.as_json()


# -- soak --------------------------------------------------------------------------------------------------------------


BUILDS = {"new": 2, "wait": 1, "hang-up": 1}  # parts of the requests that need a new build
OTHERS = {"hit": 4, "error": 1, "file": 1}  # of those that need neither a build nor estimates


class _Soak:
    """A mixed load: cached and new compiles, estimates, invalid requests, files; some clients wait or hang up."""

    def __init__(self, service: ServiceProcess, options: argparse.Namespace) -> None:
        self._port = service.port
        self._rng = random.Random(options.seed)
        self._numbers = itertools.count(1)
        self._lock = threading.Lock()
        others = 100.0 - options.builds - options.estimates
        self._weights = _weighted(BUILDS, options.builds) | _weighted(OTHERS, others) | {"estimates": options.estimates}
        self.seconds: dict[str, list[float]] = {kind: [] for kind in self._weights}
        self.statuses: Counter[str] = Counter()
        self.late_s = 0.0
        operation = built(self._port, compile_body(0))
        self._files = list(operation["response"]["links"].values())

    def kind(self) -> str:
        return self._rng.choices(list(self._weights), list(self._weights.values()))[0]

    def ask(self, kind: str, due: float) -> None:
        """Send one request; its latency counts from its due time."""
        start = time.monotonic()
        with self._lock:
            self.late_s = max(self.late_s, start - due)
            number = next(self._numbers)
        status = str(self._status(kind, number))
        seconds = time.monotonic() - start
        with self._lock:
            self.seconds[kind].append(seconds)
            self.statuses[f"{kind} {status}"] += 1

    def _status(self, kind: str, number: int) -> int:
        match kind:
            case "hit":
                return asked(self._port, "POST", COMPILE, compile_body(0)).status
            case "new":
                return asked(self._port, "POST", COMPILE, compile_body(number)).status
            case "wait":
                return asked(self._port, "POST", COMPILE, compile_body(number), headers={"Prefer": "wait=30"}).status
            case "estimates":
                numbers = [number * 8 + n for n in range(8)]
                return asked(self._port, "POST", ESTIMATES, estimates_body(numbers)).status
            case "error":
                body = compile_body(0) | {"expression": "y[i] = x[i +"}
                return asked(self._port, "POST", COMPILE, body).status
            case "file":
                return asked(self._port, "GET", self._files[number % len(self._files)]).status
            case _:
                waiting = {"Prefer": "wait=30"}
                return asked(self._port, "POST", COMPILE, compile_body(number), timeout_s=0.05, headers=waiting).status


def _weighted(parts: dict[str, int], percent: float) -> dict[str, float]:
    """Divide a percentage by parts."""
    return {kind: percent * part / sum(parts.values()) for kind, part in parts.items()}


def soak(options: argparse.Namespace) -> Json:
    """Run a mixed load at a steady rate; report memory, descriptors and latencies."""
    with running() as service:
        crowd = _Soak(service, options)
        for batch in range(options.fill):
            numbers = range(10_000_000 + 1024 * batch, 10_000_000 + 1024 * (batch + 1))
            asked(service.port, "POST", ESTIMATES, estimates_body(numbers) | {"top_k": 10})
        begin = time.monotonic()
        samples, count = [_sample(service, 0.0)], int(options.seconds * options.rate)
        with ThreadPoolExecutor(SOAK_THREADS) as pool:
            for number in range(count):
                due = begin + number / options.rate
                time.sleep(max(0.0, due - time.monotonic()))
                pool.submit(crowd.ask, crowd.kind(), due)
                if due - begin >= len(samples) * SAMPLE_S:
                    samples.append(_sample(service, due - begin))
        samples.append(_sample(service, time.monotonic() - begin))
        settled = [one for one in samples if one["at_s"] >= min(120.0, options.seconds / 2)]
        return {
            "seconds": options.seconds,
            "rate": options.rate,
            "fill": options.fill,
            "builds": options.builds,
            "estimates": options.estimates,
            "requests": count,
            "late_worst_s": round(crowd.late_s, 3),
            "latencies": {kind: quantiles(seconds) for kind, seconds in crowd.seconds.items()},
            "all": quantiles([one for kind, seconds in crowd.seconds.items() if kind != "hang-up" for one in seconds]),
            "statuses": dict(crowd.statuses.most_common()),
            "rss_peak_bytes": service.rss_peak_bytes(),
            "settled_from_s": settled[0]["at_s"],
            "settled_rss_bytes_per_minute": round(_slope(settled) * 60),
            "samples": samples,
        }


def _sample(service: ServiceProcess, at_s: float) -> Json:
    return {
        "at_s": round(at_s, 1),
        "rss_bytes": service.rss_bytes(),
        "children_rss_bytes": service.children_rss_bytes(),
        "processes": len(service.tree()),
        "descriptors": service.descriptors(),
        "cpu_s": round(service.cpu_s(), 1),
    }


def _slope(samples: list[Json]) -> float:
    """Return the growth in bytes per second, by least squares."""
    if len(samples) < 2:
        return 0.0
    times, sizes = [one["at_s"] for one in samples], [one["rss_bytes"] for one in samples]
    middle, mean = sum(times) / len(times), sum(sizes) / len(sizes)
    spread = sum((t - middle) ** 2 for t in times)
    return sum((t - middle) * (s - mean) for t, s in zip(times, sizes, strict=True)) / spread if spread else 0.0


# -- fairness ----------------------------------------------------------------------------------------------------------


def fairness(options: argparse.Namespace) -> Json:
    """Measure cached and new compiles of one client while others flood estimates."""
    with running() as service:
        built(service.port, compile_body(0))
        alone = _fared(service, options.seconds / 4, itertools.count(1))
        with contextlib.ExitStack() as stack:
            greedy = [stack.enter_context(Greedy(service.port, options.items)) for _ in range(options.clients)]
            time.sleep(2.0)  # their first batches are under way
            beside = _fared(service, options.seconds, itertools.count(100_000))
        estimates = [one.found for one in greedy]
        return {"items": options.items, "alone": alone, "beside": beside, "estimates": estimates}


def _fared(service: ServiceProcess, seconds: float, numbers: Iterator[int]) -> Json:
    """Measure cached compiles alone, then with new ones, and when builds of these start."""
    watched = Watched(service.port, "POST", COMPILE, compile_body(0), pause_s=0.05)
    with Watcher(watched) as cached:
        time.sleep(seconds / 2)
    starts, statuses, until = list[float](), Counter[str](), time.monotonic() + seconds / 2
    with Watcher(watched) as beside:
        while time.monotonic() < until:
            start_s, status = _started(service.port, compile_body(next(numbers)))
            starts.append(start_s)
            statuses[str(status)] += 1
            time.sleep(0.5)
    return {
        "cached_compile": cached.found,
        "cached_compile_beside_new": beside.found,
        "new_compile_start": quantiles(starts) | {"statuses": dict(statuses)},
    }


def _started(port: int, body: Json) -> tuple[float, int]:
    """Return the seconds until a build starts; a rejected request (retry later) is sent again."""
    start = time.monotonic()
    while (answer := asked(port, "POST", COMPILE, body)).status == 503:
        time.sleep(0.02)
    operation = answer.json()
    while operation.get("metadata", {}).get("stage") == "queued":
        time.sleep(0.01)
        operation = asked(port, "GET", f"/v1/{operation['name']}").json()
    return time.monotonic() - start, answer.status


# -- silent connections ------------------------------------------------------------------------------------------------

SILENT = {
    "nothing": b"",
    "headers": b"GET /healthz HTTP/1.1\r\nHost: 127.0.0.1\r\nX: ",
    "body": b"POST /v1/kernels:compile HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n"
    b"Content-Length: 100\r\n\r\n{",
}  # fmt: skip


def silent(options: argparse.Namespace) -> Json:
    """Open idle connections, with few file descriptors and with the default limit."""
    found: Json = {"connections": options.connections}
    for most in (128, None):
        for kind in (*SILENT, "all"):
            with running(descriptors_most=most) as service:
                found[f"{most or 'default'} descriptors, {kind}"] = _beside_silent(service, kind, options)
    return found


def _beside_silent(service: ServiceProcess, kind: str, options: argparse.Namespace) -> Json:
    port = service.port
    operation = built(port, compile_body(0))
    pending = asked(port, "POST", COMPILE, compile_body(1)).json()  # an operation with a record
    built(port, compile_body(1))
    paths = {
        "operation": f"/v1/{pending['name']}",
        "kernel": operation["response"]["links"]["source"].rpartition("/")[0],
    }
    texts = list(SILENT.values()) if kind == "all" else [SILENT[kind]]
    log_bytes = service.log.stat().st_size
    asking = {name: ("GET", path, None) for name, path in paths.items()}
    asking |= {"hit": ("POST", COMPILE, compile_body(0)), "healthz": ("GET", "/healthz", None)}
    seconds: dict[str, list[float]] = {name: [] for name in asking}
    statuses: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        former = stack.enter_context(contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=SILENT_S)))
        statuses[f"operation, on a former connection {_again(former, paths['operation'])}"] += 1
        opened = [stack.enter_context(_opened(port, texts[n % len(texts)])) for n in range(options.connections)]
        until = time.monotonic() + options.seconds
        while time.monotonic() < until:
            for name, (method, path, body) in asking.items():
                statuses[f"operation, on a former connection {_again(former, paths['operation'])}"] += 1
                start = time.monotonic()
                status = asked(port, method, path, body, timeout_s=SILENT_S).status
                seconds[name].append(time.monotonic() - start)
                statuses[f"{name} {status}"] += 1
            time.sleep(0.2)
        closed, descriptors = sum(_is_closed(one) for one in opened), service.descriptors()
    return {
        "statuses": dict(sorted(statuses.items())),
        "closed_by_service": closed,
        "descriptors": descriptors,
        "log_bytes": service.log.stat().st_size - log_bytes,
        "latencies": {name: quantiles(found) for name, found in seconds.items()},
    }


def _again(former: http.client.HTTPConnection, path: str) -> int:
    """Return the status of another request on an open connection, or None if the service closed it."""
    try:
        former.request("GET", path)
        answer = former.getresponse()
        answer.read()
    except (OSError, http.client.HTTPException):
        former.close()
        return NO_ANSWER
    return answer.status


@contextlib.contextmanager
def _opened(port: int, text: bytes) -> Iterator[socket.socket]:
    """Open a connection, send this and nothing more."""
    with socket.socket() as one:
        one.settimeout(2.0)
        with contextlib.suppress(OSError):  # the service takes no more: that is its right
            one.connect(("127.0.0.1", port))
            one.sendall(text)
        yield one


def _is_closed(one: socket.socket) -> bool:
    one.settimeout(0.0)
    try:
        while one.recv(4096):
            pass
    except BlockingIOError:
        return False
    except OSError:
        return True
    return True


# -- workers killed ----------------------------------------------------------------------------------------------------


def kill(options: argparse.Namespace) -> Json:
    """Compile distinct programs while a worker is killed every second; report how they end."""
    with running() as service:
        built(service.port, compile_body(0))
        start, stop = time.monotonic(), threading.Event()
        killed: list[str] = []
        killer = threading.Thread(target=_kill_workers, args=(service, options.match, options.seed, stop, killed))
        killer.start()
        until = start + options.seconds
        try:
            with ThreadPoolExecutor(8) as pool:
                bodies = [compile_body(1 + number) for number in range(options.count)]
                names = list(pool.map(lambda body: _accepted(service.port, body, until), bodies))
                ends = list(pool.map(lambda name: _end(service.port, name, until), names))
        finally:
            stop.set()
            killer.join()
        service.wait_until_quiet()
        outcomes = Counter(outcome for outcome, _ in ends)
        left = [command_line(pid)[:100] for pid in service.tree() if "cc1" in command_line(pid)]
        folders = sum(1 for path in (service.folder / "tmp").iterdir() if path.is_dir())
        return {
            "compiles": options.count,
            "wall_s": round(time.monotonic() - start, 1),
            "kills": len(killed),
            "killed": dict(Counter(killed)),
            "outcomes": dict(outcomes),
            "attempts": dict(Counter(str(attempt) for _, attempt in ends)),
            "compilers_left": left,
            "folders_left": folders,
            "alive": service.alive(),
        }


def _kill_workers(service: ServiceProcess, match: str, seed: int, stop: threading.Event, killed: list[str]) -> None:
    """Kill a random worker every second."""
    rng = random.Random(seed)
    while not stop.wait(1.0):
        workers = [(pid, name) for pid in service.tree()[1:] if match in (name := process_name(pid))]
        if workers:
            pid, name = rng.choice(workers)
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
                killed.append(name)


def _accepted(port: int, body: Json, until: float) -> str:
    """Send a compile until the service accepts it; return the name of the operation."""
    while time.monotonic() < until:
        answer = asked(port, "POST", COMPILE, body)
        if answer.status in (200, 202):
            return str(answer.json()["name"])
        if answer.status not in (0, 503):
            return f"refused {answer.status}"
        time.sleep(0.5)
    return "never taken"


def _end(port: int, name: str, until: float) -> tuple[str, object]:
    """Return how an operation ended, and in which attempt, if known."""
    while name.startswith("operations/") and time.monotonic() < until:
        operation = asked(port, "GET", f"/v1/{name}?wait=20").json()
        if operation.get("done"):
            error = operation.get("error")
            return f"error {error['code']}" if error else "kernel", operation["metadata"].get("attempts", "unknown")
    return ("not ended" if name.startswith("operations/") else name), "unknown"


# -- one request that stops everything ---------------------------------------------------------------------------------


def freeze(options: argparse.Namespace) -> Json:
    """Send programs with slow polyhedral checks while another client polls /healthz."""
    rng = random.Random(options.seed)
    items = [{"expression": polyhedral(rng, 12, 4), "inputs": X64} for _ in range(6)]
    twelve = "; ".join(SLOW.replace("y[", f"y{n}[", 1) for n in range(4))
    shown: dict[str, tuple[str, Json]] = {
        "estimate, 194 characters": (ESTIMATES, {"items": [{"expression": SLOW, "inputs": X64}], "targets": ["local"]}),
        "the same again": (ESTIMATES, {"items": [{"expression": SLOW, "inputs": X64}], "targets": ["local"]}),
        "estimate, 8 statements of 12 conditions": (
            ESTIMATES, {"items": [{"expression": polyhedral(rng, 12, 8), "inputs": X64}], "targets": ["local"]},
        ),
        "estimates, 6 items of 4 statements": (ESTIMATES, {"items": items, "targets": ["local"]}),
        "compile, 4 statements": (COMPILE, {"expression": twelve, "inputs": X64, "target": "local"}),
        "estimates, 20 items of 194 characters": (
            ESTIMATES, {"items": [{"expression": SLOW, "inputs": X64}] * 20, "targets": ["local"]},
        ),
    }  # fmt: skip
    found: Json = {}
    with running() as service:
        for name, (path, body) in shown.items():
            found[name] = _watched(service, lambda port, path=path, body=body: asked(port, "POST", path, body).status)
    return found


def _watched(service: ServiceProcess, load: Callable[[int], object]) -> Json:
    """Return the time and response of a request, its CPU cost, and the latency of others meanwhile."""
    service.wait_until_quiet()
    cpu_s = service.cpu_s()
    with Watcher(Watched(service.port, pause_s=0.01)) as healthz:
        time.sleep(0.3)
        start = time.monotonic()
        answered = load(service.port)
        seconds = time.monotonic() - start
        time.sleep(0.3)
    cost = {"seconds": round(seconds, 2), "cpu_s": round(service.cpu_s() - cpu_s, 2)}
    return {"answer": answered, **cost, "rss_peak_bytes": service.rss_peak_bytes(), "healthz": healthz.found}


# -- bodies ------------------------------------------------------------------------------------------------------------


def body(_: argparse.Namespace) -> Json:
    """Send bodies of 1 MiB with an error in each part, and bodies in one-byte chunks."""
    start = b'{"targets":["a"],"items":['
    many = {
        "349,000 empty items": start + b",".join([b"{}"] * 349_000) + b"]}",
        "510,000 numbers": start + b",".join([b"1"] * 510_000) + b"]}",
        "90,000 unknown fields": b"{" + b",".join(b'"%d":1' % n for n in range(90_000)) + b"}",
        "90,000 inputs": b'{"expression":"y[i]=x[i]","target":"local","inputs":{'
        + b",".join(b'"%d":1' % n for n in range(90_000)) + b"}}",
    }  # fmt: skip
    found: Json = {}
    for name, content in many.items():
        path = COMPILE if "inputs" in name else ESTIMATES
        with running() as service:
            found[name] = _watched(service, lambda port, path=path, content=content: _posted(port, path, content))
    for name, environment in {"one-byte chunks": {}, "one-byte chunks, no key": {"ROLLER_API_KEYS": "k" * 40}}.items():
        with running(environment=environment) as service:
            found[name] = _watched(service, _chunked)
    return found


def _posted(port: int, path: str, content: bytes) -> str:
    answer = asked(port, "POST", path, content)
    return f"{answer.status}, {len(answer.body)} bytes"


def _chunked(port: int, chunks: int = 1_000_000) -> str:
    """Send a million one-byte chunks; return the first line of the response."""
    head = f"POST {ESTIMATES} HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\nContent-Type: {JSON_HEADERS['Content-Type']}\r\n"
    with socket.create_connection(("127.0.0.1", port), timeout=120.0) as one:
        try:
            one.sendall(f"{head}Transfer-Encoding: chunked\r\n\r\n".encode() + b"1\r\n \r\n" * chunks + b"0\r\n\r\n")
            return one.recv(4096).partition(b"\r\n")[0].decode()
        except OSError as failure:
            with contextlib.suppress(OSError):
                return one.recv(4096).partition(b"\r\n")[0].decode() or f"closed: {failure!r}"
            return f"closed: {failure!r}"
