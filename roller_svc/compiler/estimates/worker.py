"""Estimate programs on devices and return JSON. Runs in the service's estimate workers."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import TYPE_CHECKING

from roller_svc.compiler.donation import donate_targets
from roller_svc.compiler.explain import explain_request
from roller_svc.compiler.notes import add_notes
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import TargetEstimate, estimate_program
from roller_svc.compiler.serialize import Json, error_json, floor_json, plan_json, roofline_json
from roller_svc.errors import RollerError
from roller_svc.frontend.parse import parse_forms
from roller_svc.ir.canonical import to_json
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import Forms, TensorType
from roller_svc.ir.report import BuildRequest
from roller_svc.ir.schedule_cost import ScheduledEstimate
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    from roller_svc.compiler.schedule_cost import estimate_scheduled, schedule_cost_json
else:  # which loads schedules and their rules
    estimate_scheduled = OnUse("roller_svc.compiler.schedule_cost:estimate_scheduled")
    schedule_cost_json = OnUse("roller_svc.compiler.schedule_cost:schedule_cost_json")

SLICE_S = 0.05  # time slice of a chunk: a worker starts no further estimate after it
CACHED_PROGRAMS = 4  # most recently parsed: the devices of a program may be split over several slices
ERROR_PREFIX = b'{"error":'  # of a device result that is an error


@dataclass(frozen=True, slots=True)
class ProgramText:
    """A program as text, with validated input types; not parsed."""

    expression: str
    inputs: tuple[tuple[str, TensorType], ...]
    outputs: tuple[str, ...] | None
    donate: tuple[str, ...] = ()  # inputs that its scatters overwrite
    constants: tuple[str, ...] = ()  # inputs that stay the same between calls

    def parse(self) -> Forms:
        """Parse and check the forms of the program. Raises InputError."""
        forms = parse_forms(self.expression, dict(self.inputs), self.outputs)
        return tuple(donate_targets(replace(program, constants=self.constants), self.donate) for program in forms)


@dataclass(frozen=True, slots=True)
class EstimateTask:
    """One program to estimate on several devices."""

    program: ProgramText
    specs: tuple[HardwareSpec, ...]
    top_k: int
    constraints: ScheduleConstraints
    strict: bool = False  # notes are errors
    schedule: str | None = None  # by hand, in place of construction


@dataclass(frozen=True, slots=True)
class StoryTask:
    """A request to explain for a device, the only one of `specs`."""

    request: BuildRequest
    specs: tuple[HardwareSpec, ...]


Task = EstimateTask | StoryTask


@dataclass(slots=True)
class EstimateResult:
    """The result of an EstimateTask so far. Devices without a result or an error were not reached in time."""

    device_results: list[bytes] = field(default_factory=list)  # JSON objects, of the first devices in order
    rejection: bytes | None = None  # the program's error, for all remaining devices
    transient_error: bytes | None = None  # an error of this attempt only

    @property
    def has_started(self) -> bool:
        return bool(self.device_results) or self.rejection is not None

    def extend(self, more: EstimateResult) -> None:
        """Append the results of the remaining devices."""
        self.device_results += more.device_results
        self.rejection, self.transient_error = more.rejection, more.transient_error


class Deadline:
    """A point in time after which results are not needed by a client; thread-safe."""

    def __init__(self, limit_s: float = math.inf, client: str = "") -> None:
        self.client = client
        self._deadline_s = time.monotonic() + limit_s

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._deadline_s - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.remaining_s == 0.0

    def expire(self) -> None:
        """Move the deadline to now: the client has gone."""
        self._deadline_s = -math.inf


def compute_estimates(tasks: Sequence[Task], deadline: Deadline) -> list[EstimateResult]:
    """Estimate the programs in this process until the deadline."""
    results = [EstimateResult() for _ in tasks]
    for task, result in zip(tasks, results, strict=True):
        if not deadline.has_passed:
            _fill_result(result, task, _new_partitions, lambda: not deadline.has_passed)
    return results


def estimate_slice(tasks: Sequence[Task]) -> list[EstimateResult]:
    """Estimate the first programs for one time slice, at least one device."""
    deadline_s = time.monotonic() + SLICE_S
    results: list[EstimateResult] = []

    def has_time() -> bool:
        return time.monotonic() < deadline_s or not results[0].has_started

    for task in tasks:
        if results and not has_time():
            break
        results.append(EstimateResult())
        _fill_result(results[-1], task, _cached_partitions, has_time)
    return results


def target_estimate_json(estimate: TargetEstimate | ScheduledEstimate) -> Json:
    """Return an entry of the response to POST /v1/estimates, without item and target."""
    if isinstance(estimate, ScheduledEstimate):
        return _scheduled_estimate_json(estimate)
    return {
        "roofline": roofline_json(estimate.roofline),
        "floor": floor_json(estimate.floor),
        "candidates": [
            plan_json(plan, estimate.spec)
            | {"floor_share": estimate.floor.seconds / plan.estimate.seconds, "above_floor": reason or None}
            for plan, reason in zip(estimate.plans, estimate.reasons, strict=True)
        ],
        "notes": list(estimate.notes),
    }


def _scheduled_estimate_json(estimate: ScheduledEstimate) -> Json:
    """Return the same entry for a schedule by hand: its only candidate has launches, and no kernels of construction."""
    candidate = schedule_cost_json(estimate.cost) | {"tiles": {}, "unit": "", "kernels": []}
    return {
        "roofline": roofline_json(estimate.roofline),
        "floor": floor_json(estimate.floor),
        "candidates": [candidate | {"floor_share": estimate.floor.seconds / estimate.cost.seconds, "above_floor": None}],
        "notes": list(estimate.notes),
    }


def error_result(error: RollerError) -> bytes:
    return compact_json({"error": error_json(error)})


def compact_json(value: Json) -> bytes:
    """Encode a value as compact JSON. Raises ValueError for infinities and NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _fill_result(
    result: EstimateResult,
    task: Task,
    partitions_of: Callable[[ProgramText], PartitionCache],
    has_time: Callable[[], bool],
) -> None:
    """Add the program's error, or the results of its devices while `has_time`."""
    if isinstance(task, StoryTask):
        result.device_results += [_story(replace(task.request, hardware=spec)) for spec in task.specs]
        return
    try:
        partitions = partitions_of(task.program)
    except RollerError as error:
        result.rejection = error_result(error)
        return
    for spec in task.specs:
        if not has_time():
            return
        result.device_results.append(_device_result(partitions, spec, task))


def _device_result(partitions: PartitionCache, spec: HardwareSpec, task: EstimateTask) -> bytes:
    try:
        if task.schedule is not None:
            return compact_json(target_estimate_json(estimate_scheduled(partitions, spec, task.schedule, task.constraints)))
        found = estimate_program(partitions, spec, task.top_k, task.constraints)
        return compact_json(target_estimate_json(add_notes(partitions, found, task.constraints, strict=task.strict)))
    except RollerError as error:
        return error_result(error)


def _story(request: BuildRequest) -> bytes:
    try:
        return compact_json(to_json(explain_request(request)))
    except RollerError as error:
        return error_result(error)


def _new_partitions(program: ProgramText) -> PartitionCache:
    return PartitionCache.of_forms(program.parse())


# Used only in estimate workers, which have one thread: a PartitionCache is not thread-safe.
_cached_partitions = lru_cache(maxsize=CACHED_PROGRAMS)(_new_partitions)
