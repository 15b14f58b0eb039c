"""Operations: built once, joined, refused when too many, known after a restart, resumed."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from roller_svc.compiler.request import build_request, request_json
from roller_svc.errors import ArgumentError, BuildServiceError, CompileError, QueueFullError, RollerError, StoreError
from roller_svc.farm.operations import MAX_ATTEMPTS, CacheStatus, JobQueue, Operation, OperationState
from roller_svc.farm.store import Artifact, Store
from roller_svc.ir.report import BuildRequest


def request(name: str = "a") -> BuildRequest:
    return build_request(f"{name}[i] = x[i]", {"x": ("float32", (4,))}, target="cpu-x86-avx2", select="model")


def action(wanted: BuildRequest) -> str:
    """As many actions as there are expressions; one that begins with 'bad' is refused."""
    if wanted.expression.startswith("bad"):
        raise ArgumentError("refused")
    return "sha256:" + f"{ord(wanted.expression[0]):064x}"


def artifact(wanted: BuildRequest) -> Artifact:
    digest = action(wanted).replace("sha256:0", "sha256:d")
    return Artifact(digest, {"digest": digest, "expression": wanted.expression}, {"source": b"text"})


class Builder:
    """Counts what it builds, and waits for `gate` before it ends."""

    def __init__(self) -> None:
        self.built: list[str] = []
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, wanted: BuildRequest) -> Artifact:
        self.built.append(wanted.expression)
        assert self.gate.wait(60)
        if wanted.expression.startswith("f"):
            raise CompileError("the compiler said no", log="line 1")
        return artifact(wanted)


@pytest.fixture
def builder() -> Builder:
    return Builder()


@pytest.fixture
def store(tmp_path: Path) -> Store:
    return Store(tmp_path)


def queue_on(store: Store, builder: Callable[[BuildRequest], Artifact], length: int = 8) -> JobQueue:
    return JobQueue(store, builder, action, workers=2, length=length)


def ended(queue: JobQueue, operation: Operation) -> Operation:
    future = queue.done_future(operation.id)
    if future is not None:
        future.result(60)
    found = queue.get(operation.id)
    assert found is not None
    assert found.done
    return found


def test_a_build_becomes_a_hit(store: Store, builder: Builder) -> None:
    queue = queue_on(store, builder)
    first = ended(queue, queue.submit(request()))
    assert first.cache is CacheStatus.MISS
    assert first.facts is not None
    second = queue.submit(request())
    assert (second.done, second.cache, second.facts) == (True, CacheStatus.HIT, first.facts)
    assert queue.get(second.id) is not None
    assert builder.built == ["a[i] = x[i]"]
    queue.close()


def test_identical_requests_under_way_share_one_build(store: Store, builder: Builder) -> None:
    builder.gate.clear()
    queue = queue_on(store, builder)
    operations = [queue.submit(request()) for _ in range(20)]
    assert [operation.cache for operation in operations] == [CacheStatus.MISS] + [CacheStatus.JOINED] * 19
    assert not any(operation.done for operation in operations)
    builder.gate.set()
    assert {str(ended(queue, operation).facts) for operation in operations} == {str(artifact(request()).facts)}
    assert len(builder.built) == 1
    queue.close()


def test_a_refused_request_makes_no_operation(store: Store, builder: Builder) -> None:
    queue = queue_on(store, builder)
    with pytest.raises(ArgumentError):
        queue.submit(request("bad"))
    assert list(store.records()) == []
    queue.close()


def test_a_failure_is_recorded_and_not_cached(store: Store, builder: Builder) -> None:
    queue = queue_on(store, builder)
    failed = ended(queue, queue.submit(request("f")))
    assert failed.facts is None
    assert failed.error == {
        "class": "CompileError", "code": "compile-failed", "message": "the compiler said no", "log": "line 1",
    }  # fmt: skip
    ended(queue, queue.submit(request("f")))
    assert len(builder.built) == 2
    queue.close()


def test_a_full_queue_refuses_and_goes_on(store: Store, builder: Builder) -> None:
    builder.gate.clear()
    queue = queue_on(store, builder, length=2)
    first, second = queue.submit(request("a")), queue.submit(request("b"))
    with pytest.raises(QueueFullError):
        queue.submit(request("c"))
    assert queue.submit(request("a")).cache is CacheStatus.JOINED
    builder.gate.set()
    ended(queue, first)
    ended(queue, second)
    ended(queue, queue.submit(request("c")))
    queue.close()


def test_operations_are_known_to_the_next_process(store: Store, builder: Builder) -> None:
    queue = queue_on(store, builder)
    done = ended(queue, queue.submit(request()))
    queue.close()
    assert queue_on(store, builder).get(done.id) == done
    assert queue_on(store, builder).get("no-such") is None
    assert queue_on(store, builder).get("hit-" + "0" * 64) is None


def test_a_shorter_queue_resumes_all_that_was_accepted(store: Store, builder: Builder) -> None:
    queue = queue_on(store, builder, length=3)
    builder.gate.clear()
    left = [store.record(queue.submit(request(name)).id) for name in "abc"]
    builder.gate.set()
    queue.close()
    for record in left:  # as a process leaves them that is killed while they wait
        assert record is not None
        store.write_record(str(record["id"]), record)
    (store.root / "ac").rename(store.root / "gone")
    (store.root / "ac").mkdir()
    after = queue_on(store, builder, length=1)
    assert after.resume() == 3
    for record in left:
        assert record is not None
        found = after.get(str(record["id"]))
        assert found is not None
        assert ended(after, found).error is None
    after.close()


def test_what_had_not_ended_is_resumed(store: Store, builder: Builder) -> None:
    queue = queue_on(store, builder)
    done = ended(queue, queue.submit(request()))
    record = store.record(done.id)
    assert record is not None
    # as a process leaves it that is killed in the middle of a build
    left = record | {"id": "1-left", "stage": OperationState.BUILDING.value, "facts": None}
    left["request"] = json.loads(json.dumps(left["request"]).replace("a[i]", "z[i]"))
    store.write_record("1-left", left)
    refused = left | {"id": "2-refused", "request": left["request"] | {"top_k": 0}}
    store.write_record("2-refused", refused)
    queue.close()
    builder.built.clear()
    after = queue_on(store, builder)
    assert after.resume() == 2
    found = after.get("1-left")
    assert found is not None
    assert ended(after, found).facts == artifact(request("z")).facts
    assert builder.built == ["z[i] = x[i]"]
    second = after.get("2-refused")
    assert second is not None
    assert second.error is not None
    assert second.error["code"] == "invalid-option"
    assert after.resume() == 0
    after.close()


def test_closing_leaves_unfinished_builds_to_the_next_process(store: Store) -> None:
    stopped = threading.Event()
    started = threading.Event()

    def stubborn(wanted: BuildRequest) -> Artifact:
        started.set()
        assert stopped.wait(60)
        raise CompileError("its worker was stopped")

    queue = queue_on(store, stubborn)
    operation = queue.submit(request())
    assert started.wait(60)
    queue.close(stopped.set)
    builder = Builder()
    after = queue_on(store, builder)
    assert after.resume() == 1
    found = after.get(operation.id)
    assert found is not None
    assert ended(after, found).facts is not None
    after.close()


def test_a_bug_in_a_build_leaves_nobody_waiting(store: Store) -> None:
    def broken(wanted: BuildRequest) -> Artifact:
        raise ZeroDivisionError("a bug")

    queue = queue_on(store, broken)
    found = ended(queue, queue.submit(request()))
    assert found.error is not None
    assert found.error["code"] == "farm-error"
    queue.close()


class Faulty(Builder):
    """Fails with `faults` first."""

    def __init__(self, *faults: RollerError) -> None:
        super().__init__()
        self.faults = list(faults)

    def __call__(self, wanted: BuildRequest) -> Artifact:
        made = super().__call__(wanted)
        if self.faults:
            raise self.faults.pop(0)
        return made


@pytest.fixture
def _no_pause(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roller_svc.farm.operations.RETRY_DELAYS_S", (0.0, 0.0, 0.0))


@pytest.mark.usefixtures("_no_pause")
def test_a_fault_that_passes_is_tried_again(store: Store) -> None:
    builder = Faulty(BuildServiceError("killed", code="worker-lost"), StoreError("full"), BuildServiceError("slow"))
    queue = queue_on(store, builder)
    found = ended(queue, queue.submit(request()))
    assert (found.error, len(builder.built)) == (None, 4)
    queue.close()


@pytest.mark.usefixtures("_no_pause")
def test_a_fault_that_stays_is_the_error_after_four_attempts(store: Store) -> None:
    builder = Faulty(*(BuildServiceError("killed", code="worker-lost") for _ in range(9)))
    queue = queue_on(store, builder)
    found = ended(queue, queue.submit(request()))
    assert found.error is not None
    assert (found.error["code"], len(builder.built)) == ("worker-lost", 4)
    assert "4 attempts" in str(found.error["message"])
    queue.close()


@pytest.mark.usefixtures("_no_pause")
def test_the_callers_fault_is_not_tried_again(store: Store, builder: Builder) -> None:
    queue = queue_on(store, builder)
    assert ended(queue, queue.submit(request("f"))).error is not None
    assert len(builder.built) == 1
    queue.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda r: r | {"request": r["request"] | {"precision": "fast"}},
        lambda r: r | {"request": {"expression": "a[i] = x[i]"}},
        lambda r: r | {"stage": "publishing"},
        lambda r: r | {"id": "../../outside"},
        lambda r: {},
    ],
)
def test_a_record_of_another_version_is_set_aside(
    store: Store, builder: Builder, change: Callable[[Any], Any], caplog: pytest.LogCaptureFixture
) -> None:
    queue = queue_on(store, builder)
    record = store.record(ended(queue, queue.submit(request())).id)
    assert record is not None
    queue.close()
    left = record | {"stage": OperationState.QUEUED.value, "facts": None}
    store.write_record("1-left", change(left | {"id": "1-left"}))
    store.write_record("2-good", left | {"id": "2-good"})
    after = queue_on(store, builder)
    assert after.resume() == 1
    assert "1-left" in caplog.text
    found = after.get("1-left")
    assert found is not None
    assert found.error is not None
    assert found.error["code"] == "unreadable-record"
    good = after.get("2-good")
    assert good is not None
    assert ended(after, good).error is None
    assert not (store.root.parent / "outside.json").exists()
    after.close()


@pytest.mark.parametrize("name", ["hit-\0", "hit-" + "g" * 64, "hit-../../x", "\0", "../x"])
def test_an_id_that_is_none_finds_nothing(store: Store, builder: Builder, name: str) -> None:
    queue = queue_on(store, builder)
    assert queue.get(name) is None
    queue.close()


def test_a_slow_disk_holds_up_nobody_else(store: Store, builder: Builder, monkeypatch: pytest.MonkeyPatch) -> None:
    queue = queue_on(store, builder)
    done = ended(queue, queue.submit(request("a")))
    writing, go_on = threading.Event(), threading.Event()
    write = store.write_record

    def slow(record_id: str, record: Any) -> None:
        writing.set()
        assert go_on.wait(60)
        write(record_id, record)

    monkeypatch.setattr(store, "write_record", slow)
    waiting = threading.Thread(target=queue.submit, args=(request("b"),))
    waiting.start()
    assert writing.wait(60)
    assert queue.get(done.id) == done  # takes the lock
    go_on.set()
    waiting.join()
    queue.close()


def test_what_cannot_be_recorded_is_not_accepted(
    store: Store, builder: Builder, monkeypatch: pytest.MonkeyPatch
) -> None:
    queue = queue_on(store, builder)

    def full(record_id: str, record: Any) -> None:
        raise StoreError("no space")

    with monkeypatch.context() as patch:
        patch.setattr(store, "write_record", full)
        with pytest.raises(StoreError):
            queue.submit(request())
    assert ended(queue, queue.submit(request())).error is None
    queue.close()


def test_clients_take_turns(store: Store, builder: Builder) -> None:
    builder.gate.clear()
    queue = JobQueue(store, builder, action, workers=1, length=99)
    greedy = [queue.submit(request(name), "greedy") for name in "abcdexgh"]
    others = [queue.submit(request(name), client) for name, client in zip("stu", ("2", "3", "2"), strict=True)]
    builder.gate.set()
    for operation in (*greedy, *others):
        ended(queue, operation)
    queue.close()
    assert [text[0] for text in builder.built] == ["a", "b", "s", "t", "c", "u", *"dexgh"]


def test_one_client_does_not_fill_the_queue(store: Store, builder: Builder) -> None:
    builder.gate.clear()
    queue = JobQueue(store, builder, action, workers=1, length=4, length_per_client=2)
    operations = [queue.submit(request(name), "greedy") for name in "ab"]
    with pytest.raises(QueueFullError, match="2 builds of this client"):
        queue.submit(request("c"), "greedy")
    operations += [queue.submit(request("a"), "greedy"), queue.submit(request("d"), "other")]  # one joins
    queue.submit(request("e"), "third")
    with pytest.raises(QueueFullError, match="4 builds are waiting"):
        queue.submit(request("g"), "fourth")
    builder.gate.set()
    for operation in operations:
        ended(queue, operation)
    queue.close()


def left_building(store: Store, name: str, attempts: int) -> str:
    """A record as a process leaves it that is killed in the middle of that attempt."""
    record_id = f"{attempts}-{name}"
    record = {
        "id": record_id, "action": action(request(name)), "stage": "building", "cache": "miss", "create_time": "now",
        "request": request_json(request(name)), "facts": None, "error": None, "attempts": attempts,
    }  # fmt: skip
    store.write_record(record_id, record)
    return record_id


def test_what_the_service_ended_in_again_and_again_is_not_begun(store: Store, builder: Builder) -> None:
    poisoned = left_building(store, "a", MAX_ATTEMPTS)
    last = left_building(store, "b", MAX_ATTEMPTS - 1)
    queue = queue_on(store, builder)
    assert queue.resume() == 2
    found, other = queue.get(poisoned), queue.get(last)
    assert found is not None
    assert other is not None
    assert found.error is not None
    assert found.error["code"] == "build-poisoned"
    assert ended(queue, other).facts is not None
    queue.close()
    assert builder.built == ["b[i] = x[i]"]


def test_what_was_interrupted_is_resumed_last(store: Store, builder: Builder) -> None:
    ids = [left_building(store, name, attempts) for name, attempts in (("a", 2), ("b", 0), ("c", 1))]
    queue = JobQueue(store, builder, action, workers=1, length=8)
    queue.resume()
    for record_id in ids:
        found = queue.get(record_id)
        assert found is not None
        assert ended(queue, found).done
    queue.close()
    assert [text[0] for text in builder.built] == ["b", "c", "a"]


def test_attempt_is_recorded_before_it_starts_unless_shutdown_ends_it(store: Store) -> None:
    seen: list[object] = []
    started, stopped = threading.Event(), threading.Event()

    def stubborn(_: BuildRequest) -> Artifact:
        seen.extend((record or {})["attempts"] for _, record in store.records())
        started.set()
        assert stopped.wait(60)
        raise BuildServiceError("its worker was stopped", code="worker-lost")

    queue = queue_on(store, stubborn)
    operation = queue.submit(request())
    assert started.wait(60)
    assert seen == [1]
    queue.close(stopped.set)
    record = store.record(operation.id)
    assert record is not None
    assert (record["stage"], record["attempts"]) == ("queued", 0)
