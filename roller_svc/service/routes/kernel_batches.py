"""/v1/kernels:batchCompile: compile many kernels, such as the operators of a model, in one request."""

from __future__ import annotations

from fastapi import APIRouter, Request
from fastapi.responses import Response

from roller_svc.client.schemas import BatchCompileRequest, BatchCompileResponse
from roller_svc.farm.api_keys import Scope
from roller_svc.service.access import requires
from roller_svc.service.batches import submit_batch
from roller_svc.service.mapping import build_request_from_body
from roller_svc.service.state import needs_place
from roller_svc.settings import Resource

router = APIRouter(prefix="/v1", tags=["kernels"])


@router.post(
    "/kernels:batchCompile",
    response_model=BatchCompileResponse,
    dependencies=[requires(Scope.COMPILE), needs_place(Resource.BATCHES)],
)
async def batch_compile(body: BatchCompileRequest, request: Request) -> Response:
    """Compile kernels, each for one device or several targets: an operation or an error for each of them."""
    return await submit_batch(request, body.requests, build_request_from_body)
