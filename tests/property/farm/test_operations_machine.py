"""A state machine over the operations table and the store: submit, duplicate, cancel, kill, lease expiry, retention.

Whatever the order: an action has at most one operation that is not done, no operation is lost, an operation that is
done never changes, a worker that lost its claim changes nothing, and all results of an action are the published one.
"""

from __future__ import annotations

import shutil
import sqlite3
import tempfile
from collections import Counter
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, invariant, multiple, rule, run_state_machine_as_test
from sqlalchemy import event, select, update

from roller_svc.errors import BuildServiceError, CompileError, QueueFullError
from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import events, metadata, operations
from roller_svc.farm.operations import Operation, OperationState
from roller_svc.farm.queue import LEASE_S, Claim, Lease, OperationQueue, Submission
from roller_svc.farm.store import Artifact, Store

ACTIONS = st.sampled_from([f"sha256:{number:064x}" for number in range(4)])
CLIENTS = st.sampled_from(["a", "b", "c"])
MAX_ALIVE = 4


class OperationsMachine(RuleBasedStateMachine):
    claims = Bundle("claims")  # of workers that believe in them

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="roller-machine-"))
        database = Database(f"sqlite:///{self.folder}/operations.db")

        self.day = 2_460_000.5  # the database's clock in Julian days; statements move it, so that a run repeats exactly

        @event.listens_for(database.engine, "connect")
        def prepare(connection: sqlite3.Connection, _: object) -> None:
            connection.execute("PRAGMA synchronous=OFF")  # nothing here cuts the power
            connection.create_function("julianday", 1, lambda _: self.day)

        @event.listens_for(database.engine, "before_cursor_execute")
        def tick(*_: object) -> None:
            self.day += 1e-3 / 86_400

        metadata.create_all(database.engine)
        self.store = Store(self.folder / "store")
        self.seconds = 0.0  # the monotonic clock
        self.queue = OperationQueue(database, "a" * 64, max_alive=MAX_ALIVE, clock=lambda: self.seconds)
        self.known: set[str] = set()  # operations that were accepted and not forgotten
        self.done: dict[str, Operation] = {}
        self.published: dict[str, dict[str, object]] = {}
        self.current: dict[str, int] = {}  # the attempt that holds an operation's lease
        self.results = 0

    def teardown(self) -> None:
        self.queue.database.close()
        shutil.rmtree(self.folder)

    # ------------------------------------------------------------ clients

    @rule(action=ACTIONS, client=CLIENTS, priority=st.integers(-1, 1))
    def submit(self, action: str, client: str, priority: int) -> None:
        if self.store.action_result(action) is not None:
            return  # a hit has no operation
        alive = {each.action: each.id for each in self.alive()}
        try:
            operation = self.queue.submit(Submission(action, {}, "q", client, priority))
        except QueueFullError:
            assert len(alive) == MAX_ALIVE
            assert action not in alive
            return
        if action in alive:
            assert operation.id == alive[action]
        self.known.add(operation.id)

    @rule(action=ACTIONS, client=CLIENTS, for_all=st.booleans())
    def cancel(self, action: str, client: str, for_all: bool) -> None:
        for operation in self.alive():
            if operation.action == action:
                self.queue.cancel(operation.id, client, for_all=for_all)

    @rule()
    def forget(self) -> None:
        forgotten = {operation_id for operation_id in self.known if self.operation(operation_id).done}
        self.wait_long()
        assert self.queue.forget(3600.0) == len(forgotten)
        self.known -= forgotten
        self.done = {}

    # ------------------------------------------------------------ workers

    @rule(target=claims)
    def claim(self) -> object:
        claim = self.queue.claim("w")
        if claim is None:
            return multiple()
        assert claim.id not in self.current
        self.current[claim.id] = claim.attempt
        return claim

    @rule(claim=claims)
    def publish_and_finish(self, claim: Claim) -> None:
        facts = self.publish(claim)
        self.check(claim, self.queue.finish(claim, facts))

    @rule(claim=claims)
    def publish_and_die(self, claim: Claim) -> None:
        self.publish(claim)

    @rule(claim=claims, remember_s=st.sampled_from([0.0, 60.0]))
    def fail(self, claim: Claim, remember_s: float) -> None:
        self.check(claim, self.queue.fail(claim, CompileError("no"), remember_s))

    @rule(claim=claims)
    def retry(self, claim: Claim) -> None:
        self.check(claim, self.queue.retry(claim, BuildServiceError("killed", code="worker-lost")))

    @rule(claim=claims)
    def release(self, claim: Claim) -> None:
        self.check(claim, self.queue.release(claim))

    @rule(claim=claims)
    def beat(self, claim: Claim) -> None:
        lease = self.queue.renew([claim])[claim.id]
        assert (lease is Lease.LOST) == (self.current.get(claim.id) != claim.attempt)
        if lease is Lease.CANCELLED:
            self.check(claim, self.queue.end_cancelled(claim))

    # --------------------------------------------------------------- time

    @rule()
    def all_leases_expire(self) -> None:
        self.queue.sweep()
        self.seconds += LEASE_S
        self.queue.sweep()
        self.current = {}

    @rule(hours=st.sampled_from([-1, 1]))
    def the_clock_steps(self, hours: int) -> None:
        self.day += hours / 24

    @rule()
    def pauses_end(self) -> None:
        self.change(operations.c.state == "queued", start_after=now_s() - 1)

    @rule()
    def sweep(self) -> None:
        self.queue.sweep()

    # ---------------------------------------------------------- invariants

    @invariant()
    def one_operation_an_action(self) -> None:
        assert max(Counter(each.action for each in self.alive()).values(), default=1) == 1

    @invariant()
    def no_operation_is_lost(self) -> None:
        assert {each.id for each in self.queue.page(None, after=None, limit=999)} == self.known

    @invariant()
    def what_is_done_stays(self) -> None:
        for operation_id in self.known:
            operation = self.operation(operation_id)
            if operation.done:
                assert (operation.facts is None) != (operation.error is None)
                assert self.done.setdefault(operation_id, operation) == operation
                self.current.pop(operation_id, None)

    @invariant()
    def an_operation_ends_once(self) -> None:
        with self.queue.database.read() as connection:
            ends = Counter(connection.scalars(select(events.c.operation).where(events.c.type == "done")))
        assert ends == Counter(operation_id for operation_id in self.known if self.operation(operation_id).done)

    @invariant()
    def results_are_the_published_ones(self) -> None:
        for operation in self.done.values():
            if operation.facts is not None:
                assert operation.facts == self.published[operation.action]
        for action, facts in self.published.items():
            assert self.store.action_result(action) == facts

    # ------------------------------------------------------------- details

    def alive(self) -> list[Operation]:
        return [each for each in self.queue.page(None, after=None, limit=999) if not each.done]

    def operation(self, operation_id: str) -> Operation:
        found = self.queue.get(operation_id)
        assert found is not None
        return found

    def change(self, which: object, **values: object) -> None:
        with self.queue.database.write() as connection:
            connection.execute(update(operations).where(which).values(**values))

    def wait_long(self) -> None:
        """Let longer pass than the clock has stepped back."""
        days_s = 100 * 86_400
        self.change(
            operations.c.state == "done",
            end_time=operations.c.end_time - days_s,
            remember_until=operations.c.remember_until - days_s,
        )

    def publish(self, claim: Claim) -> dict[str, object]:
        self.results += 1
        digest = f"sha256:{self.results:064x}"
        facts = self.store.publish(claim.action, Artifact(digest, {"digest": digest}, {"source": digest.encode()}))
        assert self.published.setdefault(claim.action, facts) == facts
        return facts

    def check(self, claim: Claim, is_written: bool) -> None:
        """A write succeeds exactly while the claim is current."""
        assert is_written == (self.current.get(claim.id) == claim.attempt)
        if is_written:
            assert self.operation(claim.id).state is not OperationState.BUILDING
            del self.current[claim.id]


@pytest.mark.parametrize("count", [15, pytest.param(200, marks=pytest.mark.slow)])
def test_operations_in_any_order(count: int) -> None:
    run_state_machine_as_test(
        OperationsMachine,
        settings=settings(max_examples=count, stateful_step_count=40, suppress_health_check=list(HealthCheck)),
    )
