"""Programs to estimate → outcomes, by processes that requests share in turn and that can be stopped."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, replace
from typing import Any

from roller_svc.compiler.estimates.worker import Found, Patience, Work, error_outcome, estimate_slice
from roller_svc.errors import BuildError, FarmError, InputError, KernelTimeoutError, RollerError
from roller_svc.farm.store import Json
from roller_svc.farm.workers import JsonAnswers, ThreadLanes, WorkerLimits

CHUNK_MOST = 16  # programs in a message; a process gives back those that do not fit its slice of time
ATTEMPTS_MOST = 3  # of a program whose process dies or stalls
NICE = 5  # requests and builds go first
MEMORY_BYTES = 2 << 30  # of a process
POLL_S = 0.2  # how often a batch whose chunks wait looks whether anybody still waits for it


class Estimating:
    """`workers` processes, started by `start` or with the first batch, and kept.

    A batch has few chunks with them at any time, and the next when one is done: those of other batches come between.
    A program that has a process to itself for longer than `timeout_s` is refused.
    """

    def __init__(self, workers: int, timeout_s: float, limits: WorkerLimits = WorkerLimits()) -> None:  # noqa: B008 - frozen
        self._workers = workers
        self._timeout_s = timeout_s
        limits = replace(limits, memory_bytes=MEMORY_BYTES, nice=NICE)
        answers = JsonAnswers(_found_json, _found_of)
        self._lanes: ThreadLanes[Sequence[Work], list[Found]] = ThreadLanes(estimate_slice, timeout_s, limits, answers)
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="estimating")

    def start(self) -> None:
        """Have the processes begin with their imports; returns at once."""
        for _ in range(self._workers):
            self._threads.submit(self._lanes.call, ())

    def outcomes(self, works: Sequence[Work], patience: Patience) -> list[Found]:
        """Of each program, in order, until the patience is over."""
        batch = _Batch(works, self._workers, self._timeout_s)
        under_way: dict[Future[list[Found]], _Chunk] = {}
        try:
            while not patience.is_over and (batch.is_waiting or under_way):
                while len(under_way) <= self._workers and batch.is_waiting:
                    chunk = batch.take()
                    under_way[self._submitted(batch.works(chunk), patience)] = chunk
                done, _ = wait(under_way, min(POLL_S, patience.left_s), return_when=FIRST_COMPLETED)
                for future in done:
                    batch.settle(under_way.pop(future), future)
        finally:
            for future in under_way:
                future.cancel()
        return batch.found

    def close(self) -> None:
        """End the processes; whoever waits for outcomes gets an error."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._lanes.close(at_once=True)
        self._threads.shutdown(wait=True)

    def _submitted(self, works: tuple[Work, ...], patience: Patience) -> Future[list[Found]]:
        try:
            return self._threads.submit(lambda: [] if patience.is_over else self._lanes.call(works))
        except RuntimeError as closed:
            raise _ending() from closed


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Places of programs in a batch, and which attempt at them this is; after the first, each is alone."""

    places: tuple[int, ...]
    attempt: int = 1


class _Batch:
    """Programs of one request: what is found of them, and which are still to be taken."""

    def __init__(self, works: Sequence[Work], workers: int, timeout_s: float) -> None:
        self.found = [Found() for _ in works]
        self._works = works
        self._workers = workers
        self._timeout_s = timeout_s
        self._waiting = deque(range(len(works)))
        self._again: deque[_Chunk] = deque()

    @property
    def is_waiting(self) -> bool:
        return bool(self._waiting or self._again)

    def take(self) -> _Chunk:
        """The next programs: at the end few, so that all processes are done at once."""
        if self._again:
            return self._again.popleft()
        count = min(CHUNK_MOST, -(-len(self._waiting) // self._workers))
        return _Chunk(tuple(self._waiting.popleft() for _ in range(count)))

    def works(self, chunk: _Chunk) -> tuple[Work, ...]:
        """What is left of the programs."""
        works = (self._works[place] for place in chunk.places)
        return tuple(
            replace(work, specs=work.specs[len(self.found[place].outcomes) :])
            for place, work in zip(chunk.places, works, strict=True)
        )

    def settle(self, chunk: _Chunk, future: Future[list[Found]]) -> None:
        """Take in what a process found, or why it did not."""
        if future.cancelled():
            raise _ending()
        match future.exception():
            case None:
                self._take_in(chunk, future.result())
            case BuildError() | FarmError() as error:
                self._fail(chunk, error)
            case bug:
                raise bug

    def _take_in(self, chunk: _Chunk, parts: Sequence[Found]) -> None:
        for place, part in zip(chunk.places, parts, strict=False):
            self.found[place].add(part)
        left = [place for place in chunk.places if not self._is_done(place)]
        self._waiting.extendleft(reversed(left))

    def _is_done(self, place: int) -> bool:
        found = self.found[place]
        return found.refusal is not None or len(found.outcomes) == len(self._works[place].specs)

    def _fail(self, chunk: _Chunk, error: RollerError) -> None:
        """Try the programs again one by one; what one does alone is its error."""
        alone = len(chunk.places) == 1
        if not alone or (isinstance(error, FarmError) and chunk.attempt < ATTEMPTS_MOST):
            self._again.extend(_Chunk((place,), chunk.attempt + 1) for place in chunk.places)
            return
        found = self.found[chunk.places[0]]
        if isinstance(error, FarmError):
            found.fault = error_outcome(error)
        else:
            found.refusal = error_outcome(self._overrun() if isinstance(error, KernelTimeoutError) else error)

    def _overrun(self) -> InputError:
        return InputError(
            f"the program takes longer than {self._timeout_s:g} s to be read, checked and estimated",
            code="check-timeout",
            hint="fewer or simpler conditions and indices; ROLLER_CHECK_TIMEOUT_S is the service's limit",
        )


def _found_json(found: list[Found]) -> list[Json]:
    """What a process found, as it answers: outcomes are texts of JSON."""
    return [
        {"outcomes": [text.decode() for text in one.outcomes], "refusal": one.refusal and one.refusal.decode()}
        for one in found
    ]


def _found_of(document: Sequence[Mapping[str, Any]]) -> list[Found]:
    """What _found_json wrote. Raises AttributeError, KeyError or TypeError for what it did not."""
    return [
        Found([text.encode() for text in one["outcomes"]], None if one["refusal"] is None else one["refusal"].encode())
        for one in document
    ]


def _ending() -> FarmError:
    return FarmError("the service ends", code="shutting-down")
