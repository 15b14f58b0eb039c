"""BuildRequest → its action's digest, in processes that can be stopped; what was found is remembered.

Reading a program and checking it for its indices takes a client's text through a parser and a polyhedral library, which
holds the interpreter's lock: neither runs in the process that answers requests.
"""

from __future__ import annotations

import json
from dataclasses import replace

from roller_svc.compiler.estimates.cache import Memo
from roller_svc.compiler.request import request_json
from roller_svc.errors import FarmError, InputError, KernelTimeoutError
from roller_svc.farm.action import action_digest
from roller_svc.farm.build import DIGEST, LOADED_GENERATOR, BuildTask
from roller_svc.farm.workers import JsonAnswers, ThreadLanes, WorkerLimits
from roller_svc.ir.report import BuildRequest

REMEMBERED_CHARACTERS = 8 << 20  # of requests
ATTEMPTS_MOST = 3  # where processes die
MEMORY_BYTES = 2 << 30  # of a process that checks


def checked_digest(task: BuildTask) -> str:
    """The action's digest. Raises InputError, and FarmError where this process has other code than the service."""
    task.check_generator()
    return action_digest(task.request)


class Checking:
    """Requests' digests and refusals. `timeout_s` is the most that a request may take to be read and checked."""

    def __init__(self, timeout_s: float, limits: WorkerLimits = WorkerLimits()) -> None:  # noqa: B008 - frozen
        self._timeout_s = timeout_s
        answers = JsonAnswers(str, _digest_of)
        self._lanes = ThreadLanes(checked_digest, timeout_s, replace(limits, memory_bytes=MEMORY_BYTES), answers)
        self._known: Memo[str, str | InputError] = Memo(REMEMBERED_CHARACTERS)

    def knows(self, request: BuildRequest) -> bool:
        """Whether `digest` answers at once."""
        return self._known.get(_key(request)) is not None

    def digest(self, request: BuildRequest) -> str:
        """The action's digest. Raises the request's InputError, and FarmError where it could not be checked now."""
        key = _key(request)
        found = self._known.get(key)
        if found is None:
            found = self._checked(request)
            self._known.put(key, found, len(key))
        if isinstance(found, InputError):
            raise found.with_traceback(None)
        return found

    def close(self) -> None:
        self._lanes.close(at_once=True)

    def _checked(self, request: BuildRequest) -> str | InputError:
        for _ in range(ATTEMPTS_MOST - 1):
            try:
                return self._checked_once(request)
            except FarmError as fault:
                if fault.code != "worker-lost":
                    raise
        return self._checked_once(request)

    def _checked_once(self, request: BuildRequest) -> str | InputError:
        try:
            return self._lanes.call(BuildTask(request, LOADED_GENERATOR))
        except InputError as refusal:
            return refusal
        except KernelTimeoutError:
            return InputError(
                f"the program takes longer than {self._timeout_s:g} s to be read and checked",
                code="check-timeout",
                hint="fewer or simpler conditions and indices; ROLLER_CHECK_TIMEOUT_S is the service's limit",
            )


def _key(request: BuildRequest) -> str:
    return json.dumps(request_json(request), sort_keys=True, separators=(",", ":"))


def _digest_of(document: object) -> str:
    if not (isinstance(document, str) and DIGEST.fullmatch(document)):
        raise ValueError("no digest")
    return document
