"""/v1/schedules:check: whether a schedule by hand is legal."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request

from roller_svc.client.schemas import CheckedSchedule, CheckScheduleRequest
from roller_svc.compiler.parsing import parse_once
from roller_svc.compiler.request import build_request, resolve_spec
from roller_svc.compiler.scheduled import check_device, schedule_for_device
from roller_svc.errors import ScheduleError
from roller_svc.farm.api_keys import Scope
from roller_svc.ir.schedule_text import render
from roller_svc.schedule.build_tree import build_tree
from roller_svc.schedule.check_steps import Problem
from roller_svc.service.access import requires
from roller_svc.service.state import state_of

router = APIRouter(prefix="/v1", tags=["schedules"])


@router.post("/schedules:check", response_model=CheckedSchedule, dependencies=[requires(Scope.READ)])
async def check_schedule(body: CheckScheduleRequest, request: Request) -> Any:
    """Return the first step that breaks a rule, with a step that would do; the tree of a legal schedule.

    With a `target`, or `hardware`, also what that device cannot run.
    """
    return await state_of(request).run(lambda: _check(body))


def _check(body: CheckScheduleRequest) -> dict[str, object]:
    fields = body.model_dump()
    device = {name: fields[name] for name in ("target", "hardware") if fields[name] is not None}
    parsed = build_request(fields["expression"], fields["inputs"], outputs=fields["outputs"], **device)
    spec = resolve_spec(parsed) if device else None
    if spec is not None:
        check_device(spec)
    program = parse_once(parsed.expression, parsed.inputs, parsed.outputs)[0]
    try:
        schedule = schedule_for_device(program, body.schedule, spec)
    except ScheduleError as error:
        return {"problems": [asdict(Problem.from_error(error))], "tree": None}
    return {"problems": [], "tree": render(build_tree(schedule))}
