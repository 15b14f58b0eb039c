"""Liveness, readiness and version of the service."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request

from roller_svc.compiler.action import SCHEMA, generator_digest, library_versions, toolchain_versions
from roller_svc.farm.api_keys import Scope
from roller_svc.service.access import requires
from roller_svc.service.state import state_of
from roller_svc.version import __version__

router = APIRouter(tags=["health"])


@router.get("/healthz")
async def alive() -> dict[str, str]:
    """Respond while the process is alive."""
    return {"status": "ok"}


@router.get("/readyz")
async def ready(request: Request) -> dict[str, str]:
    """Respond with 503 if the store is not writable."""
    state = state_of(request)
    await state.run(state.store.check_writable)
    return {"status": "ready"}


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
