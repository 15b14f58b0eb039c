"""When kernels and models were last used, for collections: noted in memory, and written once in a while.

used/<folder>/<digest>    its time is that of the last use, to about RENEW_S
"""

from __future__ import annotations

import threading
import time

from roller_svc.farm.objects import Objects

USES = "used"
RENEW_S = 900.0  # between two writes for one name
MAX_NAMES = 16_384  # in memory


class UseLog:
    """The uses of this process."""

    def __init__(self, objects: Objects) -> None:
        self._objects = objects
        self._lock = threading.Lock()
        self._noted: set[str] = set()
        self._written_s: dict[str, float] = {}

    def note(self, name: str) -> None:
        """Remember a use of `kernels/<digest>` or another name."""
        self._noted.add(name)

    def is_recent(self, name: str) -> bool:
        """Whether a use was written a short time ago."""
        return time.monotonic() - self._written_s.get(name, -RENEW_S) < RENEW_S

    def write(self, name: str) -> None:
        """Write a use now."""
        self._objects.note(f"{USES}/{name}")
        with self._lock:
            if len(self._written_s) >= MAX_NAMES:
                self._written_s.clear()
            self._written_s[name] = time.monotonic()

    def flush(self) -> None:
        """Write the uses that were noted since the last call, but those written a short time ago. Forget older writes."""
        with self._lock:
            self._written_s = {name: written_s for name, written_s in self._written_s.items() if self.is_recent(name)}
        for name in list(self._noted):
            self._noted.discard(name)
            if not self.is_recent(name):
                self.write(name)
