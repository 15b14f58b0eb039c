"""When to send a request again: exponential back-off with jitter, and the server's Retry-After."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

RETRY_STATUSES = frozenset({429, 502, 503, 504})
MAX_RETRY_AFTER_S = 60.0
MAX_DOUBLINGS = 30  # of the pause


@dataclass(frozen=True, slots=True)
class RetryPolicy:
    """Number of retries of a request, and the pauses before them.

    The n-th pause is a random part of `base_s * 2**n`, at most `max_s` ("full jitter", Brooker 2015), so that clients
    that failed together do not return together. It is not shorter than the server's Retry-After.
    """

    attempts: int = 5  # in all; 1: never again
    base_s: float = 0.25
    max_s: float = 10.0
    random: Callable[[], float] = random.random

    def pause_s(self, failures: int, retry_after_s: float = 0.0) -> float:
        """Return the pause after that many failures, counted from 1."""
        ceiling_s = min(self.max_s, self.base_s * 2.0 ** min(failures - 1, MAX_DOUBLINGS))
        return min(retry_after_s, MAX_RETRY_AFTER_S) + self.random() * ceiling_s


DEFAULT_RETRIES = RetryPolicy()
NO_RETRIES = RetryPolicy(attempts=1)


def parse_retry_after(value: str, now: Callable[[], datetime] = lambda: datetime.now(UTC)) -> float:
    """Return the seconds of a Retry-After header (RFC 9110 §10.2.3); 0 for a malformed one."""
    if value.isascii() and value.isdecimal():
        return float(value[:9])
    try:
        at = parsedate_to_datetime(value)
    except ValueError:
        return 0.0
    return max(0.0, (at.replace(tzinfo=at.tzinfo or UTC) - now()).total_seconds())
