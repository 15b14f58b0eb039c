"""Claim operations and build them, with heartbeats: what every worker of the farm does."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Protocol

from structlog.contextvars import bound_contextvars

from roller_svc.errors import BuildServiceError, CompileError, InputError, RollerError, StoreError
from roller_svc.farm.build import GENERATOR_REPLACED
from roller_svc.farm.measuring import DeviceLocks
from roller_svc.farm.models import Request, parse_record
from roller_svc.farm.queue import Claim, Lease, OperationQueue, overdue_error
from roller_svc.farm.registry import ALIVE_S, Worker, WorkerRegistry
from roller_svc.farm.statistics import SUCCEEDED
from roller_svc.farm.store import Artifact, BuildStage, Json, Store
from roller_svc.farm.usage import DailyUsage
from roller_svc.settings import Resource

HEARTBEATS_PER_LEASE = 3
STOP_PAUSE_S = 0.02  # between tries to end the last builds
RECORD_PAUSE_S = 0.5  # between tries to record a result while the database is away
# Codes of input errors whose cause may go without another request: a blob is sent again, a disk has space again.
OTHERS_CODES = frozenset({"unknown-blob", "unreadable-record", "unwritable-folder", "unwritable-file"})

log = logging.getLogger(__name__)


class Builds(Protocol):
    """Builds artifacts, each in the thread that asks for it."""

    def build(self, request: Request) -> Artifact:
        """Build an artifact. Raises BuildServiceError for a transient failure, another RollerError for a final one."""

    def interrupt(self, thread_id: int) -> None:
        """End the build of a thread, which then raises; do nothing if it has none."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """An attempt that has ended, for logs and traces. Times are in seconds since 1970, by this machine's clock."""

    claim: Claim
    worker: str
    start_s: float
    end_s: float
    code: str  # of its error, or SUCCEEDED
    stages: tuple[BuildStage, ...]

    @property
    def log_fields(self) -> dict[str, object]:
        stages = {stage.name: round(stage.seconds, 6) for stage in self.stages}
        return {"code": self.code, "seconds": round(self.end_s - self.start_s, 6), "stages": stages}


class BuildRunner:
    """Builds the operations that it claims, several at a time, each in a thread of the caller.

    Args:
        queue: the operations.
        store: takes the artifacts.
        builds: builds them.
        registry: lists this worker while it is alive.
        worker: this worker.
        remember_errors_s: how long the errors of invalid requests stand without another build.
        devices: let one build measure on a device at a time; None: any number.
        on_end: called with the id of each operation that this worker ended.
        on_attempt: called at the end of each attempt.
    """

    def __init__(
        self,
        queue: OperationQueue,
        store: Store,
        builds: Builds,
        registry: WorkerRegistry,
        worker: Worker,
        *,
        remember_errors_s: float = 0.0,
        devices: DeviceLocks | None = None,
        on_end: Callable[[str], None] = lambda _: None,
        on_attempt: Callable[[Attempt], None] = lambda _: None,
    ) -> None:
        self.worker = worker
        self._queue = queue
        self._usage = DailyUsage(queue.database)
        self._store = store
        self._builds = builds
        self._registry = registry
        self._remember_errors_s = remember_errors_s
        self._devices = devices
        self._claiming = threading.Lock()  # the locks of a builder that claims are not in the way of another one
        self._on_end = on_end
        self._on_attempt = on_attempt
        self._lock = threading.Lock()
        self._claims: dict[str, tuple[Claim, int]] = {}  # with the thread that builds it, by operation
        self._stops: dict[str, Lease] = {}  # why a build was interrupted
        self._closing = threading.Event()
        self._stopped = threading.Event()  # no build runs any more
        self._heart = threading.Thread(target=self._beat, name="heartbeat", daemon=True)

    @property
    def is_closing(self) -> bool:
        return self._closing.is_set()

    def start(self) -> None:
        """Register the worker and begin its heartbeats."""
        self._registry.add(self.worker)
        self._heart.start()

    def run_next(self) -> bool:
        """Build the next operation of the worker's queues; return False if there is none.

        Raises StoreError if the database is away.
        """
        if self._closing.is_set():
            return False
        claim = self._claim()
        if claim is None:
            return False
        try:
            with bound_contextvars(**self._log_context(claim)):
                self._run_claimed(claim)
        finally:
            if self._devices is not None and claim.measured_on is not None:
                self._devices.release(claim.measured_on)
        self._on_end(claim.id)
        return True

    def _log_context(self, claim: Claim) -> dict[str, object]:
        context = {"operation": claim.id, "attempt": claim.attempt, "worker": self.worker.id}
        return context if claim.request_id is None else context | {"request_id": claim.request_id}

    def _claim(self) -> Claim | None:
        """Claim the next operation, with the lock of the device that it measures on."""
        if self._devices is None:
            return self._queue.claim(self.worker.id, self.worker.queues)
        with self._claiming:
            free = self._devices.acquire_free()
            claim = None
            try:
                claim = self._queue.claim(self.worker.id, self.worker.queues, free)
            finally:
                for kind in free:
                    if claim is None or kind != claim.measured_on:
                        self._devices.release(kind)
        return claim

    def _run_claimed(self, claim: Claim) -> None:
        with self._lock:
            self._claims[claim.id] = (claim, threading.get_ident())
        try:
            if self._closing.is_set():
                self._queue.release(claim)
            else:
                self._run(claim)
        finally:
            with self._lock:
                self._claims.pop(claim.id, None)
                self._stops.pop(claim.id, None)

    def drain(self) -> None:
        """Claim nothing more. Builds go on."""
        self._closing.set()
        self.worker = replace(self.worker, is_draining=True)

    def close(self) -> None:
        """End the running builds, whose operations are queued again, and stop the heartbeats."""
        self.drain()
        while not self.is_idle:
            self.interrupt_all()  # again, for one that was just about to start
            time.sleep(STOP_PAUSE_S)
        self._stopped.set()
        if self._heart.is_alive():
            self._heart.join()
        try:
            self._registry.remove(self.worker.id)
        except StoreError as failure:
            log.warning("worker %s stays listed until it is taken for dead: %s", self.worker.id, failure.message)

    def interrupt_all(self) -> None:
        with self._lock:
            threads = [thread_id for _, thread_id in self._claims.values()]
        for thread_id in threads:
            self._builds.interrupt(thread_id)

    @property
    def is_idle(self) -> bool:
        with self._lock:
            return not self._claims

    def _run(self, claim: Claim) -> None:
        facts: Json | None = None
        stages: tuple[BuildStage, ...] = ()
        failure: RollerError = BuildServiceError("the build ended without a result")  # kept if a bug escapes below
        start_s, begin_s = time.time(), time.monotonic()
        log.info("attempt begins")
        try:
            facts, stages = self._facts(claim)
        except RollerError as error:
            failure = error
        finally:
            code = failure.code if facts is None else SUCCEEDED
            attempt = Attempt(claim, self.worker.id, start_s, time.time(), code, stages)
            log.info("attempt ends", extra=attempt.log_fields)
            self._record(claim, facts, failure)
            self._count_seconds(claim, time.monotonic() - begin_s)
            self._on_attempt(attempt)

    def _count_seconds(self, claim: Claim, seconds: float) -> None:
        """Count the seconds of an attempt for the client that it was for."""
        try:
            self._usage.add(claim.client, Resource.BUILD_SECONDS, seconds)
        except StoreError as away:
            log.warning("%.1f s of %s are not counted: %s", seconds, claim.id, away.message)

    def _facts(self, claim: Claim) -> tuple[Json, tuple[BuildStage, ...]]:
        """Return the facts of the claim's artifact, which is in the store, and the stages of its build."""
        facts = self._store.action_result(claim.action)  # an earlier attempt may have published it
        if facts is not None:
            return facts, ()
        artifact = self._builds.build(parse_record(claim.request))
        with self._lock:
            is_stopped = claim.id in self._stops
        if is_stopped:
            raise BuildServiceError("the build was interrupted", code="worker-lost")
        return self._store.publish(claim.action, artifact), artifact.stages

    def _record(self, claim: Claim, facts: Json | None, failure: RollerError) -> None:
        """Record the end of an attempt. While the database is away, try until the lease must have run out."""
        give_up_s = time.monotonic() + self._queue.lease_s
        while True:
            try:
                self._record_once(claim, facts, failure)
                return
            except StoreError as away:
                if time.monotonic() > give_up_s:
                    log.warning("attempt %d of %s is not recorded: %s", claim.attempt, claim.id, away.message)
                    return
            time.sleep(RECORD_PAUSE_S)

    def _record_once(self, claim: Claim, facts: Json | None, failure: RollerError) -> None:
        with self._lock:
            stop = self._stops.get(claim.id)
        if facts is not None:
            is_current = self._queue.finish(claim, facts)
        elif stop is Lease.CANCELLED:
            is_current = self._queue.end_cancelled(claim)
        elif stop is Lease.OVERDUE:
            is_current = self._queue.fail(claim, overdue_error())
        elif stop is Lease.LOST:
            is_current = False
        elif failure.code == GENERATOR_REPLACED:
            log.error("this worker claims nothing more: %s", failure.message)
            self.drain()
            is_current = self._queue.release(claim)
        elif self._closing.is_set() and isinstance(failure, BuildServiceError):
            is_current = self._queue.release(claim)
        elif isinstance(failure, BuildServiceError) and failure.code != BuildServiceError.default_code:
            log.warning("attempt %d of %s failed: %s", claim.attempt, claim.id, failure.message)
            is_current = self._queue.retry(claim, failure)
        else:
            remember_s = self._remember_errors_s if is_deterministic(failure) else 0.0
            is_current = self._queue.fail(claim, failure, remember_s)
        if not is_current:
            log.warning("attempt %d of %s was overtaken: its result is dropped", claim.attempt, claim.id)

    def _beat(self) -> None:
        """Renew leases, and interrupt the builds that must not go on."""
        # with a long lease, too, before the worker counts as dead
        while not self._stopped.wait(min(self._queue.lease_s, ALIVE_S) / HEARTBEATS_PER_LEASE):
            try:
                self._registry.beat(self.worker)
                self._renew()
            except StoreError as failure:
                log.warning("no heartbeat: %s", failure.message)

    def _renew(self) -> None:
        with self._lock:
            claims = dict(self._claims)
        leases = self._queue.renew([claim for claim, _ in claims.values()]) if claims else {}
        for operation_id, lease in leases.items():
            if lease is Lease.CURRENT:
                continue
            with self._lock:
                is_running = operation_id in self._claims
                if is_running:
                    self._stops[operation_id] = lease
            if is_running:
                self._builds.interrupt(claims[operation_id][1])


class InProcessBuilders:
    """Threads of this process that build what a courier announces, and what was announced to nobody.

    Args:
        runner: claims and builds.
        wait: returns when an operation is announced, or after the given time.
        count: builds at once.
        poll_s: how often an idle thread looks for operations that were not announced to it.
    """

    POLL_S = 1.0

    def __init__(self, runner: BuildRunner, wait: Callable[[float], None], *, count: int, poll_s: float = POLL_S) -> None:
        self._runner = runner
        self._wait = wait
        self._poll_s = poll_s
        self._pool = ThreadPoolExecutor(max(1, count), thread_name_prefix="build")  # outlives a bug in a build
        self._threads = [threading.Thread(target=self._run, name=f"builder-{i}", daemon=True) for i in range(count)]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def join(self) -> None:
        for thread in self._threads:
            if thread.is_alive():
                thread.join()
        self._pool.shutdown(wait=True)

    def _run(self) -> None:
        while not self._runner.is_closing:
            attempt = self._pool.submit(self._runner.run_next)
            error = attempt.exception()
            if isinstance(error, StoreError):
                log.warning("no operation can be claimed: %s", error.message)
            elif error is not None:
                log.error("a build ended in a bug", exc_info=error)
            if error is not None or not attempt.result():
                self._wait(self._poll_s)


def is_deterministic(error: RollerError) -> bool:
    """Whether the same request has the same error again: it is the input's own."""
    return isinstance(error, InputError | CompileError) and error.code not in OTHERS_CODES
