"""Note when clients are used, for the audit log: beside their requests, and at most once a minute for each."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping

from roller_svc.errors import StoreError

PAUSE_S = 60.0  # between two notes of a client
MAX_CLIENTS = 10_000  # in memory

log = logging.getLogger(__name__)


class UseRecorder:
    """Writes who is used. Used on the event loop only.

    Args:
        write: notes that clients, given by their ids and names, are used now. May raise StoreError.
        clock: of monotonic seconds.
    """

    def __init__(self, write: Callable[[Mapping[str, str]], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._write = write
        self._clock = clock
        self._noted_s: dict[str, float] = {}
        self._pending: dict[str, str] = {}
        self._writing: asyncio.Task[None] | None = None  # one at a time, so that a locked database takes one thread

    def note(self, client: str, name: str) -> None:
        """Note that a client is used."""
        now_s = self._clock()
        if now_s - self._noted_s.get(client, float("-inf")) < PAUSE_S:
            return
        if len(self._noted_s) >= MAX_CLIENTS:
            self._noted_s.clear()
        self._noted_s[client] = now_s
        self._pending[client] = name
        if self._writing is None:
            self._writing = asyncio.create_task(self._write_pending())

    async def _write_pending(self) -> None:
        try:
            while self._pending:
                uses, self._pending = self._pending, {}
                try:
                    await asyncio.to_thread(self._write, uses)
                except StoreError as failure:
                    log.warning("the audit log does not know that %d clients are used: %s", len(uses), failure.message)
        finally:
            self._writing = None
