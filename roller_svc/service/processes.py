"""Serve by several processes on one port. Only the first builds; one that dies is started again.

Each process binds the port by itself (SO_REUSEPORT), and the kernel spreads connections over them. They share the
database and the store, as services of several machines do.
"""

from __future__ import annotations

import contextlib
import logging
import multiprocessing
import os
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess
from types import FrameType

from roller_svc.errors import ArgumentError, RollerError
from roller_svc.farm.objects import MEMORY
from roller_svc.service.logs import configure_logging
from roller_svc.settings import Settings, use

Serve = Callable[[Settings, Callable[[], None]], object]  # calls its second argument when it serves

FAILED = 3  # exit code of a process that could not start
POLL_S = 0.5
RESTART_S = 2.0  # between two starts of a process, so that one that fails at once costs little
METRICS_FOLDER = "PROMETHEUS_MULTIPROC_DIR"  # where counters of several processes are added up

log = logging.getLogger(__name__)
_spawn = multiprocessing.get_context("spawn")


class ServiceProcess:
    """A process that serves, and whether it has begun to."""

    def __init__(self, settings: Settings, serve: Serve) -> None:
        self._reader, writer = _spawn.Pipe(duplex=False)
        self._process: SpawnProcess = _spawn.Process(target=_serve, args=(settings, serve, writer))
        self._process.start()
        self._start_s = time.monotonic()
        writer.close()  # so that the end of the process ends the pipe

    @property
    def exit_code(self) -> int | None:
        return self._process.exitcode

    @property
    def is_due(self) -> bool:
        """Whether it has ended, and another one may start."""
        return self.exit_code is not None and time.monotonic() >= self._start_s + RESTART_S

    def has_begun(self) -> bool:
        """Wait for a short time for the process to serve; return whether it does. Do not call it again then."""
        if not self._reader.poll(POLL_S):
            return False
        try:
            self._reader.recv_bytes()
        except EOFError:
            self._process.join()
            return False
        return True

    def send_signal(self, number: int) -> None:
        if self._process.is_alive() and self._process.pid is not None:
            os.kill(self._process.pid, number)

    def join(self) -> None:
        self._process.join()


class Supervisor:
    """Runs the processes of a service until a signal arrives.

    Args:
        settings: of the service; `processes` is the number of processes.
        serve: serves by one process.
    """

    def __init__(self, settings: Settings, serve: Serve) -> None:
        self._settings = settings
        self._serve = serve
        self._processes: list[ServiceProcess] = []
        self._stopping = threading.Event()

    def run(self) -> bool:
        """Serve; return False if the first process could not start. Raises ArgumentError if the port is taken."""
        host, port = self._settings.host, self._settings.port
        with _bind(host, port, is_shared=False):
            pass  # no other service listens on it, which a shared port would not tell
        # Bound without listening: the port stays this service's while processes are replaced.
        with bind_shared(host, port) as reserved, _counters_folder(), self._stopped_by_signals():
            try:
                return self._run(int(reserved.getsockname()[1]))
            finally:
                self._send(signal.SIGTERM)
                for process in self._processes:
                    process.join()

    def _run(self, port: int) -> bool:
        settings = self._settings.model_copy(update={"port": port})
        # The first one migrates the database, so the others begin after it.
        first = self._start(settings, 0)
        self._processes.append(first)
        while not first.has_begun():
            if self._stopping.is_set() or first.exit_code is not None:
                return self._stopping.is_set()
        self._processes += [self._start(settings, number) for number in range(1, settings.processes)]
        log.info("%d processes are running on http://%s:%d", settings.processes, settings.host, port)
        while not self._stopping.wait(POLL_S):
            for number, process in enumerate(self._processes):
                if process.is_due and not self._stopping.is_set():
                    log.error("process %d ended with exit code %d: it is started again", number, process.exit_code)
                    self._processes[number] = self._start(settings, number)
        return True

    def _start(self, settings: Settings, number: int) -> ServiceProcess:
        return ServiceProcess(_settings_of(settings, number), self._serve)

    def _send(self, number: int) -> None:
        for process in self._processes:
            process.send_signal(number)

    @contextlib.contextmanager
    def _stopped_by_signals(self) -> Iterator[None]:
        """End by SIGTERM or SIGINT; the second one ends the requests, too."""

        def stop(number: int, frame: FrameType | None) -> None:
            if self._stopping.is_set():
                self._send(signal.SIGINT)
            self._stopping.set()

        previous = {number: signal.signal(number, stop) for number in (signal.SIGTERM, signal.SIGINT)}
        try:
            yield
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)


def run_processes(settings: Settings, serve: Serve) -> bool:
    """Serve by `settings.processes` processes until a signal arrives; return False if they could not start."""
    if settings.store == MEMORY:
        raise ArgumentError(
            "processes cannot share a store in memory: expected ROLLER_STORE to be a directory or s3://BUCKET/PREFIX",
            code="invalid-setting",
        )
    configure_logging(settings)
    return Supervisor(settings, serve).run()


def bind_shared(host: str, port: int) -> socket.socket:
    """Return a socket bound to a port that other processes of this user may bind, too. Raises ArgumentError."""
    return _bind(host, port, is_shared=True)


def _bind(host: str, port: int, *, is_shared: bool) -> socket.socket:
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        family, kind, protocol, _, address = found[0]
        with contextlib.ExitStack() as resources:
            bound = resources.enter_context(socket.socket(family, kind, protocol))
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, is_shared)
            bound.bind(address)
            resources.pop_all()
            return bound
    except OSError as failure:
        reason = failure.strerror or str(failure)
        raise ArgumentError(f"cannot listen on {host}:{port}: {reason}", code="invalid-setting") from failure


def _settings_of(settings: Settings, number: int) -> Settings:
    """Return the settings of a process. The first one has the workers and the collections of the store."""
    shared: dict[str, object] = {"worker_memory_bytes": settings.memory_bytes_each}
    return settings.model_copy(update=shared if number == 0 else shared | {"workers": 0, "store_quota_bytes": None})


@contextlib.contextmanager
def _counters_folder() -> Iterator[None]:
    """Make prometheus_client in child processes write its counters to files of one folder."""
    with tempfile.TemporaryDirectory(prefix="roller-metrics-") as folder:
        os.environ[METRICS_FOLDER] = folder
        try:
            yield
        finally:
            del os.environ[METRICS_FOLDER]


def _serve(settings: Settings, serve: Serve, writer: Connection) -> None:
    """Serve in this process, and end with the parent."""
    os.setpgid(0, 0)  # signals of a terminal reach the parent only, which passes them on
    threading.Thread(target=_end_with_parent, daemon=True).start()
    use(settings)
    try:
        serve(settings, lambda: writer.send_bytes(b"serving"))
    except RollerError as error:
        log.critical("the service cannot start: %s", error.message)
        sys.exit(FAILED)


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os.kill(os.getpid(), signal.SIGTERM)
