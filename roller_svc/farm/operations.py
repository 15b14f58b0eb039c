"""Long-running operations (AIP-151): what a client knows of the build it asked for."""

from __future__ import annotations

import re
import uuid
from dataclasses import dataclass
from datetime import UTC, datetime
from enum import Enum

from roller_svc.farm.store import Json

HIT_PREFIX = "hit-"
_HIT_ID = re.compile(r"hit-[0-9a-f]{64}")
_ID = re.compile(r"[0-9a-z-]{1,80}")
_NUMBERED_ID = re.compile(r"([0-9]{13})-")


class OperationState(Enum):
    QUEUED = "queued"
    BUILDING = "building"
    DONE = "done"


class CacheStatus(Enum):
    HIT = "hit"  # the store has the result
    MISS = "miss"  # this operation builds it
    JOINED = "joined"  # an earlier request started the operation


@dataclass(frozen=True, slots=True)
class Operation:
    """A request to build a kernel or a model. Once done it has either `facts` or `error`."""

    id: str
    action: str
    state: OperationState
    cache: CacheStatus
    create_time: str
    request: Json
    facts: Json | None = None  # of the kernel or model that was built
    error: Json | None = None  # of the failed build
    attempt: int = 0  # claims by workers so far
    queue: str = ""
    worker: str | None = None  # that builds it
    queue_position: int | None = None  # builds that start first, while it is queued
    start_time: str | None = None  # of the last attempt
    end_time: str | None = None
    is_unserved: bool = False  # whether it is queued and no worker takes from its queue

    @property
    def done(self) -> bool:
        return self.state is OperationState.DONE


def cached_operation(action: str, facts: Json, request: Json) -> Operation:
    """Return a finished operation without a row: its id contains the action's digest."""
    return Operation(
        id=HIT_PREFIX + action.removeprefix("sha256:"),
        action=action,
        state=OperationState.DONE,
        cache=CacheStatus.HIT,
        create_time=format_time(datetime.now(UTC).timestamp()),
        request=request,
        facts=facts,
    )


def action_of_hit(operation_id: str) -> str | None:
    """Return the action in the id of a cached operation, or None for another id."""
    if not _HIT_ID.fullmatch(operation_id):
        return None
    return "sha256:" + operation_id.removeprefix(HIT_PREFIX)


def is_id(text: str) -> bool:
    """Whether a text from outside may be an operation's id."""
    return bool(_ID.fullmatch(text))


def format_time(seconds: float) -> str:
    """Format seconds since 1970 as RFC 3339, with milliseconds."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def new_id(latest: str | None = None) -> str:
    """Return a new id, which sorts after the latest one: by creation time, unless a clock was ahead."""
    number = int(datetime.now(UTC).timestamp() * 1000)
    match = None if latest is None else _NUMBERED_ID.match(latest)
    if match is not None:
        number = max(number, int(match[1]) + 1)
    return f"{number:013d}-{uuid.uuid4().hex[:16]}"
