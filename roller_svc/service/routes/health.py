"""Liveness, readiness, metrics and version of the service."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from roller_svc.compiler.action import SCHEMA, generator_digest, library_versions, toolchain_versions
from roller_svc.farm.api_keys import Scope
from roller_svc.service.access import requires
from roller_svc.service.metrics import MEDIA_TYPE
from roller_svc.service.state import state_of
from roller_svc.version import __version__

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def alive() -> dict[str, str]:
    """Respond while the process is alive."""
    return {"status": "ok"}


@router.get("/readyz")
async def ready(request: Request) -> dict[str, str]:
    """Respond with 503 if the store is not writable or the database is away. Nothing fails without the broker."""
    state = state_of(request)
    await state.run(state.store.objects.check_writable)
    await state.run(state.farm.check_database)
    broker = await state.run(state.farm.broker_failure)
    return {"status": "ready"} if broker is None else {"status": "ready", "broker": broker}


@router.get("/metrics", response_class=Response, dependencies=[requires(Scope.READ)])
async def metrics(request: Request) -> Response:
    """Return metrics in Prometheus's text format."""
    state = state_of(request)
    content = await state.run(lambda: state.metrics.render(state.farm.read_figures()))
    return Response(content, media_type=MEDIA_TYPE)


@router.get("/v1/version", dependencies=[requires(Scope.READ)])
def version() -> dict[str, Any]:
    """Return everything, apart from the request, that determines the result of a build."""
    return {
        "version": __version__,
        "generator": generator_digest(),
        "schema": SCHEMA,
        "toolchain": toolchain_versions(),
        "libraries": library_versions(),
    }
