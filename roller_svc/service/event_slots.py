"""Bound the number of event streams, in total and for each client."""

from __future__ import annotations

from collections import Counter

from roller_svc.errors import QueueFullError, QuotaExceededError

MAX_STREAMS = 64
MAX_STREAMS_PER_CLIENT = 32


class StreamSlots:
    """Counts the open event streams. Used on the event loop only."""

    def __init__(self) -> None:
        self._open: Counter[str] = Counter()

    @property
    def open_count(self) -> int:
        return self._open.total()

    def take(self, client: str) -> None:
        """Count a stream. Raises QueueFullError or QuotaExceededError."""
        if self.open_count >= MAX_STREAMS:
            raise QueueFullError(f"{MAX_STREAMS} event streams are open; try again later")
        if self._open[client] >= MAX_STREAMS_PER_CLIENT:
            raise QuotaExceededError(f"{MAX_STREAMS_PER_CLIENT} event streams of this client are open")
        self._open[client] += 1

    def give_back(self, client: str) -> None:
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]
