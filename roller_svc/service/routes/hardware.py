"""/v1/hardware: the known devices and their compilers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from roller_svc import hardware
from roller_svc.client.schemas import Problem
from roller_svc.compiler.serialize import device_json

router = APIRouter(prefix="/v1", tags=["hardware"])


@router.get("/hardware")
def devices() -> dict[str, Any]:
    """List all devices."""
    return {"hardware": [device_json(spec) for spec in hardware.all_specs()]}


@router.get("/hardware/{device_id}", responses={404: {"model": Problem}})
def device(device_id: str) -> dict[str, Any]:
    """Return a device's full spec, which may be edited and sent as `hardware` of a request."""
    return dict(hardware.to_mapping(hardware.load(device_id)))
