"""/v1/operations: state and result of compile requests, of kernels and of models."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Query, Request
from fastapi.responses import Response

from roller_svc.client.schemas import ModelOperationResponse, OperationResponse, Problem
from roller_svc.errors import UnknownKernelError
from roller_svc.service.routes.kernels import operation_response
from roller_svc.service.state import state_of

router = APIRouter(prefix="/v1", tags=["operations"])


@router.get(
    "/operations/{operation_id}",
    response_model=OperationResponse | ModelOperationResponse,
    responses={404: {"model": Problem}},
)
async def operation(
    operation_id: str, request: Request, wait: Annotated[float, Query(ge=0, le=86_400)] = 0.0
) -> Response:
    """Return an operation; wait up to `wait` seconds for it to be done."""
    state = state_of(request)
    result = await state.run(lambda: state.farm.get(operation_id))
    if result is None:
        raise UnknownKernelError(f"no operation {operation_id[:80]}", code="unknown-operation")
    result = await state.wait(result, request, min(wait, state.settings.max_wait_s))
    return operation_response(result, 200, {})
