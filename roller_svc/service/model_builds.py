"""Send models to worker processes, and check what comes back."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from roller_svc.compiler.action import ActionKey
from roller_svc.errors import UnknownKernelError
from roller_svc.farm.build import artifact_json
from roller_svc.farm.estimate_pool import NICE
from roller_svc.farm.models import ModelRequest, model_digest, model_key, model_part_contents
from roller_svc.farm.store import Artifact, Json, Store
from roller_svc.farm.workers import JsonCodec, WorkerLimits, WorkerPool
from roller_svc.graph.choose import AUTO, EAGER
from roller_svc.graph.compile import check_device, check_plan_kind
from roller_svc.graph.python_ops import describe_python_ops
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.model import device_spec
from roller_svc.service.model_tasks import (
    ModelTask,
    PlanTask,
    build_model_task,
    check_plan_task,
    estimate_json,
    estimate_model_task,
    parse_estimate,
    parse_model_artifact,
)


class ModelBuilds:
    """Builds and estimates models in confined workers, each of which takes one task."""

    def __init__(self, store: Store, build_timeout_s: float, estimate_timeout_s: float, limits: WorkerLimits) -> None:
        self._store = store
        self._builders = WorkerPool(
            build_model_task, build_timeout_s, limits, JsonCodec(artifact_json, parse_model_artifact), _taints
        )
        self._estimators = WorkerPool(
            estimate_model_task,
            estimate_timeout_s,
            replace(limits, nice=NICE),
            JsonCodec(estimate_json, parse_estimate),
            _taints,
        )
        codec = JsonCodec(estimate_json, parse_estimate)
        self._checkers = WorkerPool(check_plan_task, estimate_timeout_s, replace(limits, nice=NICE), codec)

    def digest(self, request: ModelRequest) -> str:
        """Return the action's digest. Raises InputError for an unknown device."""
        return model_digest(request, check_target(request.target, None))

    def explained_key(self, request: ModelRequest) -> tuple[ActionKey, Mapping[str, object]]:
        """Return the action's key and the contents of its parts. Raises InputError for an unknown device."""
        spec = check_target(request.target, None)
        return model_key(request, spec), model_part_contents(request, spec)

    def build(self, request: ModelRequest) -> Artifact:
        return self._builders.call(self._task(request))

    def estimate(self, request: ModelRequest) -> Json:
        return self._estimators.call(self._task(request))

    def check_plan(self, task: PlanTask) -> Json:
        """Return the times of edited programs. Raises ArgumentError (invalid-plan) for illegal ones."""
        return self._checkers.call(task)

    def interrupt(self, thread_id: int) -> None:
        """End the build of a thread, which then raises BuildServiceError."""
        self._builders.interrupt(thread_id)

    def close(self) -> None:
        self._builders.close(kill=True)
        self._estimators.close(kill=True)
        self._checkers.close(kill=True)

    def _task(self, request: ModelRequest) -> ModelTask:
        content = self._store.get(request.blob) if request.content is None else request.content
        if content is None:
            raise UnknownKernelError(f"no blob sha256:{request.blob}", code="unknown-blob")
        return ModelTask(replace(request, content=None), content, functions=tuple(describe_python_ops()))


def check_target(target: str, threads: int | None, plan: str = AUTO) -> HardwareSpec:
    """Return the spec of a CPU with that many threads, or of a GPU.

    Raises InputError for another device, and for a kind of plans that the device does not have.
    """
    spec = device_spec(target, threads)
    check_device(spec)
    if plan != EAGER:
        check_plan_kind(plan, spec)
    return spec


def _taints(_: ModelTask) -> bool:
    """Return that no worker which has read a client's model takes another task."""
    return True
