"""Pool of estimate workers: processes with a time limit that serve concurrent requests round-robin."""

from __future__ import annotations

import itertools
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from roller_svc.compiler.estimates.worker import Deadline, EstimateResult, Task, error_result, estimate_slice
from roller_svc.errors import BuildError, BuildServiceError, InputError, KernelTimeoutError, RollerError
from roller_svc.farm.store import Json
from roller_svc.farm.workers import JsonCodec, WorkerLimits, WorkerPool

MAX_CHUNK = 16  # programs per message; a worker returns those that do not fit its time slice
MAX_ATTEMPTS = 3  # for a program whose worker dies or stalls
NICE = 5  # below requests and builds
MEMORY_BYTES = 2 << 30  # limit of one worker process
POLL_S = 0.2  # how often a waiting batch checks its deadline

Work = Callable[[], list[EstimateResult]]


class EstimatePool:
    """Run batches of estimates in `workers` processes, started by `start` or by the first batch.

    Clients take turns. A batch submits at most `workers + 1` chunks at a time, so concurrent batches of one client
    interleave. A program that takes longer than `timeout_s` in a process of its own is rejected.
    """

    def __init__(self, workers: int, timeout_s: float, limits: WorkerLimits = WorkerLimits()) -> None:
        self._worker_count = workers
        self._timeout_s = timeout_s
        limits = replace(limits, memory_bytes=MEMORY_BYTES, nice=NICE)
        codec = JsonCodec(_results_json, _parse_results)
        self._workers: WorkerPool[Sequence[Task], list[EstimateResult]] = WorkerPool(estimate_slice, timeout_s, limits, codec)
        self._threads = _FairThreads(workers)

    def start(self) -> None:
        """Start the imports of the worker processes; do not wait for them."""
        for _ in range(self._worker_count):
            self._threads.submit("", lambda: self._workers.call(()))

    def estimate(self, tasks: Sequence[Task], deadline: Deadline) -> list[EstimateResult]:
        """Return the results of the tasks, in order, as far as the deadline allows."""
        batch = _Batch(tasks, self._worker_count, self._timeout_s)
        running: dict[Future[list[EstimateResult]], _Chunk] = {}
        try:
            while not deadline.has_passed and (batch.has_pending or running):
                while len(running) <= self._worker_count and batch.has_pending:
                    chunk = batch.take()
                    running[self._submit(batch.remaining_tasks(chunk), deadline)] = chunk
                done, _ = wait(running, min(POLL_S, deadline.remaining_s), return_when=FIRST_COMPLETED)
                for future in done:
                    batch.complete(running.pop(future), future)
        finally:
            for future in running:
                future.cancel()
        return batch.results

    def close(self) -> None:
        """Kill the worker processes; callers of `estimate` get an error."""
        self._threads.cancel()
        self._workers.close(kill=True)
        self._threads.join()

    def _submit(self, tasks: tuple[Task, ...], deadline: Deadline) -> Future[list[EstimateResult]]:
        try:
            return self._threads.submit(deadline.client, lambda: [] if deadline.has_passed else self._workers.call(tasks))
        except RuntimeError as closed:
            raise _shutting_down() from closed


class _FairThreads:
    """Threads that take the work of clients in turn."""

    def __init__(self, count: int) -> None:
        self._threads = ThreadPoolExecutor(count, thread_name_prefix="estimating")
        self._lock = threading.Lock()
        self._waiting: dict[str, deque[tuple[Future[list[EstimateResult]], Work]]] = {}

    def submit(self, client: str, work: Work) -> Future[list[EstimateResult]]:
        """Run work after what other clients submitted before. Raises RuntimeError if the threads have ended."""
        future: Future[list[EstimateResult]] = Future()
        with self._lock:
            self._threads.submit(self._run_next)
            self._waiting.setdefault(client, deque()).append((future, work))
        return future

    def cancel(self) -> None:
        """Take nothing more."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        with self._lock:
            for future, _ in itertools.chain(*self._waiting.values()):
                future.cancel()

    def join(self) -> None:
        self._threads.shutdown(wait=True)

    def _run_next(self) -> None:
        with self._lock:
            client, queue = next(iter(self._waiting.items()))
            future, work = queue.popleft()
            del self._waiting[client]
            if queue:
                self._waiting[client] = queue  # after the others
        if future.set_running_or_notify_cancel():
            try:
                future.set_result(work())
            except BaseException as error:  # noqa: BLE001 - the caller of `estimate` handles or raises it
                future.set_exception(error)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Positions of programs in a batch. From the second attempt on a chunk has a single program."""

    positions: tuple[int, ...]
    attempt: int = 1


class _Batch:
    """The tasks of one request, their results so far, and the queue of those still to run."""

    def __init__(self, tasks: Sequence[Task], workers: int, timeout_s: float) -> None:
        self.results = [EstimateResult() for _ in tasks]
        self._tasks = tasks
        self._workers = workers
        self._timeout_s = timeout_s
        self._pending = deque(range(len(tasks)))
        self._retries: deque[_Chunk] = deque()

    @property
    def has_pending(self) -> bool:
        return bool(self._pending or self._retries)

    def take(self) -> _Chunk:
        """Return the next chunk. The last ones are small, so that all workers finish together."""
        if self._retries:
            return self._retries.popleft()
        count = min(MAX_CHUNK, -(-len(self._pending) // self._workers))
        return _Chunk(tuple(self._pending.popleft() for _ in range(count)))

    def remaining_tasks(self, chunk: _Chunk) -> tuple[Task, ...]:
        """Return the tasks of a chunk, without the devices that already have a result."""
        tasks = (self._tasks[position] for position in chunk.positions)
        return tuple(
            replace(task, specs=task.specs[len(self.results[position].device_results) :])
            for position, task in zip(chunk.positions, tasks, strict=True)
        )

    def complete(self, chunk: _Chunk, future: Future[list[EstimateResult]]) -> None:
        """Record the results or the error of a chunk."""
        if future.cancelled():
            raise _shutting_down()
        match future.exception():
            case None:
                self._add_results(chunk, future.result())
            case BuildError() | BuildServiceError() as error:
                self._retry_or_fail(chunk, error)
            case bug:
                raise bug

    def _add_results(self, chunk: _Chunk, results: Sequence[EstimateResult]) -> None:
        for position, result in zip(chunk.positions, results, strict=False):
            self.results[position].extend(result)
        unfinished = [position for position in chunk.positions if not self._is_done(position)]
        self._pending.extendleft(reversed(unfinished))

    def _is_done(self, position: int) -> bool:
        result = self.results[position]
        return result.rejection is not None or len(result.device_results) == len(self._tasks[position].specs)

    def _retry_or_fail(self, chunk: _Chunk, error: RollerError) -> None:
        """Retry the programs one by one; the error of a single program becomes its result."""
        is_single = len(chunk.positions) == 1
        if not is_single or (isinstance(error, BuildServiceError) and chunk.attempt < MAX_ATTEMPTS):
            self._retries.extend(_Chunk((position,), chunk.attempt + 1) for position in chunk.positions)
            return
        result = self.results[chunk.positions[0]]
        if isinstance(error, BuildServiceError):
            result.transient_error = error_result(error)
        else:
            result.rejection = error_result(self._timeout_error() if isinstance(error, KernelTimeoutError) else error)

    def _timeout_error(self) -> InputError:
        return InputError(
            f"the program takes longer than {self._timeout_s:g} s to be read, checked and estimated",
            code="check-timeout",
            hint="fewer or simpler conditions and indices, or fewer steps; ROLLER_CHECK_TIMEOUT_S is the service's limit",
        )


def _results_json(results: list[EstimateResult]) -> list[Json]:
    """Encode the results of a worker; device results are already JSON text."""
    return [
        {
            "results": [text.decode() for text in result.device_results],
            "rejection": result.rejection and result.rejection.decode(),
        }
        for result in results
    ]


def _parse_results(document: Sequence[Mapping[str, Any]]) -> list[EstimateResult]:
    """Decode _results_json. Raises AttributeError, KeyError or TypeError if the document is malformed."""
    return [
        EstimateResult(
            [text.encode() for text in result["results"]],
            None if result["rejection"] is None else result["rejection"].encode(),
        )
        for result in document
    ]


def _shutting_down() -> BuildServiceError:
    return BuildServiceError("the service is shutting down", code="shutting-down")
