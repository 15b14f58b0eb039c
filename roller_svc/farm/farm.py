"""The build farm as a service sees it: submit, look up, cancel and wait for operations; build and sweep."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from roller_svc.compiler.action import ActionKey
from roller_svc.errors import ArgumentError, BuildServiceError, InputError, RollerError
from roller_svc.farm.actions import ActionLog, Explanation
from roller_svc.farm.audit import AuditLog
from roller_svc.farm.courier import Courier
from roller_svc.farm.idempotency import KeyedRequest
from roller_svc.farm.models import ModelRequest, Request, parse_record, request_record
from roller_svc.farm.operations import Operation, OperationState, action_of_hit, cached_operation, is_id
from roller_svc.farm.queue import EVERY_QUEUE, MACHINE_PREFIX, OperationQueue, QueuedId, Submission
from roller_svc.farm.registry import WorkerRegistry, generators, served_queues
from roller_svc.farm.routing import check_measurable, is_known_queue, measured_on, queue_of
from roller_svc.farm.statistics import Figures, read_figures
from roller_svc.farm.store import Store
from roller_svc.farm.usage import BLOCK_BYTES, DailyUsage
from roller_svc.farm.watch import EndWatcher
from roller_svc.ir.report import BuildRequest
from roller_svc.settings import Resource

SWEEP_S = 2.0
NO_WORKER_TIMEOUT_S = 600.0
FORGET_S = 600.0  # between deletions of old operations
MAX_ADOPTED = 16  # in one sweep: each is validated again

log = logging.getLogger(__name__)


class Digests(Protocol):
    """Validates requests."""

    def digest(self, request: Request) -> str:
        """Return the action's digest. Raises InputError for an invalid request."""

    def explained_key(self, request: Request) -> tuple[ActionKey, Mapping[str, object]]:
        """Return the action's key and the contents of its parts. Raises InputError for an invalid request."""


@dataclass(frozen=True, slots=True)
class Terms:
    """How a client's request is treated: its share of the queue, its rank within that share, and its deadline."""

    client: str = ""
    max_alive: int | None = None
    max_build_s: float | None = None  # in a day
    max_stored_bytes: float | None = None  # in a day
    keyed: KeyedRequest | None = None  # a request that may be repeated
    priority: int = 0
    deadline_s: float | None = None
    request_id: str | None = None
    traceparent: str | None = None  # of the request's span


class BuildFarm:
    """The client's side of the farm, and its sweeper.

    Args:
        queue: the operations.
        store: has the results.
        courier: announces queued operations to workers.
        registry: lists the workers.
        digests: validates requests.
        retention_s: how long operations that are done are kept.
        audit_retention_s: how long entries of the audit log are kept.
        no_worker_timeout_s: how long an operation waits for a queue that no worker takes from.
    """

    def __init__(
        self,
        queue: OperationQueue,
        store: Store,
        courier: Courier,
        registry: WorkerRegistry,
        digests: Digests,
        *,
        retention_s: float,
        audit_retention_s: float,
        no_worker_timeout_s: float = NO_WORKER_TIMEOUT_S,
    ) -> None:
        self.queue = queue
        self.store = store
        self.registry = registry
        self.courier = courier
        self.usage = DailyUsage(queue.database)
        self._digests = digests
        self._actions = ActionLog(queue.database, store)
        self._retention_s = retention_s
        self._audit = AuditLog(queue.database)
        self._audit_retention_s = audit_retention_s
        self._no_worker_timeout_s = no_worker_timeout_s
        self._served: frozenset[str] | None = None  # queues that workers take from, as of the last sweep
        self._watcher = EndWatcher(queue.ended)
        self._closing = threading.Event()
        self._sweeper = threading.Thread(target=self._sweep_regularly, name="sweeper", daemon=True)

    def start(self) -> None:
        """Begin to sweep and to watch."""
        self._watcher.start()
        self._sweeper.start()

    def close(self) -> None:
        """Stop sweeping and watching. Operations that are not done stay in the database."""
        self._closing.set()
        self._watcher.close()
        if self._sweeper.is_alive():
            self._sweeper.join()

    def find_hit(self, request: Request) -> Operation | None:
        """Return a request's operation if the store has the result, without the database. Raises InputError."""
        action = self._digests.digest(request)
        facts = self.store.find_result(action)
        return None if facts is None else cached_operation(action, facts, request_record(request))

    def submit(self, request: Request, terms: Terms = Terms()) -> Operation:
        """Create an operation, already done if the store has the result.

        Raises InputError for an invalid request, QueueFullError or QuotaExceededError if too many wait.
        """
        hit = self.find_hit(request)
        if hit is not None:
            return hit
        (key, contents), queue = self._digests.explained_key(request), queue_of(request)
        is_served = self._is_served(queue)
        if queue.startswith(MACHINE_PREFIX) and not is_served:
            raise ArgumentError(
                "no worker builds for the service's own CPU, the target `local`",
                code="local-not-served",
                hint="name the target: `roller targets` lists devices; `cpu-x86-avx2` runs on CPUs with AVX2",
            )
        if isinstance(request, BuildRequest) and not is_served and not is_known_queue(queue):
            check_measurable(self.registry.alive(), self.queue.generator, request)
        submission = Submission(
            key.digest,
            request_record(request, key.text),
            queue,
            terms.client,
            terms.priority,
            terms.deadline_s,
            terms.max_alive,
            terms.max_build_s,
            terms.keyed,
            measured_on(request),
            is_served=is_served,
            request_id=terms.request_id,
            traceparent=terms.traceparent,
        )
        self._actions.record(key, contents)
        if isinstance(request, ModelRequest) and request.content is not None:
            self._store_content(request.blob, request.content, submission, terms)
        operation = self.queue.submit(submission)
        if not operation.done:
            self._send(QueuedId(operation.id, operation.queue))
        return operation

    def _store_content(self, blob: str, content: bytes, submission: Submission, terms: Terms) -> None:
        """Store a model that came with its request, if the request would be queued now and the client may store it."""
        is_new = not self.store.has(blob)
        if is_new:
            self.queue.check_capacity(submission)
            self.usage.allowance(terms.client, Resource.STORED_BYTES, terms.max_stored_bytes).check(len(content))
        self.store.put_upload(content)
        if is_new:
            self.usage.add(terms.client, Resource.STORED_BYTES, max(BLOCK_BYTES, len(content)))

    def get(self, operation_id: str) -> Operation | None:
        """Return an operation, with its position while it is queued; None if there is none."""
        action = action_of_hit(operation_id)
        if action is not None:
            facts = self.store.find_result(action)
            return None if facts is None else cached_operation(action, facts, {})
        operation = self.queue.get(operation_id) if is_id(operation_id) else None
        if operation is not None and operation.state is OperationState.QUEUED:
            return replace(operation, queue_position=self.queue.position(operation_id))
        return operation

    def explain(self, request: Request) -> Explanation:
        """Compare a request with the stored actions. Raises InputError for an invalid request."""
        key, contents = self._digests.explained_key(request)
        return self._actions.explain(key, contents)

    def explain_known(self, action: str) -> Explanation | None:
        """Explain an action by its digest; None if it is unknown."""
        return self._actions.explain_known(action)

    def forget_actions(self, removed: Collection[str]) -> None:
        """Forget the keys of actions whose results were removed from the store."""
        self._actions.forget(removed)

    def cancel(self, operation_id: str, client: str, *, for_all: bool = False) -> Operation | None:
        """Withdraw a client's interest in an operation; return it, or None if there is none."""
        if action_of_hit(operation_id) is not None or not is_id(operation_id):
            return self.get(operation_id)
        operation = self.queue.cancel(operation_id, client, for_all=for_all)
        if operation is not None and operation.done:
            self._watcher.notify(operation_id)
        return operation

    def watch(self, operation_id: str, wake: Callable[[], None]) -> None:
        """Call `wake` once, from any thread, when the operation is done, or soon if it is already."""
        self._watcher.add(operation_id, wake)

    def unwatch(self, operation_id: str, wake: Callable[[], None]) -> None:
        """Undo a `watch`; do nothing if the operation is done."""
        self._watcher.remove(operation_id, wake)

    def check_database(self) -> None:
        """Raise StoreError if the database is away."""
        self.queue.database.check()

    def read_figures(self) -> Figures:
        """Return figures for operators. Raises StoreError if the database is away."""
        return read_figures(self.queue.database, self.registry)

    def notify_end(self, operation_id: str) -> None:
        """Wake those who wait for an operation that ended in this process."""
        self._watcher.notify(operation_id)

    def sweep(self) -> None:
        """Queue again what lost its worker, end what is overdue, and send the ids of what is still queued."""
        for queued in self.queue.sweep():
            self._send(queued)
        self._served = served_queues(self.registry.alive(), self.queue.generator)
        for operation_id in self.queue.end_unserved(self._served, self._no_worker_timeout_s):
            self._watcher.notify(operation_id)
        self._adopt()

    def _is_served(self, queue: str) -> bool:
        """Whether a worker takes from a queue, as of the last sweep. One of a single machine is looked up."""
        is_of_machine = queue.startswith(MACHINE_PREFIX)
        if self._served is None or (is_of_machine and queue not in self._served):
            self._served = served_queues(self.registry.alive(), self.queue.generator)
        return queue in self._served or (EVERY_QUEUE in self._served and not is_of_machine)

    def _send(self, queued: QueuedId) -> None:
        try:
            self.courier.send(queued)
        except RollerError as failure:  # a sweep sends it again
            log.warning("operation %s is not announced: %s", queued.id, failure.message)

    def _adopt(self) -> None:
        """Take over operations of other versions that no worker is left for: their actions are computed again."""
        foreign = self.queue.foreign(generators(self.registry.alive()), MAX_ADOPTED)
        for operation in foreign:
            if self._closing.is_set():
                return
            try:
                request = parse_record(operation.request)
                digest = self._digests.digest(request)
                if self.queue.adopt(operation, digest, queue_of(request), measured_on(request)):
                    log.info("operation %s of another version is taken over", operation.id)
            except InputError as failure:
                self.queue.end_foreign(operation, failure)
                self._watcher.notify(operation.id)

    def _sweep_regularly(self) -> None:
        seconds_since_forgetting = FORGET_S
        while True:
            try:
                self.sweep()
                self.queue.database.checkpoint()
                if seconds_since_forgetting >= FORGET_S:
                    seconds_since_forgetting = 0.0
                    self.queue.forget(self._retention_s)
                    self._audit.forget(self._audit_retention_s)
                    self._actions.forget_unbuilt(self._retention_s)
            except BuildServiceError as failure:  # the database is away, or a validating worker was lost
                log.warning("no sweep: %s", failure.message)
            seconds_since_forgetting += SWEEP_S
            if self._closing.wait(SWEEP_S):
                return
