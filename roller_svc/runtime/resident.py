"""Memory that many calls read, such as weights: on huge pages, so that streams through it miss the TLB less."""

from __future__ import annotations

import contextlib
import mmap

import numpy as np

from roller_svc.runtime.binding import Array, aligned_empty

HUGE_PAGE_BYTES = 2 << 20  # of x86-64, and of ARM with base pages of 4 KiB


def resident_empty(size_bytes: int) -> Array:
    """Return uninitialised bytes at an aligned address; at least one, so that there is an address.

    From the size of a huge page on, they begin at one. A kernel without transparent huge pages gives small ones.
    """
    if size_bytes < HUGE_PAGE_BYTES:
        return aligned_empty((max(1, size_bytes),), np.dtype(np.uint8))
    mapping = mmap.mmap(-1, size_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    block = np.frombuffer(mapping, np.uint8)  # keeps the mapping alive
    start = -block.ctypes.data % HUGE_PAGE_BYTES
    return block[start : start + size_bytes]
