"""Readiness: which parts that the service needs can be reached now. A part that hangs counts as one that fails."""

from __future__ import annotations

import asyncio
import logging
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum

from roller_svc.errors import RollerError

TIMEOUT_S = 2.0  # of all checks together
MAX_AGE_S = 1.0  # of a result that is used again

log = logging.getLogger(__name__)


class PartStatus(Enum):
    OK = "ok"
    FAILED = "failed"
    TIMEOUT = "timeout"


@dataclass(frozen=True, slots=True)
class Part:
    """A part and its check, which raises RollerError. Without an essential part the service is not ready."""

    check: Callable[[], None]
    is_essential: bool


class Readiness:
    """Checks parts at the same time, each in a thread of its own, and at most once at a time and in MAX_AGE_S."""

    def __init__(self, parts: Mapping[str, Part]) -> None:
        self._parts = parts
        self._checks: dict[str, Future[None]] = {}  # the latest of each part
        self._statuses: Mapping[str, PartStatus] = {}
        self._valid_until_s = 0.0
        self._lock = asyncio.Lock()

    async def read(self) -> Mapping[str, PartStatus]:
        """Return the status of each part, within TIMEOUT_S."""
        async with self._lock:  # requests that arrive meanwhile share the result
            if time.monotonic() >= self._valid_until_s:
                self._statuses = await self._read_now()
                self._valid_until_s = time.monotonic() + MAX_AGE_S
            return self._statuses

    def missing(self, statuses: Mapping[str, PartStatus]) -> list[str]:
        """Return the essential parts that are not reachable."""
        return [name for name, status in statuses.items() if self._is_missing(name, status)]

    def _is_missing(self, name: str, status: PartStatus) -> bool:
        return self._parts[name].is_essential and status is not PartStatus.OK

    async def _read_now(self) -> Mapping[str, PartStatus]:
        checks = {name: self._begin(name, part.check) for name, part in self._parts.items()}
        await asyncio.wait([asyncio.wrap_future(check) for check in checks.values()], timeout=TIMEOUT_S)
        statuses = {name: _status_of(check) for name, check in checks.items()}
        for name, status in statuses.items():
            if status is not self._statuses.get(name, PartStatus.OK):
                _log_change(name, status, checks[name])
        return statuses

    def _begin(self, name: str, check: Callable[[], None]) -> Future[None]:
        """Begin a check, unless the part's last one still hangs."""
        running = self._checks.get(name)
        if running is None or running.done():
            running = self._checks[name] = Future()
            # A daemon: the end of the process does not wait for a check that hangs.
            threading.Thread(target=_run, args=(check, running), name=f"check-{name}", daemon=True).start()
        return running


def _run(check: Callable[[], None], result: Future[None]) -> None:
    try:
        check()
    except Exception as failure:  # noqa: BLE001 - whoever reads the result gets it
        result.set_exception(failure)
    else:
        result.set_result(None)


def _status_of(check: Future[None]) -> PartStatus:
    """Return the status of a part by its check. Raises any error of the check but a RollerError: it is a bug."""
    if not check.done():
        return PartStatus.TIMEOUT
    failure = check.exception()
    if failure is None:
        return PartStatus.OK
    if isinstance(failure, RollerError):
        return PartStatus.FAILED
    raise failure


def _log_change(name: str, status: PartStatus, check: Future[None]) -> None:
    if status is PartStatus.OK:
        log.info("the %s can be reached again", name)
    elif status is PartStatus.TIMEOUT:
        log.warning("the %s did not answer within %g s", name, TIMEOUT_S)
    else:
        log.warning("the %s cannot be reached: %s", name, check.exception())
