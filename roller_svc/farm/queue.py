"""The operations table: every build that clients asked for, its state, and the right to work on it.

An action has at most one operation that is not done, so identical requests share a build. A worker *claims* an
operation for the time of a lease, which it renews by heartbeats. Each claim has a higher `attempt`, and a write names
the attempt it belongs to: a worker that lost its lease changes nothing. Operations that are done never change.
Builds are executed at least once and published exactly once.

Clocks may be wrong, and be set right. Leases, deadlines and waits for a worker are measured by what is seen to stand
still (sightings.py). A retry that is further away than any delay is ready. Operations are in the order of their ids.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeVar

from sqlalchemy import (
    Column,
    ColumnElement,
    Connection,
    Row,
    Select,
    and_,
    case,
    delete,
    func,
    insert,
    literal_column,
    or_,
    select,
    update,
)
from sqlalchemy.dialects import postgresql, sqlite

from roller_svc.compiler.serialize import error_json
from roller_svc.errors import BuildServiceError, CancelledError, QueueFullError, QuotaExceededError, RollerError
from roller_svc.farm.audit import AuditEvent, record_event
from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import actions, clients, events, interests, operations
from roller_svc.farm.idempotency import KeyedRequest, record_key
from roller_svc.farm.operations import CacheStatus, Operation, OperationState, format_time, new_id
from roller_svc.farm.sightings import Sighting, Sightings, plausible_age_s
from roller_svc.farm.store import UPLOADS, Json
from roller_svc.farm.usage import read_allowance
from roller_svc.settings import Resource

Part = TypeVar("Part")

LEASE_S = 15.0
RETRY_DELAYS_S = (0.5, 2.0, 8.0)  # before each retry; after the last one the operation is poisoned
RESEND_S = 10.0  # after which the id of an operation that is still queued is sent again
EVERY_QUEUE = "*"  # but queues of single machines
MACHINE_PREFIX = "local."  # of the queue of a single machine
_QUEUED, _BUILDING, _DONE = (state.value for state in (OperationState.QUEUED, OperationState.BUILDING, OperationState.DONE))
_IS_ALIVE = operations.c.state != literal_column("'done'")  # a literal, as only that can use the partial index
_OWN_PRIORITY = func.coalesce(interests.c.priority, operations.c.priority)  # of a client that waits
_OF_DEADLINES = (operations.c.deadline, operations.c.create_time, now_s().label("now_s"))
MAX_PROGRAM_CHARACTERS = 200  # in the audit log
_MAX_SUBMITS = 8  # tries of a submission that others overtake
MAX_CLOCK_ERROR_S = 60.0  # between services and the database


@dataclass(frozen=True, slots=True)
class Submission:
    """A validated request.

    `priority` ranks it within the share of its client. `max_alive` limits the operations of this client that are not
    done; None: no limit. A deadline is in seconds from now; the operation fails if it is not done by then.
    `measured_on` is the kind of device that the build measures on.
    """

    action: str
    request: Json
    queue: str
    client: str = ""
    priority: int = 0
    deadline_s: float | None = None
    max_alive: int | None = None
    max_build_s: float | None = None  # of this client in a day
    keyed: KeyedRequest | None = None  # a request that may be repeated: its key gets the operation
    measured_on: str | None = None
    is_served: bool = True  # whether a worker takes from the queue now
    request_id: str | None = None  # of the request, for logs
    traceparent: str | None = None  # of the request's span


@dataclass(frozen=True, slots=True)
class Claim:
    """The right to build an operation, for as long as its lease is renewed."""

    id: str
    attempt: int
    action: str
    request: Json
    failures: int
    measured_on: str | None = None
    request_id: str | None = None
    traceparent: str | None = None
    client: str = ""  # whose turn it is
    ready_time: float = 0.0  # since when it could be claimed, by the database's clock


class Lease(Enum):
    """The state of a claim at a heartbeat."""

    CURRENT = "current"
    LOST = "lost"  # another worker may have it: stop, and publish nothing
    CANCELLED = "cancelled"
    OVERDUE = "overdue"  # its deadline has passed


@dataclass(frozen=True, slots=True)
class QueuedId:
    """The message of a courier."""

    id: str
    queue: str


class OperationQueue:
    """The operations table.

    Args:
        database: with the tables of this version.
        generator: digest of the code whose actions these are; only its own operations are claimed.
        max_alive: operations that are not done, in total.
        lease_s: time after its last heartbeat at which a worker is taken for dead.
        clock: of monotonic seconds, in which leases and deadlines are measured.
    """

    def __init__(
        self,
        database: Database,
        generator: str,
        *,
        max_alive: int,
        lease_s: float = LEASE_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.database = database
        self.generator = generator
        self.lease_s = lease_s
        self._max_alive = max_alive
        self._leases: Sightings[tuple[str, int]] = Sightings(clock)
        self._deadlines: Sightings[str] = Sightings(clock)
        self._own_deadlines: Sightings[str] = Sightings(clock)  # of the claims that this process renews
        self._unserved: Sightings[str] = Sightings(clock)

    # ---------------------------------------------------------------- clients

    def submit(self, submission: Submission) -> Operation:
        """Join the operation of the same action, or queue a new one.

        An error of the request's own that is remembered is returned as the operation that had it. Raises
        QueueFullError and QuotaExceededError, and ConflictError if the key belongs to another request: then
        nothing is queued.
        """
        joined = self._find_joined(submission) if submission.keyed is None else None
        if joined is not None:
            return joined
        for _ in range(_MAX_SUBMITS):
            with self.database.write() as connection:
                operation = self._join(connection, submission) or self._insert(connection, submission)
                if operation is not None and operation.cache is not CacheStatus.HIT:
                    _record_request(connection, submission, operation)
                    if submission.keyed is not None:
                        record_key(connection, self.database, submission.keyed, operation.id)
            if operation is not None:
                return operation
        raise BuildServiceError("the operation could not be queued; try again", code="queue-contended")

    def check_capacity(self, submission: Submission) -> None:
        """Raise QueueFullError or QuotaExceededError if a new operation would not be queued now."""
        with self.database.read() as connection:
            self._check_capacity(connection, submission)

    def get(self, operation_id: str) -> Operation | None:
        with self.database.read() as connection:
            row = connection.execute(select(operations).where(operations.c.id == operation_id)).one_or_none()
        return None if row is None else _to_operation(row)

    def page(self, client: str | None, *, after: str | None, limit: int) -> list[Operation]:
        """Return operations, latest first: those a client waits for, or all for None.

        Args:
            client: whose operations.
            after: id of the last operation of the previous page.
            limit: operations at most.
        """
        query = select(operations).order_by(operations.c.id.desc()).limit(limit)
        if client is not None:
            mine = select(interests.c.operation).where(interests.c.client == client)
            query = query.where(operations.c.id.in_(mine))
        if after is not None:
            query = query.where(operations.c.id < after)
        with self.database.read() as connection:
            return [_to_operation(row) for row in connection.execute(query)]

    def read_time_s(self) -> float:
        """Return the time of the database's clock."""
        with self.database.read() as connection:
            return float(connection.scalar(select(now_s())) or 0.0)

    def changes(self, client: str | None, since_s: float, *, after: str, limit: int) -> list[Operation]:
        """Return the operations that were created, claimed or ended since a time of the database's clock, the oldest first.

        Args:
            client: whose operations; None: of all clients.
            since_s: the time.
            after: id of the last operation of the previous page; "": the first page.
            limit: operations at most.
        """
        # ids have the time of another clock: the index narrows, the column decides
        is_new = (operations.c.id >= f"{int((since_s - MAX_CLOCK_ERROR_S) * 1000):013d}") & (operations.c.create_time > since_s)
        is_changed = or_(is_new, operations.c.end_time > since_s, _IS_ALIVE & (operations.c.claim_time > since_s))
        query = select(operations).where(is_changed, operations.c.id > after).order_by(operations.c.id).limit(limit)
        if client is not None:
            mine = select(interests.c.operation).where(interests.c.client == client)
            query = query.where(operations.c.id.in_(mine))
        with self.database.read() as connection:
            return [_to_operation(row) for row in connection.execute(query)]

    def position(self, operation_id: str) -> int | None:
        """Return how many builds of its queue start before an operation, or None if it is not queued.

        It assumes that nothing else arrives, that clients are served round-robin, and that no two wait for the same.
        """
        waits = _select_waits(operations.c.queue).where(operations.c.state == _QUEUED).cte("waits")
        mine = waits.alias("mine")
        is_earlier = or_(
            waits.c.priority > mine.c.priority,
            (waits.c.priority == mine.c.priority) & (waits.c.id < mine.c.id),
        )
        query = (
            select(
                waits.c.client,
                mine.c.client.label("own_client"),
                func.sum(case((waits.c.id != mine.c.id, 1), else_=0)).label("others"),
                func.sum(case((is_earlier, 1), else_=0)).label("earlier"),
            )
            .join(mine, (mine.c.id == operation_id) & (mine.c.queue == waits.c.queue))
            .group_by(waits.c.client, mine.c.client)
        )
        with self.database.read() as connection:
            rows = connection.execute(query).all()
        earlier = {row.client: int(row.earlier) for row in rows if row.client == row.own_client}
        starts = {
            own: number + sum(min(int(row.others), number + 1) for row in rows if row.own_client == own != row.client)
            for own, number in earlier.items()
        }
        return min(starts.values(), default=None)

    def ended(self, operation_ids: Iterable[str]) -> set[str]:
        """Return the ids whose operations are done or do not exist."""
        ids = set(operation_ids)
        with self.database.read() as connection:
            alive: set[str] = set()
            for part in _in_parts(sorted(ids)):
                query = select(operations.c.id).where(operations.c.id.in_(part), _IS_ALIVE)
                alive.update(connection.scalars(query))
        return ids - alive

    def cancel(self, operation_id: str, client: str, *, for_all: bool = False) -> Operation | None:
        """Withdraw a client's interest; the operation ends when nobody else waits for it, or `for_all`.

        Do nothing if it is done. Return the operation, or None if there is none.
        """
        with self.database.write() as connection:
            whose = interests.c.operation == operation_id
            is_alive = connection.execute(select(operations.c.id).where(operations.c.id == operation_id, _IS_ALIVE)).first()
            gone = connection.execute(delete(interests).where(whose if for_all else whose & (interests.c.client == client)))
            if is_alive and gone.rowcount:
                record_event(connection, AuditEvent.CANCELLED_FOR_ALL if for_all else AuditEvent.CANCELLED, client, operation_id)
            others = connection.scalar(select(func.count()).select_from(interests).where(whose))
            if not others:
                self._end(
                    connection,
                    [operations.c.id == operation_id, operations.c.state == _QUEUED],
                    CancelledError("the operation was cancelled"),
                )
                building = [operations.c.id == operation_id, operations.c.state == _BUILDING]
                connection.execute(update(operations).where(*building).values(is_cancelled=True))
        return self.get(operation_id)

    def events(self, operation_id: str, after: int = 0) -> list[Json]:
        """Return the events of an operation whose `number` is greater than `after`, in order."""
        query = select(events).where(events.c.operation == operation_id, events.c.number > after)
        with self.database.read() as connection:
            rows = connection.execute(query.order_by(events.c.number)).all()
        return [{"number": row.number, "time": format_time(row.time), "type": row.type, "data": row.data} for row in rows]

    # ---------------------------------------------------------------- workers

    def claim(
        self, worker: str, queues: Sequence[str] = (EVERY_QUEUE,), measured_on: Collection[str] | None = None
    ) -> Claim | None:
        """Claim an operation in one of the queues for a worker; None if there is nothing to do.

        Clients are served round-robin: an operation is due by the earliest share of those who wait for it. Within a
        client, the highest of its own priorities is first, then the fewest failures, then the oldest. Builds that
        measure are claimed only for kinds of devices in `measured_on`; None: for all.
        """
        while True:
            with self.database.read() as connection:
                due = self._next(connection, queues, measured_on)
            if due is None:
                return None
            candidate, client = due
            with self.database.write() as connection:
                row = connection.execute(
                    update(operations)
                    .where(operations.c.id == candidate, operations.c.state == _QUEUED)
                    .values(
                        state=_BUILDING,
                        attempt=operations.c.attempt + 1,
                        worker=worker,
                        claim_time=now_s(),
                        lease_until=now_s() + self.lease_s,
                        lease_s=self.lease_s,
                        unserved_since=None,
                    )
                    .returning(*operations.c)
                ).one_or_none()
                if row is not None:
                    _record_claim(connection, self.database, client)
                    _add_event(connection, row.id, "building", {"attempt": row.attempt, "worker": worker})
                    return Claim(
                        row.id,
                        row.attempt,
                        row.action,
                        row.request,
                        row.failures,
                        row.measured_on,
                        row.request_id,
                        row.traceparent,
                        client,
                        row.start_after,
                    )

    def renew(self, claims: Iterable[Claim]) -> dict[str, Lease]:
        """Renew the leases of claims; return the state of each by its operation's id."""
        leases = {claim.id: Lease.LOST for claim in claims}
        with self.database.write() as connection:
            renewals = [
                update(operations)
                .where(*_fence(claim))
                .values(lease_until=now_s() + self.lease_s, lease_s=self.lease_s)
                .returning(operations.c.id, operations.c.is_cancelled, *_OF_DEADLINES)
                for claim in claims
            ]
            rows = [row for renewal in renewals for row in connection.execute(renewal)]
        overdue = _find_overdue(rows, self._own_deadlines)
        for row in rows:
            leases[row.id] = Lease.CANCELLED if row.is_cancelled else Lease.OVERDUE if row.id in overdue else Lease.CURRENT
        return leases

    def finish(self, claim: Claim, facts: Json) -> bool:
        """Record the result; return False if the claim was lost, which changes nothing."""
        with self.database.write() as connection:
            done = connection.execute(
                update(operations)
                .where(*_fence(claim))
                .values(state=_DONE, facts=facts, end_time=now_s(), worker=None, lease_until=None)
            )
            if done.rowcount:
                built = update(actions).where(actions.c.action == claim.action, actions.c.build_time.is_(None))
                connection.execute(built.values(build_time=now_s()))
                _add_event(connection, claim.id, "done", {"digest": facts.get("digest")})
        return bool(done.rowcount)

    def fail(self, claim: Claim, error: RollerError, remember_s: float = 0.0) -> bool:
        """Record the error that ends an operation; return False if the claim was lost.

        For `remember_s`, requests of the same action get this error without a build.
        """
        with self.database.write() as connection:
            return bool(self._end(connection, _fence(claim), error, remember_s))

    def end_cancelled(self, claim: Claim) -> bool:
        """End an operation whose build was stopped because it was cancelled.

        Release it if a client has asked for it again. Return False if the claim was lost.
        """
        with self.database.write() as connection:
            cancelled = [*_fence(claim), operations.c.is_cancelled]
            ended = self._end(connection, cancelled, CancelledError("the operation was cancelled"))
        return bool(ended) or self.release(claim)

    def retry(self, claim: Claim, error: BuildServiceError) -> bool:
        """Queue an operation again after a transient error, or end it as poisoned; False if the claim was lost."""
        with self.database.write() as connection:
            return bool(self._requeue(connection, _fence(claim), error))

    def release(self, claim: Claim) -> bool:
        """Give back a claim that its worker could not finish because it stops: no failure of the operation."""
        with self.database.write() as connection:
            released = connection.execute(
                update(operations).where(*_fence(claim)).values(state=_QUEUED, worker=None, lease_until=None, send_time=None)
            )
            if released.rowcount:
                _add_event(connection, claim.id, "queued", {"reason": "the worker was stopped"})
        return bool(released.rowcount)

    # ---------------------------------------------------------------- sweeper

    def sweep(self) -> list[QueuedId]:
        """Queue operations again whose lease ran out, end those whose deadline passed, and return what is to be sent.

        Several processes may sweep at once: each operation is handled by one of them.
        """
        with self.database.read() as connection:
            if not connection.scalar(select(func.count()).select_from(operations).where(_IS_ALIVE)):
                return []
            expired = self._find_expired(connection)
            limited = select(operations.c.id, *_OF_DEADLINES).where(_IS_ALIVE, operations.c.deadline.is_not(None))
            overdue = _find_overdue(connection.execute(limited).all(), self._deadlines)
        unsent = [
            operations.c.state == _QUEUED,
            _is_ready(),
            or_(
                operations.c.send_time.is_(None),
                operations.c.send_time < now_s() - RESEND_S,
                operations.c.send_time > now_s(),
            ),
        ]
        with self.database.write() as connection:
            lost = BuildServiceError("the worker was lost: it renewed its lease no more", code="worker-lost")
            for part in _in_parts(expired, 50):
                is_expired = or_(*part)
                cancelled = [is_expired, operations.c.is_cancelled]
                self._end(connection, cancelled, CancelledError("the operation was cancelled"))
                self._requeue(connection, [is_expired], lost)
            for ids in _in_parts(sorted(overdue)):
                self._end(connection, [operations.c.state == _QUEUED, operations.c.id.in_(ids)], overdue_error())
            rows = connection.execute(
                update(operations).where(*unsent).values(send_time=now_s()).returning(operations.c.id, operations.c.queue)
            ).all()
        return [QueuedId(row.id, row.queue) for row in sorted(rows, key=lambda row: row.id)]

    def end_unserved(self, served: Collection[str], limit_s: float) -> list[str]:
        """Note which operations wait for a queue that nobody serves; end those that have done so for `limit_s`.

        Return the ids of those that ended. Several processes may do this at once.
        """
        waiting = [operations.c.state == _QUEUED, operations.c.generator == self.generator]
        is_served = _is_in(served)
        unserved = [*waiting, ~is_served, operations.c.unserved_since.is_(None)]
        served_again = [*waiting, is_served, operations.c.unserved_since.is_not(None)]
        changes = select(operations.c.id).where(*waiting, or_(~is_served, operations.c.unserved_since.is_not(None)))
        since = operations.c.unserved_since
        still = select(operations.c.id, operations.c.queue, since, now_s().label("now_s")).where(
            *waiting, ~is_served, since.is_not(None)
        )
        with self.database.read() as connection:
            if connection.execute(changes.limit(1)).first() is None:
                return []
            rows = connection.execute(still).all()
        ages_s = self._unserved.ages_s(
            {row.id: Sighting(row.unserved_since, plausible_age_s(row.unserved_since, row.now_s, limit_s)) for row in rows}
        )
        overdue = [row for row in rows if ages_s[row.id] > limit_s]
        ended: list[str] = []
        with self.database.write() as connection:
            connection.execute(update(operations).where(*served_again).values(unserved_since=None))
            connection.execute(update(operations).where(*unserved).values(unserved_since=now_s()))
            for row in overdue:
                stands = [*waiting, ~is_served, operations.c.id == row.id, since == row.unserved_since]
                ended += self._end(connection, stands, unserved_error(row.queue, limit_s))
        return ended

    def live_uploads(self) -> set[str]:
        """Return the store's names of the models that operations wait for to be built."""
        with self.database.read() as connection:
            requests = connection.scalars(select(operations.c.request).where(_IS_ALIVE)).all()
        models = (request.get("model") for request in requests)
        return {f"{UPLOADS}/{model.get('blob')}" for model in models if isinstance(model, dict)}

    def foreign(self, built_elsewhere: Collection[str], limit: int) -> list[Operation]:
        """Return queued operations of other generators but those that are built elsewhere."""
        served = {self.generator, *built_elsewhere}
        query = (
            select(operations)
            .where(operations.c.state == _QUEUED, operations.c.generator.not_in(sorted(served)))
            .order_by(operations.c.id)
            .limit(limit)
        )
        with self.database.read() as connection:
            return [_to_operation(row) for row in connection.execute(query)]

    def adopt(self, operation: Operation, action: str, queue: str, measured_on: str | None = None) -> bool:
        """Make a foreign operation one of this generator; return False if it changed or its action is taken."""
        with self.database.write() as connection:
            others = operations.c.id != operation.id
            taken = select(operations.c.id).where(operations.c.action == action, _IS_ALIVE, others)
            if connection.execute(taken).first() is not None:
                return False
            adopted = connection.execute(
                update(operations)
                .where(operations.c.id == operation.id, operations.c.state == _QUEUED)
                .where(operations.c.generator != self.generator)
                .values(
                    action=action,
                    generator=self.generator,
                    queue=queue,
                    measured_on=measured_on,
                    send_time=None,
                    unserved_since=None,
                )
            )
        return bool(adopted.rowcount)

    def insert_foreign(self, operation_id: str, request: Json) -> bool:
        """Queue an operation recorded by a version without this table, to be adopted; False if it is known."""
        values = {
            "id": operation_id, "action": f"legacy:{operation_id}"[:80], "request": request, "queue": "",
            "generator": "", "client": "", "priority": 0, "state": _QUEUED, "create_time": now_s(),
            "start_after": now_s(), "attempt": 0, "failures": 0, "is_cancelled": False,
        }  # fmt: skip
        with self.database.write() as connection:
            insertion = _insert_ignoring_conflicts(self.database, operations).values(values)
            return bool(connection.execute(insertion).rowcount)

    def end_foreign(self, operation: Operation, error: RollerError) -> None:
        """End a foreign operation that this version cannot build."""
        queued = [operations.c.id == operation.id, operations.c.state == _QUEUED]
        with self.database.write() as connection:
            self._end(connection, [*queued, operations.c.generator != self.generator], error)

    def forget(self, older_than_s: float) -> int:
        """Delete operations that ended that long ago, but those whose errors are remembered; return their number."""
        is_remembered = func.coalesce(operations.c.remember_until, 0) > now_s()
        old = [operations.c.state == _DONE, operations.c.end_time < now_s() - older_than_s, ~is_remembered]
        with self.database.write() as connection:
            return connection.execute(delete(operations).where(*old)).rowcount

    # ---------------------------------------------------------------- details

    def _find_joined(self, submission: Submission) -> Operation | None:
        """Return an operation that the client already waits for and that this request changes nothing of."""
        query = (
            select(operations)
            .join(interests, interests.c.operation == operations.c.id)
            .where(operations.c.action == submission.action, _IS_ALIVE)
            .where(interests.c.client == submission.client, submission.priority <= _OWN_PRIORITY)
            .where(operations.c.deadline.is_(None), operations.c.is_cancelled.is_(False))
        )
        with self.database.read() as connection:
            row = connection.execute(query).first()
        return None if row is None else _to_operation(row, CacheStatus.JOINED)

    def _join(self, connection: Connection, submission: Submission) -> Operation | None:
        """Return the action's operation that is not done, or the one whose error is remembered."""
        same = operations.c.action == submission.action
        latest = _time_in(submission.deadline_s)
        row = connection.execute(
            update(operations)
            .where(same, _IS_ALIVE)
            .values(
                is_cancelled=False,
                deadline=None if latest is None else case((operations.c.deadline < latest, latest), else_=operations.c.deadline),
            )
            .returning(*operations.c)
        ).one_or_none()
        if row is not None:
            _add_interest(connection, self.database, row.id, submission)
            return _to_operation(row, CacheStatus.JOINED)
        remembered = select(operations).where(
            same,
            operations.c.remember_until > now_s(),
            operations.c.end_time <= now_s(),  # not by a clock that was ahead
        )
        row = connection.execute(remembered.order_by(operations.c.end_time.desc()).limit(1)).one_or_none()
        return None if row is None else _to_operation(row, CacheStatus.HIT)

    def _insert(self, connection: Connection, submission: Submission) -> Operation | None:
        """Queue a new operation; return None if another process queued one of this action."""
        self._check_capacity(connection, submission)
        latest = connection.scalar(select(func.max(operations.c.id)))
        values = {
            "id": new_id(latest), "action": submission.action, "request": submission.request, "queue": submission.queue,
            "generator": self.generator, "client": submission.client, "priority": submission.priority,
            "state": _QUEUED, "create_time": now_s(), "start_after": now_s(), "send_time": now_s(),
            "deadline": _time_in(submission.deadline_s), "attempt": 0, "failures": 0, "is_cancelled": False,
            "measured_on": submission.measured_on, "request_id": submission.request_id,
            "traceparent": submission.traceparent,
            "unserved_since": None if submission.is_served else now_s(),
        }  # fmt: skip
        insertion = _insert_ignoring_conflicts(self.database, operations).values(values).returning(*operations.c)
        row = connection.execute(insertion).one_or_none()
        if row is None:
            return None
        _add_interest(connection, self.database, row.id, submission)
        _add_event(connection, row.id, "queued", {})
        return _to_operation(row)

    def _check_capacity(self, connection: Connection, submission: Submission) -> None:
        alive = select(func.count()).select_from(operations).where(_IS_ALIVE)
        if (connection.scalar(alive) or 0) >= self._max_alive:
            raise QueueFullError(f"{self._max_alive} builds are waiting already; try again later")
        own = alive.where(operations.c.client == submission.client)
        if submission.max_alive is not None and (connection.scalar(own) or 0) >= submission.max_alive:
            raise QuotaExceededError(f"{submission.max_alive} builds of this client are waiting already; try again later")
        read_allowance(connection, submission.client, Resource.BUILD_SECONDS, submission.max_build_s).check()

    def _next(self, connection: Connection, queues: Sequence[str], measured_on: Collection[str] | None) -> tuple[str, str] | None:
        """Return the id of the operation to build next, and the client whose turn it is."""
        ready = [
            operations.c.state == _QUEUED,
            operations.c.generator == self.generator,
            _is_ready(),
            _is_in(queues),
        ]
        if measured_on is not None:
            is_free = operations.c.measured_on.in_(sorted(measured_on))
            ready.append(or_(operations.c.measured_on.is_(None), is_free))
        waits = _select_waits(operations.c.failures).where(*ready).cte("waits")
        client = connection.scalar(
            select(waits.c.client)
            .outerjoin(clients, clients.c.client == waits.c.client)
            .group_by(waits.c.client)
            .order_by(func.coalesce(func.min(clients.c.last_claim), 0), func.min(waits.c.id))
            .limit(1)
        )
        if client is None:
            return None
        order = (waits.c.priority.desc(), waits.c.failures, waits.c.id)
        found = connection.scalar(select(waits.c.id).where(waits.c.client == client).order_by(*order).limit(1))
        return None if found is None else (found, client)

    def _find_expired(self, connection: Connection) -> list[ColumnElement[bool]]:
        """Return the conditions of the claims whose leases were not renewed for as long as they are."""
        building = select(operations.c.id, operations.c.attempt, operations.c.lease_until, operations.c.lease_s)
        rows = connection.execute(building.where(operations.c.state == _BUILDING)).all()
        ages_s = self._leases.ages_s({(row.id, row.attempt): Sighting(row.lease_until) for row in rows})
        return [
            and_(
                operations.c.id == row.id,
                operations.c.attempt == row.attempt,
                operations.c.state == _BUILDING,
                operations.c.lease_until == row.lease_until,
            )
            for row in rows
            if ages_s[row.id, row.attempt] >= (row.lease_s or self.lease_s)
        ]

    def _end(
        self,
        connection: Connection,
        which: Sequence[ColumnElement[bool]],
        error: RollerError,
        remember_s: float = 0.0,
    ) -> list[str]:
        """End operations with an error; return their ids."""
        document = error_json(error)
        ids = list(
            connection.scalars(
                update(operations)
                .where(*which)
                .values(
                    state=_DONE,
                    error=document,
                    end_time=now_s(),
                    worker=None,
                    lease_until=None,
                    remember_until=now_s() + remember_s if remember_s else None,
                )
                .returning(operations.c.id)
            )
        )
        for operation_id in ids:
            _add_event(connection, operation_id, "done", {"code": error.code})
        return ids

    def _requeue(self, connection: Connection, which: Sequence[ColumnElement[bool]], error: BuildServiceError) -> list[str]:
        """Queue operations again after a transient error; end those that had too many. Return the ids of both."""
        attempts = len(RETRY_DELAYS_S) + 1
        poisoned = BuildServiceError(f"{error.message} ({attempts} attempts; try again later)", code="build-poisoned")
        ended = self._end(connection, [*which, operations.c.failures >= len(RETRY_DELAYS_S)], poisoned)
        delay_s = case(*((operations.c.failures == count, delay) for count, delay in enumerate(RETRY_DELAYS_S)), else_=0.0)
        rows = connection.execute(
            update(operations)
            .where(*which)
            .values(
                state=_QUEUED,
                failures=operations.c.failures + 1,
                start_after=now_s() + delay_s,
                worker=None,
                lease_until=None,
                send_time=None,
            )
            .returning(operations.c.id)
        ).all()
        for row in rows:
            _add_event(connection, row.id, "retry", {"code": error.code, "message": error.message})
        return ended + [row.id for row in rows]


def _fence(claim: Claim) -> list[ColumnElement[bool]]:
    """Return the fence: conditions that hold only while the claim does."""
    return [operations.c.id == claim.id, operations.c.attempt == claim.attempt, operations.c.state == _BUILDING]


def _is_ready() -> ColumnElement[bool]:
    """Return the condition that the pause before a retry has ended. None is longer than the longest delay."""
    start = operations.c.start_after
    return or_(start <= now_s(), start > now_s() + max(RETRY_DELAYS_S))


def _find_overdue(rows: Sequence[Row[Any]], deadlines: Sightings[str]) -> set[str]:
    """Return the ids of operations that are older than their deadlines allow. A row has `_OF_DEADLINES`."""
    limits_s = {row.id: row.deadline - row.create_time for row in rows if row.deadline is not None}
    sightings = {
        row.id: Sighting(None, plausible_age_s(row.create_time, row.now_s, limits_s[row.id])) for row in rows if row.id in limits_s
    }
    return {operation_id for operation_id, age_s in deadlines.ages_s(sightings).items() if age_s > limits_s[operation_id]}


def _is_in(queues: Collection[str]) -> ColumnElement[bool]:
    """Return the condition that an operation is in one of the queues."""
    named = operations.c.queue.in_(sorted(name for name in queues if name != EVERY_QUEUE))
    of_any_machine = operations.c.queue.not_like(f"{MACHINE_PREFIX}%")
    return or_(named, of_any_machine) if EVERY_QUEUE in queues else named


def _time_in(seconds: float | None) -> ColumnElement[float] | None:
    return None if seconds is None else now_s() + seconds


def overdue_error() -> BuildServiceError:
    return BuildServiceError("the deadline passed before the build was done", code="deadline-exceeded")


def unserved_error(queue: str, limit_s: float) -> BuildServiceError:
    return BuildServiceError(
        f"no worker has taken from the queue {queue} for {limit_s:g} s; `roller worker --queues {queue}` starts one",
        code="no-worker",
    )


def _dialect(database: Database) -> Any:
    """Return the module whose `insert` has ON CONFLICT, which both databases spell alike."""
    return sqlite if database.is_sqlite else postgresql


def _insert_ignoring_conflicts(database: Database, table: Any) -> Any:
    return _dialect(database).insert(table).on_conflict_do_nothing()


def _select_waits(*columns: Column[Any]) -> Select[Any]:
    """Select who waits for operations, and with which priority. One that nobody is known to wait for is its client's."""
    client = func.coalesce(interests.c.client, operations.c.client).label("client")
    priority = _OWN_PRIORITY.label("priority")
    return select(operations.c.id, client, priority, *columns).outerjoin(interests, interests.c.operation == operations.c.id)


def _add_interest(connection: Connection, database: Database, operation_id: str, submission: Submission) -> None:
    """Note that a client waits for an operation. Its priority is the highest that it has asked with."""
    given = submission.priority
    values = {"operation": operation_id, "client": submission.client, "priority": given}
    highest = case((interests.c.priority > given, interests.c.priority), else_=given)
    connection.execute(
        _dialect(database)
        .insert(interests)
        .values(values)
        .on_conflict_do_update(index_elements=[interests.c.operation, interests.c.client], set_={"priority": highest})
    )


def _add_event(connection: Connection, operation_id: str, kind: str, data: Mapping[str, object]) -> None:
    last = select(func.coalesce(func.max(events.c.number), 0) + 1).where(events.c.operation == operation_id)
    connection.execute(
        insert(events).values(operation=operation_id, number=last.scalar_subquery(), time=now_s(), type=kind, data=dict(data))
    )


def _record_request(connection: Connection, submission: Submission, operation: Operation) -> None:
    """Add to the audit log who asked for what, so that it is known when the operation is forgotten."""
    program = str(submission.request.get("expression") or submission.request.get("model"))
    record_event(
        connection,
        AuditEvent.REQUESTED,
        submission.client,
        operation.id,
        cache=operation.cache.value,
        action=submission.action,
        queue=submission.queue,
        program=program[:MAX_PROGRAM_CHARACTERS],
        request_id=submission.request_id,
    )


def _record_claim(connection: Connection, database: Database, client: str) -> None:
    """Make a client the last one to be served again."""
    number = select(func.coalesce(func.max(clients.c.last_claim), 0) + 1).scalar_subquery()
    insertion = _dialect(database).insert(clients).values(client=client, last_claim=number)
    connection.execute(insertion.on_conflict_do_update(index_elements=[clients.c.client], set_={"last_claim": number}))


def _to_operation(row: Row[Any], cache: CacheStatus = CacheStatus.MISS) -> Operation:
    return Operation(
        id=row.id,
        action=row.action,
        state=OperationState(row.state),
        cache=cache,
        create_time=format_time(row.create_time),
        request=row.request,
        facts=row.facts,
        error=row.error,
        attempt=row.attempt,
        queue=row.queue,
        worker=row.worker,
        start_time=None if row.claim_time is None or row.state == _QUEUED else format_time(row.claim_time),
        end_time=None if row.end_time is None else format_time(row.end_time),
        is_unserved=row.state == _QUEUED and row.unserved_since is not None,
    )


def _in_parts(values: Sequence[Part], size: int = 500) -> Iterable[Sequence[Part]]:
    """Split a list so that each part fits in one query."""
    return (values[start : start + size] for start in range(0, len(values), size))
