"""/v1/estimates: many programs on many devices, answered at once."""

from __future__ import annotations

import asyncio
import json
import time

from fastapi import APIRouter, Request, Response

from roller_svc.ask import checked_top_k
from roller_svc.errors import ArgumentError
from roller_svc.estimates import Estimates, Item
from roller_svc.service.convert import item_of
from roller_svc.service.problems import recorded_problem
from roller_svc.service.state import state_of
from roller_svc.wire import EstimateBody, EstimatesAnswer, Problem

router = APIRouter(prefix="/v1", tags=["estimates"])

PLANS_EACH = 10  # that the largest request may ask for


@router.post("/estimates", response_model=EstimatesAnswer, responses={422: {"model": Problem}})
async def estimates(body: EstimateBody, request: Request) -> Response:
    """Every item on every target, in that order; one that is refused has `error` in place of `candidates`."""
    state = state_of(request)
    count = len(body.items) * len(body.targets)
    if count > state.settings.items_most:
        raise ArgumentError(
            f"{count} estimates asked for, {state.settings.items_most} are the most", code="too-many-items"
        )
    top_k = checked_top_k(body.top_k)
    plans_most = PLANS_EACH * state.settings.items_most
    if count * top_k > plans_most:
        raise ArgumentError(
            f"{count} estimates of {top_k} plans asked for, {plans_most} plans are the most", code="too-many-items"
        )
    items = [item_of(one, allow_tf32=body.allow_tf32) for one in body.items]
    loop = asyncio.get_running_loop()
    within_s = state.settings.estimates_timeout_s
    until_s = time.monotonic() + within_s
    with state.admitted_estimates():
        content = await loop.run_in_executor(
            state.batches, _content, state.estimates, items, body.targets, top_k, until_s
        )
    return Response(content, media_type="application/json")


def _content(estimates: Estimates, items: list[Item], targets: list[str], top_k: int, until_s: float) -> bytes:
    """The answer as it is sent; written out here, since that of a large batch would hold up other requests."""
    answers = estimates.answers(items, targets, top_k, max(0.0, until_s - time.monotonic()))
    for answer in answers:
        if isinstance(error := answer.get("error"), dict):
            answer["error"] = recorded_problem(error, f"/items/{answer['item']}")
    body = json.dumps({"estimates": answers}, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return body.encode()
