"""/v1/hardware: the devices, and what compiles for them here."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter

from roller_svc import hardware
from roller_svc.client.schemas import Problem
from roller_svc.compiler.serialize import device_json

router = APIRouter(prefix="/v1", tags=["hardware"])


@router.get("/hardware")
def devices() -> dict[str, Any]:
    """Every device in short."""
    return {"hardware": [device_json(spec) for spec in hardware.all_specs()]}


@router.get("/hardware/{device_id}", responses={404: {"model": Problem}})
def device(device_id: str) -> dict[str, Any]:
    """The whole spec: it may be changed and sent back as `hardware` of a request."""
    return dict(hardware.to_mapping(hardware.load(device_id)))
