"""Shares: how much each client uses now of what a service has a finite amount of.

The limits are a table of the settings. A client beyond its part gets QuotaExceededError (429), whoever meets a resource
that is used up QueueFullError (503). A service without keys has one client, whose part is everything.
"""

from __future__ import annotations

import asyncio
from collections import Counter, deque
from collections.abc import Mapping
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
    Resource.CHECKS: "programs that are checked",
    Resource.ESTIMATES: "estimate requests in progress",
    Resource.LARGE_ESTIMATES: "large estimate requests in progress",
    Resource.MODEL_ESTIMATES: "estimates of models in progress",
    Resource.LISTINGS: "PTX or SASS that is made",
    Resource.BODY_BYTES: "bytes of request bodies in memory",
    Resource.RESPONSE_BYTES: "bytes of responses in memory",
}
_CODES = {Resource.CONNECTIONS: "too-many-connections", Resource.BODY_BYTES: "too-many-bodies"}  # of 503; else queue-full


class Shares:
    """Counts what clients use. Used on the event loop only."""

    def __init__(self, limits: Mapping[Resource, Limit]) -> None:
        self.limits = dict(limits)
        self._used: dict[Resource, Counter[str]] = {resource: Counter() for resource in limits}
        self._totals: Counter[Resource] = Counter()
        self._waiting: dict[Resource, deque[tuple[str, asyncio.Future[None]]]] = {resource: deque() for resource in limits}
        self.refusals: Counter[tuple[Resource, int]] = Counter()  # by status

    def part_of(self, resource: Resource, client: str) -> int | None:
        """Return how much one client may use; None: no limit."""
        limit = self.limits[resource]
        return limit.total if client == ANONYMOUS else limit.each

    def used(self, resource: Resource) -> int:
        """Return how much all clients use now."""
        return self._totals[resource]

    def hold(self, resource: Resource, client: str, amount: int = 1) -> Share:
        """Use an amount until the share is closed. Raises QuotaExceededError or QueueFullError."""
        share = Share(self, resource, client)
        share.add(amount)
        return share

    async def wait_for(self, resource: Resource, client: str) -> Share:
        """Use one place as soon as there is one. The client that uses the fewest is next.

        Of two that use as many, one that has not just had a place is next, then the one that waits longest.
        """
        if self._refusal(resource, client, 1) is None:
            return self.hold(resource, client)
        admitted = asyncio.get_running_loop().create_future()
        entry = (client, admitted)
        self._waiting[resource].append(entry)
        try:
            await admitted
        except asyncio.CancelledError:
            if admitted.done() and not admitted.cancelled():
                self._take_back(resource, client, 1)
            else:
                self._waiting[resource].remove(entry)
            raise
        return Share(self, resource, client, 1)

    def _take(self, resource: Resource, client: str, amount: int) -> None:
        refusal = self._refusal(resource, client, amount)
        if refusal is not None:
            self.refusals[resource, 429 if isinstance(refusal, QuotaExceededError) else 503] += 1
            raise refusal
        self._count(resource, client, amount)

    def _count(self, resource: Resource, client: str, amount: int) -> None:
        self._used[resource][client] += amount
        self._totals[resource] += amount

    def _take_back(self, resource: Resource, client: str, amount: int) -> None:
        used = self._used[resource]
        self._count(resource, client, -amount)
        if not used[client]:
            del used[client]
        waiting = self._waiting[resource]
        fitting = [entry for entry in waiting if not entry[1].done() and self._refusal(resource, entry[0], 1) is None]
        if fitting:
            entry = min(fitting, key=lambda entry: (used[entry[0]], entry[0] == client))
            waiting.remove(entry)
            self._count(resource, entry[0], 1)
            entry[1].set_result(None)

    def _refusal(self, resource: Resource, client: str, amount: int) -> QueueFullError | None:
        """Return why a client cannot use a further amount now, or None if it can."""
        total, part = self.limits[resource].total, self.part_of(resource, client)
        if client != ANONYMOUS and part is not None and self._used[resource][client] + amount > part:
            return QuotaExceededError(f"this client has its part of {_WORDS[resource]}: {part}; try again later")
        if total is not None and self._totals[resource] + amount > total:
            message = f"the service has too many {_WORDS[resource]}: the limit is {total}; try again later"
            return QueueFullError(message, code=_CODES.get(resource))
        return None


class Share:
    """The amount of a resource that a request uses until it is closed. A block closes it at its end."""

    def __init__(self, shares: Shares, resource: Resource, client: str, amount: int = 0) -> None:
        self._shares = shares
        self._resource = resource
        self._client = client
        self._amount = amount

    def add(self, amount: int) -> None:
        """Use more. Raises QuotaExceededError or QueueFullError, which changes nothing."""
        self._shares._take(self._resource, self._client, amount)
        self._amount += amount

    def close(self) -> None:
        """Give everything back."""
        amount, self._amount = self._amount, 0
        if amount:
            self._shares._take_back(self._resource, self._client, amount)

    def __enter__(self) -> Share:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()
