"""Couriers carry the ids of queued operations to workers. The database alone says what is to be done.

A message may be lost or doubled: a sweeper sends the id of what is still queued again, and a worker that receives one
claims whatever operation is next.
"""

from __future__ import annotations

import threading
from typing import Protocol

from roller_svc.farm.queue import QueuedId


class Courier(Protocol):
    def send(self, queued: QueuedId) -> None:
        """Carry an id to a worker of its queue. Raises BuildServiceError if that is impossible now."""

    def check(self) -> None:
        """Raise BuildServiceError if ids cannot be carried now."""

    def close(self) -> None: ...


class Handover:
    """Passes announcements to the builders of this process, each when a builder is idle."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._idle = 0  # builders that wait
        self._offered = 0  # announcements for them; at most as many
        self._is_closed = False

    def offer(self) -> bool:
        """Wait until a builder is idle and wake it; return False if the handover was closed before."""
        with self._condition:
            self._condition.wait_for(lambda: self._is_closed or self._offered < self._idle)
            if self._is_closed:
                return False
            self._offered += 1
            self._condition.notify_all()
            return True

    def wait(self, timeout_s: float) -> None:
        """Wait, as an idle builder, until an announcement is offered, the time is up or the handover is closed."""
        with self._condition:
            self._idle += 1
            self._condition.notify_all()
            self._condition.wait_for(lambda: self._is_closed or self._offered, timeout_s)
            self._idle -= 1
            if self._offered:
                self._offered -= 1

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()


class InProcessCourier:
    """Wakes the builders of this process."""

    def __init__(self) -> None:
        self._condition = threading.Condition()
        self._sent = 0
        self._is_closed = False

    def send(self, queued: QueuedId) -> None:
        with self._condition:
            self._sent += 1
            self._condition.notify()

    def check(self) -> None:
        """Do nothing: nothing can fail."""

    def wait(self, timeout_s: float) -> None:
        """Wait until an id is sent, the time is up or the courier is closed."""
        with self._condition:
            if self._condition.wait_for(lambda: self._sent or self._is_closed, timeout_s):
                self._sent = max(0, self._sent - 1)

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify_all()
