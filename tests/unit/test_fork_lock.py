"""Locks that a fork of the process goes on using."""

from __future__ import annotations

from threading import Event, Thread

from roller_svc.fork_lock import ForkLock


def test_a_block_that_has_forked_leaves_the_lock_to_another_thread() -> None:
    lock, entered, leave = ForkLock(), Event(), Event()

    def hold() -> None:
        with lock:
            entered.set()
            leave.wait()

    thread = Thread(target=hold)
    with lock:
        lock.renew()  # as in a fork
        thread.start()
        entered.wait()
    assert lock._lock.locked()
    leave.set()
    thread.join()
    with lock:
        assert lock._lock.locked()
    assert not lock._lock.locked()
