"""/v1/estimates: many programs on many devices, answered at once."""

from __future__ import annotations

import json
from collections.abc import Iterable

from fastapi import APIRouter, Request, Response

from roller_svc.client.schemas import EstimateRequest, EstimateResponse, Problem
from roller_svc.compiler.estimates.batch import ItemResult
from roller_svc.compiler.estimates.worker import ERROR_PREFIX, Deadline, compact_json
from roller_svc.compiler.request import validate_top_k
from roller_svc.errors import ArgumentError
from roller_svc.service.mapping import item_from_body
from roller_svc.service.problems import problem_from_record
from roller_svc.service.state import state_of

router = APIRouter(prefix="/v1", tags=["estimates"])

PLANS_PER_ITEM = 10  # that the largest request may ask for
CLIENT_GONE = 499  # as nginx logs it; nobody reads the answer


@router.post("/estimates", response_model=EstimateResponse, responses={422: {"model": Problem}})
async def estimates(body: EstimateRequest, request: Request) -> Response:
    """Every item on every target, in that order; one that is refused has `error` in place of `candidates`."""
    state = state_of(request)
    count = len(body.items) * len(body.targets)
    if count > state.settings.items_most:
        raise ArgumentError(
            f"{count} estimates asked for, {state.settings.items_most} are the most", code="too-many-items"
        )
    top_k = validate_top_k(body.top_k)
    max_plans = PLANS_PER_ITEM * state.settings.items_most
    if count * top_k > max_plans:
        raise ArgumentError(
            f"{count} estimates of {top_k} plans asked for, {max_plans} plans are the most", code="too-many-items"
        )
    items = [item_from_body(one, allow_tf32=body.allow_tf32) for one in body.items]
    deadline = Deadline(state.settings.estimates_timeout_s)
    content = await state.estimate(
        lambda: _content(state.estimate_cache.encoded_estimates(items, body.targets, top_k, deadline)),
        count * top_k, deadline, request,
    )  # fmt: skip
    if content is None:
        return Response(status_code=CLIENT_GONE)
    return Response(content, media_type="application/json")


def _content(results: Iterable[ItemResult]) -> bytes:
    """The answer as it is sent, outcomes as they are remembered."""
    return b'{"estimates":[' + b",".join(_entry(result) for result in results) + b"]}"


def _entry(result: ItemResult) -> bytes:
    content = result.result
    if content.startswith(ERROR_PREFIX):
        problem = problem_from_record(json.loads(content)["error"], f"/items/{result.item}")
        content = compact_json({"error": problem})
    return compact_json({"item": result.item, "target": result.target})[:-1] + b"," + content[1:]
