"""Pauses of Python's collector of cycles."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from threading import Event, Thread

import pytest

from roller_svc.collector import pause_collector


@pytest.fixture(autouse=True)
def _enabled() -> Iterator[None]:
    gc.enable()
    yield
    gc.enable()


def test_blocks_that_overlap_pause_until_the_last_one_ends() -> None:
    entered, leave = Event(), Event()

    def pause() -> None:
        with pause_collector():
            entered.set()
            leave.wait()

    thread = Thread(target=pause)
    with pause_collector():
        thread.start()
        entered.wait()
        with pause_collector():
            assert not gc.isenabled()
    assert not gc.isenabled()
    leave.set()
    thread.join()
    assert gc.isenabled()


def test_an_error_ends_the_pause() -> None:
    with pytest.raises(ValueError, match="inside"), pause_collector():
        raise ValueError("inside")
    assert gc.isenabled()


def test_a_collector_that_the_program_has_disabled_stays_so() -> None:
    gc.disable()
    with pause_collector():
        assert not gc.isenabled()
    assert not gc.isenabled()


def test_a_fork_collects() -> None:
    with pause_collector():
        child = os.fork()
        if not child:
            with pause_collector():
                is_paused = not gc.isenabled()
            os._exit(0 if is_paused and gc.isenabled() else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not gc.isenabled()
    assert gc.isenabled()
