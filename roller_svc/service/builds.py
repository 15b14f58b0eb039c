"""Build and validate requests for kernels and models in confined worker processes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

from roller_svc.compiler.action import KERNEL, ActionKey, hash_parts, part_contents, shown_contents
from roller_svc.farm.build import LOADED_GENERATOR, BuildTask, artifact_json, build_task, parse_artifact
from roller_svc.farm.confinement import gpu_devices, readable_by_builds
from roller_svc.farm.models import Request
from roller_svc.farm.store import Artifact
from roller_svc.farm.workers import JsonCodec, WorkerLimits, WorkerPool
from roller_svc.ir.report import BuildRequest
from roller_svc.service.model_builds import ModelBuilds
from roller_svc.settings import Settings

Builder = Callable[[BuildRequest], Artifact]
BuildWork = Callable[[BuildTask], Artifact]
Digest = Callable[[BuildRequest], str]
Key = Callable[[BuildRequest], ActionKey]


class RequestBuilds:
    """Builds artifacts, each in the worker process of the calling thread.

    Args:
        timeout_s: time limit of one kernel.
        limits: of a worker process.
        models: builds models.
        builder: builds kernels in place of worker processes.
        work: builds a kernel in a worker process.
    """

    def __init__(
        self,
        timeout_s: float,
        limits: WorkerLimits,
        models: ModelBuilds,
        builder: Builder | None = None,
        work: BuildWork = build_task,
    ) -> None:
        codec = JsonCodec(artifact_json, parse_artifact)
        # A worker that has run a kernel must not take another task.
        self._workers = WorkerPool(work, timeout_s, limits, codec, lambda task: task.runs_kernels)
        self._builder = builder or self._build_in_worker
        self._models = models

    def build(self, request: Request) -> Artifact:
        return self._builder(request) if isinstance(request, BuildRequest) else self._models.build(request)

    def interrupt(self, thread_id: int) -> None:
        self._workers.interrupt(thread_id)
        self._models.interrupt(thread_id)

    def close(self) -> None:
        self._workers.close(kill=True)

    def _build_in_worker(self, request: BuildRequest) -> Artifact:
        return self._workers.call(BuildTask(request, LOADED_GENERATOR))


class RequestDigests:
    """Validates requests and returns their actions' digests and keys."""

    def __init__(self, kernel_key: Key, models: ModelBuilds) -> None:
        self._kernel_key = kernel_key
        self._models = models

    def digest(self, request: Request) -> str:
        if isinstance(request, BuildRequest):
            return self._kernel_key(request).digest
        return self._models.digest(request)

    def explained_key(self, request: Request) -> tuple[ActionKey, Mapping[str, object]]:
        if isinstance(request, BuildRequest):
            key = self._kernel_key(request)
            return key, shown_contents(request, key)
        return self._models.explained_key(request)


def key_function(digest: Digest) -> Key:
    """Return a function that gives actions these digests, and parts of which no program is parsed."""

    def compute_key(request: BuildRequest) -> ActionKey:
        return ActionKey(digest(request), KERNEL, hash_parts(part_contents(request)), request.expression)

    return compute_key


def worker_limits(settings: Settings, scratch: Path) -> WorkerLimits:
    """Return the resources of a build worker, which is confined unless the settings disable it."""
    more = () if settings.local_spec is None else (settings.local_spec,)
    readable = readable_by_builds(*more) if settings.confine_workers else None
    return WorkerLimits(settings.memory_bytes_each, scratch=scratch, readable=readable, devices=gpu_devices())
