"""State shared by the routes: settings, store, queue and thread pools."""

from __future__ import annotations

import asyncio
import contextlib
import contextvars
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from fastapi import Depends, Request

from roller_svc.compiler.estimates.batch import EstimateCache
from roller_svc.compiler.estimates.worker import Deadline
from roller_svc.errors import BuildServiceError
from roller_svc.farm.actions import Explanation
from roller_svc.farm.checking import CheckedSchedule, ScheduleChecker, ScheduleTask
from roller_svc.farm.farm import BuildFarm, Terms
from roller_svc.farm.idempotency import IdempotencyKeys
from roller_svc.farm.models import Request as FarmRequest
from roller_svc.farm.operations import Operation, action_of_hit
from roller_svc.farm.store import Store
from roller_svc.ir.report import BuildRequest
from roller_svc.service.access import principal_of
from roller_svc.service.authentication import Authenticator
from roller_svc.service.disassembly import ListingCache
from roller_svc.service.hits import HitAnswers
from roller_svc.service.metrics import Metrics
from roller_svc.service.model_builds import ModelBuilds
from roller_svc.service.readiness import Readiness
from roller_svc.service.shares import Share, Shares
from roller_svc.settings import Resource, Settings

if TYPE_CHECKING:
    from roller_svc.service.tracing import Tracing

T = TypeVar("T")

DISCONNECT_POLL_S = 2.0  # how often a waiting request checks for a disconnected client
LARGE_REQUEST_PLANS = 64  # estimate requests of this many plans are large: their responses take memory


@dataclass(slots=True)
class State:
    """State shared by the routes."""

    settings: Settings
    store: Store
    listings: ListingCache
    farm: BuildFarm
    compute: ThreadPoolExecutor  # uses the store, but not the database
    queries: ThreadPoolExecutor  # uses the database, which may be locked
    submissions: ThreadPoolExecutor  # waits for requests to be validated
    is_cached: Callable[[BuildRequest], bool]  # whether a request has been validated
    schedule_checker: ScheduleChecker
    batches: ThreadPoolExecutor  # waits for estimates
    estimate_cache: EstimateCache
    models: ModelBuilds
    model_estimates: ThreadPoolExecutor  # waits for estimates of models
    idempotency: IdempotencyKeys
    authenticator: Authenticator
    readiness: Readiness
    hits: HitAnswers
    shares: Shares
    metrics: Metrics
    tracing: Tracing | None = None
    is_ending: bool = False  # set when a shutdown begins
    _waiters: set[asyncio.Event] = field(default_factory=set)

    @property
    def is_open(self) -> bool:
        """Whether clients need no key."""
        return self.authenticator.is_open

    async def run(self, work: Callable[[], T]) -> T:
        """Run work that uses the store or takes milliseconds in a thread of `compute`."""
        return await run_in(self.compute, work)

    async def query(self, work: Callable[[], T]) -> T:
        """Run work that uses the database in a thread of `queries`, so that nothing else waits for a locked one."""
        return await run_in(self.queries, work)

    async def find(self, operation_id: str) -> Operation | None:
        """Return an operation or None. A hit is in the store and needs no database."""
        run = self.query if action_of_hit(operation_id) is None else self.run
        return await run(lambda: self.farm.get(operation_id))

    async def submit(self, request: FarmRequest, terms: Terms) -> Operation:
        """Create an operation; a validated request does not wait for others' validations. Raises InputError."""
        operation = await self._check(request, terms.client, self.compute, lambda: self.farm.find_hit(request))
        if operation is None:
            operation = await self.query(lambda: self.farm.submit(request, terms))
        self.metrics.count(operation.cache)
        return operation

    def response_share(self, request: Request) -> Share:
        """Return the client's share of the bytes of responses in memory, of which nothing is used yet."""
        return self.shares.hold(Resource.RESPONSE_BYTES, principal_of(request).client, 0)

    async def explain(self, request: BuildRequest, client: str) -> Explanation:
        """Compare a request with the stored actions; a validated one does not wait for others' validations."""
        return await self._check(request, client, self.queries, lambda: self.farm.explain(request))

    async def _check(self, request: FarmRequest, client: str, pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
        """Run work on a request in a pool if it is validated; a client's validations wait for each other before that."""
        if not isinstance(request, BuildRequest) or self.is_cached(request):
            return await run_in(pool, work)
        with await self.shares.wait_for(Resource.CHECKS, client):
            return await run_in(self.submissions, work)

    async def check_schedule(self, task: ScheduleTask, client: str) -> CheckedSchedule:
        """Check a schedule; a client's checks wait for each other. Raises InputError."""
        with await self.shares.wait_for(Resource.CHECKS, client):
            return await run_in(self.submissions, lambda: self.schedule_checker.check(task))

    def begin_shutdown(self) -> None:
        """Wake the requests that wait for operations, which respond with the current state. Call on the event loop."""
        self.is_ending = True
        for event in self._waiters:
            event.set()

    async def wait(self, operation: Operation, request: Request, seconds: float) -> Operation:
        """Wait until the operation is done, the time is up, the client disconnects or the service shuts down.

        Raises QueueFullError if too many requests of the client, or of all clients, wait.
        """
        if seconds <= 0 or operation.done:
            return operation
        deadline_s, latest, in_time = asyncio.get_running_loop().time() + seconds, operation, True
        with self.shares.hold(Resource.WAITS, principal_of(request).client):
            while in_time and not latest.done and not self.is_ending:
                in_time = await self._is_woken(operation.id, request, deadline_s)
                known: Operation | None = await self.query(lambda: self.farm.get(operation.id))
                latest = operation if known is None else replace(known, cache=operation.cache)
        return latest

    async def _is_woken(self, operation_id: str, request: Request, deadline_s: float) -> bool:
        """Return whether the farm reports the operation before the deadline, and before the client disconnects."""
        loop = asyncio.get_running_loop()
        with self.watch(operation_id) as event:
            while not event.is_set() and (remaining_s := deadline_s - loop.time()) > 0:
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(event.wait(), min(remaining_s, DISCONNECT_POLL_S))
                if not event.is_set() and await request.is_disconnected():
                    break
            return event.is_set() and loop.time() < deadline_s

    @contextlib.contextmanager
    def watch(self, operation_id: str) -> Iterator[asyncio.Event]:
        """Give an event that is set when the operation is done or a shutdown begins."""
        loop, event = asyncio.get_running_loop(), asyncio.Event()

        def wake() -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(event.set)

        self._waiters.add(event)
        self.farm.watch(operation_id, wake)
        try:
            yield event
        finally:
            self.farm.unwatch(operation_id, wake)
            self._waiters.discard(event)

    async def estimate(self, work: Callable[[], T], plans: int, deadline: Deadline, request: Request) -> T | None:
        """Run an estimate request of `plans` plans; return None if the client disconnects, which ends the deadline.

        Raises QueueFullError if too many estimate requests wait, and BuildServiceError if the service shuts down.
        """
        client, large = principal_of(request).client, plans >= LARGE_REQUEST_PLANS
        try:
            with self.shares.hold(Resource.ESTIMATES, client):
                return await self._result(lambda: self._estimate(work, client, is_large=large), request)
        finally:
            deadline.expire()

    async def estimate_model(self, work: Callable[[], T], request: Request) -> T | None:
        """Run an estimate of a model; return None if the client disconnects. Raises as `estimate` does.

        The client's place is used until the work ends, which a client that disconnects does not end.
        """
        loop = asyncio.get_running_loop()
        share = self.shares.hold(Resource.MODEL_ESTIMATES, principal_of(request).client)
        try:
            running = self.model_estimates.submit(work)
        except RuntimeError:  # a shutdown
            share.close()
            raise

        def give_back(_: object) -> None:
            with contextlib.suppress(RuntimeError):  # the event loop has ended
                loop.call_soon_threadsafe(share.close)

        async def result() -> T:
            return await asyncio.wrap_future(running)

        running.add_done_callback(give_back)
        return await self._result(result, request)

    async def _result(self, work: Callable[[], Coroutine[Any, Any, T]], request: Request) -> T | None:
        """Return the result of an estimate; None if the client disconnects."""
        task = asyncio.ensure_future(work())
        try:
            while not task.done():
                await asyncio.wait({task}, timeout=DISCONNECT_POLL_S)
                if not task.done() and self.is_ending:
                    raise BuildServiceError("the service is shutting down", code="shutting-down")
                if not task.done() and await request.is_disconnected():
                    return None
            return task.result()
        finally:
            task.cancel()

    async def _estimate(self, work: Callable[[], T], client: str, *, is_large: bool) -> T:
        with await self.shares.wait_for(Resource.LARGE_ESTIMATES, client) if is_large else contextlib.nullcontext():
            return await asyncio.get_running_loop().run_in_executor(self.batches, work)


async def run_in(pool: ThreadPoolExecutor, work: Callable[[], T]) -> T:
    """Run work in a thread of a pool, with the context of this request."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(pool, lambda: context.run(work))


def state_of(request: Request) -> State:
    return cast(State, request.app.state.roller)


def needs_place(resource: Resource) -> Any:
    """Return the dependency of a route that refuses a client without a place before its body is validated."""

    async def check(request: Request) -> None:
        state_of(request).shares.check(resource, principal_of(request).client)

    return Depends(check)
