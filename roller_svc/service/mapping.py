"""Map request bodies to compiler requests, and operations to response bodies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any
from urllib.parse import quote

from fastapi.exceptions import RequestValidationError

from roller_svc import hardware
from roller_svc.client.schemas import CompileRequest, EstimateRequest, ProgramModel
from roller_svc.compiler.estimates.batch import Item
from roller_svc.compiler.request import read_request
from roller_svc.errors import ArgumentError
from roller_svc.farm.build import BINARY, METADATA, SOURCE
from roller_svc.farm.models import summarize_request
from roller_svc.farm.operations import Operation
from roller_svc.farm.store import Json
from roller_svc.ir.options import EstimateOptions, options_of
from roller_svc.ir.report import BuildRequest
from roller_svc.service.disassembly import kinds_of
from roller_svc.service.problems import problem_from_record

INPUT_OPTIONS = ("donate", "constants")  # of estimates: names of inputs
LANGUAGE = "language"  # a field of kernels' facts, which models lack


def build_request_from_body(body: CompileRequest) -> BuildRequest:
    """Return a request whose schedule is checked where its key is computed, in a process with a time limit."""
    device: dict[str, Any] = {"target": body.target} if body.hardware is None else {"hardware": body.hardware}
    return read_request(body.expression, inputs_from_body(body), outputs=body.outputs, **body.options.model_dump(), **device)


def items_from_body(body: EstimateRequest) -> list[Item]:
    """Return the items of a request, each with the donated and the constant inputs that it has.

    Raises ArgumentError for such an input that no item has.
    """
    options = body.model_dump(include=set(options_of(EstimateOptions)))
    inputs = {name for item in body.items for name in item.inputs}
    for option in INPUT_OPTIONS:
        if unknown := [name for name in options[option] if name not in inputs]:
            raise ArgumentError(f"{option}: no item has an input {unknown[0]!r}", code="invalid-option")
    return [
        Item(
            item.expression,
            inputs_from_body(item),
            item.outputs,
            options | {option: [name for name in options[option] if name in item.inputs] for option in INPUT_OPTIONS},
        )
        for item in body.items
    ]


def inputs_from_body(body: ProgramModel) -> dict[str, object]:
    return {name: (kind.dtype, kind.shape) for name, kind in body.inputs.items()}


def check_devices_differ(targets: Sequence[str], *where: str | int) -> None:
    """Raise RequestValidationError if a target is there twice, by one name or by two. An unknown one has its own error later.

    `where` is the place of the request in the body.
    """
    names: dict[str, str] = {}
    for name in targets:
        meanings = hardware.find_meanings(name)
        meant = meanings[0] if len(meanings) == 1 else name
        if meant not in names:
            names[meant] = name
            continue
        reason = f"got {name!r} twice" if names[meant] == name else f"{names[meant]!r} and {name!r} are both {meant}"
        fault = {"type": "not_distinct", "loc": ("body", *where, "targets"), "msg": f"expected each target once: {reason}"}
        raise RequestValidationError([fault])


def operation_json(operation: Operation) -> Json:
    """Encode an operation (AIP-151): `response` or `error` once it is done, neither before."""
    metadata: Json = {
        "stage": operation.state.value,
        "cache": operation.cache.value,
        "create_time": operation.create_time,
        "action": operation.action,
        "attempt": operation.attempt,
    }
    details = {
        "queue": operation.queue or None,
        "worker": operation.worker,
        "queue_position": operation.queue_position,
        "start_time": operation.start_time,
        "end_time": operation.end_time,
    }
    metadata |= {name: value for name, value in details.items() if value is not None}
    if operation.is_unserved:
        metadata["waiting_for"] = operation.queue  # no worker takes from it
    response: Json = {
        "name": f"operations/{operation.id}",
        "done": operation.done,
        "metadata": metadata,
        "request": summarize_request(operation),
    }
    if operation.facts is not None:
        is_model = LANGUAGE not in operation.facts
        response["response"] = model_response(operation.facts) if is_model else kernel_response(operation.facts)
    if operation.error is not None:
        response["error"] = problem_from_record(operation.error)
    return response


def model_response(facts: Json) -> Json:
    """Replace the digests of a model's files by links to their blobs."""
    files = facts["files"]
    assert isinstance(files, dict)
    fields = {key: value for key, value in facts.items() if key != "files"}
    return fields | {"links": {kind: f"/v1/blobs/sha256:{digest}" for kind, digest in files.items()}}


def kernel_response(facts: Json) -> Json:
    """Replace the file names in a kernel's facts by links."""
    base = f"/v1/kernels/{quote(str(facts['digest']), safe=':')}"
    kinds = [SOURCE, BINARY, METADATA, *kinds_of(str(facts[LANGUAGE])), "bundle"]
    fields = {key: value for key, value in facts.items() if key != "files"}
    return fields | {"links": {kind: f"{base}/{kind}" for kind in kinds}}
