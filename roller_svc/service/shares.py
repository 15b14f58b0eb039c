"""Shares: how much each client uses now of what a service has a finite amount of.

The limits are a table of the settings. A client beyond its part gets QuotaExceededError (429), whoever meets a resource
that is used up QueueFullError (503). A service without keys has one client, whose part is everything.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Callable, Mapping
from contextvars import ContextVar
from types import TracebackType

from roller_svc.errors import QueueFullError, QuotaExceededError
from roller_svc.settings import Limit, Resource

ANONYMOUS = ""  # the client of a service without keys

_WORDS: Mapping[Resource, str] = {
    Resource.CONNECTIONS: "requests in progress",
    Resource.PROBES: "probes in progress",
    Resource.WAITS: "requests that wait for operations",
    Resource.STREAMS: "event streams",
    Resource.UPLOADS: "uploads in progress",
    Resource.BATCHES: "batches in progress",
    Resource.ESTIMATES: "estimate requests in progress",
    Resource.MODEL_ESTIMATES: "estimates of models in progress",
    Resource.BODY_BYTES: "bytes of request bodies in memory",
    Resource.RESPONSE_BYTES: "bytes of responses in memory",
}
_CODES = {Resource.CONNECTIONS: "too-many-connections", Resource.BODY_BYTES: "too-many-bodies"}  # of 503; else queue-full
CountRefusal = Callable[[Resource, int], None]
_processing: ContextVar[Share | None] = ContextVar("processing", default=None)  # of the current request


class Shares:
    """Counts what clients use. Used on the event loop only.

    Args:
        limits: of each resource.
        count_refusal: counts a request that exceeds a limit, with its status.
    """

    def __init__(self, limits: Mapping[Resource, Limit], count_refusal: CountRefusal = lambda resource, status: None) -> None:
        self.limits = dict(limits)
        self._used: dict[Resource, Counter[str]] = {resource: Counter() for resource in limits}
        self._totals: Counter[Resource] = Counter()
        self._waiting: dict[Resource, dict[str, deque[asyncio.Future[None]]]] = {resource: {} for resource in limits}
        self._count_refusal = count_refusal

    def part_of(self, resource: Resource, client: str) -> int | None:
        """Return how much one client may use; None: no limit."""
        limit = self.limits[resource]
        return limit.total if client == ANONYMOUS else limit.each

    def used(self, resource: Resource) -> int:
        """Return how much all clients use now."""
        return self._totals[resource]

    def hold(self, resource: Resource, client: str, amount: int = 1) -> Share:
        """Use an amount until the share is closed. Raises QuotaExceededError or QueueFullError."""
        end_processing()
        share = Share(self, resource, client)
        share.add(amount)
        return share

    def check(self, resource: Resource, client: str, amount: int = 1) -> None:
        """Raise QuotaExceededError or QueueFullError if `hold` would, before there is any work."""
        if not self._fits(resource, client, amount):
            refusal = self._refusal(resource, client, amount)
            self._count_refusal(resource, 429 if isinstance(refusal, QuotaExceededError) else 503)
            raise refusal

    async def wait_for(self, resource: Resource, client: str) -> Share:
        """Use one place as soon as there is one. The client that uses the fewest is next.

        Of two that use as many, one that has not just had a place is next, then the one that waits longest.
        """
        end_processing()
        if not self._fits(resource, client, 1):
            await self._wait_in_line(resource, client)
        else:
            self._count(resource, client, 1)
        return Share(self, resource, client, 1)

    async def process(self, client: str) -> Share:
        """Wait until a request may be processed.

        Its place is given back when the request holds something else that is finite, or waits for it.
        """
        share = await self.wait_for(Resource.REQUESTS, client)
        _processing.set(share)
        return share

    async def _wait_in_line(self, resource: Resource, client: str) -> None:
        """Wait until another request gives a place to this one."""
        admitted = asyncio.get_running_loop().create_future()
        line = self._waiting[resource]
        line.setdefault(client, deque()).append(admitted)
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.cancelled():
                line[client].remove(admitted)
                if not line[client]:
                    del line[client]
                self._admit(resource, client)
            else:
                self._give_back(resource, client, 1)
            raise

    def _take(self, resource: Resource, client: str, amount: int) -> None:
        self.check(resource, client, amount)
        self._count(resource, client, amount)

    def _count(self, resource: Resource, client: str, amount: int) -> None:
        self._used[resource][client] += amount
        self._totals[resource] += amount

    def _give_back(self, resource: Resource, client: str, amount: int) -> None:
        """Give an amount back, to requests that wait for a place if there are any."""
        used = self._used[resource]
        self._count(resource, client, -amount)
        if not used[client]:
            del used[client]
        self._admit(resource, client)

    def _admit(self, resource: Resource, latest: str) -> None:
        """Give free places to requests that wait, to one of the latest client only if it uses less than others."""
        used, line = self._used[resource], self._waiting[resource]
        while fitting := [each for each, queue in line.items() if not queue[0].done() and self._fits(resource, each, 1)]:
            following = min(fitting, key=lambda each: (used[each], each == latest))
            queue = line.pop(following)
            self._count(resource, following, 1)
            queue.popleft().set_result(None)
            if queue:
                line[following] = queue

    def _fits(self, resource: Resource, client: str, amount: int) -> bool:
        total, part = self.limits[resource].total, self.part_of(resource, client)
        fits_part = part is None or self._used[resource][client] + amount <= part
        return fits_part and (total is None or self._totals[resource] + amount <= total)

    def _refusal(self, resource: Resource, client: str, amount: int) -> QueueFullError:
        """Return why a client cannot use a further amount now."""
        total, part, words = self.limits[resource].total, self.part_of(resource, client), _WORDS[resource]
        if client != ANONYMOUS and part is not None and self._used[resource][client] + amount > part:
            return QuotaExceededError(f"this client has its part of {words}: {part}; try again later")
        message = f"the service has too many {words}: the limit is {total}; try again later"
        return QueueFullError(message, code=_CODES.get(resource))


class Share:
    """The amount of a resource that a request uses until it is closed. A block closes it at its end."""

    def __init__(self, shares: Shares, resource: Resource, client: str, amount: int = 0) -> None:
        self._shares = shares
        self._resource = resource
        self._client = client
        self._amount = amount

    def add(self, amount: int) -> None:
        """Use more. Raises QuotaExceededError or QueueFullError, which changes nothing."""
        if amount:
            self._shares._take(self._resource, self._client, amount)
            self._amount += amount

    def close(self) -> None:
        """Give everything back."""
        amount, self._amount = self._amount, 0
        if amount:
            self._shares._give_back(self._resource, self._client, amount)

    def __enter__(self) -> Share:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()


def end_processing() -> None:
    """Give back the current request's place among those that are processed, for it begins to wait."""
    share = _processing.get()
    if share is not None:
        share.close()
