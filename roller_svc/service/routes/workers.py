"""/v1/workers: the processes that build, and what they have."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from roller_svc.client.schemas import Problem
from roller_svc.farm.api_keys import Scope
from roller_svc.farm.registry import Worker
from roller_svc.service.access import requires
from roller_svc.service.state import state_of

router = APIRouter(prefix="/v1", tags=["workers"])


@router.get("/workers", dependencies=[requires(Scope.READ)], responses={503: {"model": Problem}})
async def workers(request: Request) -> dict[str, Any]:
    """List the workers that are alive: their queues, host, CPU, devices and compilers."""
    state = state_of(request)
    alive = await state.query(state.farm.registry.alive)
    return {"workers": [worker_json(worker, state.farm.queue.generator) for worker in alive]}


def worker_json(worker: Worker, environment: str) -> dict[str, Any]:
    return {
        "id": worker.id,
        "queues": list(worker.queues),
        "state": "draining" if worker.is_draining else "active",
        "environment": worker.generator,
        "is_compatible": worker.generator == environment,  # only then it builds what this service queues
        "start_time": worker.start_time,
        **worker.facts,
    }
