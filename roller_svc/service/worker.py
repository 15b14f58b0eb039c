"""Run a worker: a process that builds what services have queued in the database."""

from __future__ import annotations

import contextlib
import logging
import signal
import threading
import time
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from roller_svc.errors import ArgumentError, StoreError
from roller_svc.farm.backup import check_restored
from roller_svc.farm.build import build_task
from roller_svc.farm.database.connect import Database
from roller_svc.farm.database.migrate import upgrade
from roller_svc.farm.environment import environment_digest
from roller_svc.farm.machine import describe_worker
from roller_svc.farm.measuring import machine_locks
from roller_svc.farm.objects import MEMORY
from roller_svc.farm.queue import OperationQueue
from roller_svc.farm.registry import WorkerRegistry
from roller_svc.farm.results import is_result
from roller_svc.farm.runner import BuildRunner
from roller_svc.farm.scratch import scratch_folder
from roller_svc.farm.store import Store
from roller_svc.modes.registration import register_python_ops
from roller_svc.service.announcements import Announcements
from roller_svc.service.builds import BuildWork, RequestBuilds, worker_limits
from roller_svc.service.logs import configure_logging
from roller_svc.service.malloc import limit_arenas
from roller_svc.service.model_builds import ModelBuilds
from roller_svc.service.telemetry import open_tracing
from roller_svc.settings import Resource, Settings, forget_secrets, s3_options

if TYPE_CHECKING:
    from roller_svc.service.tracing import Tracing

RETRY_S = 2.0  # between tries to reach the database at the start
POLL_S = 0.1

log = logging.getLogger(__name__)


class StopSignals:
    """Counts SIGTERM and SIGINT: the first asks to finish, the second to stop now."""

    def __init__(self) -> None:
        self.first, self.second = threading.Event(), threading.Event()
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._handle)

    def _handle(self, number: int, frame: FrameType | None) -> None:
        (self.second if self.first.is_set() else self.first).set()


class FarmWorker:
    """Builds operations of its queues until it is closed.

    Args:
        settings: `workers` is the number of builds at once.
        queues: that it takes from.
        work: builds a kernel in a worker process.
        tracing: of builds.
    """

    def __init__(
        self,
        settings: Settings,
        queues: Sequence[str],
        work: BuildWork = build_task,
        tracing: Tracing | None = None,
    ) -> None:
        register_python_ops()
        self._on_attempt = (lambda _: None) if tracing is None else tracing.record
        with contextlib.ExitStack() as resources:  # closed in the reverse order
            self._open(settings, queues, work, resources)
            self._resources = resources.pop_all()

    def _open(self, settings: Settings, queues: Sequence[str], work: BuildWork, resources: contextlib.ExitStack) -> None:
        database = Database(settings.database_url)
        resources.callback(database.close)
        upgrade(database)
        if settings.store == MEMORY:
            raise ArgumentError(
                "a worker cannot share a store in memory: expected ROLLER_STORE to be a directory or s3://BUCKET/PREFIX",
                code="invalid-setting",
            )
        store = Store(settings.store, s3_options(), is_result)
        check_restored(store)
        limits = worker_limits(settings, resources.enter_context(scratch_folder()))
        models = ModelBuilds(store, settings.model_timeout_s, settings.estimates_timeout_s, limits)
        resources.callback(models.close)
        builds = RequestBuilds(settings.build_timeout_s, limits, models, None, work)
        resources.callback(builds.close)
        environment = environment_digest()
        queue = OperationQueue(database, environment, max_alive=settings.total_of(Resource.BUILDS), lease_s=settings.lease_s)
        self.runner = BuildRunner(
            queue,
            store,
            builds,
            WorkerRegistry(database),
            describe_worker(queues, settings.workers),
            remember_errors_s=settings.remember_errors_s,
            devices=machine_locks(),
            on_attempt=self._on_attempt,
        )
        self._announcements = Announcements(settings, environment)
        resources.callback(self._announcements.close)
        self._builders = self._announcements.create_builders(self.runner, settings.workers)

    def start(self) -> None:
        self.runner.start()
        self._builders.start()

    def drain(self) -> None:
        """Claim nothing more. Builds go on."""
        self.runner.drain()
        self._announcements.close_builders()

    def close(self) -> None:
        """End the running builds, which other workers then take, and free everything."""
        self.drain()
        self.runner.close()
        self._builders.join()
        self._resources.close()


def run_worker(settings: Settings, queues: Sequence[str], work: BuildWork = build_task) -> None:
    """Build until SIGTERM or SIGINT, then finish what is running, until the time limit or the next signal."""
    limit_arenas(settings.malloc_arenas)
    configure_logging(settings)
    tracing = open_tracing(settings)  # reads OTEL_* variables, some of them secrets
    forget_secrets()
    signals = StopSignals()
    worker = _create_worker(settings, queues, work, signals.first, tracing)
    if worker is None:
        return
    worker.start()
    log.info("worker %s takes from %s", worker.runner.worker.id, ", ".join(queues))
    while not worker.runner.is_closing and not signals.first.wait(POLL_S):
        pass  # it closes itself when the package was replaced
    worker.drain()
    until_s = time.monotonic() + settings.drain_timeout_s
    while not worker.runner.is_idle and time.monotonic() < until_s and not signals.second.wait(POLL_S):
        pass
    if not worker.runner.is_idle:
        log.warning("running builds are given back to other workers")
    worker.close()
    if tracing is not None:
        tracing.close()
    log.info("worker %s has ended", worker.runner.worker.id)


def _create_worker(
    settings: Settings, queues: Sequence[str], work: BuildWork, stop: threading.Event, tracing: Tracing | None
) -> FarmWorker | None:
    """Return a worker once the database can be reached, or None if it is stopped before."""
    while not stop.is_set():
        try:
            return FarmWorker(settings, queues, work, tracing)
        except StoreError as failure:
            if failure.code != "database-error":
                raise
            log.warning("waiting for the database: %s", failure.message)
        stop.wait(RETRY_S)
    return None
