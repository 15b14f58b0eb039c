"""A thread of the service that writes the store's uses, and collects the store if it has a quota."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection

from roller_svc.errors import RollerError
from roller_svc.farm.collection import collect
from roller_svc.farm.store import Store

FLUSH_S = 60.0  # between writes of uses
COLLECT_S = 600.0  # between collections

log = logging.getLogger(__name__)


class StoreKeeper:
    """Keeps a store within its quota.

    Args:
        store: to collect.
        quota_bytes: of the blobs; None: nothing is collected.
        live: returns the names of uploads that operations wait for.
        on_removed: called with the actions whose results were removed.
    """

    def __init__(
        self,
        store: Store,
        quota_bytes: int | None,
        live: Callable[[], Collection[str]],
        on_removed: Callable[[Collection[str]], None] = lambda _: None,
    ) -> None:
        self._store = store
        self._quota_bytes = quota_bytes
        self._live = live
        self._on_removed = on_removed
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="store-keeper", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def close(self) -> None:
        """Write the uses and stop."""
        self._closing.set()
        if self._thread.is_alive():
            self._thread.join()

    def collect(self) -> None:
        """Collect now. Another process that collects makes this one unnecessary."""
        report = collect(self._store, self._quota_bytes, keep=self._live())
        if report.removed_blobs or report.removed_items:
            log.info(
                "%d results and %d blobs (%d bytes) are removed from the store, which has %d bytes",
                report.removed_items,
                report.removed_blobs,
                report.removed_bytes,
                report.size_bytes,
            )
        self._on_removed(report.removed_actions)

    def _run(self) -> None:
        seconds_since_collection = 0.0
        is_closing = False
        while not is_closing:
            is_closing = self._closing.wait(FLUSH_S)
            seconds_since_collection += FLUSH_S
            try:
                self._store.uses.flush()
                if self._quota_bytes is not None and seconds_since_collection >= COLLECT_S and not is_closing:
                    seconds_since_collection = 0.0
                    self.collect()
            except RollerError as failure:  # the store is away, or collected by others
                log.warning("the store is not collected: %s", failure.message)
