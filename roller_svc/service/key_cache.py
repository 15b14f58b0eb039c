"""The database's API keys in memory, so that a request pays no query for its key.

All keys are read at once: an unknown key costs nothing that a known one does not.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from roller_svc.errors import StoreError
from roller_svc.farm.api_keys import ApiKey

MAX_AGE_S = 3.0  # after which a request waits for the keys to be read: the time in which a revocation takes effect
MIN_AGE_S = 0.5  # before which an unknown key does not cause another read
LOAD_WAIT_S = 1.0  # how long a request waits for a read
MAX_STALE_S = 30.0  # how long keys are accepted while the database is away


log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class _Snapshot:
    keys: Mapping[str, ApiKey]
    time_s: float  # when the read began


class KeyCache:
    """Keys by their ids. Used on the event loop, apart from `load`.

    Args:
        read: reads all keys from the database. May raise StoreError.
        clock: of monotonic seconds.
    """

    def __init__(self, read: Callable[[], Sequence[ApiKey]], clock: Callable[[], float] = time.monotonic) -> None:
        self._read = read
        self._clock = clock
        self._snapshot = _Snapshot({}, float("-inf"))
        self._is_empty = True
        self._loading: asyncio.Task[None] | None = None
        self._loading_since_s = 0.0

    @property
    def is_empty(self) -> bool:
        """Whether there never was a key. Revoked keys count: the service must not become open with the last one."""
        return self._is_empty

    def load(self) -> None:
        """Read the keys now. Raises StoreError."""
        time_s = self._clock()
        keys = {key.id: key for key in self._read()}
        self._snapshot = _Snapshot(keys, time_s)
        self._is_empty = self._is_empty and not keys

    async def find(self, key_id: str) -> ApiKey | None:
        """Return a key that is neither expired nor revoked. Raises StoreError if that cannot be known."""
        if key_id not in self._snapshot.keys:
            await self._refresh(MIN_AGE_S)
        key, age_s = self._snapshot.keys.get(key_id), self._clock() - self._snapshot.time_s
        if age_s > MAX_STALE_S:
            raise StoreError("the API keys cannot be read: the database is away", code="keys-unreadable")
        if key is None or not key.is_valid:
            return None
        return None if key.expires_in_s is not None and key.expires_in_s <= age_s else key

    async def refresh(self) -> None:
        """Read the keys again if they are too old. Wait for that, unless the database takes long."""
        await self._refresh(MAX_AGE_S)

    async def _refresh(self, max_age_s: float) -> None:
        now_s = self._clock()
        if now_s - self._snapshot.time_s <= max_age_s:
            return
        if self._loading is None:
            self._loading_since_s = now_s
            self._loading = asyncio.ensure_future(asyncio.to_thread(self.load))
            self._loading.add_done_callback(self._end_loading)
        remaining_s = LOAD_WAIT_S - (now_s - self._loading_since_s)
        if remaining_s > 0:
            await asyncio.wait({self._loading}, timeout=remaining_s)

    def _end_loading(self, task: asyncio.Task[None]) -> None:
        self._loading = None
        if not task.cancelled() and isinstance(error := task.exception(), StoreError):
            log.warning("the API keys are not read again: %s", error.message)
