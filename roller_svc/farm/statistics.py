"""Figures of the farm for its operators: queues, waits, builds, failures and workers, of all processes together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from sqlalchemy import case, func, select

from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import operations
from roller_svc.farm.operations import OperationState
from roller_svc.farm.registry import WorkerRegistry

WINDOW_S = 300.0  # of the figures of operations that ended
MAX_ROWS = 10_000
QUANTILES = (0.5, 0.95)
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
    return Figures(
        tuple(QueueFigures(row.queue, row.state, row.number, max(0.0, row.oldest_s)) for row in queues),
        Counter(SUCCEEDED if row.error is None else str(row.error["code"]) for row in ended),
        _quantiles([max(0.0, row.wait) for row in ended if row.wait is not None]),
        _quantiles([max(0.0, row.build) for row in ended if row.build is not None]),
        Counter("draining" if worker.is_draining else "active" for worker in registry.alive()),
    )


def _quantiles(values: Sequence[float]) -> dict[float, float]:
    """Return the quantiles of values by the nearest rank; none of no values."""
    ordered = sorted(values)
    return {share: ordered[min(len(ordered) - 1, int(share * len(ordered)))] for share in QUANTILES if ordered}
