"""Memory that malloc keeps: threads share an arena, and large blocks are returned when they are freed."""

from __future__ import annotations

import platform
import subprocess
import sys

import pytest

pytestmark = pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="it sets glibc's malloc")

# Threads that allocate hold their arenas until all have begun. A large block was freed before another is allocated.
PROGRAM = """
import ctypes, sys, tempfile, threading
from roller_svc.service.malloc import limit_arenas

limit_arenas(int(sys.argv[1]))
libc = ctypes.CDLL(None)
libc.malloc.restype = libc.fdopen.restype = ctypes.c_void_p
libc.malloc.argtypes, libc.free.argtypes = (ctypes.c_size_t,), (ctypes.c_void_p,)
barrier = threading.Barrier(6)

def allocate():
    libc.malloc(1000)
    barrier.wait()

threads = [threading.Thread(target=allocate) for _ in range(6)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
libc.free(libc.malloc(4 << 20))
libc.malloc(1 << 20)
with tempfile.NamedTemporaryFile("r") as file:
    libc.fopen.restype = ctypes.c_void_p
    stream = ctypes.c_void_p(libc.fopen(file.name.encode(), b"w"))
    libc.malloc_info(0, stream)
    libc.fclose(stream)
    text = file.read()
mapped = int(text.rpartition('<total type="mmap" count="')[2].partition('"')[0])
print(text.count("<heap nr="), mapped)
"""


def arenas_and_mapped_blocks(count: int) -> tuple[int, int]:
    result = subprocess.run([sys.executable, "-c", PROGRAM, str(count)], capture_output=True, text=True, check=True)
    arenas, mapped = map(int, result.stdout.split())
    return arenas, mapped


def test_threads_share_an_arena_and_a_large_block_has_its_own_pages() -> None:
    arenas, mapped = arenas_and_mapped_blocks(1)
    untouched_arenas, untouched_mapped = arenas_and_mapped_blocks(0)
    assert arenas == 1 < untouched_arenas
    assert mapped > untouched_mapped
