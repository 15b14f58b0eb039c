"""A service → kernels and estimates, over HTTP. It knows the wire and the errors, nothing else of the project."""

from __future__ import annotations

import time
from collections.abc import Mapping
from types import TracebackType
from typing import Any

import httpx

from roller_svc import errors
from roller_svc.client.schemas import HTTP_ERROR_CODE, CompileBody, EstimateBody, OperationAnswer
from roller_svc.errors import ArgumentError, BuildError, FarmError, InputError, NotFoundError, RollerError

CONNECT_S = 5.0
ANSWER_S = 120.0
WAIT_S = 30  # what one request asks the service to hold its answer back


class Client:
    """`with Client("http://127.0.0.1:8000") as service: service.compile(body)`."""

    def __init__(self, server: str, *, api_key: str = "", transport: httpx.BaseTransport | None = None) -> None:
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        self._server = server
        self._http = httpx.Client(
            base_url=server, headers=headers, transport=transport, timeout=httpx.Timeout(ANSWER_S, connect=CONNECT_S)
        )

    def compile(self, body: CompileBody, timeout_s: float = 600.0) -> OperationAnswer:
        """The operation once it has ended; raises the error of a build that failed."""
        until = time.monotonic() + timeout_s
        answer = self._asked("POST", "/v1/kernels:compile", _plain(body), {"Prefer": f"wait={WAIT_S}"})
        operation = OperationAnswer.model_validate(answer)
        while not operation.done:
            if time.monotonic() > until:
                raise FarmError(f"{operation.name} has not ended in {timeout_s:g} s", code="timeout")
            operation = self.operation(operation.name, WAIT_S)
        if operation.error is not None:
            raise error_of(operation.error.model_dump(), BuildError)
        return operation

    def operation(self, name: str, wait_s: float = 0) -> OperationAnswer:
        return OperationAnswer.model_validate(self._asked("GET", f"/v1/{name}?wait={wait_s:g}"))

    def estimates(self, body: EstimateBody) -> list[dict[str, Any]]:
        """One entry an item and target; entries may hold `error`."""
        answer: list[dict[str, Any]] = self._asked("POST", "/v1/estimates", _plain(body))["estimates"]
        return answer

    def hardware(self) -> list[dict[str, Any]]:
        answer: list[dict[str, Any]] = self._asked("GET", "/v1/hardware")["hardware"]
        return answer

    def file(self, link: str) -> bytes:
        """What a link of a kernel leads to."""
        return self._answered("GET", link).content

    def close(self) -> None:
        self._http.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _asked(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> dict[str, Any]:
        response = self._answered(method, path, body, headers)
        try:
            answer: dict[str, Any] = response.json()
        except ValueError as failure:
            raise FarmError(f"{self._server} does not answer like this service", code="bad-answer") from failure
        return answer

    def _answered(
        self, method: str, path: str, body: object = None, headers: Mapping[str, str] | None = None
    ) -> httpx.Response:
        try:
            response = self._http.request(method, path, json=body, headers=dict(headers or {}))
        except (httpx.UnsupportedProtocol, httpx.InvalidURL) as failure:
            message = f"{self._server!r} is no address of a service: {failure}"
            raise ArgumentError(message, code="invalid-option") from failure
        except httpx.TransportError as failure:
            raise FarmError(f"no answer from {self._server}: {failure}", code="server-unreachable") from failure
        if response.is_success:
            return response
        try:
            problem = response.json()
        except ValueError:
            problem = {}
        raise error_of(
            problem if isinstance(problem, dict) else {}, _class_of(response.status_code), response.status_code
        )


def _plain(body: CompileBody | EstimateBody) -> dict[str, Any]:
    return body.model_dump(exclude_none=True)


def _class_of(status: int) -> type[RollerError]:
    match status:
        case 404:
            return NotFoundError
        case 503 | 502 | 504 | 429:
            return FarmError
        case _ if 400 <= status < 500:
            return InputError
    return RollerError


def error_of(problem: Mapping[str, Any], kind: type[RollerError] = RollerError, status: int = 0) -> RollerError:
    """The error a problem tells of: of the class whose code it is, where there is one, else of `kind`."""
    code = str(problem.get("code", HTTP_ERROR_CODE))
    message = str(problem.get("detail", f"HTTP status {status}"))
    chosen = _class_with(code) or (_class_of(problem["status"]) if problem.get("status", 500) != 500 else kind)
    if not issubclass(chosen, InputError):
        return chosen(message, code=code)
    spans: list[dict[str, Any]] = problem.get("errors") or [{}]
    places = {key: spans[0].get(key) for key in ("line", "column", "end_column")}
    # an error that more is known of than its place: the plain one has room for what came over the wire
    kind_of_input = InputError if chosen is errors.NoCandidateError else chosen
    return kind_of_input(message, code=code, hint=spans[0].get("hint"), **places)


def _class_with(code: str) -> type[RollerError] | None:
    """The class whose default code this is."""
    for cls in vars(errors).values():
        if (
            isinstance(cls, type)
            and issubclass(cls, RollerError)
            and cls.default_code == code
            and cls is not RollerError
        ):
            return cls
    return None
