"""The thread pool that all C kernels of this process share (toolchain/pool.c), and its number of threads."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from roller_svc.fork_lock import ForkLock


class _Pool(ctypes.Structure):
    """The first fields of struct roller_pool."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("threads", ctypes.CFUNCTYPE(ctypes.c_int)),
        ("set_threads", ctypes.CFUNCTYPE(None, ctypes.c_int)),
    )


class _Shared:
    """The pools of this process: one for each version of struct roller_pool among its kernels."""

    def __init__(self) -> None:
        self.lock = ForkLock()
        self.pools: list[_Pool] = []
        self.threads = 0  # as set; 0: the pool's own default
        self.limits: list[tuple[int, int]] = []  # of blocks that run now: the thread, and its limit

    @property
    def limit(self) -> int:
        """The most threads of a launch; 0: the pool's own default."""
        return min((each for each in (self.threads, *(limit for _, limit in self.limits)) if each), default=0)

    def apply(self) -> None:
        for pool in self.pools:
            pool.set_threads(self.limit)

    def forget_threads(self) -> None:
        """Forget the blocks of threads that a fork does not have."""
        self.limits = [each for each in self.limits if each[0] == threading.get_ident()]
        self.apply()


_shared = _Shared()
os.register_at_fork(after_in_child=_shared.forget_threads)


def share_pool(library: ctypes.CDLL, name: str) -> bool:
    """Let a kernel or model use this process's pool. Returns whether it brought the pool and so must stay loaded.

    Call it before the first launch. `name` begins the names of the library's functions.
    """
    try:
        use, own = library[f"{name}_use_pool"], library[f"{name}_own_pool"]
    except AttributeError:  # no parallel region, or another OpenMP runtime
        return False
    use.argtypes = (ctypes.POINTER(_Pool),)
    own.restype = ctypes.POINTER(_Pool)
    with _shared.lock:
        if any(use(ctypes.byref(pool)) for pool in _shared.pools):
            return False
        pool = own().contents
        _shared.pools.append(pool)
        pool.set_threads(_shared.limit)
        return True


def set_num_threads(threads: int) -> None:
    """Limit the threads of every later launch; 0 removes the limit."""
    with _shared.lock:
        _shared.threads = threads
        _shared.apply()


@contextmanager
def limit_threads(threads: int) -> Iterator[None]:
    """Limit the threads of all launches of the process while a block runs. Blocks of several threads may overlap."""
    block = threading.get_ident(), threads
    with _shared.lock:
        _shared.limits.append(block)
        _shared.apply()
    try:
        yield
    finally:
        with _shared.lock:
            _shared.limits.remove(block)
            _shared.apply()


def get_num_threads(default: int) -> int:
    """Return the most threads of a launch by this thread. `default`: the limit while none is set, 0 for none."""
    allowed = len(os.sched_getaffinity(0))
    with _shared.lock:
        limit = _shared.limit or default
    return min(limit, allowed) if limit else allowed
