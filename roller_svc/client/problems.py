"""Problems (RFC 9457) → the project's errors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import httpx

from roller_svc import errors
from roller_svc.client.schemas import HTTP_ERROR_CODE
from roller_svc.errors import (
    BuildServiceError,
    ConflictError,
    ForbiddenError,
    InputError,
    NotFoundError,
    QuotaExceededError,
    RollerError,
    UnsupportedModelError,
    UnsupportedNode,
)

_CLASSES = {
    403: ForbiddenError,
    404: NotFoundError,
    409: ConflictError,
    429: QuotaExceededError,
    502: BuildServiceError,
    503: BuildServiceError,
    504: BuildServiceError,
}
_KEY_HINT = "Client(url, api_key=KEY); for the command line set ROLLER_API_KEY"


def error_of_response(response: httpx.Response) -> RollerError:
    """Create the error of a response that is not a success."""
    try:
        problem = response.json()
    except ValueError:
        problem = {}
    known = problem if isinstance(problem, dict) else {}
    return error_from_problem(known, _error_class(response.status_code), response.status_code)


def error_from_problem(problem: Mapping[str, Any], kind: type[RollerError] = RollerError, status: int = 0) -> RollerError:
    """Create the error of a problem: of the class with its code if there is one, else by its status or of `kind`."""
    code = str(problem.get("code", HTTP_ERROR_CODE))
    message = str(problem.get("detail", f"HTTP status {status}"))
    error_class = _error_class_for_code(code) or (_error_class(problem["status"]) if problem.get("status", 500) != 500 else kind)
    if not issubclass(error_class, InputError):
        return error_class(message, code=code)
    if issubclass(error_class, UnsupportedModelError):
        nodes = [UnsupportedNode(each["operator"], each["name"], each["reason"]) for each in problem.get("nodes") or []]
        return UnsupportedModelError(tuple(nodes))
    spans: list[dict[str, Any]] = problem.get("errors") or [{}]
    hint = _KEY_HINT if code == "unauthorized" else spans[0].get("hint")
    location = {key: spans[0].get(key) for key in ("line", "column", "end_column")}
    # NoCandidateError has no location: InputError can hold every field of the problem
    input_error_class = InputError if error_class is errors.NoCandidateError else error_class
    return input_error_class(message, code=code, hint=hint, **location)


def _error_class(status: int) -> type[RollerError]:
    if status in _CLASSES:
        return _CLASSES[status]
    return InputError if 400 <= status < 500 else RollerError


def _error_class_for_code(code: str) -> type[RollerError] | None:
    """Return the error class with a given default code."""
    for cls in vars(errors).values():
        if isinstance(cls, type) and issubclass(cls, RollerError) and cls.default_code == code and cls is not RollerError:
            return cls
    return None
