"""A lock of an object or module that a fork of the process goes on using."""

from __future__ import annotations

import os
from threading import Lock
from weakref import WeakSet


class ForkLock:
    """A lock that is free in a fork: the threads that may have held it are not there."""

    def __init__(self) -> None:
        self._lock = Lock()
        _of_this_process.add(self)

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        if self._lock.locked():  # a block may have forked
            self._lock.release()

    def renew(self) -> None:
        """Be free, whoever holds it."""
        self._lock = Lock()


_of_this_process: WeakSet[ForkLock] = WeakSet()


def _renew_locks() -> None:
    for lock in list(_of_this_process):
        lock.renew()


os.register_at_fork(after_in_child=_renew_locks)
