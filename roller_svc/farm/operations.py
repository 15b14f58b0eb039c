"""Long-running operations (AIP-151) and the queue of builds behind them.

Identical requests share one build. Operations are recorded on disk: they survive a restart, and unfinished ones are
restarted, which is safe because building is idempotent. Transient errors (a lost worker, a full disk, a stalled
machine) are retried with exponential backoff.
"""

from __future__ import annotations

import contextlib
import logging
import re
import threading
import uuid
from collections import deque
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from enum import Enum
from typing import Protocol

from roller_svc.compiler.serialize import error_json
from roller_svc.errors import ArgumentError, BuildServiceError, QueueFullError, RollerError, StoreError
from roller_svc.farm.models import ModelRequest, Request, parse_record, request_record
from roller_svc.farm.store import Artifact, Json, Store
from roller_svc.ir.report import BuildRequest

HIT_PREFIX = "hit-"
RETRY_DELAYS_S = (0.5, 2.0, 8.0)  # before each retry
# A build during which the service ended this often is taken for the cause. Interrupted builds resume last, so chance
# rarely hits the same one.
MAX_ATTEMPTS = 12
_HIT_ID = re.compile(r"hit-[0-9a-f]{64}")

log = logging.getLogger(__name__)


class OperationState(Enum):
    QUEUED = "queued"
    BUILDING = "building"
    DONE = "done"


class CacheStatus(Enum):
    HIT = "hit"  # the store has the result
    MISS = "miss"  # this operation builds it
    JOINED = "joined"  # another operation is building it


@dataclass(frozen=True, slots=True)
class Operation:
    """A request to build a kernel or a model. Once done it has either `facts` or `error`."""

    id: str
    action: str
    state: OperationState
    cache: CacheStatus
    create_time: str
    request: Json
    facts: Json | None = None  # of the kernel or model that was built
    error: Json | None = None  # of the failed build
    attempts: int = 0  # started so far, by all processes

    @property
    def done(self) -> bool:
        return self.state is OperationState.DONE


@dataclass(slots=True)
class BuildJob:
    """A queued or running build, and the operations that wait for it."""

    action: str
    request: Request
    client: str
    operations: list[Operation]
    attempts: int = 0
    done_future: Future[None] = field(default_factory=Future)


class ModelBuilder(Protocol):
    """Builds models, as `build` and `digest` of JobQueue do kernels."""

    def build(self, request: ModelRequest) -> Artifact: ...

    def digest(self, request: ModelRequest) -> str: ...


class JobQueue:
    """A bounded queue of builds that serves clients round-robin.

    Args:
        store: keeps artifacts and the records of operations.
        build: builds the artifact of a request.
        digest: returns a request's action digest; raises InputError for an invalid request.
        workers: builds that run concurrently.
        length: queued and running builds in total.
        length_per_client: queued and running builds of one client; default: `length`.
        models: builds models; default: requests for models are rejected.
    """

    def __init__(  # two verbs, a store and three limits
        self,
        store: Store,
        build: Callable[[BuildRequest], Artifact],
        digest: Callable[[BuildRequest], str],
        *,
        workers: int,
        length: int,
        length_per_client: int | None = None,
        models: ModelBuilder | None = None,
    ) -> None:
        self.store = store
        self._build_kernel = build
        self._kernel_digest = digest
        self._models = models
        self._length = length
        self._length_per_client = length if length_per_client is None else length_per_client
        self._pool = ThreadPoolExecutor(workers, thread_name_prefix="build")
        self._lock = threading.Lock()
        self._jobs: dict[str, BuildJob] = {}  # by action
        self._queues: dict[str, deque[BuildJob]] = {}  # by client, in round-robin order
        self._live: dict[str, Operation] = {}  # unfinished operations
        self._done_futures: dict[str, Future[None]] = {}  # of unfinished operations
        self._watchers: dict[str, list[Callable[[], None]]] = {}  # of unfinished operations
        self._closing = threading.Event()

    def submit(self, request: Request, client: str = "") -> Operation:
        """Create an operation, already done if the store has the result. Raises InputError for an invalid request."""
        action = self._digest(request)
        facts = self.store.action_result(action)
        if facts is not None:
            return _cached_operation(action, facts, request_record(request))
        operation = Operation(
            id=_new_id(), action=action, state=OperationState.QUEUED, cache=CacheStatus.MISS, create_time=_now(),
            request=request_record(request),
        )  # fmt: skip
        return self._enqueue(operation, request, client, is_limited=True)

    def get(self, operation_id: str) -> Operation | None:
        with self._lock:
            live = self._live.get(operation_id)
        if live is not None:
            return live
        if _HIT_ID.fullmatch(operation_id):
            action = "sha256:" + operation_id.removeprefix(HIT_PREFIX)
            facts = self.store.action_result(action)
            return None if facts is None else _cached_operation(action, facts, {})
        record = self.store.record(operation_id)
        operation = None if record is None else _from_record(operation_id, record)
        if operation is None and (record is not None or self.store.is_set_aside(operation_id)):
            return _unreadable_operation(operation_id)
        return operation

    def done_future(self, operation_id: str) -> Future[None] | None:
        """Return a future that resolves when the operation is done, or None if it is already."""
        with self._lock:
            return self._done_futures.get(operation_id)

    def watch(self, operation_id: str, wake: Callable[[], None]) -> None:
        """Call `wake` once, from any thread, when the operation is done; immediately if it is already."""
        with self._lock:
            if operation_id in self._done_futures:
                self._watchers.setdefault(operation_id, []).append(wake)
                return
        wake()

    def unwatch(self, operation_id: str, wake: Callable[[], None]) -> None:
        """Undo a `watch`; do nothing if the operation is done."""
        with self._lock:
            watchers = self._watchers.get(operation_id, [])
            if wake in watchers:
                watchers.remove(wake)
            if not watchers:
                self._watchers.pop(operation_id, None)

    def resume(self) -> int:
        """Restart the operations that a previous process left unfinished; return their number.

        Set aside and log records that this version cannot read. Builds that were running when the process ended are
        restarted last.
        """
        unfinished: list[Operation] = []
        for record_id, record in self.store.records():
            operation = None if record is None else _from_record(record_id, record)
            if operation is None:
                self._set_aside(record_id, "its format is unknown to this version")
            elif not operation.done:
                unfinished.append(operation)
        unfinished.sort(key=lambda operation: operation.attempts)
        return sum([self._resume_operation(operation) for operation in unfinished])

    def _resume_operation(self, operation: Operation) -> bool:
        """Queue an unfinished operation again; return False if its request cannot be read."""
        try:
            request = parse_record(operation.request)
        except TypeError as failure:  # options that another version has
            self._set_aside(operation.id, str(failure))
            return False
        except RollerError as failure:
            self._finish(operation, None, failure)
            return True
        if operation.attempts >= MAX_ATTEMPTS:
            lost = f"the service ended during {operation.attempts} attempts to build this"
            self._finish(operation, None, BuildServiceError(lost, code="build-poisoned"))
            return True
        try:
            # Everything that decides the result may have changed since, so recompute the action.
            action = self._digest(request)
            self._enqueue(replace(operation, action=action, state=OperationState.QUEUED), request, "", is_limited=False)
        except StoreError:  # the record remains for the next start
            log.exception("operation %s cannot be resumed now", operation.id)
        except RollerError as failure:
            self._finish(operation, None, failure)
        return True

    def _set_aside(self, record_id: str, why: str) -> None:
        log.warning("the record of operation %s is set aside: %s", record_id, why)
        try:
            self.store.set_record_aside(record_id)
        except StoreError as failure:
            log.warning("the record of operation %s stays where it is: %s", record_id, failure.message)

    def close(self, stop_builds: Callable[[], None] = lambda: None) -> None:
        """Stop accepting work. Unfinished operations stay recorded and the next process resumes them.

        `stop_builds` is called when no further build can start; the builds that it kills stay unfinished.
        """
        self._closing.set()
        self._pool.shutdown(wait=False, cancel_futures=True)
        stop_builds()
        self._pool.shutdown(wait=True)

    def _enqueue(self, operation: Operation, request: Request, client: str, *, is_limited: bool) -> Operation:
        """Join a queued build of the same action or queue a new one. Record the operation on disk."""
        with self._lock:
            job = self._jobs.get(operation.action)
            is_new = job is None
            if job is None:
                if is_limited:
                    self._check_capacity(client)
                job = self._jobs[operation.action] = BuildJob(operation.action, request, client, [operation])
            else:
                operation = replace(operation, cache=CacheStatus.JOINED, state=job.operations[0].state)
                job.operations.append(operation)
            self._live[operation.id] = operation
            self._done_futures[operation.id] = job.done_future
        try:
            # Not under the lock, so that a slow disk blocks no other request.
            self.store.write_record(operation.id, _to_record(operation))
        except StoreError:
            if self._withdraw(job, operation.id) and is_new:
                self._start(job)  # for those that joined meanwhile
            raise
        if is_new:
            self._start(job)
        return operation

    def _digest(self, request: Request) -> str:
        if isinstance(request, BuildRequest):
            return self._kernel_digest(request)
        return self._model_builder().digest(request)

    def _build(self, request: Request) -> Artifact:
        if isinstance(request, BuildRequest):
            return self._build_kernel(request)
        return self._model_builder().build(request)

    def _model_builder(self) -> ModelBuilder:
        if self._models is None:
            raise ArgumentError("this service builds no models", code="unsupported-request")
        return self._models

    def _withdraw(self, job: BuildJob, operation_id: str) -> bool:
        """Remove an operation that could not be recorded; return whether others wait for its build."""
        with self._lock:
            job.operations = [operation for operation in job.operations if operation.id != operation_id]
            self._live.pop(operation_id, None)
            self._done_futures.pop(operation_id, None)
            if not job.operations and self._jobs.get(job.action) is job:
                del self._jobs[job.action]
            return bool(job.operations)

    def _check_capacity(self, client: str) -> None:
        """Raise QueueFullError if the queue or the client's share of it is full. The caller holds the lock."""
        if len(self._jobs) >= self._length:
            raise QueueFullError(f"{self._length} builds are waiting already; try again later")
        if sum(job.client == client for job in self._jobs.values()) >= self._length_per_client:
            raise QueueFullError(
                f"{self._length_per_client} builds of this client are waiting already; try again later"
            )

    def _start(self, job: BuildJob) -> None:
        with self._lock:
            self._queues.setdefault(job.client, deque()).append(job)
        self._pool.submit(self._run_next).add_done_callback(_log_bug)

    def _run_next(self) -> None:
        """Run a build of the next client and move that client to the end of the round."""
        with self._lock:
            client, jobs = next(iter(self._queues.items()))
            job = jobs.popleft()
            del self._queues[client]
            if jobs:
                self._queues[client] = jobs
        self._run(job)

    def _run(self, job: BuildJob) -> None:
        facts: Json | None = None
        failure: RollerError = BuildServiceError("the build ended without a result")  # kept if a bug escapes below
        try:
            facts, failure = self._build_with_retries(job)
        finally:
            with self._lock:
                del self._jobs[job.action]  # no operation can join from here on
                operations = [self._live[operation.id] for operation in job.operations]
            with contextlib.ExitStack() as ending:  # runs every callback, whatever the others raise
                ending.callback(job.done_future.set_result, None)
                if facts is None and self._closing.is_set():
                    ending.callback(self._take_back_attempt, operations[0])
                else:
                    for operation in operations:
                        ending.callback(self._finish, operation, facts, failure)

    def _build_with_retries(self, job: BuildJob) -> tuple[Json | None, RollerError]:
        """Return the kernel's facts, or None and the error of the last attempt."""
        for delay_s in (*RETRY_DELAYS_S, None):
            job.attempts += 1
            try:
                facts = self.store.action_result(job.action)  # another process may have built it
                if facts is None:
                    self._record_attempt(job)
                    artifact = self._build(job.request)
                    self.store.publish(job.action, artifact)
                    facts = artifact.facts
                return facts, BuildServiceError("none")
            except BuildServiceError as error:  # transient
                log.warning("attempt %d of %s failed: %s", job.attempts, job.action, error.message)
                if delay_s is None or self._closing.wait(delay_s):
                    return None, _with_attempts(job.attempts, error)
            except RollerError as error:
                return None, error
        raise AssertionError  # the last iteration returns

    def _record_attempt(self, job: BuildJob) -> None:
        """Count the attempt in the record of the job's first operation, before the build can crash the machine."""
        with self._lock:
            job.operations = [
                replace(operation, state=OperationState.BUILDING, attempts=operation.attempts + 1)
                for operation in job.operations
            ]
            self._live |= {operation.id: operation for operation in job.operations}
            first = job.operations[0]
        self.store.write_record(first.id, _to_record(first))

    def _take_back_attempt(self, operation: Operation) -> None:
        """Return the record to "queued" after the service's shutdown killed the build."""
        if operation.attempts == 0:
            return
        queued = replace(operation, state=OperationState.QUEUED, attempts=operation.attempts - 1)
        try:
            self.store.write_record(queued.id, _to_record(queued))
        except StoreError as failure:
            log.warning("operation %s keeps its attempt: %s", queued.id, failure.message)

    def _finish(self, operation: Operation, facts: Json | None, failure: RollerError) -> None:
        error = None if facts is not None else error_json(failure)
        done = replace(operation, state=OperationState.DONE, facts=facts, error=error)
        try:
            self.store.write_record(done.id, _to_record(done))
            recorded = True
        except StoreError as store_error:
            log.warning("operation %s ended and cannot be recorded: %s", done.id, store_error.message)
            recorded = False
        with self._lock:
            self._done_futures.pop(done.id, None)
            if recorded:
                self._live.pop(done.id, None)
            else:
                self._live[done.id] = done  # for the life of this process
            watchers = self._watchers.pop(done.id, ())
        for wake in watchers:
            wake()


def _log_bug(run: Future[None]) -> None:
    """Log the traceback of a bug that escaped from a build; its waiters already have an error."""
    error = None if run.cancelled() else run.exception()
    if error is not None:
        log.error("a build ended in a bug", exc_info=error)


def _with_attempts(attempts: int, fault: BuildServiceError) -> BuildServiceError:
    """Return the error of the last attempt, with the number of attempts."""
    return BuildServiceError(f"{fault.message} ({attempts} attempts; try again later)", code=fault.code)


def _unreadable_operation(operation_id: str) -> Operation:
    """Return a failed operation in place of one whose record this version cannot read."""
    fault = BuildServiceError(
        "the record of this operation was written by another version and set aside: send the request again",
        code="unreadable-record",
    )
    return Operation(
        id=operation_id, action="", state=OperationState.DONE, cache=CacheStatus.MISS, create_time=_now(), request={},
        error=error_json(fault),
    )  # fmt: skip


def _cached_operation(action: str, facts: Json, request: Json) -> Operation:
    """Return a finished operation without a record: its id contains the action's digest."""
    return Operation(
        id=HIT_PREFIX + action.removeprefix("sha256:"), action=action, state=OperationState.DONE, cache=CacheStatus.HIT,
        create_time=_now(), request=request, facts=facts,
    )  # fmt: skip


def _to_record(operation: Operation) -> Json:
    return {
        "id": operation.id,
        "action": operation.action,
        "stage": operation.state.value,
        "cache": operation.cache.value,
        "create_time": operation.create_time,
        "request": operation.request,
        "facts": operation.facts,
        "error": operation.error,
        "attempts": operation.attempts,
    }


def _from_record(record_id: str, record: Mapping[str, object]) -> Operation | None:
    """Decode a record; return None if it is malformed or its id differs from its file's name."""
    if record.get("id") != record_id:
        return None
    try:
        return Operation(
            id=record_id,
            action=_text(record["action"]),
            state=OperationState(record["stage"]),
            cache=CacheStatus(record["cache"]),
            create_time=_text(record["create_time"]),
            request=_mapping(record["request"]),
            facts=None if record["facts"] is None else _mapping(record["facts"]),
            error=None if record["error"] is None else _mapping(record["error"]),
            attempts=_count(record.get("attempts", 0)),
        )
    except (KeyError, ValueError):
        return None


def _text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError(f"not text: {value!r}")
    return value


def _count(value: object) -> int:
    if not isinstance(value, int):
        raise ValueError(f"not a number: {value!r}")
    return value


def _mapping(value: object) -> Json:
    if not isinstance(value, dict):
        raise ValueError(f"not an object: {value!r}")
    return value


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def _new_id() -> str:
    """Return a new id; ids sort by creation time."""
    return f"{int(datetime.now(UTC).timestamp() * 1000):013d}-{uuid.uuid4().hex[:16]}"
