"""The application: settings → store, queue, routes."""

from __future__ import annotations

import gc
import threading
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from pathlib import Path

from fastapi import FastAPI

from roller_svc.estimates import Estimates
from roller_svc.farm.action import action_digest
from roller_svc.farm.build import build_artifact
from roller_svc.farm.estimating import Estimating
from roller_svc.farm.jobs import JobQueue
from roller_svc.farm.lanes import ThreadLanes
from roller_svc.farm.store import Artifact, Store
from roller_svc.ir.report import BuildRequest
from roller_svc.service.guard import Guard
from roller_svc.service.problems import add_handlers
from roller_svc.service.routes import estimates, hardware, health, kernels, operations
from roller_svc.service.state import State
from roller_svc.settings import Settings
from roller_svc.settings import settings as settings_in_use
from roller_svc.version import __version__

COMPUTE_THREADS = 4
Builder = Callable[[BuildRequest], Artifact]
Digest = Callable[[BuildRequest], str]


def create_app(
    settings: Settings, builder: Builder | None = None, digest: Digest = action_digest, *, ready: bool = False
) -> FastAPI:
    """`builder` makes artifacts in place of worker processes; `digest` names what a request asks for; `ready`: have the
    processes for estimates before the first of them is asked for."""
    lanes = ThreadLanes(build_artifact, settings.build_timeout_s, settings.worker_memory_bytes)
    store = Store(Path(settings.store))
    store.lock()
    queue = JobQueue(store, builder or lanes.call, digest, workers=settings.workers, length=settings.queue_length)
    # beside the thread that asks: as many processes at work in all as there are for builds
    estimating = Estimating(settings.workers - 1, settings.build_timeout_s, settings.worker_memory_bytes)
    compute = ThreadPoolExecutor(COMPUTE_THREADS, thread_name_prefix="compute")

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        if ready:
            gc.collect()
            gc.freeze()  # what is imported stays: no collection need look at it
            estimating.start()
        # Beside the requests: records may hold programs that take long to check.
        resuming = threading.Thread(target=queue.resume, name="resume", daemon=True)
        resuming.start()
        yield
        queue.close(lambda: lanes.close(at_once=True))
        estimating.close()
        compute.shutdown(wait=True, cancel_futures=True)
        store.unlock()

    app = FastAPI(title="roller-svc", version=__version__, lifespan=lifespan, docs_url=None, redoc_url=None)
    app.state.roller = State(settings, store, queue, compute, Estimates(estimating.outcomes))
    add_handlers(app)
    app.add_middleware(Guard, body_bytes_most=settings.body_bytes_most, keys=settings.accepted_keys)
    for module in (kernels, operations, estimates, hardware, health):
        app.include_router(module.router)
    return app


def from_settings() -> FastAPI:
    """What a server loads by name: the application with this process's settings."""
    return create_app(settings_in_use(), ready=True)
