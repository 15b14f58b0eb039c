"""Errors → RFC 9457 problem+json: one handler for each way a request can fail."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from http import HTTPStatus

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from starlette.exceptions import HTTPException

from roller_svc import errors
from roller_svc.describe import error_json
from roller_svc.errors import FarmError, InputError, NotFoundError, RollerError, SpecError, ToolchainMissingError
from roller_svc.wire import HTTP_ERROR_CODE

MEDIA_TYPE = "application/problem+json"
RETRY_AFTER_S = 2

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


def add_handlers(app: FastAPI) -> None:
    app.add_exception_handler(RollerError, _roller_error)
    app.add_exception_handler(RequestValidationError, _invalid_body)
    app.add_exception_handler(HTTPException, _http_exception)
    app.add_exception_handler(Exception, _bug)


def status_of(error_class: type[RollerError]) -> int:
    """What a class of errors is in HTTP."""
    if issubclass(error_class, NotFoundError):
        return 404
    if issubclass(error_class, InputError):
        return 422
    if issubclass(error_class, FarmError):
        return 503
    if issubclass(error_class, ToolchainMissingError):
        return 501
    return 500


def problem_of(facts: Mapping[str, object], status: int, where: str = "") -> dict[str, object]:
    """A problem from an error's facts, as describe.error_json has them. `where` points at the program in the body."""
    code, message = str(facts["code"]), str(facts["message"])
    item = {key: facts[key] for key in ("line", "column", "end_column", "hint") if facts.get(key) is not None}
    if "line" in item and facts.get("class") != SpecError.__name__:
        item["pointer"] = f"{where}/expression"
    extra = {key: facts[key] for key in ("rejections", "log") if facts.get(key)}
    return problem(status, code, message, [item | {"message": message}] if item else []) | extra


def problem(status: int, code: str, detail: str, items: list[dict[str, object]] | None = None) -> dict[str, object]:
    return {
        "type": f"urn:roller-svc:problem:{code}",
        "title": HTTPStatus(status).phrase,
        "status": status,
        "detail": detail,
        "code": code,
        "errors": items or [],
    }


def recorded_problem(facts: Mapping[str, object], where: str = "") -> dict[str, object]:
    """The problem of an error of which only the facts are left: they name its class."""
    kind = getattr(errors, str(facts.get("class", "")), RollerError)
    known = isinstance(kind, type) and issubclass(kind, RollerError)
    return problem_of(facts, status_of(kind if known else RollerError), where)


def response(body: Mapping[str, object], headers: Mapping[str, str] | None = None) -> JSONResponse:
    status = body["status"]
    assert isinstance(status, int)
    return JSONResponse(dict(body), status_code=status, media_type=MEDIA_TYPE, headers=dict(headers or {}))


async def _roller_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, RollerError)
    status = status_of(type(error))
    if status == 500:
        log.error("%s %s: %s", request.method, request.url.path, error.message)
    headers = {"Retry-After": str(RETRY_AFTER_S)} if status == 503 else {}
    return response(problem_of(error_json(error), status), headers)


async def _invalid_body(request: Request, error: Exception) -> Response:
    assert isinstance(error, RequestValidationError)
    items: list[dict[str, object]] = []
    named: list[str] = []
    for fault in error.errors():
        where, *rest = fault["loc"]
        if fault["type"] == "json_invalid":
            return response(problem(400, "invalid-json", "the body is not JSON"))
        pointer = "".join(f"/{_escaped(str(part))}" for part in rest)
        item = {"pointer": pointer} if where == "body" else {}  # a part of the path or the query has none
        items.append(item | {"message": fault["msg"]})
        named.append(pointer or "/" if where == "body" else ".".join(str(part) for part in rest))
    return response(problem(422, _CODES[422], f"{named[0]}: {items[0]['message']}", items))


async def _http_exception(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    code = _CODES.get(error.status_code, HTTP_ERROR_CODE)
    detail = {404: f"there is nothing at {request.url.path}", 405: f"{request.method} is not for {request.url.path}"}
    body = problem(error.status_code, code, detail.get(error.status_code, str(error.detail)))
    return response(body, error.headers)


async def _bug(request: Request, error: Exception) -> Response:
    # the log has the traceback; the caller gets none
    return response(problem(500, "internal", "this is a fault of the service; its log says more"))


def _escaped(part: str) -> str:
    """A part of a JSON pointer (RFC 6901)."""
    return part.replace("~", "~0").replace("/", "~1")
