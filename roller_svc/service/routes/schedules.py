"""/v1/schedules:check: whether a schedule by hand is legal."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from roller_svc.client.schemas import CheckedSchedule, CheckScheduleRequest
from roller_svc.compiler.parsing import parse_once
from roller_svc.compiler.request import build_request
from roller_svc.errors import ScheduleError
from roller_svc.farm.api_keys import Scope
from roller_svc.ir.schedule_text import render
from roller_svc.schedule.build_tree import build_tree
from roller_svc.schedule.by_hand import schedule_by_hand
from roller_svc.schedule.check_steps import Problem
from roller_svc.service.access import requires
from roller_svc.service.state import state_of

router = APIRouter(prefix="/v1", tags=["schedules"])


@router.post("/schedules:check", response_model=CheckedSchedule, dependencies=[requires(Scope.READ)])
async def check_schedule(body: CheckScheduleRequest, request: Request) -> Any:
    """Return the first step that breaks a rule, with a step that would do; the tree of a legal schedule."""
    return await state_of(request).run(lambda: _check(body))


def _check(body: CheckScheduleRequest) -> dict[str, object]:
    fields = body.model_dump()
    parsed = build_request(fields["expression"], fields["inputs"], outputs=fields["outputs"])
    program = parse_once(parsed.expression, parsed.inputs, parsed.outputs)[0]
    try:
        schedule = schedule_by_hand(program, body.schedule)
    except ScheduleError as error:
        return {"problems": [asdict(Problem.from_error(error))], "tree": None}
    return {"problems": [], "tree": render(build_tree(schedule))}
