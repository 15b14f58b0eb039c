"""Answers to requests for builds that the store has, remembered in memory and given before routing.

The routed path makes an answer once. A later request of the same bytes gets it again without parsing, if the client has
the scopes that the route asked for and the store still has the result, which is looked up at most once a second.
The action of a request does not change while a process lives: it reads specs, compilers' versions and its own source once.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from fastapi import Request
from fastapi.responses import Response
from starlette.types import Scope
from structlog.contextvars import bind_contextvars

from roller_svc.compiler.estimates.cache import LruCache
from roller_svc.errors import StoreError
from roller_svc.farm.api_keys import Scope as KeyScope
from roller_svc.farm.models import ModelRequest
from roller_svc.farm.models import Request as FarmRequest
from roller_svc.farm.operations import CacheStatus, Operation, format_time
from roller_svc.farm.store import UPLOADS, Json, Store
from roller_svc.service.metrics import Metrics

PATHS = frozenset({"/v1/kernels:compile", "/v1/graphs:compile"})
MAX_AGE_S = 1.0  # after which the store is asked again whether it has the result
MAX_BYTES = 16 << 20  # of memory for all answers
OVERHEAD_BYTES = 2 << 10  # of memory for an answer beside its content
_KEY = "hit_key"  # in the state of a request that may be remembered
_ONCE = (b"content-type", b"prefer")  # headers that change the answer, as routes read them
_NEVER = frozenset({b"idempotency-key"})  # headers whose meaning only the routed path knows

Run = Callable[[Callable[[], bool]], Awaitable[bool]]


@dataclass(slots=True)
class Answer:
    """A response to a hit. Its content is split at the time of its creation."""

    operation_id: str
    action: str
    facts_digest: bytes
    upload: str | None  # the blob of the model that was compiled
    scopes: frozenset[KeyScope]
    headers: list[tuple[bytes, bytes]]
    before: bytes
    after: bytes
    route: Any
    checked_s: float
    check: asyncio.Future[bool] | None = None

    @property
    def body(self) -> bytes:
        """The content, created now."""
        return self.before + format_time(datetime.now(UTC).timestamp()).encode() + self.after


class HitAnswers:
    """The answers. Used on the event loop.

    Args:
        store: is asked for the results.
        run: runs that in a thread.
        metrics: count the answers.
        clock: of monotonic seconds.
    """

    def __init__(self, store: Store, run: Run, metrics: Metrics, clock: Callable[[], float] = time.monotonic) -> None:
        self._store = store
        self._run = run
        self._metrics = metrics
        self._clock = clock
        self._answers: LruCache[bytes, Answer] = LruCache(MAX_BYTES)

    async def find(self, scope: Scope, body: bytes) -> Answer | None:
        """Return the answer to a request that has passed all checks but those of its body; None: route it."""
        key = _key_of(scope, body)
        if key is None:
            return None
        scope["state"][_KEY] = key
        answer = self._answers.get(key)
        if answer is None or not answer.scopes <= scope["state"]["principal"].scopes or not await self._is_current(answer):
            return None
        scope["route"] = answer.route  # for the name of its span
        bind_contextvars(operation=answer.operation_id, cache=CacheStatus.HIT.value)
        self._metrics.count(CacheStatus.HIT)
        return answer

    def remember(
        self, request: Request, wanted: FarmRequest, operation: Operation, response: Response, scopes: frozenset[KeyScope]
    ) -> None:
        """Keep the response to a request that was a hit."""
        key = request.scope["state"].get(_KEY)
        if key is None or operation.cache is not CacheStatus.HIT or operation.facts is None:
            return
        before, _, after = bytes(response.body).partition(operation.create_time.encode())
        answer = Answer(
            operation.id,
            operation.action,
            _digest_of(operation.facts),
            wanted.blob if isinstance(wanted, ModelRequest) else None,
            scopes,
            list(response.raw_headers),  # compression changes those of the response
            before,
            after,
            request.scope.get("route"),
            self._clock(),
        )
        self._answers.put(key, answer, OVERHEAD_BYTES + len(response.body))

    async def _is_current(self, answer: Answer) -> bool:
        """Whether the store still has the result, as of a short time ago. Concurrent requests ask once."""
        if self._clock() - answer.checked_s <= MAX_AGE_S:
            return True
        if answer.check is None:
            answer.check = asyncio.ensure_future(self._check(answer))
        return await asyncio.shield(answer.check)

    async def _check(self, answer: Answer) -> bool:
        start_s = self._clock()
        try:
            is_there = await self._run(lambda: self._is_stored(answer))
        except StoreError:  # the routed path reports it
            return False
        finally:
            answer.check = None
        if is_there:
            answer.checked_s = start_s
        return is_there

    def _is_stored(self, answer: Answer) -> bool:
        facts = self._store.find_result(answer.action)
        if facts is None or _digest_of(facts) != answer.facts_digest:
            return False
        if answer.upload is None:
            return True
        self._store.uses.note(f"{UPLOADS}/{answer.upload}")
        return self._store.has(answer.upload)


def _digest_of(facts: Json) -> bytes:
    return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).digest()


def _key_of(scope: Scope, body: bytes) -> bytes | None:
    """Return a digest of everything in a request but its client that decides its answer; None for one to route."""
    path: str = scope["path"]
    if path not in PATHS or scope["method"] != "POST" or scope["query_string"] or scope["raw_path"] != path.encode():
        return None
    found: dict[bytes, bytes] = {}
    for name, value in scope["headers"]:
        if name in _NEVER or (name in _ONCE and name in found):
            return None
        if name in _ONCE:
            found[name] = value
    head = [scope["raw_path"], *(found.get(name, b"") for name in _ONCE), b""]  # no part of it has a line break
    return hashlib.sha256(b"\n".join(head) + body).digest()
