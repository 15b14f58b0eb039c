"""Events of an operation as server-sent events (WHATWG HTML), from the log in the database.

The log is asked once a second, and at once when the operation ends in this process. An id is the number of the event
within its operation, so a client that reconnects with `Last-Event-ID` misses nothing.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncGenerator
from functools import partial

from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from roller_svc.errors import StoreError
from roller_svc.farm.operations import Operation, action_of_hit
from roller_svc.farm.store import Json
from roller_svc.service.state import State
from roller_svc.settings import Resource

POLL_S = 1.0
KEEP_ALIVE_S = 15.0
MAX_STREAM_S = 600.0  # then the client reconnects, which checks its key again
RECONNECT_MS = 1000
DONE = "done"


class EventStreamResponse(StreamingResponse):
    """A stream that gives its place back when it ends."""

    def __init__(self, state: State, events: AsyncGenerator[str, None], client: str) -> None:
        self._share = state.shares.hold(Resource.STREAMS, client)
        self._events = events
        headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
        super().__init__(self._events, media_type="text/event-stream", headers=headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._share.close()
            await self._events.aclose()


async def stream_operation(state: State, operation: Operation, after: int) -> AsyncGenerator[str, None]:
    """Yield the events whose number is greater than `after`, until the operation is done."""
    yield f"retry: {RECONNECT_MS}\n\n"
    if action_of_hit(operation.id) is not None:  # found in the store: it has no log
        if after < 1:
            yield _encode({"number": 1, "time": operation.create_time, "type": DONE, "data": _result(operation)})
        return
    loop = asyncio.get_running_loop()
    end_s, silent_since_s = loop.time() + MAX_STREAM_S, loop.time()
    with state.watch(operation.id) as woken:
        is_last = False
        while not is_last:
            is_last = woken.is_set() or loop.time() > end_s  # read the log once more after the end
            try:
                events = await state.query(partial(state.farm.queue.events, operation.id, after))
            except StoreError:  # the client reconnects and continues
                return
            for event in events:
                yield _encode(event)
                after, silent_since_s = int(str(event["number"])), loop.time()
                is_last = is_last or event["type"] == DONE
            if is_last:
                break
            if loop.time() - silent_since_s >= KEEP_ALIVE_S:
                yield ": keep-alive\n\n"
                silent_since_s = loop.time()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(woken.wait(), POLL_S)


def _result(operation: Operation) -> Json:
    return {"digest": None if operation.facts is None else operation.facts.get("digest")}


def _encode(event: Json) -> str:
    """Encode an event. JSON has no line breaks, so its data is one line."""
    return f"id: {event['number']}\nevent: {event['type']}\ndata: {json.dumps(event)}\n\n"
