"""Client of the HTTP service. Depends only on the schemas and the errors of the project."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

import httpx

from roller_svc import errors
from roller_svc.client.schemas import (
    HTTP_ERROR_CODE,
    CompileRequest,
    EstimateRequest,
    GraphEstimateResponse,
    GraphOptions,
    GraphRequest,
    GraphSource,
    ModelOperationResponse,
    OperationResponse,
)
from roller_svc.errors import (
    ArgumentError,
    BuildError,
    BuildServiceError,
    InputError,
    NotFoundError,
    RollerError,
    UnsupportedModelError,
    UnsupportedNode,
)

CONNECT_TIMEOUT_S = 5.0
RESPONSE_TIMEOUT_S = 120.0
WAIT_S = 30  # how long one request waits for an operation


class Client:
    """`with Client("http://127.0.0.1:8000") as service: service.compile(body)`."""

    def __init__(self, server: str, *, api_key: str = "", transport: httpx.BaseTransport | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._server = server
        self._http = httpx.Client(
            base_url=server,
            headers=headers,
            transport=transport,
            timeout=httpx.Timeout(RESPONSE_TIMEOUT_S, connect=CONNECT_TIMEOUT_S),
        )

    def compile(self, body: CompileRequest, timeout_s: float = 600.0) -> OperationResponse:
        """Compile a kernel and wait for the operation. Raises the error of a failed build."""
        deadline = time.monotonic() + timeout_s
        document = self._request_json("POST", "/v1/kernels:compile", _to_json(body), {"Prefer": f"wait={WAIT_S}"})
        operation = OperationResponse.model_validate(document)
        while not operation.done:
            if time.monotonic() > deadline:
                raise BuildServiceError(f"{operation.name} is not done after {timeout_s:g} s", code="timeout")
            operation = self.operation(operation.name, WAIT_S)
        if operation.error is not None:
            raise error_from_problem(operation.error.model_dump(), BuildError)
        return operation

    def compile_model(
        self,
        source: str | os.PathLike[str] | bytes | Mapping[str, Any],
        target: str,
        options: GraphOptions | None = None,
        timeout_s: float = 3600.0,
    ) -> ModelOperationResponse:
        """Compile an ONNX file (path or bytes) or a JSON graph (dict), and wait. Raises the error of a failed build."""
        deadline = time.monotonic() + timeout_s
        body = self._graph_request(source, target, options)
        document = self._request_json("POST", "/v1/graphs:compile", body, {"Prefer": f"wait={WAIT_S}"})
        operation = ModelOperationResponse.model_validate(document)
        while not operation.done:
            if time.monotonic() > deadline:
                raise BuildServiceError(f"{operation.name} is not done after {timeout_s:g} s", code="timeout")
            document = self._request_json("GET", f"/v1/{operation.name}?wait={WAIT_S}")
            operation = ModelOperationResponse.model_validate(document)
        if operation.error is not None:
            raise error_from_problem(operation.error.model_dump(), BuildError)
        return operation

    def estimate_model(
        self,
        source: str | os.PathLike[str] | bytes | Mapping[str, Any],
        target: str,
        options: GraphOptions | None = None,
    ) -> GraphEstimateResponse:
        """Estimate a model, as `compile_model` takes it, without a build."""
        document = self._request_json("POST", "/v1/graphs:estimate", self._graph_request(source, target, options))
        return GraphEstimateResponse.model_validate(document)

    def put_blob(self, content: bytes) -> str:
        """Upload a file and return its digest."""
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        self._request("PUT", f"/v1/blobs/{digest}", content=content)
        return digest

    def _graph_request(
        self,
        source: str | os.PathLike[str] | bytes | Mapping[str, Any],
        target: str,
        options: GraphOptions | None,
    ) -> dict[str, Any]:
        """Upload the file of a model, and return the body of a request for it."""
        if isinstance(source, Mapping):
            model = GraphSource(graph=dict(source))
        else:
            model = GraphSource(blob=self.put_blob(_read_model(source)))
        return _to_json(GraphRequest(model=model, target=target, options=options or GraphOptions()))

    def operation(self, name: str, wait_s: float = 0) -> OperationResponse:
        return OperationResponse.model_validate(self._request_json("GET", f"/v1/{name}?wait={wait_s:g}"))

    def estimates(self, body: EstimateRequest) -> list[dict[str, Any]]:
        """Return an entry for each item and target, which may have an `error`."""
        entries: list[dict[str, Any]] = self._request_json("POST", "/v1/estimates", _to_json(body))["estimates"]
        return entries

    def hardware(self) -> list[dict[str, Any]]:
        devices: list[dict[str, Any]] = self._request_json("GET", "/v1/hardware")["hardware"]
        return devices

    def file(self, link: str) -> bytes:
        """Download a file by its link."""
        return self._request("GET", link).content

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _request_json(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        response = self._request(method, path, body, headers)
        try:
            document: dict[str, Any] = response.json()
        except ValueError as failure:
            raise BuildServiceError(
                f"unexpected response from {self._server}: expected JSON", code="bad-answer"
            ) from failure
        return document

    def _request(
        self,
        method: str,
        path: str,
        body: object = None,
        headers: Mapping[str, str] | None = None,
        content: bytes | None = None,
    ) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body, headers=dict(headers or {}), content=content)
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as failure:
            message = f"invalid URL of a service: {self._server!r}: {failure}"
            raise ArgumentError(message, code="invalid-option") from failure
        except httpx.TransportError as failure:
            raise BuildServiceError(
                f"no response from {self._server}: {failure}", code="server-unreachable"
            ) from failure
        if response.is_success:
            return response
        try:
            problem = response.json()
        except ValueError:
            problem = {}
        raise error_from_problem(
            problem if isinstance(problem, dict) else {}, _error_class(response.status_code), response.status_code
        )


def _read_model(source: str | os.PathLike[str] | bytes) -> bytes:
    if isinstance(source, bytes):
        return source
    try:
        return Path(source).read_bytes()
    except OSError as failure:
        raise ArgumentError(f"cannot read {source}: {failure.strerror}", code="unreadable-file") from failure


def _to_json(body: CompileRequest | EstimateRequest | GraphRequest) -> dict[str, Any]:
    return body.model_dump(exclude_none=True)


def _error_class(status: int) -> type[RollerError]:
    match status:
        case 404:
            return NotFoundError
        case 503 | 502 | 504 | 429:
            return BuildServiceError
        case _ if 400 <= status < 500:
            return InputError
    return RollerError


def error_from_problem(
    problem: Mapping[str, Any], kind: type[RollerError] = RollerError, status: int = 0
) -> RollerError:
    """Create the error of a problem: of the class with its code if there is one, else by its status or of `kind`."""
    code = str(problem.get("code", HTTP_ERROR_CODE))
    message = str(problem.get("detail", f"HTTP status {status}"))
    error_class = _error_class_for_code(code) or (
        _error_class(problem["status"]) if problem.get("status", 500) != 500 else kind
    )
    if not issubclass(error_class, InputError):
        return error_class(message, code=code)
    if issubclass(error_class, UnsupportedModelError):
        nodes = [UnsupportedNode(each["operator"], each["name"], each["reason"]) for each in problem.get("nodes") or []]
        return UnsupportedModelError(tuple(nodes))
    spans: list[dict[str, Any]] = problem.get("errors") or [{}]
    location = {key: spans[0].get(key) for key in ("line", "column", "end_column")}
    # NoCandidateError has no location: InputError can hold every field of the problem
    input_error_class = InputError if error_class is errors.NoCandidateError else error_class
    return input_error_class(message, code=code, hint=spans[0].get("hint"), **location)


def _error_class_for_code(code: str) -> type[RollerError] | None:
    """Return the error class with a given default code."""
    for cls in vars(errors).values():
        if (
            isinstance(cls, type)
            and issubclass(cls, RollerError)
            and cls.default_code == code
            and cls is not RollerError
        ):
            return cls
    return None
