"""/v1/farm: the build farm now, and as it changes."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Header, Request
from fastapi.responses import Response

from roller_svc.client.schemas import FarmResponse
from roller_svc.farm.api_keys import Scope
from roller_svc.service.access import principal_of, requires
from roller_svc.service.event_stream import EventStreamResponse
from roller_svc.service.farm_events import farm_json, stream_farm
from roller_svc.service.state import state_of

router = APIRouter(prefix="/v1", tags=["farm"])


@router.get("/farm", response_model=FarmResponse, dependencies=[requires(Scope.READ)])
async def farm(request: Request) -> Any:
    """Return queues, workers, waits, builds and failures of the farm, and hits of this service."""
    state = state_of(request)
    return farm_json(await state.query(state.farm.read_figures), state.metrics)


@router.get(
    "/farm/events",
    response_class=Response,
    responses={200: {"content": {"text/event-stream": {}}}},
    dependencies=[requires(Scope.READ)],
)
async def farm_events(
    request: Request,
    last_event_id: Annotated[float | None, Header(ge=0, le=1e12, description="resume after this event")] = None,
) -> Response:
    """Stream the farm: `figures` when they change, `operation` for each change of this client's operations.

    With scope `admin`, operations are those of all clients.
    """
    state, principal = state_of(request), principal_of(request)
    client = None if Scope.ADMIN in principal.scopes else principal.client
    return EventStreamResponse(state, stream_farm(state, client, last_event_id), principal.client)
