"""The farm as JSON, and its changes as server-sent events.

An event's id is a time of the database's clock. A client that reconnects with `Last-Event-ID` gets every operation that
changed since then, perhaps one twice: an event has the whole operation, so that the last one counts. The events of one
look at the database have the time of the look before: a block without data ends them with the time of theirs.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import AsyncGenerator
from functools import partial

from roller_svc.errors import StoreError
from roller_svc.farm.operations import Operation
from roller_svc.farm.statistics import WINDOW_S, Figures
from roller_svc.farm.store import Json
from roller_svc.service.event_stream import KEEP_ALIVE_S, MAX_STREAM_S, POLL_S, RECONNECT_MS
from roller_svc.service.mapping import operation_json
from roller_svc.service.metrics import Metrics
from roller_svc.service.state import State

OVERLAP_S = 2.0  # a transaction may be visible so long after the times that it writes
PAGE_OPERATIONS = 200  # that are read at once


def farm_json(figures: Figures, metrics: Metrics) -> Json:
    """Return queues, workers, waits, builds and failures of the farm, and hits of this service."""
    return {
        "window_s": WINDOW_S,
        "queues": [
            {"queue": each.queue, "state": each.state, "operations": each.count, "oldest_s": each.oldest_s}
            for each in figures.queues
        ],
        "workers": dict(figures.workers),
        "ended": dict(figures.ended),
        "wait_s": {f"{share:g}": seconds for share, seconds in figures.wait_s.items()},
        "build_s": {f"{share:g}": seconds for share, seconds in figures.build_s.items()},
        "submissions": metrics.submissions(),
    }


async def stream_farm(state: State, client: str | None, since_s: float | None) -> AsyncGenerator[str, None]:
    """Yield `figures` when they change, and `operation` for each change, until the stream is old or the service ends.

    Args:
        client: whose operations; None: of all clients.
        since_s: time of the last event that the client has; None: the stream begins now.
    """
    yield f"retry: {RECONNECT_MS}\n\n"
    loop = asyncio.get_running_loop()
    end_s, silent_since_s = loop.time() + MAX_STREAM_S, loop.time()
    sent: dict[str, bytes] = {}  # hashes of what the last look found, by operation
    figures: Json = {}
    while loop.time() < end_s and not state.is_ending:
        found: dict[str, bytes] = {}
        has_events = False
        try:
            look_s = await state.query(state.farm.queue.read_time_s)  # what changes from here on is of the next look
            since_s = look_s if since_s is None else since_s
            async for operation in _changed(state, client, since_s - OVERLAP_S):
                text = json.dumps(operation_json(operation))
                found[operation.id] = hashlib.sha256(text.encode()).digest()
                if sent.get(operation.id) != found[operation.id]:
                    has_events = True
                    yield _encode(since_s, "operation", text)
            current = farm_json(await state.query(state.farm.read_figures), state.metrics)
        except StoreError:  # the client reconnects and continues
            return
        if _without_ages(current) != _without_ages(figures):
            has_events = True
            yield _encode(since_s, "figures", json.dumps(current))
        if has_events:
            yield f"id: {look_s:.3f}\n\n"
            silent_since_s = loop.time()
        elif loop.time() - silent_since_s >= KEEP_ALIVE_S:
            yield ": keep-alive\n\n"
            silent_since_s = loop.time()
        since_s, sent, figures = look_s, found, current
        await asyncio.sleep(POLL_S)


async def _changed(state: State, client: str | None, since_s: float) -> AsyncGenerator[Operation, None]:
    """Yield the operations that changed since a time, page by page."""
    after, is_last = "", False
    while not is_last:
        page = await state.query(partial(state.farm.queue.changes, client, since_s, after=after, limit=PAGE_OPERATIONS))
        for operation in page:
            yield operation
        is_last = len(page) < PAGE_OPERATIONS
        after = "" if is_last else page[-1].id


def _encode(since_s: float, kind: str, text: str) -> str:
    return f"id: {since_s:.3f}\nevent: {kind}\ndata: {text}\n\n"


def _without_ages(figures: Json) -> Json:
    """Return the figures without ages, which change although nothing happens."""
    queues = figures.get("queues", [])
    assert isinstance(queues, list)
    return figures | {"queues": [{key: value for key, value in each.items() if key != "oldest_s"} for each in queues]}
