"""Processes for estimates: requests in turn, programs that overrun or kill them, callers that hang up."""

from __future__ import annotations

import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest

from roller_svc import hardware
from roller_svc.compiler.estimates.batch import EstimateCache, Item
from roller_svc.compiler.estimates.worker import Deadline, EstimateResult, EstimateTask, ProgramText, compute_estimates
from roller_svc.errors import BuildServiceError, InvariantError
from roller_svc.farm import workers as worker_module
from roller_svc.farm.estimate_pool import MAX_ATTEMPTS, MAX_CHUNK, EstimatePool
from roller_svc.farm.workers import WorkerProcess
from roller_svc.ir.constraints import NO_CONSTRAINTS

H200 = hardware.load("nvidia-h200-sxm")
TARGETS = ("nvidia-h200-sxm", "nvidia-v100-sxm2", "amd-mi50", "cpu-x86-avx2")


def stub_slice(works: Sequence[EstimateTask]) -> list[EstimateResult]:
    """Each program's text for each device; texts of some words do harm."""
    found = []
    for work in works:
        text = work.program.expression
        word, _, path = text.partition(" ")
        match word:
            case "sleep":
                Path(path).touch()
                time.sleep(600)
            case "die":
                os.kill(os.getpid(), signal.SIGKILL)
            case "die-once" if not Path(path).exists():
                Path(path).touch()
                os.kill(os.getpid(), signal.SIGKILL)
            case "hoard":
                raise MemoryError
            case "bug":
                raise ZeroDivisionError("a bug")
        found.append(EstimateResult([outcome(text)] * len(work.specs)))
    return found


def outcome(text: str) -> bytes:
    return json.dumps({"text": text}).encode()


def work(text: str, devices: int = 1) -> EstimateTask:
    return EstimateTask(ProgramText(text, (), None), (H200,) * devices, 1, NO_CONSTRAINTS)


@contextmanager
def estimating(workers: int = 1) -> Iterator[EstimatePool]:
    made = EstimatePool(workers, timeout_s=60.0)
    try:
        yield made
    finally:
        made.close()


@pytest.fixture
def stubbed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("roller_svc.farm.estimate_pool.estimate_slice", stub_slice)


@pytest.fixture
def sleeping(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Item:
    """A program whose time is up once it sleeps; no other one's is."""
    began = tmp_path / "began"

    def wait(_: WorkerProcess[Any, Any], connection: Connection) -> bool:
        while not connection.poll(0.01):
            if began.exists():
                began.unlink()
                return False
        return True

    monkeypatch.setattr(WorkerProcess, "_wait", wait)
    return Item(f"sleep {began}", {})


def codes(answers: Sequence[dict[str, Any]]) -> list[str | None]:
    return [one["error"]["code"] if "error" in one else None for one in answers]


# answers ----------------------------------------------------------------------------------------------------------
def test_processes_give_what_this_one_gives() -> None:
    wrong = Item("C[i] = A[i] + Q[i]", {"A": ("float32", (7,))})
    items = [wrong, *(Item("C[i] = A[i] + A[i]", {"A": ("float32", (n,))}) for n in range(1000, 1020))]
    with estimating(2) as shared:
        shared.start()
        expected = EstimateCache().estimates(items, TARGETS, 1)
        assert EstimateCache(shared.estimate).estimates(items, TARGETS, 1) == expected


def test_what_a_slice_leaves_is_taken_again(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_outcome(works: Sequence[EstimateTask]) -> list[EstimateResult]:
        return [EstimateResult([outcome(f"{works[0].program.expression} {len(works[0].specs)}")])]

    with estimating(2) as shared:
        monkeypatch.setattr(shared._workers, "call", one_outcome)
        found = shared.estimate([work(str(n), devices=3) for n in range(20)], Deadline())
    assert [one.device_results for one in found] == [[outcome(f"{n} {left}") for left in (3, 2, 1)] for n in range(20)]


# fair -------------------------------------------------------------------------------------------------------------
class HeldWorkers:
    """Stands for the processes: notes whose chunks come, and lets none through until so many are submitted."""

    def __init__(self, shared: EstimatePool, monkeypatch: pytest.MonkeyPatch, chunks: int) -> None:
        self._chunks = chunks
        self.came: list[str] = []
        self.begun = threading.Event()
        self._submitted = threading.Semaphore(0)
        self._opened = threading.Lock()
        self._submit = shared._threads.submit
        monkeypatch.setattr(shared._threads, "submit", self.submit)
        monkeypatch.setattr(shared._workers, "call", self.call)

    def submit(self, client: str, task: Callable[[], list[EstimateResult]]) -> object:
        future = self._submit(client, task)
        self._submitted.release()
        return future

    def call(self, works: Sequence[EstimateTask]) -> list[EstimateResult]:
        self.came.append(works[0].program.expression)
        if not self.begun.is_set():
            self.begun.set()
            for _ in range(self._chunks):
                self._submitted.acquire()
        return stub_slice(works)


def test_a_single_estimate_comes_between_the_chunks_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = 64
    with estimating() as shared, ThreadPoolExecutor(1) as other:
        # two chunks of the batch, one under way and one that waits, and the single estimate
        turnstile = HeldWorkers(shared, monkeypatch, 3)
        batch = other.submit(shared.estimate, [work("batch")] * (chunks * MAX_CHUNK), Deadline())
        turnstile.begun.wait()
        (single,) = shared.estimate([work("single")], Deadline())
        batch.result()
    assert single.device_results == [outcome("single")]
    assert turnstile.came.index("single") <= 2  # behind the chunk under way, and the one that waited
    assert turnstile.came.count("batch") == chunks


def test_clients_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    batches = 4
    with estimating() as shared, ThreadPoolExecutor(batches) as greedy:
        turnstile = HeldWorkers(shared, monkeypatch, 2 * batches + 1)
        results = [
            greedy.submit(shared.estimate, [work("greedy")] * (2 * MAX_CHUNK), Deadline(client="greedy")) for _ in range(batches)
        ]
        turnstile.begun.wait()
        shared.estimate([work("other")], Deadline(client="other"))
        for each in results:
            each.result()
    assert turnstile.came.index("other") <= 2  # behind the chunk under way, and one more
    assert turnstile.came.count("greedy") == 2 * batches


# stoppable --------------------------------------------------------------------------------------------------------
@pytest.mark.slow
@pytest.mark.usefixtures("stubbed")
def test_a_program_that_overruns_is_refused_and_remembered(sleeping: Item, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_module, "STALLED_CPU_FRACTION", 0.0)  # a worker that sleeps counts as one that works
    items = [Item("a", {}), sleeping, Item("b", {})]
    with estimating() as shared:
        estimates = EstimateCache(shared.estimate)
        first = estimates.estimates(items, ["nvidia-h200-sxm", "nvidia-v100-sxm2"], 1)
        assert codes(first) == [None, None, "check-timeout", "check-timeout", None, None]
        assert [one.get("text") for one in first] == ["a", "a", None, None, "b", "b"]
        monkeypatch.setattr(shared._workers, "call", None)  # nothing is asked for again
        assert estimates.estimates(items, ["nvidia-h200-sxm", "nvidia-v100-sxm2"], 1) == first
        assert codes(estimates.estimates(items[1:2], ["amd-mi50"], 3)) == ["check-timeout"]


@pytest.mark.slow
@pytest.mark.usefixtures("stubbed")
def test_a_machine_that_stalls_is_no_refusal(sleeping: Item, monkeypatch: pytest.MonkeyPatch) -> None:
    with estimating() as shared:
        estimates = EstimateCache(shared.estimate)
        assert codes(estimates.estimates([sleeping], ["nvidia-h200-sxm"], 1)) == ["worker-stalled"]
        monkeypatch.setattr(shared._workers, "call", stub_slice)
        monkeypatch.setattr(time, "sleep", lambda _: None)
        assert codes(estimates.estimates([sleeping], ["nvidia-h200-sxm"], 1)) == [None]


@pytest.mark.usefixtures("stubbed")
def test_a_killed_process_loses_nothing(tmp_path: Path) -> None:
    texts = ["a", f"die-once {tmp_path / 'died'}", "b"]
    with estimating() as shared:
        found = shared.estimate([work(text) for text in texts], Deadline())
    assert [one.device_results for one in found] == [[outcome(text)] for text in texts]
    assert (tmp_path / "died").exists()


@pytest.mark.slow
@pytest.mark.usefixtures("stubbed")
def test_a_program_that_kills_its_process_each_time_is_given_up() -> None:
    with estimating() as shared:
        estimates = EstimateCache(shared.estimate)
        answers = estimates.estimates([Item(text, {}) for text in ("a", "die", "b")], ["nvidia-h200-sxm"], 1)
        assert codes(answers) == [None, "worker-lost", None]
        assert len(estimates._rejections) == 0


def test_attempts_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []

    def lost(works: Sequence[EstimateTask]) -> list[EstimateResult]:
        calls.append(len(works))
        raise BuildServiceError("the worker process died", code="worker-lost")

    with estimating() as shared:
        monkeypatch.setattr(shared._workers, "call", lost)
        found = shared.estimate([work("a"), work("b")], Deadline())
    assert all(one.transient_error is not None for one in found)
    assert calls == [2, *[1] * 2 * (MAX_ATTEMPTS - 1)]


@pytest.mark.usefixtures("stubbed")
def test_a_program_that_takes_too_much_memory_is_refused() -> None:
    with estimating() as shared:
        answers = EstimateCache(shared.estimate).estimates([Item(text, {}) for text in ("a", "hoard")], ["nvidia-h200-sxm"], 1)
    assert codes(answers) == [None, "out-of-memory"]


@pytest.mark.usefixtures("stubbed")
def test_a_bug_is_told() -> None:
    with estimating() as shared, pytest.raises(InvariantError, match="a bug"):
        shared.estimate([work("a"), work("bug")], Deadline())


# whoever hung up --------------------------------------------------------------------------------------------------
def test_nothing_is_computed_for_whom_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    patience, calls = Deadline(), list[int]()

    def hang_up(works: Sequence[EstimateTask]) -> list[EstimateResult]:
        calls.append(len(works))
        patience.expire()
        return stub_slice(works)

    with estimating() as shared:
        monkeypatch.setattr(shared._workers, "call", hang_up)
        shared.estimate([work("a")] * (10 * MAX_CHUNK), patience)
    assert len(calls) == 1


def test_in_this_process_neither() -> None:
    patience = Deadline()
    patience.expire()
    assert compute_estimates([work("y[i] = x[i]")], patience) == [EstimateResult()]


def test_whoever_waits_when_the_service_ends_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, killed = threading.Event(), threading.Event()

    def call(_: Sequence[EstimateTask]) -> list[EstimateResult]:
        begun.set()
        killed.wait()
        raise BuildServiceError("the worker process died", code="worker-lost")

    shared = EstimatePool(1, timeout_s=60.0)
    monkeypatch.setattr(shared._workers, "call", call)
    monkeypatch.setattr(shared._workers, "close", lambda kill: killed.set())
    with ThreadPoolExecutor(1) as other:
        waiting = other.submit(shared.estimate, [work("a")] * (10 * MAX_CHUNK), Deadline())
        begun.wait()
        shared.close()
        with pytest.raises(BuildServiceError) as told:
            waiting.result()
    assert told.value.code == "shutting-down"
