"""Pause Python's collector of cycles while this package makes many objects that live on, and few cycles."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

from roller_svc.fork_lock import ForkLock

_lock = ForkLock()
_paused = 0  # blocks that have paused the collector, in all threads


@contextmanager
def pause_collector() -> Iterator[None]:
    """Collect no cycles in this block. Blocks may overlap, and a collector that the program has disabled before stays so.

    A `gc.disable()` of the program during a block is lost: the last block enables the collector (ADR 0117).
    """
    with _lock:
        pauses = _paused > 0 or gc.isenabled()
        _add(1 if pauses else 0)
    try:
        yield
    finally:
        with _lock:
            _add(-1 if pauses and _paused else 0)  # none are left where the block has forked


def _add(blocks: int) -> None:
    """Count blocks; the first one disables the collector, and the last one enables it."""
    global _paused
    before, _paused = _paused, _paused + blocks
    if not before and _paused:
        gc.disable()
    elif before and not _paused:
        gc.enable()


def _resume_in_fork() -> None:
    """Collect cycles in a fork: the threads whose blocks have paused the collector are not there."""
    _add(-_paused)


os.register_at_fork(after_in_child=_resume_in_fork)
