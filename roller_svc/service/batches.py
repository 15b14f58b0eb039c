"""Submit many builds in one request: each of its requests for one device, or for several targets."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from roller_svc.client.schemas import BatchCompileItem, CompileRequest, GraphBatchItem, GraphRequest
from roller_svc.compiler.serialize import error_json
from roller_svc.errors import ArgumentError, BuildServiceError, RollerError
from roller_svc.farm.farm import Terms
from roller_svc.farm.models import Request as FarmRequest
from roller_svc.farm.models import request_record
from roller_svc.farm.operations import Operation
from roller_svc.farm.store import Json
from roller_svc.service.access import principal_of
from roller_svc.service.mapping import check_devices_differ, operation_json
from roller_svc.service.problems import problem_from_record
from roller_svc.service.responses import CLIENT_GONE
from roller_svc.service.state import State, state_of
from roller_svc.service.submission import check_scopes, terms_of
from roller_svc.settings import Resource

CHECK_EVERY = 16  # builds of a batch between checks for a disconnected client

Body = TypeVar("Body", CompileRequest, GraphRequest)
Result = Operation | RollerError


async def submit_batch(
    request: Request,
    items: Sequence[BatchCompileItem | GraphBatchItem],
    to_request: Callable[[Body], FarmRequest],
) -> Response:
    """Submit the builds of a batch; respond with an operation or an error for each request and target.

    Args:
        request: that has the batch.
        items: its requests.
        to_request: maps the body of one build to what is built. May raise InputError.

    Raises RequestValidationError if a request of the batch names one device twice.
    """
    state = state_of(request)
    builds = sum(len(item.targets or (1,)) for item in items)
    if builds > state.settings.max_items:
        raise ArgumentError(f"too many requests: the limit is {state.settings.max_items}, got {builds}", code="too-many-items")
    bodies = [(number, body) for number, item in enumerate(items) for body in item.for_each_target()]
    entries: list[Json] = []
    with state.shares.hold(Resource.BATCHES, principal_of(request).client):
        for number, item in enumerate(items):
            check_devices_differ(item.targets or (), "requests", number)
        batch = _Batch(state, request, to_request)
        for done, (number, body) in enumerate(bodies):
            if done % CHECK_EVERY == 0 and await request.is_disconnected():
                return Response(status_code=CLIENT_GONE)
            place = {"request": number, "target": body.target}
            entries.append(place | _entry(await batch.submit(body), number))
    return JSONResponse({"results": entries})


class _Batch:
    """A batch that is being submitted: one build after the other, so that other clients' requests come between."""

    def __init__(self, state: State, request: Request, to_request: Callable[..., FarmRequest]) -> None:
        self._state = state
        self._request = request
        self._to_request = to_request
        self._submitted: dict[tuple[str, Terms], Result] = {}
        self._deadline_s = time.monotonic() + state.settings.estimates_timeout_s

    async def submit(self, body: CompileRequest | GraphRequest) -> Result:
        """Submit a build, unless an equal one of the batch was submitted."""
        try:
            check_scopes(self._request, body)
            wanted, terms = await self._state.run(lambda: self._to_request(body)), terms_of(body, self._request)
            key = json.dumps(request_record(wanted), sort_keys=True), terms
            if key not in self._submitted:
                self._check_time()
                self._submitted[key] = await self._state.submit(wanted, terms)
        except RollerError as error:
            return error
        return self._submitted[key]

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
