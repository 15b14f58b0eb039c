"""The calls of the service as generators, which do no I/O: the core of `Client` and `AsyncClient`.

A call yields what is to be done, a `Send` or a `Sleep`, gets the reply, and returns its result. The two clients differ
only in how they send and sleep.
"""

from __future__ import annotations

import hashlib
import os
import time
import uuid
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

import httpx
from pydantic import BaseModel, TypeAdapter, ValidationError

from roller_svc.client.problems import error_from_problem, error_of_response
from roller_svc.client.retry import RETRY_STATUSES, RetryPolicy, parse_retry_after
from roller_svc.client.schemas import (
    MAX_TARGETS,
    ActionResponse,
    BatchCompileResponse,
    BatchResult,
    CancelRequest,
    CheckPlanRequest,
    CompileRequest,
    EstimateRequest,
    GraphBatchResponse,
    GraphBatchResult,
    GraphEstimateResponse,
    GraphOptions,
    GraphRequest,
    GraphSource,
    ModelOperationResponse,
    OperationList,
    OperationResponse,
    ValidateHardwareRequest,
    ValidHardware,
)
from roller_svc.errors import ArgumentError, BuildError, BuildServiceError, InputError, RollerError

CONNECT_TIMEOUT_S = 5.0
RESPONSE_TIMEOUT_S = 120.0
WAIT_S = 30.0  # how long one request waits for an operation
POLL_PAUSE_S = 0.1  # between two of them, for a service that does not wait
BATCH_SIZE = 256  # builds of a batch that are sent at once

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)
AnyOperation = OperationResponse | ModelOperationResponse
Op = TypeVar("Op", OperationResponse, ModelOperationResponse, AnyOperation)
Key = TypeVar("Key", int, str)
ModelFile = str | os.PathLike[str] | bytes | Mapping[str, Any]

_ANY_OPERATION: TypeAdapter[AnyOperation] = TypeAdapter(AnyOperation)

KernelBody = CompileRequest | Mapping[str, Any]  # a mapping has the fields of the request


@dataclass(frozen=True, slots=True)
class Send:
    """A request. It is sent again only if it `is_repeatable`: the service does the same for it once or twice."""

    method: str
    path: str
    json: object = None
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    is_repeatable: bool = True
    timeout_s: float = RESPONSE_TIMEOUT_S


@dataclass(frozen=True, slots=True)
class Sleep:
    seconds: float


Failure = httpx.TransportError | httpx.InvalidURL
Reply = httpx.Response | Failure | None  # of a Send; None of a Sleep
Call = Generator[Send | Sleep, Reply, T]


class Deadline:
    """The end of a call's time."""

    def __init__(self, timeout_s: float | None, clock: Callable[[], float]) -> None:
        self.timeout_s = timeout_s
        self._clock = clock
        self._end_s = None if timeout_s is None else clock() + timeout_s

    @property
    def remaining_s(self) -> float:
        return float("inf") if self._end_s is None else max(0.0, self._end_s - self._clock())

    def check(self, name: str) -> None:
        """Raise BuildServiceError if the time is up."""
        if not self.remaining_s:
            raise BuildServiceError(f"{name} is not done after {self.timeout_s:g} s", code="timeout")


class Calls:
    """The calls of one service.

    Args:
        server: its URL, for messages.
        retry: when to send requests again.
        clock: of monotonic seconds.
    """

    def __init__(self, server: str, retry: RetryPolicy, clock: Callable[[], float] = time.monotonic) -> None:
        self._server = server
        self._retry = retry
        self._clock = clock

    # ---------------------------------------------------------------- kernels

    def compile(self, body: KernelBody, timeout_s: float | None, verb: str = "compile") -> Call[OperationResponse]:
        """Compile or measure a kernel and wait for it. Raises the error of a failed build."""
        return self._build(f"/v1/kernels:{verb}", _to_json(body), OperationResponse, timeout_s)

    def submit(self, body: KernelBody) -> Call[OperationResponse]:
        """Begin to compile a kernel."""
        document = yield from self._json(_keyed("/v1/kernels:compile", _to_json(body)))
        return self._parse(OperationResponse, document)

    def batch_compile(self, bodies: Sequence[KernelBody], timeout_s: float | None) -> Call[list[OperationResponse | RollerError]]:
        """Compile kernels and wait for them; return the operation or the error of each.

        Requests for which the service has no place now are sent again.
        """
        documents = [_to_json(body) for body in bodies]

        def to_batch(numbers: Sequence[int]) -> list[dict[str, Any]]:
            return [documents[number] for number in numbers]

        numbers = range(len(bodies))
        results = yield from self._build_all(numbers, to_batch, timeout_s)
        return [results[number] for number in numbers]

    def compile_for_targets(
        self, body: KernelBody, targets: Sequence[str], timeout_s: float | None
    ) -> Call[dict[str, OperationResponse | RollerError]]:
        """Compile a kernel for several targets by one request and wait; return the operation or the error of each."""
        fields = {name: value for name, value in _to_json(body).items() if name not in ("target", "hardware")}
        to_batch = partial(_for_targets, fields)
        return self._build_all(unique(targets), to_batch, timeout_s)

    def _build_all(
        self, wanted: Sequence[Key], to_batch: Callable[[Sequence[Key]], list[dict[str, Any]]], timeout_s: float | None
    ) -> Call[dict[Key, Any]]:
        """Compile the kernels that keys stand for, and wait; return the operation or the error of each key."""
        deadline = Deadline(timeout_s, self._clock)
        path = "/v1/kernels:batchCompile"
        results = yield from self._submit_all(path, BatchCompileResponse, wanted, to_batch, deadline)
        yield from self._await_all(results, deadline)
        return results

    def _submit_all(
        self,
        path: str,
        kind: type[BatchCompileResponse] | type[GraphBatchResponse],
        wanted: Sequence[Key],
        to_batch: Callable[[Sequence[Key]], list[dict[str, Any]]],
        deadline: Deadline,
    ) -> Call[dict[Key, Any]]:
        """Submit what keys stand for; return the operation or the error of each key.

        What the service has no place for now is sent again. The service joins equal actions, so a batch may be
        repeated without a key.
        """
        results: dict[Key, AnyOperation | RollerError] = {}
        missing, failures = list(wanted), 0
        while missing:
            rejected: list[Key] = []
            for some in _parts(missing, BATCH_SIZE):
                document = yield from self._json(Send("POST", path, {"requests": to_batch(some)}), deadline)
                entries: Sequence[BatchResult | GraphBatchResult] = self._parse(kind, document).results
                if len(entries) != len(some):
                    raise self._unexpected(f"expected {len(some)} results")
                for key, entry in zip(some, entries, strict=True):
                    results[key] = _result(entry)
                    if entry.error is not None and entry.error.status in RETRY_STATUSES:
                        rejected.append(key)
            missing, failures = rejected, failures + 1
            if missing:
                pause_s = self._retry.pause_s(failures)
                if self._retry.attempts == 1 or pause_s > deadline.remaining_s:
                    break
                yield Sleep(pause_s)
        return results

    def _await_all(self, results: dict[Key, Any], deadline: Deadline) -> Call[None]:
        """Replace operations by what they end with."""
        for key, result in results.items():
            if not isinstance(result, RollerError):
                results[key] = yield from self._finished_or_error(result, deadline)

    def estimates(self, body: EstimateRequest | Mapping[str, Any]) -> Call[list[dict[str, Any]]]:
        """Return an entry for each item and target, which may have an `error`."""
        document = yield from self._json(Send("POST", "/v1/estimates", _to_json(body)))
        entries: list[dict[str, Any]] = document["estimates"]
        return entries

    # ---------------------------------------------------------------- models

    def compile_model(
        self, source: ModelFile, target: str, options: GraphOptions | None, timeout_s: float | None
    ) -> Call[ModelOperationResponse]:
        """Compile an ONNX file (path or bytes) or a JSON graph, and wait. Raises the error of a failed build."""
        body = yield from self._graph_request(source, target, options)
        return (yield from self._build("/v1/graphs:compile", body, ModelOperationResponse, timeout_s))

    def compile_models(
        self, sources: Mapping[str, ModelFile], targets: Sequence[str], options: GraphOptions | None, timeout_s: float | None
    ) -> Call[dict[str, dict[str, ModelOperationResponse | RollerError]]]:
        """Compile models, each for several targets by one request, and wait for all.

        Return the operation or the error of each model and target. All are queued before the first is waited for.
        """
        deadline, wanted = Deadline(timeout_s, self._clock), unique(targets)
        results: dict[str, dict[str, Any]] = {}
        for name, source in sources.items():
            try:
                body = yield from self._graph_request(source, wanted[0], options)
                fields = {field: value for field, value in body.items() if field != "target"}
                to_batch = partial(_for_targets, fields)
                results[name] = yield from self._submit_all(
                    "/v1/graphs:batchCompile", GraphBatchResponse, wanted, to_batch, deadline
                )
            except InputError as error:
                results[name] = dict.fromkeys(wanted, error)
        for each in results.values():
            yield from self._await_all(each, deadline)
        return results

    def estimate_model(self, source: ModelFile, target: str, options: GraphOptions | None) -> Call[GraphEstimateResponse]:
        """Estimate a model without a build."""
        body = yield from self._graph_request(source, target, options)
        document = yield from self._json(Send("POST", "/v1/graphs:estimate", body))
        return self._parse(GraphEstimateResponse, document)

    def put_blob(self, content: bytes) -> Call[str]:
        """Upload a file and return its digest."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        yield from self._request(Send("PUT", f"/v1/blobs/{digest}", content=content))
        return digest

    def _graph_request(self, source: ModelFile, target: str, options: GraphOptions | None) -> Call[dict[str, Any]]:
        """Upload the file of a model, and return the body of a request for it."""
        if isinstance(source, Mapping):
            model = GraphSource(graph=dict(source))
        else:
            model = GraphSource(blob=(yield from self.put_blob(_read_model(source))))
        return _to_json(GraphRequest(model=model, target=target, options=options or GraphOptions()))

    # ---------------------------------------------------------------- operations

    def operation(self, name: str, wait_s: float = 0.0, deadline: Deadline | None = None) -> Call[AnyOperation]:
        """Return an operation; wait for it for some time."""
        send = Send("GET", f"/v1/{name}?wait={wait_s:g}", timeout_s=wait_s + RESPONSE_TIMEOUT_S)
        return self._parse_operation((yield from self._json(send, deadline)))

    def cancel(self, name: str, *, for_all: bool) -> Call[AnyOperation]:
        """Withdraw from an operation, or end it for all clients."""
        body = _to_json(CancelRequest(for_all=for_all))
        return self._parse_operation((yield from self._json(Send("POST", f"/v1/{name}:cancel", body))))

    def page(self, size: int, token: str) -> Call[OperationList]:
        """Return a page of operations."""
        path = f"/v1/operations?page_size={size}&page_token={token}"
        return self._parse(OperationList, (yield from self._json(Send("GET", path))))

    def wait(self, name: str, timeout_s: float | None) -> Call[AnyOperation]:
        """Wait for an operation. Raises BuildServiceError if it is not done in time, and the error of a failed one."""
        deadline = Deadline(timeout_s, self._clock)
        operation = yield from self.operation(name, deadline=deadline)
        return _without_error((yield from self._finished(operation, deadline)))

    def reconnect(self, reply: Reply, failures: int) -> float:
        """Return the pause before a stream of events is requested again. Raises the error that forbids it."""
        failure = self._failure(reply)
        if failure is not None and (failures >= self._retry.attempts or not _is_transient(reply)):
            raise failure
        return self._retry.pause_s(max(1, failures), _retry_after_s(reply))

    # ---------------------------------------------------------------- others

    def explain(self, body: KernelBody) -> Call[ActionResponse]:
        """Return whether the store has the result of a request, or else how the nearest stored request differs."""
        document = yield from self._json(Send("POST", "/v1/actions:explain", _to_json(body)))
        return self._parse(ActionResponse, document)

    def hardware(self) -> Call[list[dict[str, Any]]]:
        document = yield from self._json(Send("GET", "/v1/hardware"))
        devices: list[dict[str, Any]] = document["hardware"]
        return devices

    def validate_hardware(self, hardware: str | Mapping[str, Any]) -> Call[dict[str, Any]]:
        """Return a spec, given as YAML text or as JSON, in its normal form. Raises SpecError."""
        spec = hardware if isinstance(hardware, str) else dict(hardware)
        body = _to_json(ValidateHardwareRequest(hardware=spec))
        document = yield from self._json(Send("POST", "/v1/hardware:validate", body))
        return self._parse(ValidHardware, document).hardware

    def version(self) -> Call[dict[str, Any]]:
        return self._json(Send("GET", "/v1/version"))

    def model_tuning(self, digest: str) -> Call[dict[str, Any]]:
        """Return the trials of a model that was compiled with `tune="now"`."""
        return self._json(Send("GET", f"/v1/models/{digest}/tuning"))

    def model_story(self, digest: str) -> Call[dict[str, Any]]:
        """Return the story of a model."""
        return self._json(Send("GET", f"/v1/models/{digest}/story"))

    def model_plan(self, digest: str) -> Call[dict[str, Any]]:
        """Return the plan of a model."""
        return self._json(Send("GET", f"/v1/models/{digest}/plan"))

    def check_plan(self, digest: str, programs: Sequence[Any], bucket: int = 0) -> Call[dict[str, Any]]:
        """Return when each instruction of edited programs runs."""
        body = _to_json(CheckPlanRequest(model=digest, bucket=bucket, programs=list(programs)))
        return self._json(Send("POST", "/v1/plans:check", body))

    def file(self, link: str) -> Call[bytes]:
        """Download a file by its link."""
        response = yield from self._request(Send("GET", link))
        return response.content

    # ---------------------------------------------------------------- details

    def _build(self, path: str, body: object, kind: type[Op], timeout_s: float | None) -> Call[Op]:
        """Send a request to build, wait for the operation, and return it. Raises its error."""
        deadline = Deadline(timeout_s, self._clock)
        send = _keyed(path, body, {"Prefer": f"wait={min(WAIT_S, deadline.remaining_s):g}"})
        document = yield from self._json(send, deadline)
        operation = self._parse(kind, document)
        return _without_error((yield from self._finished(operation, deadline)))

    def _finished(self, operation: Op, deadline: Deadline) -> Call[Op]:
        """Wait until an operation is done."""
        current = operation
        while not current.done:
            deadline.check(operation.name)
            document = yield from self._json(_operation_send(operation.name, deadline), deadline)
            current = self._parse(type(operation), document)
            if not current.done:
                yield Sleep(POLL_PAUSE_S)
        return current

    def _finished_or_error(self, operation: AnyOperation, deadline: Deadline) -> Call[AnyOperation | RollerError]:
        """Wait until an operation is done; return its error if it has one."""
        try:
            return _without_error((yield from self._finished(operation, deadline)))
        except RollerError as error:
            return error

    def _json(self, send: Send, deadline: Deadline | None = None) -> Call[dict[str, Any]]:
        response = yield from self._request(send, deadline)
        try:
            document = response.json()
        except ValueError as failure:
            raise self._unexpected("expected JSON") from failure
        if not isinstance(document, dict):
            raise self._unexpected("expected a JSON object")
        return document

    def _request(self, send: Send, deadline: Deadline | None = None) -> Call[httpx.Response]:
        """Send a request, again after a transient failure, and return the response. Raises the error of a problem."""
        limit = deadline or Deadline(None, self._clock)
        failures = 0
        while True:
            reply = yield replace(send, timeout_s=min(send.timeout_s, max(0.001, limit.remaining_s)))
            failure = self._failure(reply)
            if failure is None:
                assert isinstance(reply, httpx.Response)
                return reply
            failures += 1
            pause_s = self._retry.pause_s(failures, _retry_after_s(reply))
            may_repeat = send.is_repeatable and _is_transient(reply) and failures < self._retry.attempts
            if not may_repeat or pause_s > limit.remaining_s:
                if isinstance(reply, httpx.TimeoutException):
                    limit.check(send.path)
                raise failure
            yield Sleep(pause_s)

    def _failure(self, reply: Reply) -> RollerError | None:
        """Return the error of a reply, or None for a success."""
        match reply:
            case httpx.UnsupportedProtocol() | httpx.InvalidURL():
                return ArgumentError(f"invalid URL of a service: {self._server!r}: {reply}", code="invalid-option")
            case httpx.TransportError():
                return BuildServiceError(f"no response from {self._server}: {reply}", code="server-unreachable")
            case httpx.Response(is_success=False):
                return error_of_response(reply)
        return None

    def _parse(self, kind: type[M], document: object) -> M:
        try:
            return kind.model_validate(document)
        except ValidationError as failure:
            raise self._unexpected(f"expected {kind.__name__}") from failure

    def _parse_operation(self, document: object) -> AnyOperation:
        try:
            return _ANY_OPERATION.validate_python(document)
        except ValidationError as failure:
            raise self._unexpected("expected an operation") from failure

    def _unexpected(self, expected: str) -> BuildServiceError:
        return BuildServiceError(f"unexpected response from {self._server}: {expected}", code="bad-answer")


def _operation_send(name: str, deadline: Deadline) -> Send:
    wait_s = min(WAIT_S, deadline.remaining_s)
    return Send("GET", f"/v1/{name}?wait={wait_s:.3f}", timeout_s=wait_s + RESPONSE_TIMEOUT_S)


def _keyed(path: str, body: object, headers: Mapping[str, str] | None = None) -> Send:
    """Return a POST that may be sent again, because it has an idempotency key."""
    return Send("POST", path, body, {"Idempotency-Key": uuid.uuid4().hex, **(headers or {})})


def _is_transient(reply: Reply) -> bool:
    if isinstance(reply, httpx.Response):
        return reply.status_code in RETRY_STATUSES
    return isinstance(reply, httpx.TransportError) and not isinstance(reply, httpx.UnsupportedProtocol)


def _retry_after_s(reply: Reply) -> float:
    return parse_retry_after(reply.headers.get("Retry-After", "")) if isinstance(reply, httpx.Response) else 0.0


def unique(targets: Sequence[str]) -> list[str]:
    """Return targets without repetitions. Raises ArgumentError if there are none."""
    if not targets:
        raise ArgumentError("expected at least one target", code="invalid-option")
    return list(dict.fromkeys(targets))


def _for_targets(fields: Mapping[str, Any], targets: Sequence[str]) -> list[dict[str, Any]]:
    """Return the requests of a batch that builds one thing for several targets."""
    return [{**fields, "targets": list(some)} for some in _parts(targets, MAX_TARGETS)]


def _result(entry: BatchResult | GraphBatchResult) -> AnyOperation | RollerError:
    if entry.operation is not None:
        return entry.operation
    problem = {} if entry.error is None else entry.error.model_dump()
    return error_from_problem(problem, BuildError)


def _without_error(operation: Op) -> Op:
    """Return an operation. Raises its error."""
    if operation.error is not None:
        raise error_from_problem(operation.error.model_dump(), BuildError)
    return operation


def _read_model(source: str | os.PathLike[str] | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return Path(source).read_bytes()
    except OSError as failure:
        raise ArgumentError(f"cannot read {source}: {failure.strerror}", code="unreadable-file") from failure


def _to_json(body: BaseModel | Mapping[str, Any]) -> dict[str, Any]:
    return dict(body) if isinstance(body, Mapping) else body.model_dump(exclude_none=True)


def _parts(values: Sequence[Key], size: int) -> Iterator[Sequence[Key]]:
    return (values[start : start + size] for start in range(0, len(values), size))
