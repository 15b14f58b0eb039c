"""The workers table: which workers are alive, what they build, and with what."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, delete, func, insert, select, update

from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import workers
from roller_svc.farm.operations import format_time
from roller_svc.farm.sightings import Sighting, Sightings
from roller_svc.farm.store import Json

ALIVE_S = 30.0  # since the last heartbeat


@dataclass(frozen=True, slots=True)
class Worker:
    """A process that builds. `facts` says what it has: host, CPU, devices, compilers with their versions."""

    id: str
    queues: tuple[str, ...]
    generator: str
    facts: Json
    start_time: str = ""
    is_draining: bool = False


class WorkerRegistry:
    """The table of workers. One is alive while its heartbeat is seen to change.

    Args:
        database: with the table.
        clock: of monotonic seconds, in which heartbeats are awaited.
    """

    def __init__(self, database: Database, clock: Callable[[], float] = time.monotonic) -> None:
        self._database = database
        self._heartbeats: Sightings[str] = Sightings(clock)

    def add(self, worker: Worker) -> None:
        with self._database.write() as connection:
            is_old = func.abs(now_s() - workers.c.heartbeat) > 10 * ALIVE_S  # of a clock that was ahead, too
            connection.execute(delete(workers).where(is_old))
            connection.execute(
                insert(workers).values(
                    id=worker.id,
                    queues=list(worker.queues),
                    generator=worker.generator,
                    facts=worker.facts,
                    start_time=now_s(),
                    heartbeat=now_s(),
                    is_draining=worker.is_draining,
                )
            )

    def beat(self, worker: Worker) -> None:
        """Say that a worker is alive; add it again if it was taken for dead."""
        with self._database.write() as connection:
            known = update(workers).where(workers.c.id == worker.id)
            found = connection.execute(known.values(heartbeat=now_s(), is_draining=worker.is_draining))
        if not found.rowcount:
            self.add(worker)

    def remove(self, worker_id: str) -> None:
        with self._database.write() as connection:
            connection.execute(delete(workers).where(workers.c.id == worker_id))

    def alive(self) -> list[Worker]:
        """Return the workers that are alive, in order of their ids."""
        query = select(workers, func.abs(now_s() - workers.c.heartbeat).label("age_s")).order_by(workers.c.id)
        with self._database.read() as connection:
            rows = connection.execute(query).all()
        ages_s = self._heartbeats.ages_s({row.id: Sighting(row.heartbeat, row.age_s) for row in rows})
        return [_to_worker(row) for row in rows if ages_s[row.id] <= ALIVE_S]


def served_queues(alive: Sequence[Worker], generator: str) -> frozenset[str]:
    """Return the queues that workers of a generator take from."""
    active = (worker for worker in alive if worker.generator == generator and not worker.is_draining)
    return frozenset(queue for worker in active for queue in worker.queues)


def generators(alive: Sequence[Worker]) -> frozenset[str]:
    return frozenset(worker.generator for worker in alive)


def _to_worker(row: Row[Any]) -> Worker:
    return Worker(row.id, tuple(row.queues), row.generator, row.facts, format_time(row.start_time), is_draining=row.is_draining)
