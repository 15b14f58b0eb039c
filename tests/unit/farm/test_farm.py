"""The farm as the service sees it: hits, joins, waiting, sweeping, and operations of other versions."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import pytest
from clocks import ManualClock
from sqlalchemy import update
from waiting import PATIENCE_S, wait_until

from roller_svc.compiler.action import PARTS, ActionKey, hash_parts
from roller_svc.compiler.request import build_request
from roller_svc.errors import ArgumentError, BuildServiceError, QuotaExceededError, RollerError, StoreError
from roller_svc.farm import watch
from roller_svc.farm.courier import InProcessCourier
from roller_svc.farm.database.connect import Database, now_s
from roller_svc.farm.database.tables import operations
from roller_svc.farm.farm import NO_WORKER_TIMEOUT_S, BuildFarm, Terms
from roller_svc.farm.models import Request
from roller_svc.farm.operations import CacheStatus, Operation
from roller_svc.farm.queue import OperationQueue, QueuedId
from roller_svc.farm.registry import Worker, WorkerRegistry
from roller_svc.farm.routing import machine_queue
from roller_svc.farm.store import Artifact, Store
from roller_svc.ir.report import BuildRequest

GENERATOR = "a" * 64


def request(name: str = "a") -> BuildRequest:
    return build_request(f"{name}[i] = x[i]", {"x": ("float32", (4,))}, target="cpu-x86-avx2", select="model")


class Digests:
    """As many actions as there are first letters; an expression that begins with 'bad' is invalid."""

    def digest(self, wanted: Request) -> str:
        assert isinstance(wanted, BuildRequest)
        if wanted.expression.startswith("bad"):
            raise ArgumentError("refused")
        return f"sha256:{ord(wanted.expression[0]):064x}"

    def explained_key(self, wanted: Request) -> tuple[ActionKey, Mapping[str, object]]:
        digest = self.digest(wanted)
        contents = {part: {part: digest} for part in PARTS}
        return ActionKey(digest, "kernel", hash_parts(contents)), contents


class Courier(InProcessCourier):
    def __init__(self) -> None:
        super().__init__()
        self.sent: list[str] = []
        self.error: RollerError | None = None

    def send(self, queued: QueuedId) -> None:
        if self.error is not None:
            raise self.error
        self.sent.append(queued.id)
        super().send(queued)


class Setup:
    def __init__(self, database: Database, root: Path, generator: str = GENERATOR) -> None:
        self.courier = Courier()
        self.store = Store(root)
        self.clock = ManualClock()
        self.queue = OperationQueue(database, generator, max_alive=100, clock=self.clock)
        self.registry = WorkerRegistry(database)
        self.farm = BuildFarm(
            self.queue, self.store, self.courier, self.registry, Digests(), retention_s=1000.0, audit_retention_s=1000.0
        )

    def build(self) -> None:
        """Build the next operation, as a worker would."""
        claim = self.queue.claim("w")
        assert claim is not None
        facts: dict[str, object] = {"digest": claim.action}
        assert self.queue.finish(claim, self.store.publish(claim.action, Artifact(claim.action, facts, {})))

    def operation(self, operation_id: str) -> Operation:
        found = self.farm.get(operation_id)
        assert found is not None
        return found


@pytest.fixture
def setup(database: Database, tmp_path: Path) -> Iterator[Setup]:
    made = Setup(database, tmp_path / "store")
    yield made
    made.farm.close()


def test_a_build_becomes_a_hit(setup: Setup) -> None:
    first = setup.farm.submit(request())
    assert (first.cache, setup.courier.sent) == (CacheStatus.MISS, [first.id])
    setup.build()
    second = setup.farm.submit(request())
    assert (second.done, second.cache, second.facts) == (True, CacheStatus.HIT, {"digest": first.action})
    assert setup.operation(second.id).facts == second.facts
    assert setup.operation(first.id).done


def test_a_hit_whose_result_is_gone_is_unknown_and_built_again(setup: Setup) -> None:
    setup.farm.submit(request())
    setup.build()
    hit = setup.farm.submit(request())
    (setup.store.folder / "ac").rename(setup.store.folder / "gone")
    (setup.store.folder / "ac").mkdir()
    assert setup.farm.get(hit.id) is None
    assert setup.farm.submit(request()).cache is CacheStatus.MISS


@pytest.mark.parametrize("name", ["no-such", "hit-" + "0" * 64, "hit-\0", "hit-" + "g" * 64, "hit-../../x", "../x"])
def test_an_id_that_is_none_finds_nothing(setup: Setup, name: str) -> None:
    assert setup.farm.get(name) is None
    assert setup.farm.cancel(name, "") is None


def test_an_invalid_request_makes_no_operation(setup: Setup) -> None:
    with pytest.raises(ArgumentError):
        setup.farm.submit(request("bad"))
    assert setup.queue.page(None, after=None, limit=9) == []


def test_terms_reach_the_queue(setup: Setup) -> None:
    terms = Terms("me", max_alive=1, priority=3, deadline_s=60.0)
    operation = setup.farm.submit(request("a"), terms)
    with pytest.raises(QuotaExceededError):
        setup.farm.submit(request("b"), terms)
    assert setup.queue.page("me", after=None, limit=9) == [operation]


def test_a_courier_that_fails_loses_nothing(setup: Setup, caplog: pytest.LogCaptureFixture) -> None:
    setup.courier.error = BuildServiceError("the broker is away", code="broker-error")
    operation = setup.farm.submit(request())
    assert "the broker is away" in caplog.text
    setup.courier.error = None
    with setup.queue.database.write() as connection:
        connection.execute(update(operations).values(send_time=now_s() - 60))
    setup.farm.sweep()
    assert setup.courier.sent == [operation.id]


def test_waiters_wake_for_an_end_in_this_process_or_another(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.02)
    setup.farm.start()
    here, elsewhere, early = threading.Event(), threading.Event(), threading.Event()
    first, second = setup.farm.submit(request("a")), setup.farm.submit(request("b"))
    setup.farm.watch(first.id, here.set)
    setup.farm.watch(second.id, elsewhere.set)
    setup.farm.notify_end(first.id)
    assert here.is_set()
    assert not elsewhere.wait(0.1)
    setup.build()
    setup.build()
    assert elsewhere.wait(PATIENCE_S)
    setup.farm.watch(first.id, early.set)  # it is done already
    assert early.wait(PATIENCE_S)


def test_who_gives_up_waiting_is_not_called(setup: Setup) -> None:
    called: list[int] = []
    operation = setup.farm.submit(request())
    wakes: list[Callable[[], None]] = [lambda: called.append(1), lambda: called.append(2)]
    for wake in wakes:
        setup.farm.watch(operation.id, wake)
    setup.farm.unwatch(operation.id, wakes[0])
    setup.farm.unwatch("no-such", wakes[0])
    setup.farm.notify_end(operation.id)
    assert called == [2]


def test_cancelling_wakes_those_who_wait(setup: Setup) -> None:
    woken = threading.Event()
    operation = setup.farm.submit(request(), Terms("me"))
    setup.farm.watch(operation.id, woken.set)
    ended = setup.farm.cancel(operation.id, "me")
    assert ended is not None
    assert ended.done
    assert woken.is_set()


def test_watching_goes_on_when_the_database_returns(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch, "POLL_S", 0.02)
    calls: list[int] = []

    def ended(ids: object) -> set[str]:
        calls.append(1)
        if len(calls) == 1:
            raise StoreError("away")
        return {"x"}

    watcher, woken = watch.EndWatcher(ended), threading.Event()
    watcher.start()
    watcher.add("x", woken.set)
    assert woken.wait(PATIENCE_S)
    watcher.close()


def test_operations_of_a_version_without_workers_are_adopted(setup: Setup, database: Database, tmp_path: Path) -> None:
    older = Setup(database, tmp_path / "store", "b" * 64)
    good, bad = older.farm.submit(request("g")), older.farm.submit(request("h"))
    with database.write() as connection:
        connection.execute(update(operations).where(operations.c.id == bad.id).values(request={"expression": "bad", "new": 1}))
    setup.registry.add(Worker("old", ("*",), "b" * 64, {}))
    setup.farm.sweep()
    assert setup.queue.claim("w") is None  # its own worker is alive
    setup.registry.remove("old")
    setup.farm.sweep()
    assert str((setup.operation(bad.id).error or {})["code"]) == "unreadable-record"
    setup.build()
    assert setup.operation(good.id).facts is not None


def test_the_sweeper_outlives_failures(setup: Setup, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roller_svc.farm.farm.SWEEP_S", 0.01)
    sweeps: list[int] = []

    def sweep() -> None:
        sweeps.append(1)
        raise StoreError("away")

    monkeypatch.setattr(setup.farm, "sweep", sweep)
    setup.farm.start()
    wait_until(lambda: len(sweeps) > 3)


def test_local_needs_a_worker_of_this_machine(setup: Setup) -> None:
    local = build_request("a[i] = x[i]", {"x": ("float32", (4,))}, target="local", select="model")
    setup.registry.add(Worker("other", ("*", "local.other"), GENERATOR, {}))
    with pytest.raises(ArgumentError) as refused:
        setup.farm.submit(local)
    assert refused.value.code == "local-not-served"
    setup.registry.add(Worker("draining", (machine_queue(),), GENERATOR, {}, is_draining=True))
    setup.registry.add(Worker("newer", (machine_queue(),), "b" * 64, {}))
    with pytest.raises(ArgumentError):
        setup.farm.submit(local)
    setup.registry.add(Worker("here", (machine_queue(),), GENERATOR, {}))
    assert not setup.farm.submit(local).is_unserved


def test_an_operation_says_that_it_waits_for_a_worker(database: Database, tmp_path: Path) -> None:
    setup = Setup(database, tmp_path / "store")
    waiting = setup.farm.submit(request())
    assert waiting.is_unserved
    setup.registry.add(Worker("w", ("build.cpu.x86-64-v3",), GENERATOR, {}))
    setup.farm.sweep()
    assert not setup.operation(waiting.id).is_unserved
    assert not setup.farm.submit(request("b")).is_unserved


def test_who_waits_is_woken_when_no_worker_comes(setup: Setup) -> None:
    woken = threading.Event()
    operation = setup.farm.submit(request())
    setup.farm.watch(operation.id, woken.set)
    setup.farm.sweep()
    setup.clock.now_s += NO_WORKER_TIMEOUT_S + 1
    setup.farm.sweep()
    assert woken.is_set()
    assert (setup.operation(operation.id).error or {})["code"] == "no-worker"
