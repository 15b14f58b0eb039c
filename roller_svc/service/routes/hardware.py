"""/v1/hardware: the known devices and their compilers."""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response

from roller_svc import hardware
from roller_svc.client.schemas import ValidateHardwareRequest, ValidHardware
from roller_svc.compiler.serialize import device_json
from roller_svc.errors import SpecError
from roller_svc.farm.api_keys import Scope
from roller_svc.hardware import SpecFault
from roller_svc.service import problems
from roller_svc.service.access import requires
from roller_svc.service.state import state_of

router = APIRouter(prefix="/v1", tags=["hardware"])

MAX_FAULTS = 100  # in one response


@router.get("/hardware", dependencies=[requires(Scope.READ)])
def devices() -> dict[str, Any]:
    """List all devices."""
    return {"hardware": [device_json(spec) for spec in hardware.all_specs()]}


@router.get("/hardware/{device_id}", dependencies=[requires(Scope.READ)])
def device(device_id: str) -> dict[str, Any]:
    """Return a device's full spec, which may be edited and sent as `hardware` of a request."""
    return dict(hardware.to_mapping(hardware.load(device_id)))


@router.post("/hardware:validate", response_model=ValidHardware, dependencies=[requires(Scope.READ)])
async def validate_hardware(body: ValidateHardwareRequest, request: Request) -> Response:
    """Return a spec, given as JSON or as YAML text, in its normal form; 422 with every fault if it has any."""
    spec, faults = await state_of(request).run(lambda: hardware.find_faults(body.hardware))
    if spec is not None:
        return JSONResponse({"hardware": hardware.to_mapping(spec)})
    is_text = isinstance(body.hardware, str)
    items = [_item(fault, is_text=is_text) for fault in faults[:MAX_FAULTS]]
    if len(faults) > MAX_FAULTS:
        items.append({"message": f"… {len(faults) - MAX_FAULTS:,} more"})
    detail = f"the spec has {len(faults)} faults" if len(faults) > 1 else str(items[0]["message"])
    return problems.response(problems.problem(422, SpecError.default_code, detail, items))


def _item(fault: SpecFault, *, is_text: bool) -> dict[str, object]:
    """Encode a fault: with a pointer into JSON, or with a position in YAML text."""
    if not is_text:
        return {"pointer": problems.json_pointer("hardware", *fault.path), "message": fault.message}
    where = ".".join(fault.path)
    message = f"{where}: {fault.message}" if where else fault.message
    position = {"line": fault.line, "column": fault.column} if fault.line is not None else {}
    return {"pointer": "/hardware", "message": message, **position}
