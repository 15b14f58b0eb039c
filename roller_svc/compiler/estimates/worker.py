"""Programs' texts on devices → what the model says of them, as JSON: the work of a service's estimating processes."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import TargetEstimate, estimate_program
from roller_svc.compiler.serialize import Json, error_json, plan_json, roofline_json
from roller_svc.errors import RollerError
from roller_svc.frontend.parse import parse
from roller_svc.ir.constraints import Demands
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.program import TensorProgram, TensorType

SLICE_S = 0.05  # after which a process begins no other outcome: somebody else's turn
CACHED_PROGRAMS = 4  # that were read last: the devices of one program may come in several slices
ERROR_PREFIX = b'{"error":'  # of an outcome that is an error


@dataclass(frozen=True, slots=True)
class ProgramText:
    """A program as it was posted, its parts checked for their types alone."""

    expression: str
    inputs: tuple[tuple[str, TensorType], ...]
    outputs: tuple[str, ...] | None

    def parse(self) -> TensorProgram:
        """The checked program. Raises the InputError that it is refused with."""
        return parse(self.expression, dict(self.inputs), self.outputs)


@dataclass(frozen=True, slots=True)
class EstimateTask:
    """One program to estimate on several devices."""

    program: ProgramText
    specs: tuple[HardwareSpec, ...]
    top_k: int
    constraints: Demands


@dataclass(slots=True)
class EstimateResult:
    """What is known of one Work: `outcomes` of its first devices, in order, each a JSON object.

    `refusal` is the program's error on every device that is left. `fault` is an error of this attempt alone.
    Where neither is there and devices are left, there was no time for these.
    """

    device_results: list[bytes] = field(default_factory=list)
    rejection: bytes | None = None
    transient_error: bytes | None = None

    @property
    def has_started(self) -> bool:
        return bool(self.device_results) or self.rejection is not None

    def extend(self, more: EstimateResult) -> None:
        """Take in what was found of the devices that were left."""
        self.device_results += more.device_results
        self.rejection, self.transient_error = more.rejection, more.transient_error


class Deadline:
    """How long somebody waits for outcomes; safe for threads."""

    def __init__(self, limit_s: float = math.inf) -> None:
        self._until_s = time.monotonic() + limit_s

    @property
    def remaining_s(self) -> float:
        return max(0.0, self._until_s - time.monotonic())

    @property
    def has_passed(self) -> bool:
        return self.remaining_s == 0.0

    def expire(self) -> None:
        """Let it be over now: nobody waits any more."""
        self._until_s = -math.inf


def compute_estimates(tasks: Sequence[EstimateTask], deadline: Deadline) -> list[EstimateResult]:
    """Estimate each program in this process, until the patience is over."""
    results = [EstimateResult() for _ in tasks]
    for task, result in zip(tasks, results, strict=True):
        if not deadline.has_passed:
            _fill_result(result, task, _new_partitions, lambda: not deadline.has_passed)
    return results


def estimate_slice(tasks: Sequence[EstimateTask]) -> list[EstimateResult]:
    """Estimate the first programs for a slice of time: one outcome at least."""
    until_s = time.monotonic() + SLICE_S
    results: list[EstimateResult] = []

    def has_time() -> bool:
        return time.monotonic() < until_s or not results[0].has_started

    for task in tasks:
        if results and not has_time():
            break
        results.append(one := EstimateResult())
        _fill_result(one, task, _cached_partitions, has_time)
    return results


def target_estimate_json(estimate: TargetEstimate) -> Json:
    """The answer for one item on one device, less what names these."""
    return {
        "roofline": roofline_json(estimate.roofline),
        "candidates": [plan_json(plan, estimate.spec) for plan in estimate.plans],
    }


def error_result(error: RollerError) -> bytes:
    return compact_json({"error": error_json(error)})


def compact_json(value: Json) -> bytes:
    """A value as it stands in an answer. Raises ValueError for infinities and NaN."""
    return json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":")).encode()


def _fill_result(
    result: EstimateResult,
    task: EstimateTask,
    partitions_of: Callable[[ProgramText], PartitionCache],
    has_time: Callable[[], bool],
) -> None:
    """Add the program's refusal, or outcomes of its devices as long as they may begin."""
    try:
        partitions = partitions_of(task.program)
    except RollerError as refusal:
        result.rejection = error_result(refusal)
        return
    for spec in task.specs:
        if not has_time():
            return
        result.device_results.append(_device_result(partitions, spec, task))


def _device_result(partitions: PartitionCache, spec: HardwareSpec, task: EstimateTask) -> bytes:
    try:
        return compact_json(target_estimate_json(estimate_program(partitions, spec, task.top_k, task.constraints)))
    except RollerError as error:
        return error_result(error)


def _new_partitions(program: ProgramText) -> PartitionCache:
    return PartitionCache(program.parse())


_cached_partitions = lru_cache(maxsize=CACHED_PROGRAMS)(
    _new_partitions
)  # in a process that estimates, whose work has one thread
