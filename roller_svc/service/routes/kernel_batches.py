"""/v1/kernels:batchCompile: compile many kernels, such as the operators of a model, in one request."""

from __future__ import annotations

import time

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from roller_svc.client.schemas import BatchCompileRequest, BatchCompileResponse, CompileRequest
from roller_svc.compiler.serialize import error_json
from roller_svc.errors import ArgumentError, BuildServiceError, RollerError
from roller_svc.farm.api_keys import Scope
from roller_svc.farm.farm import Terms
from roller_svc.farm.operations import Operation
from roller_svc.farm.store import Json
from roller_svc.ir.report import BuildRequest
from roller_svc.service.access import principal_of, requires
from roller_svc.service.mapping import build_request_from_body, operation_json
from roller_svc.service.problems import problem_from_record
from roller_svc.service.responses import CLIENT_GONE
from roller_svc.service.state import State, state_of
from roller_svc.service.submission import check_scopes, terms_of
from roller_svc.settings import Resource

router = APIRouter(prefix="/v1", tags=["kernels"])

CHECK_EVERY = 16  # requests of a batch between checks for a disconnected client

Result = Operation | RollerError
Wanted = tuple[BuildRequest, Terms]


@router.post("/kernels:batchCompile", response_model=BatchCompileResponse, dependencies=[requires(Scope.COMPILE)])
async def batch_compile(body: BatchCompileRequest, request: Request) -> Response:
    """Compile kernels: an operation or an error for each request. Equal requests share one operation."""
    state = state_of(request)
    if len(body.requests) > state.settings.max_items:
        raise ArgumentError(
            f"too many requests: the limit is {state.settings.max_items}, got {len(body.requests)}",
            code="too-many-items",
        )
    entries: list[Json] = []
    with state.shares.hold(Resource.BATCHES, principal_of(request).client):
        batch = _Batch(state, request)
        for number, item in enumerate(body.requests):
            if number % CHECK_EVERY == 0 and await request.is_disconnected():
                return Response(status_code=CLIENT_GONE)
            entries.append(_entry(await batch.submit(item), number))
    return JSONResponse({"results": entries})


class _Batch:
    """A batch that is being submitted: one request after the other, so that other clients' requests come between."""

    def __init__(self, state: State, request: Request) -> None:
        self._state = state
        self._request = request
        self._submitted: dict[Wanted, Result] = {}
        self._deadline_s = time.monotonic() + state.settings.estimates_timeout_s

    async def submit(self, body: CompileRequest) -> Result:
        """Submit a request, unless an equal one of the batch was submitted."""
        try:
            check_scopes(self._request, body)
            wanted = (await self._state.run(lambda: build_request_from_body(body)), terms_of(body, self._request))
            if wanted not in self._submitted:
                self._check_time()
                self._submitted[wanted] = await self._state.submit(*wanted)
        except RollerError as error:
            return error
        return self._submitted[wanted]

    def _check_time(self) -> None:
        """Raise BuildServiceError if nothing may be submitted any more."""
        if self._state.is_ending:
            raise BuildServiceError("the service is shutting down", code="shutting-down")
        if time.monotonic() > self._deadline_s:
            raise BuildServiceError("the request was not submitted in time; send it again", code="batch-timeout")


def _entry(result: Result, number: int) -> Json:
    if isinstance(result, Operation):
        return {"operation": operation_json(result)}
    return {"error": problem_from_record(error_json(result), f"/requests/{number}")}
