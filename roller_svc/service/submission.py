"""Submit builds as clients ask for them: their terms, and repetitions of a request."""

from __future__ import annotations

import json
import re
from typing import Annotated

from fastapi import Header, Request
from fastapi.responses import Response
from pydantic import BaseModel
from structlog.contextvars import bind_contextvars

from roller_svc.client.schemas import BuildTerms, CompileRequest, GraphRequest
from roller_svc.errors import QueueFullError
from roller_svc.farm.api_keys import Scope
from roller_svc.farm.farm import Terms
from roller_svc.farm.idempotency import KeyedRequest
from roller_svc.farm.models import Request as FarmRequest
from roller_svc.farm.operations import Operation
from roller_svc.ir.options import SelectionMode
from roller_svc.service.access import check_scope, principal_of
from roller_svc.service.problems import request_id_of
from roller_svc.service.responses import operation_response
from roller_svc.service.state import state_of
from roller_svc.settings import Resource

_WAIT = re.compile(r"(?:^|[,;\s])wait\s*=\s*\"?(\d{1,6}(?:\.\d{1,3})?)\"?\s*(?:$|[,;\s])", re.IGNORECASE)

IdempotencyKey = Annotated[
    str | None,
    Header(
        max_length=200,
        pattern=r"^[\x21-\x7e]+$",
        description="marks repetitions of a request for a day: they get the operation of the first one",
    ),
]
Prefer = Annotated[str | None, Header(max_length=200, description="wait=SECONDS: respond when it is done")]


def terms_of(body: BuildTerms, request: Request, keyed: KeyedRequest | None = None) -> Terms:
    principal, shares = principal_of(request), state_of(request).shares
    client, tracing = principal.client, state_of(request).tracing
    return Terms(
        client,
        principal.max_alive or shares.part_of(Resource.BUILDS, client),
        shares.part_of(Resource.BUILD_SECONDS, client),
        shares.part_of(Resource.STORED_BYTES, client),
        keyed,
        body.priority,
        body.timeout_s,
        request_id=request_id_of(request),
        traceparent=None if tracing is None else tracing.current(),
    )


async def submit_and_wait(
    request: Request, body: CompileRequest | GraphRequest, wanted: FarmRequest, idempotency_key: str | None, prefer: str | None
) -> Response:
    """Submit a build and respond with its operation: 200 if it is done, 202 if not. A hit is remembered."""
    state = state_of(request)
    operation = await _submit(request, body, wanted, idempotency_key)
    bind_contextvars(operation=operation.id, cache=operation.cache.value)
    seconds = preferred_wait_s(prefer, state.settings.max_wait_s)
    try:
        operation = await state.wait(operation, request, seconds)
    except QueueFullError:  # a preference that cannot be met is ignored (RFC 7240)
        seconds = 0.0
    applied = {"Preference-Applied": f"wait={seconds:g}"} if seconds else {}
    response = operation_response(operation, 202, applied)
    state.hits.remember(request, wanted, operation, response, needed_scopes(body))
    return response


def check_scopes(request: Request, body: CompileRequest | GraphRequest) -> None:
    """Raise ForbiddenError if the client lacks a scope that its build needs."""
    for scope in Scope:
        if scope in needed_scopes(body):
            check_scope(principal_of(request), scope)


def needed_scopes(body: CompileRequest | GraphRequest) -> frozenset[Scope]:
    """Return the scopes that a build needs. One that measures runs the client's kernel on a worker."""
    measures = body.options.select == SelectionMode.MEASURE.value
    return frozenset({Scope.COMPILE, Scope.MEASURE} if measures else {Scope.COMPILE})


def preferred_wait_s(prefer: str | None, max_s: float) -> float:
    """Parse RFC 7240's wait preference, limited to `max_s`; ignore a malformed one."""
    match = _WAIT.search(prefer or "")
    return min(float(match[1]), max_s) if match else 0.0


async def _submit(request: Request, body: BuildTerms, wanted: FarmRequest, key: str | None) -> Operation:
    """Return the operation of an earlier request with this key, or of a new one. Raises ConflictError."""
    state, principal = state_of(request), principal_of(request)
    if key is None:
        return await state.submit(wanted, terms_of(body, request))
    keyed = KeyedRequest(principal.client, key, _content(request.url.path, body))
    known_id = await state.query(lambda: state.idempotency.find(keyed))
    known = None if known_id is None else await state.find(known_id)
    if known is not None:
        return known
    # A hit made nothing, so repeating it makes nothing either: it needs no record.
    return await state.submit(wanted, terms_of(body, request, keyed))


def _content(path: str, body: BaseModel) -> bytes:
    """Return what decides the result of a request, in one form. Defaults are left out: later options change no form."""
    return json.dumps([path, body.model_dump(mode="json", exclude_defaults=True)], sort_keys=True, separators=(",", ":")).encode()
