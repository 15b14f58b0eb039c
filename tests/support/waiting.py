"""Waiting for what another thread or process does."""

from __future__ import annotations

import time
from collections.abc import Callable

PATIENCE_S = 300.0  # ends a test that hangs, on any machine under any load; no test takes so long


def becomes_true(condition: Callable[[], object]) -> bool:
    """Wait for a condition. Return whether it became true."""
    give_up_s = time.monotonic() + PATIENCE_S
    while not condition():
        if time.monotonic() > give_up_s:
            return False
        time.sleep(0.01)
    return True


def wait_until(condition: Callable[[], object]) -> None:
    """Wait for a condition. Fail if it does not become true."""
    assert becomes_true(condition), "it did not happen"
