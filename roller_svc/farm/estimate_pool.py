"""Programs to estimate → outcomes, by processes that requests share in turn and that can be stopped."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from roller_svc.compiler.estimates.worker import Deadline, EstimateResult, EstimateTask, error_result, estimate_slice
from roller_svc.errors import BuildError, BuildServiceError, InputError, KernelTimeoutError, RollerError
from roller_svc.farm.store import Json
from roller_svc.farm.workers import JsonCodec, WorkerLimits, WorkerPool

MAX_CHUNK = 16  # programs in a message; a process gives back those that do not fit its slice of time
MAX_ATTEMPTS = 3  # of a program whose process dies or stalls
NICE = 5  # requests and builds go first
MEMORY_BYTES = 2 << 30  # of a process
POLL_S = 0.2  # how often a batch whose chunks wait looks whether anybody still waits for it


class EstimatePool:
    """`workers` processes, started by `start` or with the first batch, and kept.

    A batch has few chunks with them at any time, and the next when one is done: those of other batches come between.
    A program that has a process to itself for longer than `timeout_s` is refused.
    """

    def __init__(self, workers: int, timeout_s: float, limits: WorkerLimits = WorkerLimits()) -> None:  # noqa: B008 - frozen
        self._worker_count = workers
        self._timeout_s = timeout_s
        limits = replace(limits, memory_bytes=MEMORY_BYTES, nice=NICE)
        codec = JsonCodec(_results_json, _parse_results)
        self._workers: WorkerPool[Sequence[EstimateTask], list[EstimateResult]] = WorkerPool(
            estimate_slice, timeout_s, limits, codec
        )
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="estimating")

    def start(self) -> None:
        """Have the processes begin with their imports; returns at once."""
        for _ in range(self._worker_count):
            self._threads.submit(self._workers.call, ())

    def estimate(self, tasks: Sequence[EstimateTask], deadline: Deadline) -> list[EstimateResult]:
        """Of each program, in order, until the patience is over."""
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
        """End the processes; whoever waits for outcomes gets an error."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._workers.close(kill=True)
        self._threads.shutdown(wait=True)

    def _submit(self, tasks: tuple[EstimateTask, ...], deadline: Deadline) -> Future[list[EstimateResult]]:
        try:
            return self._threads.submit(lambda: [] if deadline.has_passed else self._workers.call(tasks))
        except RuntimeError as closed:
            raise _shutting_down() from closed


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Places of programs in a batch, and which attempt at them this is; after the first, each is alone."""

    positions: tuple[int, ...]
    attempt: int = 1


class _Batch:
    """Programs of one request: what is found of them, and which are still to be taken."""

    def __init__(self, tasks: Sequence[EstimateTask], workers: int, timeout_s: float) -> None:
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
        """The next programs: at the end few, so that all processes are done at once."""
        if self._retries:
            return self._retries.popleft()
        count = min(MAX_CHUNK, -(-len(self._pending) // self._workers))
        return _Chunk(tuple(self._pending.popleft() for _ in range(count)))

    def remaining_tasks(self, chunk: _Chunk) -> tuple[EstimateTask, ...]:
        """What is left of the programs."""
        tasks = (self._tasks[position] for position in chunk.positions)
        return tuple(
            replace(task, specs=task.specs[len(self.results[place].device_results) :])
            for place, task in zip(chunk.positions, tasks, strict=True)
        )

    def complete(self, chunk: _Chunk, future: Future[list[EstimateResult]]) -> None:
        """Take in what a process found, or why it did not."""
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
        left = [place for place in chunk.positions if not self._is_done(place)]
        self._pending.extendleft(reversed(left))

    def _is_done(self, position: int) -> bool:
        result = self.results[position]
        return result.rejection is not None or len(result.device_results) == len(self._tasks[position].specs)

    def _retry_or_fail(self, chunk: _Chunk, error: RollerError) -> None:
        """Try the programs again one by one; what one does alone is its error."""
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
            hint="fewer or simpler conditions and indices; ROLLER_CHECK_TIMEOUT_S is the service's limit",
        )


def _results_json(results: list[EstimateResult]) -> list[Json]:
    """What a process found, as it answers: outcomes are texts of JSON."""
    return [
        {
            "outcomes": [text.decode() for text in result.device_results],
            "refusal": result.rejection and result.rejection.decode(),
        }
        for result in results
    ]


def _parse_results(document: Sequence[Mapping[str, Any]]) -> list[EstimateResult]:
    """What _found_json wrote. Raises AttributeError, KeyError or TypeError for what it did not."""
    return [
        EstimateResult(
            [text.encode() for text in result["outcomes"]],
            None if result["refusal"] is None else result["refusal"].encode(),
        )
        for result in document
    ]


def _shutting_down() -> BuildServiceError:
    return BuildServiceError("the service ends", code="shutting-down")
