"""Responses that several routes share."""

from __future__ import annotations

from fastapi.responses import JSONResponse, Response

from roller_svc.farm.operations import Operation
from roller_svc.service.mapping import operation_json

POLL_S = 1
CLIENT_GONE = 499  # nginx's status for a client that disconnected


def operation_response(operation: Operation, pending_status: int, headers: dict[str, str]) -> Response:
    if operation.done:
        return JSONResponse(operation_json(operation), headers=headers)
    location = {"Location": f"/v1/operations/{operation.id}", "Retry-After": str(POLL_S)}
    return JSONResponse(operation_json(operation), status_code=pending_status, headers=headers | location)
