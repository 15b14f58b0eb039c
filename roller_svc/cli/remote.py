"""Compile kernels and models on a service (--server)."""

from __future__ import annotations

import argparse
import io
import json
import re
import tempfile
import zipfile
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from roller_svc import api, hardware
from roller_svc.cli import options as common
from roller_svc.client.client import Client
from roller_svc.client.schemas import CompileRequest, GraphOptions
from roller_svc.errors import ArgumentError, BuildServiceError
from roller_svc.ir.options import KernelOptions
from roller_svc.settings import settings

B = TypeVar("B", bound=BaseModel)
MAX_FILE_BYTES = 1 << 30
_NAME = r"[A-Za-z0-9_][A-Za-z0-9_.:-]*"  # neither hidden nor a parent
_PLAIN_PATH = re.compile(rf"(?:{_NAME}/){{0,3}}{_NAME}")


def open_client(server: str) -> Client:
    return Client(server, api_key=settings().api_key.get_secret_value())


def kernel(options: argparse.Namespace, server: str) -> api.Kernel:
    """Compile a kernel on the service and load it in this process."""
    with open_client(server) as service:
        request = compile_request(options)
        queue = service.submit(request).metadata.waiting_for
        if queue is not None:
            hint = "; --select model needs no device" if request.options.select == "measure" else ""
            common.print_line(f"waiting for a worker: none takes from {queue} of {server} now{hint}")
        operation = service.compile(request)
        if operation.response is None:
            raise BuildServiceError(f"unexpected response from {server}: no kernel", code="bad-answer")
        bundle = service.file(operation.response.links["bundle"])
    with tempfile.TemporaryDirectory(prefix="roller-") as folder:
        unpack(bundle, Path(folder))
        return api.load(folder)


def explain_action(options: argparse.Namespace, server: str) -> dict[str, Any]:
    """Return why the service's store has or lacks the result of a request."""
    with open_client(server) as service:
        return service.explain(compile_request(options)).model_dump()


def model_bundle(options: argparse.Namespace, server: str, graph: GraphOptions) -> bytes:
    """Compile a model on the service, and return its bundle."""
    with open_client(server) as service:
        operation = service.compile_model(model_source(Path(options.file)), options.target, graph)
        if operation.response is None:
            raise BuildServiceError(f"unexpected response from {server}: no model", code="bad-answer")
        return service.file(operation.response.links["bundle"])


def model_estimate(options: argparse.Namespace, server: str, graph: GraphOptions) -> dict[str, Any]:
    """Return the service's estimate of a model."""
    with open_client(server) as service:
        return service.estimate_model(model_source(Path(options.file)), options.target, graph).model_dump()


def model_source(path: Path) -> Path | dict[str, Any]:
    """Return the path of an ONNX file, or the JSON graph in a file."""
    if path.is_dir():
        raise ArgumentError("a service takes files: an ONNX file or a JSON graph in one file", code="invalid-option")
    if path.suffix != ".json":
        return path
    try:
        graph = json.loads(common.read_text_file(str(path)))
    except ValueError as failure:
        raise ArgumentError(f"{path} is not JSON: {failure}", code="invalid-model") from failure
    if not isinstance(graph, dict):
        raise ArgumentError(f"{path} is not a JSON graph: expected an object", code="invalid-model")
    return graph


def unpack(bundle: bytes, folder: Path) -> None:
    """Extract a bundle into a directory; accept only plain relative paths and bounded sizes."""
    try:
        with zipfile.ZipFile(io.BytesIO(bundle)) as archive:
            for entry in archive.infolist():
                if not _PLAIN_PATH.fullmatch(entry.filename) or entry.file_size > MAX_FILE_BYTES:
                    raise BuildServiceError(
                        f"unexpected file in the service's bundle: expected a plain name and at most {MAX_FILE_BYTES} "
                        f"bytes, got {entry.filename!r} with {entry.file_size}",
                        code="bad-answer",
                    )
                path = folder / entry.filename
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_bytes(archive.read(entry))
    except zipfile.BadZipFile as failure:
        raise BuildServiceError("the service's bundle is not a zip archive", code="bad-answer") from failure


def program_fields(options: argparse.Namespace) -> dict[str, Any]:
    """Return the program fields of a request body."""
    inputs = common.parse_inputs(options)
    return {
        "expression": common.read_expression(options),
        "inputs": {name: {"dtype": dtype, "shape": shape} for name, (dtype, shape) in inputs.items()},
        "outputs": options.output or None,
    }


def validate_body(model: type[B], fields: dict[str, Any]) -> B:
    """Validate a request body. Raises ArgumentError with the service's message."""
    try:
        return model.model_validate(fields)
    except ValidationError as failure:
        first = failure.errors(include_url=False, include_input=False)[0]
        field = ".".join(str(part) for part in first["loc"])
        raise ArgumentError(f"{field}: {first['msg']}", code="invalid-body") from failure


def compile_request(options: argparse.Namespace) -> CompileRequest:
    # The service knows the specs of its targets; send a spec from a file along.
    device = common.parse_device(options)
    if "hardware" in device:
        device = {"hardware": hardware.to_mapping(device["hardware"])}
    choice = {"options": common.option_values(options, KernelOptions)}
    return validate_body(CompileRequest, program_fields(options) | device | choice)
