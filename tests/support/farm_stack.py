"""Processes of a farm: RabbitMQ, PostgreSQL, services and workers whose builds sleep, for tests that kill them.

Every process listens on loopback, has its data in the test's folder and is ended by its pid.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from databases import psycopg_url, start_postgresql
from service_process import STOP_S, ServiceProcess, descendants, start
from sqlalchemy import create_engine, text
from sqlalchemy.exc import OperationalError
from sqlalchemy.pool import NullPool
from waiting import PATIENCE_S, becomes_true, wait_until

SUPPORT = Path(__file__).resolve().parent
RABBITMQ = Path("/usr/lib/rabbitmq/bin/rabbitmq-server")  # the one in PATH changes the user
SHORT_LEASE_S = 3.0  # of tests that kill: builds go on soon, and may begin again where the machine stops a worker for so long
LONG_LEASE_S = PATIENCE_S  # of tests that count builds: no machine stops a worker for so long


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Broker:
    """A RabbitMQ with a node, ports, a cookie and data of its own."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        self._folder = folder
        self.port = free_port()
        epmd_port, distribution_port = free_port(), free_port()
        (folder / "plugins").write_text("[].\n")
        (folder / "rabbitmq.conf").write_text(
            f"listeners.tcp.1 = 127.0.0.1:{self.port}\n"
            "loopback_users = none\n"
            "default_user = farm\ndefault_pass = secret-of-the-farm\n"
            "vm_memory_high_watermark.absolute = 512MB\ndisk_free_limit.absolute = 1MB\n"
            "log.console = true\nlog.console.level = warning\nlog.file = false\n"
        )
        self._environment = {
            "PATH": os.environ["PATH"],
            "LANG": "C.UTF-8",
            "HOME": str(folder),  # of Erlang's cookie
            "RABBITMQ_NODENAME": f"farm{self.port}@localhost",
            "RABBITMQ_DIST_PORT": str(distribution_port),
            "RABBITMQ_CONFIG_FILE": str(folder / "rabbitmq.conf"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(folder / "plugins"),
            "RABBITMQ_MNESIA_BASE": str(folder / "data"),
            "RABBITMQ_LOG_BASE": str(folder / "logs"),
            "RABBITMQ_CONF_ENV_FILE": str(folder / "none"),
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "+S 1:1 +sbwt none +sbwtdcpu none +sbwtdio none "
            "-kernel inet_dist_use_interface {127,0,0,1}",
            "ERL_EPMD_PORT": str(epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
        }
        self._epmd = subprocess.Popen(
            ["epmd", "-address", "127.0.0.1", "-port", str(epmd_port)],
            env=self._environment,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
        )
        self._server: subprocess.Popen[bytes] | None = None
        self.start()

    @property
    def url(self) -> str:
        return f"amqp://farm:secret-of-the-farm@127.0.0.1:{self.port}//"

    @property
    def pid(self) -> int:
        assert self._server is not None
        return self._server.pid

    def start(self) -> None:
        log = (self._folder / "console").open("ab")
        self._server = subprocess.Popen(
            [str(RABBITMQ)],
            env=self._environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
        )
        log.close()
        wait_until(self._listens)

    def kill(self) -> None:
        """End it as a lost machine does."""
        assert self._server is not None
        for pid in reversed(descendants(self._server.pid)):
            _kill(pid)
        self._server.wait()

    def close(self) -> None:
        self.kill()
        self._epmd.kill()
        self._epmd.wait()

    def _listens(self) -> bool:
        """Whether it answers the protocol's header."""
        assert self._server is not None
        assert self._server.poll() is None, (self._folder / "console").read_text(errors="replace")[-3000:]
        try:
            with socket.create_connection(("127.0.0.1", self.port), 2) as connection:
                connection.settimeout(5)
                connection.sendall(b"AMQP\x00\x00\x09\x01")
                return bool(connection.recv(1))
        except OSError:
            return False


class PostgreSql:
    """A PostgreSQL that tests may kill; it listens on a Unix socket."""

    def __init__(self, folder: Path) -> None:
        self._server = start_postgresql(folder)
        self.url = psycopg_url(self._server.get_uri()).render_as_string(hide_password=False)

    @property
    def pid(self) -> int:
        pid = self._server.get_pid()
        assert pid is not None
        return int(pid)

    def kill(self) -> None:
        """End it as a lost machine does: its server processes notice and end too."""
        processes = descendants(self.pid)
        for pid in processes:
            _kill(pid)
        wait_until(lambda: not any(Path(f"/proc/{pid}").exists() for pid in processes))

    def start(self) -> None:
        """Start it again and wait until it has recovered."""
        wait_until(self._has_recovered)

    def _has_recovered(self) -> bool:
        engine = create_engine(self.url, poolclass=NullPool)
        try:
            self._server.ensure_postgres_running()
            with engine.connect():
                return True
        except (subprocess.TimeoutExpired, OperationalError, AssertionError):  # the last of the package, while it recovers
            return False

    def close(self) -> None:
        self._server.cleanup()


@dataclass
class Worker:
    """A `roller worker` whose builds sleep."""

    popen: subprocess.Popen[bytes] = field(repr=False)
    log: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    def wait_until_ready(self) -> None:
        wait_until(lambda: "takes from" in self.log.read_text() or self.popen.poll() is not None)
        assert self.popen.poll() is None, self.log.read_text()[-3000:]

    def terminate(self) -> None:
        self.popen.terminate()

    def kill(self) -> None:
        self.popen.kill()
        self.popen.wait()

    def stop(self) -> None:
        """End it by SIGTERM, and what it left behind."""
        left = descendants(self.pid)
        self.popen.terminate()
        try:
            self.popen.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self.kill()
        for pid in left[1:]:
            _kill(pid)


class Stack:
    """Services and workers on one store and one database, with a broker or without.

    Builds sleep, and note what they do in a file.
    """

    def __init__(self, folder: Path, *, database: str = "", broker: str = "") -> None:
        self.folder = folder
        self.lease_s = SHORT_LEASE_S
        self.services: list[ServiceProcess] = []
        self.workers: list[Worker] = []
        self.build_log = folder / "builds"
        self.database = database or f"sqlite:///{folder / 'store' / 'operations.db'}"
        self._settings: dict[str, object] = {
            "PORT": 0, "STORE": folder / "store", "CONFINE_WORKERS": 0, "QUEUE_LENGTH": 5000,
            "DATABASE": self.database, "BROKER": broker, "WORKER_MEMORY_BYTES": 1 << 30,
        }  # fmt: skip

    def serve(
        self,
        *,
        claim_s: float = 0.0,
        build_s: float = 0.0,
        publish_s: float = 0.0,
        package: Path | None = None,
        **settings: object,
    ) -> ServiceProcess:
        """Start a service, which builds only if it has WORKERS. `package` is the parent of another version."""
        environment = self._environment({"WORKERS": 0} | settings, package, claim_s, build_s, publish_s)
        service = start(_python("main"), self._folder("service", len(self.services)), environment)
        self.services.append(service)
        return service

    def work(
        self,
        *arguments: str,
        claim_s: float = 0.0,
        build_s: float = 0.0,
        publish_s: float = 0.0,
        wait: bool = True,
        package: Path | None = None,
        temporary: Path | None = None,
        **settings: object,
    ) -> Worker:
        """Start a worker; `wait` until it takes operations."""
        folder = self._folder("worker", len(self.workers))
        environment = self._environment({"WORKERS": 1} | settings, package, claim_s, build_s, publish_s)
        environment |= {"TMPDIR": str(temporary or folder)}
        variables = {key: value for key, value in os.environ.items() if not key.startswith("ROLLER_")}
        with (folder / "log").open("wb") as log:
            popen = subprocess.Popen(
                [*_python("work"), *arguments],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=variables | environment,
            )
        worker = Worker(popen, folder / "log")
        self.workers.append(worker)
        if wait:
            worker.wait_until_ready()
        return worker

    def work_many(self, count: int, **options: Any) -> list[Worker]:
        """Start workers together."""
        workers = [self.work(wait=False, **options) for _ in range(count)]
        for worker in workers:
            worker.wait_until_ready()
        return workers

    def run(self, *words: str) -> subprocess.Popen[bytes]:
        """Start a command of `roller` with the settings of the services."""
        variables = {key: value for key, value in os.environ.items() if not key.startswith("ROLLER_")}
        return subprocess.Popen(
            [sys.executable, "-P", "-m", "roller_svc", *words],
            env=variables | self._environment({}),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )

    def lines(self, kind: str) -> list[str]:
        """What the builds noted of a kind."""
        content = self.build_log.read_text() if self.build_log.exists() else ""
        return [line.partition(" ")[2] for line in content.splitlines() if line.startswith(f"{kind} ")]

    def builders(self) -> dict[str, set[str]]:
        """Workers that built each operation, as its events say."""
        with _connected(self.database) as connection:
            rows = connection.execute(text("SELECT operation, data FROM events WHERE type = 'building'")).all()
        found: dict[str, set[str]] = {}
        for operation, data in rows:
            document = json.loads(data) if isinstance(data, str) else data
            found.setdefault(operation, set()).add(document["worker"])
        return found

    def ends(self) -> Counter[str]:
        """How often each operation ended, as its events say."""
        with _connected(self.database) as connection:
            rows = connection.execute(text("SELECT operation FROM events WHERE type = 'done'"))
            return Counter(operation for (operation,) in rows)

    def close(self) -> None:
        for worker in self.workers:
            worker.terminate()
        for worker in self.workers:
            worker.stop()
        for service in self.services:
            service.stop()

    def _folder(self, kind: str, number: int) -> Path:
        folder = self.folder / f"{kind}{number}"
        folder.mkdir()
        return folder

    def _environment(
        self,
        settings: dict[str, object],
        package: Path | None = None,
        claim_s: float = 0.0,
        build_s: float = 0.0,
        publish_s: float = 0.0,
    ) -> dict[str, str]:
        used = self._settings | {"LEASE_S": self.lease_s} | settings
        return {f"ROLLER_{name}": str(value) for name, value in used.items()} | {
            "SLEEPY_CLAIM_S": str(claim_s),
            "SLEEPY_BUILD_S": str(build_s),
            "SLEEPY_PUBLISH_S": str(publish_s),
            "SLEEPY_LOG": str(self.build_log),
            "PYTHONPATH": os.pathsep.join([str(SUPPORT), str(package or SUPPORT.parents[1])]),
        }


class Requests:
    """What clients of a stack ask, with an HTTP client for each thread of a test."""

    def __init__(self) -> None:
        self._clients = httpx.Client(timeout=120.0, limits=httpx.Limits(max_connections=256))

    def use_key(self, key: str) -> None:
        self._clients.headers["Authorization"] = f"Bearer {key}"

    def compile(self, service: ServiceProcess, number: int, wait_s: float = 0.0, **more: Any) -> dict[str, Any]:
        """An operation: the compilation of one of as many programs as there are numbers."""
        response = self._clients.post(
            f"{base_url(service)}/v1/kernels:compile", json=body(number, **more), headers={"Prefer": f"wait={wait_s:g}"}
        )
        assert response.status_code in (200, 202), response.text
        document: dict[str, Any] = response.json()
        return document

    def get(self, service: ServiceProcess, path: str) -> httpx.Response:
        return self._clients.get(f"{base_url(service)}{path}")

    def ended(self, service: ServiceProcess, name: str) -> dict[str, Any]:
        """An operation once it is done. Answers of a database that is away are tried again."""
        document: dict[str, Any] = {}

        def is_done() -> bool:
            nonlocal document
            response = self.get(service, f"/v1/{name}?wait=5")
            assert response.status_code in (200, 503), response.text
            document = response.json()
            return response.status_code == 200 and document["done"]

        assert becomes_true(is_done), document
        return document

    def check_done_once(self, stack: Stack, service: ServiceProcess, names: Sequence[str]) -> None:
        """Every operation has a kernel of its own, that its links give, ended once and was published once."""
        digests = []
        for name in names:
            document = self.ended(service, name)
            assert "error" not in document, document
            digests.append(document["response"]["digest"])
            assert self.get(service, document["response"]["links"]["source"]).status_code == 200
        assert len(set(digests)) == len(names)
        ends = stack.ends()
        assert {name: ends[name.partition("/")[2]] for name in names} == dict.fromkeys(names, 1)
        published: dict[str, set[str]] = {}
        for line in stack.lines("published"):
            action, _, digest = line.partition(" ")
            published.setdefault(action, set()).add(digest)
        assert all(len(results) == 1 for results in published.values())

    def close(self) -> None:
        self._clients.close()


def body(number: int, **options: object) -> dict[str, Any]:
    return {
        "expression": f"y[i] = x[i] * {number}.5",
        "inputs": {"x": {"dtype": "float32", "shape": [64]}},
        "target": "cpu-x86-avx2",
        "options": {"select": "model", **options},
    }


def base_url(service: ServiceProcess) -> str:
    return f"http://127.0.0.1:{service.port}"


@contextmanager
def _connected(url: str) -> Iterator[Any]:
    engine = create_engine(url, poolclass=NullPool)
    try:
        with engine.connect() as connection:
            yield connection
    finally:
        engine.dispose()


def _python(function: str) -> list[str]:
    # -P: the working directory may have another version of the package.
    return [sys.executable, "-P", "-c", f"import sleepy_service as s; s.{function}()"]


def _kill(pid: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signal.SIGKILL)
