"""What the routes work with: settings, the store, the queue, and how to get at them from a request."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import cast

from fastapi import Request

from roller_svc.estimates import Estimates
from roller_svc.farm.jobs import JobQueue, Operation
from roller_svc.farm.store import Store
from roller_svc.settings import Settings


@dataclass(frozen=True, slots=True)
class State:
    """`compute` runs what takes milliseconds of processor time: estimates, archives, PTX."""

    settings: Settings
    store: Store
    queue: JobQueue
    compute: ThreadPoolExecutor
    estimates: Estimates


def state_of(request: Request) -> State:
    return cast(State, request.app.state.roller)


async def waited(queue: JobQueue, operation: Operation, seconds: float) -> Operation:
    """The operation as it is when it has ended, or after that many seconds."""
    ended = None if operation.done else queue.ended(operation.id)
    if ended is not None and seconds > 0:
        # asyncio.wait, unlike wait_for, leaves the build alone when the time is over or the caller is gone
        await asyncio.wait({asyncio.wrap_future(ended)}, timeout=seconds)
    return operation if operation.done else (queue.get(operation.id) or operation)
