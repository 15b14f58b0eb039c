"""The operations table, on both databases: one operation an action, turns, leases, fences, retries, deadlines."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest
from clocks import ManualClock
from sqlalchemy import update
from waiting import PATIENCE_S

from roller_svc.errors import BuildServiceError, CompileError, ConflictError, QueueFullError, QuotaExceededError
from roller_svc.farm import queue as farm_queue
from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import interests, operations
from roller_svc.farm.idempotency import IdempotencyKeys, KeyedRequest
from roller_svc.farm.operations import CacheStatus, Operation, OperationState
from roller_svc.farm.queue import LEASE_S, Claim, Lease, OperationQueue, QueuedId, Submission
from roller_svc.farm.usage import DailyUsage
from roller_svc.settings import Resource

GENERATOR = "a" * 64
FACTS = {"digest": "sha256:" + "1" * 64}
pytestmark = pytest.mark.usefixtures("long_retry_delays")

LOST = BuildServiceError("killed", code="worker-lost")


@pytest.fixture
def clock() -> ManualClock:
    return ManualClock()


@pytest.fixture
def queue(database: Database, clock: ManualClock) -> OperationQueue:
    return OperationQueue(database, GENERATOR, max_alive=100, clock=clock)


def submission(action: str = "a", client: str = "", **more: Any) -> Submission:
    return Submission(action, {"expression": action}, more.pop("queue", "build.cuda"), client, **more)


def claimed(queue: OperationQueue, worker: str = "w", queues: tuple[str, ...] = ("*",)) -> Claim:
    claim = queue.claim(worker, queues)
    assert claim is not None
    return claim


def found(queue: OperationQueue, operation_id: str) -> Operation:
    operation = queue.get(operation_id)
    assert operation is not None
    return operation


def change(queue: OperationQueue, operation_id: str, **values: Any) -> None:
    """Set columns, as time or another process would."""
    with queue.database.write() as connection:
        connection.execute(update(operations).where(operations.c.id == operation_id).values(**values))


def expire(queue: OperationQueue, clock: ManualClock) -> None:
    """Let the leases end that are not renewed: the next sweep finds them."""
    queue.sweep()
    clock.now_s += LEASE_S


def make_ready(queue: OperationQueue, operation_id: str) -> None:
    """End the pause before a retry."""
    change(queue, operation_id, start_after=now_s() - 1)


def together(count: int, work: Callable[[int], object]) -> list[object]:
    """What as many threads return that begin at once."""
    barrier, results = threading.Barrier(count), [None] * count

    def run(number: int) -> None:
        barrier.wait()
        results[number] = work(number)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return list(results)


def test_a_claim_has_the_ids_of_the_request_that_queued_it(queue: OperationQueue) -> None:
    queue.submit(replace(submission(), request_id="r1", traceparent="00-1-2-01"))
    queue.submit(replace(submission(), request_id="r2", traceparent="00-3-4-01"))  # joins
    claim = claimed(queue)
    assert (claim.request_id, claim.traceparent) == ("r1", "00-1-2-01")


def test_an_operation_from_submission_to_result(queue: OperationQueue) -> None:
    operation = queue.submit(submission())
    assert (operation.state, operation.cache, operation.attempt) == (OperationState.QUEUED, CacheStatus.MISS, 0)
    claim = claimed(queue)
    assert claim.ready_time > 0
    assert replace(claim, ready_time=0.0) == Claim(operation.id, 1, "a", {"expression": "a"}, 0)
    assert (found(queue, operation.id).state, found(queue, operation.id).worker) == (OperationState.BUILDING, "w")
    assert queue.claim("other") is None
    assert queue.renew([claim]) == {operation.id: Lease.CURRENT}
    assert queue.finish(claim, FACTS)
    done = found(queue, operation.id)
    assert (done.done, done.facts, done.error, done.worker) == (True, FACTS, None, None)
    events = queue.events(operation.id)
    assert [event["type"] for event in events] == ["queued", "building", "done"]
    assert [event["number"] for event in events] == [1, 2, 3]
    assert queue.events(operation.id, after=2) == events[2:]


def test_identical_submissions_share_an_operation(queue: OperationQueue) -> None:
    first = queue.submit(submission())
    again = [queue.submit(submission(client=client)) for client in ("", "b", "b", "c")]
    assert {operation.id for operation in again} == {first.id}
    assert {operation.cache for operation in again} == {CacheStatus.JOINED}
    assert queue.finish(claimed(queue), FACTS)
    assert queue.submit(submission()).id != first.id


def test_identical_submissions_at_once_make_one_operation(queue: OperationQueue) -> None:
    made = together(16, lambda number: queue.submit(submission(client=str(number % 4))).id)
    assert len(set(made)) == 1


def test_each_operation_is_claimed_once(queue: OperationQueue) -> None:
    ids = {queue.submit(submission(str(number))).id for number in range(12)}
    claims = together(16, lambda number: queue.claim(str(number)))
    assert sorted(claim.id for claim in claims if isinstance(claim, Claim)) == sorted(ids)


def test_what_is_done_never_changes(queue: OperationQueue) -> None:
    operation = queue.submit(submission())
    claim = claimed(queue)
    assert queue.finish(claim, FACTS)
    done = found(queue, operation.id)
    assert not queue.finish(claim, {"digest": "other"})
    assert not queue.fail(claim, CompileError("no"))
    assert not queue.retry(claim, LOST)
    assert not queue.release(claim)
    assert not queue.end_cancelled(claim)
    assert queue.cancel(operation.id, "", for_all=True) == done
    assert queue.renew([claim]) == {operation.id: Lease.LOST}
    queue.sweep()
    assert found(queue, operation.id) == done


def test_a_worker_that_lost_its_lease_changes_nothing(queue: OperationQueue, clock: ManualClock) -> None:
    operation = queue.submit(submission())
    stale = claimed(queue, "stalled")
    expire(queue, clock)
    queue.sweep()
    make_ready(queue, operation.id)
    fresh = claimed(queue, "other")
    assert (fresh.id, fresh.attempt, fresh.failures) == (stale.id, 2, 1)
    assert queue.renew([stale]) == {operation.id: Lease.LOST}
    assert not queue.finish(stale, {"digest": "stale"})
    assert not queue.retry(stale, LOST)
    assert queue.finish(fresh, FACTS)
    assert found(queue, operation.id).facts == FACTS


def test_a_lease_that_is_renewed_is_not_swept(queue: OperationQueue, clock: ManualClock) -> None:
    operation = queue.submit(submission())
    claim = claimed(queue)
    expire(queue, clock)
    assert queue.renew([claim]) == {operation.id: Lease.CURRENT}
    assert queue.sweep() == []
    assert found(queue, operation.id).state is OperationState.BUILDING


def test_a_transient_error_is_retried_and_then_poisons(queue: OperationQueue) -> None:
    operation = queue.submit(submission())
    for failures in range(len(farm_queue.RETRY_DELAYS_S)):
        claim = claimed(queue)
        assert claim.failures == failures
        assert queue.retry(claim, LOST)
        assert queue.claim("w") is None  # the pause
        make_ready(queue, operation.id)
    assert queue.retry(claimed(queue), LOST)
    error = found(queue, operation.id).error
    assert error is not None
    assert (error["code"], "killed (4 attempts" in str(error["message"])) == ("build-poisoned", True)
    assert [event["type"] for event in queue.events(operation.id)].count("retry") == 3


def test_a_released_claim_is_no_failure(queue: OperationQueue) -> None:
    queue.submit(submission())
    for _ in range(6):
        assert queue.release(claimed(queue))
    assert claimed(queue).failures == 0


def test_several_sweepers_send_an_operation_once(queue: OperationQueue) -> None:
    operation = queue.submit(submission())
    assert queue.sweep() == []  # a courier has just got it
    change(queue, operation.id, send_time=now_s() - 60)
    sent = together(6, lambda _: queue.sweep())
    assert [entry for part in sent for entry in part] == [QueuedId(operation.id, "build.cuda")]


def test_several_sweepers_count_a_lost_worker_once(queue: OperationQueue, clock: ManualClock) -> None:
    operation = queue.submit(submission())
    claimed(queue)
    expire(queue, clock)
    together(6, lambda _: queue.sweep())
    make_ready(queue, operation.id)
    assert claimed(queue).failures == 1


def test_clients_take_turns(queue: OperationQueue) -> None:
    for number in range(4):
        queue.submit(submission(f"greedy{number}", "greedy"))
    assert claimed(queue).action == "greedy0"
    for action, client in (("s", "2"), ("t", "3"), ("u", "2")):
        queue.submit(submission(action, client))
    order = [claimed(queue).action for _ in range(6)]
    assert order == ["s", "t", "greedy1", "u", "greedy2", "greedy3"]


def test_priority_orders_the_builds_of_one_client(queue: OperationQueue) -> None:
    queue.submit(submission("low", priority=-1))
    queue.submit(submission("first"))
    queue.submit(submission("second"))
    queue.submit(submission("high", priority=5))
    queue.submit(submission("raised"))
    queue.submit(submission("raised", "other", priority=3))
    queue.submit(submission("of-others", "other"))
    order = [claimed(queue).action for _ in range(6)]
    assert order == ["high", "raised", "first", "of-others", "second", "low"]


def test_an_operation_is_due_by_the_earliest_share_of_those_who_wait(queue: OperationQueue) -> None:
    """Who asks first with a low priority, behind much of its own, delays nobody else who asks for the same."""
    for number in range(60):
        queue.submit(submission(f"own{number}", "greedy", priority=100))
    wanted = [f"wanted{number}" for number in range(3)]
    for action in wanted:
        queue.submit(submission(action, "greedy", priority=-100))
        assert queue.submit(submission(action, "victim")).cache is CacheStatus.JOINED
    queue.submit(submission("new", "victim"))
    order = [claimed(queue).action for _ in range(8)]
    assert [action for action in order if not action.startswith("own")] == [*wanted, "new"]
    assert sum(action.startswith("own") for action in order) == 4


def test_a_turn_is_taken_by_the_client_whose_it_was(queue: OperationQueue) -> None:
    queue.submit(submission("shared", "a"))
    queue.submit(submission("shared", "b", priority=1))
    queue.submit(submission("of-a", "a"))
    queue.submit(submission("of-b", "b"))
    assert [claimed(queue).action for _ in range(3)] == ["shared", "of-b", "of-a"]


def test_who_cancels_and_asks_again_has_the_priority_it_asks_with(queue: OperationQueue) -> None:
    kept = queue.submit(submission("shared", "other", priority=-5))
    queue.submit(submission("shared", "me", priority=-5))
    queue.submit(submission("mine", "me"))
    queue.cancel(kept.id, "me")
    again = queue.submit(submission("shared", "me", priority=9))
    assert (again.id, again.cache) == (kept.id, CacheStatus.JOINED)
    assert queue.position(kept.id) == 0
    queue.cancel(kept.id, "other")
    assert [claimed(queue).action for _ in range(2)] == ["shared", "mine"]


def test_a_priority_is_raised_by_asking_again_and_never_lowered(queue: OperationQueue) -> None:
    for action in "abc":
        queue.submit(submission(action, "me"))
    queue.submit(submission("c", "me", priority=2))
    queue.submit(submission("c", "me", priority=-2))
    queue.submit(submission("a", "me", priority=-2))
    assert [claimed(queue).action for _ in range(3)] == ["c", "a", "b"]


def test_rows_of_an_earlier_version_keep_their_priority(queue: OperationQueue) -> None:
    first, second = (queue.submit(submission(action, "me")) for action in "ab")
    with queue.database.write() as connection:
        connection.execute(update(interests).values(priority=None))
    change(queue, second.id, priority=3)
    assert queue.position(second.id) == 0
    assert queue.insert_foreign("9999999999999-legacy", {})  # nobody is known to wait for it
    assert queue.position("9999999999999-legacy") == 0
    assert [claimed(queue).id for _ in range(2)] == [second.id, first.id]


def test_what_failed_waits_behind_what_did_not(queue: OperationQueue) -> None:
    queue.submit(submission("a"))
    queue.submit(submission("b"))
    claim = claimed(queue)
    assert queue.retry(claim, LOST)
    make_ready(queue, claim.id)
    assert claimed(queue).action == "b"


def test_workers_take_from_their_queues_only(queue: OperationQueue) -> None:
    for name in ("build.cuda", "measure.sm_90", "local.m1", "local.m2"):
        queue.submit(submission(name, queue=name))
    assert queue.claim("w", ("build.cpu.x86-64-v3",)) is None
    assert claimed(queue, queues=("measure.sm_90", "x")).action == "measure.sm_90"
    assert claimed(queue, queues=("*",)).action == "build.cuda"
    assert queue.claim("w", ("*",)) is None  # not those of single machines
    assert claimed(queue, queues=("*", "local.m2")).action == "local.m2"
    assert claimed(queue, queues=("local.m1",)).action == "local.m1"


def test_another_generators_operation_waits_for_its_worker(queue: OperationQueue, database: Database) -> None:
    operation = queue.submit(submission())
    newer = OperationQueue(database, "b" * 64, max_alive=100)
    assert newer.claim("w") is None
    assert newer.foreign({GENERATOR}, 9) == []
    assert newer.foreign((), 9) == [found(queue, operation.id)]
    assert newer.adopt(operation, "new", "build.hip")
    assert not newer.adopt(operation, "new", "build.hip")
    assert queue.claim("w") is None
    claim = claimed(newer)
    assert (claim.id, claim.action, found(queue, claim.id).queue) == (operation.id, "new", "build.hip")


def test_an_adopted_action_that_is_built_already_waits_for_it(queue: OperationQueue, database: Database) -> None:
    old = queue.submit(submission("old"))
    newer = OperationQueue(database, "b" * 64, max_alive=100)
    newer.submit(submission("new"))
    assert not newer.adopt(old, "new", "build.cuda")
    assert newer.finish(claimed(newer), FACTS)
    assert newer.adopt(old, "new", "build.cuda")


def test_a_foreign_operation_that_cannot_be_read_ends(queue: OperationQueue, database: Database) -> None:
    operation = queue.submit(submission())
    newer = OperationQueue(database, "b" * 64, max_alive=100)
    newer.end_foreign(operation, CompileError("unreadable"))
    assert found(queue, operation.id).error is not None


def test_limits_of_the_queue_and_of_a_client(database: Database) -> None:
    queue = OperationQueue(database, GENERATOR, max_alive=3)
    queue.submit(submission("a", "greedy", max_alive=2))
    queue.submit(submission("b", "greedy", max_alive=2))
    with pytest.raises(QuotaExceededError, match="2 builds of this client"):
        queue.submit(submission("c", "greedy", max_alive=2))
    queue.submit(submission("a", "greedy", max_alive=2))  # joins
    queue.submit(submission("d", "other", max_alive=2))
    with pytest.raises(QueueFullError, match="3 builds are waiting"):
        queue.submit(submission("e", "third", max_alive=2))
    queue.submit(submission("d", "third", max_alive=2))
    assert queue.finish(claimed(queue), FACTS)
    queue.submit(submission("e", "third", max_alive=2))


def test_an_operation_is_cancelled_when_the_last_client_gives_up(queue: OperationQueue) -> None:
    operation = queue.submit(submission(client="a"))
    queue.submit(submission(client="b"))
    kept = queue.cancel(operation.id, "a")
    assert kept is not None
    assert not kept.done
    ended = queue.cancel(operation.id, "b")
    assert ended is not None
    assert ended.error is not None
    assert ended.error["code"] == "operation-cancelled"
    assert queue.claim("w") is None
    assert queue.submit(submission(client="a")).id != operation.id  # not remembered


def test_a_stranger_cancels_nothing_but_an_administrator_all(queue: OperationQueue) -> None:
    operation = queue.submit(submission(client="a"))
    assert queue.cancel("no-such", "a") is None
    assert not found(queue, operation.id).done
    queue.cancel(operation.id, "stranger")
    assert not found(queue, operation.id).done
    queue.cancel(operation.id, "admin", for_all=True)
    assert found(queue, operation.id).done


def test_a_running_build_learns_that_it_is_cancelled(queue: OperationQueue) -> None:
    operation = queue.submit(submission(client="a"))
    claim = claimed(queue)
    queue.cancel(operation.id, "a")
    assert queue.renew([claim]) == {operation.id: Lease.CANCELLED}
    assert queue.end_cancelled(claim)
    assert str((found(queue, operation.id).error or {})["code"]) == "operation-cancelled"


def test_a_client_that_asks_again_revives_a_cancelled_build(queue: OperationQueue) -> None:
    operation = queue.submit(submission(client="a"))
    claim = claimed(queue)
    queue.cancel(operation.id, "a")
    assert queue.submit(submission(client="b")).id == operation.id
    assert queue.end_cancelled(claim)  # its worker has stopped the build already
    assert found(queue, operation.id).state is OperationState.QUEUED
    assert claimed(queue).failures == 0


def test_a_cancelled_operation_of_a_lost_worker_ends(queue: OperationQueue, clock: ManualClock) -> None:
    operation = queue.submit(submission(client="a"))
    claimed(queue)
    queue.cancel(operation.id, "a")
    expire(queue, clock)
    queue.sweep()
    assert str((found(queue, operation.id).error or {})["code"]) == "operation-cancelled"


def test_deadlines(queue: OperationQueue) -> None:
    waiting = queue.submit(submission("waiting", deadline_s=60.0))
    building = queue.submit(submission("building", priority=1, deadline_s=60.0))
    claim = claimed(queue)
    for operation in (waiting, building):
        change(queue, operation.id, deadline=now_s() - 1)
    queue.sweep()
    assert str((found(queue, waiting.id).error or {})["code"]) == "deadline-exceeded"
    assert queue.renew([claim]) == {building.id: Lease.OVERDUE}


def test_the_latest_deadline_of_those_who_wait_counts(queue: OperationQueue) -> None:
    operation = queue.submit(submission(client="a", deadline_s=60.0))
    queue.submit(submission(client="b", deadline_s=30.0))
    change(queue, operation.id, deadline=operations.c.deadline - 45)
    queue.sweep()
    assert not found(queue, operation.id).done
    queue.submit(submission(client="c"))  # no deadline
    change(queue, operation.id, deadline=operations.c.deadline - 45)
    queue.sweep()
    assert not found(queue, operation.id).done


def test_an_error_of_the_inputs_own_is_remembered_for_a_time(queue: OperationQueue) -> None:
    operation = queue.submit(submission())
    assert queue.fail(claimed(queue), CompileError("no", log="line 1"), remember_s=60.0)
    again = queue.submit(submission(client="other"))
    assert (again.id, again.cache, again.done) == (operation.id, CacheStatus.HIT, True)
    assert again.error == {"class": "CompileError", "code": "compile-failed", "message": "no", "log": "line 1"}
    change(queue, operation.id, remember_until=now_s() - 1)
    assert not queue.submit(submission()).done


def test_an_error_that_is_not_remembered_is_built_again(queue: OperationQueue) -> None:
    queue.submit(submission())
    assert queue.fail(claimed(queue), CompileError("no"))
    assert not queue.submit(submission()).done


def test_a_remembered_error_outlives_its_retention(queue: OperationQueue) -> None:
    operation = queue.submit(submission())
    assert queue.fail(claimed(queue), CompileError("no"), remember_s=600.0)
    change(queue, operation.id, end_time=now_s() - 100)
    assert queue.forget(60.0) == 0
    assert queue.submit(submission()).id == operation.id
    change(queue, operation.id, remember_until=now_s() - 1)
    assert queue.forget(60.0) == 1


def test_old_operations_are_forgotten(queue: OperationQueue) -> None:
    old, recent, alive = (queue.submit(submission(action)) for action in "abc")
    for _ in "ab":
        assert queue.finish(claimed(queue), FACTS)
    change(queue, old.id, end_time=now_s() - 100)
    assert queue.forget(60.0) == 1
    assert queue.get(old.id) is None
    assert queue.events(old.id) == []
    assert found(queue, recent.id).done
    assert not found(queue, alive.id).done


def test_pages_of_operations(queue: OperationQueue) -> None:
    mine = [queue.submit(submission(str(number), "me")).id for number in range(5)]
    shared = queue.submit(submission("shared", "other")).id
    queue.submit(submission("shared", "me"))
    theirs = queue.submit(submission("theirs", "other")).id
    everything = sorted([*mine, shared, theirs], reverse=True)
    assert [operation.id for operation in queue.page(None, after=None, limit=99)] == everything
    first = [operation.id for operation in queue.page("me", after=None, limit=4)]
    rest = [operation.id for operation in queue.page("me", after=first[-1], limit=4)]
    assert first + rest == sorted([*mine, shared], reverse=True)


def test_which_operations_have_ended(queue: OperationQueue) -> None:
    done, alive = queue.submit(submission("a")).id, queue.submit(submission("b")).id
    assert queue.finish(claimed(queue), FACTS)
    assert queue.ended([done, alive, "no-such"]) == {done, "no-such"}
    assert queue.ended([]) == set()
    assert len(queue.ended(map(str, range(3000)))) == 3000


def test_names_from_outside_are_values_only(queue: OperationQueue) -> None:
    hostile = "x' OR '1'='1"
    queue.submit(submission())
    assert queue.get(hostile) is None
    assert queue.page(hostile, after=hostile, limit=9) == []
    operation = queue.submit(replace(submission(hostile, hostile), queue=hostile, request={"a": '"\\u0000\ud800'}))
    assert found(queue, operation.id).request == {"a": '"\\u0000\ud800'}
    assert claimed(queue, queues=(hostile,)).id == operation.id


def test_a_position_counts_the_builds_that_start_first(queue: OperationQueue) -> None:
    mine = [queue.submit(submission(f"a{number}", "a")) for number in range(3)]
    other = [queue.submit(submission(f"b{number}", "b")) for number in range(2)]
    urgent = queue.submit(submission("a9", "a", priority=1))
    elsewhere = queue.submit(submission("c", "c", queue="build.hip"))
    positions = [queue.position(operation.id) for operation in (urgent, *mine, *other, elsewhere)]
    # a's first build comes after one of b's, its second and later ones after two
    assert positions == [1, 3, 4, 5, 1, 3, 0]
    order = [claimed(queue, queues=("build.cuda",)).id for _ in range(6)]
    assert sorted(order) == sorted(operation.id for operation in (urgent, *mine, *other))
    assert queue.position(order[0]) is None
    assert queue.position("unknown") is None


def test_builds_that_measure_wait_for_their_device(queue: OperationQueue) -> None:
    queue.submit(submission("a", measured_on="cpu"))
    queue.submit(submission("b", measured_on="gpu"))
    queue.submit(submission("c"))
    free = queue.claim("w", measured_on=())
    assert free is not None
    assert replace(free, ready_time=0.0) == replace(claimed_free(queue), attempt=1)
    gpu = queue.claim("w", measured_on=("gpu",))
    assert gpu is not None
    assert (gpu.action, gpu.measured_on) == ("b", "gpu")
    assert queue.claim("w", measured_on=("gpu",)) is None
    rest = queue.claim("w")
    assert rest is not None
    assert (rest.action, rest.measured_on) == ("a", "cpu")


def claimed_free(queue: OperationQueue) -> Claim:
    """The claim of the operation that measures nothing."""
    operation = next(one for one in queue.page(None, after=None, limit=9) if one.action == "c")
    return Claim(operation.id, 0, "c", operation.request, 0)


def test_an_operation_whose_queue_nobody_serves_fails_after_a_while(queue: OperationQueue, clock: ManualClock) -> None:
    cuda = queue.submit(submission("a"))
    local = queue.submit(submission("b", queue="local.m"))
    assert not cuda.is_unserved
    assert queue.end_unserved({"build.cpu"}, 60.0) == []
    assert found(queue, cuda.id).is_unserved
    assert queue.end_unserved({"*"}, 60.0) == []
    assert not found(queue, cuda.id).is_unserved
    assert found(queue, local.id).is_unserved  # every queue, but not those of single machines
    assert queue.end_unserved({"build.cpu"}, 60.0) == []
    assert queue.end_unserved({"build.cpu"}, 60.0) == []
    queue.submit(submission("later"))
    clock.now_s += 61
    assert queue.end_unserved({"build.cpu", "local.m"}, 60.0) == [cuda.id]
    error = found(queue, cuda.id).error or {}
    assert error["code"] == "no-worker"
    assert "--queues build.cuda" in str(error["message"])
    assert not found(queue, cuda.id).is_unserved
    assert not found(queue, local.id).done


def test_an_operation_that_is_building_or_of_others_is_never_unserved(queue: OperationQueue, database: Database) -> None:
    building = queue.submit(submission("a"))
    claimed(queue)
    other = OperationQueue(database, "b" * 64, max_alive=100).submit(submission("b"))
    assert queue.end_unserved((), 0.0) == []
    assert queue.end_unserved((), 0.0) == []
    assert [found(queue, one.id).done for one in (building, other)] == [False, False]


def test_a_claim_ends_the_wait_for_a_worker(queue: OperationQueue) -> None:
    operation = queue.submit(submission("a", is_served=False))
    assert operation.is_unserved
    queue.release(claimed(queue))
    assert not found(queue, operation.id).is_unserved


# ---------------------------------------------------------------- keys of requests, and the day's seconds


def test_one_key_at_once_queues_one_build(queue: OperationQueue) -> None:
    """Eight requests find no operation of their key before any of them is queued."""
    keys = IdempotencyKeys(queue.database)
    begin = threading.Barrier(8)

    def send(number: int) -> Operation | ConflictError:
        keyed = KeyedRequest("client", "key", b"%d" % number)
        assert keys.find(keyed) is None
        begin.wait(PATIENCE_S)
        try:
            return queue.submit(submission(f"action {number}", "client", keyed=keyed))
        except ConflictError as refused:
            return refused

    with ThreadPoolExecutor(8) as threads:
        results = list(threads.map(send, range(8)))
    (operation,) = (each for each in results if isinstance(each, Operation))
    assert [each.id for each in queue.page(None, after=None, limit=100)] == [operation.id]
    assert [each.id for each in queue.page("client", after=None, limit=100)] == [operation.id]


def test_a_key_belongs_to_the_operation_that_its_request_joins(queue: OperationQueue) -> None:
    first = queue.submit(submission("a", "client"))
    keyed = KeyedRequest("client", "key", b"body")
    assert queue.submit(submission("a", "client", keyed=keyed)).id == first.id
    assert IdempotencyKeys(queue.database).find(keyed) == first.id


def test_a_client_beyond_its_seconds_of_a_day_joins_and_queues_nothing(queue: OperationQueue) -> None:
    queue.submit(submission("a", "other"))
    DailyUsage(queue.database).add("client", Resource.BUILD_SECONDS, 10.0)
    queue.submit(submission("a", "client", max_build_s=10.0))
    with pytest.raises(QuotaExceededError) as refused:
        queue.submit(submission("b", "client", max_build_s=10.0))
    assert (refused.value.retry_after_s or 0) > 0
    queue.submit(submission("b", "client", max_build_s=11.0))
    queue.submit(submission("c", "other", max_build_s=10.0))
