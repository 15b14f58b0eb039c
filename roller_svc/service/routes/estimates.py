"""/v1/estimates: many programs on many devices, answered at once."""

from __future__ import annotations

import json
from collections.abc import Iterable

from fastapi import APIRouter, Request, Response

from roller_svc.client.schemas import EstimateBody, EstimatesAnswer, Problem
from roller_svc.compiler.estimates.batch import Answer
from roller_svc.compiler.estimates.worker import ERROR_START, Patience, compact_json
from roller_svc.compiler.request import checked_top_k
from roller_svc.errors import ArgumentError
from roller_svc.service.mapping import item_of
from roller_svc.service.problems import recorded_problem
from roller_svc.service.state import state_of

router = APIRouter(prefix="/v1", tags=["estimates"])

PLANS_EACH = 10  # that the largest request may ask for
CLIENT_GONE = 499  # as nginx logs it; nobody reads the answer


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
    patience = Patience(state.settings.estimates_timeout_s)
    content = await state.estimate(
        lambda: _content(state.estimates.encoded_answers(items, body.targets, top_k, patience)),
        count * top_k, patience, request,
    )  # fmt: skip
    if content is None:
        return Response(status_code=CLIENT_GONE)
    return Response(content, media_type="application/json")


def _content(answers: Iterable[Answer]) -> bytes:
    """The answer as it is sent, outcomes as they are remembered."""
    return b'{"estimates":[' + b",".join(_entry(answer) for answer in answers) + b"]}"


def _entry(answer: Answer) -> bytes:
    outcome = answer.outcome
    if outcome.startswith(ERROR_START):
        problem = recorded_problem(json.loads(outcome)["error"], f"/items/{answer.item}")
        outcome = compact_json({"error": problem})
    return compact_json({"item": answer.item, "target": answer.target})[:-1] + b"," + outcome[1:]
