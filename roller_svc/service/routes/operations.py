"""/v1/operations: state, events and result of builds, of kernels and of models."""

from __future__ import annotations

import base64
import binascii
from typing import Annotated

from fastapi import APIRouter, Header, Query, Request
from fastapi.responses import JSONResponse, Response
from starlette.convertors import StringConvertor, register_url_convertor

from roller_svc.client.schemas import CancelRequest, ModelOperationResponse, OperationList, OperationResponse
from roller_svc.errors import ArgumentError, UnknownKernelError
from roller_svc.farm.api_keys import Scope
from roller_svc.farm.operations import Operation, is_id
from roller_svc.service.access import check_scope, principal_of, requires
from roller_svc.service.event_stream import EventStreamResponse, stream_operation
from roller_svc.service.mapping import operation_json
from roller_svc.service.responses import operation_response
from roller_svc.service.state import State, state_of
from roller_svc.settings import Resource

router = APIRouter(prefix="/v1", tags=["operations"])

DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE = 50, 100
MAX_EVENT_NUMBER = (1 << 31) - 1  # of the column


class _OperationIdConvertor(StringConvertor):
    regex = "[^/:]+"  # so that an id does not include a verb


register_url_convertor("operation_id", _OperationIdConvertor())


@router.get("/operations", response_model=OperationList, dependencies=[requires(Scope.READ)])
async def list_operations(
    request: Request,
    page_size: Annotated[int, Query(ge=0, le=1 << 31, description="at most 100; 0: the default, 50")] = 0,
    page_token: Annotated[str, Query(max_length=200, description="next_page_token of the previous page")] = "",
) -> Response:
    """List the operations that this client asked for, the latest first; those of every client with scope admin."""
    state, principal = state_of(request), principal_of(request)
    client = None if Scope.ADMIN in principal.scopes else principal.client
    size = min(page_size or DEFAULT_PAGE_SIZE, MAX_PAGE_SIZE)
    after = _last_id(page_token) if page_token else None
    found = await state.query(lambda: state.farm.queue.page(client, after=after, limit=size + 1))
    token = _page_token(found[size - 1].id) if len(found) > size else ""
    return JSONResponse({"operations": [operation_json(each) for each in found[:size]], "next_page_token": token})


@router.get(
    "/operations/{operation_id:operation_id}",
    response_model=OperationResponse | ModelOperationResponse,
    dependencies=[requires(Scope.READ)],
)
async def operation(operation_id: str, request: Request, wait: Annotated[float, Query(ge=0, le=86_400)] = 0.0) -> Response:
    """Return an operation; wait up to `wait` seconds for it to be done."""
    state, seconds = state_of(request), min(wait, state_of(request).settings.max_wait_s)
    if seconds > 0:
        state.shares.check(Resource.WAITS, principal_of(request).client)
    result = await state.wait(await _known(state, operation_id), request, seconds)
    return operation_response(result, 200, {})


@router.post(
    "/operations/{operation_id:operation_id}:cancel",
    response_model=OperationResponse | ModelOperationResponse,
    dependencies=[requires(Scope.COMPILE)],
)
async def cancel_operation(operation_id: str, request: Request, body: CancelRequest | None = None) -> Response:
    """Withdraw this client's interest in an operation, which ends when nobody else waits for it."""
    for_all = body is not None and body.for_all
    if for_all:
        check_scope(principal_of(request), Scope.ADMIN)
    state, client = state_of(request), principal_of(request).client
    result = await state.query(lambda: state.farm.cancel(operation_id, client, for_all=for_all))
    if result is None:
        raise _unknown(operation_id)
    return operation_response(result, 200, {})


@router.get(
    "/operations/{operation_id:operation_id}/events",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}}},
    dependencies=[requires(Scope.READ)],
)
async def operation_events(
    operation_id: str,
    request: Request,
    last_event_id: Annotated[int, Header(ge=0, le=MAX_EVENT_NUMBER, description="resume after this event")] = 0,
) -> Response:
    """Stream an operation's events until it is done: `queued`, `building`, `retry`, `done` (server-sent events)."""
    state = state_of(request)
    known = await _known(state, operation_id)
    return EventStreamResponse(state, stream_operation(state, known, last_event_id), principal_of(request).client)


async def _known(state: State, operation_id: str) -> Operation:
    """Return an operation. Raises UnknownKernelError."""
    result = await state.find(operation_id)
    if result is None:
        raise _unknown(operation_id)
    return result


def _unknown(operation_id: str) -> UnknownKernelError:
    return UnknownKernelError(f"no operation {operation_id[:80]}", code="unknown-operation")


def _page_token(last_id: str) -> str:
    return base64.urlsafe_b64encode(last_id.encode()).decode().rstrip("=")


def _last_id(token: str) -> str:
    """Return the id in a page token. Raises ArgumentError."""
    try:
        last_id = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True).decode("ascii")
    except (binascii.Error, ValueError):
        last_id = ""
    if not is_id(last_id):
        raise ArgumentError("page_token: expected the next_page_token of an earlier response", code="invalid-argument")
    return last_id
