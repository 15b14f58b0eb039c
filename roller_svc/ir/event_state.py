"""The memory `sync` that the vEUs of a cooperative kernel share: its words, and the wait that ended a run."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

EVENT_WORDS = 32  # 128 bytes
# Words before the first event. An epoch is a run of the kernel: counters go on from one run to the next.
EPOCH, ABORT, DEADLINE_MS, STATUS = 0, 1, 2, 8
STATUS_WORDS = 5  # vEU, row, event, arrivals seen, arrivals expected: of the wait that reached the deadline
DEFAULT_DEADLINE_MS = 2000  # where the word is 0


class ReachedDeadline(NamedTuple):
    """The wait of a run that reached its deadline."""

    veu: int
    row: int
    event: int
    seen: int  # arrivals, counted from the first run
    target: int


def find_reached_deadline(sync: NDArray[np.uint32]) -> ReachedDeadline | None:
    """Return the wait that ended a run, by the memory `sync` after it; None if the run has ended well."""
    return ReachedDeadline(*sync[STATUS : STATUS + STATUS_WORDS].tolist()) if sync[ABORT] else None
