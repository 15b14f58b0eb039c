"""A lock of an object or module that a fork of the process goes on using."""

from __future__ import annotations

import os
from threading import Lock, local
from weakref import WeakSet


class ForkLock:
    """A lock that is free in a fork: the threads that may have held it are not there."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._entered = local()  # of each thread: the lock that its block holds
        _of_this_process.add(self)

    def __enter__(self) -> None:
        entered = self._lock
        entered.acquire()
        self._entered.lock = entered

    def __exit__(self, *_: object) -> None:
        self._entered.lock.release()  # where the block has forked, not the lock of this process

    def renew(self) -> None:
        """Be free, whoever holds it."""
        self._lock = Lock()


_of_this_process: WeakSet[ForkLock] = WeakSet()


def _renew_locks() -> None:
    for lock in list(_of_this_process):
        lock.renew()


os.register_at_fork(after_in_child=_renew_locks)
