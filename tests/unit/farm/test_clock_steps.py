"""Clocks that are wrong and are set right: nothing waits for a moment that nobody could have set, and nothing is lost."""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
from clocks import HOUR_S, ManualClock, WallClock
from sqlalchemy import select
from waiting import wait_until

from roller_svc.errors import BuildServiceError, CompileError
from roller_svc.farm import queue as farm_queue
from roller_svc.farm.database.connect import Database
from roller_svc.farm.database.tables import events
from roller_svc.farm.operations import CacheStatus, Operation, new_id
from roller_svc.farm.queue import LEASE_S, Claim, Lease, OperationQueue, QueuedId, Submission
from roller_svc.farm.registry import ALIVE_S, Worker, WorkerRegistry

GENERATOR = "a" * 64
FACTS = {"digest": "sha256:" + "1" * 64}
pytestmark = pytest.mark.usefixtures("long_retry_delays")
STEPS = pytest.mark.parametrize("step_s", [HOUR_S, -HOUR_S])


@pytest.fixture
def wall(database: Database) -> WallClock:
    return WallClock(database)


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def queue(database: Database, wall: WallClock, clock: ManualClock) -> OperationQueue:
    return started_again(database, clock)


def started_again(database: Database, clock: ManualClock) -> OperationQueue:
    """A queue that has seen nothing yet, as after a restart."""
    return OperationQueue(database, GENERATOR, max_alive=100, clock=clock)


def submission(action: str = "a", client: str = "", **more: Any) -> Submission:
    return Submission(action, {"expression": action}, "build.cuda", client, **more)


def claimed(queue: OperationQueue) -> Claim:
    claim = queue.claim("w")
    assert claim is not None
    return claim


def found(queue: OperationQueue, operation_id: str) -> Operation:
    operation = queue.get(operation_id)
    assert operation is not None
    return operation


def code(operation: Operation) -> object:
    return (operation.error or {}).get("code")


def test_a_clock_that_was_ahead_strands_nothing(
    queue: OperationQueue, database: Database, wall: WallClock, clock: ManualClock
) -> None:
    wall.step(HOUR_S)
    before = [queue.submit(submission(action)).id for action in "abcd"]
    claimed(queue)  # by a service that is killed
    wall.step(-HOUR_S)
    again = started_again(database, clock)
    assert again.submit(submission("b")).id == before[1]
    for expected in before[1:]:
        claim = claimed(again)
        assert claim.id == expected
        assert again.finish(claim, FACTS)
    again.sweep()
    clock.now_s += LEASE_S
    assert again.sweep() == []  # its retry waits, by the clock that is right now
    wall.step(farm_queue.RETRY_DELAYS_S[0] + 0.1)
    claim = claimed(again)
    assert (claim.id, claim.attempt) == (before[0], 2)
    assert again.finish(claim, FACTS)


def test_a_build_that_a_wrong_clock_left_is_cancelled(
    queue: OperationQueue, database: Database, wall: WallClock, clock: ManualClock
) -> None:
    wall.step(HOUR_S)
    operation = queue.submit(submission())
    claimed(queue)
    wall.step(-HOUR_S)
    again = started_again(database, clock)
    again.cancel(operation.id, "")
    again.sweep()
    clock.now_s += LEASE_S
    again.sweep()
    assert code(found(again, operation.id)) == "operation-cancelled"


@STEPS
def test_a_build_outlives_a_step_while_its_lease_is_renewed(
    queue: OperationQueue, wall: WallClock, clock: ManualClock, step_s: float
) -> None:
    operation = queue.submit(submission())
    claim = claimed(queue)
    for _ in range(4):
        queue.sweep()
        clock.now_s += LEASE_S / 3
        queue.sweep()
        wall.step(step_s)
        queue.sweep()
        assert queue.renew([claim]) == {operation.id: Lease.CURRENT}
    assert queue.finish(claim, FACTS)


@STEPS
def test_a_lost_worker_is_noticed_in_spite_of_a_step(
    queue: OperationQueue, wall: WallClock, clock: ManualClock, step_s: float
) -> None:
    operation = queue.submit(submission())
    claimed(queue)
    queue.sweep()
    wall.step(step_s)
    clock.now_s += LEASE_S
    queue.sweep()
    wall.step(farm_queue.RETRY_DELAYS_S[0] + 0.1)
    assert claimed(queue).id == operation.id


@STEPS
def test_a_retry_outlives_a_step(queue: OperationQueue, wall: WallClock, step_s: float) -> None:
    operation = queue.submit(submission())
    assert queue.retry(claimed(queue), BuildServiceError("killed", code="worker-lost"))
    wall.step(step_s)
    assert queue.sweep() == [QueuedId(operation.id, "build.cuda")]
    assert claimed(queue).id == operation.id


def test_an_announcement_of_a_clock_that_was_ahead_is_repeated(queue: OperationQueue, wall: WallClock) -> None:
    wall.step(HOUR_S)
    operation = queue.submit(submission())
    wall.step(-HOUR_S)
    assert queue.sweep() == [QueuedId(operation.id, "build.cuda")]


@STEPS
def test_a_deadline_outlives_a_step(queue: OperationQueue, wall: WallClock, clock: ManualClock, step_s: float) -> None:
    waiting = queue.submit(submission("waiting", deadline_s=60.0))
    building = queue.submit(submission("building", priority=1, deadline_s=60.0))
    claim = claimed(queue)
    queue.sweep()
    queue.renew([claim])
    wall.step(step_s)
    clock.now_s += 50
    queue.sweep()
    assert not found(queue, waiting.id).done
    assert queue.renew([claim]) == {building.id: Lease.CURRENT}
    clock.now_s += 11
    queue.sweep()
    assert code(found(queue, waiting.id)) == "deadline-exceeded"
    assert queue.renew([claim]) == {building.id: Lease.OVERDUE}


@STEPS
def test_the_wait_for_a_worker_outlives_a_step(queue: OperationQueue, wall: WallClock, clock: ManualClock, step_s: float) -> None:
    operation = queue.submit(submission(is_served=False))
    assert queue.end_unserved((), 600.0) == []
    wall.step(step_s)
    clock.now_s += 590
    assert queue.end_unserved((), 600.0) == []
    clock.now_s += 11
    assert queue.end_unserved((), 600.0) == [operation.id]


@STEPS
def test_a_worker_stays_alive_and_a_dead_one_ends_in_spite_of_a_step(
    database: Database, wall: WallClock, clock: ManualClock, step_s: float
) -> None:
    registry = WorkerRegistry(database, clock)
    worker, dead = (Worker(name, ("*",), GENERATOR, {}) for name in "wd")
    registry.add(worker)
    registry.add(dead)
    assert [each.id for each in registry.alive()] == ["d", "w"]
    wall.step(step_s)
    clock.now_s += ALIVE_S - 1
    registry.beat(worker)
    assert [each.id for each in registry.alive()] == ["d", "w"]
    clock.now_s += 2
    assert [each.id for each in registry.alive()] == ["w"]
    assert WorkerRegistry(database, clock).alive()[-1:] == registry.alive()


def test_workers_of_a_clock_that_was_ahead_are_not_alive(database: Database, wall: WallClock, clock: ManualClock) -> None:
    wall.step(HOUR_S)
    ghost = Worker("ghost", ("*",), GENERATOR, {})
    WorkerRegistry(database, clock).add(ghost)
    wall.step(-HOUR_S)
    again = WorkerRegistry(database, clock)
    assert again.alive() == []
    again.beat(ghost)
    assert [each.id for each in again.alive()] == ["ghost"]


def test_an_error_of_a_clock_that_was_ahead_is_built_again(queue: OperationQueue, wall: WallClock) -> None:
    wall.step(HOUR_S)
    queue.submit(submission())
    assert queue.fail(claimed(queue), CompileError("no"), remember_s=600.0)
    assert queue.submit(submission()).cache is CacheStatus.HIT
    wall.step(-HOUR_S)
    assert not queue.submit(submission()).done


def test_ids_sort_by_creation_whatever_the_clock_says() -> None:
    ahead = f"{int((time.time() + HOUR_S) * 1000):013d}-0"
    assert new_id(ahead) > ahead
    assert new_id() < ahead
    assert new_id("legacy") < ahead


def test_operations_are_claimed_in_the_order_of_their_submission(queue: OperationQueue, wall: WallClock) -> None:
    ids = []
    for number, step_s in enumerate([0.0, HOUR_S, -2 * HOUR_S, HOUR_S]):
        wall.step(step_s)
        ids.append(queue.submit(submission(str(number))).id)
    assert [claimed(queue).id for _ in ids] == ids


@pytest.fixture
def standby(database: Database, database_url: str) -> Iterator[Database]:
    other = Database(database_url)
    yield other
    other.close()


@pytest.mark.slow
@STEPS
def test_two_clocks_under_load_lose_nothing(
    database: Database, standby: Database, wall: WallClock, clock: ManualClock, step_s: float
) -> None:
    """Two processes whose clocks differ, one of which steps: everything ends once, though a worker dies."""
    WallClock(standby).step(step_s)
    queues = [started_again(each, clock) for each in (database, standby)]
    ids = [queues[number % 2].submit(submission(str(number), str(number % 3))).id for number in range(12)]
    queues[1].claim("dies at once")
    stop = threading.Event()
    finished: Counter[str] = Counter()

    def work(queue: OperationQueue) -> None:
        while not stop.is_set():
            queue.sweep()
            claim = queue.claim("w")
            if claim is None:
                stop.wait(0.1)
                continue
            for _ in range(3):
                stop.wait(0.05)
                queue.renew([claim])
            finished[claim.id] += queue.finish(claim, FACTS)

    threads = [threading.Thread(target=work, args=(queue,)) for queue in queues]
    for thread in threads:
        thread.start()
    wait_until(lambda: len(finished) >= 6)
    wall.step(step_s)
    wait_until(lambda: len(finished) == len(ids) - 1)
    stop.set()
    for thread in threads:
        thread.join()
    queues[0].sweep()
    clock.now_s += LEASE_S
    queues[0].sweep()
    wall.step(farm_queue.RETRY_DELAYS_S[0] + 0.1)
    claim = claimed(queues[0])  # which the worker that died had
    finished[claim.id] += queues[0].finish(claim, FACTS)
    assert finished == Counter(ids)
    with database.read() as connection:
        assert Counter(connection.scalars(select(events.c.operation).where(events.c.type == "done"))) == Counter(ids)
        retries = list(connection.scalars(select(events.c.operation).where(events.c.type == "retry")))
    assert len(retries) == 1  # of the worker that died
