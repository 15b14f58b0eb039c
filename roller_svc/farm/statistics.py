"""Figures of the farm for its operators: queues, waits, builds, failures and workers, of all processes together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from sqlalchemy import case, func, select

from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import operations
from roller_svc.farm.operations import OperationState
from roller_svc.farm.registry import WorkerRegistry
from roller_svc.farm.routing import is_known_queue

WINDOW_S = 300.0  # of the figures of operations that ended
MAX_ROWS = 10_000
QUANTILES = (0.5, 0.95)
OTHER_QUEUES = "other"  # those of devices that no worker has and the catalog lacks
SUCCEEDED = "ok"  # in place of an error's code


@dataclass(frozen=True, slots=True)
class QueueFigures:
    """Operations of a queue in one state; `oldest_s` is the age of the oldest."""

    queue: str
    state: str
    count: int
    oldest_s: float


@dataclass(frozen=True, slots=True)
class Figures:
    """The farm at one moment. Waits and builds are quantiles of the operations that ended within WINDOW_S."""

    queues: tuple[QueueFigures, ...]
    ended: Mapping[str, int]  # operations that ended within WINDOW_S, by the code of their error
    wait_s: Mapping[float, float]  # from the request to the last attempt
    build_s: Mapping[float, float]  # of the last attempt
    workers: Mapping[str, int]  # by state


def read_figures(database: Database, registry: WorkerRegistry) -> Figures:
    """Read the figures. Raises StoreError if the database is away."""
    alive = select(
        operations.c.queue,
        operations.c.state,
        func.count().label("number"),
        (now_s() - func.min(operations.c.create_time)).label("oldest_s"),
    ).where(operations.c.state != OperationState.DONE.value)
    recent = (
        select(
            operations.c.error,
            case((operations.c.claim_time.is_not(None), operations.c.claim_time - operations.c.create_time)).label("wait"),
            case((operations.c.claim_time.is_not(None), operations.c.end_time - operations.c.claim_time)).label("build"),
        )
        .where(operations.c.end_time > now_s() - WINDOW_S)
        .order_by(operations.c.end_time.desc())
        .limit(MAX_ROWS)
    )
    with database.read() as connection:
        queues = connection.execute(alive.group_by(operations.c.queue, operations.c.state)).all()
        ended = connection.execute(recent).all()
    workers = registry.alive()
    served = {queue for worker in workers for queue in worker.queues}
    merged: dict[tuple[str, str], QueueFigures] = {}
    for row in queues:
        queue = row.queue if row.queue in served or is_known_queue(row.queue) else OTHER_QUEUES
        before = merged.get((queue, row.state), QueueFigures(queue, row.state, 0, row.oldest_s))
        merged[queue, row.state] = replace(before, count=before.count + row.number, oldest_s=max(before.oldest_s, row.oldest_s))
    return Figures(
        tuple(replace(figures, oldest_s=max(0.0, figures.oldest_s)) for figures in merged.values()),
        Counter(SUCCEEDED if row.error is None else str(row.error["code"]) for row in ended),
        _quantiles([max(0.0, row.wait) for row in ended if row.wait is not None]),
        _quantiles([max(0.0, row.build) for row in ended if row.build is not None]),
        Counter("draining" if worker.is_draining else "active" for worker in workers),
    )


def _quantiles(values: Sequence[float]) -> dict[float, float]:
    """Return the quantiles of values by the nearest rank; none of no values."""
    ordered = sorted(values)
    return {share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in QUANTILES if ordered}
