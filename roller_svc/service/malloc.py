"""How the C library's malloc keeps memory in a process that serves for long.

glibc gives threads arenas of their own, up to eight for each core. What one thread frees, another cannot use, and an
arena returns little to the system. After a large block was freed, glibc takes blocks of that size from arenas, too,
where small results that are kept for long divide what is left. So the memory of a process grows with its threads,
though its objects do not. The interpreter lock lets one thread allocate at a time, so few arenas cost nothing.
"""

from __future__ import annotations

import ctypes
import platform

MMAP_BYTES = 128 << 10  # size from which a block has pages of its own, which are returned when it is freed
TRIM_BYTES = 1 << 20  # of free memory at the end of the heap, beyond which it is returned
_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # parameters of mallopt, from malloc.h


def limit_arenas(count: int) -> None:
    """Let all threads share this number of arenas, and give large blocks pages of their own. Call it before they start.

    Args:
        count: of arenas; 0: malloc stays as it is. Another C library than glibc stays as it is.
    """
    if count and platform.libc_ver()[0] == "glibc":
        set_parameter = ctypes.CDLL(None).mallopt
        for parameter, value in ((_ARENA_MAX, count), (_MMAP_THRESHOLD, MMAP_BYTES), (_TRIM_THRESHOLD, TRIM_BYTES)):
            set_parameter(parameter, value)
