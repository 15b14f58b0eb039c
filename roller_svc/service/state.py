"""What the routes work with: settings, the store, the queue, and how to get at them from a request."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TypeVar, cast

from fastapi import Request

from roller_svc.compiler.estimates.batch import EstimateCache
from roller_svc.compiler.estimates.worker import Deadline
from roller_svc.errors import BuildServiceError, QueueFullError
from roller_svc.farm.operations import JobQueue, Operation
from roller_svc.farm.store import Store
from roller_svc.ir.report import BuildRequest
from roller_svc.service.disassembly import ListingCache
from roller_svc.settings import Settings

T = TypeVar("T")

DISCONNECT_POLL_S = 2.0  # how often it is seen whether a client that waits is still there
MAX_WAITING_ESTIMATES = 16  # requests for estimates, those that are worked on counted
LARGE_REQUEST_PLANS = 64  # from which on a request for estimates is large: its answer takes memory


@dataclass(slots=True)
class State:
    """What the routes work with.

    `texts` makes PTX and SASS. Threads: `compute` reads the store, `submissions` waits for requests to be checked,
    unless the service `knows` them, `batches` waits for estimates, of few `large` requests at a time.

    `is_ending` becomes true once, at the beginning of a shutdown.
    """

    settings: Settings
    store: Store
    listings: ListingCache
    queue: JobQueue
    compute: ThreadPoolExecutor
    submissions: ThreadPoolExecutor
    is_cached: Callable[[BuildRequest], bool]
    batches: ThreadPoolExecutor
    large_requests: asyncio.Semaphore
    estimate_cache: EstimateCache
    is_ending: bool = False
    estimates_waiting: int = 0
    _waiters: set[asyncio.Event] = field(default_factory=set)

    async def run(self, work: Callable[[], T]) -> T:
        """The work's result, from a thread of `compute`: what touches the disk or takes milliseconds."""
        return await asyncio.get_running_loop().run_in_executor(self.compute, work)

    async def submit(self, request: BuildRequest, client: str) -> Operation:
        """A new operation; one that is known waits for no other's check. Raises the request's InputError."""
        pool = self.compute if self.is_cached(request) else self.submissions
        return await asyncio.get_running_loop().run_in_executor(pool, self.queue.submit, request, client)

    def begin_shutdown(self) -> None:
        """Wake whoever waits for an operation: it is answered as it is now. To be called on the event loop."""
        self.is_ending = True
        for event in self._waiters:
            event.set()

    async def wait(self, operation: Operation, request: Request, seconds: float) -> Operation:
        """The operation as it is when it ended, or after that many seconds, a hang-up or the start of a shutdown."""
        if operation.done or seconds <= 0 or self.is_ending:
            return operation
        loop, event = asyncio.get_running_loop(), asyncio.Event()
        deadline_s = loop.time() + seconds

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the loop has ended
                loop.call_soon_threadsafe(event.set)

        self._waiters.add(event)
        self.queue.watch(operation.id, wake)
        try:
            while not event.is_set() and (remaining_s := deadline_s - loop.time()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), min(remaining_s, DISCONNECT_POLL_S))
                if not event.is_set() and await request.is_disconnected():
                    break
        finally:
            self.queue.unwatch(operation.id, wake)
            self._waiters.discard(event)
        return await self.run(lambda: self.queue.get(operation.id)) or operation

    async def estimate(self, work: Callable[[], T], plans: int, deadline: Deadline, request: Request) -> T | None:
        """The result of work that waits for that many plans; None where the client hung up, which ends the patience.

        Raises QueueFullError where too many requests for estimates wait, and BuildServiceError where the service ends.
        """
        with self._admit_estimate():
            task = asyncio.ensure_future(self._estimate(work, is_large=plans >= LARGE_REQUEST_PLANS))
            try:
                while not task.done():
                    await asyncio.wait({task}, timeout=DISCONNECT_POLL_S)
                    if not task.done() and self.is_ending:
                        raise BuildServiceError("the service ends", code="shutting-down")
                    if not task.done() and await request.is_disconnected():
                        return None
                return task.result()
            finally:
                deadline.expire()
                task.cancel()

    async def _estimate(self, work: Callable[[], T], *, is_large: bool) -> T:
        async with self.large_requests if is_large else contextlib.nullcontext():
            return await asyncio.get_running_loop().run_in_executor(self.batches, work)

    @contextlib.contextmanager
    def _admit_estimate(self) -> Iterator[None]:
        """A place among the requests for estimates."""
        if self.estimates_waiting >= MAX_WAITING_ESTIMATES:
            raise QueueFullError(f"{MAX_WAITING_ESTIMATES} requests for estimates are waiting; try again later")
        self.estimates_waiting += 1
        try:
            yield
        finally:
            self.estimates_waiting -= 1


def state_of(request: Request) -> State:
    return cast(State, request.app.state.roller)
