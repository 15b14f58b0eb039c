"""Estimate many programs on many devices: the response of POST /v1/estimates and of `roller estimate --json`."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from roller_svc import hardware
from roller_svc.compiler.estimates.cache import ENTRY_BYTES, LruCache
from roller_svc.compiler.estimates.worker import (
    Deadline,
    EstimateResult,
    EstimateTask,
    ProgramText,
    StoryTask,
    Task,
    compute_estimates,
    error_result,
)
from roller_svc.compiler.notes import add_notes
from roller_svc.compiler.partition_cache import PartitionCache
from roller_svc.compiler.plans import TargetEstimate, estimate_program
from roller_svc.compiler.request import (
    read_options,
    read_top_k,
    request_json,
    validate_expression,
    validate_outputs,
    validate_target,
)
from roller_svc.compiler.sensitivity import analyze_sensitivity
from roller_svc.compiler.serialize import Json, sensitivity_json
from roller_svc.errors import ArgumentError, EstimatesTimeoutError, RollerError
from roller_svc.frontend.lang.input_types import tensor_types
from roller_svc.ir.canonical import digest
from roller_svc.ir.constraints import ScheduleConstraints
from roller_svc.ir.hardware import HardwareSpec
from roller_svc.ir.options import EstimateOptions
from roller_svc.ir.report import BuildRequest, Plan
from roller_svc.ir.schedule_cost import ScheduledEstimate
from roller_svc.on_use import OnUse

if TYPE_CHECKING:
    from roller_svc.compiler.schedule_cost import estimate_scheduled
else:  # which loads schedules and their rules
    estimate_scheduled = OnUse("roller_svc.compiler.schedule_cost:estimate_scheduled")

# Capacities of the caches: device specs, errors of rejected programs, and results of one program on one device.
MAX_SPECS, MAX_REJECTION_BYTES, MAX_RESULT_BYTES = 256, 4 << 20, 24 << 20

TIMED_OUT = error_result(EstimatesTimeoutError("estimate request timed out"))

T = TypeVar("T")
R = TypeVar("R")
Compute = Callable[[Sequence[Task], Deadline], list[EstimateResult]]


@dataclass(frozen=True, slots=True)
class Item:
    """One program to estimate, with the fields of EstimateOptions, as JSON-compatible values not yet validated."""

    expression: object
    inputs: Mapping[str, object] | None
    outputs: Sequence[str] | None = None
    options: Mapping[str, object] = field(default_factory=dict)


class ItemResult(NamedTuple):
    """The result of one item on one target."""

    item: int
    target: str
    result: bytes  # a JSON object with `roofline` and `candidates`, or with `error`


@dataclass(frozen=True, slots=True)
class _ParsedItem:
    """A validated program text, how its kernels are found, whether notes are errors, and the digest of the text."""

    program: ProgramText
    constraints: ScheduleConstraints
    strict: bool
    digest: bytes
    schedule: str | None  # by hand


@dataclass(frozen=True, slots=True)
class _Device:
    """A device and the digest of its spec."""

    spec: HardwareSpec
    digest: str


@dataclass(frozen=True, slots=True)
class _Query:
    """A requested estimate of one program on one device."""

    key: bytes  # digest of everything that determines the result
    item: _ParsedItem
    device: _Device


class EstimateCache:
    """Estimates, cached by everything that determines them.

    `compute` computes missing estimates, in this process or in worker processes.
    """

    def __init__(self, compute: Compute = compute_estimates) -> None:
        self._compute = compute
        self._specs: LruCache[str, _Device] = LruCache(MAX_SPECS)
        self._rejections: LruCache[bytes, bytes] = LruCache(MAX_REJECTION_BYTES)
        self._results: LruCache[bytes, bytes] = LruCache(MAX_RESULT_BYTES)

    def estimates(
        self, items: Iterable[Item], targets: Sequence[str | HardwareSpec], top_k: object, limit_s: float = math.inf
    ) -> list[Json]:
        """Return an entry for each item and target, in this order.

        Invalid programs, and estimates not started within `limit_s`, have an `error`.
        """
        return [
            {"item": entry.item, "target": entry.target} | json.loads(entry.result)
            for entry in self.encoded_estimates(items, targets, top_k, Deadline(limit_s))
        ]

    def encoded_estimates(
        self, items: Iterable[Item], targets: Sequence[str | HardwareSpec], top_k: object, deadline: Deadline
    ) -> list[ItemResult]:
        """Return the same as `estimates`, with results as JSON text."""
        count = read_top_k(top_k)
        programs = [_or_error(_parse_item, item) for item in items]
        devices = [_or_error(self._device, target) for target in targets]
        queries = [
            (index, _target_name(target), _query(program, device, count))
            for index, program in enumerate(programs)
            for target, device in zip(targets, devices, strict=True)
        ]
        results = self._look_up_or_compute([query for _, _, query in queries if isinstance(query, _Query)], count, deadline)
        return [
            ItemResult(index, target, results[query.key] if isinstance(query, _Query) else query)
            for index, target, query in queries
        ]

    def story(self, request: BuildRequest, deadline: Deadline) -> bytes:
        """Return the story of a request as JSON text, or an object with `error`."""
        device = self._device(request.hardware or request.target)
        content = json.dumps(request_json(request), sort_keys=True)
        key = _hash(f"story {device.digest} {content}".encode())
        known = self._results.get(key)
        if known is not None:
            return known
        (result,) = self._compute([StoryTask(request, (device.spec,))], deadline)
        if result.device_results:
            self._results.put(key, result.device_results[0], _weight(result.device_results[0]))
            return result.device_results[0]
        return result.rejection or result.transient_error or TIMED_OUT

    def _look_up_or_compute(self, queries: Sequence[_Query], top_k: int, deadline: Deadline) -> dict[bytes, bytes]:
        """Return the result of each query; compute missing ones, all devices of a program in one task."""
        results: dict[bytes, bytes] = {}
        missing: dict[_ParsedItem, dict[bytes, _Query]] = {}
        for query in queries:
            if (cached := self._look_up(query)) is not None:
                results[query.key] = cached
            else:
                missing.setdefault(query.item, {})[query.key] = query
        groups = [tuple(group.values()) for group in missing.values()]
        tasks = [_task(group, top_k) for group in groups]
        for group, result in zip(groups, self._compute(tasks, deadline), strict=True):
            results |= self._store(group, result)
        return results

    def _look_up(self, query: _Query) -> bytes | None:
        result = self._results.get(query.key)
        return self._rejections.get(query.item.digest) if result is None else result

    def _store(self, group: Sequence[_Query], result: EstimateResult) -> dict[bytes, bytes]:
        """Cache the results of one program, except transient errors; return the result of each query."""
        if result.rejection is not None:
            self._rejections.put(group[0].item.digest, result.rejection, _weight(result.rejection))
        default = result.rejection or result.transient_error or TIMED_OUT
        results = {query.key: default for query in group}
        for query, device_result in zip(group, result.device_results, strict=False):
            self._results.put(query.key, device_result, _weight(device_result))
            results[query.key] = device_result
        return results

    def _device(self, target: str | HardwareSpec) -> _Device:
        """Return a spec with its digest. An id means the same spec for the life of the process."""
        if isinstance(target, HardwareSpec):
            return _Device(target, digest(target))
        name = validate_target(target)
        if (device := self._specs.get(name)) is not None:
            return device
        spec = hardware.load(name)
        self._specs.put(name, device := _Device(spec, digest(spec)))
        return device


def estimate_item(item: Item, targets: Sequence[str | HardwareSpec], top_k: int) -> list[TargetEstimate | ScheduledEstimate]:
    """Return the best plans for each device, or the price of the item's schedule.

    Raises InputError for an invalid program or device id, or an illegal schedule.
    """
    specs = [t if isinstance(t, HardwareSpec) else hardware.load(validate_target(t)) for t in hardware.expand_targets(targets)]
    text, options = _read_item(item)
    partitions = PartitionCache.of_forms(text.parse())
    if options.schedule is not None:
        return [estimate_scheduled(partitions, spec, options.schedule, options.constraints) for spec in specs]
    estimates = (estimate_program(partitions, spec, top_k, options.constraints) for spec in specs)
    return [add_notes(partitions, each, options.constraints, strict=options.strict) for each in estimates]


def plan_sensitivity_json(item: Item, spec: HardwareSpec, plan: Plan) -> list[Json]:
    """Return the sensitivity of a plan's estimate to each resource of the device."""
    text, options = _read_item(item)
    groups = PartitionCache.of_forms(text.parse()).partition_of_plan(plan, spec, options.constraints)
    return sensitivity_json(analyze_sensitivity(plan, groups, spec))


def _or_error(resolve: Callable[[T], R], value: T) -> R | bytes:
    try:
        return resolve(value)
    except RollerError as error:
        return error_result(error)


def _parse_item(item: Item) -> _ParsedItem:
    text, options = _read_item(item)
    return _ParsedItem(text, options.constraints, options.strict, _text_digest(text), options.schedule)


def _query(item: _ParsedItem | bytes, device: _Device | bytes, top_k: int) -> _Query | bytes:
    """Combine item and device into a query, or return the error of one of them."""
    if isinstance(device, bytes):
        return device
    if isinstance(item, bytes):
        return item
    rest = f"{device.digest} {top_k} {item.constraints} {item.strict} {item.schedule}"
    return _Query(_hash(item.digest + rest.encode()), item, device)


def _task(group: Sequence[_Query], top_k: int) -> EstimateTask:
    """Combine the queries of one program into a task."""
    item = group[0].item
    specs = tuple(query.device.spec for query in group)
    return EstimateTask(item.program, specs, top_k, item.constraints, item.strict, item.schedule)


def _read_item(item: Item) -> tuple[ProgramText, EstimateOptions]:
    """Return the program and the options of an item, checked one by one. Raises InputError."""
    expression, inputs = validate_expression(item.expression), tensor_types(item.inputs)
    outputs = validate_outputs(item.outputs)
    options = EstimateOptions(**read_options(EstimateOptions, item.options, inputs))
    if options.schedule is not None and (options.constants or options.donate):
        name = "constants" if options.constants else "donate"
        raise ArgumentError(f"{name} and schedule exclude each other", code="invalid-option", hint=f"leave out {name}")
    return ProgramText(expression, inputs, outputs, options.donate, options.constants), options


def _text_digest(text: ProgramText) -> bytes:
    """Hash the text, not the parsed program: a reformatted program has another digest."""
    inputs = [(name, type_.dtype.value, type_.shape) for name, type_ in text.inputs]
    return _hash(repr((text.expression, inputs, text.outputs, text.donate, text.constants)).encode())


def _hash(content: bytes) -> bytes:
    return hashlib.blake2b(content, digest_size=32).digest()


def _weight(content: bytes) -> int:
    return len(content) + ENTRY_BYTES


def _target_name(target: str | HardwareSpec) -> str:
    return target.id if isinstance(target, HardwareSpec) else target
