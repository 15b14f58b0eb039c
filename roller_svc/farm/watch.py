"""Wake those who wait for operations, wherever these end: by this process's word, or by a look at the database."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable

from roller_svc.errors import StoreError

POLL_S = 0.2  # how often the database is asked, once for all who wait

log = logging.getLogger(__name__)


class EndWatcher:
    """Calls back, from a thread of its own, when operations are done.

    `ended` returns those of a set of ids that are done or unknown.
    """

    def __init__(self, ended: Callable[[Iterable[str]], set[str]]) -> None:
        self._ended = ended
        self._condition = threading.Condition()
        self._waiting: dict[str, list[Callable[[], None]]] = {}
        self._is_closed = False
        self._thread = threading.Thread(target=self._poll, name="watcher", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def add(self, operation_id: str, wake: Callable[[], None]) -> None:
        """Call `wake` once when the operation is done, within the poll's period if it is already."""
        with self._condition:
            self._waiting.setdefault(operation_id, []).append(wake)
            if len(self._waiting) == 1:
                self._condition.notify()

    def remove(self, operation_id: str, wake: Callable[[], None]) -> None:
        """Undo `add`; do nothing if `wake` was called."""
        with self._condition:
            wakes = self._waiting.get(operation_id, [])
            if wake in wakes:
                wakes.remove(wake)
            if not wakes:
                self._waiting.pop(operation_id, None)

    def notify(self, operation_id: str) -> None:
        """Say that an operation has ended, or is queued again."""
        with self._condition:
            wakes = self._waiting.pop(operation_id, ())
        for wake in wakes:
            wake()

    def close(self) -> None:
        with self._condition:
            self._is_closed = True
            self._condition.notify()
        if self._thread.is_alive():
            self._thread.join()

    def _poll(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._waiting or self._is_closed)
                if not self._is_closed:
                    self._condition.wait_for(lambda: self._is_closed, POLL_S)
                if self._is_closed:
                    return
                ids = list(self._waiting)
            try:
                ended = self._ended(ids)
            except StoreError as failure:
                log.warning("operations cannot be watched: %s", failure.message)
                ended = set()
            for operation_id in ended:
                self.notify(operation_id)
