"""Liveness, readiness, metrics and version of the service."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from roller_svc.client.schemas import ReadyResponse
from roller_svc.compiler.action import SCHEMA, generator_digest, library_versions, toolchain_versions
from roller_svc.errors import StoreError
from roller_svc.farm.api_keys import Scope
from roller_svc.service.access import requires
from roller_svc.service.metrics import MEDIA_TYPE
from roller_svc.service.problems import RETRY_AFTER_S, problem, response
from roller_svc.service.state import state_of
from roller_svc.version import __version__

ERROR_CODES = {"database": "database-error", "store": StoreError.default_code}

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def alive() -> dict[str, str]:
    """Respond while the process is alive."""
    return {"status": "ok"}


@router.get("/readyz", response_model=ReadyResponse)
async def ready(request: Request) -> Response:
    """Respond with 503 if the store is not writable or the database is away. Nothing fails without the broker."""
    state = state_of(request)
    statuses = await state.readiness.read()
    parts = {"parts": {name: status.value for name, status in statuses.items()}}
    missing = state.readiness.missing(statuses)
    if state.is_ending:
        return response(problem(503, "shutting-down", "the service is shutting down") | parts)
    if missing:
        detail = "; ".join(f"the {name} cannot be reached ({statuses[name].value})" for name in missing)
        return response(problem(503, ERROR_CODES[missing[0]], detail) | parts, {"Retry-After": str(RETRY_AFTER_S)})
    return JSONResponse({"status": "ready"} | parts)


@router.get("/metrics", response_class=Response, dependencies=[requires(Scope.READ)])
async def metrics(request: Request) -> Response:
    """Return metrics in Prometheus's text format."""
    state = state_of(request)
    content = await state.query(
        lambda: state.metrics.render(state.farm.read_figures(), state.shares, state.store.objects.free_bytes())
    )
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
