"""Memory that stays for many calls."""

from __future__ import annotations

import numpy as np
import pytest

from roller_svc.runtime.binding import ALIGNMENT_BYTES
from roller_svc.runtime.resident import HUGE_PAGE_BYTES, resident_empty


@pytest.mark.parametrize("size_bytes", [0, 1, 4096, HUGE_PAGE_BYTES - 1, HUGE_PAGE_BYTES, 3 * HUGE_PAGE_BYTES + 5])
def test_blocks_are_aligned_and_writable(size_bytes: int) -> None:
    block = resident_empty(size_bytes)
    assert block.size == max(1, size_bytes)
    address = block.ctypes.data
    assert address % (HUGE_PAGE_BYTES if size_bytes >= HUGE_PAGE_BYTES else ALIGNMENT_BYTES) == 0
    block[:] = np.arange(block.size, dtype=np.uint8)
    assert block[-1] == (block.size - 1) % 256


def test_a_block_lives_as_long_as_its_views() -> None:
    views = [resident_empty(HUGE_PAGE_BYTES)[7:1000].view(np.uint8) for _ in range(4)]
    for i, view in enumerate(views):
        view[:] = i
    assert [int(view.sum()) for view in views] == [i * 993 for i in range(4)]
