"""Workers: what is built once, retried, interrupted, released and remembered."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from clocks import ManualClock
from sqlalchemy import select, update
from waiting import PATIENCE_S, wait_until

from roller_svc.compiler.request import build_request
from roller_svc.errors import (
    ArgumentError,
    BuildServiceError,
    CompileError,
    KernelTimeoutError,
    LaunchError,
    RollerError,
    StoreError,
    ToolchainMissingError,
    UnknownKernelError,
)
from roller_svc.farm import runner
from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import operations
from roller_svc.farm.measuring import DeviceLocks
from roller_svc.farm.models import Request, request_record
from roller_svc.farm.operations import Operation, OperationState
from roller_svc.farm.queue import OperationQueue, Submission
from roller_svc.farm.registry import Worker, WorkerRegistry
from roller_svc.farm.runner import BuildRunner, InProcessBuilders
from roller_svc.farm.store import Artifact, Store
from roller_svc.ir.report import BuildRequest

GENERATOR = "a" * 64
LEASE_S = 1.0


class Builds:
    """Builds at once, or when `gate` is set; an interrupted build raises."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.errors: list[RollerError | Exception] = []  # raised first
        self.gate = threading.Event()
        self.gate.set()
        self.begun = threading.Semaphore(0)
        self.interrupted: set[int] = set()

    def build(self, request: Request) -> Artifact:
        assert isinstance(request, BuildRequest)
        self.built.append(request.expression[0])
        self.interrupted.discard(threading.get_ident())
        self.begun.release()
        while not self.gate.wait(0.005):
            if threading.get_ident() in self.interrupted:
                raise BuildServiceError("killed", code="worker-lost")
        if self.errors:
            raise self.errors.pop(0)
        digest = f"sha256:{ord(request.expression[0]):064x}"
        return Artifact(digest, {"digest": digest}, {"source": request.expression.encode()})

    def interrupt(self, thread_id: int) -> None:
        self.interrupted.add(thread_id)


class Setup:
    """A queue, a store, and workers that share a way to build."""

    def __init__(self, database: Database, root: Path) -> None:
        self.queue = OperationQueue(database, GENERATOR, max_alive=100, lease_s=LEASE_S)
        self.store = Store(root)
        self.registry = WorkerRegistry(database)
        self.builds = Builds()
        self.ended: list[str] = []
        self.workers: list[BuildRunner] = []

    def submit(self, name: str, **more: Any) -> Operation:
        request = build_request(f"{name}[i] = x[i]", {"x": ("float32", (4,))}, target="cpu-x86-avx2", select="model")
        action = f"sha256:{ord(name) + 256:064x}"
        return self.queue.submit(Submission(action, request_record(request), "build.cpu", **more))

    def worker(self, name: str = "w", **more: Any) -> BuildRunner:
        worker = BuildRunner(
            self.queue,
            self.store,
            self.builds,
            self.registry,
            Worker(name, ("*",), GENERATOR, {}),
            on_end=self.ended.append,
            **more,
        )
        worker.start()
        self.workers.append(worker)
        return worker

    def operation(self, operation_id: str) -> Operation:
        found = self.queue.get(operation_id)
        assert found is not None
        return found

    def lease_until(self) -> float:
        with self.queue.database.write() as connection:
            return connection.execute(select(operations.c.lease_until)).scalar_one()

    def change(self, **values: Any) -> None:
        with self.queue.database.write() as connection:
            connection.execute(update(operations).values(**values))


@pytest.fixture
def setup(database: Database, tmp_path: Path) -> Iterator[Setup]:
    made = Setup(database, tmp_path / "store")
    yield made
    made.builds.gate.set()
    for worker in made.workers:
        worker.close()


def in_thread(work: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=work)
    thread.start()
    return thread


def test_a_build_is_published_and_recorded(setup: Setup) -> None:
    operation = setup.submit("a")
    worker = setup.worker()
    assert worker.run_next()
    assert not worker.run_next()
    done = setup.operation(operation.id)
    assert done.facts == setup.store.action_result(operation.action) == {"digest": f"sha256:{ord('a'):064x}"}
    assert setup.ended == [operation.id]


def test_what_an_earlier_attempt_published_is_not_built_again(setup: Setup) -> None:
    operation = setup.submit("a")
    facts: dict[str, object] = {"digest": "sha256:" + "5" * 64}
    setup.store.publish(operation.action, Artifact(str(facts["digest"]), facts, {"source": b"first"}))
    assert setup.worker().run_next()
    assert setup.builds.built == []
    assert setup.operation(operation.id).facts == facts


def test_the_first_publication_of_an_action_stays(setup: Setup) -> None:
    operation = setup.submit("a")
    worker = setup.worker()
    setup.builds.gate.clear()
    building = in_thread(worker.run_next)
    assert setup.builds.begun.acquire(timeout=PATIENCE_S)
    facts: dict[str, object] = {"digest": "sha256:" + "5" * 64}
    setup.store.publish(operation.action, Artifact(str(facts["digest"]), facts, {"source": b"first"}))
    setup.builds.gate.set()
    building.join()
    assert setup.operation(operation.id).facts == facts


def test_a_transient_error_is_retried(setup: Setup) -> None:
    operation = setup.submit("a")
    setup.builds.errors = [BuildServiceError("killed", code="worker-lost"), StoreError("full")]
    worker = setup.worker()
    for _ in range(3):
        setup.change(start_after=now_s() - 1)
        assert worker.run_next()
    assert (setup.operation(operation.id).error, setup.builds.built) == (None, ["a", "a", "a"])


def test_an_error_of_the_inputs_own_ends_it_at_once(setup: Setup) -> None:
    operation = setup.submit("a")
    setup.builds.errors = [CompileError("the compiler said no", log="line 1")]
    assert setup.worker(remember_errors_s=60.0).run_next()
    error = {"class": "CompileError", "code": "compile-failed", "message": "the compiler said no", "log": "line 1"}
    assert setup.operation(operation.id).error == error
    assert setup.submit("a").id == operation.id


@pytest.mark.parametrize(
    ("error", "is_own"),
    [
        (CompileError("no"), True),
        (ArgumentError("no"), True),
        (UnknownKernelError("no blob", code="unknown-blob"), False),
        (ArgumentError("no space left on device", code="unwritable-folder"), False),
        (KernelTimeoutError("late"), False),
        (ToolchainMissingError("no compiler"), False),
        (LaunchError("no device"), False),
    ],
)
def test_only_errors_of_the_inputs_own_are_remembered(setup: Setup, error: RollerError, is_own: bool) -> None:
    operation = setup.submit("a")
    setup.builds.errors = [error]
    assert setup.worker(remember_errors_s=60.0).run_next()
    assert setup.operation(operation.id).done
    assert (setup.submit("a").id == operation.id) is is_own


def test_a_bug_in_a_build_ends_it_and_is_raised(setup: Setup) -> None:
    operation = setup.submit("a")
    setup.builds.errors = [ZeroDivisionError("a bug")]
    worker = setup.worker()
    with pytest.raises(ZeroDivisionError):
        worker.run_next()
    assert str((setup.operation(operation.id).error or {})["code"]) == "farm-error"
    setup.submit("b")
    assert worker.run_next()


def test_an_unreadable_request_ends_with_that_error(setup: Setup) -> None:
    operation = setup.submit("a")
    setup.change(request={"expression": "a[i] = x[i]", "precision": "fast"})
    assert setup.worker().run_next()
    assert str((setup.operation(operation.id).error or {})["code"]) == "unreadable-record"


def test_a_worker_that_closes_gives_its_builds_back(setup: Setup) -> None:
    operation = setup.submit("a")
    worker = setup.worker()
    setup.builds.gate.clear()
    building = in_thread(worker.run_next)
    assert setup.builds.begun.acquire(timeout=PATIENCE_S)
    worker.close()
    building.join()
    assert setup.operation(operation.id).state.value == "queued"
    assert setup.registry.alive() == []
    setup.builds.gate.set()
    assert setup.worker("other").run_next()
    assert (setup.operation(operation.id).facts is not None, setup.operation(operation.id).attempt) == (True, 2)


def test_a_worker_whose_package_was_replaced_stops_and_loses_nothing(setup: Setup) -> None:
    operation = setup.submit("a")
    setup.builds.errors = [BuildServiceError("restart the service", code="generator-replaced")]
    worker = setup.worker()
    assert worker.run_next()
    assert not worker.run_next()
    assert worker.is_closing
    assert setup.worker("restarted").run_next()
    assert setup.operation(operation.id).facts is not None


def test_a_draining_worker_finishes_and_claims_nothing(setup: Setup) -> None:
    first, second = setup.submit("a"), setup.submit("b")
    worker = setup.worker()
    setup.builds.gate.clear()
    building = in_thread(worker.run_next)
    assert setup.builds.begun.acquire(timeout=PATIENCE_S)
    worker.drain()
    assert not worker.run_next()
    setup.builds.gate.set()
    building.join()
    assert setup.operation(first.id).done
    assert not setup.operation(second.id).done


def test_a_cancelled_build_is_interrupted(setup: Setup) -> None:
    operation = setup.submit("a", client="me")
    setup.builds.gate.clear()
    building = in_thread(setup.worker().run_next)
    assert setup.builds.begun.acquire(timeout=PATIENCE_S)
    setup.queue.cancel(operation.id, "me")
    building.join(PATIENCE_S)
    assert str((setup.operation(operation.id).error or {})["code"]) == "operation-cancelled"


def test_a_build_past_its_deadline_is_interrupted(setup: Setup) -> None:
    operation = setup.submit("a", deadline_s=60.0)
    setup.builds.gate.clear()
    building = in_thread(setup.worker().run_next)
    assert setup.builds.begun.acquire(timeout=PATIENCE_S)
    setup.change(deadline=now_s() - 1)
    building.join(PATIENCE_S)
    assert str((setup.operation(operation.id).error or {})["code"]) == "deadline-exceeded"


@pytest.mark.slow
def test_heartbeats_keep_a_long_build(setup: Setup) -> None:
    operation = setup.submit("a")
    setup.builds.gate.clear()
    building = in_thread(setup.worker().run_next)
    assert setup.builds.begun.acquire(timeout=PATIENCE_S)
    for _ in range(5):
        lease_until = setup.lease_until()
        wait_until(lambda end=lease_until: setup.lease_until() > end)
    setup.builds.gate.set()
    building.join()
    assert (setup.operation(operation.id).done, setup.builds.built) == (True, ["a"])


def test_heartbeats_come_while_a_worker_counts_as_alive(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    beats: list[Worker] = []
    monkeypatch.setattr(setup.registry, "beat", beats.append)
    monkeypatch.setattr(runner, "ALIVE_S", 0.03)
    setup.queue.lease_s = 600.0
    setup.worker()
    wait_until(lambda: len(beats) > 2)


def test_a_worker_without_heartbeats_is_overtaken_and_interrupted(setup: Setup) -> None:
    operation = setup.submit("a")
    stalled = setup.worker("stalled")
    setup.builds.gate.clear()
    building = in_thread(stalled.run_next)
    assert setup.builds.begun.acquire(timeout=PATIENCE_S)
    clock = ManualClock()
    sweeper = OperationQueue(setup.queue.database, GENERATOR, max_alive=100, clock=clock)

    def is_overtaken() -> bool:
        sweeper.sweep()
        clock.now_s += LEASE_S
        sweeper.sweep()
        return setup.operation(operation.id).state is OperationState.QUEUED

    wait_until(is_overtaken)  # a heartbeat may come between
    setup.change(start_after=now_s() - 1)
    claim = setup.queue.claim("other")
    assert claim is not None
    building.join(PATIENCE_S)  # its heartbeat finds that the lease is lost
    assert setup.operation(operation.id).worker == "other"
    assert setup.queue.finish(claim, {"digest": "of the other"})


def test_a_result_is_recorded_when_the_database_returns(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    operation = setup.submit("a")
    finish, calls = setup.queue.finish, []

    def away(claim: Any, facts: Any) -> bool:
        calls.append(claim)
        if len(calls) < 2:
            raise StoreError("away")
        return finish(claim, facts)

    monkeypatch.setattr(setup.queue, "finish", away)
    assert setup.worker().run_next()
    assert (setup.operation(operation.id).done, len(calls), setup.builds.built) == (True, 2, ["a"])


def test_two_workers_share_the_queue(setup: Setup) -> None:
    ids = [setup.submit(name).id for name in "abcdefghijkl"]
    first, second = setup.worker("1"), setup.worker("2")

    def work(worker: BuildRunner) -> None:
        while worker.run_next():
            pass

    threads = [in_thread(partial(work, worker)) for worker in (first, second, first, second)]
    for thread in threads:
        thread.join()
    assert all(setup.operation(operation_id).facts for operation_id in ids)
    assert sorted(setup.builds.built) == list("abcdefghijkl")


def test_builders_outlive_a_bug_and_an_absent_database(
    setup: Setup, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    setup.builds.errors = [ZeroDivisionError("a bug")]
    first = setup.submit("a")
    worker = setup.worker()
    claim, calls = setup.queue.claim, []

    def away(*arguments: Any) -> Any:
        calls.append(arguments)
        if len(calls) == 1:
            raise StoreError("away")
        return claim(*arguments)

    monkeypatch.setattr(setup.queue, "claim", away)
    builders = InProcessBuilders(worker, lambda _: time.sleep(0.01), count=2)
    builders.start()
    wait_until(lambda: setup.operation(first.id).done)
    second = setup.submit("b")
    wait_until(lambda: setup.operation(second.id).facts)
    worker.close()
    builders.join()
    assert "ZeroDivisionError" in caplog.text
    assert "no operation can be claimed: away" in caplog.text


def test_workers_are_listed_while_they_live(setup: Setup) -> None:
    worker = setup.worker("w")
    (listed,) = setup.registry.alive()
    assert (listed.id, listed.queues, listed.generator, listed.is_draining) == ("w", ("*",), GENERATOR, False)
    worker.drain()
    setup.registry.beat(worker.worker)
    assert setup.registry.alive()[0].is_draining
    setup.registry.remove("w")
    setup.registry.beat(worker.worker)  # was taken for dead
    assert [each.id for each in setup.registry.alive()] == ["w"]


def test_one_build_measures_on_a_device_at_a_time(setup: Setup, tmp_path: Path) -> None:
    for name in ("a", "b"):
        setup.submit(name, measured_on="cpu")
    workers = [setup.worker(name, devices=DeviceLocks({"cpu": "cpu"}, tmp_path)) for name in ("v", "w")]
    setup.builds.gate.clear()
    measuring = in_thread(workers[0].run_next)
    assert setup.builds.begun.acquire(timeout=PATIENCE_S)
    assert not workers[1].run_next()
    assert not workers[0].run_next()
    setup.submit("c")
    setup.builds.gate.set()
    assert workers[1].run_next()
    assert setup.builds.built == ["a", "c"]
    measuring.join()
    assert workers[1].run_next()
    assert setup.builds.built == ["a", "c", "b"]


def test_a_device_is_free_again_after_a_failure(setup: Setup, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    setup.submit("a", measured_on="cpu")
    setup.submit("b", measured_on="cpu")
    worker = setup.worker(devices=DeviceLocks({"cpu": "cpu"}, tmp_path))
    setup.builds.errors = [ZeroDivisionError("a bug")]
    with pytest.raises(ZeroDivisionError):
        worker.run_next()
    claim = setup.queue.claim
    monkeypatch.setattr(setup.queue, "claim", lambda *_: (_ for _ in ()).throw(StoreError("away")))
    with pytest.raises(StoreError):
        worker.run_next()
    monkeypatch.setattr(setup.queue, "claim", claim)
    assert worker.run_next()
    assert setup.builds.built == ["a", "b"]
