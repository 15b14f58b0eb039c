"""Worker processes with bounded waits: a process stuck in the driver costs one worker, not the run."""

from __future__ import annotations

import contextlib
import multiprocessing
import multiprocessing.process
import queue
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Set
from typing import Generic, TypeVar

from roller_svc.errors import KernelTimeoutError, RollerError
from roller_svc.farm.workers import WorkerProcess

T = TypeVar("T")
R = TypeVar("R")

STUCK_S = 8.0  # after a task's time limit, until its worker is abandoned
STOP_S = 3.0  # for killed processes to exit
_POLL_S = 0.05
_IDLE_POLLS = 5  # consecutive polls without a process before all count as stopped


class BoundedWorker(Generic[T, R]):
    """A worker process that is abandoned if it neither responds nor exits; the next task gets a new one."""

    def __init__(self, work: Callable[[T], R], timeout_s: float) -> None:
        self._make: Callable[[], WorkerProcess[T, R]] = lambda: WorkerProcess(work, timeout_s)
        self._timeout_s = timeout_s
        self._worker: WorkerProcess[T, R] | None = None

    def call(self, task: T, until: float = float("inf")) -> R:
        """Return the result of a task, or raise what the work raised.

        Raises BuildServiceError where the worker is lost, and KernelTimeoutError at `until` (monotonic) at the latest.
        """
        worker = self._worker or self._make()
        self._worker = None  # set again once it responds
        answers = queue.SimpleQueue[R | RollerError]()
        _background(lambda: answers.put(_answer(worker.call, task)))
        try:
            answer = answers.get(timeout=max(0.0, min(self._timeout_s + STUCK_S, until - time.monotonic())))
        except queue.Empty:
            raise KernelTimeoutError("the worker neither responded nor exited in time and was abandoned") from None
        self._worker = worker
        if isinstance(answer, RollerError):
            raise answer
        return answer

    def close(self) -> None:
        """Stop the worker. If it is still busy, `end_processes` kills it."""
        worker, self._worker = self._worker, None
        if worker is not None:
            _background(lambda: worker.close(kill=True)).join(STOP_S)


class BoundedPool(Generic[T, R]):
    """A pool of bounded workers that returns results in order of completion."""

    def __init__(self, work: Callable[[T], R], jobs: int, timeout_s: float) -> None:
        self._tasks = queue.SimpleQueue[T]()
        self._results = queue.SimpleQueue[tuple[T, R | RollerError]]()
        self._work, self._timeout_s, self._jobs = work, timeout_s, jobs
        self._serving = 0
        self._closed = threading.Event()
        self.pending = 0

    def submit(self, task: T) -> None:
        self.pending += 1
        self._tasks.put(task)
        if self._serving < min(self._jobs, self.pending):
            self._serving += 1
            _background(self._serve)

    def next(self, until: float) -> tuple[T, R | RollerError] | None:
        """Return a finished task with its result or error, or None if none finishes by `until` (monotonic)."""
        try:
            result = self._results.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            return None
        self.pending -= 1
        return result

    def close(self) -> None:
        """Stop starting tasks. Busy workers finish theirs unless `end_processes` kills them."""
        self._closed.set()

    def _serve(self) -> None:
        worker = BoundedWorker(self._work, self._timeout_s)
        while not self._closed.is_set():
            with contextlib.suppress(queue.Empty):
                task = self._tasks.get(timeout=_POLL_S)
                try:
                    answer: R | RollerError = worker.call(task)
                except RollerError as error:
                    answer = error
                self._results.put((task, answer))
        worker.close()


def map_unordered(
    work: Callable[[T], R], tasks: Iterable[T], jobs: int, timeout_s: float, until: float
) -> Iterator[tuple[T, R | RollerError]]:
    """Yield each task with its result or error in order of completion, until `until` (monotonic)."""
    pool: BoundedPool[T, R] = BoundedPool(work, jobs, timeout_s)
    if time.monotonic() >= until:
        return
    try:
        for task in tasks:
            pool.submit(task)
        while pool.pending and (result := pool.next(until)) is not None:
            yield result
    finally:
        pool.close()


def running_workers() -> set[multiprocessing.process.BaseProcess]:
    """Return the running child processes."""
    return set(multiprocessing.active_children())


def end_processes(spared: Set[multiprocessing.process.BaseProcess] = frozenset()) -> bool:
    """Kill all other workers, also replacements that start meanwhile; return whether all exited in time."""
    until, idle_polls = time.monotonic() + STOP_S, 0
    while idle_polls < _IDLE_POLLS and time.monotonic() < until:
        running = running_workers() - spared
        idle_polls = 0 if running else idle_polls + 1
        for process in running:
            process.kill()
        time.sleep(_POLL_S)
    return idle_polls == _IDLE_POLLS


def _answer(call: Callable[[T], R], task: T) -> R | RollerError:
    try:
        return call(task)
    except RollerError as error:
        return error


def _background(work: Callable[[], object]) -> threading.Thread:
    """Start a daemon thread."""
    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    return thread
