"""Calls that crash, hang, fail or return in a fork."""

from __future__ import annotations

import os
import signal
import threading
from functools import partial

import numpy as np
import pytest

from roller_svc.runtime.forked import find_fatal_end


def fail() -> None:
    raise ValueError("it fails")


def kill_itself(by: signal.Signals) -> None:
    os.kill(os.getpid(), by)


def test_a_call_that_returns_or_raises_has_no_fatal_end() -> None:
    memory = np.zeros(4)
    assert find_fatal_end(lambda: memory.fill(1.0), 60) == ""
    assert not memory.any()  # the fork's own
    assert find_fatal_end(fail, 60) == ""


def test_a_crash_names_its_signal_and_a_hang_its_limit() -> None:
    for ends in (signal.SIGSEGV, signal.SIGILL, signal.SIGKILL):
        assert find_fatal_end(partial(kill_itself, ends), 60) == f"a call ends the process by {ends.name}"
    assert find_fatal_end(threading.Event().wait, 0.05) == "a call does not return within 0.05 s"


def test_no_fork_is_left_and_a_refused_one_finds_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[int] = []
    fork = os.fork

    def count() -> int:
        made.append(fork())
        return made[-1]

    def refuse() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", count)
    find_fatal_end(threading.Event().wait, 0.01)
    with pytest.raises(ChildProcessError):
        os.waitpid(made[0], os.WNOHANG)
    monkeypatch.setattr(os, "fork", refuse)
    assert find_fatal_end(fail, 1) == ""


def test_a_process_that_ignores_the_ends_of_its_children_finds_them() -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        assert find_fatal_end(lambda: None, 60) == ""
        assert find_fatal_end(fail, 60) == ""
        assert find_fatal_end(partial(kill_itself, signal.SIGSEGV), 60) == "a call ends the process"
        assert find_fatal_end(threading.Event().wait, 0.05) == "a call does not return within 0.05 s"
    finally:
        signal.signal(signal.SIGCHLD, before)
