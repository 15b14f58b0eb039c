"""The farm as JSON, and its changes as server-sent events.

An event's id is a time of the database's clock. A client that reconnects with `Last-Event-ID` gets every operation that
changed since then, perhaps one twice: an event has the whole operation, so that the last one counts.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from functools import partial

from roller_svc.errors import StoreError
from roller_svc.farm.statistics import WINDOW_S, Figures
from roller_svc.farm.store import Json
from roller_svc.service.event_stream import KEEP_ALIVE_S, MAX_STREAM_S, POLL_S, RECONNECT_MS
from roller_svc.service.mapping import operation_json
from roller_svc.service.metrics import Metrics
from roller_svc.service.state import State

OVERLAP_S = 2.0  # a transaction may be visible so long after the times that it writes
MAX_CHANGES = 200  # of one moment


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
    sent: dict[str, Json] = {}  # of the last moments, by operation
    figures: Json = {}
    while loop.time() < end_s and not state.is_ending:
        try:
            now_s, changed = await state.query(partial(state.farm.queue.changes, client, since_s, OVERLAP_S, MAX_CHANGES))
            current = farm_json(await state.query(state.farm.read_figures), state.metrics)
        except StoreError:  # the client reconnects and continues
            return
        documents = {operation.id: operation_json(operation) for operation in changed}
        events = [("operation", document) for name, document in documents.items() if sent.get(name) != document]
        if _without_ages(current) != _without_ages(figures):
            events.append(("figures", current))
        for kind, document in events:
            yield f"id: {now_s:.3f}\nevent: {kind}\ndata: {json.dumps(document)}\n\n"
        if events:
            silent_since_s = loop.time()
        elif loop.time() - silent_since_s >= KEEP_ALIVE_S:
            yield ": keep-alive\n\n"
            silent_since_s = loop.time()
        since_s, sent, figures = now_s, documents, current
        await asyncio.sleep(POLL_S)


def _without_ages(figures: Json) -> Json:
    """Return the figures without ages, which change although nothing happens."""
    queues = figures.get("queues", [])
    assert isinstance(queues, list)
    return figures | {"queues": [{key: value for key, value in each.items() if key != "oldest_s"} for each in queues]}
