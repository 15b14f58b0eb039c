"""Validate build requests and compute their actions' keys, with a cache, and check schedules by hand.

Both run a client's text through a parser and a polyhedral library that holds the interpreter lock. Neither may run in
the process that serves requests: they run in worker processes with a time limit.
"""

from __future__ import annotations

import copy
import hashlib
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import TypeVar

from roller_svc.compiler.action import KERNEL, PARTS, ActionKey, action_key
from roller_svc.compiler.estimates.cache import ENTRY_BYTES, LruCache
from roller_svc.compiler.parsing import parse_once
from roller_svc.compiler.request import build_request, request_json, resolve_spec
from roller_svc.compiler.schedule_cost import price_schedule, schedule_cost_json
from roller_svc.compiler.scheduled import check_schedule
from roller_svc.compiler.serialize import Json
from roller_svc.errors import BuildServiceError, InputError, InvariantError, KernelTimeoutError, ScheduleError
from roller_svc.farm.build import DIGEST, LOADED_GENERATOR, BuildTask
from roller_svc.farm.workers import JsonCodec, WorkerLimits, WorkerPool
from roller_svc.ir.report import BuildRequest
from roller_svc.ir.schedule_text import render
from roller_svc.schedule.build_tree import build_tree
from roller_svc.schedule.check_steps import Problem
from roller_svc.schedule.device_launches import schedule_for_device

R = TypeVar("R")

MAX_BYTES = 8 << 20  # of memory for the keys and errors of requests
KEY_BYTES, ERROR_BYTES = 1 << 10, 3 << 10  # of memory for a key, and for an error beside its texts
REMEMBER_ERRORS_S = 600.0
MAX_ATTEMPTS = 3  # if worker processes die
MEMORY_BYTES = 2 << 30  # limit of one worker process


def compute_key(task: BuildTask) -> ActionKey:
    """Return the action's key, once its schedule, if it has one, is legal.

    Raises InputError for an invalid request and BuildServiceError if this process runs other code than the service.
    """
    task.check_generator()
    if task.request.schedule is not None:
        check_schedule(task.request)
    return action_key(task.request)


@dataclass(frozen=True, slots=True)
class ScheduleTask:
    """A schedule by hand to check, of a program, on at most one device."""

    expression: str
    inputs: Mapping[str, object]
    outputs: Sequence[str] | None
    schedule: object
    target: str | None = None
    hardware: Mapping[str, object] | None = None


@dataclass(frozen=True, slots=True)
class CheckedSchedule:
    """The first problem of a schedule, or the tree of a legal one as text, with its price on the device, if one is named."""

    problems: tuple[Problem, ...]
    tree: str | None
    cost: Json | None = None


def check_task(task: ScheduleTask) -> CheckedSchedule:
    """Check a schedule. Raises InputError for an invalid program or device."""
    given = {"target": task.target, "hardware": task.hardware}
    device = {name: value for name, value in given.items() if value is not None}
    request = build_request(task.expression, task.inputs, outputs=task.outputs, **device)
    spec = resolve_spec(request) if device else None
    program = parse_once(request.expression, request.inputs, request.outputs)[0]
    try:
        schedule = schedule_for_device(program, task.schedule, spec)
    except ScheduleError as error:
        return CheckedSchedule((Problem.from_error(error),), None)
    cost = None if spec is None else schedule_cost_json(price_schedule(schedule, spec))
    return CheckedSchedule((), render(build_tree(schedule)), cost)


@dataclass(frozen=True, slots=True)
class _Checked:
    """The key or the error of a request, and when it was found."""

    result: ActionKey | InputError
    time_s: float


class RequestValidator:
    """Compute and cache the action's key, or the input error, of each request.

    Args:
        timeout_s: limit of the parsing and checking of one request.
        limits: of a worker process.
        remember_errors_s: how long an error stands before a request is checked again.
    """

    def __init__(
        self,
        timeout_s: float,
        limits: WorkerLimits = WorkerLimits(),
        remember_errors_s: float = REMEMBER_ERRORS_S,
    ) -> None:
        self._timeout_s = timeout_s
        self._remember_errors_s = remember_errors_s
        codec = JsonCodec(_key_json, _parse_key)
        self._workers = WorkerPool(compute_key, timeout_s, replace(limits, memory_bytes=MEMORY_BYTES), codec)
        self._cache: LruCache[bytes, _Checked] = LruCache(MAX_BYTES)

    def is_cached(self, request: BuildRequest) -> bool:
        """Whether `digest` returns without waiting for a worker."""
        return self._cached(_cache_key(request)) is not None

    def digest(self, request: BuildRequest) -> str:
        """Return the action's digest. Raises as `key` does."""
        return self.key(request).digest

    def key(self, request: BuildRequest) -> ActionKey:
        """Return the action's key.

        Raises InputError for an invalid request and BuildServiceError if no worker could check it now.
        """
        key = _cache_key(request)
        result = self._cached(key)
        if result is None:
            result = self._validate(request)
            self._cache.put(key, _Checked(result, time.monotonic()), ENTRY_BYTES + _result_bytes(result))
        if isinstance(result, InputError):
            raise copy.copy(result)  # what is raised holds the frames that it passes
        return result

    def close(self) -> None:
        self._workers.close(kill=True)

    def _cached(self, key: bytes) -> ActionKey | InputError | None:
        """Return what is known of a request: its key, or its error for a time."""
        checked = self._cache.get(key)
        if checked is None:
            return None
        is_error = isinstance(checked.result, InputError)
        return None if is_error and time.monotonic() > checked.time_s + self._remember_errors_s else checked.result

    def _validate(self, request: BuildRequest) -> ActionKey | InputError:
        return _run(
            partial(self._workers.call, BuildTask(request, LOADED_GENERATOR)),
            f"the program takes longer than {self._timeout_s:g} s to be read and checked",
            "fewer or simpler conditions and indices, or fewer steps of a schedule",
        )


class ScheduleChecker:
    """Check schedules by hand. Nothing is cached.

    Args:
        timeout_s: limit of one check.
        limits: of a worker process.
    """

    def __init__(self, timeout_s: float, limits: WorkerLimits = WorkerLimits()) -> None:
        self._timeout_s = timeout_s
        codec = JsonCodec(asdict, _parse_schedule)
        self._workers = WorkerPool(check_task, timeout_s, replace(limits, memory_bytes=MEMORY_BYTES), codec)

    def check(self, task: ScheduleTask) -> CheckedSchedule:
        """Return the schedule's first problem, or its tree.

        Raises InputError for an invalid program or device, and BuildServiceError if no worker could check it now.
        """
        result = _run(
            partial(self._workers.call, task),
            f"the schedule takes longer than {self._timeout_s:g} s to be checked",
            "fewer steps, or a smaller program",
        )
        if isinstance(result, InputError):
            raise result
        return result

    def close(self) -> None:
        self._workers.close(kill=True)


def _run(call: Callable[[], R], late: str, hint: str) -> R | InputError:
    """Return the result of a worker's check, or the error of its input: also that it is `late`."""
    for attempt in range(1, MAX_ATTEMPTS + 1):
        try:
            return call()
        except BuildServiceError as error:
            if error.code != "worker-lost" or attempt == MAX_ATTEMPTS:
                raise
        except InputError as error:
            return error.with_traceback(None)
        except KernelTimeoutError:
            return InputError(late, code="check-timeout", hint=f"{hint}; ROLLER_CHECK_TIMEOUT_S is the service's limit")
    raise InvariantError("no attempt was made")


def _cache_key(request: BuildRequest) -> bytes:
    """Return what names a request, with the schedule as it is written: its errors name lines."""
    content = {"request": request_json(request), "schedule": None if request.schedule is None else request.schedule.written}
    return hashlib.sha256(json.dumps(content, sort_keys=True, default=repr).encode()).digest()


def _result_bytes(result: ActionKey | InputError) -> int:
    """Return the memory that a result takes."""
    if isinstance(result, ActionKey):
        return KEY_BYTES + sys.getsizeof(result.text)
    return ERROR_BYTES + sys.getsizeof(result.message) + sys.getsizeof(result.hint)


def _key_json(key: ActionKey) -> object:
    return {"digest": key.digest, "parts": dict(key.parts), "text": key.text}


def _parse_key(document: object) -> ActionKey:
    if not isinstance(document, dict) or document.keys() != {"digest", "parts", "text"}:
        raise ValueError("invalid key")
    digest, parts, text = document["digest"], document["parts"], document["text"]
    if not (isinstance(digest, str) and DIGEST.fullmatch(digest) and isinstance(parts, dict)):
        raise ValueError("invalid digest")
    if set(parts) != set(PARTS) or not all(DIGEST.fullmatch(f"sha256:{each}") for each in parts.values()):
        raise ValueError("invalid parts")
    if not isinstance(text, str):
        raise ValueError("invalid text")
    interned = {part: sys.intern(parts[part]) for part in PARTS}  # most requests share most parts
    return ActionKey(digest, KERNEL, interned, text)


def _parse_schedule(document: object) -> CheckedSchedule:
    if not isinstance(document, dict) or document.keys() != {"problems", "tree", "cost"}:
        raise ValueError("invalid check of a schedule")
    tree, cost = document["tree"], document["cost"]
    if not (tree is None or isinstance(tree, str)) or not (cost is None or isinstance(cost, dict)):
        raise ValueError("invalid tree or cost")
    return CheckedSchedule(tuple(Problem(**each) for each in document["problems"]), tree, cost)
