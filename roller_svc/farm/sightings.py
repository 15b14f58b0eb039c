"""Measure for how long a value of the database stands, by this process's own monotonic clock.

Clocks are set right, and those of two machines differ. A time stamp is therefore never compared with a clock to find out
whether its writer is alive: a lease or a heartbeat that is renewed changes, and one that stands still for too long has
nobody who renews it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import Generic, TypeVar

Key = TypeVar("Key", bound=Hashable)


@dataclass(frozen=True, slots=True)
class Sighting:
    """A value now, and for how long it seems to have stood when nobody has looked before."""

    value: object
    age_s: float = 0.0


class Sightings(Generic[Key]):
    """Remembers what was seen the last time, and since when.

    Args:
        clock: of monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._seen: dict[Key, tuple[object, float]] = {}  # the value, and when it began

    def ages_s(self, sightings: Mapping[Key, Sighting]) -> dict[Key, float]:
        """Return for how long each value has stood; forget the keys that are not among them."""
        with self._lock:
            now_s = self._clock()
            self._seen = {key: self._begin(key, sighting, now_s) for key, sighting in sightings.items()}
            return {key: now_s - since_s for key, (_, since_s) in self._seen.items()}

    def _begin(self, key: Key, sighting: Sighting, now_s: float) -> tuple[object, float]:
        known = self._seen.get(key)
        if known is None:
            return sighting.value, now_s - sighting.age_s
        return known if known[0] == sighting.value else (sighting.value, now_s)


def plausible_age_s(since_s: float, now_s: float, at_most_s: float) -> float:
    """Return the age of a time stamp by the clock that wrote it; 0 if that clock cannot have been right."""
    age_s = now_s - since_s
    return age_s if 0 <= age_s <= at_most_s else 0.0
