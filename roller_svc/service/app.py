"""Create the FastAPI application with its store, farm and worker pools."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from fastapi import FastAPI

from roller_svc.compiler.estimates.batch import EstimateCache
from roller_svc.farm.annotating import Annotator
from roller_svc.farm.api_keys import ApiKeys
from roller_svc.farm.audit import AuditLog
from roller_svc.farm.backup import check_restored
from roller_svc.farm.build import build_task
from roller_svc.farm.checking import RequestValidator, ScheduleChecker
from roller_svc.farm.database.connect import REQUEST_BUSY_TIMEOUT_S, Database
from roller_svc.farm.database.migrate import upgrade
from roller_svc.farm.environment import environment_digest
from roller_svc.farm.estimate_pool import EstimatePool
from roller_svc.farm.farm import BuildFarm
from roller_svc.farm.idempotency import IdempotencyKeys
from roller_svc.farm.legacy_records import import_records
from roller_svc.farm.machine import describe_worker, machine_queues
from roller_svc.farm.measuring import machine_locks
from roller_svc.farm.queue import EVERY_QUEUE, OperationQueue
from roller_svc.farm.registry import WorkerRegistry
from roller_svc.farm.results import is_result
from roller_svc.farm.routing import machine_queue
from roller_svc.farm.runner import BuildRunner
from roller_svc.farm.scratch import scratch_folder
from roller_svc.farm.store import Store
from roller_svc.farm.store_keeper import StoreKeeper
from roller_svc.modes.registration import register_python_ops
from roller_svc.service.access import routes_of
from roller_svc.service.announcements import Announcements
from roller_svc.service.api import create_api
from roller_svc.service.authentication import Authenticator
from roller_svc.service.builds import (
    Builder,
    BuildWork,
    Digest,
    RequestBuilds,
    RequestDigests,
    key_function,
    worker_limits,
)
from roller_svc.service.client_uses import UseRecorder
from roller_svc.service.compression import CompressionMiddleware
from roller_svc.service.connections import descriptor_limit, fit_limits
from roller_svc.service.disassembly import ListingCache, listing_makers
from roller_svc.service.hits import HitAnswers
from roller_svc.service.metrics import Metrics
from roller_svc.service.middleware import RequestLimitsMiddleware
from roller_svc.service.model_builds import ModelBuilds
from roller_svc.service.readiness import Part, Readiness
from roller_svc.service.request_log import RequestLogMiddleware
from roller_svc.service.shares import Shares
from roller_svc.service.state import State, run_in
from roller_svc.settings import Resource, Settings, s3_options

if TYPE_CHECKING:
    from roller_svc.service.tracing import Tracing

# Responses that are compressed: JSON. Events are sent one by one; blobs, binaries and sources have a length in advance.
MIN_COMPRESSED_BYTES, COMPRESSION_LEVEL = 1 << 10, 5
NOT_COMPRESSED = ("text/*", "application/octet-stream", "application/zip")
COMPUTE_THREADS = 4
QUERY_THREADS = 4
MODEL_ESTIMATE_THREADS = 2  # each with a worker process that may take its whole memory


def create_app(
    settings: Settings,
    builder: Builder | None = None,
    digest: Digest | None = None,
    *,
    work: BuildWork = build_task,
    ready: bool = False,
    tracing: Tracing | None = None,
) -> FastAPI:
    """Create the application.

    Args:
        settings: of the service.
        builder: builds artifacts; default: build workers.
        digest: validates requests and returns their action digests; default: validating workers.
        work: builds a kernel in a worker process.
        ready: start the estimate workers before the first request.
        tracing: of requests and builds; closed with the application.
    """
    register_python_ops()
    resources = contextlib.ExitStack()  # closed in the reverse order
    if tracing is not None:
        resources.callback(tracing.close)
    store = Store(settings.store, s3_options(), is_result)
    check_restored(store)
    store.objects.remove_leftovers()
    database = Database(settings.database_url)
    resources.callback(database.close)
    # Two pools of connections only for SQLite, whose limit on waiting is of the connection.
    request_database = Database(settings.database_url, busy_timeout_s=REQUEST_BUSY_TIMEOUT_S) if database.is_sqlite else database
    resources.callback(request_database.close)
    upgrade(database)
    uses = UseRecorder(AuditLog(database).note_uses)
    authenticator = Authenticator(settings, ApiKeys(database), store.objects, uses)
    authenticator.check_address()
    metrics = Metrics(is_shared=settings.processes > 1)
    shares = Shares(fit_limits(settings.limit_table, descriptor_limit()), metrics.count_refusal)
    limits = worker_limits(settings, resources.enter_context(scratch_folder()))

    compute = ThreadPoolExecutor(COMPUTE_THREADS, thread_name_prefix="compute")
    queries = ThreadPoolExecutor(QUERY_THREADS, thread_name_prefix="query")
    submissions = ThreadPoolExecutor(settings.total_of(Resource.CHECKS), thread_name_prefix="submission")
    model_estimates = ThreadPoolExecutor(MODEL_ESTIMATE_THREADS, thread_name_prefix="model-estimate")
    batches = ThreadPoolExecutor(settings.total_of(Resource.ESTIMATES), thread_name_prefix="batch")
    for pool in (compute, queries, submissions, batches, model_estimates):
        resources.callback(pool.shutdown, wait=True, cancel_futures=True)
    validator = RequestValidator(settings.check_timeout_s, limits, settings.remember_errors_s)
    resources.callback(validator.close)
    schedule_checker = ScheduleChecker(settings.check_timeout_s, limits)
    resources.callback(schedule_checker.close)
    estimators = EstimatePool(max(1, settings.workers), settings.check_timeout_s, limits)
    resources.callback(estimators.close)
    annotator = Annotator(settings.check_timeout_s, limits)
    resources.callback(annotator.close)
    listings = ListingCache(store, listing_makers(annotator))
    resources.callback(listings.close)

    models = ModelBuilds(store, settings.model_timeout_s, settings.estimates_timeout_s, limits)
    resources.callback(models.close)
    builds = RequestBuilds(settings.build_timeout_s, limits, models, builder, work)
    resources.callback(builds.close)
    announcements = Announcements(settings, environment_digest())
    resources.callback(announcements.close)
    registry = WorkerRegistry(database)
    queue, request_queue = (
        OperationQueue(each, environment_digest(), max_alive=settings.total_of(Resource.BUILDS), lease_s=settings.lease_s)
        for each in (database, request_database)
    )
    if store.folder is not None:
        import_records(store.folder, queue)
    digests = RequestDigests(validator.key if digest is None else key_function(digest), models)
    farm = BuildFarm(
        request_queue,
        store,
        announcements.courier,
        registry,
        digests,
        retention_s=settings.retention_s,
        audit_retention_s=settings.audit_retention_s,
        no_worker_timeout_s=settings.no_worker_timeout_s,
    )
    keeper = StoreKeeper(store, settings.store_quota_bytes, queue.live_uploads, farm.forget_actions)
    # A service without other machines answers every request, be it by the error that a compiler is missing.
    queues = machine_queues() if settings.is_distributed else (EVERY_QUEUE, machine_queue())
    runner = BuildRunner(
        queue,
        store,
        builds,
        registry,
        describe_worker(queues, settings.workers),
        remember_errors_s=settings.remember_errors_s,
        devices=machine_locks(),
        on_end=farm.notify_end,
        on_attempt=(lambda _: None) if tracing is None else tracing.record,
    )
    builders = announcements.create_builders(runner, settings.workers)

    def start() -> None:
        if settings.workers:
            runner.start()
            builders.start()
        farm.start()
        keeper.start()

    def close() -> None:
        model_estimates.shutdown(wait=False, cancel_futures=True)  # starts no worker after the others are killed
        runner.drain()
        announcements.close_builders()
        if settings.workers:
            runner.close()
            builders.join()
        farm.close()
        keeper.close()
        resources.close()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if ready:
            gc.collect()
            gc.freeze()  # imported objects live forever: exclude them from collections
            estimators.start()
        start()
        yield
        await asyncio.to_thread(close)  # the loop meanwhile responds to interrupted requests

    app = create_api(lifespan)
    hits = HitAnswers(store, partial(run_in, compute), metrics)
    app.state.roller = State(
        settings=settings,
        store=store,
        listings=listings,
        farm=farm,
        compute=compute,
        queries=queries,
        submissions=submissions,
        is_cached=validator.is_cached,
        schedule_checker=schedule_checker,
        batches=batches,
        estimate_cache=EstimateCache(estimators.estimate),
        models=models,
        idempotency=IdempotencyKeys(request_database),
        authenticator=authenticator,
        readiness=Readiness(_parts(store, farm, settings)),
        shares=shares,
        model_estimates=model_estimates,
        hits=hits,
        metrics=metrics,
        tracing=tracing,
    )
    app.add_middleware(
        RequestLimitsMiddleware,
        settings=settings,
        authenticator=authenticator,
        shares=shares,
        routes=routes_of(app),
        hits=hits,
    )
    app.add_middleware(
        CompressionMiddleware,
        minimum_size=MIN_COMPRESSED_BYTES,
        compresslevel=COMPRESSION_LEVEL,
        exclude_content_types=NOT_COMPRESSED,
    )
    if tracing is not None:
        app.add_middleware(tracing.middleware, tracing=tracing)
    app.add_middleware(RequestLogMiddleware, metrics=metrics.of_requests(routes_of(app)))  # the last one added is the outermost
    return app


def _parts(store: Store, farm: BuildFarm, settings: Settings) -> dict[str, Part]:
    """Return what the service needs, by name. Nothing fails without the broker, so it is not essential."""
    parts = {
        "database": Part(farm.check_database, is_essential=True),
        "store": Part(lambda: store.objects.check_writable(settings.min_free_bytes), is_essential=True),
    }
    if settings.broker.get_secret_value():
        parts["broker"] = Part(farm.courier.check, is_essential=False)
    return parts
