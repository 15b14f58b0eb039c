"""Errors → RFC 9457 problem+json, with exception handlers for FastAPI."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from roller_svc import errors
from roller_svc.client.schemas import HTTP_ERROR_CODE
from roller_svc.compiler.serialize import error_json
from roller_svc.errors import (
    BuildServiceError,
    CancelledError,
    ConflictError,
    ForbiddenError,
    InputError,
    KernelTimeoutError,
    NotFoundError,
    QueueFullError,
    QuotaExceededError,
    RollerError,
    SlowRequestError,
    SpecError,
    ToolchainMissingError,
)
from roller_svc.ir.option_words import show_as_fields
from roller_svc.service.access import methods_of, routes_of

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 2
MAX_REPORTED_ERRORS = 20  # in one response
ECHO_CHARACTERS = 100  # of the request's text quoted in a response
CLIENT_CLOSED_REQUEST = 499  # nginx's status for a client that gave up, and gRPC's for CANCELLED
OVERDUE_CODE = "deadline-exceeded"
RETRY_STATUSES = frozenset({429, 503})
TOO_COSTLY_CODES = frozenset({"compile-timeout", "out-of-memory", "out-of-resources"})  # the request exceeds the service's limits

log = logging.getLogger(__name__)

_CODES = {
    400: "invalid-json",
    401: "unauthorized",
    404: "no-such-path",
    405: "method-not-allowed",
    413: "body-too-large",
    415: "unsupported-media-type",
    422: "invalid-body",
}


_STATUSES = {
    NotFoundError: 404,
    ForbiddenError: 403,
    ConflictError: 409,
    SlowRequestError: 408,
    QuotaExceededError: 429,
    CancelledError: CLIENT_CLOSED_REQUEST,
}


def add_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RollerError, _roller_error)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _bug)


def status_of(error_class: type[RollerError], code: str = "") -> int:
    """Return the HTTP status of an error: 422 for invalid requests, 503 for transient errors, 500 for bugs."""
    for known_class, status in _STATUSES.items():
        if issubclass(error_class, known_class):
            return status
    if issubclass(error_class, (InputError, KernelTimeoutError)) or code in TOO_COSTLY_CODES:
        return 422
    if code == OVERDUE_CODE:
        return 504
    if issubclass(error_class, BuildServiceError):
        return 503
    if issubclass(error_class, ToolchainMissingError):
        return 501
    return 500


def retry_after_s(error: RollerError) -> int:
    """Return after how many seconds a client may try again."""
    return (error.retry_after_s if isinstance(error, QueueFullError) else None) or RETRY_AFTER_S


def problem_from_facts(facts: Mapping[str, object], status: int, where: str = "") -> dict[str, object]:
    """Create a problem from error_json's facts. `where` is the JSON pointer to the program in the body."""
    code, message = str(facts["code"]), show_as_fields(str(facts["message"]))
    item = {key: facts[key] for key in ("line", "column", "end_column") if facts.get(key) is not None}
    if facts.get("hint") is not None:
        item["hint"] = show_as_fields(str(facts["hint"]))
    if "line" in item and facts.get("class") != SpecError.__name__:
        item["pointer"] = f"{where}/expression"
    if "step" in facts:  # of a schedule, which has its own lines
        step = "" if facts["step"] is None else f"/steps/{facts['step']}"
        item["pointer"] = f"{where}/options/schedule{step}"
    extra = {key: facts[key] for key in ("rejections", "log", "nodes") if facts.get(key)}
    return problem(status, code, message, [item | {"message": message}] if item else []) | extra


def problem(status: int, code: str, detail: str, items: list[dict[str, object]] | None = None) -> dict[str, object]:
    return {
        "type": f"urn:roller-svc:problem:{code}",
        "title": "Client Closed Request" if status == CLIENT_CLOSED_REQUEST else HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
        "errors": items or [],
    }


def encode_problem(body: Mapping[str, object]) -> tuple[int, list[tuple[bytes, bytes]], bytes]:
    """Encode a problem as status, headers and content, for responses below the routes."""
    status = body["status"]
    assert isinstance(status, int)
    content = json.dumps(body).encode()
    headers = [
        (b"content-type", MEDIA_TYPE.encode()),
        (b"content-length", str(len(content)).encode()),
        (b"x-content-type-options", b"nosniff"),
    ]
    return status, headers, content


def problem_from_record(facts: Mapping[str, object], where: str = "") -> dict[str, object]:
    """Create the problem of a recorded error, whose facts name its class."""
    kind = getattr(errors, str(facts.get("class", "")), RollerError)
    is_known = isinstance(kind, type) and issubclass(kind, RollerError)
    return problem_from_facts(facts, status_of(kind if is_known else RollerError, str(facts["code"])), where)


def response(body: Mapping[str, object], headers: Mapping[str, str] | None = None) -> JSONResponse:
    status = body["status"]
    assert isinstance(status, int)
    return JSONResponse(dict(body), status_code=status, media_type=MEDIA_TYPE, headers=dict(headers or {}))


async def _roller_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RollerError)
    status = status_of(type(error), error.code)
    if status == 500:
        log.error("request %s, %s %s: %s", request_id_of(request), request.method, _path(request), error.message)
    headers = {"Retry-After": str(retry_after_s(error))} if status in RETRY_STATUSES else {}
    if status == 403:
        headers["WWW-Authenticate"] = 'Bearer error="insufficient_scope"'  # RFC 6750
    return response(problem_from_facts(error_json(error), status), headers)


async def _invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    details = error.errors()
    if details and details[0]["type"] == "json_invalid":
        return response(problem(400, "invalid-json", "the body is not JSON"))
    items: list[dict[str, object]] = []
    locations: list[str] = []
    for entry in details[:MAX_REPORTED_ERRORS]:
        where, *rest = entry["loc"]
        pointer = json_pointer(*map(str, rest))
        item = {"pointer": pointer} if where == "body" else {}  # path and query parameters have none
        items.append(item | {"message": entry["msg"]})
        locations.append(pointer or "/" if where == "body" else ".".join(_truncate(str(part)) for part in rest))
    detail = f"{locations[0]}: {items[0]['message']}"
    if len(details) > MAX_REPORTED_ERRORS:
        items.append({"message": f"… {len(details) - MAX_REPORTED_ERRORS:,} more"})
    return response(problem(422, _CODES[422], detail, items))


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code, HTTP_ERROR_CODE)
    path = _path(request)
    detail = {404: f"no resource at {path}", 405: f"method not allowed: {_truncate(request.method)} {path}"}
    body = problem(error.status_code, code, detail.get(error.status_code, str(error.detail)))
    headers = dict(error.headers or {})
    if error.status_code == 405:  # the router names the methods of one route
        headers["Allow"] = ", ".join(sorted(methods_of(routes_of(request.app), request.url.path)))
    return response(body, headers)


async def _bug(request: Request, error: Exception) -> Response:
    # the server logs the traceback; the client gets none
    request_id = request_id_of(request)
    log.error("request %s, %s %s: %s", request_id, request.method, _path(request), type(error).__name__)
    body = problem(500, "internal", "internal error: see the service's log")
    # the server closes the connection after an exception
    return response(body, {"X-Request-Id": request_id, "X-Content-Type-Options": "nosniff", "Connection": "close"})


def request_id_of(request: Request) -> str:
    """Return the id that the middleware gave to a request."""
    return str(getattr(request.state, "request_id", ""))


def _path(request: Request) -> str:
    """Return the percent-encoded path of a request, which has no control characters."""
    return _truncate(request.scope.get("raw_path", b"").decode("ascii", "replace") or request.url.path)


def _truncate(text: str) -> str:
    return text if len(text) <= ECHO_CHARACTERS else f"{text[:ECHO_CHARACTERS]}…"


def json_pointer(*parts: str) -> str:
    """Return a JSON pointer (RFC 6901)."""
    return "".join("/" + _truncate(part).replace("~", "~0").replace("/", "~1") for part in parts)
