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
from roller_svc.farm.action import action_digest, generator_digest
from roller_svc.farm.build import BuildTask, artifact_json, artifact_of, build_task
from roller_svc.farm.estimating import Estimating
from roller_svc.farm.jobs import JobQueue
from roller_svc.farm.lanes import JsonAnswers, ThreadLanes
from roller_svc.farm.store import Artifact, Store
from roller_svc.ir.report import BuildRequest
from roller_svc.service.guard import Guard
from roller_svc.service.problems import add_handlers
from roller_svc.service.routes import estimates, hardware, health, kernels, operations
from roller_svc.service.state import State
from roller_svc.settings import Settings
from roller_svc.version import __version__

COMPUTE_THREADS = 4
Builder = Callable[[BuildRequest], Artifact]
Digest = Callable[[BuildRequest], str]


def create_app(
    settings: Settings, builder: Builder | None = None, digest: Digest = action_digest, *, ready: bool = False
) -> FastAPI:
    """`builder` makes artifacts in place of worker processes; `digest` names what a request asks for; `ready`: have the
    processes for estimates before the first of them is asked for."""
    answers = JsonAnswers(artifact_json, artifact_of)
    lanes = ThreadLanes(build_task, settings.build_timeout_s, settings.memory_bytes_each, answers)
    generator = generator_digest()  # of the code that runs: files may be replaced later

    def build(request: BuildRequest) -> Artifact:
        return lanes.call(BuildTask(request, generator))

    store = Store(Path(settings.store))
    store.lock()
    queue = JobQueue(store, builder or build, digest, workers=settings.workers, length=settings.queue_length)
    # beside the thread that asks: as many processes at work in all as there are for builds
    estimating = Estimating(settings.workers - 1, settings.build_timeout_s, settings.memory_bytes_each)
    compute = ThreadPoolExecutor(COMPUTE_THREADS, thread_name_prefix="compute")
    batches = ThreadPoolExecutor(settings.estimates_at_once, thread_name_prefix="batch")

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
        for pool in (batches, compute):
            pool.shutdown(wait=True, cancel_futures=True)
        store.unlock()

    app = FastAPI(
        title="roller-svc",
        version=__version__,
        lifespan=lifespan,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,  # a redirect would repeat the Host that the client made up
    )
    app.state.roller = State(settings, store, queue, compute, batches, Estimates(estimating.outcomes))
    add_handlers(app)
    app.add_middleware(Guard, settings=settings)
    for module in (kernels, operations, estimates, hardware, health):
        app.include_router(module.router)
    return app
