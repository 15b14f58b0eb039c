"""Worker processes: answers, errors, bugs, deaths and overruns."""

from __future__ import annotations

import mmap
import os
import signal
import time
from collections.abc import Iterator

import pytest

from roller_svc.errors import BuildError, CompileError, FarmError, IndexRangeError, InvariantError, KernelTimeoutError
from roller_svc.farm.lanes import Lane, ThreadLanes, spread


def work(task: str) -> str:
    match task:
        case "pid":
            return str(os.getpid())
        case "refuse":
            raise IndexRangeError("outside", line=1, column=2, end_column=3, hint="guard it")
        case "fail":
            raise CompileError("no", log="the log")
        case "bug":
            raise ZeroDivisionError("a bug")
        case "die":
            os.kill(os.getpid(), signal.SIGKILL)
        case "exit":
            os._exit(7)
        case "hoard":
            return str(len(bytearray(1 << 40)))
        case "reserve":
            return str(len(mmap.mmap(-1, 1 << 40, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, prot=0)))
        case "hang":
            time.sleep(600)
    return task.upper()


@pytest.fixture(scope="module")
def lane() -> Iterator[Lane[str, str]]:
    lane = Lane(work, timeout_s=60.0)
    yield lane
    lane.close()


def test_a_worker_answers_and_is_used_again(lane: Lane[str, str]) -> None:
    assert lane.call("hello") == "HELLO"
    assert lane.call("pid") == lane.call("pid")


def test_errors_of_ours_come_back_whole(lane: Lane[str, str]) -> None:
    with pytest.raises(IndexRangeError) as refused:
        lane.call("refuse")
    error = refused.value
    assert (error.code, error.line, error.column, error.end_column, error.hint) == (
        "index-out-of-range", 1, 2, 3, "guard it",
    )  # fmt: skip
    with pytest.raises(CompileError) as failed:
        lane.call("fail")
    assert failed.value.log == "the log"


def test_a_bug_is_told_with_its_place_and_the_next_task_gets_a_fresh_worker(lane: Lane[str, str]) -> None:
    before = lane.call("pid")
    with pytest.raises(InvariantError, match=r"ZeroDivisionError: a bug \(test_lanes.py:\d+\)"):
        lane.call("bug")
    assert lane.call("pid") != before


@pytest.mark.parametrize(("task", "how"), [("die", "SIGKILL"), ("exit", "exit status 7")])
def test_a_death_is_an_error_and_not_the_end(lane: Lane[str, str], task: str, how: str) -> None:
    with pytest.raises(FarmError, match=how) as lost:
        lane.call(task)
    assert lost.value.code == "worker-lost"
    assert lane.call("on") == "ON"


def test_a_worker_that_overruns_is_stopped() -> None:
    lane = Lane(work, timeout_s=1.0)
    with pytest.raises(KernelTimeoutError):
        lane.call("hang")
    lane.close()


def test_memory_is_limited() -> None:
    lane = Lane(work, timeout_s=60.0, memory_bytes=1 << 30)
    with pytest.raises(BuildError) as refused:
        lane.call("hoard")
    assert refused.value.code == "out-of-memory"
    assert lane.call("on") == "ON"
    lane.close()


def test_addresses_that_are_only_reserved_are_not_memory() -> None:
    """As CUDA reserves them, for all that a device and the host could have."""
    lane = Lane(work, timeout_s=60.0, memory_bytes=1 << 30)
    assert lane.call("reserve") == str(1 << 40)
    lane.close()


def test_threads_share_no_worker() -> None:
    lanes = ThreadLanes(work, timeout_s=60.0)
    assert lanes.call("on") == "ON"
    lanes.close()


def test_tasks_are_spread_over_workers() -> None:
    found = dict(spread(work, ["a", "fail", "b", "die", "c"], jobs=2, timeout_s=60.0))
    assert {task: found[task] for task in "abc"} == {"a": "A", "b": "B", "c": "C"}
    assert isinstance(found["fail"], CompileError)
    assert isinstance(found["die"], FarmError)
