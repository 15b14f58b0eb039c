"""Programs to estimate → outcomes: the thread that asks shares large batches with worker processes."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

from roller_svc.errors import FarmError, KernelTimeoutError
from roller_svc.farm.lanes import ThreadLanes, WorkerLimits
from roller_svc.farm.store import Json
from roller_svc.outcomes import Work, outcomes

LARGE = 64  # estimates in a batch below which one process is done before another has begun
# Of the programs still waiting a process takes this share of its even one in a message: fewer messages, each of which
# it waits for with nothing to do, and small ones at the end, when all should be done at once.
SHARE = 1 / 4

Outcomes = list[list[Json]]


class Estimating:
    """`helpers` processes beside the caller's thread, started by `start` or the first large batch, and kept.

    A process that dies or overruns leaves its programs to the caller.
    """

    def __init__(self, helpers: int, timeout_s: float, memory_bytes: int | None = None) -> None:
        self._helpers = helpers
        self._lanes: ThreadLanes[tuple[Work, ...], Outcomes] = ThreadLanes(
            outcomes, timeout_s, WorkerLimits(memory_bytes)
        )
        self._threads = ThreadPoolExecutor(max(1, helpers), thread_name_prefix="estimating")

    def start(self) -> None:
        """Have the processes begin with their imports; returns at once."""
        for _ in range(self._helpers):
            self._threads.submit(self._lanes.call, ())

    def outcomes(self, works: Sequence[Work]) -> Outcomes:
        """Of each program, in order: see `outcomes.outcomes`."""
        if self._helpers == 0 or sum(len(work.specs) for work in works) < LARGE:
            return outcomes(works)
        batch = _Batch(works)
        helping: list[Future[None]] = [self._threads.submit(self._help, batch) for _ in range(self._helpers)]
        while chunk := batch.taken(1):
            batch.done(chunk, outcomes(batch.works(chunk)))
        for one in helping:
            if not one.cancel():  # one that waits behind another batch has nothing left to do here
                one.result()
        while chunk := batch.taken(1):  # what a helper gave back
            batch.done(chunk, outcomes(batch.works(chunk)))
        return batch.found

    def close(self) -> None:
        self._lanes.close(at_once=True)
        self._threads.shutdown(wait=True, cancel_futures=True)

    def _help(self, batch: _Batch) -> None:
        """One process's share of a batch."""
        while chunk := batch.taken(round(SHARE * batch.waiting / (self._helpers + 1))):
            try:
                batch.done(chunk, self._lanes.call(batch.works(chunk)))
            except (FarmError, KernelTimeoutError):
                batch.give_back(chunk)
                return


class _Batch:
    """Programs, which of them are still to be taken, and the outcomes of the others."""

    def __init__(self, works: Sequence[Work]) -> None:
        self.found: Outcomes = [[] for _ in works]
        self._works = works
        # long programs first, so that nobody has one left when all else is done
        self._waiting = deque(sorted(range(len(works)), key=lambda i: -len(works[i].program.statements)))
        self._lock = threading.Lock()

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    def taken(self, most: int) -> tuple[int, ...]:
        """Places of the next programs, one at least; none are left where it is empty."""
        with self._lock:
            return tuple(self._waiting.popleft() for _ in range(min(max(1, most), len(self._waiting))))

    def give_back(self, places: tuple[int, ...]) -> None:
        with self._lock:
            self._waiting.extend(places)

    def works(self, places: tuple[int, ...]) -> tuple[Work, ...]:
        return tuple(self._works[place] for place in places)

    def done(self, places: tuple[int, ...], found: Outcomes) -> None:
        for place, outcome in zip(places, found, strict=True):
            self.found[place] = outcome
