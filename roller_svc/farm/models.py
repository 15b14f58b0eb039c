"""Requests to build models: what identifies them, their action digest, and their records."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache

from roller_svc import hardware
from roller_svc.compiler.action import (
    MODEL,
    SCHEMA,
    ActionKey,
    compiler_content,
    generator_content,
    generator_digest,
    hash_parts,
    library_versions,
    spec_content,
    toolchain_versions,
)
from roller_svc.compiler.request import read_request, request_json
from roller_svc.errors import ArgumentError, InputError
from roller_svc.farm.operations import Operation
from roller_svc.farm.store import Json
from roller_svc.graph.devices.labels import find_device
from roller_svc.graph.python_ops import PREFIX, describe_python_ops, find_python_op
from roller_svc.hardware.catalog import LOCAL
from roller_svc.ir.hardware import HardwareSpec, TargetKind
from roller_svc.ir.report import BuildRequest

ONNX, JSON_GRAPH = "onnx", "graph"  # formats of models
RECORD_FIELD = "model"  # of the record of a request that has one
MIXED_OPTIONS = ("across", "order")  # that decide how the steps of a model over several devices run
TEXT_FIELD = "text"  # of the record of a kernel: its program in canonical form


@dataclass(frozen=True, slots=True)
class ModelRequest:
    """A request to build the model in a blob of the store."""

    blob: str  # sha256 of the file, in hex
    format: str
    target: str
    options: Json  # of compile_model
    content: bytes | None = field(default=None, compare=False, repr=False)  # of a blob that need not be in the store


Request = BuildRequest | ModelRequest


def named_devices(request: ModelRequest, target: HardwareSpec) -> dict[str, HardwareSpec]:
    """Return the devices, other than the target, that the labels of the request name, by id.

    Raises InputError for an unknown device, the CPU of whoever builds the model, and a function that is not registered.
    """
    specs: dict[str, HardwareSpec] = {}
    labels = request.options.get("devices")
    for label in dict.fromkeys(labels.values() if isinstance(labels, dict) else ()):
        if label.startswith(PREFIX):
            find_python_op(label.removeprefix(PREFIX))
            continue
        spec = find_device(label, target)
        if spec.id == LOCAL and target.id != LOCAL:
            raise ArgumentError(
                f"devices: {label!r} is the CPU of the worker that builds the model",
                code="unknown-device",
                hint="name the id of a CPU",
            )
        specs |= {spec.id: spec} if spec.id != target.id else {}
    return specs


def leave_out_unused(options: Json, family: TargetKind) -> Json:
    """Return the options without those of several devices, where the model has one: equal models then have one digest.

    A function of Python is a device of its own, which a file may name. A serial order also chooses the plan, if nothing does.
    A call of a model for a CPU is one submission, so that `sink` refuses nothing; a plan of a GPU may have more.
    """
    if options.get("devices") or describe_python_ops():
        return options
    unused = [name for name in MIXED_OPTIONS if name != "order" or options.get("plan", "auto") != "auto"]
    unused += ["sink"] if family is TargetKind.CPU else []
    return {name: value for name, value in options.items() if name not in unused}


def check_named(request: ModelRequest, devices: Iterable[str]) -> None:
    """Raise ArgumentError if labels in the model's file name a device that the request, and so its digest, does not."""
    target = hardware.load(request.target)
    known = {target.id, *named_devices(request, target)}
    for device in devices:
        if not device.startswith(PREFIX) and device not in known:
            raise ArgumentError(
                f"labels in the model's file name {device}: expected it in options.devices too",
                code="invalid-option",
                hint=f'"devices": {{NODE: "{device}"}}',
            )


def request_record(request: Request, text: str | None = None) -> Json:
    """Encode a request for the record of its operation, with the canonical text of a kernel's program if it is known."""
    if isinstance(request, BuildRequest):
        return request_json(request) | ({} if text is None else {TEXT_FIELD: text})
    model = {
        "blob": request.blob,
        "format": request.format,
        "target": request.target,
        "options": request.options,
    }
    return {RECORD_FIELD: model}


def summarize_request(operation: Operation) -> Json:
    """Return what an operation was asked for: the canonical text of its program, or the blob of the model, and the device.

    Clients share an operation, so that none sees the text that another one wrote.
    """
    record, facts = operation.request, operation.facts or {}
    model = record.get(RECORD_FIELD)
    if isinstance(model, dict):
        return {"model": f"sha256:{model.get('blob')}", "target": model.get("target")}
    spec = record.get("hardware")
    text = facts.get("expression", record.get(TEXT_FIELD))
    return {"expression": text, "target": spec.get("id") if isinstance(spec, dict) else record.get("target")}


def parse_record(record: Mapping[str, object]) -> Request:
    """Decode a request from its record. Raises InputError, also for fields of another version."""
    model = record.get(RECORD_FIELD)
    try:
        if model is None:
            return read_request(**{name: value for name, value in record.items() if name != TEXT_FIELD})
        if not isinstance(model, dict):
            raise TypeError("its model is not an object")
        return ModelRequest(**model)
    except TypeError as failure:
        raise InputError(f"this version cannot read the request: {failure}", code="unreadable-record") from failure


def model_digest(request: ModelRequest, spec: HardwareSpec) -> str:
    """Return the digest of the action: a hash of everything that decides the result of the build."""
    parts = {
        "schema": SCHEMA,
        "model": [request.format, request.blob],
        "hardware": spec_content(spec),
        "options": request.options,
        "generator": generator_digest(),
        "toolchain": toolchain_versions(spec.family),
        "libraries": library_versions() | reader_versions(),
        **_others_content(request, spec),
    }
    content = json.dumps(parts, sort_keys=True, separators=(",", ":"))
    return f"sha256:{hashlib.sha256(content.encode()).hexdigest()}"


def model_part_contents(request: ModelRequest, spec: HardwareSpec) -> dict[str, object]:
    """Return the contents of the parts of the action's key."""
    return {
        "expression": {"format": request.format, "blob": request.blob},
        "spec": spec_content(spec) | _others_content(request, spec),
        "options": request.options,
        "compiler": compiler_content(spec.family, reader_versions()),
        "generator": generator_content(),
    }


def _others_content(request: ModelRequest, target: HardwareSpec) -> dict[str, object]:
    """Return the other devices with their compilers, and the signatures of functions of Python; {} without any."""
    others = {spec.id: [spec_content(spec), toolchain_versions(spec.family)] for spec in named_devices(request, target).values()}
    functions = describe_python_ops()
    return ({"devices": others} if others else {}) | ({"python": functions} if functions else {})


def model_key(request: ModelRequest, spec: HardwareSpec) -> ActionKey:
    """Return the key of the action."""
    return ActionKey(model_digest(request, spec), MODEL, hash_parts(model_part_contents(request, spec)))


@cache
def reader_versions() -> dict[str, str]:
    """Return the versions of the libraries that read models, for the life of the process."""
    try:
        return {"onnx": importlib.metadata.version("onnx")}
    except importlib.metadata.PackageNotFoundError:  # ONNX models are rejected
        return {}
