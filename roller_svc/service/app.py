"""Create the FastAPI application with its store, queue and worker pools."""

from __future__ import annotations

import asyncio
import gc
import shutil
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from roller_svc.compiler.estimates.batch import EstimateCache
from roller_svc.farm.build import LOADED_GENERATOR, BuildTask, artifact_json, build_task, parse_artifact
from roller_svc.farm.checking import RequestValidator
from roller_svc.farm.confinement import gpu_devices, readable_by_builds
from roller_svc.farm.estimate_pool import EstimatePool
from roller_svc.farm.operations import JobQueue
from roller_svc.farm.scratch import name_scratch
from roller_svc.farm.store import Artifact, Store
from roller_svc.farm.workers import JsonCodec, WorkerLimits, WorkerPool
from roller_svc.ir.report import BuildRequest
from roller_svc.service.disassembly import ListingCache
from roller_svc.service.middleware import RequestLimitsMiddleware
from roller_svc.service.model_builds import ModelBuilds
from roller_svc.service.problems import add_handlers
from roller_svc.service.routes import estimates, hardware, health, kernels, operations
from roller_svc.service.routes import models as model_routes
from roller_svc.service.state import MAX_WAITING_ESTIMATES, State
from roller_svc.settings import Settings
from roller_svc.version import __version__

COMPUTE_THREADS = 4
MODEL_ESTIMATE_THREADS = 1  # each with a worker process that may take its whole memory
SUBMISSION_THREADS = 2  # each with a validating worker process
Builder = Callable[[BuildRequest], Artifact]
Digest = Callable[[BuildRequest], str]


def worker_limits(settings: Settings, scratch: Path) -> WorkerLimits:
    """Return the resources of a build worker, which is confined unless the settings disable it."""
    more = () if settings.local_spec is None else (settings.local_spec,)
    readable = readable_by_builds(*more) if settings.confine_workers else None
    return WorkerLimits(settings.memory_bytes_each, scratch=scratch, readable=readable, devices=gpu_devices())


def create_app(
    settings: Settings, builder: Builder | None = None, digest: Digest | None = None, *, ready: bool = False
) -> FastAPI:
    """Create the application.

    Args:
        settings: of the service.
        builder: builds artifacts; default: build workers.
        digest: validates requests and returns their action digests; default: validating workers.
        ready: start the estimate workers before the first request.
    """
    store = Store(Path(settings.store))
    store.lock()
    listings = ListingCache(store)
    scratch = name_scratch(store.root / "scratch")
    limits = worker_limits(settings, scratch)
    validator = RequestValidator(settings.check_timeout_s, limits)
    codec = JsonCodec(artifact_json, parse_artifact)
    # A worker that has run a kernel must not take another task.
    builders = WorkerPool(build_task, settings.build_timeout_s, limits, codec, lambda task: task.runs_kernels)

    def build(request: BuildRequest) -> Artifact:
        return builders.call(BuildTask(request, LOADED_GENERATOR))

    models = ModelBuilds(store, settings.model_timeout_s, settings.estimates_timeout_s, limits)
    queue_length = settings.queue_length
    queue = JobQueue(
        store,
        builder or build,
        digest or validator.digest,
        workers=settings.workers,
        length=queue_length,
        length_per_client=max(1, queue_length // 2) if len(settings.accepted_keys) > 1 else queue_length,
        models=models,
    )
    estimators = EstimatePool(settings.workers, settings.check_timeout_s, limits)
    compute = ThreadPoolExecutor(COMPUTE_THREADS, thread_name_prefix="compute")
    submissions = ThreadPoolExecutor(SUBMISSION_THREADS, thread_name_prefix="submission")
    model_estimates = ThreadPoolExecutor(MODEL_ESTIMATE_THREADS, thread_name_prefix="model-estimate")
    batches = ThreadPoolExecutor(MAX_WAITING_ESTIMATES, thread_name_prefix="batch")
    large_requests = asyncio.Semaphore(settings.estimates_at_once)

    def stop_builds() -> None:
        builders.close(kill=True)
        models.close_builders()

    def close() -> None:
        model_estimates.shutdown(wait=False, cancel_futures=True)  # starts no worker after the others are killed
        queue.close(stop_builds)
        models.close()
        listings.close()
        estimators.close()
        validator.close()
        for pool in (model_estimates, batches, submissions, compute):
            pool.shutdown(wait=True, cancel_futures=True)
        shutil.rmtree(scratch, ignore_errors=True)
        store.unlock()

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if ready:
            gc.collect()
            gc.freeze()  # imported objects live forever: exclude them from collections
            estimators.start()
        # Concurrently with requests: records may contain programs that take long to validate.
        resuming = threading.Thread(target=queue.resume, name="resume", daemon=True)
        resuming.start()
        yield
        await asyncio.to_thread(close)  # the loop meanwhile responds to interrupted requests

    app = FastAPI(
        title="roller-svc",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would echo the client's Host header
    )
    app.state.roller = State(
        settings=settings,
        store=store,
        listings=listings,
        queue=queue,
        compute=compute,
        submissions=submissions,
        is_cached=validator.is_cached,
        batches=batches,
        large_requests=large_requests,
        estimate_cache=EstimateCache(estimators.estimate),
        models=models,
        model_estimates=model_estimates,
    )
    add_handlers(app)
    app.add_middleware(RequestLimitsMiddleware, settings=settings)
    for module in (kernels, operations, estimates, model_routes, hardware, health):
        app.include_router(module.router)
    return app
