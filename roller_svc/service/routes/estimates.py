"""/v1/estimates: synchronous estimates of many programs on many devices."""

from __future__ import annotations

import json
from collections.abc import Iterable

from fastapi import APIRouter, Request, Response

from roller_svc import hardware
from roller_svc.client.schemas import EstimateRequest, EstimateResponse
from roller_svc.compiler.estimates.batch import ItemResult
from roller_svc.compiler.estimates.worker import ERROR_PREFIX, Deadline, compact_json
from roller_svc.compiler.request import read_top_k, validate_hardware
from roller_svc.errors import ArgumentError
from roller_svc.farm.api_keys import Scope
from roller_svc.service.access import principal_of, requires
from roller_svc.service.mapping import check_devices_differ, items_from_body
from roller_svc.service.problems import problem_from_record
from roller_svc.service.responses import CLIENT_GONE
from roller_svc.service.state import needs_place, state_of
from roller_svc.settings import Resource

router = APIRouter(prefix="/v1", tags=["estimates"])

PLANS_PER_ITEM = 10  # of the largest request, on average


@router.post("/estimates", response_model=EstimateResponse, dependencies=[requires(Scope.READ), needs_place(Resource.ESTIMATES)])
async def estimates(body: EstimateRequest, request: Request) -> Response:
    """Estimate every item on every target, in that order. A rejected one has `error` in place of `candidates`.

    The device of `hardware` is the last. `donate` and `constants` apply to the items that have these inputs.
    """
    state = state_of(request)
    spec = validate_hardware(body.hardware)
    names = hardware.expand_targets(body.targets or ())
    targets = [*names, *([] if spec is None else [spec])]
    count = len(body.items) * len(targets)
    if count > state.settings.max_items:
        raise ArgumentError(f"too many estimates: the limit is {state.settings.max_items}, got {count}", code="too-many-items")
    check_devices_differ([*names, *([] if spec is None else [spec.id])])
    top_k = read_top_k(body.top_k)
    max_plans = PLANS_PER_ITEM * state.settings.max_items
    if count * top_k > max_plans:
        raise ArgumentError(f"too many plans: the limit is {max_plans}, got {count} estimates of {top_k}", code="too-many-items")
    items = items_from_body(body)
    deadline = Deadline(state.settings.estimates_timeout_s, principal_of(request).client)
    content = await state.estimate(
        lambda: _content(state.estimate_cache.encoded_estimates(items, targets, top_k, deadline)),
        count * top_k,
        deadline,
        request,
    )
    if content is None:
        return Response(status_code=CLIENT_GONE)
    return Response(content, media_type="application/json")


def _content(results: Iterable[ItemResult]) -> bytes:
    """Encode the response from the cached JSON of the results."""
    return b'{"estimates":[' + b",".join(_entry(result) for result in results) + b"]}"


def _entry(result: ItemResult) -> bytes:
    content = result.result
    if content.startswith(ERROR_PREFIX):
        problem = problem_from_record(json.loads(content)["error"], f"/items/{result.item}")
        content = compact_json({"error": problem})
    return compact_json({"item": result.item, "target": result.target})[:-1] + b"," + content[1:]
