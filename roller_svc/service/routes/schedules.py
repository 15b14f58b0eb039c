"""/v1/schedules:check: whether a schedule by hand is legal."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from roller_svc.client.schemas import CheckedSchedule, CheckScheduleRequest
from roller_svc.farm.api_keys import Scope
from roller_svc.farm.checking import ScheduleTask
from roller_svc.service.access import principal_of, requires
from roller_svc.service.state import state_of

router = APIRouter(prefix="/v1", tags=["schedules"])


@router.post("/schedules:check", response_model=CheckedSchedule, dependencies=[requires(Scope.READ)])
async def check_schedule(body: CheckScheduleRequest, request: Request) -> Any:
    """Return the first step that breaks a rule, with a step that would do; the tree of a legal schedule.

    With a `target`, or `hardware`, also what that device cannot run.
    """
    task = ScheduleTask(**body.model_dump())
    return await state_of(request).check_schedule(task, principal_of(request).client)
