"""/v1/estimates: many programs on many devices, answered at once."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import APIRouter, Request

from roller_svc.ask import checked_top_k
from roller_svc.errors import ArgumentError
from roller_svc.estimates import estimates_json
from roller_svc.service.convert import item_of
from roller_svc.service.problems import recorded_problem
from roller_svc.service.state import state_of
from roller_svc.wire import EstimateBody, EstimatesAnswer, Problem

router = APIRouter(prefix="/v1", tags=["estimates"])


@router.post("/estimates", response_model=EstimatesAnswer, responses={422: {"model": Problem}})
async def estimates(body: EstimateBody, request: Request) -> dict[str, Any]:
    """Every item on every target, in that order; one that is refused has `error` in place of `candidates`."""
    state = state_of(request)
    count = len(body.items) * len(body.targets)
    if count > state.settings.items_most:
        raise ArgumentError(
            f"{count} estimates asked for, {state.settings.items_most} are the most", code="too-many-items"
        )
    top_k = checked_top_k(body.top_k)
    items = [item_of(one, allow_tf32=body.allow_tf32) for one in body.items]
    loop = asyncio.get_running_loop()
    answers = await loop.run_in_executor(state.compute, estimates_json, items, body.targets, top_k)
    for answer in answers:
        if isinstance(error := answer.get("error"), dict):
            answer["error"] = recorded_problem(error, f"/items/{answer['item']}")
    return {"estimates": answers}
