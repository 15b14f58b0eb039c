"""/v1/actions: why a request is or is not in the store."""

from __future__ import annotations

import re

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from roller_svc.client.schemas import ActionResponse, CompileRequest
from roller_svc.errors import ArgumentError, UnknownKernelError
from roller_svc.farm.actions import explanation_json
from roller_svc.farm.api_keys import Scope
from roller_svc.service.access import principal_of, requires
from roller_svc.service.mapping import build_request_from_body
from roller_svc.service.state import state_of

router = APIRouter(prefix="/v1", tags=["actions"])

_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")


@router.get("/actions/{digest}", response_model=ActionResponse, dependencies=[requires(Scope.READ)])
async def action(digest: str, request: Request) -> Response:
    """Return the parts of an action's key and its result; without a result, how the nearest stored action differs."""
    if not _DIGEST.fullmatch(digest):
        raise ArgumentError(
            f"invalid digest {digest[:80]!r}: expected sha256: and 64 hexadecimal digits in lower case",
            code="invalid-digest",
        )
    state = state_of(request)
    explanation = await state.query(lambda: state.farm.explain_known(digest))
    if explanation is None:
        raise UnknownKernelError(f"no action {digest}", code="unknown-action")
    return JSONResponse(explanation_json(explanation))


@router.post("/actions:explain", response_model=ActionResponse, dependencies=[requires(Scope.READ)])
async def explain_action(body: CompileRequest, request: Request) -> Response:
    """Do the same for a request to compile, without a build."""
    state = state_of(request)
    wanted = await state.run(lambda: build_request_from_body(body))
    return JSONResponse(explanation_json(await state.explain(wanted, principal_of(request).client)))
