"""Lanes: worker processes that take one task at a time and are replaced when they die or overrun."""

from __future__ import annotations

import contextlib
import errno
import gc
import json
import multiprocessing
import os
import pickle
import resource
import signal
import threading
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Generic, TypeVar

from roller_svc.describe import error_json, error_of
from roller_svc.errors import BuildError, FarmError, InvariantError, KernelTimeoutError, RollerError
from roller_svc.toolchain.sandbox import die_with_parent

T = TypeVar("T")
R = TypeVar("R")

STOP_S = 2.0  # what an idle worker gets to end by itself
STALLED_SHARE = 0.1  # of its time limit: a worker that ran less was not let
ANSWER_BYTES_MAX = 1 << 30
_RESULT, _RAISED, _PICKLED = b"j", b"e", b"p"


@dataclass(frozen=True, slots=True)
class JsonAnswers(Generic[R]):
    """How results travel from a worker that is not trusted: as JSON, never as a pickle.

    `decode` raises ValueError, KeyError or TypeError for a value that is no result.
    """

    encode: Callable[[R], object]
    decode: Callable[[Any], R]


class Lane(Generic[T, R]):
    """One worker process, started at its first task. `work` is a module's function; tasks are pickled.

    Results are pickled too, unless `answers` says how they become JSON; errors always are JSON.

    A worker that meets a bug reports it and ends: the next task gets a fresh one. `memory_bytes` bounds what it, and
    each process that it starts, may allocate of the host's memory.
    """

    def __init__(
        self,
        work: Callable[[T], R],
        timeout_s: float,
        memory_bytes: int | None = None,
        answers: JsonAnswers[R] | None = None,
    ) -> None:
        self._work = work
        self._timeout_s = timeout_s
        self._memory_bytes = memory_bytes
        self._answers = answers
        self._process: multiprocessing.process.BaseProcess | None = None
        self._connection: Connection | None = None

    def call(self, task: T) -> R:
        """The result of one task; raises what the work raised, KernelTimeoutError, or FarmError where it died."""
        connection = self._started()
        cpu_before_s = self._cpu_s()
        try:
            connection.send(task)
            if not connection.poll(self._timeout_s):
                used_s = self._cpu_s() - cpu_before_s
                self.close(at_once=True)
                raise self._late(used_s)
            return self._result(connection.recv_bytes(ANSWER_BYTES_MAX))
        except (EOFError, OSError) as failure:
            code = self._exit_code()
            raise FarmError(f"the worker process died ({_in_words(code)})", code="worker-lost") from failure

    def _result(self, answer: bytes) -> R:
        """What a worker sent: a byte that says what it is, and the rest."""
        kind, content = answer[:1], answer[1:]
        if kind == _PICKLED and self._answers is None:
            result: R = pickle.loads(content)
            return result
        try:
            document = json.loads(content)
            if kind == _RESULT and self._answers is not None:
                return self._answers.decode(document)
            raised = error_of(document) if kind == _RAISED else None
        except (ValueError, KeyError, TypeError, RecursionError) as failure:
            self.close(at_once=True)
            raise FarmError("the worker answered what is no result", code="worker-lost") from failure
        if raised is None or isinstance(raised, InvariantError):
            self.close(at_once=True)
        raise raised or FarmError("the worker answered what is no result", code="worker-lost")

    def _late(self, used_s: float) -> RollerError:
        """The task's fault where the worker worked; the machine's where it was not let."""
        if used_s < STALLED_SHARE * self._timeout_s:
            return FarmError(
                f"no answer in {self._timeout_s:g} s, of which the worker ran {used_s:.1f} s: the machine stalled",
                code="worker-stalled",
            )
        return KernelTimeoutError(f"no answer in {self._timeout_s:g} s: the worker was stopped")

    def _cpu_s(self) -> float:
        """Processor time of the worker and of the children that it has waited for; 0 where it is gone."""
        try:
            stat = Path(f"/proc/{self._process.pid if self._process else 0}/stat").read_text(encoding="ascii")
        except OSError:
            return 0.0
        ticks = stat.rpartition(")")[2].split()[11:15]  # utime, stime, cutime, cstime: proc(5)
        return sum(map(int, ticks)) / os.sysconf("SC_CLK_TCK")

    def close(self, *, at_once: bool = False) -> None:
        """End the worker: after its task, or at once."""
        process, connection = self._process, self._connection
        self._process = self._connection = None
        if connection is not None:
            connection.close()
        if process is not None:
            if at_once:
                process.kill()
            process.join(STOP_S)
            if process.is_alive():
                process.kill()
                process.join()

    def _started(self) -> Connection:
        if self._process is not None and self._connection is not None and self._process.is_alive():
            return self._connection
        self.close(at_once=True)
        # spawn: a fresh interpreter, with none of this process's threads, locks or sockets
        context = multiprocessing.get_context("spawn")
        ours, theirs = context.Pipe()
        arguments = (theirs, self._work, self._memory_bytes, os.getpid(), self._answers)
        process = context.Process(target=_serve, args=arguments, daemon=True)
        # Control-C reaches the whole terminal: until the worker ignores it, it must not be interrupted either
        before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            process.start()
        finally:
            signal.pthread_sigmask(signal.SIG_SETMASK, before)
        theirs.close()
        self._process, self._connection = process, ours
        return ours

    def _exit_code(self) -> int | None:
        process = self._process
        if process is None:
            return None
        process.join(STOP_S)
        code = process.exitcode
        self.close(at_once=True)
        return code


class ThreadLanes(Generic[T, R]):
    """One lane for each thread that calls."""

    def __init__(
        self,
        work: Callable[[T], R],
        timeout_s: float,
        memory_bytes: int | None = None,
        answers: JsonAnswers[R] | None = None,
    ) -> None:
        self._make: Callable[[], Lane[T, R]] = lambda: Lane(work, timeout_s, memory_bytes, answers)
        self._mine = threading.local()
        self._all: list[Lane[T, R]] = []
        self._lock = threading.Lock()

    def call(self, task: T) -> R:
        lane: Lane[T, R] | None = getattr(self._mine, "lane", None)
        if lane is None:
            lane = self._mine.lane = self._make()
            with self._lock:
                self._all.append(lane)
        return lane.call(task)

    def close(self, *, at_once: bool = False) -> None:
        with self._lock:
            lanes, self._all = self._all, []
        for lane in lanes:
            lane.close(at_once=at_once)


def spread(
    work: Callable[[T], R], tasks: Iterable[T], jobs: int, timeout_s: float
) -> Iterator[tuple[T, R | RollerError]]:
    """Every task with its result, or with the error that ended it, as they come, in `jobs` worker processes."""
    lanes: ThreadLanes[T, R] = ThreadLanes(work, timeout_s)

    def one(task: T) -> tuple[T, R | RollerError]:
        try:
            return task, lanes.call(task)
        except RollerError as error:
            return task, error

    pool = ThreadPoolExecutor(jobs)
    try:
        for future in as_completed([pool.submit(one, task) for task in tasks]):
            yield future.result()
    finally:
        pool.shutdown(wait=False, cancel_futures=True)
        lanes.close(at_once=True)


class _Reporting:
    """Sends what escapes from a task to the parent before it ends the worker."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and isinstance(error, Exception):
            where = traceback.extract_tb(trace)[-1]
            words = f"{type(error).__name__}: {error} ({Path(where.filename).name}:{where.lineno})"
            self._connection.send_bytes(_error_bytes(InvariantError(words)))


def _serve(
    connection: Connection,
    work: Callable[[T], R],
    memory_bytes: int | None,
    parent_pid: int,
    answers: JsonAnswers[R] | None,
) -> None:
    """A worker's life: tasks in, answers out, until the parent hangs up."""
    # The thread that started this process waits for its answers: it lives as long as the worker is wanted.
    die_with_parent(parent_pid)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Control-C is the parent's to handle
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    gc.collect()
    gc.freeze()  # what is imported stays: no collection need look at it
    if memory_bytes is not None:
        # Memory that can be written, not addresses: CUDA reserves more of those than a device and the host have memory
        # (unified virtual addressing). Since Linux 4.7 this counts private mappings too (setrlimit(2)).
        resource.setrlimit(resource.RLIMIT_DATA, (memory_bytes, memory_bytes))
    while True:
        try:
            task: T = connection.recv()
        except (EOFError, OSError):
            return
        with _Reporting(connection):
            try:
                result = work(task)
                answer = _PICKLED + pickle.dumps(result) if answers is None else _json_bytes(answers.encode(result))
            except RollerError as error:
                answer = _error_bytes(error)
            except MemoryError:
                limit = "" if memory_bytes is None else f": it may use {memory_bytes} bytes"
                answer = _error_bytes(
                    BuildError(f"the build needs more memory than its process has{limit}", code="out-of-memory")
                )
            except OSError as failure:
                if failure.errno not in _PASSING:
                    raise
                answer = _error_bytes(FarmError(f"the worker: {failure.strerror}", code="worker-resources"))
        with contextlib.suppress(ConnectionError):  # the parent is gone, and the next recv will say so
            connection.send_bytes(answer)


# Of the machine, which another attempt may not meet.
_PASSING = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN, errno.EIO})


def _json_bytes(value: object) -> bytes:
    return _RESULT + json.dumps(value, separators=(",", ":")).encode()


def _error_bytes(error: RollerError) -> bytes:
    return _RAISED + json.dumps(error_json(error)).encode()


def _in_words(code: int | None) -> str:
    if code is None:
        return "how is not known"
    if code < 0:
        return signal.Signals(-code).name if -code in signal.valid_signals() else f"signal {-code}"
    return f"exit status {code}"
