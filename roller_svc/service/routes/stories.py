"""/v1/kernels:explain: how kernels are found and what they cost, without a build."""

from __future__ import annotations

import json

from fastapi import APIRouter, Request, Response

from roller_svc.client.schemas import CompileRequest
from roller_svc.compiler.estimates.worker import ERROR_PREFIX, Deadline
from roller_svc.compiler.serialize import parse_error
from roller_svc.farm.api_keys import Scope
from roller_svc.service.access import principal_of, requires
from roller_svc.service.mapping import build_request_from_body
from roller_svc.service.responses import CLIENT_GONE
from roller_svc.service.state import needs_place, state_of
from roller_svc.settings import Resource

router = APIRouter(prefix="/v1", tags=["kernels"])


@router.post("/kernels:explain", dependencies=[requires(Scope.READ), needs_place(Resource.ESTIMATES)])
async def explain_kernel(body: CompileRequest, request: Request) -> Response:
    """Return the story of a program on a device: tiles that were tried, candidates, and the terms of their seconds."""
    state = state_of(request)
    wanted = build_request_from_body(body)
    deadline = Deadline(state.settings.estimates_timeout_s, principal_of(request).client)
    content = await state.estimate(lambda: state.estimate_cache.story(wanted, deadline), wanted.top_k, deadline, request)
    if content is None:
        return Response(status_code=CLIENT_GONE)
    if content.startswith(ERROR_PREFIX):
        raise parse_error(json.loads(content)["error"])
    return Response(content, media_type="application/json")
