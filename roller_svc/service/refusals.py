"""Spread refusals over time, so that a flood of them costs those who are served nothing.

A client gets its part of refusals a second at once, and further ones later. Its connection brings no other request
before that answer.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from roller_svc.settings import Limit

STATUSES = frozenset({401, 403, 421, 429})
PERIOD_S = 1.0  # of a limit
MAX_DELAY_S = 10.0  # clients wait longer for an answer
MAX_CLIENTS = 10_000  # in memory


class Refusals:
    """Counts the refusals of each client, and those of all that do not exceed their own part.

    Args:
        limit: refusals in a period.
        clock: of monotonic seconds.
    """

    def __init__(self, limit: Limit, clock: Callable[[], float] = time.monotonic) -> None:
        self._limit = limit
        self._clock = clock
        self._paid_s: dict[str, float] = {}  # until when the refusals of a client use up its part
        self._all_paid_s = float("-inf")

    def count(self, client: str) -> float:
        """Count a refusal; return the seconds to wait before it is sent."""
        now_s = self._clock()
        if len(self._paid_s) >= MAX_CLIENTS:
            self._paid_s = {known: paid_s for known, paid_s in self._paid_s.items() if paid_s > now_s}
        self._paid_s[client] = paid_s = _pay(self._paid_s.get(client, now_s), self._limit.each, now_s)
        if paid_s <= now_s + PERIOD_S:
            self._all_paid_s = paid_s = _pay(self._all_paid_s, self._limit.total, now_s)
        return max(0.0, paid_s - PERIOD_S - now_s)


def _pay(paid_s: float, limit: int | None, now_s: float) -> float:
    """Return until when one more refusal uses up a limit."""
    if limit is None:
        return now_s
    return min(max(paid_s, now_s) + PERIOD_S / limit, now_s + PERIOD_S + MAX_DELAY_S)
