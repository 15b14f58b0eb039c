"""Worker processes that run one task at a time and are replaced when they die or time out.

A worker is a fresh interpreter (multiprocessing's "spawn") or, within milliseconds, a fork of a server process with
the imports already done ("forkserver"). Neither inherits this process's threads, locks, sockets or secrets.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import multiprocessing
import os
import pickle
import resource
import select
import signal
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, SpawnContext
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from roller_svc.compiler.serialize import error_json, parse_error
from roller_svc.errors import (
    ArgumentError,
    BuildError,
    BuildServiceError,
    InvariantError,
    KernelTimeoutError,
    RollerError,
)
from roller_svc.farm.scratch import FILE_BYTES, find_excess, remove_tree
from roller_svc.toolchain.sandbox import die_with_pipe, forbid_processes, limit_self, restrict_self
from roller_svc.toolchain.supervisor import fork_supervised

T = TypeVar("T")
R = TypeVar("R")

_SPAWNING, _FORKING = multiprocessing.get_context("spawn"), multiprocessing.get_context("forkserver")
_preloaded: list[str] = []

STOP_S = 2.0  # for an idle worker to end by itself
START_S = 120.0  # for the imports of a worker
START_PAUSE_S = 0.05  # between a failed start and the next
MAX_STARTS = 5  # a worker that ends before it can take a task is not the task's fault
GRACE_S = 5.0  # for sending a task and receiving its result, in addition to the task's own limit
STALLED_CPU_FRACTION = 0.1  # of the time limit: a worker with less CPU time was starved by the machine
MAX_RESPONSE_BYTES = 1 << 30
MAX_SOCKET_PATH_BYTES = 107
SOCKET_BELOW_TEMPORARY_DIRECTORY = "/pymp-01234567/listener-01234567"  # as multiprocessing names it
MAX_PID_DIGITS = 10
CHECK_S = 0.5  # between two looks at what a confined worker takes
OPEN_FILES = 4096
_RESULT, _RAISED, _PICKLED = b"j", b"e", b"p"


@dataclass(frozen=True, slots=True)
class JsonCodec(Generic[R]):
    """Encodes the results of an untrusted worker as JSON, never as a pickle."""

    encode: Callable[[R], object]
    decode: Callable[[Any], R]  # raises ValueError, KeyError, TypeError or AttributeError for a malformed result


@dataclass(frozen=True, slots=True)
class WorkerLimits:
    """Resources of a worker process.

    A confined worker (`readable` is not None) can read below these paths and write to its temporary directory and below
    `devices`. It can open no other file, no socket and no other process, and starts none: its supervisor, another
    process, starts compilers for it. Only a forked worker can be confined.
    """

    memory_bytes: int | None = None  # host memory that the worker and each of its compilers may allocate
    nice: int = 0
    scratch: Path | None = None  # parent of the workers' temporary directories; created if missing
    readable: tuple[str, ...] | None = None
    devices: tuple[str, ...] = ()


class WorkerProcess(Generic[T, R]):
    """A worker process, started at its first task and replaced when it ends.

    Tasks are pickled. Results are pickled too unless a `codec` is given; errors are always JSON. A worker that meets a
    bug reports it and ends. A spawned worker inherits the environment and CPU affinity of the thread that starts it.

    Args:
        work: a module-level function that runs one task.
        timeout_s: limit of one task.
        limits: resources of the process.
        codec: JSON encoding of results; default: pickle.
        taints: whether the worker must be replaced after a task.
        forked: fork from the fork server in place of starting a fresh interpreter.
    """

    def __init__(
        self,
        work: Callable[[T], R],
        timeout_s: float,
        limits: WorkerLimits = WorkerLimits(),
        codec: JsonCodec[R] | None = None,
        taints: Callable[[T], bool] | None = None,
        *,
        forked: bool = False,
    ) -> None:
        if forked:
            _preload(work.__module__)
        self._context: SpawnContext | ForkServerContext = _FORKING if forked else _SPAWNING
        self._work = work
        self._timeout_s = timeout_s
        self._limits = limits
        self._codec = codec
        self._taints = taints
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None
        self._lifeline: Connection | None = None  # the worker ends when this end of its pipe is closed
        self._lock = threading.Lock()
        self._pidfd: int | None = None  # of `_process`; changes under the lock
        self._pid = 0  # of the worker; that of `_process` may be its supervisor's
        self._temp_dir: str | None = None

    def call(self, task: T) -> R:
        """Run a task and return its result.

        Raises the error of the task, KernelTimeoutError if it timed out, or BuildServiceError if the worker died.
        """
        connection = self._ready_connection()
        cpu_before_s = self._cpu_s()
        # Covers hangs that neither a result nor the worker's death ends: sending to a stopped worker, a partial result.
        watchdog = threading.Timer(self._timeout_s + GRACE_S, self.kill)
        watchdog.daemon = True
        watchdog.start()
        try:
            connection.send(task)
            if not self._wait(connection):
                used_s = self._cpu_s() - cpu_before_s
                self.close(kill=True)
                raise self._timeout_error(used_s)
            response = connection.recv_bytes(MAX_RESPONSE_BYTES)
        except (EOFError, OSError) as failure:
            code = self._exit_code()
            raise BuildServiceError(f"worker process exited unexpectedly ({_describe_exit(code)})", code="worker-lost") from failure
        finally:
            watchdog.cancel()
        if self._taints is not None and self._taints(task):
            self.close(kill=True)
        return self._decode_response(response)

    def _wait(self, connection: Connection) -> bool:
        """Wait for a response. Returns whether it came in time. Raises BuildError if a confined worker takes too much."""
        end_s = time.monotonic() + self._timeout_s
        while (left_s := end_s - time.monotonic()) > 0:
            if connection.poll(min(left_s, CHECK_S)):
                return True
            if self._limits.readable is None or self._temp_dir is None:
                continue
            supervisor = self._process.pid if self._process else 0
            if excess := find_excess(self._pid, supervisor or 0, Path(self._temp_dir)):
                self.close(kill=True)
                raise BuildError(f"the build was ended: it has {excess}", code="out-of-resources")
        return False

    def _decode_response(self, response: bytes) -> R:
        """Decode a response: one byte for its kind, then the content."""
        kind, content = response[:1], response[1:]
        if kind == _PICKLED and self._codec is None:
            result: R = pickle.loads(content)
            return result
        try:
            document = json.loads(content)
            if kind == _RESULT and self._codec is not None:
                return self._codec.decode(document)
            raised = parse_error(document) if kind == _RAISED else None
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as failure:
            self.close(kill=True)
            raise BuildServiceError("malformed response from the worker", code="worker-lost") from failure
        if raised is None or isinstance(raised, InvariantError):
            self.close(kill=True)
        raise raised or BuildServiceError("malformed response from the worker", code="worker-lost")

    def _timeout_error(self, used_s: float) -> RollerError:
        """Return the task's timeout, or a transient error if the machine starved the worker."""
        if used_s < STALLED_CPU_FRACTION * self._timeout_s:
            return BuildServiceError(
                f"worker timed out after {self._timeout_s:g} s with {used_s:.1f} s of CPU time: the machine stalled",
                code="worker-stalled",
            )
        return KernelTimeoutError(f"worker timed out after {self._timeout_s:g} s and was killed")

    def _cpu_s(self) -> float:
        """Return the CPU time of the worker, its supervisor and reaped compilers; 0 if they are gone."""
        supervisor = self._process.pid if self._process else 0
        return sum(_cpu_s(pid) for pid in {supervisor or 0, self._pid})

    def close(self, *, kill: bool = False) -> None:
        """End the worker: after its current task, or immediately if `kill`."""
        process, connection, lifeline = self._process, self._connection, self._lifeline
        self._process = self._connection = self._lifeline = None
        if connection is not None:
            connection.close()
        if kill:
            self.kill()
        if process is not None:
            process.join(STOP_S)
        if lifeline is not None:
            lifeline.close()
        with self._lock:
            if self._pidfd is not None:
                _send_kill(self._pidfd)
                end = select.poll()
                end.register(self._pidfd, select.POLLIN)
                end.poll(1000 * STOP_S)  # a process blocked in a driver stays behind
                os.close(self._pidfd)
                self._pidfd = None
        if self._temp_dir is not None:
            remove_tree(Path(self._temp_dir))
            self._temp_dir = None

    def kill(self) -> None:
        """Kill the process, from any thread: a running `call` raises BuildServiceError.

        A worker and its compilers end with their supervisor.
        """
        with self._lock:
            if self._pidfd is not None:
                _send_kill(self._pidfd)

    def _ready_connection(self) -> Connection:
        """Return the connection to a worker that is ready, starting one if needed.

        Raises BuildServiceError if several workers in a row end while they start.
        """
        for _ in range(MAX_STARTS):
            if self._process is not None and self._connection is not None and self._process.is_alive():
                return self._connection
            try:
                connection = self._start()
                if connection.poll(START_S):
                    self._pid = int(connection.recv_bytes(MAX_PID_DIGITS))
                    return connection
            except (EOFError, OSError, ValueError):
                pass  # the worker or the fork server ended: try another one
            self.close(kill=True)
            time.sleep(START_PAUSE_S)  # lets multiprocessing notice that its fork server has ended
        raise BuildServiceError(f"{MAX_STARTS} worker processes in a row ended while they started", code="worker-lost")

    def _start(self) -> Connection:
        self.close(kill=True)
        if self._limits.scratch is not None:
            self._limits.scratch.mkdir(mode=0o700, exist_ok=True)
            self._temp_dir = tempfile.mkdtemp(prefix="worker-", dir=self._limits.scratch)
        parent_end, worker_end = self._context.Pipe()
        life_end, self._lifeline = self._context.Pipe(duplex=False)
        process = self._context.Process(
            target=_serve,
            args=(worker_end, life_end, self._work, self._limits, self._temp_dir, self._codec),
            daemon=True,
        )
        # Control-C reaches the whole process group: block it until the worker ignores it.
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
            worker_end.close()
            life_end.close()
        self._process, self._connection = process, parent_end
        with self._lock:
            self._pidfd = os.pidfd_open(process.pid or 0)
        return parent_end

    def _exit_code(self) -> int | None:
        process = self._process
        if process is None:
            return None
        process.join(STOP_S)
        code = process.exitcode
        self.close(kill=True)
        return code


class WorkerPool(Generic[T, R]):
    """One forked worker process for each calling thread."""

    def __init__(
        self,
        work: Callable[[T], R],
        timeout_s: float,
        limits: WorkerLimits = WorkerLimits(),
        codec: JsonCodec[R] | None = None,
        taints: Callable[[T], bool] | None = None,
    ) -> None:
        _check_temporary_directory()
        _preload(work.__module__)
        self._new_worker: Callable[[], WorkerProcess[T, R]] = lambda: WorkerProcess(
            work, timeout_s, limits, codec, taints, forked=True
        )
        self._workers: dict[int, WorkerProcess[T, R]] = {}  # by thread
        self._lock = threading.Lock()

    def call(self, task: T) -> R:
        with self._lock:
            worker = self._workers.setdefault(threading.get_ident(), self._new_worker())
        return worker.call(task)

    def interrupt(self, thread_id: int) -> None:
        """Kill the worker of a thread: its running call raises BuildServiceError."""
        with self._lock:
            worker = self._workers.get(thread_id)
        if worker is not None:
            worker.kill()

    def close(self, *, kill: bool = False) -> None:
        with self._lock:
            workers, self._workers = list(self._workers.values()), {}
        for worker in workers:
            worker.close(kill=kill)


def map_unordered(work: Callable[[T], R], tasks: Iterable[T], jobs: int, timeout_s: float) -> Iterator[tuple[T, R | RollerError]]:
    """Run tasks in `jobs` worker processes; yield each with its result or error, in order of completion."""
    workers: WorkerPool[T, R] = WorkerPool(work, timeout_s)

    def run(task: T) -> tuple[T, R | RollerError]:
        try:
            return task, workers.call(task)
        except RollerError as error:
            return task, error

    threads = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([threads.submit(run, task) for task in tasks]):
            yield future.result()
    finally:
        threads.shutdown(wait=False, cancel_futures=True)
        workers.close(kill=True)


class _CrashReporter:
    """Sends an exception that escapes from a task to the parent, before it ends the worker."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if error is not None and isinstance(error, Exception):
            frame = traceback.extract_tb(trace)[-1]
            words = f"{type(error).__name__}: {error} ({Path(frame.filename).name}:{frame.lineno})"
            self._connection.send_bytes(_error_bytes(InvariantError(words)))


def _serve(
    connection: Connection,
    life_end: Connection,
    work: Callable[[T], R],
    limits: WorkerLimits,
    temp_dir: str | None,
    codec: JsonCodec[R] | None,
) -> None:
    """Run a worker: receive tasks and send responses until the parent closes the connection."""
    confined = limits.readable is not None
    if not confined:
        die_with_pipe(life_end.fileno())
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent handles Control-C
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    os.nice(limits.nice)
    if temp_dir is not None:
        os.environ["TMPDIR"] = tempfile.tempdir = temp_dir
    gc.collect()
    gc.freeze()  # imported objects live forever: exclude them from collections
    memory_bytes = limits.memory_bytes
    if memory_bytes is not None:
        # Limit writable memory, not the address space: with unified virtual addressing CUDA reserves more addresses
        # than the host and the device have memory. Since Linux 4.7 private mappings count too (setrlimit(2)).
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    if confined:
        limit_self(_CONFINED_LIMITS)
        fork_supervised(life_end.fileno(), connection.fileno(), lambda: _confine(limits, temp_dir, signals=True))
    Path("/proc/self/comm").write_text(work.__name__[:15], encoding="utf-8")  # the name in `ps` and `top`
    if confined:
        null = os.open(os.devnull, os.O_RDWR)
        for descriptor in range(3):  # a terminal takes commands, and a log fills a disk
            os.dup2(null, descriptor)
        _confine(limits, temp_dir)
        forbid_processes(shared_memory=bool(limits.devices))
    with contextlib.suppress(ConnectionError):
        connection.send_bytes(str(os.getpid()).encode())
    while True:
        try:
            task: T = connection.recv()
        except (EOFError, OSError):
            return
        with _CrashReporter(connection):
            try:
                result = work(task)
                response = _PICKLED + pickle.dumps(result) if codec is None else _json_bytes(codec.encode(result))
            except RollerError as error:
                response = _error_bytes(error)
            except MemoryError:
                limit = "" if memory_bytes is None else f": it may use {memory_bytes} bytes"
                response = _error_bytes(
                    BuildError(f"the build needs more memory than its process has{limit}", code="out-of-memory")
                )
            except OSError as failure:
                if failure.errno not in _TRANSIENT_ERRNOS:
                    raise
                response = _error_bytes(BuildServiceError(f"the worker: {failure.strerror}", code="worker-resources"))
        with contextlib.suppress(ConnectionError):  # the parent is gone: the next recv ends the worker
            connection.send_bytes(response)


def _preload(module: str) -> None:
    """Make the fork server import a module when it starts; a running server is unaffected."""
    if module not in _preloaded and module != "__main__":
        _preloaded.append(module)
        _FORKING.set_forkserver_preload(_preloaded)


def _check_temporary_directory() -> None:
    """Raise ArgumentError if the fork server's socket would have too long a path (unix(7))."""
    longest = MAX_SOCKET_PATH_BYTES - len(SOCKET_BELOW_TEMPORARY_DIRECTORY)
    given = os.fsencode(tempfile.gettempdir())
    if len(given) > longest:
        raise ArgumentError(
            f"the path of the temporary directory is too long for a socket: at most {longest} bytes, got {len(given)}",
            code="invalid-setting",
            hint="set TMPDIR to a directory with a shorter path",
        )


def _confine(limits: WorkerLimits, temp_dir: str | None, *, signals: bool = False) -> None:
    """Restrict this process to the worker's files."""
    # The target of /proc/self: the entries of other processes expose their environment.
    readable = (*(limits.readable or ()), f"/proc/{os.getpid()}")
    writable = (*limits.devices, os.devnull, *(() if temp_dir is None else (temp_dir,)))
    restrict_self(readable, writable, signals=signals)


def _send_kill(pidfd: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it has ended
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)


def _cpu_s(pid: int) -> float:
    """Return the CPU time of a process and its reaped children; 0 if it is gone."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text(encoding="ascii")
    except OSError:
        return 0.0
    ticks = stat.rpartition(")")[2].split()[11:15]  # utime, stime, cutime, cstime: proc(5)
    return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")


# Of a confined worker and its supervisor, beside WorkerLimits.
_CONFINED_LIMITS = (
    (resource.RLIMIT_CORE, 0), (resource.RLIMIT_FSIZE, FILE_BYTES), (resource.RLIMIT_NOFILE, OPEN_FILES),
)  # fmt: skip

# Conditions of the machine that may have passed at the next attempt.
_TRANSIENT_ERRNOS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO})


def _json_bytes(value: object) -> bytes:
    return _RESULT + json.dumps(value, separators=(",", ":")).encode()


def _error_bytes(error: RollerError) -> bytes:
    return _RAISED + json.dumps(error_json(error)).encode()


def _describe_exit(code: int | None) -> str:
    if code is None:
        return "unknown status"
    if code < 0:
        return signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    return f"exit status {code}"
